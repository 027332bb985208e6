"""Ways in from other trainers, each of which becomes the same engine and the same configuration.

deepspeed   DeepSpeed's JSON
"""
