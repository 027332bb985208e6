"""Tokens/s and model FLOP/s utilisation (MFU) of a 1B Llama shape on one card, in bf16.

Like for like: the same weights, tokens, dtypes, optimizer and clip (`peers.py`), no activation
recomputation, no compilation. A step's time includes its update. MFU counts 6 FLOPs per parameter
and token (the embedding's lookup apart) plus 12 x layers x hidden x length for attention
(Chowdhery et al., "PaLM" (2022), appendix B), over the card's dense bf16 peak if that is known;
beside it, over a matrix product measured now.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from model import HEAD_SIZE, Shape, batch, rounded
from peers import Variant
from ranks import synchronize
from torch import Tensor, nn

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
BATCH, LENGTH = 4, 2048
WARM_UP, FEWEST = 3, 5
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}  # dense bf16, SXM


class Llama(nn.Module):
    """A Llama whose call returns the mean loss: Hugging Face's; one of the same shape, bare or without transformers."""

    def __init__(self, shape: dict[str, Any], bare: bool = False) -> None:
        super().__init__()
        self.inner: nn.Module
        if bare or find_spec("transformers") is None:
            self.inner = Bare(shape)
            return
        from transformers import LlamaConfig, LlamaForCausalLM

        self.inner = LlamaForCausalLM(LlamaConfig(**shape))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids [B, T], targets [B, T] -> mean loss (fp32)."""
        if isinstance(self.inner, Bare):
            logits = self.inner(ids).float()
        else:
            logits = self.inner(input_ids=ids, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """A Llama's block: attention over grouped keys with rotary positions, and a gated MLP, each behind a norm."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        self.heads, self.kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        kv = hidden // self.heads * self.kv_heads
        self.norm, self.mlp_norm = (nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
        self.q, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H]; cos, sin [T, D] -> [B, T, H]."""
        h = self.norm(x)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in ((self.q(h), self.heads), (self.k(h), self.kv_heads), (self.v(h), self.kv_heads))
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Bare(nn.Module):
    """Embedding, blocks, norm and head of a Llama, which need nothing but torch."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape["num_hidden_layers"]))
        self.norm = nn.RMSNorm(shape["hidden_size"], eps=1e-6)
        self.head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)
        self.head_size = shape["hidden_size"] // shape["num_attention_heads"]
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, V]."""
        x = self.embed(ids)
        powers = torch.arange(0, self.head_size, 2, device=ids.device, dtype=torch.float32) / self.head_size
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] / 10000.0**powers
        cos, sin = (torch.cat([each, each], -1).to(x.dtype) for each in (angles.cos(), angles.sin()))
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_llama(shape: Shape) -> Llama:
    """The same fp32 weights wherever it is called, as `build_gpt` makes them; an MLP is four times as wide."""
    torch.manual_seed(0)
    heads = shape.d // HEAD_SIZE
    sizes = {
        "hidden_size": shape.d,
        "intermediate_size": 4 * shape.d,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": shape.vocab,
    }
    return rounded(Llama(sizes, bare=True))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of a head's elements by their positions' angles (Su et al., "RoFormer", 2021)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def measure_speed(
    device: torch.device, variant: Variant, seconds: float, shape: dict[str, Any], size: int, length: int
) -> dict[str, Any]:
    """Time a variant's steps for `seconds`, at least five after three to warm up; losses of the first and last."""
    deadline = time.monotonic() + seconds
    times: list[float] = []
    losses: list[Tensor] = []
    while len(losses) < WARM_UP + FEWEST or time.monotonic() < deadline:
        tokens = batch(len(losses), size, length, shape["vocab_size"], device)
        synchronize(device)
        begun = time.perf_counter()
        losses.append(variant.step(*tokens))
        synchronize(device)
        times.append(time.perf_counter() - begun)
    counted = times[WARM_UP:]
    return {
        "tokens_per_s": size * length / median(counted),
        "median_s": median(counted),
        "min_s": min(counted),
        "steps": len(counted),
        "first_loss": float(losses[0]),
        "loss": float(losses[-1]),
    }


def utilisation(
    device: torch.device, row: dict[str, Any], shape: dict[str, Any], length: int, peak_tflops: float | None
) -> dict[str, float | None]:
    """Return model TFLOP/s against the card's peak and against a matrix product measured now; peak memory."""
    flops = row["tokens_per_s"] * flops_per_token(shape, length)
    if device.type != "cuda":
        return {"model_tflops": flops / 1e12}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    name = torch.cuda.get_device_name(device)
    known = peak_tflops or next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
    product = matmul_tflops(device)
    return {
        "model_tflops": flops / 1e12,
        "mfu": flops / 1e12 / known if known else None,
        "matmul_tflops": product,
        "of_matmul": flops / 1e12 / product,
        "peak_gib": allocated / 2**30,
        "peak_reserved_gib": reserved / 2**30,
    }


def flops_per_token(shape: dict[str, Any], length: int) -> float:
    """Forward and backward of one token."""
    with torch.device("meta"):
        model = Llama(shape)
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    multiplied = sum(p.numel() for p in model.parameters()) - looked_up
    return 6.0 * multiplied + 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length


def matmul_tflops(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """What a large bf16 matrix product reaches on this card."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        a @ b
    synchronize(device)
    return 2 * size**3 * repeats / (time.perf_counter() - begun) / 1e12
