"""What an engine stands on before its first unit is built.

That is options, axes, this rank's share of the model, the order of sums, and the blueprint of the units.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from socket import gethostname
from zlib import crc32

import torch
from torch import nn

from zero3d.activations.compilation import compile_blocks, compile_options
from zero3d.blueprint.blueprint import Blueprint, UnitFacts
from zero3d.blueprint.layout import Shape, UnitLayout
from zero3d.blueprint.policy import Group, Policy, Ranks
from zero3d.blueprint.state_spans import Updated
from zero3d.distributed.collectives import Comm
from zero3d.distributed.degrees import EXPERT_SHARD, FOLDS, ROWS
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.mesh import Mesh, usual_communicators
from zero3d.engine.options import Resolved
from zero3d.engine.partition import ModelPartition, partition_model
from zero3d.engine.summation import SumOrder, choose_order
from zero3d.memory.arena import Arena
from zero3d.memory.budget import HostBudget, host_budget
from zero3d.memory.cgroups import usable_cores
from zero3d.memory.segments import segments_note
from zero3d.models.blocks import UnitSpec, find_all_units
from zero3d.models.chain import early_beside_blocks
from zero3d.models.experts import compute_in_fp64
from zero3d.models.fp8 import use_fp8
from zero3d.models.image_trial import TowerUse, tower_use
from zero3d.models.kernel_trial import wrong_kernels
from zero3d.models.mixing import Mixing, is_told
from zero3d.models.packing import tell
from zero3d.models.written_numbers import numbers_in
from zero3d.sequence.group import SequenceGroup
from zero3d.sequence.shares import Sharing
from zero3d.spec.offload import Offload
from zero3d.spec.sizes import parse_size
from zero3d.zero.initial_weights import hollow


@dataclass(frozen=True)
class Axes:
    """Collectives over the mesh's axes, the arena that lends their buffers and the ledger that counts them.

    model_parallel  the ranks that hold one copy of the model together
    folds           the axes that fold dp, by name: for shards dp itself, where they are all of it
    complements     the complements of these axes, by name: dp itself where the degree is 1. Rows in a replay alone
    eshard          the ranks of a shard group that hold the same experts
    node            the neighbours on dp who keep second shards together; None where nobody does
    """

    arena: Arena
    ledger: Ledger
    pp: Comm
    tp: Comm
    dp: Comm
    world: Comm
    model_parallel: Comm
    folds: Mapping[str, Comm]
    complements: Mapping[str, Comm]
    eshard: Comm
    node: Comm | None = None

    @classmethod
    def of(cls, mesh: Mesh, reduce_scatter: str, second_shard: int | str | None = None, replay: bool = False) -> Axes:
        """Open the axes of a mesh, in one order on all ranks: none is opened in the middle of a step.

        reduce_scatter  of gradients, over dp
        second_shard    of gathered weights, among neighbours on dp. Raises MeshError where dp has no such
        replay          whether rows check each other's gradients
        """
        arena, ledger = mesh.make_arena(mesh.device), Ledger()
        pp, tp = (Comm(mesh.axis(name), arena, ledger) for name in ("pp", "tp"))
        data = mesh.data
        world, model_parallel = (Comm(axis, arena, ledger) for axis in (mesh.everyone, mesh.model_parallel))
        per_host = ranks_per_host(mesh, world)
        on_host = mesh.degrees.dp_on_host(per_host)
        opened: dict[str, Comm] = {}

        def of_states(name: str) -> Comm:
            axis = mesh.axis(name)
            if axis.name not in opened:
                few = mesh.degrees.on_host(axis.name, on_host)
                opened[axis.name] = Comm(axis, arena, ledger, mesh.debug, reduce_scatter, few)
            return opened[axis.name]

        dp = of_states(data.name)
        folds: dict[str, Comm] = {}
        complements: dict[str, Comm] = {}
        for fold in FOLDS:
            of_all = fold.usual is None
            folds[fold.name] = of_states(fold.name) if of_all else Comm(mesh.axis(fold.name), arena, ledger)
            if fold.complement != ROWS or replay:
                complements[fold.complement] = of_states(fold.complement)
        eshard = of_states(EXPERT_SHARD)
        together = mesh.degrees.second_shard(second_shard, per_host)
        within = folds["shard"]
        node = None if together == 1 else Comm(mesh.node(together), arena, ledger, mesh.debug, within=within)
        return cls(arena, ledger, pp, tp, dp, world, model_parallel, folds, complements, eshard, node)

    @property
    def ep(self) -> Comm:
        """Return the ranks that share experts out."""
        return self.folds["ep"]

    @property
    def replicate(self) -> Comm:
        """Return the ranks that have the same shards; one alone where states are cut over all of dp."""
        return self.complements["replicate"]

    @property
    def ranks(self) -> Ranks:
        """Return the ranks among which units are shared out."""
        shard, eshard, copies = (Group(c.size, c.algorithm) for c in (self.shard(), self.eshard, self.replicate))
        return Ranks(shard, eshard, copies, self.ep.size, 1 if self.node is None else self.node.size)

    def shard(self, experts: bool = False) -> Comm:
        """Return the ranks over which units are cut, or those of experts."""
        return self.eshard if experts else self.folds["shard"]


@dataclass(frozen=True)
class Foundation(Resolved):
    """The parts of an engine that its units are built on.

    partition  this rank's share of the model
    order      in which micro-batches and ranks are summed
    sequence   the ranks that share sequences out; None where each has whole ones
    mixing     tells the model's own convolutions, recurrences and masks where documents are; None where it has none
    notes      lines for people about the compute
    numbers    a hash of numbers in the full model's modules, as the caller built it
    specs      the units that are to be built of its parameters
    uses       names of the units that the forward of each module needs
    first_uses when a forward comes to a parameter, where that is another order than the model's
    blueprint  the plans of these units
    """

    axes: Axes
    partition: ModelPartition
    order: SumOrder
    sequence: SequenceGroup | None
    mixing: Mixing | None
    notes: tuple[str, ...]
    numbers: str
    specs: Sequence[UnitSpec]
    uses: Mapping[nn.Module, Sequence[str]]
    first_uses: Mapping[str, int]
    blueprint: Blueprint

    @classmethod
    def of(cls, model: nn.Module, resolved: Resolved) -> Foundation:
        """Open axes, compile blocks and divide the model, in place. Raises ConfigError, MeshError."""
        options, numbers = resolved.options, numbers_in(model)
        zero = options.zero
        resolved.mesh.communicators = zero.communicators or usual_communicators(resolved.mesh.device)
        axes = Axes.of(resolved.mesh, zero.reduce_scatter, zero.second_shard, replay=options.replay > 0)
        if getattr(model, "peft_config", None):
            from zero3d.models.stacked_adapters import keep_parameters  # imports PEFT, which put adapters there

            keep_parameters(model)
        if resolved.precision.name == "fp64":
            compute_in_fp64(model)
        segments = segments_note(resolved.mesh.device.type)
        notes = tuple(filter(None, [None if options.linear is None else str(use_fp8(model)), segments]))
        if (compiles := compile_options(options.compile)) is not None:
            compile_blocks(model, **compiles)
        policy = Policy.of(resolved.spec)
        passing = policy.row.shards_gradients and axes.dp.size > 1
        tower = tower_use(model, strict=policy.row.shards_parameters) if passing else TowerUse()
        first_uses = _first_uses(model, tower.order) if passing else {}
        kernels = wrong_kernels(model, resolved.mesh.device, resolved.precision.dtype)
        told = is_told(model)
        often = tower.per_image if policy.row.shards_parameters else frozenset()
        partition = partition_model(model, resolved, policy, axes.tp, axes.ep, axes.ledger)
        if options.weights is not None:
            for root in (model, *partition.chunks.values()):
                hollow(root)
        has_experts = partition.experts.anywhere
        order = choose_order(resolved.mesh, policy, options.accumulate, axes.dp, axes.world, has_experts)
        speaks = resolved.mesh.rank == 0
        sequence = None
        if resolved.mesh.sp > 1:
            sequence = _share_sequences(partition, axes.folds["sp"], resolved, policy.exact, speaks)
        specs, uses = find_all_units(
            partition.chunks.values(), options.units, resolved.precision.dtype, partition.experts.parameters()
        )
        uses = _as_often_on_all_ranks(partition, often, uses)
        done = replace(options, weights=None)  # a source keeps the last weights it made
        return cls(
            **vars(resolved) | {"options": done},
            axes=axes,
            partition=partition,
            order=order,
            sequence=sequence,
            mixing=tell(*partition.chunks.values(), refused=kernels, whole=told),
            notes=notes,
            numbers=numbers,
            specs=specs,
            uses=uses,
            first_uses=first_uses,
            blueprint=_draw(resolved, axes, partition, specs),
        )

    @property
    def policy(self) -> Policy:
        """Return how all units behave."""
        return self.blueprint.policy

    def leaving(self, offload: Offload) -> Foundation:
        """Return the same with what leaves the device settled."""
        settled = replace(self, options=replace(self.options, offload=offload))
        return replace(settled, blueprint=_draw(settled, self.axes, self.partition, self.specs))

    def updated(self, spec: UnitSpec, layout: UnitLayout) -> Updated:
        """Return what this rank updates of a unit."""
        return Updated.of(layout, self.axes.shard(spec.experts).rank if self.policy.row.shards_optimizer else None)


def _first_uses(model: nn.Module, tower: Mapping[str, int]) -> dict[str, int]:
    """Return numbers of parameters by name, in the order in which a forward comes to them; to others it comes later."""
    numbers, behind = dict(tower), max(tower.values(), default=0) + 1
    for name, module in early_beside_blocks(model).items():
        first = 0 if isinstance(module, nn.Embedding) else behind
        numbers |= {f"{name}.{own}": first for own, _ in module.named_parameters()}
    return numbers


def _as_often_on_all_ranks(
    partition: ModelPartition, often: Set[nn.Module], uses: Mapping[nn.Module, list[str]]
) -> dict[nn.Module, list[str]]:
    """Return what modules need, where the root needs the units of those that run once an image (`often`).

    Ranks have other numbers of images in a micro-batch, and must gather the same units equally often.
    """
    uses = dict(uses)
    for root in partition.chunks.values():
        inner = often & {*root.modules()} - {root}
        if names := [name for module in uses if module in inner for name in uses[module]]:
            uses = {module: needed for module, needed in uses.items() if module not in inner}
            uses[root] = list(dict.fromkeys([*uses.get(root, ()), *names]))
    return uses


def _draw(resolved: Resolved, axes: Axes, partition: ModelPartition, specs: Sequence[UnitSpec]) -> Blueprint:
    """Return the blueprint of units that are to be built."""
    groups, owner = resolved.groups, partition.full_model.owner

    def parameters(spec: UnitSpec) -> list[tuple[str, Shape, int]]:
        return [(name, tuple(p.shape), groups.group_of.get(owner(name), 0)) for name, p in spec.params.items()]

    facts = [UnitFacts(spec.name, spec.kind, parameters(spec)) for spec in specs]
    return Blueprint.of(resolved.spec, axes.ranks, facts, groups.block)


def _share_sequences(
    partition: ModelPartition, sp: Comm, resolved: Resolved, exact: bool, speaks: bool
) -> SequenceGroup:
    """Let the ranks of an sp group share sequences out, in this rank's chunks of the model."""
    mesh = resolved.options.mesh
    masked = parse_size(mesh.sp_mask_budget, "mesh.sp_mask_budget")
    sharing = Sharing(sp.size, mesh.sp_kind, exact, masked, resolved.mixers)
    return SequenceGroup(partition.chunks.values(), sp, sharing, speaks, resolved.positions)


