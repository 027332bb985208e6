"""Units of a rank's share of the model, and what gathers, reduces and updates them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.activations.kept_inputs import recorders_of
from zero3d.blueprint.blueprint import Blueprint
from zero3d.blueprint.units import in_order_of_use
from zero3d.distributed.block_codec import BlockCodec
from zero3d.distributed.collectives import Comm
from zero3d.engine.autocast import given_in
from zero3d.engine.foundation import Foundation
from zero3d.engine.slots import Slots
from zero3d.engine.tiers import open_tiers
from zero3d.engine.tower_calls import TowerCalls
from zero3d.models.bases import sees_images
from zero3d.models.blocks import UnitSpec
from zero3d.models.images import BlankImages, tower_parameters
from zero3d.offload.tiers import Tiers
from zero3d.pipeline.ties import find_ties
from zero3d.precision import LossScale
from zero3d.spec.zero import SAME
from zero3d.watchdog.heartbeat import Heartbeat
from zero3d.zero.accumulation import Accumulation
from zero3d.zero.clocks import Clocks
from zero3d.zero.gathers import Gathers
from zero3d.zero.hooks import Hooks
from zero3d.zero.initial_weights import Fill, Source, from_module, from_source
from zero3d.zero.model_group import ModelGroup, TensorCuts
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.reductions import Reductions
from zero3d.zero.streams import SideStream, ToHost
from zero3d.zero.unit import Unit
from zero3d.zero.unit_parts import SlowWire, UnitParts


@dataclass(frozen=True)
class Runtime(Foundation):
    """The parts of an engine that work in every step, and what they were built on.

    tiers  where states leave the device
    slots  of a disk, for a restart; None unless all trained states are there
    blanks make a vision tower run as often on all ranks; None where they need not
    """

    units: list[Unit]
    tiers: Tiers | None
    model_group: ModelGroup
    optimizer: ShardedOptimizer
    gathers: Gathers
    reductions: Reductions
    accumulation: Accumulation
    hooks: list[Hooks]
    loss_scale: LossScale
    clocks: Clocks
    slots: Slots | None
    blanks: BlankImages | None

    @property
    def blueprint_now(self) -> Blueprint:
        """Return the blueprint with what units have become: by a step's second backward, or trained after all."""
        return self.blueprint._replace(plans={unit.name: unit.plan for unit in self.units})


def build_units(base: Foundation, source: Source | None) -> tuple[list[Unit], Tiers | None, Slots | None]:
    """Build all units, and before them the tiers of their records where states leave the device."""
    tiers, slots = open_tiers(base)
    axes, policy = base.axes, base.policy
    slow = None if policy.slow == SAME else SlowWire(policy.slow, policy.stochastic)
    away: dict[str, Any] = {}
    if tiers is not None:
        to_host = ToHost(axes.arena.device, not tiers.stores.on_cpu, tiers.threads) if tiers.kept else None
        away = {"records": tiers.units, "kept": tiers.kept, "to_host": to_host}
    units = []
    for spec in base.specs:
        plan = base.blueprint.plans[spec.name]
        parts = UnitParts(
            plan,
            axes.shard(spec.experts),
            axes.arena,
            axes.replicate,
            part=axes.ep.rank if spec.experts else 0,
            slow=slow,
            codec=BlockCodec(8) if plan.coded else None,
            node=axes.node if plan.node > 1 else None,
            **away,
        )
        units.append(_build_unit(base, spec, parts, source))
    return units, tiers, slots


def _build_unit(base: Foundation, spec: UnitSpec, parts: UnitParts, source: Source | None) -> Unit:
    """Give a unit's parameters their first weights: rank 0's, or those of a source."""
    partition, layout = base.partition, base.blueprint.layouts[spec.name]
    owner = {name: partition.full_model.owner(name) for name in spec.params}
    wide = parts.wide if spec.dtype.is_floating_point else spec.dtype
    if source is None:
        everyone = base.axes.complements["edp"] if spec.experts else base.axes.dp
        fill = from_module(layout, spec.params, everyone, wide, parts.comm.rank)
    else:
        tiles = partition.full_model.tiles
        fill = from_source(lambda name, box: source(owner[name], box), layout, parts.comm, wide, partition.cuts, tiles)
    fill = _then_on_device(fill, spec.params.values(), base.axes.arena.device)
    return Unit(spec.name, spec.params, layout, spec.dtype, parts, fill, spec.deferred, base.order.gradients)


def _then_on_device(fill: Fill, params: Collection[nn.Parameter], device: torch.device) -> Fill:
    """Return `fill`, which then empties parameters that torch would not point at the device: one in PrivateUse1."""

    def filled(out: Tensor) -> None:
        fill(out)
        for p in params:
            empty = torch.zeros((), dtype=p.dtype, device=device).expand(p.shape)
            if not torch._has_compatible_shallow_copy_type(p, empty):
                torch.utils.swap_tensors(p, nn.Parameter(empty, p.requires_grad))  # type: ignore[no-untyped-call]

    return filled


