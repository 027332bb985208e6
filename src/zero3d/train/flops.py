"""Floating-point operations of a training step, and how many of them a device could do (MFU).

Source: Chowdhery et al., "PaLM" (2022), appendix B: 6 Psi + 12 L H S per token for forward and
backward, where Psi leaves out input embeddings, L layers, H hidden size, S sequence length.
Recomputation does not count: it is no useful work.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# Dense bf16 peak in FLOP/s, by a part of the device's name; vendors' data sheets.
PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "MI300X": 1307e12,
    "L40S": 362e12, "A6000": 155e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12,
}  # fmt: skip


def flops_per_token(model: nn.Module, length: int) -> float:
    """Useful operations per token; attention counts where the model's config tells its shape."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    psi = sum(p.numel() for p in model.parameters() if id(p) not in embeddings - tied)
    config: Any = getattr(model, "config", None)
    layers, hidden = getattr(config, "num_hidden_layers", 0) or 0, getattr(config, "hidden_size", 0) or 0
    return 6.0 * psi + 12.0 * layers * hidden * length


def peak_flops(device_name: str) -> float | None:
    """What one device could do, or None where it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)
