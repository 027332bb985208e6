"""A Config as a dict or YAML, and the keys themselves as text, markdown and JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from types import NoneType
from typing import Any

import yaml

from zero3d.config.hints import unknown
from zero3d.config.keys import KEYS, SECTIONS, TABLE, Key, value_of
from zero3d.config.kinds import KINDS
from zero3d.config.retired import RETIRED, answer, example
from zero3d.config.sections import Config
from zero3d.config.sources import DataSource
from zero3d.errors import ConfigError
from zero3d.spec.bits import DEVICE, EXACT, FACTS, NCCL, PLAIN, REFUSED, SAME_DP, SEVERAL, Bits


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested plain values in declared order; tuples become lists."""
    tree: dict[str, Any] = {}
    for name in KEYS:
        section, _, field = name.rpartition(".")
        branch = tree.setdefault(section, {}) if section else tree
        branch[field] = plain(value_of(config, name))
    return tree


def to_yaml(config: Config, *, mark: bool = False) -> str:
    """Return YAML text that loads back to an equal Config.

    mark    put `# default: VALUE` behind what differs from its default

    A key that YAML 1.1 reads as a truth value is in quotes: 'on'.
    """
    lines, last = [], ""
    for name, key in KEYS.items():
        section, _, field = name.rpartition(".")
        if section != last:
            lines.append(f"{section}:")
            last = section
        value = value_of(config, name)
        note = f"  # default: {scalar(key.default)}" if mark and value != key.default else ""
        lines.append(f"{'  ' if section else ''}{scalar(field)}: {scalar(value)}{note}")
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """Return one value as YAML on one line, quoted where it must be."""
    texts = value if isinstance(value, tuple) else (value,)
    quoted = any(isinstance(text, str) and not text.isprintable() for text in texts)
    style = '"' if quoted else None  # the other styles fold lines
    text: str = yaml.safe_dump(
        [plain(value)], default_flow_style=True, default_style=style, allow_unicode=True, width=2**31
    )
    return text.strip()[1:-1]


def plain(value: Any) -> Any:
    """Return a key's value as YAML and JSON have it: tuples are lists, sources mappings."""
    if isinstance(value, DataSource):
        return {name: entry for name, entry in asdict(value).items() if entry is not None}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


# --- text ---------------------------------------------------------------------------------------


def explain(name: str | None = None) -> str:
    """Return a key, a section's keys, or with None all, as text. Raises ConfigError for an unknown name."""
    if name is None:
        return "\n".join(_lines(""))
    if name in KEYS:
        return "\n".join(_key_text(KEYS[name]))
    if name in SECTIONS:
        return "\n".join([f"{name}: {_about(name)}", "", *_lines(f"{name}.")])
    raise ConfigError(answer({name: example(name)}, {}) if name in RETIRED else unknown(name, KEYS, SECTIONS))


def _key_text(key: Key) -> Iterator[str]:
    section, _, field = key.name.rpartition(".")
    yield f"{key.name}: {key.text}"
    yield f"  takes    {key.wants}"
    yield f"  default  {scalar(key.default)}"
    yield f"  in YAML  {section}: {{{field}: VALUE}}" if section else f"  in YAML  {field}: VALUE"
    yield f"  typed    {key.name}=VALUE"
    yield f"  resumed  with another value: {_bits_of(key)}"


def _lines(prefix: str) -> Iterator[str]:
    keys = [key for name, key in KEYS.items() if name.startswith(prefix)]
    names = max(len(key.name) for key in keys)
    defaults = max(len(scalar(key.default)) for key in keys)
    for key in keys:
        yield f"{key.name:{names}}  {scalar(key.default):{defaults}}  {key.text}"


def _about(section: str) -> str:
    return (SECTIONS[section].__doc__ or "").strip()


def as_markdown() -> str:
    """Return tables of all keys, one per section: docs/config.md holds them."""
    lines: list[str] = []
    for section in ("", *SECTIONS):
        about = _about(section) if section else "Keys of the whole run."
        lines += [f"### {f'`{section}`' if section else 'Top level'}", "", about, ""]
        lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for key in (key for name, key in KEYS.items() if name.rpartition(".")[0] == section):
            cells = (f"`{key.name}`", key.wants, f"`{scalar(key.default)}`", key.text)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


