"""What section `optimizer` asks for that cannot be, across its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero3d.config.kinds import convert, describe_value
from zero3d.config.sections import EIGHT_BIT, MUON, Config

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
    if choice.name == EIGHT_BIT:
        yield from _of_eight_bit(config)
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


def _of_eight_bit(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what moments in 8 bits cannot be with: they are on the device, and of fp32 masters."""
    for place in ("optimizer", "params"):
        where = getattr(config.offload, place)
        if where != "none":
            text = f"optimizer.name=adamw8bit keeps moments on the device, and offload.{place} is {where}:"
            yield f"offload.{place}", f"{text} type offload.{place}=none, or optimizer.name=adamw offload.moments=bf16."
    if config.precision == "fp64":
        yield "precision", "optimizer.name=adamw8bit updates fp32 masters, and precision is fp64: type another of both."


def muon_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return checked options as `zero3d.optim.muon` takes them."""
    return {name: convert(value, (OPTIONS[name][0],)) for name, value in (given or {}).items()}
