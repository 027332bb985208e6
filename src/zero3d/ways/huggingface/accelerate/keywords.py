"""What a trainer's user passes for `zero3d.Engine` is checked before there is a model.

stage     0, 1, 2 or 3
options   more keywords of the engine, but those that the trainer passes itself; autocast is on by default where the
          trainer is asked for mixed precision
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zero3d.blueprint.stages import stage_row
from zero3d.config.hints import nearest
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, short
from zero3d.precision import Precision
from zero3d.spec.offload import Offload

NARROW = ("bf16", "fp16")  # what autocast computes in
KEYWORDS = tuple(inspect.signature(Engine).parameters)
OWN: Mapping[str, str] = MappingProxyType(  # what the trainer passes itself -> where it takes it from
    {
        "model": "the model that it trains",
        "optimizer": "the model's own optimizer",
        "clip_norm": "Accelerate's clip_grad_norm_, TrainingArguments(max_grad_norm=), Lightning's gradient_clip_val",
    }
)


def check_keywords(stage: Any, options: Any, what: str) -> dict[str, Any]:
    """Return a copy of the options. Raises ConfigError, which calls the trainer `what`.

    stage  None where it comes from elsewhere
    """
    if stage is not None:
        stage_row(stage)
    if not isinstance(options, Mapping | None):
        raise ConfigError(
            f"{what}(options={short(options)!r}): pass a mapping, such as {{'offload': {{'optimizer': 'host'}}}}."
        )
    given = dict(options or {})
    for key in given:
        if key == "stage":
            raise ConfigError(f"{what} takes the stage by itself: pass stage={given[key]!r}, not in options.")
        if key in OWN:
            raise ConfigError(f"{what}(options=...) has {key!r}, which comes from {OWN[key]}: leave it out.")
        if key not in KEYWORDS:
            raise ConfigError(
                f"{what}(options=...): unknown key {short(key)!r} of zero3d.Engine. {_hint(str(key), what)}"
            )
    if "offload" in given:
        Offload.of(given["offload"])
    return given


def autocast_of(mixed: bool, options: Mapping[str, Any]) -> bool:
    """Return whether an engine's forward runs in autocast: with mixed precision, unless options say otherwise.

    mixed  what a trainer is asked for; a precision among the options may be another one
    """
    narrow = "precision" not in options or Precision.of(options["precision"]).name in NARROW
    return bool(options.get("autocast", mixed and narrow))


def _hint(key: str, what: str) -> str:
    """Return what to type in place of an unknown key."""
    near = nearest(key, KEYWORDS)
    if near is not None and near in OWN:
        return f"Its {near} comes from {OWN[near]}."
    if near == "stage":
        return f"The stage is not among them: {what}(stage=3)."
    return f"Did you mean {near!r}?" if near else "docs/api.md has all."
