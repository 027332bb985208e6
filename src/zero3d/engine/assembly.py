"""Builds an engine of a model and options, in the order in which its parts need each other.

foundation  options, checked                                         options.py, checks.py
            axes of the mesh, with arena and ledger                  foundation.py
            this rank's share of the model                           partition.py
            the order of sums                                        summation.py
guards      from here on a failure leaves a model that refuses use   guards.py
runtime     units, optimizer, gathers, reductions, hooks             runtime.py, zero/
features    averages, replay, Muon's exchange, ...                   features.py
step        when it is due, and what follows                         step.py
execution   direct, or through pipeline stages                       execution.py, pipeline/
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from zero3d.activations.compilation import CompiledModules
from zero3d.activations.host_slots import HostSlots
from zero3d.activations.kept_inputs import KeptInputs, Partition, inputs_per_pass
from zero3d.blueprint.layout import padding_warning
from zero3d.checkpoint.frozen_base import FolderSource, FrozenBase
from zero3d.distributed.agreement import agree
from zero3d.distributed.axis import forget_note
from zero3d.distributed.mesh import Mesh
from zero3d.engine.accounting import Accounts
from zero3d.engine.auto_offload import OffloadChoice, decide_gradients, decide_place
from zero3d.engine.autocast import compute_in_autocast, keep_statistics_in_fp32
from zero3d.engine.checks import bind_scheduler
from zero3d.engine.closing import Before
from zero3d.engine.execution import Direct, Execution, Pipelined, evaluating
from zero3d.engine.features import check_features, open_features
from zero3d.engine.foundation import Foundation, host_share
from zero3d.engine.freezing import Freezing
from zero3d.engine.frozen_originals import FrozenOriginals
from zero3d.engine.generation import last_only
from zero3d.engine.guards import guard, guard_gradients, guard_rest
from zero3d.engine.health import check_weights
from zero3d.engine.losses import Losses
from zero3d.engine.options import Options, parts_activations, resolve
from zero3d.engine.parts import Parts
from zero3d.engine.registry import Registry
from zero3d.engine.runtime import Runtime, build_units, move_buffers, start
from zero3d.engine.step import Stepper
from zero3d.engine.whole_parameters import WholeParameters, is_open
from zero3d.errors import ConfigError
from zero3d.models.bitsandbytes_layers import take_over
from zero3d.models.document_masks import DocumentMasks
from zero3d.models.packing import inner_model, position_rows
from zero3d.models.targets import Targets
from zero3d.models.wrappers import compile_by_block, unwrap
from zero3d.pipeline.step import Callbacks
from zero3d.spec.offload import Offload
from zero3d.spec.tiers import DEVICE
from zero3d.tensor_parallel.channel import Channel
from zero3d.zero.initial_weights import Source
from zero3d.zero.unit import Unit

if TYPE_CHECKING:
    from zero3d.pipeline.runner import Pipeline


def assemble(model: nn.Module, mesh: Mesh | None, options: Options) -> Parts:
    """Build an engine's parts; the model's parameters become views of unit storages.

    Raises ConfigError, MeshError. After a failure half-way the model is guarded, so that no other engine takes it.
    """
    model = unwrap(model)
    targets = Targets.of(model) if options.loss is None else Targets.next_tokens(model)
    resolved = resolve(model, mesh, options)
    check_features(model, resolved.mesh, options)
    take_over(model, resolved.precision.dtype)  # for good: what is known of a model before keeps its modules alive
    before, rows, masks = Before(model), position_rows(model), DocumentMasks.of(inner_model(model))
    base = Foundation.of(model, resolved)
    originals = _originals(model, base, options)
    axes, module = base.axes, base.partition.module
    kept = _keep_inputs(base)
    keep_statistics_in_fp32(base.partition.chunks, base.precision.dtype)
    if options.autocast:
        last = base.schedule.chunks_per_rank * axes.pp.size - 1 if axes.pp.size > 1 else 0
        compute_in_autocast(base.partition.chunks, last, base.mesh.device.type, base.precision.dtype)
    base, why_there = decide_place(base)
    base, why_gradients = decide_gradients(base)
    why = (*why_there, *why_gradients)
    part = None if base.sequence is None else base.sequence.own_part
    losses, only = Losses(model, options.loss, targets, part, rows, masks), last_only(model)
    unit_of: dict[nn.Parameter, Unit] = {}
    guard(module, unit_of, is_open)
    compile_by_block(module)
    if axes.pp.size > 1:
        guard_rest(model, set(module.parameters()))
    move_buffers(module, axes.dp)
    units, tiers, slots = build_units(base, options.weights)
    runtime = start(base, units, tiers, slots)
    guard_gradients(p for unit in runtime.units for p in unit.weights.params)
    if kept is not None and kept.slots is not None and tiers is not None:
        kept.slots.others = tiers.host_bytes
    padded = padding_warning([unit.layout for unit in runtime.units])
    if padded is not None and axes.world.rank == 0:
        warnings.warn(padded, stacklevel=3)
    frozen_base = _frozen_base(base, options.weights)
    whole = WholeParameters(runtime, partial(_note_writes, base, frozen_base), originals)
    axes.dp.note_steps(base.policy.row.number)
    stepper = Stepper(runtime, bind_scheduler(options.scheduler, runtime.optimizer.torch))
    features = stepper.features = open_features(runtime)
    pipeline = _open_pipeline(runtime, losses, whole) if axes.pp.size > 1 else None
    if pipeline is None:
        execution: Execution = Direct(runtime, losses, stepper.abandon, only)
    else:
        execution = Pipelined(pipeline, runtime, losses, only)
    stepper.open(execution)
    forget_note(resolved.mesh.everyone)
    unit_of |= {p: unit for unit in runtime.units for p in unit.weights.params}
    check_weights(runtime.units, axes.world, ConfigError, "Train from weights that are finite.")
    if pipeline is not None:
        uncut = nullcontext() if base.sequence is None else base.sequence.whole()
        with torch.no_grad(), evaluating(module, runtime.hooks, runtime.gathers, keep_full=False), uncut:
            pipeline.learn_shapes()
    registry = Registry(module)
    module.register_state_dict_pre_hook(lambda *_: registry.check())  # type: ignore[no-untyped-call]
    for unit in runtime.units:
        unit.weights.before_refusing.append(registry.check)
    axes.ledger.reset()  # it counts training; construction broadcast the model once
    axes.arena.reset_peaks()
    return Parts(
        **vars(runtime) | {"notes": (*runtime.notes, *filter(None, (feature.note for feature in features)))},
        compiled=CompiledModules.of(module),
        features=features,
        registry=registry,
        freezing=Freezing(runtime, features),
        stepper=stepper,
        whole_parameters=whole,
        accounts=_accounts(runtime, kept),
        pipeline=pipeline,
        execution=execution,
        targets=targets,
        kept_inputs=kept,
        offload=_chosen(runtime, options.offload, why),
        frozen_base=frozen_base,
        kept=getattr(options.weights, "kept", None),
        originals=originals,
        changes=before.changes(),
    )


def _keep_inputs(base: Foundation) -> KeptInputs | None:
    """Have recomputed blocks keep their inputs in parts over tp, or on the host, if options say so."""
    options, mesh, chunks = base.options, base.mesh, base.partition.chunks
    offload, over_tp, slots = options.offload, None, None
    if parts_activations(options.mesh):
        channel = Channel(mesh.axis("tp"), base.axes.ledger)
        over_tp = Partition(channel.rank, channel.size, lambda part, name: channel.all_gather(part, 0, name))
    if offload.activations_leave:
        slots = HostSlots(base.axes.arena, max(1, inputs_per_pass(chunks)), host_share(base))
    if over_tp is None and slots is None:
        return None
    kept = KeptInputs(over_tp, slots)
    kept.install(chunks.values())
    return kept


def _frozen_base(base: Foundation, weights: Source | None) -> FrozenBase | None:
    """Return the folder of frozen weights; None where nothing is frozen or no folder is known. Raises ConfigError.

    weights  where the engine's came from; it has been read
    Rank 0 takes the digest, before anybody can change the files.
    """
    full_model, world = base.partition.full_model, base.axes.world
    frozen = [name for name in full_model.shapes if name not in full_model.trainable]
    if not frozen or not isinstance(weights, FolderSource) or weights.folder is None:
        return None
    return agree(world.patient, lambda: FrozenBase.of(weights, frozen, world.rank == 0))


def _note_writes(base: Foundation, frozen_base: FrozenBase | None, written: Sequence[Unit]) -> None:
    """Take note that units have other values than the folder of frozen weights."""
    if frozen_base is not None:
        owner = base.partition.full_model.owner
        frozen_base.changed(owner(slot.name) for unit in written for slot in unit.layout.slots)


def _originals(model: nn.Module, base: Foundation, options: Options) -> FrozenOriginals:
    """Keep values of frozen parameters if the model is given back whole and the engine does not load them itself."""
    dp = base.axes.dp
    if base.mesh.degrees.cuts_model or options.weights is not None:
        return FrozenOriginals({}, dp)
    return FrozenOriginals.of(model, base.precision.dtype, dp)


def _chosen(runtime: Runtime, asked: Offload, why: tuple[str, ...]) -> OffloadChoice:
    offload, tiers = runtime.options.offload, runtime.tiers
    if tiers is None:
        return OffloadChoice(replace(offload, executor=DEVICE), asked, why)
    return OffloadChoice(replace(offload, executor=tiers.executor), asked, (*why, tiers.why) if tiers.why else why)


def _accounts(runtime: Runtime, kept: KeptInputs | None) -> Accounts:
    axes = runtime.axes
    inputs = None if kept is None else kept.slots
    return Accounts(runtime.units, runtime.optimizer, axes.arena, axes.shard(), runtime.tiers, inputs)


def _open_pipeline(runtime: Runtime, losses: Losses, whole: WholeParameters) -> Pipeline:
    """Return this rank's end of the pipeline; an earlier failure, which the axis keeps, raises Zero3dError."""
    from zero3d.pipeline.runner import Pipeline  # with torch's pipelining, DTensor and sympy: a second

    callbacks = Callbacks(
        accumulation=runtime.accumulation,
        sweep=runtime.reductions.sweep,
        begin=runtime.order.draw or (lambda *_: None),
        done=partial(runtime.order.close, runtime.reductions, runtime.units),
        gathered=whole.of_chunk,
        arena=runtime.axes.arena,
        clocks=runtime.clocks,
        own_shape=tuple if runtime.sequence is None else runtime.sequence.own_shape,
    )
    return Pipeline(
        runtime.partition.chunks,
        runtime.schedule,
        runtime.mesh.axis("pp"),
        runtime.axes.ledger,
        callbacks,
        losses.sum_and_weight,
        losses.taken,
    )
