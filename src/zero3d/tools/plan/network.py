"""Seconds of collectives: alpha-beta, rings and trees, on two levels of links.

    seconds = hops x latency + bytes moved / B(bytes)          B(S) = B_inf S / (S + S_half)

    inside a node    ring over the L members that a group has there
    across nodes     ring over n/L nodes; the L members' network cards work in parallel, so L x bandwidth
    both             the slower of the two: the pieces are pipelined
    own links        where each pair of a node has one (`Link.partners`), a group has those among its own members

    all-to-all       everything that leaves a host does so as it is: L times a ring's bytes across nodes; on CPUs, where
                     every rank sends to each other one, gathers and reduce-scatters, too

An all-reduce takes the better of a ring, 2 (n-1) hops, and a double tree, 2 log2 n hops of as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from zero3d.distributed.degrees import Degrees
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.decided import node_of
from zero3d.tools.plan.spec import ClusterSpec, Link, ParallelPlan

CPU = "cpu"  # in the catalogue: gloo, whose messages go in pairs
REACHED = constant("links", "reached")  # of a data sheet's link rate, what the best collective gets


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` in all, `local` of them on each node they touch."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        """Count the nodes it touches."""
        return -(-self.size // self.local)


@dataclass(frozen=True)
class Groups:
    """The groups of a plan; tp ranks are neighbours, then dp, then pp. On dp those of ep are neighbours, then edp.

    Those of sp and of shard are neighbours on dp, too, and so are those who keep second shards together, node. experts:
    those over which experts are cut.
    """

    tp: Group
    dp: Group
    ep: Group
    sp: Group
    shard: Group
    replicate: Group
    experts: Group
    node: Group
    hop_inside: bool

    @classmethod
    def of(cls, plan: ParallelPlan, cluster: ClusterSpec) -> Groups:
        """Place a plan's ranks on the nodes."""
        return _groups(plan.degrees, node_of(plan, cluster.on_host), cluster.per_node)


@lru_cache(maxsize=4096)
def _groups(degrees: Degrees, together: int, per_node: int) -> Groups:
    """Place ranks on nodes of so many. together: neighbours who keep second shards."""
    _, dp, tp, ep, sp, _ = degrees
    shard, replicate = degrees.size("shard"), degrees.size("replicate")

    def among(size: int, apart: int) -> Group:
        return Group(size, max(1, min(size, per_node // apart)))

    node = Group(together, min(together, among(dp, tp).local))
    cut = among(shard, tp), among(replicate, tp * shard), among(shard // ep, tp * ep), node
    return Groups(Group(tp, min(tp, per_node)), among(dp, tp), among(ep, tp), among(sp, tp), *cut, tp * dp < per_node)


def send_seconds(size: float, link: Link) -> float:
    """Time a message between two ranks."""
    return link.latency + _wire(size, link, 1) if size else 0.0


def gather_seconds(size: float, group: Group, cluster: ClusterSpec) -> float:
    """Time an all-gather of `size` bytes in all, or a reduce-scatter of as many."""
    if group.size == 1 or not size:
        return 0.0
    if cluster.gpu.name == CPU:
        return exchange_seconds(size, group, cluster)
    inside, across = cluster.inside, cluster.across
    near = size * (group.local - 1) / group.local
    far = size * (group.nodes - 1) / group.nodes / group.local
    wire = max(_wire(near, inside, group.local - 1), _wire(far, across))
    return wire + (group.local - 1) * inside.latency + (group.nodes - 1) * across.latency


def exchange_seconds(size: float, group: Group, cluster: ClusterSpec) -> float:
    """Time an all-to-all of `size` bytes of every rank: a message to each other one; hosts join nothing on the way."""
    if group.size == 1 or not size:
        return 0.0
    inside, across = cluster.inside, cluster.across
    near, far = group.local - 1, group.size - group.local
    wire = max(_wire(size * near / group.size, inside, near), _wire(size * far / group.size, across))
    return wire + near * inside.latency + far * across.latency


def neighbours_seconds(rows: float, reached: int, group: Group, cluster: ClusterSpec) -> float:
    """Time an all-to-all of `rows` bytes, each row for `reached` neighbouring ranks: once to their node, and on."""
    if group.size == 1 or not rows:
        return 0.0
    inside, across = cluster.inside, cluster.across
    near, far = reached * (group.local - 1) / group.local, (group.nodes - 1) / group.nodes
    wire = max(_wire(rows * near, inside, group.local - 1), _wire(rows * far, across))
    return wire + (group.local - 1) * inside.latency + (group.nodes - 1) * across.latency


def reduce_seconds(size: float, group: Group, cluster: ClusterSpec) -> float:
    """Time an all-reduce of `size` bytes: the better of ring and tree."""
    if group.size == 1 or not size:
        return 0.0
    ring = 2 * gather_seconds(size, group, cluster)
    inside, across = cluster.inside, cluster.across
    near, far = 2 * size * (group.local > 1), 2 * size * (group.nodes > 1) / group.local
    hops = 2 * log2(group.local) * inside.latency + 2 * log2(group.nodes) * across.latency
    return min(ring, max(_wire(near, inside, group.local - 1), _wire(far, across)) + hops)


def _wire(size: float, link: Link, others: int = 1) -> float:
    """Return size / B(size) = (size + half) / B_inf. others: GPUs to which it goes at a time."""
    return (size + link.half) / (REACHED * link.to(others)) if size else 0.0
