"""Stands for `zero3d.ways.huggingface.transformers`, for one release, by the name that it had."""

from zero3d.ways.huggingface.transformers import Trainer as Trainer, patch as patch
