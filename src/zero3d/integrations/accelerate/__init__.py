"""Accelerate's loops on our engine: `Accelerator` in place of `accelerate.Accelerator`.

accelerator.py  prepare, backward, clipping, states: a subclass
optimizer.py    the prepared optimizer, whose step is the engine's
"""

from zero3d.integrations.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
