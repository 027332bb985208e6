"""Process groups of an axis: what they are for, how they are made, and their first collective.

    axis            carries                   NCCL
    dp, its folds'  what compute waits for,   a stream of high priority
    states, node    beside compute (side streams)
    pp, tp, ep, sp  activations               its defaults
    world, replica  a few numbers             one channel: each more takes device memory and brings nothing

A group's first batched point-to-point must include all its ranks, or NCCL hangs; one collective of all of them as soon
as it is made sees to that. It also connects ranks where a failure is told early, and not in the middle of a step.

Ranks find each other in the store under a group's name. Torch (2.11 to 2.14) makes it from the number of groups that a
process has made. If the caller made groups of some ranks alone, ranks would wait under different names. Ours have names
of their own, by axis, ranks, and how many of these there were before, which is alike on all members and in no one
else's hands.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero3d.distributed.axis import Axis, Call, backends_of
from zero3d.distributed.degrees import DATA, FEW_NUMBERS
from zero3d.errors import MeshError

_NAMES = "zero3d/groups"  # in the store, and in what torch says of a group
_naming = threading.Lock()
EARLY = 0.9  # of the groups' timeout: a rank that waits for its device says why before NCCL's watchdog ends it


class GroupOptions(NamedTuple):
    """What a group is to be like: the priority of its stream, and its channels (None: as NCCL thinks)."""

    high_priority: bool = False
    channels: int | None = None


def options_of(axis: str) -> GroupOptions:
    """Return the options for an axis' groups, by their traffic."""
    if axis in FEW_NUMBERS:
        return GroupOptions(channels=1)
    return GroupOptions(high_priority=axis in (*DATA, "node"))


def backend_options(backend: str, options: GroupOptions, patience: timedelta) -> Any:
    """Return the options as torch.distributed takes them; None for a backend that has none of them."""
    if backend != "nccl":
        return None
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.high_priority)
    made._timeout = patience  # torch warns where it is another than that of the group
    if options.channels is not None:
        made.config.min_ctas = made.config.max_ctas = options.channels
    return made


def new_group(axis: str, ranks: Sequence[int], device: torch.device, everyone: bool) -> dist.ProcessGroup:
    """Make a group of these ranks, which all call it, and no others; `everyone`: they are all ranks, in an order."""
    patience = timeout(device)
    options = backend_options(backends_of()[device.type], options_of(axis), patience)
    with _bound_to_no_device(), _named(axis, ranks):
        group = dist.new_group(
            list(ranks), timeout=patience, pg_options=options, use_local_synchronization=not everyone
        )
    return cast("dist.ProcessGroup", group)  # of this rank, which is one of them


def warm_up(axis: Axis) -> None:
    """Let the groups of an axis carry a number of all its ranks, which call it together; a dry run has no peers."""
    if axis.backend in ("none", "fake"):
        return
    for group in dict.fromkeys((axis.gathers, axis.reductions)):
        number = torch.zeros(1, device=axis.place)
        Call(axis, group, "warm-up", "-", axis.count("warm-up")).wait(partial(dist.all_reduce, number, group=group))


def check_carries(device: torch.device) -> None:
    """Refuse a process group, perhaps of the caller's, that cannot send this device's tensors. Raises MeshError."""
    carried = backends_of()
    if device.type not in carried:
        kinds = ", ".join(f"{kind} (by {backend})" for kind, backend in carried.items())
        default = dist.Backend.default_device_backend_map.get(device.type, "a backend of its own")
        raise MeshError(
            f"this rank computes on {device}, and the process group that is initialised carries tensors of {kinds}: "
            f"pass device={next(iter(carried))!r} to zero3d.Mesh, or initialise torch.distributed with {default!r}, "
            "or not at all: then the mesh does."
        )


def timeout(device: torch.device) -> timedelta:
    """Return the default group's timeout, for groups made beside it."""
    group = dist.group.WORLD
    options = getattr(group._get_backend(device), "options", None) if group is not None else None
    return getattr(options, "_timeout", None) or timedelta(minutes=10)


@contextmanager
def _named(axis: str, ranks: Sequence[int]) -> Iterator[None]:
    """Let torch take our name for the group that this thread makes inside; a dry run, without a store, has torch's.

    The count is kept in the store, as the addresses that ranks left there are: a name is never used twice.
    """
    if dist.get_backend() == "fake":
        yield
        return
    digest = hashlib.sha1(",".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()[:12]
    called = f"{_NAMES}/{axis}/{digest}"
    made = c10d._get_default_store().add(f"{called}/{dist.get_rank()}", 1)
    names: Any = c10d
    makes: int | None = threading.get_ident()

    def name(*arguments: Any, **options: Any) -> Any:
        return f"{called}/{made}" if threading.get_ident() == makes else before(*arguments, **options)

    with _naming:
        before, names._process_group_name = names._process_group_name, name
    try:
        yield
    finally:
        with _naming:
            makes = None  # another thread may have put its own in front: then this one stays, and passes on
            if names._process_group_name is name:
                names._process_group_name = before


@contextmanager
def _bound_to_no_device() -> Iterator[None]:
    """Hide, inside, that a caller has bound the default group to a device.

    torch would split new groups from it, in which all ranks of the world take part: a group of a few would hang.
    """
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        if bound is not None:
            world.bound_device_id = bound
