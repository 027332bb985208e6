"""Docstrings of public names: which lack one, and each as reStructuredText.

name   what it is              becomes a definition
       and how it goes on
    an indented drawing        becomes a block as it stands
`code`                         becomes code
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module

MODULES = ("zero3d", "zero3d.errors", "zero3d.plan", "zero3d.activations", "zero3d.weights")
ROW = re.compile(r"(\S(?:.{0,30}?\S)?) {2,}(\S.*)")
CODE = re.compile(r"`[^`]+`")
SPECIAL = re.compile(r"([*|\\]|_\b)")


def public() -> Iterator[tuple[str, object]]:
    """Every public name with its thing: what modules list, and methods and properties of classes among that."""
    for module in map(import_module, MODULES):
        errors = [name for name, thing in vars(module).items() if inspect.isclass(thing)]
        for name in getattr(module, "__all__", errors):
            thing = getattr(module, name)
            yield f"{module.__name__}.{name}", thing
            if inspect.isclass(thing):
                for inner, member in vars(thing).items():
                    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                    if not inner.startswith("_") and inspect.isfunction(member):
                        yield f"{module.__name__}.{name}.{inner}", member


def undocumented() -> list[str]:
    """Public names without a docstring; one that a dataclass or a named tuple made of its fields is none."""
    return [
        name
        for name, thing in public()
        if not (text := getattr(thing, "__doc__", None)) or text.startswith(f"{name.rsplit('.')[-1]}(")
    ]


def as_rst(lines: Sequence[str]) -> list[str]:
    """A docstring's lines as reStructuredText."""
    out: list[str] = []
    inside = ""  # what an indented line goes on with: "row", "drawing" or nothing
    for line in lines:
        if not line.strip():
            inside = inside if inside == "drawing" else ""
            out.append("")
        elif line.startswith(" "):
            if inside == "row":
                out.append(f"    {marked(line.strip())}")
                continue
            if inside != "drawing":
                out += ["", "::", ""]
            inside = "drawing"
            out.append(f"    {line}")
        elif row := ROW.fullmatch(line):
            before = [] if inside == "row" else [""]
            out += [*before, f"``{row[1]}``", f"    {marked(row[2])}"]
            inside = "row"
        else:
            out += ["", marked(line)] if inside else [marked(line)]
            inside = ""
    return [*out, ""]


def marked(text: str) -> str:
    """A line of text: its code as such, and no other marks."""
    pieces = re.split(f"({CODE.pattern})", text)
    return "".join(f"`{piece}`" if CODE.fullmatch(piece) else SPECIAL.sub(r"\\\1", piece) for piece in pieces)
