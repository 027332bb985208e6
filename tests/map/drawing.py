"""Who imports whom, drawn from the source: `make drawing` writes it into docs/imports.md."""

import re
from pathlib import Path
from textwrap import wrap

from source_facts import PARTS, ROOT, imports, modules, package_of, part_of

PAGE = ROOT / "docs" / "imports.md"
MARKED = re.compile(r"(<!-- drawing -->\n```\n).*?(```\n<!-- end of the drawing -->)", re.DOTALL)
WIDTH = 100


def packages():
    """{package: packages that its files import}, inside functions and for types, too."""
    found = {}
    for name, path in modules():
        if name:
            targets = {package_of(target) for target in imports(path) if target}
            found.setdefault(package_of(name), set()).update(targets - {package_of(name)})
    return found


def arrows():
    """(part, part that it imports)."""
    between = {(part_of(package), part_of(target)) for package, targets in packages().items() for target in targets}
    return {(part, target) for part, target in between if part != target}


def drawing():
    """The three parts from above with their arrows, and each package with what it imports."""
    lines, between, found = [], arrows(), packages()
    for part in reversed(PARTS):
        inside = sorted(package.removeprefix(f"{part}.") for package in found if part_of(package) == part != package)
        lines += listed(f"{part:<9}", inside)
        if below := [each for each in reversed(PARTS) if (part, each) in between]:
            lines += ["   |", f"   v  import {' and '.join(below)}"]
    for part in reversed(PARTS):
        lines.append("")
        for package in sorted(package for package in found if part_of(package) == part != package):
            lines += listed(f"{package:<18}-> ", sorted(found[package]) or ["nothing"])
    return "".join(f"{line}\n" for line in lines)


def listed(head, names):
    first, *others = wrap("  ".join(names), WIDTH - len(head)) or [""]
    return [head + first, *(" " * len(head) + line for line in others)]


def written(text):
    """The page with the drawing of today."""
    return MARKED.sub(lambda found: found[1] + drawing() + found[2], text)


if __name__ == "__main__":
    Path(PAGE).write_text(written(PAGE.read_text()))
