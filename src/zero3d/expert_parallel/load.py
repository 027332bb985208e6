"""How many tokens routers send to each expert, and the bias that levels this without a loss of its own.

    counts   of a step, by layer [experts]: of forwards in training, not of evaluations, nor of one that a backward runs
             again
    bias     b_i += rate x sign(mean - count_i) once a step that is applied, of the counts of all dp ranks: an expert
             that got too many tokens gets fewer

transformers has the bias as a buffer of routers (DeepSeek-V3, GLM-4-MoE) and never updates it.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2, auxiliary-loss-free load balancing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.expert_parallel.plan import ExpertLayer
from zero3d.models.experts import ROUTER_BIAS


class ExpertLoad:
    """Counts this rank's tokens by layer and expert, and moves routers' biases by `rate`; 0 leaves them alone."""

    def __init__(self, chunks: Mapping[int, nn.Module], layers: Sequence[ExpertLayer], dp: Comm, rate: float) -> None:
        self._dp = dp
        self._rate = rate
        self._watched = False
        self._layers = {layer.name: layer for layer in layers}
        self._routers = _routers(chunks.values(), layers) if rate else {}
        self._step, self._total = (
            {layer.name: torch.zeros(layer.experts, dtype=torch.int64, device=dp.device) for layer in layers}
            for _ in range(2)
        )
        if rate:
            self.watch()

    def watch(self) -> None:
        """Count from now on; without a bias to move nobody does until this is called. A compiled block is cut there."""
        for name, layer in self._layers.items() if not self._watched else ():
            layer.module.register_forward_pre_hook(partial(self._count, name))
        self._watched = True

    @_disable_dynamo
    def _count(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not module.training or torch._C._current_graph_task_id() != -1:
            return
        chosen = args[1].reshape(-1)
        self._step[name].scatter_add_(0, chosen, torch.ones_like(chosen))

    # --- a step ---------------------------------------------------------------------------------

    @property
    def values(self) -> int:
        """Numbers that a rank sends to every other of dp, once a step."""
        return sum(len(self._step[name]) for name in self._routers)

    def tally(self) -> Tensor:
        """Return this rank's counts of the step, of all layers with a bias, float64."""
        return torch.cat([self._step[name] for name in self._routers]).double()

    def level(self, counts: Tensor) -> None:
        """Move the biases by all ranks' counts, the sum of `tally`."""
        counted = torch.split(counts, [len(self._step[name]) for name in self._routers]) if self._routers else ()
        for router, of_layer in zip(self._routers.values(), counted, strict=True):
            bias = router._buffers[ROUTER_BIAS]
            assert bias is not None
            bias.add_(torch.sign(of_layer.mean() - of_layer).to(bias.dtype), alpha=self._rate)

    def close(self, trained: bool) -> None:
        """End a step. trained: it counts in `over_dp`."""
        for name, counts in self._step.items():
            if trained:
                self._total[name] += counts
            counts.zero_()

    def over_dp(self) -> dict[str, list[int]]:
        """Return the tokens of each expert since `watch`, by layer of this rank. 8 bytes for each to every dp rank."""
        if not self._watched or not self._total:
            return {}
        sums = self._dp.exchange(torch.cat(list(self._total.values()))).sum(0)
        parts = torch.split(sums, [len(counts) for counts in self._total.values()])
        return {name: [int(count) for count in part.tolist()] for name, part in zip(self._total, parts, strict=True)}


def check_bias(model: nn.Module, rate: float, replay: int) -> None:
    """Refuse a rate where nothing has a bias, and what would count a micro-batch twice. Raises ConfigError."""
    if rate < 0:
        raise ConfigError(f"expert_bias_rate={rate}: pass 0, which leaves biases unchanged, or a rate such as 0.001.")
    if rate and not any(name.rpartition(".")[2] == ROUTER_BIAS for name, _ in model.named_buffers()):
        raise ConfigError(
            f"expert_bias_rate={rate} adjusts the routers' bias (a buffer called {ROUTER_BIAS}), but no module of "
            f"{type(model).__name__} has one: leave it out; the model's own auxiliary loss balances its experts."
        )
    if rate and replay:
        raise ConfigError(
            f"expert_bias_rate={rate} counts every token once, but replay={replay} computes some twice: leave one of "
            "them out."
        )


def _routers(roots: Iterable[nn.Module], layers: Sequence[ExpertLayer]) -> dict[str, nn.Module]:
    """Return the module with the bias of each layer that has one: it is beside the experts."""
    modules = [
        (name, module) for root in roots for name, module in root.named_modules() if ROUTER_BIAS in module._buffers
    ]
    around = {layer.name: f"{layer.name.rpartition('.')[0]}." for layer in layers}
    return {layer: module for layer, prefix in around.items() for name, module in modules if name.startswith(prefix)}
