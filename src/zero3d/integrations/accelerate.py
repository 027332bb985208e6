"""Stands for `zero3d.ways.huggingface.accelerate`, for one release, by the name that it had."""

from zero3d.ways.huggingface.accelerate import Accelerator as Accelerator