def host_share(base: Foundation) -> HostBudget:
    """Measure what this rank may take of its host's memory; all ranks of a host have measured before any takes."""
    mesh, world, limit = base.mesh, base.axes.world, base.options.offload.host_budget
    assert limit is None or isinstance(limit, int)
    budget = host_budget(ranks_per_host(mesh, world) or mesh.local_world or world.size, limit)
    world.exchange(torch.zeros(1, device=mesh.device))
    return budget


def update_threads(base: Foundation) -> int:
    """Return how many threads update on the host: those asked for, or this rank's share of the cores it may use.

    A launcher may give every rank cores of its own, or all of them the same: only ranks that have the same share them.
    One exchange of a number, at the start.
    """
    mesh, world, cores = base.mesh, base.axes.world, sorted(os.sched_getaffinity(0))
    own = float(crc32(f"{gethostname()} {cores}".encode()))
    rows = world.exchange(torch.tensor([own], dtype=torch.float64, device=mesh.device)).flatten()
    alike = world.read(rows, [own] * world.size).count(own)
    return mesh.threads_asked or max(1, usable_cores() // alike)


def ranks_per_host(mesh: Mesh, world: Comm) -> int | None:
    """Return how many ranks the largest host has, the same on all ranks; None where no launcher says so on any.

    Hosts may differ, and not all may know: on accelerators, where an algorithm depends on it, all tell each other.
    """
    if mesh.everyone.meet is None:
        return mesh.local_world
    told = world.read(world.exchange(torch.tensor([mesh.local_world or 0], device=mesh.device)).view(-1), [0])
    return int(max(told)) or None
