"""What an Engine refuses before it allocates anything, and what it refuses of a scheduler.

Everything here raises ConfigError and changes nothing.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero3d.activations.kept_inputs import checkpointed, recorders_of
from zero3d.distributed.determinism import mode
from zero3d.distributed.mesh import Mesh
from zero3d.engine.guards import is_guarded
from zero3d.errors import ConfigError
from zero3d.zero.initial_weights import Source

RECOMPUTE = "activations: full in a file, or zero3d.activations.recompute(model, 'full') before zero3d.Engine"


def check_step(accumulate: int, clip_norm: float | None) -> None:
    """Refuse numbers of micro-batches and norms that no step can have."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r}: pass the number of micro-batches per step, at least 1.")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise ConfigError(f"clip_norm={clip_norm!r}: pass a positive norm, or None for no clipping.")


def is_dtensor(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a DTensor. Only who has imported DTensor has one; the import takes 0.7 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def check_model(model: nn.Module, weights: Source | None) -> None:
    """Refuse a model that cannot be trained, and weights that are no values for it."""
    if weights is not None and not callable(weights):
        raise ConfigError(
            f"weights={weights!r} is no function that gives parameters their first values: leave it out. What stays of "
            "weights between their uses, zero.weights in a file, is weight_shards here: kept, cast or auto."
        )
    _refuse_untrainable(model)
    parameters = dict(model.named_parameters())
    if is_guarded(model) or any(map(is_dtensor, parameters.values())):
        raise ConfigError(
            f"this {type(model).__name__} is already sharded (by another Engine, one that failed, FSDP or "
            "DTensor): pass it to one Engine only, or close the other first: engine.close() (with a Trainer: "
            "trainer.accelerator.close_engine()) gives back a model that is cut over dp alone."
        )
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError(
            f"none of the {len(parameters)} parameters of {type(model).__name__} requires a gradient: "
            "unfreeze what is to be trained with p.requires_grad_(True)."
        )
    complex_ones = [name for name, p in parameters.items() if p.dtype.is_complex]
    if complex_ones:
        raise ConfigError(
            f"{len(complex_ones)} parameters are complex, first {complex_ones[0]!r}: store them as pairs of real "
            "numbers."
        )
    on_meta = [name for name, p in parameters.items() if p.is_meta]
    if on_meta and weights is None:
        raise ConfigError(
            f"{len(on_meta)} parameters have no data (meta device), first {on_meta[0]!r}: load weights first, or pass "
            "weights= with their values (zero3d.models.open.open_model gives both)."
        )


def _refuse_untrainable(model: nn.Module) -> None:
    """Refuse modules and weights that torch cannot train, or not yet."""
    kind = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or kind} was compiled by torch.jit, whose weights cannot be pointed elsewhere: pass the plain "
                "module, and torch.compile its blocks (zero3d.activations.compile_blocks)."
            )
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        if sparse := next(((name, t.layout) for name, t in named if t.layout is not torch.strided), None):
            raise ConfigError(
                f"{what} {sparse[0]!r} is sparse ({sparse[1]}), and an engine takes only dense tensors: replace it by "
                "its to_dense(), or make it a plain attribute of its module."
            )
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet (a lazy module of {kind}): call the model once on an example, "
                "without gradient, before the Engine is built."
            )
        if p.dtype.is_floating_point and p.dtype.itemsize == 1:
            raise ConfigError(
                f"parameter {name!r} is {p.dtype}, a dtype that cannot be gathered or trained: load the model "
                "dequantized, or make it a buffer, which an engine does not cast."
            )
        if p.is_inference():
            raise ConfigError(
                f"parameter {name!r} was made under torch.inference_mode(), whose tensors autograd never accepts: "
                f"build the model outside it, or copy it: model.load_state_dict({{k: v.clone() for k, v in ...}})."
            )


def check_experts(model: nn.Module, mesh: Mesh, exact: bool) -> None:
    """Refuse adapters on stacked experts whose gradients exact mode could not order over ep."""
    stacked = [name for name, module in model.named_modules() if hasattr(module, "parameter_name")]
    if mesh.ep > 1 and exact and stacked:
        raise ConfigError(
            f"{stacked[0]} has LoRA on stacked experts. With ep={mesh.ep} a rank sums its gradients of all sources in "
            "one product, and exact=True needs them apart: leave ep, exact or these adapters out."
        )


def check_activations(model: nn.Module, mesh: Mesh, partition: bool, host: bool, sequence: bool) -> None:
    """Refuse inputs of blocks that cannot be kept in parts or on the host, and warn of inputs that are already cut."""
    if not partition and not host:
        return
    what = "partition_activations" if partition else "offload.activations=host"
    if not recorders_of(model):
        by_torch = bool(checkpointed(model))
        if partition and by_torch:
            raise ConfigError(
                f"{what} needs blocks that zero3d recomputes, and this model's gradient_checkpointing has torch "
                f"recompute them: leave that out, and type {RECOMPUTE}."
            )
        if not by_torch:
            raise ConfigError(
                f"{what} is about the inputs of recomputed blocks, and none is recomputed: type {RECOMPUTE}, or leave "
                "it out."
            )
    if partition and sequence and mesh.rank == 0:
        warnings.warn(
            "partition_activations has no effect: sequence_parallel already cuts the hidden states between blocks over "
            "tp. Leave one of them out.",
            stacklevel=5,
        )


def check_replay(every: int, mesh: Mesh) -> None:
    """Refuse replays that have no meaning, or not the same bits."""
    if every < 0:
        raise ConfigError(f"replay={every}: pass a number of steps, or 0 for none.")
    if every and mesh.device.type != "cpu" and mode() != "on":
        raise ConfigError(
            f"health.replay={every} compares bits, and on {mesh.device.type} deterministic algorithms are {mode()}: "
            "leave train.deterministic out of the file, or call zero3d.make_deterministic() before anything else."
        )


def bind_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    """Return a scheduler on the engine's optimizer: built by a callable, or an object that is bound to it."""
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric that step() does not have: leave scheduler out and call it."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "the scheduler is bound to another optimizer than the engine's: pass scheduler=lambda optimizer: ..., or "
            "the optimizer it was built on as optimizer=."
        )
    return scheduler