def start(base: Foundation, units: list[Unit], tiers: Tiers | None, slots: Slots | None) -> Runtime:
    """Put the runtime around units, and hooks on the modules that use them."""
    axes, chunks, order = base.axes, base.partition.chunks, base.order
    policy, precision = base.policy, base.precision
    pipelined, heartbeat = axes.pp.size > 1, base.mesh.heartbeat
    model_group = _model_group(base, units)
    optimizer = order.optimizer(
        units,
        base.partition.places,
        base.groups.build,
        base.groups.groups,
        axes.dp,
        axes.arena,
        base.options.clip_norm,
        model_group,
    )
    clocks = Clocks(axes.arena.device, waited=lambda: heartbeat.waited)
    if tiers is not None:
        optimizer.updates = tiers.updates(optimizer, axes.arena, clocks)
    gathers = Gathers(SideStream("gather", axes.arena), policy.release == "every_step", pipelined, clocks)
    final = not policy.row.shards_optimizer and axes.replicate.size == 1  # what is reduced is the sum over all of dp
    everywhere = model_group.untouched(units) if final else []
    sides = SideStream("reduce", axes.arena), SideStream("copies", axes.arena)
    shared = base.mesh.communicators == 1
    in_use = in_order_of_use(units, base.first_uses)
    reductions = Reductions(in_use, *sides, order.closes, everywhere, shared, clocks)
    reductions.arrivals.at_module_ends = shared and policy.row.shards_parameters
    reductions.updates, reductions.applied = optimizer.updates, lambda: optimizer.applied
    loss_scale = LossScale(precision)
    per_micro_batch, draw = policy.often, None if pipelined else order.draw
    accumulation = Accumulation(base.options.accumulate, per_micro_batch, precision.scales_loss, draw)
    by_name = {unit.name: unit for unit in units}
    used = {module: [by_name[name] for name in names] for module, names in base.uses.items()}
    if base.first_uses:
        turn = {unit: number for number, unit in enumerate(in_use)}
        used = dict(sorted(used.items(), key=lambda item: min(turn[unit] for unit in item[1])))
    for module, needed in used.items():
        module.register_forward_pre_hook(_announcer(base.mesh.heartbeat, needed))
    for unit in units:
        if unit.grads is not None:
            first: Any = unit.weights.params[0]
            first.register_post_accumulate_grad_hook(_backward_announcer(base.mesh.heartbeat, unit))
    whole, hooks = not (pipelined and base.schedule.splits_backward), []
    blanks: BlankImages | None = None
    cast = given_in(base.options.autocast, precision.dtype)
    for root in chunks.values():
        inner = set(root.modules())
        of_root = {module: needed for module, needed in used.items() if module in inner}
        hooks.append(Hooks(root, of_root, gathers, reductions, accumulation, cast, pipelined, whole))
        if (saved := hooks[-1].saved) is not None:
            for recorder in recorders_of(root):
                recorder.revive = saved.revive
        if policy.row.shards_parameters and axes.dp.size > 1 and sees_images(root):
            tower = tower_parameters(root)
            of_tower = [unit for unit in units if not tower.keys().isdisjoint(unit.weights.params)]
            stray = [unit for unit in of_tower if unit in used.get(root, ())]
            calls = TowerCalls(axes.dp, hooks[-1], of_tower, gathers, stray)
            images = BlankImages(root, calls.agree, calls.held)
            blanks = images if tower or blanks is None else blanks
    _connect(base, units, hooks)
    return Runtime(
        **vars(base),
        units=units,
        tiers=tiers,
        model_group=model_group,
        optimizer=optimizer,
        gathers=gathers,
        reductions=reductions,
        accumulation=accumulation,
        hooks=hooks,
        loss_scale=loss_scale,
        clocks=clocks,
        slots=slots,
        blanks=blanks,
    )


def _connect(base: Foundation, units: Sequence[Unit], hooks: Sequence[Hooks]) -> None:
    """Give expert layers the hooks that take the gradients of each source, where sources are kept apart."""
    of_root = {
        p: own for root, own in zip(base.partition.chunks.values(), hooks, strict=True) for p in root.parameters()
    }
    layers = base.partition.experts.parameters()
    for unit in units:
        for index, p in enumerate(unit.weights.params if unit.sources > 1 and unit.grads is not None else ()):
            dispatch, key = layers[p]
            dispatch.takes[key] = of_root[p].gradient_hook_of_sources(unit, index)


def _announcer(heartbeat: Heartbeat, units: Sequence[Unit]) -> Callable[[nn.Module, Any], None]:
    """Return a hook that tells the heartbeat which units' forward begins."""
    what = f"the forward of unit {' and '.join(repr(unit.name) for unit in units)}".encode()
    return lambda module, args: heartbeat.work(what)


def _backward_announcer(heartbeat: Heartbeat, unit: Unit) -> Callable[[torch.Tensor], None]:
    """Return a hook that tells the heartbeat how far backward has come: all of it would be silent on one rank."""
    what = f"a backward, past unit {unit.name!r}".encode()
    return lambda p: heartbeat.work(what)


def _model_group(base: Foundation, units: Sequence[Unit]) -> ModelGroup:
    axes, partition = base.axes, base.partition
    ties = find_ties(partition.chunks, units, base.schedule, axes.pp.size)
    cut = [name for name, cut in partition.cuts.items() if cut.axis == "tp"]
    return ModelGroup(axes.model_parallel, axes.pp, TensorCuts(axes.tp, cut, partition.partial), ties)


def move_buffers(module: nn.Module, dp: Comm) -> None:
    """Move buffers to the engine's device; they keep their dtype, and rank 0's values win."""
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                buffer = buffer.to(dp.device).contiguous()
                if buffer.is_inference():  # a load could not write to it
                    buffer = buffer.clone()
                inner._buffers[name] = buffer
                is_narrow = buffer.is_floating_point() and buffer.itemsize == 1  # gloo moves no float8
                dp.broadcast(buffer.view(torch.uint8) if is_narrow else buffer, "-")
