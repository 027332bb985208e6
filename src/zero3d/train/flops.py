"""Floating-point operations of a training step, and how many of them a device could do (MFU).

Source: Chowdhery et al., "PaLM" (2022), appendix B: 6 Psi + 12 L H S per token for forward and backward: L layers, H
hidden size, S sequence length. Psi leaves out input embeddings, and the experts that a token does not meet.
Recomputation does not count: it is no useful work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

# Dense bf16 peak (fp16 where there is no bf16) in FLOP/s, by words of the device's name; vendors' data sheets.
PEAKS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "MI300X": 1307e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A6000": 155e12,
    "RTX PRO 6000": 503.8e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "top_k")


def flops_per_token(model: nn.Module, length: int) -> float:
    """Return useful operations per token; attention counts where the model's config tells its shape."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    config: Any = getattr(model, "config", None)
    met = partial(_met, experts=_any(config, EXPERTS), chosen=_any(config, CHOSEN))
    psi = sum(map(met, (p for p in model.parameters() if id(p) not in embeddings - tied)))
    layers, hidden = getattr(config, "num_hidden_layers", 0) or 0, getattr(config, "hidden_size", 0) or 0
    return 6.0 * psi + 12.0 * layers * hidden * length


def _met(p: nn.Parameter, experts: int, chosen: int) -> float:
    """Return the elements of a parameter that one token meets; of stacked experts [experts, ., .] the chosen ones."""
    stacked = p.dim() == 3 and experts > 0 and p.shape[0] == experts
    return p.numel() * min(chosen / experts, 1.0) if stacked and chosen else p.numel()


def _any(config: Any, names: Sequence[str]) -> int:
    """Return the first of these settings that a model's config has, else 0."""
    return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's peak in FLOP/s, or None where it is not known; the table is of bf16 and fp16."""
    if precision not in ("bf16", "fp16"):
        return None
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
