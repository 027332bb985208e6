"""Opens the tiers of an engine: states off the device, their executor, and slots for a restart."""

from __future__ import annotations

from functools import partial

from zero3d.account.transients import norm_scratch
from zero3d.blueprint.units import in_turn
from zero3d.engine.auto_offload import decide_executor, piece_sizes, state_kinds
from zero3d.engine.foundation import Foundation, host_share, update_threads
from zero3d.engine.slots import Slots
from zero3d.offload.states import Placement, StateKinds, restarts_from
from zero3d.offload.tiers import Builder, Site, Stores, Tiers
from zero3d.spec.tiers import DEVICE


def open_tiers(base: Foundation) -> tuple[Tiers | None, Slots | None]:
    """Make the tiers of an engine's records, and slots for a restart where a tier commits all trained states.

    None where nothing leaves the device. Raises ConfigError, OutOfBudget.
    """
    offload, axes, mesh = base.options.offload, base.axes, base.mesh
    if not offload.states:
        return None, None
    kinds = state_kinds(base)
    records = list(placement(base, kinds).records(in_turn(base.specs), base.blueprint.layouts))
    owner = f"rank {axes.world.rank} of {mesh.degrees}"
    on_host = (offload.optimizer != "none" and offload.executor != DEVICE) or base.policy.gradients
    threads = update_threads(base) if on_host else 1
    norms = norm_scratch(piece_sizes(base), base.policy, 1 if mesh.on_cpu else threads)
    site = Site(axes.arena, axes.world, owner, base.precision.dtype, partial(host_share, base), threads, norms)
    stores = (mesh.make_stores or Stores)(site)
    executor = decide_executor(base, kinds, stores.rates)
    tiers = Builder(site, offload, records, executor, stores).tiers()
    if tiers.slab is None:
        return tiers, None
    restartable = restarts_from(base.specs, records, kinds)
    slots = Slots.agreed(tiers.slab, axes.world, restartable, tiers.replaced)
    if tiers.slab.had_steps:
        tiers.store.clear()
    return tiers, slots if restartable else None


def placement(base: Foundation, kinds: StateKinds) -> Placement:
    """Return the placement of this rank's records."""
    return Placement(base.options.offload, kinds, base.blueprint.plans, base.updated, base.axes.arena.device.type)
