"""The reference in docs/api.md, written from signatures and docstrings: GitHub shows it, and the site does.

    python docs/site/reference.py --write

    <!-- reference zero3d.Engine -->     between these lines stands what is public of a name
    <!-- end of reference -->

A class has its signature, its docstring, and its members in the order of `USE`: what a loop calls comes first. A row of
a docstring, `name   what it is`, is a row of a table; an indented drawing a block.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parents[1] / "api.md"
MARKED = re.compile(r"(<!-- reference ([\w.]+) -->\n).*?(<!-- end of reference -->)", re.S)
ROW = re.compile(r"(\S(?:.{0,30}?\S)?) {2,}(\S.*)")
BLANK = "\n\n"
WIDE = 100  # columns of a signature in one line
WITH_DEFAULTS, ALONE = ("| argument | default | |", "|---|---|---|"), ("| | |", "|---|---|")  # heads of tables
INSTANCES = {"Engine": "engine", "Mesh": "mesh"}  # as examples name them
USE = {  # members of a class by their use, where it is not that of its code
    "Engine": (
        *("train_batch", "backward", "backward_sum", "step", "zero_grad", "grad_norm", "clip_norm", "scheduler"),
        *("steps", "evaluate", "generate", "hold_weights", "save", "load", "saved", "save_is_over", "save_figures"),
        *("resumed", "reserve_saves", "slots", "load_slots", "export", "whole_state_dict", "stream_weights"),
        *("send_weights", "full_params", "unshard", "reshard", "averaged", "freeze", "unfreeze", "report", "memory"),
        *("figures", "traffic_units", "fingerprint", "note", "close", "closed", "has_whole_model", "put", "release"),
        "of",
    )
}


def written(text: str) -> str:
    """Return the page with all of its references anew."""
    return MARKED.sub(lambda found: f"{found[1]}{reference(found[2])}\n{found[3]}", text)


def reference(name: str) -> str:
    """Return what is public of a name; of a module of errors a table of these."""
    thing = looked_up(name)
    if inspect.ismodule(thing):
        errors = [each for each in vars(thing).values() if inspect.isclass(each) and issubclass(each, Exception)]
        rows = (
            f"| `{each.__name__}` | {cell(' '.join((each.__doc__ or '').partition(BLANK)[0].split()))} |"
            for each in errors
        )
        return "\n".join(["| error | raised where |", "|---|---|", *rows])
    lines = [f"### `{name}`", *described(name, thing)]
    if inspect.isclass(thing):
        for member in members(thing):
            found = inspect.getattr_static(thing, member)
            of = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            shown = f"{INSTANCES.get(thing.__name__, thing.__name__)}.{member}"
            lines += ["", f"#### `{shown}`", *described(shown, of, of_class=True, is_value=isinstance(found, property))]
    return "\n".join(lines)


def looked_up(name: str) -> object:
    """Return a thing by its dotted name."""
    package, *rest = name.split(".")
    for at in range(len(rest) - 1, 0, -1):
        try:
            module = import_module(".".join([package, *rest[:at]]))
        except ImportError:
            continue
        return reduce(getattr, rest[at:], module)
    return reduce(getattr, rest, import_module(package))


def members(of: type) -> list[str]:
    """Return the documented members of a class, in the order of their use."""
    own = [
        name
        for name, member in vars(of).items()
        if not name.startswith("_")
        and (isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member))
        and (member.fget if isinstance(member, property) else member).__doc__
    ]
    use = USE.get(of.__name__, ())
    return [name for name in use if name in own] + [name for name in own if name not in use]


def described(shown: str, thing: object, of_class: bool = False, is_value: bool = False) -> Iterator[str]:
    """Yield a signature and a docstring."""
    defaults = {} if is_value else defaults_of(thing)
    yield from ("", "```python", *signature(shown, thing, of_class, is_value), "```")
    yield from ("", *as_markdown((inspect.getdoc(thing) or "").splitlines(), defaults))


def defaults_of(thing: object) -> dict[str, str]:
    """Return the defaults of a callable's parameters, "" of those that have none."""
    found = inspect.signature(thing).parameters.values()  # type: ignore[arg-type]
    return {p.name: "" if p.default is p.empty else repr(p.default) for p in found}


def signature(shown: str, thing: object, of_class: bool, is_value: bool) -> list[str]:
    """Return the lines of a signature, with annotations and defaults."""
    found = inspect.signature(thing)  # type: ignore[arg-type]
    given = [p for p in found.parameters.values() if not (of_class and p.name in ("self", "cls"))]
    back = found.return_annotation
    arrow = "" if back is inspect.Signature.empty or (inspect.isclass(thing)) else f" -> {said(back)}"
    if is_value:
        return [f"{shown}: {said(back)}" if back is not inspect.Signature.empty else shown]
    words = []
    kind = None
    for p in given:
        if p.kind is p.KEYWORD_ONLY and kind not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            words.append("*")
        kind = p.kind
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        annotated = "" if p.annotation is p.empty else f": {said(p.annotation)}"
        default = "" if p.default is p.empty else f" = {p.default!r}" if annotated else f"={p.default!r}"
        words.append(f"{star}{p.name}{annotated}{default}")
    line = f"{shown}({', '.join(words)}){arrow}"
    return [line] if len(line) <= WIDE else [f"{shown}(", *(f"    {word}," for word in words), f"){arrow}"]


def said(annotation: object) -> str:
    """Return an annotation as it is written."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.replace("typing.", "").replace("collections.abc.", "")


def as_markdown(lines: Sequence[str], defaults: Mapping[str, str] | None = None) -> list[str]:
    """Return a docstring's lines as Markdown. defaults: of parameters, beside the rows that are of these."""
    known = defaults or {}
    out: list[str] = []
    inside, of_parameters = "", False  # "row", "drawing" or nothing; columns of the table
    for line in lines:
        if not line.strip():
            if inside != "drawing":
                inside = ""
            out.append("")
        elif line.startswith(" ") and inside == "row":
            out[-1] = f"{out[-1].removesuffix(' |')} {cell(line.strip())} |"
        elif line.startswith(" "):
            if inside != "drawing":
                out += ["", "```text"]
            inside = "drawing"
            out.append(line[4:])
        else:
            if inside == "drawing":
                at = len(out) - next(i for i, each in enumerate(reversed(out)) if each.strip())
                out.insert(at, "```")
            if row := ROW.fullmatch(line):
                names = [name.strip(" *") for name in row[1].split(",")]
                if inside != "row":
                    of_parameters = all(name in known for name in names)
                    out += ["", *(WITH_DEFAULTS if of_parameters else ALONE)]
                told = ", ".join(dict.fromkeys(f"`{known[name]}`" for name in names if known.get(name)))
                out.append(f"| `{row[1]}` |{f' {told} |' if of_parameters else ''} {cell(row[2])} |")
                inside = "row"
            else:
                out += ["", line] if inside == "row" else [line]
                inside = ""
    if inside == "drawing":
        out.append("```")
    return squeezed(out)


def squeezed(lines: Sequence[str]) -> list[str]:
    """Return lines without a second empty one, and none at the ends."""
    kept = [line for at, line in enumerate(lines) if line.strip() or (at and lines[at - 1].strip())]
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def cell(text: str) -> str:
    """Return a text for a table's cell."""
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page, or say that it is another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/api.md")
    now = written(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(now)
    else:
        print(now)


if __name__ == "__main__":
    main()
