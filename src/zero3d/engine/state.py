"""The engine as its checkpoints take it, and what the bits of a run depend on."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from zero3d.activations.compilation import is_compiled
from zero3d.blueprint.layout import GROUP
from zero3d.checkpoint.code_names import name_of
from zero3d.checkpoint.resume_contract import BACKEND, LEAVES, MICRO_BATCHES, OPTIONS, SCHEDULER, USUAL
from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.update_settings import factors_of, options_of, schedule_of, state_of
from zero3d.distributed.algorithms import AllToAll, Pairwise
from zero3d.distributed.determinism import device_facts
from zero3d.distributed.kernels import capability, products
from zero3d.distributed.mesh import Mesh
from zero3d.engine.options import Options
from zero3d.engine.parts import Parts
from zero3d.models.bases import model_of
from zero3d.models.packing import inner_model
from zero3d.models.written_numbers import WrittenNumber
from zero3d.pipeline.schedules import Schedule
from zero3d.precision import Precision, dtype_name, torch_dtype
from zero3d.spec.declaring import as_noted, noted_as
from zero3d.spec.tiers import HOST

RANKS, TREE = "in rank order", "in exact mode's tree"


def engine_state(
    parts: Parts, loop: Mapping[str, Any] | None = None, numbers: Mapping[str, WrittenNumber] | None = None
) -> EngineState:
    """Return the state for a checkpoint; `loop`: the training loop's own values; `numbers`: written by forwards.

    Raises Zero3dError where an earlier failure left the ranks of a pipeline apart.
    """
    parts.execution.check()
    axes, partition, stepper = parts.axes, parts.partition, parts.stepper
    full, trained = partition.full_model, [unit for unit in parts.units if unit.grads is not None]
    names = {full.owner(slot.name) for unit in trained for slot in unit.layout.slots}
    return EngineState(
        modules=list(partition.chunks.values()),
        full_model=full._replace(trainable=full.trainable | names),
        units=parts.units,
        optimizer=parts.optimizer,
        dp=axes.dp,
        tp=axes.tp,
        folds=axes.folds,
        world=axes.world,
        degrees=parts.mesh.degrees,
        loss_scale=parts.loss_scale,
        scheduler=stepper.scheduler,
        step=stepper.count,
        about=_about(parts),
        loop=loop,
        cuts={partition.full_model.owner(name): cut for name, cut in partition.cuts.items()},
        summands=parts.order.summands,
        base=parts.frozen_base,
        kept=parts.kept,
        numbers=numbers or {},
    )


def _about(parts: Parts) -> dict[str, Any]:
    """Return the facts and the values of keys that the bits of a run depend on (`spec/bits.py`), beside its data."""
    policy, options = parts.policy, parts.options
    device, mesh = parts.axes.arena.device, parts.mesh
    cpu = device.type == "cpu"
    summands, optimizer = parts.order.summands, parts.optimizer
    about: dict[str, Any] = {
        "stage": policy.row.number,
        "reduce": policy.reduce,
        "accumulate": options.accumulate,
        MICRO_BATCHES: parts.accumulation.usual,
        **mesh.degrees._asdict(),
        "chunks": _chunks(parts.schedule, mesh.pp),
        "units": None if options.units is None else ", ".join(sorted(map(name_of, options.units))),
        "precision": parts.precision.name,
        "wire": dtype_name(torch_dtype(policy.wire)),
        "algorithm": parts.axes.dp.algorithm,
        "torch": torch.__version__,
        "kernels": capability() if cpu else torch.get_device_module(device).get_device_name(device),
        **({"products": products()} if cpu else {}),
        "threads": torch.get_num_threads() if cpu else 1,
        LEAVES: None if summands is None else summands.per_batch,
        "moments": options.offload.moments if parts.groups.block == GROUP else "int8",
        "updates": _updates(parts),
        "tiled_loss": options.tiled_loss,
        "gather_budget": options.gather_budget,
        "attention": _attention(parts),
        "sp_kind": "heads" if parts.sequence is None or parts.sequence.by_heads(mesh.tp) else "gather",
        "sp_mixers": USUAL["sp_mixers"] if parts.sequence is None else parts.sequence.mixers,
        "sp_masks": USUAL["sp_masks"] if parts.sequence is None else parts.sequence.masks,
        "compiled": any(map(is_compiled, parts.partition.module.modules())),
        "groups": _groups(parts),
        "loss": None if options.loss is None else name_of(options.loss),
        "loss_scale": _loss_scaling(parts.precision),
        OPTIONS: options_of(optimizer.torch.param_groups),
        SCHEDULER: schedule_of(parts.stepper.scheduler),
        "factors": factors_of(parts.stepper.scheduler),
        "schedule_state": state_of(parts.stepper.scheduler),
        "modules": parts.numbers,
        "library": _library(parts),
        **_values(options, mesh, optimizer.clip_norm),
    }
    for feature in parts.features:
        about |= feature.about()
    return about | ({} if cpu else who_adds(parts)) | device_facts(device, mesh.everyone.backend, mesh.local_world)


def _values(options: Options, mesh: Mesh, clip_norm: float | None) -> dict[str, Any]:
    """Return the values of keys that change bits by themselves; of an axis that the mesh has not, their defaults."""
    values: dict[str, Any] = {}
    for section, record in (("zero", options.zero), ("offload", options.offload), ("mesh", options.mesh)):
        for each in fields(record):
            bits, axis = each.metadata["bits"], each.metadata["axis"]
            if bits is not None and not bits.fact:
                there = not axis or mesh.degrees.size(axis) > 1
                values[noted_as(section, each.name)] = getattr(record, each.name) if there else each.default
    if mesh.ep == 1:
        values["experts"] = USUAL["experts"]
    rate = float(options.expert_bias_rate)
    norm = None if clip_norm is None else float(clip_norm)  # 1 is 1.0
    values |= {"clip_norm": norm, "autocast": options.autocast, "linear": options.linear, "expert_bias_rate": rate}
    return {name: as_noted(value) for name, value in values.items()}


def _chunks(schedule: Schedule, pp: int) -> str:
    """Return how a schedule deals model chunks out to the stages of a pipeline."""
    if pp == 1 or schedule.chunks_per_rank == 1:
        return str(USUAL["chunks"])
    return "in a V" if schedule.in_a_v else f"{schedule.chunks_per_rank} a rank, in turn"


def _groups(parts: Parts) -> str:
    """Return how many groups there are, and a hash of which parameters are in each and which are seen as matrices."""
    group_of = sorted(parts.groups.group_of.items())
    said = repr((group_of, sorted((name, repr(form)) for name, form in parts.matrices.items())))
    return f"{parts.groups.groups} ({hashlib.sha256(said.encode()).hexdigest()[:8]})"


def _loss_scaling(precision: Precision) -> str | None:
    """Return the rule by which fp16's scale changes, without its first value, which states of a checkpoint replace."""
    if not precision.scales_loss:
        return None
    rule = precision.loss_scaling
    return f"window {rule.window}, hysteresis {rule.hysteresis}, minimum {rule.minimum:g}"


