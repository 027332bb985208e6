"""deepspeed.runtime for programs: none of its modules is here, and importing one says what to use."""

from __future__ import annotations

from typing import Any

from zero3d.integrations.deepspeed.names import RUNTIME, refused

__path__: list[str] = []  # a package without files: imports.py is asked for DeepSpeed's modules in it


def __getattr__(name: str) -> Any:
    return refused("runtime", RUNTIME, name)
