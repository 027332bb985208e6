"""What `auto` in `offload` means for an engine, from the bytes that its ranks are about to hold and may take.

place      before the first unit is built: all ranks make the choice of the rank with the least room. A trial of the
           optimizer on a few elements shows its states of each group: Adam two, with amsgrad three, Muon one of its
           matrices
gradients  then: on the host if the device has no room for them beside the rest, and they may leave it. On a CPU that is
           the same memory, and they stay
executor   once the optimizer is known: the host has the fused kernels of Adam and AdamW. On a CPU these give the same
           bits, in one pass. Elsewhere the faster executor is chosen, by rates measured at the start
           (offload/rates.py). With states on a disk the rates are those of data sheets, for a restart from slots must
           choose the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil
from typing import NamedTuple

import torch

from zero3d.account.optimizers import OptimizerBytes
from zero3d.account.states import NO_BYTES, Held, unit_bytes
from zero3d.account.transients import (
    gathered_at_once,
    local_bytes,
    passing_bytes,
    reductions_bytes,
    step_scratch,
    whole_units,
)
from zero3d.blueprint.auto import (
    LINK,
    MEMORY,
    ExecutorChoice,
    MeasuredRates,
    Need,
    Placed,
    Rates,
    Room,
    auto_place,
    executor_of,
    furthest,
    gradients_place,
    gradients_short_of,
)
from zero3d.blueprint.unit import UnitPlan
from zero3d.distributed.mesh import Mesh
from zero3d.engine.foundation import Foundation
from zero3d.errors import ConfigError
from zero3d.memory.budget import host_budget
from zero3d.memory.scratch import update_bucket
from zero3d.models.blocks import UnitSpec
from zero3d.offload.states import StateKinds
from zero3d.precision import torch_dtype
from zero3d.spec.offload import AUTO, HOST_BUDGET, Offload
from zero3d.spec.optimizer import FUSED_ALONE, refused_on_host
from zero3d.spec.sizes import parse_size
from zero3d.spec.tiers import DEVICE, HOST, TIERS

USABLE = 0.95  # of a device's free memory: fragments, and what no formula counts, take the rest


class OffloadChoice(NamedTuple):
    """Settings of an engine in which nothing is open any more.

    asked  the settings that were given
    why    the arithmetic of what was open, in lines
    """

    offload: Offload
    asked: Offload
    why: tuple[str, ...] = ()


def decide_place(base: Foundation) -> tuple[Foundation, tuple[str, ...]]:
    """Choose where optimizer states are, all ranks alike; return options that say so, and why in lines.

    Raises OutOfBudget. One exchange of a few numbers.
    """
    offload = base.options.offload
    if offload.optimizer != AUTO:
        return base, ()
    placed = _furthest(base, bytes_needed(base), _room_for(base))
    why = f"offload.optimizer=auto: {placed.optimizer}, fraction {placed.fraction:g}: {placed.why}"
    offload = replace(offload, optimizer=placed.optimizer, fraction=placed.fraction).settled
    return base.leaving(offload), (why,)


def decide_gradients(base: Foundation) -> tuple[Foundation, tuple[str, ...]]:
    """Choose where reduced gradients are, all ranks alike; return options that say so, and why in lines."""
    offload, policy = base.options.offload, base.policy
    if offload.gradients != AUTO or offload.optimizer == "none":
        return base, ()
    place, why = DEVICE, tuple[str, ...]()
    if policy.gradients_may_leave and base.axes.arena.device.type != "cpu":
        short = gradients_short_of(bytes_needed(base), _room_for(base), offload.fraction)
        world = base.axes.world
        most = max(world.read(world.exchange(torch.tensor([float(short)], device=world.device)).flatten(), [0.0]))
        place, room = gradients_place(int(most))
        why = (f"offload.gradients=auto: {place}: {room}",)
    offload = replace(offload, gradients=place)
    return base.leaving(offload), why


def decide_executor(base: Foundation, kinds: StateKinds, measure: Callable[[], MeasuredRates]) -> ExecutorChoice:
    """Choose who updates records, all ranks alike: by the rates of the slowest. Raises ConfigError.

    measure  gives this rank's rates
    """
    offload, policy = base.options.offload, base.policy
    width = policy.stored(base.precision.dtype.itemsize) + sum(kinds.widths(offload.moments).values())
    executor = executor_of(offload, width, "" if kinds.on_host else FUSED_ALONE, partial(_rates, base, measure))
    if executor.name == HOST and not kinds.on_host:
        raise ConfigError(refused_on_host(kinds.described))
    why = executor.why and f"offload.executor=auto: {executor.name}: {executor.why}"
    return executor._replace(why=why)


def _rates(base: Foundation, measure: Callable[[], MeasuredRates]) -> Rates | MeasuredRates | None:
    """Return the rates by which all ranks choose; None on a CPU."""
    mesh = base.mesh
    if mesh.on_cpu:
        return None
    if TIERS[base.options.offload.optimizer].slots > 1:  # a restart from them has the same kernels, whatever runs then
        return Rates(LINK, MEMORY / (mesh.local_world or mesh.world))
    return _slowest(base, measure())


def _slowest(base: Foundation, rates: MeasuredRates) -> MeasuredRates:
    """Return of each rate the least that any rank has. One exchange of four numbers."""
    world = base.axes.world
    rows = world.exchange(torch.tensor(rates, dtype=torch.float64, device=base.mesh.device))
    return MeasuredRates(*world.read(rows.amin(0), list(rates)))


def state_kinds(base: Foundation) -> StateKinds:
    """Return what the engine's optimizer keeps for each element. Raises ConfigError."""
    wide, moments = torch_dtype(base.policy.master), base.options.offload.moments
    return StateKinds.of(base.groups, wide, moments, base.axes.arena.device)


