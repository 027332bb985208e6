"""What `zero3d ckpt` found as lines for people; --json prints the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero3d.checkpoint.fields import quote_name
from zero3d.errors import short
from zero3d.spec.text import columns, count, size

ROWS = 20  # of tensors or facts; --json has all
Data = Mapping[str, Any]


def plain(value: Any) -> Any:
    """Return data with paths as texts and numbers that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return str(value) if isinstance(value, float) and value - value != 0 else value


def printable(value: Any) -> str:
    """Return a value in short, without what a terminal would act on."""
    return "".join(c if c.isprintable() else "?" for c in short(value))


def _mesh(each: Data) -> str:
    mesh = each["mesh"]
    if mesh is None:
        return "-"
    ranks = f"{each['ranks']} rank{'s' if each['ranks'] != 1 else ''}"
    return f"pp {mesh['pp']} x dp {mesh['dp']} x tp {mesh['tp']} ({ranks})"


def listed(data: Data) -> Iterator[str]:
    """Yield a table of checkpoints, what is wrong with damaged ones, leftovers, and what was looked at."""
    rows = [["", "saved", "mesh", "size", "format", "state"]]
    for each in data["checkpoints"]:
        state = each["state"].upper() if each["fault"] else each["state"]
        rows.append(
            [
                each["name"],
                each["saved"] or "-",
                _mesh(each),
                size(each["bytes"]),
                str(each["format"] or "-"),
                f"{state}, best" if each["best"] else state,
            ]
        )
    kind = "being written" if data["running"] else "leftover of a killed save"
    rows += [[each["name"], "-", "-", size(each["bytes"]), "-", kind] for each in data["leftovers"]]
    yield f"{data['directory']}{' (a run is writing there)' if data['running'] else ''}"
    yield from columns(rows, "<<<>><")
    for each in data["checkpoints"]:
        if each["fault"]:
            yield f"{each['name']} is {each['state']}: {each['fault']}"
    yield f"looked at: {data['checked']}"


def verified(each: Data) -> Iterator[str]:
    """Yield what was checked of one checkpoint and what is wrong with it."""
    checked = (
        f"{each['files']} files, {each['bytes']:,} bytes, {each['tensors']:,} tensors of {each['parameters']:,} "
        f"parameters{', ' + each['mesh'] if each['mesh'] else ''}, in {each['seconds']:.2f} s"
    )
    faults = each["faults"]
    if not faults:
        yield f"{each['path']}: whole ({checked})"
    else:
        yield f"{each['path']}: DAMAGED, {len(faults)} file{'s' if len(faults) > 1 else ''} ({checked})"
        for fault in faults:
            yield f"   {fault['file']}: {fault['fault']}"
    if each["foreign"]:
        yield f"   not of the checkpoint, and read by nobody: {', '.join(map(quote_name, each['foreign'][:5]))}"


# --- show ---------------------------------------------------------------------------------------


def shown(data: Data) -> Iterator[str]:
    """Yield what a checkpoint holds."""
    elements, optimizer = data["elements"], data["optimizer"]
    yield f"{data['path']}: step {data['step']:,}, format {data['format']}, {_mesh(data)}"
    if data["pattern"] is None:
        yield f"about      {_pairs(data['about'])}"
        yield f"optimizer  {optimizer['class']}; {_pairs(optimizer['scalars'])}"
        for index, group in enumerate(optimizer["groups"]):
            yield f"  group {index}  {_pairs(group)}"
        for name in ("scheduler", "loss_scale", "exact", "loop"):
            value = data[name]
            yield f"{name:10} {_pairs(value) if isinstance(value, Mapping) else 'none'}"
        for own in data["ranks_own"][:ROWS]:
            yield (
                f"rank {own['rank']:<5} random states: {', '.join(own['random'])}; buffers: "
                f"{', '.join(map(quote_name, own['buffers'])) or 'none'}"
            )
        yield from _more(data["ranks_own"])
        if data["base"]:
            yield (
                f"base       {printable(data['base']['folder'])}, digest {data['base']['digest']}: has "
                f"{data['base']['parameters']:,} frozen parameters that were left out"
            )
        yield (
            f"{data['count']:,} parameters of {count(elements['all'])} elements, "
            f"{count(elements['trainable'])} of them trainable"
        )
    rows = [["name", "shape", "dtype", "trainable", "states"]]
    for each in data["parameters"]:
        states = ", ".join(f"{quote_name(state)} {dtype}" for state, dtype in each["states"].items())
        shape = " x ".join(map(str, each["shape"])) or "scalar"
        rows.append(
            [
                quote_name(each["name"]),
                shape,
                each["dtype"],
                "yes" if each["trainable"] else "frozen",
                states or ("in the base" if each["base"] else "none"),
            ]
        )
    yield from columns(rows, "<<<<<")
    if data["statistics"] is not None:
        yield from columns(_statistics(data["statistics"]), "<" + ">" * 8)


