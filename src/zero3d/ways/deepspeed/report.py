"""What was made of a JSON, as lines for people and as a file of ours with comments."""

from __future__ import annotations

import json
from collections.abc import Iterator

import yaml

from zero3d.config.keys import KEYS
from zero3d.errors import short
from zero3d.spec.text import columns
from zero3d.ways.deepspeed.keys import IDLE, IGNORED_THERE, MAPPED, REFUSED
from zero3d.ways.deepspeed.merge import DEFAULT, PLANNED, THEIRS, YOURS, Merged, Row

FROM_RUN = {"total_num_steps": "train.steps", "warmup_num_steps": "schedule.warmup", "warmup_max_lr": "optimizer.lr"}


def lines(made: Merged) -> Iterator[str]:
    """Yield a table of what each key became, then what has no effect here."""
    yield f"{made.document.name}, as zero3d reads it:"
    cells = [("key of DeepSpeed's", "here", "value", "from")]
    cells += [(row.theirs, row.ours, _value(row.value), row.source) for row in made.rows]
    yield from columns(cells, "<<<<")
    if made.document.idle:
        yield f"without effect here: {', '.join(made.document.idle)}"


def as_yaml(made: Merged) -> Iterator[str]:
    """Yield the lines of a file for `zero3d train` that says the same, each key with where it is from.

    It has what the caller has given, too: the JSON can be left behind, and the caller's file.
    """
    yield f"# From {made.document.name}, by zero3d config import-deepspeed."
    origins = {row.ours: _comment(row) for row in made.rows}
    section = ""
    for name, value in _values(made).items():
        above, _, key = name.rpartition(".")
        if above != section:
            section = above
            yield f"{section}:"
        yield f"{'  ' if above else ''}{key}: {_flow(value)}  # {origins.get(name, YOURS)}"
    if made.document.idle:
        yield ""
        yield "# Without effect here:"
    for key, value in made.document.idle.items():
        yield f"#   {key}: {short(json.dumps(value))} - {IDLE.get(key, IGNORED_THERE)}"


def as_markdown() -> str:
    """Return the tables of docs/deepspeed-reference.md: every key and what becomes of it."""
    taken = [
        f"| `{theirs}` | {f'`{ours}`' if '.' in ours or ours.islower() else ours} |" for theirs, ours in MAPPED.items()
    ]
    why: dict[str, list[str]] = {}
    for key, reason in IDLE.items():
        why.setdefault(reason, []).append(f"`{key}`")
    idle = [f"| {', '.join(keys)} | {reason} |" for reason, keys in why.items()]
    refused = [
        f"| `{key}` | {', '.join(f'`{json.dumps(value)}`' for value in row.neutral)} | {row.why} | {row.instead} |"
        for key, row in REFUSED.items()
    ]
    tables = [
        *("### Taken", "", "| key | here |", "|---|---|", *taken, ""),
        *("### Without effect", "", "| keys | why |", "|---|---|", *idle, ""),
        *("### Refused", "", "| key | but for | why | use |", "|---|---|---|---|", *refused, ""),
    ]
    return "\n".join(tables)


def _values(made: Merged) -> dict[str, object]:
    """Return all that the file says by our keys, in their order."""
    found: dict[str, object] = {}
    for name in KEYS:
        section, _, key = name.rpartition(".")
        values = made.tree.get(section, {}) if section else made.tree
        if key in values:
            found[name] = values[key]
    return found


def _comment(row: Row) -> str:
    text = row.theirs if row.source == "the JSON" else f"{row.theirs}: {_origin(row.source)}"
    if row.ours != "schedule.options":
        return text
    taken = [f"{key} is {FROM_RUN[key]}" for key, value in row.value.items() if value is None and key in FROM_RUN]
    return "; ".join((text, *taken))


def _origin(source: str) -> str:
    return f"auto, {source}" if source in (DEFAULT, PLANNED, THEIRS) else source


def _value(value: object) -> str:
    return _flow(value)


def _flow(value: object) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
