"""Closed-form models: weights and activations of GPT and Llama shapes, for when nothing can be traced.

    bytes kept per token and block (2-byte run)          whole on every tp rank   cut by tp
    ---------------------------------------------------  -----------------------  -------------------------------------
    GPT    Korthikanti: 34 h + 5 a s                     10 h: norms' inputs,     24 h, and 5 a s of scores unless
                                                         dropouts, linear inputs  attention is a flash kernel
    Llama  64 h measured in eager mode (7B's shape),     28 h, fused 8 h          8 f of the MLP, 2 (2 h + 2 kv) of
           37.5 h with fused norms and attention                                  attention, and eager mode's copies

An `input` of a block is 2 h. l layers, h hidden, a heads, s length, f width of the MLP, kv width of keys.
Source: Korthikanti et al. 2022, section 4.1; the 64 was measured on transformers' LlamaDecoderLayer, see docs.
"""

from __future__ import annotations

from dataclasses import replace

from zero3d.errors import ConfigError
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.formulas import parameters
from zero3d.tools.plan.spec import ModelSpec, Operations, Part, Unit, Weight

GPT_VOCAB = 50304  # GPT-2's 50257, padded to a multiple of 128 as everybody does
TYPICAL_HEAD = 128
EAGER_COPIES = constant("Llama's closed form", "eager copies")  # per hidden unit: of queries, keys and gates
EAGER_NORMS = constant("Llama's closed form", "eager norms")  # likewise, with fp32 copies
FUSED_NORMS = constant("Llama's closed form", "fused norms")  # in one kernel


def gpt(
    layers: int, hidden: int, heads: int, vocab: int, length: int, ffn: int | None = None, flash: bool = True
) -> ModelSpec:
    """Make GPT-2's shape, head tied to the embedding. flash: attention keeps no scores. Raises ConfigError."""
    _check(layers, hidden, heads, heads, vocab, length)
    f = ffn if ffn is not None else 4 * hidden
    scores = 0 if flash else 5 * heads * length
    cut = 8 * hidden + 4 * f + scores
    operations = Operations(
        matrices=2.0 * (4 * hidden * hidden + 2 * hidden * f),
        scores=4.0 * length * hidden,
        kept_cut=cut,
        kept_whole=10 * hidden,
        attention=scores,
        eager=not flash,
        input=2 * hidden,
        transient=2 * f + 6 * hidden,
    )
    blocks = tuple(Part("block", (_gpt_block(f"block.{i}", hidden, f),), operations) for i in range(layers))
    embedding = Unit("wte", (Weight("wte.weight", (vocab, hidden), cut=0), Weight("wpe.weight", (length, hidden))))
    norm = Unit("ln_f", _norm("ln_f", hidden))
    head = Unit("lm_head", (Weight("wte.weight", (vocab, hidden), cut=0),), copy_of="wte")
    first = Part("embedding", (embedding,), Operations(0.0, kept_whole=hidden))
    parts = (first, *blocks, Part("head", (norm, head), _head(hidden, vocab)))
    name = f"GPT {layers} x {hidden}, {heads} heads, vocabulary {vocab}"
    return ModelSpec(name, parts, length, hidden, vocab, heads, heads)


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, length: int, tied: bool = False
) -> ModelSpec:
    """Make Llama's shape: gated MLP, grouped keys, no biases; activations of eager mode (see `fused`)."""
    _check(layers, hidden, heads, kv_heads, vocab, length)
    kv = hidden // heads * kv_heads
    operations = Operations(
        matrices=2.0 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn),
        scores=4.0 * length * hidden,
        kept_cut=8 * ffn + 2 * (2 * hidden + 2 * kv) + EAGER_COPIES * hidden,
        kept_whole=EAGER_NORMS * hidden,
        input=2 * hidden,
        transient=4 * ffn + 4 * hidden,
    )
    blocks = tuple(Part("block", (_llama_block(f"layers.{i}", hidden, kv, ffn),), operations) for i in range(layers))
    embedding = Unit("embed_tokens", (Weight("embed_tokens.weight", (vocab, hidden), cut=0),))
    head = Unit("lm_head", (Weight("lm_head.weight", (vocab, hidden), cut=0),), "embed_tokens" if tied else None)
    norm = Unit("norm", (Weight("norm.weight", (hidden,)),))
    parts = (
        Part("embedding", (embedding,), Operations(0.0)),
        *blocks,
        Part("head", (norm, head), _head(hidden, vocab)),
    )
    name = f"Llama {layers} x {hidden}, {heads}/{kv_heads} heads, MLP {ffn}, vocabulary {vocab}"
    return ModelSpec(name, parts, length, hidden, vocab, heads, kv_heads)


def fused(model: ModelSpec) -> ModelSpec:
    """Give a model of `llama` norms and attention in one kernel each, as trainers run it."""
    old = model.blocks[0].operations
    cut, whole = old.kept_cut - EAGER_COPIES * model.hidden, FUSED_NORMS * model.hidden
    new = replace(old, kept_cut=cut, kept_whole=whole)
    return replace(model, parts=tuple(replace(p, operations=new) if p.kind == "block" else p for p in model.parts))