def _statistics(states: Mapping[str, Data]) -> list[list[str]]:
    names = ("elements", "least", "most", "mean", "deviation", "norm", "zeros", "nonfinite")
    rows = [["", *names]]
    for state, values in states.items():
        rows.append(
            [
                quote_name(state),
                *(f"{v:,}" if isinstance(v, int) else f"{v:.6g}" for v in map(values.__getitem__, names)),
            ]
        )
    return rows


def _pairs(values: Data) -> str:
    """Write a mapping in one line, long values short."""
    return ", ".join(f"{quote_name(name)}={printable(value)}" for name, value in values.items()) or "none"


# --- diff ---------------------------------------------------------------------------------------


def compared(data: Data) -> Iterator[str]:
    """Yield the verdict, the tensors that differ, the largest difference first, and what else the manifests say."""
    for side in ("a", "b"):
        each = data[side]
        yield f"{side}: {each['path']}, step {each['step']:,}, states {each['states']}"
    differences = data["differences"]
    if data["equal"]:
        yield f"equal: {data['tensors']:,} tensors, bit for bit"
    else:
        yield f"different: {len(differences):,} of {data['tensors']:,} tensors and scalars"
        yield from columns(_by_state(differences), "<>><")
        yield from columns(_differences(differences), "<<<>><")
        yield from _more(differences)
    facts = data["facts"]
    if facts:
        yield "beside the states:"
        rows = [
            [quote_name(name), printable(each["a"]), printable(each["b"])] for name, each in list(facts.items())[:ROWS]
        ]
        yield from columns([["", "a", "b"], *rows], "<<<")
        yield from _more(list(facts))


def _by_state(differences: Sequence[Data]) -> list[list[str]]:
    """Return for each state in how many tensors it differs, and where by most."""
    rows = [["state", "differ", "largest", "in"]]
    for state in dict.fromkeys(each["state"] for each in differences):
        same = [each for each in differences if each["state"] == state]
        most = max(same, key=lambda each: each["largest"])
        where = f"{quote_name(most['name'])}{_at(most)}"
        rows.append([quote_name(state), f"{len(same):,}", f"{most['largest']:.6g}", where])
    return rows


def _at(each: Data) -> str:
    return f"[{', '.join(map(str, each['at']))}]" if each["at"] else ""


def _differences(differences: Sequence[Data]) -> list[list[str]]:
    rows = [["name", "state", "what", "elements", "largest", "at"]]
    for each in sorted(differences, key=lambda each: -each["largest"])[:ROWS]:
        what, elements = each["kind"], f"{each['differing']:,} of {each['elements']:,}" if each["elements"] else "-"
        if each["a"] is not None or each["b"] is not None:
            what = f"{what}: {printable(each['a'])}, {printable(each['b'])}"
        rows.append(
            [
                quote_name(each["name"]),
                quote_name(each["state"]),
                what,
                elements,
                f"{each['largest']:.6g}",
                _at(each) or "-",
            ]
        )
    return rows


def _more(rows: Sequence[Any]) -> Iterator[str]:
    if len(rows) > ROWS:
        yield f"   and {len(rows) - ROWS:,} more: --json has all"


# --- export and prune -----------------------------------------------------------------------------


def exported(data: Data) -> Iterator[str]:
    """Yield what was written."""
    kind = data["model"] or "no config"
    yield f"{data['checkpoint']} -> {data['folder']}: {kind}, {len(data['files'])} files, {size(data['bytes'])}"
    if data["note"]:
        yield data["note"]


def pruned(data: Data) -> Iterator[str]:
    """Yield what goes, or went, and what stays."""
    going = [*data["doomed"], *data["leftovers"]]
    gone = data["removed"] is not None
    yield f"{data['directory']}: {'removed' if gone else 'to remove'} {len(going) or 'nothing'}"
    rows = [[each["name"], size(each["bytes"]), each.get("state", "leftover of a killed save")] for each in going]
    if rows:
        yield from columns(rows, "<><")
    yield f"stays: {', '.join(_stays(each) for each in data['kept']) or 'nothing'}"
    if going and not gone:
        yield "nothing was removed yet: add --yes"


def _stays(each: Data) -> str:
    notes = [*(["best"] if each["best"] else []), *(["damaged"] if each["state"] != "whole" else [])]
    return f"{each['name']} ({', '.join(notes)})" if notes else str(each["name"])
