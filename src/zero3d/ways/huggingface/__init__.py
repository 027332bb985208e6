"""Ways in from Hugging Face's trainers. It imports nothing: importing `transformers` here changes transformers.

transformers   Trainer with zero3d's engine
accelerate     Accelerator, likewise
"""
