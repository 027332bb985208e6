"""Declares the section `offload`: where model states and activations are kept while they are not in use. No torch.

    Offload(optimizer="host", moments="bf16")     as `Engine(offload=...)`, or the section `offload` of a run's file
    Offload.of({"optimizer": "host"})             the same keys in a mapping

    optimizer    masters and optimizer states of trainable parameters
    params       weights that no forward or backward needs now (stage 3)
    gradients    reduced gradients on their way to the update (stages 2 and 3)
    activations  inputs of recomputed blocks
    fraction     share of the records' bytes that leave the device, in (0, 1]: whole records, last-needed first
    directory    for what is on a disk
    moments      in which Adam's are kept: bf16 ones are rounded at random, and are not bitwise those of fp32
    gradient_dtype  in which gradients wait on the host: bf16 ones are rounded, too, and take half the memory and link
    executor     of updates: on the device, through which records pass, or on the host
    host_budget  bytes that all ranks of a host may take together, or a text such as 64GB

What is known of a tier by its name is in `tiers`, what cannot be together in `rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

from zero3d.errors import ConfigError, short
from zero3d.spec.bits import FACTS
from zero3d.spec.declaring import Advice, check_choices, in_file, key
from zero3d.spec.sizes import parse_size
from zero3d.spec.tiers import ACTIVATIONS, DEVICE, GRADIENTS, HOST, OPTIMIZER, PARAMS, TIERS, tiers_of

AUTO = "auto"
HOST_BUDGET = "offload.host_budget"


@dataclass(frozen=True)
class Offload:
    """What leaves the device while it is not in use: ZeRO-Offload and ZeRO-Infinity, with the same bits."""

    optimizer: str = key(
        "none",
        "where masters and optimizer states are; auto: on the device as much as fits, the rest "
        f"{', or else '.join(TIERS[name].where for name in tiers_of(OPTIMIZER))}, as a run says with the arithmetic",
        bits=FACTS["updates"],
        choices=("none", *tiers_of(OPTIMIZER), AUTO),
        in_plan="offload",
        said="optimizer on {}",
    )
    params: str = key(
        "none",
        "where weights are while nothing uses them (stage 3)",
        bits=None,
        choices=("none", *tiers_of(PARAMS)),
        said="parameters on {}",
    )
    gradients: str = key(
        "auto",
        "where reduced gradients wait for the update; host at stages 2 and 3 only",
        bits=None,
        choices=(AUTO, DEVICE, *tiers_of(GRADIENTS)),
        said="gradients on {}",
    )
    activations: str = key(
        "none",
        "where inputs of recomputed blocks are",
        bits=None,
        choices=("none", *tiers_of(ACTIVATIONS)),
        in_plan="offload_activations",
        said="inputs on {}",
    )
    fraction: float = key(
        1.0,
        "share of the optimizer states' bytes that leaves the device: whole records, those needed last first",
        bits=FACTS["updates"],
        above=0,
        most=1,
    )
    directory: str | None = key(
        None, "a folder on a local disk for what is kept on a disk; by default OUTPUT/offload", bits=None, in_plan=False
    )
    moments: str = key(
        "fp32",
        "dtype of Adam's moments off the device; bf16 ones are rounded at random, and training is not bitwise the same",
        bits=FACTS["moments"],
        choices=("fp32", "bf16"),
        said="{} moments",
        advice=Advice("bf16", lambda plan: plan.offload.optimizer != "none", rounds=True),
    )
    gradient_dtype: str = key(
        "fp32",
        "dtype of gradients that wait on the host; bf16 ones are rounded after every micro-batch, and training is not "
        "bitwise the same",
        bits="gradients are rounded differently on the host",
        choices=("fp32", "bf16"),
        said="{} gradients",
        advice=Advice(
            "bf16", lambda plan: plan.offload.optimizer != "none" and plan.offload.gradients_leave, rounds=True
        ),
    )
    executor: str = key(
        "auto",
        "where offloaded states are updated: on the device, through which they pass, or on the host",
        bits=FACTS["updates"],
        choices=(AUTO, DEVICE, HOST),
    )
    host_budget: int | str | None = key(
        None,
        "bytes that all ranks of a host may use together, or a text such as 64GB (decimal units); by default what is "
        "available",
        bits=None,
        in_plan=False,
    )

    @classmethod
    def of(cls, value: Offload | Mapping[str, Any] | None) -> Offload:
        """Accept a record, a mapping of its keys, or None. Raises ConfigError, which names key and choices."""
        if value is None:
            return cls()
        if isinstance(value, Mapping):
            names = [each.name for each in fields(cls)]
            for asked in value:
                if asked not in names:
                    near = get_close_matches(str(asked), names, n=1)
                    hint = f" Did you mean {near[0]!r}?" if near else ""
                    raise ConfigError(f"offload has no key {short(asked)!r}: it has {', '.join(names)}.{hint}")
            value = cls(**value)
        if not isinstance(value, cls):
            raise ConfigError(
                f"offload={short(value)!r}: pass a mapping such as {{'optimizer': 'host'}}, or a zero3d.Offload."
            )
        return value._checked()

    def _checked(self) -> Offload:
        check_choices("offload", self, in_file)
        share = self.fraction
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(
                f"offload.fraction={short(share)!r}: type a number above 0, up to 1, the share of bytes that leave the "
                "device (none of them: offload.optimizer=none)."
            )
        if not isinstance(self.directory, (str, Path, NoneType)):
            raise ConfigError(f"offload.directory={short(self.directory)!r} is not a folder: pass a path.")
        budget = None if self.host_budget is None else parse_size(self.host_budget, HOST_BUDGET)
        directory = None if self.directory is None else str(self.directory)
        return replace(self, host_budget=budget, directory=directory)

    @property
    def states(self) -> bool:
        """Return whether optimizer states or weights leave the device."""
        return self.optimizer != "none" or self.params != "none"

    @property
    def settled(self) -> Offload:
        """Return the section once `auto` is a place: where no optimizer states leave, gradients and updates stay."""
        if self.optimizer != "none":
            return self
        executor = DEVICE if self.executor == HOST else self.executor
        return replace(self, executor=executor, gradients=DEVICE if self.gradients_leave else self.gradients)

    def release(self, asked: str) -> str:
        """Return when gathered parameters are given back: "auto" is every_use where they have a place to go to."""
        return "every_use" if asked == "auto" and self.params != "none" else asked

    @property
    def gradients_leave(self) -> bool:
        """Return whether reduced gradients leave the device, as is known once `auto` is a place."""
        return self.gradients in TIERS

    @property
    def activations_leave(self) -> bool:
        """Return whether inputs of recomputed blocks leave the device."""
        return self.activations in TIERS

    @property
    def uses_folder(self) -> bool:
        """Return whether optimizer states or weights are kept in files."""
        return any(place in TIERS and TIERS[place].folder for place in (self.optimizer, self.params))
