"""Modules of examples/*_demo, imported as their own commands do."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

EXAMPLES = Path(__file__).parents[1] / "examples"


@contextmanager
def modules_of(*folders):
    """Import the modules of folders of examples/, the first folder's before those of the same name in others."""
    places = [EXAMPLES / folder for folder in folders]
    names = sorted({path.stem for place in places for path in place.glob("*.py")})
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        with mock.patch.object(sys, "path", [*map(str, places), *sys.path]):
            yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)
