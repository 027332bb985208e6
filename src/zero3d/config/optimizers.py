"""What section `optimizer` asks for that cannot be, across its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero3d.config.kinds import convert, describe_value
from zero3d.config.sections import Config
from zero3d.spec.optimizer import MUON

ADJUSTMENTS = ("match_rms_adamw", "original")

OPTIONS: Mapping[str, tuple[type[Any], Callable[[Any], bool], str]] = {
    "lr": (float, lambda value: value > 0, "a number above 0"),
    "momentum": (float, lambda value: 0 <= value < 1, "a number from 0 and below 1"),
    "nesterov": (bool, lambda value: True, "true or false"),
    "ns_steps": (int, lambda value: 1 <= value < 100, "a whole number from 1 to 99"),
    "adjust_lr": (str, lambda value: value in ADJUSTMENTS, " or ".join(ADJUSTMENTS)),
}


def optimizer_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of the optimizer that cannot be, and why."""
    choice = config.optimizer
    named = [str(group["match"]) for group in choice.groups or () if group.get("name") == MUON]
    if named and choice.name != MUON:
        text = f"optimizer.groups asks for Muon for {named[0]!r}, and optimizer.name is {choice.name}:"
        yield "optimizer.groups", f"{text} type optimizer.name=muon, or leave it out."
    for name, value in (choice.muon or {}).items():
        if name not in OPTIONS:
            yield "optimizer.muon", f"optimizer.muon has no {name!r}: it takes {', '.join(OPTIONS)}."
            continue
        kind, fits, wants = OPTIONS[name]
        try:
            fine = fits(convert(value, (kind,)))
        except ValueError:
            fine = False
        if not fine:
            yield "optimizer.muon", f"optimizer.muon: {name} takes {wants}; found {describe_value(value)}."


def muon_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return checked options as `zero3d.optim.muon` takes them."""
    return {name: convert(value, (OPTIONS[name][0],)) for name, value in (given or {}).items()}
