"""Chooses a value for `auto` in `offload`: the place of states, the place of waiting gradients, the executor. No torch.

An engine asks before its units are built, and a run that has a plan before that; they differ in what they know:

                 of an engine                               of a plan
    need         its units, of activations nothing          all parts
    room         every rank's: the furthest choice counts   the least of any rank
    rates        measured, or of data sheets for slots      the cluster's

A need is the most memory alive at one instant. So gradients count beside logits where a step has
several micro-batches, and with one they do not: none have come by then.

    offload.optimizer=auto
        states + others <= device       nothing leaves
        else what is too much leaves,   and makes room also for the buffers through which records pass
            to the host                 where a rank may take so much of it
            to a disk                   else, where a folder is given
            or another tier             in the order of their rows (spec/tiers.py)

    offload.gradients=auto              on the device, unless it has no room for them beside all else that stays

    offload.executor=auto               the faster one, in seconds of a step, for each parameter
                                        by data sheets                          as measured
        device                          2 x bytes of states / link              2 x bytes of states / both ways at once
        host                            28 B / memory + (4 B + 2 B) / link      1 / Adam's rate + 4 B / down + 2 B / up

Where the device is a CPU, the host updates: the same bits, in one pass. What it cannot update, the device does.

The device is filled first: what stays there costs nothing. Where its memory is the host's own, as a CPU's is, the host
is no second place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from zero3d.errors import OutOfBudget
from zero3d.spec.offload import AUTO, Offload
from zero3d.spec.sizes import decimal
from zero3d.spec.tiers import DEVICE, GRADIENTS, HOST, OPTIMIZER, TIERS, TierRow, tiers_of

PLACES = ("none", *tiers_of(OPTIMIZER))  # of optimizer states, from the fastest
MANY = 10**9  # parameters for whose update an executor is chosen
STEPS = 1000  # of a fraction that is chosen: it can be read, and typed again
UPDATE = 28  # bytes per parameter that Adam reads and writes on the host: master and two moments both ways, gradient
GRADIENT, WEIGHT = 4, 2  # bytes per parameter on their way down and up
LINK, MEMORY = 20e9, 100e9  # bytes/s that nobody has measured: of an accelerator's link, of a host's memory


class Need(NamedTuple):
    """Bytes that a rank needs on its device.

    states    of its optimizer
    record    the largest part of them that leaves as one
    passing   of buffers through which records pass, once any has left
    instants  everything else that is alive at one time, by instant and name
    """

    states: int
    record: int
    passing: int
    instants: Mapping[str, Mapping[str, int]]

    @property
    def fullest(self) -> str:
        """Return the instant at which most is alive: states are there at all of them."""
        return max(self.instants, key=lambda instant: sum(self.instants[instant].values()))

    @property
    def others(self) -> Mapping[str, int]:
        """Return what is alive then beside the optimizer's states, by name."""
        return self.instants[self.fullest]

    def __str__(self) -> str:
        parts = {"optimizer states": self.states, **self.others}
        total = " + ".join(f"{name} {decimal(nbytes)}" for name, nbytes in parts.items() if nbytes)
        return f"{total} = {decimal(sum(parts.values()))} ({self.fullest})"


class Room(NamedTuple):
    """Bytes that a rank may take.

    host    None where the device's memory is the host's own
    folder  whether one is given, for tiers that have files
    ranks   of this host, which share what other tiers have
    """

    device: int
    host: int | None
    folder: bool
    ranks: int = 1

    def at(self, tier: TierRow) -> float:
        """Return the bytes that it may take of a tier. Files have no bound here: opening them finds a full disk."""
        if tier.on_host:
            return -1 if self.host is None else self.host
        if tier.folder:
            return math.inf if self.folder else -1
        assert not isinstance(tier.capacity, str), f"a field of a cluster, which a machine does not have: {tier.name}"
        return tier.capacity / self.ranks


class Placed(NamedTuple):
    """A place of optimizer states (one of PLACES), the fraction of them that leaves, and why in a line."""

    optimizer: str
    fraction: float
    why: str


