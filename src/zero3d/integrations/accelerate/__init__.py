"""Accelerate's loops on our engine: `Accelerator` in place of `accelerate.Accelerator`.

accelerator.py  prepare, backward, clipping, states: a subclass
optimizer.py    prepared optimizers: one whose step is the engine's, and one without a model
"""

from zero3d.integrations.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
