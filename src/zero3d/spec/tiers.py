"""Has a row for each tier: where states may be kept while the device does not need them. No torch.

    what may be kept there   choices of the section `offload` (offload.py), what they ask for (rules.py)
    what a record takes      slots, whole states, blocks (blueprint/places.py)
    how it is used           opened by `call`; where it is, or through buffers (offload/tiers.py)
    where it counts          memory of the host, or a tier's own (memory/budget.py, tools/plan/memory.py)
    how fast and how large   a cluster's figures (tools/plan/spec.py), for seconds of a step and plans that fit

Rows are in the order in which offload.optimizer=auto and the planner try them: the fastest first. Outside this file and
that of the tier nobody compares names: a tier is added by its file in offload/, its row and its test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

DEVICE, HOST, DISK = "device", "host", "disk"
OPTIMIZER, PARAMS, GRADIENTS, ACTIVATIONS = "optimizer", "params", "gradients", "activations"  # keys of the section
Figure = str | float  # a field of a cluster (tools/plan/spec.py::ClusterSpec), or what is assumed of every one


@dataclass(frozen=True)
class TierRow:
    """Says what is known of a tier before it is opened.

    name       as in the section `offload`, and as tables head what is there
    where      in sentences: on the host, on a disk
    keeps      keys of the section that may name it; gradients and activations only where it is `addressed`
    call       MODULE:CLASS that opens it (offload/tiers.py::OpenTier)
    slots      of a record that changes: two take turns, and a step is committed in one of them
    whole      a record of states with a remainder has its weight, too, so that a restart finds all of a model there
    addressed  updates on the host and gathers use records where they are; else these pass through buffers of the host
    on_host    records take memory of the host, which offload.host_budget bounds
    folder     it has files, in offload.directory
    read       bytes per second and node; inf where the link between device and host is all that counts
    write      the same of what is written
    capacity   bytes of a node
    """

    name: str
    where: str
    keeps: tuple[str, ...]
    call: str
    slots: int = 1
    whole: bool = False
    addressed: bool = False
    on_host: bool = False
    folder: bool = False
    read: Figure = inf
    write: Figure = inf
    capacity: Figure = inf


_ROWS = (
    TierRow(
        HOST,
        "on the host",
        (OPTIMIZER, PARAMS, GRADIENTS, ACTIVATIONS),
        "zero3d.offload.host_tier:HostTier",
        addressed=True,
        on_host=True,
        capacity="host_memory",
    ),
    TierRow(
        DISK,
        "on a disk",
        (OPTIMIZER, PARAMS),
        "zero3d.offload.disk_tier:DiskTier",
        slots=2,
        whole=True,
        folder=True,
        read="disk",
        write="disk",
    ),
)
TIERS: Mapping[str, TierRow] = MappingProxyType({row.name: row for row in _ROWS})


def tiers_of(key: str) -> tuple[str, ...]:
    """Return the tiers that a key of the section `offload` may name, the fastest first."""
    return tuple(row.name for row in TIERS.values() if key in row.keeps)


def is_buffered(place: str) -> bool:
    """Return whether records of a place pass through buffers of the host, whoever uses them."""
    return place in TIERS and not TIERS[place].addressed