# --- why bits change ----------------------------------------------------------------------------

WHEN = {  # the runs in which a fact is compared
    PLAIN: "without `zero.exact`",
    EXACT: "with `zero.exact`",
    SAME_DP: "without `zero.exact`, on as many ranks",
    SEVERAL: "with several micro-batches a step",
    DEVICE: "on accelerators",
    NCCL: "where NCCL adds",
    REFUSED: "refused",
}


def _bits_of(key: Key) -> str:
    """Return what becomes of a run that goes on with another value of a key."""
    if key.bits is None:
        return "the same bits"
    if key.bits.when == REFUSED:
        return key.bits.why
    where = f", {WHEN[key.bits.when].replace('`', '')}" if key.bits.when in WHEN else ""
    return f"other bits{where}: {_reason(key.bits)}"


def _reason(bits: Bits) -> str:
    return f"several {bits.why}" if bits.when == SEVERAL else bits.why


def bits_as_markdown() -> str:
    """Return tables of what bits depend on, and why: docs/config.md holds them."""
    keys: dict[Bits, list[str]] = {}
    for key in KEYS.values():
        if key.bits is not None:
            keys.setdefault(key.bits._replace(usual=None), []).append(key.name)
    facts = {row._replace(usual=None): [name] for name, row in FACTS.items() if name not in ("fold", *_facts_of_keys())}
    lines = []
    for title, rows in (("key", keys), ("not a key", facts)):
        lines += [f"| {title} | why bits change with it | when |", "|---|---|---|"]
        lines += [
            f"| {', '.join(f'`{name}`' for name in names)} | {_reason(row)} | {WHEN.get(row.when, 'always')} |"
            for row, names in rows.items()
        ]
        lines.append("")
    same = ", ".join(f"`{key.name}`" for key in KEYS.values() if key.bits is None)
    return "\n".join([*lines, f"No bit changes with {same}.", ""])


def _facts_of_keys() -> set[str]:
    return {key.bits.fact for key in KEYS.values() if key.bits is not None}


# --- JSON Schema ----------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file, for editors."""
    tree = _object("What a zero3d run is.")
    tree = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "zero3d configuration", **tree}
    for name, key in KEYS.items():
        section, _, field = name.rpartition(".")
        properties = tree["properties"]
        if section:
            properties = properties.setdefault(section, _object(_about(section)))["properties"]
        properties[field] = key_schema(key)
    return tree


def _object(description: str) -> dict[str, Any]:
    return {"type": "object", "description": description, "additionalProperties": False, "properties": {}}


def key_schema(key: Key) -> dict[str, Any]:
    """Return the JSON Schema of one key."""
    forms = [_form(key, kind) for kind in key.types]
    form = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return {"description": key.text, "default": plain(key.default), **form}


def _form(key: Key, kind: Any) -> dict[str, Any]:
    if kind is NoneType:
        return {"type": "null"}
    form = dict(KINDS[kind].schema)
    if kind is str and key.choices:
        templates = any(":K" in choice for choice in key.choices)
        return form | ({"pattern": f"^({key.pattern})$"} if templates else {"enum": list(key.choices)})
    if kind == tuple[str, ...] and key.choices:
        words = {"enum": list(key.choices)}
        return {"anyOf": [words, {"type": "array", "minItems": 1, "items": words}]}
    if kind == TABLE and key.choices:
        return form | {"additionalProperties": False, "properties": {name: {"type": "string"} for name in key.choices}}
    names = {"minimum": key.least, "maximum": key.most, "exclusiveMinimum": key.above, "exclusiveMaximum": key.below}
    bounds = {name: bound for name, bound in names.items() if bound is not None}
    if kind in (int, float):
        return form | bounds
    return form | {"items": form["items"] | bounds} if kind == tuple[float, float] else form
