"""Imports of DeepSpeed's modules from this package: an alias, or one line that says what to use.

import ...deepspeed.comm as dist                torch.distributed
from ...deepspeed.ops.adam import FusedAdam     MissingModule, with the line of the tables in names.py
from ...deepspeed.nothing import x              ModuleNotFoundError, as everywhere
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from zero3d.errors import ConfigError
from zero3d.ways.deepspeed.names import ALIASES, module_line

PREFIXES = (f"{__name__.rpartition('.')[0]}.", "zero3d.integrations.deepspeed.")  # the second for one release


class MissingModule(ImportError, ConfigError):
    """A module of DeepSpeed's that is not here: an ImportError, too, for programs that import it if they can."""


class Alias(Loader):
    """Puts a module that is there already into sys.modules under another name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system: the new module is replaced at once."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new module by the target."""
        sys.modules[module.__name__] = import_module(self._target)


class Modules(MetaPathFinder):
    """Is asked for the modules of this package that have no file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return an alias, or None for a name that is nobody's. Raises MissingModule for one of DeepSpeed's."""
        prefix = next((each for each in PREFIXES if fullname.startswith(each)), None)
        if prefix is None:
            return None
        name = fullname.removeprefix(prefix)
        if name in ALIASES:
            return ModuleSpec(fullname, Alias(ALIASES[name]))
        if line := module_line(name):
            raise MissingModule(f"there is no deepspeed.{name} here: {line}.", name=fullname)
        here, old = PREFIXES
        return ModuleSpec(fullname, Alias(f"{here}{name}")) if prefix == old and find_spec(f"{here}{name}") else None


def install() -> None:
    """Have the import system ask here, after everybody else."""
    if not any(isinstance(one, Modules) for one in sys.meta_path):
        sys.meta_path.append(Modules())
