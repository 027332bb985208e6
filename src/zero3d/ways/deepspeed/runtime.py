"""deepspeed.runtime for programs: runtime.utils has see_memory_usage, and importing another says what to use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zero3d.ways.deepspeed.names import refusing

__path__: list[str] = []  # a package without files: imports.py is asked for DeepSpeed's modules in it


_refused = refusing("runtime")


def __getattr__(name: str) -> Any:
    if name == "utils":
        return import_module("zero3d.ways.deepspeed.memory_usage")
    return _refused(name)
