"""Small models, data and plain training loops that engines are compared with."""

import copy
import hashlib
from contextlib import ExitStack
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 61


class Block(nn.Module):
    """A residual block with a norm and two projections."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Embedding, blocks, norm, head: the shape of a language model without attention."""

    def __init__(self, width=24, layers=3, tied=False, dropout=0.0, vocab=VOCAB):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def net(**options):
    torch.manual_seed(7)
    return Net(**options)


class PostNorm(nn.Module):
    """A block whose norm comes last, as the first Transformers had it: what it hands on is in fp32 under autocast."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Waves(nn.Module):
    """Positions as waves in fp32, which the forward makes, in front of blocks; it fails where weights alone are in 16 bits."""

    def __init__(self, width=32):
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(61, width)
        self.layers = nn.ModuleList(PostNorm(width) for _ in range(2))
        self.grouped = nn.GroupNorm(4, width)
        self.head = nn.Linear(width, 61)

    def forward(self, ids):
        rates = torch.exp(-torch.arange(self.width // 2, dtype=torch.float32))
        angles = torch.arange(ids.shape[1], dtype=torch.float32)[:, None] * rates
        x = self.embed(ids) + torch.cat([angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.grouped(x.transpose(1, 2)).transpose(1, 2))


def waves():
    torch.manual_seed(3)
    return Waves()


def hf(name, inner=48, vocab=VOCAB):
    """A tiny Hugging Face model: llama, qwen3 (tied), qwen3_moe (fused experts) or gpt2 (tied, dropout off).

    inner  width of Llama's and Qwen3's MLP; from 96 on a block is larger than half of a unit's least storage
           (16,384 elements), so that two ranks share it and not only its padding
    """
    import transformers as t

    torch.manual_seed(7)
    common = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": inner, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**common, **heads, **ends))
    if name == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**common, **heads, **ends, **experts))
    if name == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**common, **heads, **ends, head_dim=8, tie_word_embeddings=True))
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1, **off
        )
    )


def build(name, **options):
    return net(tied=name == "tied", **options) if name in ("net", "tied") else hf(name)


def batch(step, rank=0, size=2, length=9):
    """Token ids [size, length], another batch for every (step, rank)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(3, VOCAB, (size, length), generator=generator)


def loss_of(model, ids):
    """Mean next-token loss of a plain or Hugging Face model."""
    output = model(ids)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def lifted(function):
    """A function of a tensor that is to return fp32: of float64 it returns float64."""

    def call(tensor, *args, **kwargs):
        if tensor.dtype == torch.float64:
            args = [torch.float64 if arg is torch.float32 else arg for arg in args]
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return function(tensor, *args, **kwargs)

    return call


def lifted_product(product):
    """A product in float64 where one factor is: rotary of transformers 5.18 has frequencies @ positions in fp32."""

    def call(left, right):
        if torch.float64 in (left.dtype, right.dtype):
            left, right = left.double(), right.double()
        return product(left, right)

    return call


class LiftCasts(ExitStack):
    """Hugging Face norms, rotary and softmax cast to fp32; in the oracle run they must not, when recomputed neither.

    What models call is patched: a mode, which sees every function, costs as much as a tiny model's step.
    """

    def __enter__(self):
        for owner, names in ((torch.Tensor, ("to", "softmax")), (torch, ("softmax", "zeros_like"))):
            for name in names:
                self.enter_context(mock.patch.object(owner, name, lifted(getattr(owner, name))))
        to = torch.Tensor.to
        self.enter_context(mock.patch.object(torch.Tensor, "__matmul__", lifted_product(torch.Tensor.__matmul__)))
        self.enter_context(mock.patch.object(torch.Tensor, "float", lambda tensor: to(tensor, torch.float32)))
        return super().__enter__()


def bits(tensors):
    """One hash of the raw bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def adamw(params, **options):
    return torch.optim.AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, "fused": True} | options)


def train_plain(model, batches, clip=None, make=adamw, loss=loss_of):
    """The loop everyone writes: losses, norms; trains the model in place."""
    optimizer = make(model.parameters())
    losses, norms = [], []
    for micro_batches in batches:
        total = 0.0
        for ids in micro_batches:
            value = loss(model, ids)
            (value / len(micro_batches) if len(micro_batches) > 1 else value).backward()
            total += float(value.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / len(micro_batches))
    return losses, norms


def train_masters(model, batches, dtype, clip, make=adamw, scale=1.0):
    """Mixed precision written out: compute weights, fp32 masters of trained ones, one optimizer over masters."""
    from zero3d.precision import to_compute

    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().clone().float() for p in trained]
    for p in model.parameters():
        p.data = to_compute(p.detach().float(), dtype)
    optimizer = make(masters)
    losses, norms = [], []
    for ids in batches:
        value = loss_of(model, ids)
        (value * scale if scale != 1.0 else value).backward()
        for p, master in zip(trained, masters, strict=True):
            master.grad = p.grad.float()
            if scale != 1.0:
                master.grad.mul_(1.0 / scale)
            p.grad = None
        norms.append(float(nn.utils.clip_grad_norm_(masters, clip)))
        optimizer.step()
        for p, master in zip(trained, masters, strict=True):
            p.data.copy_(to_compute(master, dtype))
        losses.append(float(value.detach()))
    return losses, norms


def train_engine(engine, batches, through_engine=False, loss=loss_of):
    """The same loop on an engine; returns losses, norms and a hash of the weights."""
    losses, norms = [], []
    for ids in batches:
        value = loss(engine, ids)
        engine.backward(value) if through_engine else value.backward()
        norms.append(float(engine.step().grad_norm))
        losses.append(float(value.detach()))
    with engine.full_params():
        return losses, norms, bits(engine.module.parameters())


def clone(model):
    return copy.deepcopy(model)


def fill_gradients(engine):
    """Have memory for all gradients, as at the end of a step's last backward: the next step's end gives it back."""
    for unit in engine.units:
        for memory in () if unit.grads is None else unit.grads.memory:
            memory.fill()


def planned_bytes(engine):
    """Model states per rank by formula, padding apart."""
    return engine._parts.accounts.planned
