"""Ways in from other trainers, each of which becomes the same engine and the same configuration. Ways import no tools.

deepspeed     DeepSpeed's JSON, `initialize` and the names that programs import from it
huggingface   Trainer and Accelerate
lightning     a strategy of Lightning's
axolotl       a plugin of Axolotl's, which is a Trainer's way in
verl          an engine for reinforcement learning with verl
vllm          weights for a server
everywhere    a stream of weights on every rank, each of which feeds a server
checkpoints   other trainers' checkpoints, read without calling what they name
"""