# --- place --------------------------------------------------------------------------------------


def bytes_needed(base: Foundation) -> Need:
    """Return what this rank is about to hold on its device, padding of states apart; of activations nothing is known.

    All states are counted as if they stayed there, but for weights and gradients that are known to leave. Without
    activations the fullest instants are those at which all gradients have come, or nearly all.
    """
    policy, device, units = base.policy, base.axes.arena.device.type, list(base.blueprint.units)
    states, longest, masters, kinds = NO_BYTES, 0, 0, state_kinds(base)
    for spec in base.specs:
        plan = base.blueprint.plans[spec.name]
        held, record = _of_unit(base, spec, plan, kinds)
        states, longest = states + held.states, max(longest, record)
        masters += base.updated(spec, base.blueprint.layouts[spec.name]).elements if spec.trainable else 0
    trained = [unit for unit in units if unit.plan.gradients is not None]
    local = [(name, local_bytes(plan, layout.total)) for name, plan, layout in trained]
    held_at_both = {"weights": ceil(states.parameters), "gradients": ceil(states.gradients)}
    instants = {
        "backward": held_at_both
        | {
            "gathered units": sum(gathered_at_once(units, device)),
            "gradients of units": whole_units(local),
            "reductions": reductions_bytes(trained, base.options.accumulate),
        },
        "optimizer step": held_at_both
        | {"scratch": step_scratch(masters, max(piece_sizes(base), default=0), device, policy, kinds.temporaries)},
    }
    passing = passing_bytes(base.options.offload.executor, longest, device, policy.splits, kinds.temporaries)
    return Need(ceil(states.optimizer), longest, passing, instants)


def piece_sizes(base: Foundation) -> Iterator[int]:
    """Yield the elements of each piece of a parameter that this rank updates."""
    for spec in base.specs:
        if spec.trainable:
            for piece in base.updated(spec, base.blueprint.layouts[spec.name]).pieces:
                yield piece.stop - piece.start


def _of_unit(base: Foundation, spec: UnitSpec, plan: UnitPlan, kinds: StateKinds) -> tuple[Held, int]:
    """Return what this rank holds of a unit, and the bytes of its longest record."""
    layout = base.blueprint.layouts[spec.name]
    if not spec.trainable:
        return unit_bytes(plan, layout, OptimizerBytes(0)), 0
    updated, has = base.updated(spec, layout), kinds.by_slot(layout)
    widths, master = kinds.widths(base.options.offload.moments), base.policy.stored(spec.dtype.itemsize)
    states = [(span, widths[name]) for name, span in updated.spans(has).items()]
    most = min(update_bucket(base.axes.arena.device.type), ceil(updated.used))
    record = max(
        (master + sum(widths[name] for name in names)) * min(stop - start, most)
        for start, stop, names in updated.segments(has)
    )
    return unit_bytes(plan, layout, OptimizerBytes.of(master, states, updated.elements)), record


def room_of(mesh: Mesh, offload: Offload) -> Room:
    """Return the bytes that this rank may take now: all free ones of its device, a fair share of the host's."""
    device = mesh.device
    limit = None if offload.host_budget is None else parse_size(offload.host_budget, HOST_BUDGET)
    folder, ranks = offload.directory is not None, mesh.local_world or mesh.world
    host = host_budget(ranks, limit).nbytes
    if device.type == "cpu":
        return Room(host, None, folder, ranks)
    module = torch.get_device_module(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)  # free blocks of torch's allocator
    return Room(int(USABLE * (module.mem_get_info(device)[0] + kept)), host, folder, ranks)


def _room_for(base: Foundation) -> Room:
    """Return the bytes that this rank may take for its units: free ones, and their weights' until then."""
    room, device = room_of(base.mesh, base.options.offload), base.axes.arena.device
    if device.type == "cpu":
        return room
    storages = (p.untyped_storage() for spec in base.specs for p in spec.params.values() if p.device == device)
    taken_over = {storage._cdata: storage.nbytes() for storage in storages}
    return room._replace(device=room.device + sum(taken_over.values()))


def _furthest(base: Foundation, need: Need, room: Room) -> Placed:
    """Return the choice of the rank whose states must go furthest, on all ranks."""
    host = -1 if room.host is None else room.host
    names = [(instant, name) for instant, parts in need.instants.items() for name in parts]
    row = [need.states, need.record, need.passing, room.device, host]
    row += [need.instants[instant][name] for instant, name in names]
    world = base.axes.world
    rows = world.exchange(torch.tensor(row, dtype=torch.float64, device=base.mesh.device))
    told = [int(value) for value in world.read(rows.flatten(), row * world.size)]
    choices = []
    for start in range(0, len(told), len(row)):
        states, record, passing, device, host, *others = told[start : start + len(row)]
        instants: dict[str, dict[str, int]] = {}
        for (instant, name), nbytes in zip(names, others, strict=True):
            instants.setdefault(instant, {})[name] = nbytes
        of_rank = Need(states, record, passing, instants)
        choices.append(auto_place(of_rank, room._replace(device=device, host=None if host < 0 else host)))
    return furthest(choices)
