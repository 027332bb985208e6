"""deepspeed.runtime for programs: none of its modules is here, and importing one says what to use."""

from __future__ import annotations

from zero3d.ways.deepspeed.names import refusing

__path__: list[str] = []  # a package without files: imports.py is asked for DeepSpeed's modules in it


__getattr__ = refusing("runtime")
