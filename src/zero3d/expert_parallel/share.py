"""Give every rank of the ep axis its part of a model's experts, in place."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from os.path import commonpath
from typing import Any, NamedTuple

from torch import nn

from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.expert_parallel.dispatch import Dispatch, call_all
from zero3d.expert_parallel.plan import ExpertLayer
from zero3d.shards.cuts import Cut

NUMBERED = re.compile(r".*\.\d+(?=\.)")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what a module calls the number of its experts


class Shared(NamedTuple):
    """What the ep axis did to a model.

    dispatches  of expert layers, by their names
    cuts        how stacked experts are cut, by name; nothing where ep is 1
    anywhere    whether any rank has such layers
    """

    dispatches: Mapping[str, Dispatch]
    cuts: Mapping[str, Cut]
    anywhere: bool

    def parameters(self) -> dict[nn.Parameter, tuple[Dispatch, str]]:
        """Return the layer and the local name of each stack of experts, as they are now."""
        layers = self.dispatches.values()
        return {p: (dispatch, key) for dispatch in layers for key, p in dispatch.parameters().items()}


def share_out(
    roots: Collection[nn.Module], layers: Sequence[ExpertLayer], ep: Comm, how: str, anywhere: bool
) -> Shared:
    """Cut the experts of all layers of these model chunks over the ep axis and let tokens travel to them.

    Values of real parameters are those of rank 0 of the axis: one broadcast each. Raises ConfigError where ep does not
    divide a layer's experts.
    """
    dispatches, cuts = {}, {}
    for layer in layers:
        if layer.experts % ep.size:
            fits = [str(n) for n in range(1, layer.experts + 1) if layer.experts % n == 0]
            raise ConfigError(
                f"ep={ep.size} cannot distribute the {layer.experts} experts of {layer.name}: {layer.experts} / "
                f"{ep.size} = {layer.experts / ep.size:.4g} is not a whole number. Pass an ep that divides them "
                f"({', '.join(fits)})."
            )
        dispatch = Dispatch(layer, ep, how)
        cut, local = Cut(0, ep.size, ep.rank, axis="ep"), layer.experts // ep.size
        for key in layer.parameters:
            p = layer.module._parameters[key]
            assert p is not None
            if ep.size > 1:
                layer.module._parameters[key] = _own_part(p, cut, ep)
                cuts[f"{layer.name}.{key}"] = cut
        if ep.size > 1:
            _cut_adapters(roots, layer.module, slice(ep.rank * local, (ep.rank + 1) * local))
        module: Any = layer.module
        for attribute in COUNTS:
            if getattr(module, attribute, None) == layer.experts:
                setattr(module, attribute, local)
        module.forward = dispatch
        dispatches[layer.name] = dispatch
    if ep.size > 1:
        _call_together(roots, dispatches)
    return Shared(dispatches, cuts, anywhere)


def _call_together(roots: Collection[nn.Module], dispatches: Mapping[str, Dispatch]) -> None:
    """Have layers of one block, which is the innermost numbered module around them, called together."""
    blocks: dict[str, dict[str, Dispatch]] = {}
    for name, dispatch in dispatches.items():
        if block := NUMBERED.match(name):
            blocks.setdefault(block[0], {})[name] = dispatch
    modules = {name: module for root in roots for name, module in root.named_modules()}
    for layers in blocks.values():
        if len(layers) > 1:
            around = commonpath([name.replace(".", "/") for name in layers]).replace("/", ".")
            call_all(modules[around], list(layers.values()))


def _cut_adapters(roots: Collection[nn.Module], experts: nn.Module, part: slice) -> None:
    """Leave adapters of stacked experts whole on every rank, which computes with those of its own experts."""
    if any(hasattr(module, "parameter_name") for root in roots for module in root.modules()):
        from zero3d.models.stacked_adapters import take_part  # imports PEFT, which put them there

        for root in roots:
            take_part(root, experts, part)


def _own_part(p: nn.Parameter, cut: Cut, ep: Comm) -> nn.Parameter:
    if not p.is_meta:
        ep.broadcast(p.data, "initial")
    part = nn.Parameter(cut.extract(p), requires_grad=p.requires_grad)
    part.__dict__.update(p.__dict__)  # transformers marks what it has initialised
    return part
