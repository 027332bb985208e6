"""deepspeed.ops for programs: deepspeed.ops.adam alone; the others say what to use."""

from __future__ import annotations

from zero3d.ways.deepspeed import adam as adam
from zero3d.ways.deepspeed.names import refusing

__path__: list[str] = []  # a package without files: imports.py is asked for DeepSpeed's modules in it


__getattr__ = refusing("ops")
