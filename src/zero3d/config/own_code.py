"""A user's own code, named as module:name in a configuration: imported, and its errors in one line. No torch."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Any

from zero3d.errors import ConfigError, short

LONGEST = 300  # characters of an error of somebody else's code


def imported(key: str, path: str) -> Any:
    """Import what `path` names as module:name, for `key`; the current directory is searched, too.

    Raises ConfigError.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{key} {short(path)!r} names no object of a module: type module:name.")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        missing = isinstance(error, (ImportError, AttributeError, ValueError))
        why = " ".join(str(error).split())[:LONGEST] if missing else in_one_line(error)
        raise ConfigError(f"{key} {short(path)!r} cannot be imported from {directory}: {why}") from error


def check_module(key: str, path: str) -> None:
    """Refuse what `path` names as module:name where there is no such package; imports nothing. Raises ConfigError."""
    top, directory = path.partition(":")[0].partition(".")[0], str(Path.cwd())
    if top and top not in sys.modules and not (find_spec(top) or PathFinder.find_spec(top, [directory])):
        raise ConfigError(f"{key} {short(path)!r} cannot be imported from {directory}: No module named {short(top)!r}")


def in_one_line(error: BaseException) -> str:
    """Return an error of somebody else's code in one line, with the place where it was raised."""
    frames = extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""  # else in the call itself
    text = " ".join(str(error).split())[:LONGEST]
    return f"{type(error).__name__}{': ' * bool(text)}{text}{place}"
