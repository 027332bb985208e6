"""Accelerate's loops on our engine: `Accelerator` in place of `accelerate.Accelerator`.

accelerator.py  prepare, backward, clipping, states: a subclass
generation.py   generate: whole weights where they fit
gradient_reads.py  reads of `p.grad` between two backwards of a step
compiled.py     models that torch.compile has wrapped already
keywords.py     what is passed on to the engine, checked at once
local_sgd.py    LocalSGD and uneven inputs: all steps are ordinary ones
meeting.py      calls that all ranks make: who makes another is told
others.py       folders written without zero3d: DeepSpeed's, FSDP's, torch's own
optimizer.py    prepared optimizers: one whose step is the engine's, and one without a model
prompts.py      PEFT's prompts, which are computed for a save
"""

from zero3d.ways.huggingface.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
