"""Accelerate's loops on our engine: `Accelerator` in place of `accelerate.Accelerator`.

accelerator.py  prepare, backward, clipping, states: a subclass
gradient_reads.py  reads of `p.grad` between two backwards of a step
keywords.py     what is passed on to the engine, checked at once
others.py       folders written without zero3d: DeepSpeed's, FSDP's, torch's own
optimizer.py    prepared optimizers: one whose step is the engine's, and one without a model
"""

from zero3d.ways.huggingface.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