def _library(parts: Parts) -> str | None:
    """Return the package that a model's class is of, with its version; None for one without."""
    chunk = next(iter(parts.partition.chunks.values()))
    package = type(inner_model(model_of(chunk))).__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    return None if version is None else f"{package} {version}"


def _attention(parts: Parts) -> str:
    """Return the implementation of attention in a model of transformers', by its name there; of another model sdpa."""
    if parts.sequence is not None:
        return parts.sequence.implementation
    chunk = next(iter(parts.partition.chunks.values()))
    config: Any = getattr(inner_model(model_of(chunk)), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return str(getattr(text, "_attn_implementation", None) or USUAL["attention"])


def _updates(parts: Parts) -> str:
    """Return whose kernels update: an accelerator's bits and those of its host differ."""
    tiers, device = parts.tiers, parts.axes.arena.device
    on_host = tiers is not None and tiers.executor == HOST and device.type != "cpu"
    if not on_host:
        return "device"
    share = parts.options.offload.fraction
    return f"host ({capability()})" if share == 1 else f"host ({capability()}), {share:g} of all records"


def who_adds(parts: Parts) -> dict[str, str]:
    """Return in which order gradients are added over dp and activations over tp; the backend's order is its own."""
    axes, order = parts.axes, parts.order
    each = parts.policy.often or parts.accumulation.usual == 1
    travel = [unit.gradients.plan.travels for unit in parts.units if unit.grads is not None]
    narrow = each and all(dtype.itemsize < torch.float32.itemsize for dtype in travel)
    in_rank_order = axes.dp.algorithm == Pairwise.name or (axes.dp.algorithm == AllToAll.name and narrow)
    over_dp = "none" if axes.dp.size == 1 else RANKS if in_rank_order else BACKEND
    over_tp = RANKS if axes.tp.algorithm == Pairwise.name else BACKEND
    return {"dp_sums": over_dp if order.summands is None else TREE, "tp_sums": over_tp if axes.tp.size > 1 else "none"}
