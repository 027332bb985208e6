"""The tests of a package of zero3d: `make test ROOM=plan`, for work on one package.

A test file belongs to the packages that it imports from, by itself or by name in a string. Where their cases would
take longer than BUDGET, those files come first that have the largest part of their imports in the package.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from recorded import seconds_of

import zero3d

ROOT = Path(__file__).parents[1]
BUDGET = 240.0  # seconds of all workers: two of them are done in two minutes


def of_room(items, package):
    """Return the names of the cases to run. `items` are pytest's, without those that are too long for `make test`."""
    if not (Path(zero3d.__file__).parent / package).is_dir():
        raise LookupError(f"zero3d has no package {package!r}: {', '.join(packages())}")
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item.nodeid)
    chosen, left = set(), BUDGET
    for path in sorted(files, key=lambda path: (-share(path, package), path)):
        cost = sum(map(seconds_of, files[path]))
        if share(path, package) and cost <= left:
            left -= cost
            chosen.update(files[path])
    return chosen


def packages():
    return sorted(path.parent.name for path in Path(zero3d.__file__).parent.glob("*/__init__.py"))


def share(path, package):
    """The part of a file's imports from zero3d that are from this package."""
    found = imports(path)
    return found[package] / max(1, found.total())


@cache
def imports(path):
    """How often a file imports from each package, or names a module of it in a string."""
    found = Counter()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        found.update(package for name in names if (package := package_of(name)))
    return found


def package_of(name):
    """The package that a dotted name is from, "engine" for zero3d.Engine; None for others'."""
    first, _, rest = name.partition(".")
    if first != "zero3d" or not rest:
        return None
    return zero3d._HOME.get(rest, rest).partition(".")[0]
