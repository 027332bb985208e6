"""Specs of presets in the package: their first plan needs neither torch nor transformers. No torch.

    presets/NAME.json   {"by": what traced it, "spec": the spec, folded}       python benchmarks/planner_presets.py

A file is of one length, without adapters, quantisation or a part of its own, on a card. It holds for the versions of
torch and transformers that traced it, and for the code that traces (tools/sim) as it was then: elsewhere, and for all
else that is asked, a model is traced anew.

Folded: parts that differ in the name of their block alone are written once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zero3d.config import Lora, Model
from zero3d.errors import ConfigError
from zero3d.models.presets import PRESETS
from zero3d.tools.plan.spec import Forward, Instant, ModelSpec, Operations, Part, Unit, Weight
from zero3d.tools.plan.spec_json import from_json, to_json

FOLDER = Path(__file__).with_name("presets")
TOOLS = Path(__file__).parents[1]
MISREAD = (OSError, ValueError, KeyError, IndexError, TypeError, ConfigError)  # of a file that holds no folded spec
KINDS = (ModelSpec, Part, Unit, Weight, Operations, Instant)
NAME = "{}"  # stands for the name of a block in what is written once


def preset_spec(
    path: str,
    length: int | None,
    chosen: Model | None = None,
    lora: Lora | None = None,
    packed: bool | None = False,
    freeze: tuple[str, ...] | None = None,
    beyond: bool = False,
    forward: Forward = Forward(),  # noqa: B008 (a tuple)
) -> ModelSpec | None:
    """Return the spec that `sim.model_spec.open_spec` would make of the same arguments; None where none is here."""
    as_said = Model() if chosen is None else replace(chosen, path=Model().path, init=Model().init, linear=None)
    plain = as_said == Model() and lora in (None, Lora()) and not freeze
    if path not in PRESETS or not plain or forward != Forward(on_card=True):
        return None
    spec = _read(path)
    if spec is None or length not in (None, spec.length):
        return None
    return spec if packed in (None, "packed" in spec.provenance) else None


def write_preset(spec: ModelSpec, folder: Path = FOLDER) -> Path:
    """Write what was traced of a preset, whose name the spec has; return the file."""
    tree = {"by": traced_by(spec.name), "spec": folded(spec)}
    file = folder / f"{spec.name}.json"
    file.write_text(json.dumps(tree, separators=(",", ":")) + "\n")
    return file


def _read(name: str) -> ModelSpec | None:
    """Return a preset's spec, None where it was traced by something else or cannot be read."""
    try:
        tree = json.loads((FOLDER / f"{name}.json").read_text())
        return unfolded(tree["spec"]) if tree["by"] == traced_by(name) else None
    except MISREAD:
        return None


def traced_by(name: str) -> dict[str, str]:
    """Return what a trace of a preset depends on: versions without a build's name, its configuration, what traces."""
    versions = {library: _version(library) for library in ("torch", "transformers")}
    config = json.dumps(PRESETS[name], sort_keys=True)
    return {**versions, "config": _digest(config.encode()), "code": _code()}


def _version(library: str) -> str:
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return ""


@cache
def _code() -> str:
    """Return the digest of what traces, and of the fields that it fills in."""
    names = [f"{kind.__name__} {each.name}" for kind in KINDS for each in fields(kind)]
    files = [file.name.encode() + file.read_bytes() for file in sorted((TOOLS / "sim").glob("*.py"))]
    return _digest(b"".join([*files, *map(str.encode, names)]))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


# --- folded -------------------------------------------------------------------------------------


def folded(spec: ModelSpec) -> dict[str, Any]:
    """Return a spec as a tree that `json.dump` takes: `kinds` of parts, and of each part its kind and its name."""
    kinds: dict[str, int] = {}
    parts: list[tuple[int, str]] = []
    for part in spec.parts:
        name = part.units[0].name.partition("/")[0] if part.units else ""
        text = json.dumps(to_json(part), separators=(",", ":"))
        nameless = text.replace(f'"{name}', f'"{NAME}') if name and NAME not in text else text
        parts.append((kinds.setdefault(nameless, len(kinds)), name))
    tree = to_json(replace(spec, parts=()))
    return {**tree, "kinds": [json.loads(text) for text in kinds], "parts": parts}


def unfolded(tree: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a folded tree. Raises one of MISREAD for another one.

    Blocks share their operations, which plans compare by the thousand.
    """
    shared: dict[Operations, Operations] = {}
    kinds = []
    for kind in tree["kinds"]:
        part = from_json(Part, kind)
        apart = part.dispatched
        apart = None if apart is None else shared.setdefault(apart, apart)
        kinds.append(replace(part, operations=shared.setdefault(part.operations, part.operations), dispatched=apart))
    parts = [_named(kinds[kind], name) for kind, name in tree["parts"]]
    known = {key: value for key, value in tree.items() if key not in ("kinds", "parts")}
    return replace(from_json(ModelSpec, {**known, "parts": []}), parts=tuple(parts))


def _named(part: Part, name: str) -> Part:
    """Return a part of a kind with the name of its block."""

    def called(text: str) -> str:
        return name + text.removeprefix(NAME) if text.startswith(NAME) else text

    units = [
        Unit(
            called(unit.name),
            tuple([replace(weight, name=called(weight.name)) for weight in unit.weights]),
            None if unit.copy_of is None else called(unit.copy_of),
        )
        for unit in part.units
    ]
    return replace(part, units=tuple(units))
