"""The engine as its checkpoints take it, and what the bits of a run depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero3d.activations.compilation import is_compiled
from zero3d.checkpoint.resume_contract import BACKEND, USUAL
from zero3d.checkpoint.state import EngineState
from zero3d.distributed.algorithms import AllToAll, Pairwise
from zero3d.distributed.determinism import device_facts
from zero3d.engine.assembly import Assembly
from zero3d.models.bases import model_of
from zero3d.models.packing import inner_model
from zero3d.precision import dtype_name
from zero3d.spec.tiers import HOST
from zero3d.zero.layout import GROUP

RANKS, TREE = "in rank order", "in exact mode's tree"


def engine_state(assembly: Assembly, loop: Mapping[str, Any] | None = None) -> EngineState:
    """Return what a checkpoint is made of; `loop` is what the training loop wants back.

    Raises Zero3dError where an earlier failure left the ranks of a pipeline apart.
    """
    assembly.execution.check()
    base, runtime, stepper = assembly.base, assembly.runtime, assembly.stepper
    axes, partition = base.axes, base.partition
    full, trained = partition.full_model, [unit for unit in runtime.units if unit.grads is not None]
    names = {full.owner(slot.name) for unit in trained for slot in unit.layout.slots}
    return EngineState(
        modules=list(partition.chunks.values()),
        full_model=full._replace(trainable=full.trainable | names),
        units=runtime.units,
        optimizer=runtime.optimizer,
        dp=axes.dp,
        tp=axes.tp,
        folds=axes.folds,
        world=axes.world,
        degrees=base.resolved.mesh.degrees,
        loss_scale=runtime.loss_scale,
        scheduler=stepper.scheduler,
        step=stepper.count,
        about=_about(assembly),
        loop=loop,
        cuts={partition.full_model.owner(name): cut for name, cut in partition.cuts.items()},
        summands=base.order.summands,
        base=assembly.frozen_base,
    )


def _about(assembly: Assembly) -> dict[str, Any]:
    """Return what the bits of a run depend on, beside its data and settings (`checkpoint/resume_contract.py`)."""
    base, policy = assembly.base, assembly.base.resolved.policy
    device, mesh = base.axes.arena.device, base.resolved.mesh
    cpu = device.type == "cpu"
    summands = base.order.summands
    about: dict[str, Any] = {
        "stage": policy.stage.number,
        "reduce": policy.reduce,
        "accumulate": assembly.runtime.accumulation.usual,
        **mesh.degrees._asdict(),
        "experts": base.options.mesh.experts if mesh.ep > 1 else "exact",
        "precision": base.resolved.precision.name,
        "wire": dtype_name(policy.wire),
        "algorithm": base.axes.dp.algorithm,
        "torch": torch.__version__,
        "kernels": torch.backends.cpu.get_cpu_capability()
        if cpu
        else torch.get_device_module(device).get_device_name(device),
        "threads": torch.get_num_threads() if cpu else 1,
        "leaves": None if summands is None else summands.per_batch,
        "gradient_dtype": base.options.offload.gradient_dtype,
        "moments": base.options.offload.moments if base.resolved.groups.block == GROUP else "int8",
        "updates": _updates(assembly),
        "tiled_loss": base.options.step.tiled_loss,
        "gather_budget": base.options.gather_budget,
        "gather_wire": base.options.zero.gather_wire,
        "slow_wire": base.options.zero.slow_wire,
        "slow_rounding": base.options.zero.slow_rounding,
        "attention": _attention(assembly),
        "sp_kind": "heads" if base.sequence is None or base.sequence.by_heads(mesh.tp) else "gather",
        "sp_masks": USUAL["sp_masks"] if base.sequence is None else base.sequence.masks,
        "linear": base.options.model.linear,
        "compiled": any(map(is_compiled, base.partition.module.modules())),
    }
    for feature in assembly.features:
        about |= feature.about()
    return about | ({} if cpu else who_adds(assembly)) | device_facts(device, mesh.everyone.backend, mesh.local_world)


def _attention(assembly: Assembly) -> str:
    """Return the implementation of attention in a model of transformers', by its name there; of another model sdpa."""
    if assembly.base.sequence is not None:
        return assembly.base.sequence.implementation
    chunk = next(iter(assembly.base.partition.chunks.values()))
    config: Any = getattr(inner_model(model_of(chunk)), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return str(getattr(text, "_attn_implementation", None) or USUAL["attention"])


def _updates(assembly: Assembly) -> str:
    """Return whose kernels update: an accelerator's bits and those of its host differ."""
    tiers, device = assembly.runtime.tiers, assembly.base.axes.arena.device
    on_host = tiers is not None and tiers.executor == HOST and device.type != "cpu"
    return f"host ({torch.backends.cpu.get_cpu_capability()})" if on_host else "device"


def who_adds(assembly: Assembly) -> dict[str, str]:
    """Return in which order gradients are added over dp and activations over tp; the backend's order is its own."""
    axes, order, runtime = assembly.base.axes, assembly.base.order, assembly.runtime
    each = assembly.base.resolved.policy.reduce == "every_micro_batch" or runtime.accumulation.usual == 1
    travel = [unit.gradients.travels for unit in runtime.units if unit.grads is not None]
    narrow = each and all(dtype.itemsize < torch.float32.itemsize for dtype in travel)
    in_rank_order = axes.dp.algorithm == Pairwise.name or (axes.dp.algorithm == AllToAll.name and narrow)
    over_dp = "none" if axes.dp.size == 1 else RANKS if in_rank_order else BACKEND
    over_tp = RANKS if axes.tp.algorithm == Pairwise.name else BACKEND
    return {"dp_sums": over_dp if order.summands is None else TREE, "tp_sums": over_tp if axes.tp.size > 1 else "none"}