def of_params(psi: int, length: int) -> ModelSpec:
    """Make a GPT of about `psi` parameters: heads of 128 (64 below 1B), h/l near 100 as in published models.

    The shape is in the model's name and provenance. Raises ConfigError below a million parameters.
    """
    if psi < 10**6:
        raise ConfigError(f"{psi} parameters are fewer than a million: too few to guess a shape; pass a config.json.")
    layers, hidden = min(_candidates(psi), key=lambda shape: _badness(shape, psi, length))
    head = TYPICAL_HEAD if hidden % TYPICAL_HEAD == 0 and hidden >= 2048 else 64
    model = gpt(layers, hidden, hidden // head, GPT_VOCAB, length)
    provenance = f"assumed: {model.name}, {model.params:,} parameters for {psi:,} asked"
    return replace(model, provenance=provenance)


def _candidates(psi: int) -> list[tuple[int, int]]:
    """List (layers, hidden) around h = (100 psi/12)^(1/3), hidden in steps that leave heads for tp to divide."""
    middle = (100 * psi / 12) ** (1 / 3)
    step = 1024 if middle >= 7000 else 512 if middle >= 3000 else 128 if middle >= 2048 else 64  # heads that tp divides
    near = range(max(step, int(middle * 0.6) // step * step), int(middle * 1.5) + step, step)
    return [(layers, hidden) for hidden in near for layers in _layers(psi, hidden)]


def _layers(psi: int, hidden: int) -> list[int]:
    middle = (psi - GPT_VOCAB * hidden) / (12 * hidden * hidden)
    return [max(2, even) for even in (int(middle) // 2 * 2, int(middle) // 2 * 2 + 2)]


def _badness(shape: tuple[int, int], psi: int, length: int) -> float:
    """Score the relative miss, and a little an odd aspect: 1 % of parameters counts as h/l of 150 instead of 100."""
    layers, hidden = shape
    miss = abs(parameters(layers, hidden, GPT_VOCAB, length) / psi - 1)
    return miss + 0.02 * abs(hidden / layers / 100 - 1)


def _head(hidden: int, vocab: int) -> Operations:
    """Count norm, product and loss, which keeps logits (2 V) and an fp32 copy (4 V); transient: its gradient (4 V)."""
    return Operations(
        2.0 * hidden * vocab, kept_cut=6 * vocab, kept_whole=4 * hidden, input=2 * hidden, transient=4 * vocab
    )


def _norm(name: str, hidden: int) -> tuple[Weight, ...]:
    return Weight(f"{name}.weight", (hidden,)), Weight(f"{name}.bias", (hidden,))


def _gpt_block(name: str, hidden: int, ffn: int) -> Unit:
    def linear(inner: str, out: int, width: int, cut: int) -> tuple[Weight, ...]:
        return (
            Weight(f"{name}.{inner}.weight", (out, width), cut=cut),
            Weight(f"{name}.{inner}.bias", (out,), cut=0 if cut == 0 else None),
        )

    weights = (
        _norm(f"{name}.ln_1", hidden)
        + linear("attn.qkv", 3 * hidden, hidden, 0)
        + linear("attn.out", hidden, hidden, 1)
    )
    weights += _norm(f"{name}.ln_2", hidden) + linear("mlp.in", ffn, hidden, 0) + linear("mlp.out", hidden, ffn, 1)
    return Unit(name, weights)


def _llama_block(name: str, hidden: int, kv: int, ffn: int) -> Unit:
    shapes = {
        "self_attn.q_proj": ((hidden, hidden), 0),
        "self_attn.k_proj": ((kv, hidden), 0),
        "self_attn.v_proj": ((kv, hidden), 0),
        "self_attn.o_proj": ((hidden, hidden), 1),
        "mlp.gate_proj": ((ffn, hidden), 0),
        "mlp.up_proj": ((ffn, hidden), 0),
        "mlp.down_proj": ((hidden, ffn), 1),
    }
    weights = [Weight(f"{name}.{inner}.weight", shape, cut=cut) for inner, (shape, cut) in shapes.items()]
    weights += [Weight(f"{name}.{norm}.weight", (hidden,)) for norm in ("input_layernorm", "post_attention_layernorm")]
    return Unit(name, tuple(weights))


def _check(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, length: int) -> None:
    if min(layers, hidden, heads, kv_heads, vocab, length) < 1:
        raise ConfigError(
            f"layers={layers}, hidden={hidden}, heads={heads}, kv_heads={kv_heads}, vocab={vocab}, length={length}: "
            "each must be at least 1."
        )
    if hidden % heads or heads % kv_heads:
        raise ConfigError(f"hidden={hidden} must be a multiple of heads={heads}, and that of kv_heads={kv_heads}.")
