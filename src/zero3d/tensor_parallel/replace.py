"""Whole parameters are replaced by this rank's part of them, once all cuts are known."""

from __future__ import annotations

from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.styles import StyleContext, is_conv


def apply_cuts(context: StyleContext) -> None:
    """Replace every cut parameter by this rank's part, wherever it is; values are rank 0's.

    Raises ConfigError where a module holds a cut parameter and no style is about that module.
    """
    owners = [(name, m, key, p) for name, m in context.model.named_modules() for key, p in m._parameters.items()]
    for name, module, key, p in owners:
        if p in context.cuts and module not in context.handled:
            raise ConfigError(
                f"{name}.{key} is tied to a parameter that is cut over tp, or its experts have no style: give {name} "
                "a style in the tensor-parallel plan (colwise_gather_output for a head, moe_tp_experts for experts), "
                "or 'replicate' to what it is tied to."
            )
    for t in (*context.model.parameters(), *context.model.buffers()):
        if not t.is_meta:
            context.regions.channel.broadcast(t.data, "initial")
    local = {p: _local(p, cut) for p, cut in context.cuts.items()}
    for _, module, key, p in owners:
        if p in local:
            module._parameters[key] = local[p]
            _resize(module, local[p] if key == "weight" else None)
    context.cuts = {local[p]: cut for p, cut in context.cuts.items()}


def _local(p: nn.Parameter, cut: Cut) -> nn.Parameter:
    part = nn.Parameter(cut.take(p), requires_grad=p.requires_grad)
    part.__dict__.update(p.__dict__)  # transformers marks what it has initialised
    return part


def _resize(module: nn.Module, weight: Tensor | None) -> None:
    """Set a module's numbers of inputs and outputs to those of its weight: Conv1D's forward reads its."""
    if weight is None or weight.dim() != 2:
        return
    sizes = ("nx", "nf") if is_conv(module) else ("out_features", "in_features")
    for attribute, size in zip(sizes, weight.shape, strict=True):
        if hasattr(module, attribute):
            setattr(module, attribute, size)
    if isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]