def auto_place(need: Need, room: Room) -> Placed:
    """Fill the device, then the first tier that has room. Raises OutOfBudget where no place is left."""
    others = sum(need.others.values())
    asked = f"a rank needs {need}, and its device has {decimal(room.device)}"
    if need.states + others <= room.device:
        return Placed("none", 1.0, f"{asked}: nothing leaves it")
    leaves = min(need.states, need.states + others + need.passing - room.device)
    fraction = math.ceil(STEPS * leaves / need.states) / STEPS if need.states else 1.0
    away = min(need.states, math.ceil(fraction * need.states) + need.record)  # whole records
    place = next((name for name in tiers_of(OPTIMIZER) if away <= room.at(TIERS[name])), None)
    of_host = "which is the host's" if room.host is None else f"the host {decimal(room.host)}"
    if place is None:
        raise OutOfBudget(
            f"offload.optimizer=auto: {asked}, {of_host}: {decimal(away)} have no place. Pass "
            "offload.directory=FOLDER on a local disk, raise offload.host_budget if that is the bound, or use more "
            "ranks."
        )
    over = others + need.passing - room.device
    full = f"; {decimal(over)} more is needed than there is even so: offload.params, recomputation or more ranks" * (
        over > 0
    )
    passing = f" (with {decimal(need.passing)} of buffers through which they pass)" if need.passing else ""
    return Placed(place, fraction, f"{asked}, {of_host}: {decimal(leaves)} leave for the {place}{passing}{full}")


def furthest(choices: Iterable[Placed]) -> Placed:
    """Return the choice by which most states leave: all ranks follow the rank that must make it."""
    return max(choices, key=lambda placed: (PLACES.index(placed.optimizer), placed.fraction))


def gradients_short_of(need: Need, room: Room, fraction: float) -> int:
    """Return the bytes that a device lacks for gradients beside all else on it; negative where bytes are left."""
    most = max(sum(parts.values()) for parts in need.instants.values() if "gradients" in parts)
    return int(most + need.passing + (1 - fraction) * need.states) - room.device


def gradients_place(short: int) -> tuple[str, str]:
    """Return where gradients wait, by the bytes that the device with the least room lacks for them, and why."""
    if short > 0:
        return tiers_of(GRADIENTS)[0], f"{decimal(short)} too much with them on the device"
    return DEVICE, f"{decimal(-short)} are left with them on the device"


class Rates(NamedTuple):
    """Bytes per second of a rank: of its device's link to the host, and its share of the host's memory."""

    link: float
    memory: float


class ExecutorChoice(NamedTuple):
    """Who updates optimizer states that are off the device (device, host), and why in a line; "" as asked."""

    name: str
    why: str


def choose_executor(states: int, parameters: int, rates: Rates) -> ExecutorChoice:
    """Choose who updates so many bytes of states, of so many parameters, off an accelerator."""
    device = 2 * states / rates.link
    host = UPDATE * parameters / rates.memory + (GRADIENT + WEIGHT) * parameters / rates.link
    name = DEVICE if device <= host else HOST
    return ExecutorChoice(
        name,
        f"on the device 2 x {decimal(states)} at {decimal(int(rates.link))}/s take {device:.3g} s a step; on the host "
        f"{UPDATE} B x {parameters:,} parameters at {decimal(int(rates.memory))}/s and {GRADIENT + WEIGHT} B at "
        f"{decimal(int(rates.link))}/s take {host:.3g} s",
    )


class MeasuredRates(NamedTuple):
    """Holds the rates that were measured on a rank's machine (rates.py).

    down, up  bytes per second from its device to the host and back, one way at a time
    both      of both ways together
    adam      parameters per second that its threads update on the host
    """

    down: float
    up: float
    both: float
    adam: float

    def __str__(self) -> str:
        down, up, both = (f"{decimal(int(rate))}/s" for rate in self[:3])
        return f"measured: link down {down}, up {up}, both at once {both}; Adam {self.adam / 1e6:,.0f} M parameters/s"


def choose_by_measure(states: int, parameters: int, rates: MeasuredRates) -> ExecutorChoice:
    """Choose the executor for so many bytes of states, of so many parameters, by the slowest rank's measured rates."""
    device = 2 * states / rates.both
    host = parameters / rates.adam + GRADIENT * parameters / rates.down + WEIGHT * parameters / rates.up
    return ExecutorChoice(
        DEVICE if device <= host else HOST,
        f"{rates}: {parameters:,} parameters take {device:.3g} s a step on the device, {host:.3g} s on the host",
    )


def executor_of(
    offload: Offload, width: int, cannot: str, rates: Callable[[], Rates | MeasuredRates | None]
) -> ExecutorChoice:
    """Choose the executor of records where the settings leave it open.

    width   bytes of a parameter in a record
    cannot  why the host would not give the bits of this optimizer; "" where it would
    rates   gives the slowest rank's rates; None where the device is a CPU
    """
    if offload.optimizer == "none":
        return ExecutorChoice(DEVICE, "")
    if offload.executor != AUTO:
        return ExecutorChoice(offload.executor, "")
    if cannot:
        return ExecutorChoice(DEVICE, cannot)
    found = rates()
    if found is None:
        return ExecutorChoice(HOST, "the device is a CPU: the same bits, in one pass over memory")
    if isinstance(found, MeasuredRates):
        return choose_by_measure(width * MANY, MANY, found)
    return choose_executor(width * MANY, MANY, found)
