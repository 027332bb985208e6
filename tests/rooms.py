"""The tests of a package of zero3d: `make test ROOM=plan`, for work on one package.

A test file belongs to the packages whose planted faults it sees (tests/mutants), and to those that it imports from, by
itself or by name in a string. Where their cases would take longer than BUDGET, the former come first, then those files
that have the largest part of their imports in the package.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import yaml

import zero3d

ROOT = Path(__file__).parents[1]
BUDGET = 240.0  # seconds of all workers: two of them are done in two minutes


def files_of(files, package):
    """Return those of `files`, a table of seconds by path, that are the package's room."""
    sees = files_of_faults(package)
    chosen, left = [], BUDGET
    for path in sorted(files, key=lambda path: (path not in sees, -share(path, package), path)):
        if (path in sees or share(path, package)) and files[path] <= left:
            left -= files[path]
            chosen.append(path)
    return chosen


def files_of_faults(package):
    """The files that the ledger of a package's faults names."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where there is one: ten times as fast
    faults = yaml.load((ROOT / "tests" / "mutants" / f"{package}.yaml").read_text(), Loader=loader)
    return {ROOT / test.partition("::")[0] for fault in faults for test in fault["tests"]}


def packages():
    """Those of the library and of the tools by their names, the ways in together, and the setup of runs."""
    source = Path(zero3d.__file__).parent
    names = (".".join(path.relative_to(source).parts[:-1]) for path in source.rglob("*/__init__.py"))
    return sorted({package for name in names if (package := package_of(f"zero3d.{name}"))})


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
    parts = zero3d._HOME.get(rest, rest).split(".")
    if parts[0] == "tools":
        return parts[1] if len(parts) > 1 else None
    if parts[0] == "integrations":  # the old name
        return "ways"
    return "setup" if parts[:2] == ["train", "setup"] else parts[0]
