"""Whole parameters become this rank's, once all cuts are known."""

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
    locals_ = {p: _local(p, cut) for p, cut in context.cuts.items()}
    for _, module, key, p in owners:
        if p in locals_:
            module._parameters[key] = locals_[p]
            _resize(module, locals_[p] if key == "weight" else None)
    context.cuts = {locals_[p]: cut for p, cut in context.cuts.items()}


def _local(p: nn.Parameter, cut: Cut) -> nn.Parameter:
    own = nn.Parameter(cut.take(p), requires_grad=p.requires_grad)
    own.__dict__.update(p.__dict__)  # transformers marks what it has initialised
    return own


def _resize(module: nn.Module, weight: Tensor | None) -> None:
    """A module's own numbers, where it has them: Conv1D's forward reads its."""
    if weight is None or weight.dim() != 2:
        return
    sizes = ("nx", "nf") if is_conv(module) else ("out_features", "in_features")
    for attribute, size in zip(sizes, weight.shape, strict=True):
        if hasattr(module, attribute):
            setattr(module, attribute, size)
    if isinstance(module, nn.Embedding):
        module.num_embeddings = weight.shape[0]
