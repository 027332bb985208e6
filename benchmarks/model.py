"""The model and the data of the benchmarks: a plain PyTorch GPT on seeded tokens, and adapters on it.

    tokens [B, T] -> embedding -> blocks (pre-norm attention, MLP 4x GELU) -> norm -> untied head -> loss

No position embedding: the causal mask alone lets the model tell positions apart, and one more
tiny parameter would only measure latency. The loss is a cross entropy in fp32. Tokens are drawn
from a skewed distribution, so that the loss falls within a few steps and losses of different
engines can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero3d.models.blocks import find_blocks

HEAD_SIZE = 64
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Shape:
    """Size of the model; written "layers=8,d=512,vocab=8192"."""

    layers: int = 8
    d: int = 512
    vocab: int = 8192

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Raises ValueError for an unknown key or a size that is no positive number."""
        known = [field.name for field in fields(cls)]
        sizes = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in known or not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{part!r} is not KEY=SIZE with KEY one of {', '.join(known)}")
            sizes[key] = int(value)
        shape = cls(**sizes)
        if shape.d % HEAD_SIZE:
            raise ValueError(f"d={shape.d} is not a multiple of the head size {HEAD_SIZE}")
        return shape


class Block(nn.Module):
    """Pre-norm causal attention and a 4x GELU MLP, both residual."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.heads = d // HEAD_SIZE
        self.attention_norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.attention_out = nn.Linear(d, d)
        self.mlp_norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, T, d]."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, HEAD_SIZE)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """Calls return the mean loss, so that every engine's hooks see the same root output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.d)
        self.blocks = nn.ModuleList(Block(shape.d) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.d)
        self.head = nn.Linear(shape.d, shape.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids [B, T], targets [B, T] -> mean loss (fp32)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_gpt(shape: Shape) -> GPT:
    """The same fp32 weights wherever it is called.

    Each is a bf16 number, so that masters are the same whether they are made before or after the cast.
    """
    torch.manual_seed(0)
    return rounded(GPT(shape))


def rounded(model: M) -> M:
    """The model with every weight rounded to a bf16 number, in fp32."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model


class LowRank(nn.Module):
    """A frozen linear layer and what is trained beside it (Hu et al., "LoRA", 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.a.weight, std=0.02)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


def add_adapters(model: M, rank: int, dtype: torch.dtype = torch.bfloat16) -> M:
    """Put fp32 adapters of this rank on all linear layers of the blocks of a model, and freeze the rest in `dtype`.

    rank 0 leaves the model as it is.
    """
    if not rank:
        return model
    model.requires_grad_(False)
    for block in find_blocks(model).values():
        linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        for name, linear in linears:
            block.set_submodule(name, LowRank(linear, rank))
    rounded(model)
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)
    return model


def batch(seed: int, size: int, length: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and targets [size, length]; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(size, length + 1, generator=generator, dtype=torch.float64) ** 3
    tokens = (skewed * vocab).long().to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
