"""Real models as the planner's data: parameters to the last one, operations and bytes of a token by hand."""

import pytest
import torch
from hybrids import hybrid
from tensors import tiny
from torch import nn

from zero3d.errors import ConfigError
from zero3d.models.adapters import add_adapters
from zero3d.models.build import build
from zero3d.models.open import Opened
from zero3d.tools.cli.plan_options import lora_of
from zero3d.tools.plan.sequence import kept_more, sp_refused
from zero3d.tools.plan.shapes import llama
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.figures import HEAD, measure
from zero3d.tools.sim.live import StorageTracker
from zero3d.tools.sim.model_spec import outline, trace
from zero3d.tools.sim.patches import dropout_of_cards
from zero3d.tools.sim.units import find_part_names

# Published sizes; the counts follow from them by the sums in `llama` and `gpt2` below.
LLAMAS = {  # hidden, inner, layers, heads, kv heads, head dim, vocabulary, tied
    "llama 2 7B": (4096, 11008, 32, 32, 32, 128, 32000, False, 6_738_415_616),
    "llama 2 13B": (5120, 13824, 40, 40, 40, 128, 32000, False, 13_015_864_320),
    "llama 2 70B": (8192, 28672, 80, 64, 8, 128, 32000, False, 68_976_648_192),
    "llama 3 8B": (4096, 14336, 32, 32, 8, 128, 128256, False, 8_030_261_248),
    "llama 3.2 1B": (2048, 8192, 16, 32, 8, 64, 128256, True, 1_235_814_400),
    "mistral 7B": (4096, 14336, 32, 32, 8, 128, 32000, False, 7_241_732_096),
}
GPTS = {  # hidden, layers, heads
    "gpt2": (768, 12, 12, 124_439_808),
    "gpt2 medium": (1024, 24, 16, 354_823_168),
    "gpt2 large": (1280, 36, 20, 774_030_080),
    "gpt2 xl": (1600, 48, 25, 1_557_611_200),
}


@pytest.mark.parametrize("name", [
    name if name in ("llama 3 8B", "llama 3.2 1B") else pytest.param(name, marks=pytest.mark.long) for name in LLAMAS
])  # fmt: skip
def test_parameters_of_llamas(name):
    from transformers import LlamaConfig

    h, inner, layers, heads, kv, dim, vocab, tied, wanted = LLAMAS[name]
    block = 2 * h * heads * dim + 2 * h * kv * dim + 3 * h * inner + 2 * h
    assert layers * block + h + vocab * h * (1 if tied else 2) == wanted
    config = LlamaConfig(
        hidden_size=h, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=dim, vocab_size=vocab, tie_word_embeddings=tied,
    )  # fmt: skip
    spec = outline(build(config), 16)
    assert spec.params == spec.trainable == wanted
    assert [part.numel for part in spec.blocks] == [block] * layers
    assert (spec.hidden, spec.vocab, spec.heads, spec.kv_heads, spec.chain) == (h, vocab, heads, kv, True)


@pytest.mark.parametrize(
    "name", [name if name == "gpt2 xl" else pytest.param(name, marks=pytest.mark.long) for name in GPTS]
)
def test_parameters_of_gpts(name):
    from transformers import GPT2Config

    h, layers, heads, wanted = GPTS[name]
    assert layers * (12 * h * h + 13 * h) + 2 * h + 50257 * h + 1024 * h == wanted
    spec = outline(build(GPT2Config(n_embd=h, n_layer=layers, n_head=heads)), 16)
    assert spec.params == wanted
    assert [unit.copy_of for unit in spec.parts[-1].units] == [None, "transformer.wte"]


@pytest.mark.parametrize(
    ("name", "mixing"), [("minimax", "linear_attention (layers.0)"), ("next", None), ("llama", None)]
)
def test_layers_that_mix_tokens_are_told_and_no_plan_cuts_their_sequences(name, mixing):
    spec = outline(hybrid(name) if name == "minimax" else tiny(name), 16)
    assert spec.mixing == mixing
    refused = sp_refused(spec, 2, 1, 2)
    assert refused is None if mixing is None else "has linear_attention" in refused


def test_operations_of_a_llama_block_and_head():
    h, inner, kv, length, vocab = 32, 48, 16, 8, 64
    spec = trace(tiny("llama"), length)
    block, head = spec.parts[1].operations, spec.parts[-1].operations
    assert block.matrices == 2 * (2 * h * h + 2 * h * kv + 3 * h * inner)
    assert block.scores == 4 * length * h
    assert head.matrices == 2 * h * vocab
    assert block.input == 2 * h


def test_bytes_of_a_llama_block():
    """fp32 copies that two norms keep, 16-bit inputs of matrices, flash attention's q, k, v and output."""
    h, inner, kv, length = 32, 48, 32, 8
    figures = measure(model := tiny("llama", kv_heads=4), find_part_names(model), length, 1)
    norms = 2 * (4 * h + 4 + 2 * h + 2 * h)  # as it enters in fp32, 1/rms, normed, times weight
    attention = 2 * (h + 2 * kv + h) + 4 * 4  # of four heads a logsumexp each
    mlp = 2 * 4 * inner  # gate, its silu, up, their product
    assert figures[0].kept == length * (norms + attention + mlp)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(torch.tanh(self.inside(x)))


class Scaled(nn.Module):
    """A block that multiplies what its attention returns with a weight of its own, and so keeps it."""

    def __init__(self):
        super().__init__()
        self.attention, self.scale = Attention(), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + self.scale * self.attention(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList([Scaled(), Scaled()])
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_what_attention_returns_is_not_freed_where_it_is_recomputed():
    """Of 2 x 8 bytes a token each: what attention keeps, what the block keeps of it, and what the block returns."""
    figures = measure(model := Net(), find_part_names(model), 4, 1)[0]
    assert (figures.attention, figures.kept) == (4 * 16, 4 * 3 * 16)


def test_figures_are_linear_in_the_micro_batch_and_the_same_at_any_depth():
    one, two = (measure(model := tiny("llama", layers=2), find_part_names(model), 8, 1, batch=b) for b in (1, 2))
    deeper = measure(model := tiny("llama", layers=5), find_part_names(model), 8, 1)
    for part in (0, HEAD):
        assert deeper[part] == one[part]
        assert two[part].kept == pytest.approx(2 * one[part].kept, rel=0.01)  # a scalar or two
        assert two[part].matrices == 2 * one[part].matrices


def test_what_tp_cuts_of_a_fused_matrix():
    spec = outline(tiny("gpt2"), 8)
    weights = {weight.name: weight for unit in spec.parts[1].units for weight in unit.weights}
    assert (
        weights["transformer.h.0.attn.c_attn.weight"].cut,
        weights["transformer.h.0.attn.c_attn.weight"].blocks,
    ) == (1, 3)
    assert (weights["transformer.h.0.mlp.c_proj.weight"].cut, weights["transformer.h.0.mlp.c_proj.bias"].cut) == (
        0,
        None,
    )
    assert spec.parts[0].units[0].weights[0].cut == 0


def test_experts_of_which_a_token_meets_some():
    spec = outline(tiny("moe"), 8)
    block = spec.parts[1]
    experts = 3 * 32 * 16
    assert block.active == block.numel - 4 * experts + 2 * experts
    assert spec.experts == 4


def test_adapters_on_all_linear_layers_of_the_blocks():
    spec = outline(add_adapters(Opened(tiny("llama"), None), lora_of("r=4"), seed=0).module, 8)
    inputs_and_outputs = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    assert spec.trainable == 2 * 4 * inputs_and_outputs


@pytest.mark.parametrize("asked", ["128", "r=0", "r=many", "rank=8"])
def test_an_unknown_lora_is_refused(asked):
    with pytest.raises(ConfigError, match="such as --lora r=128"):
        lora_of(asked)


def test_a_model_without_blocks_is_refused():
    from torch import nn

    with pytest.raises(ConfigError, match="no list of two or more blocks"):
        outline(nn.Sequential(nn.Linear(4, 4)), 8)


def test_attention_of_shared_sequences_keeps_its_output_twice_by_hand():
    """As it was computed, of all rows and this rank's heads, and as it was sent back, of all heads and its rows."""
    model = llama(2, 64, 4, 2, 128, 256, 32)  # 4 heads of 16
    rows, heads, width, two_bytes = 32 // 2, 4, 16, 2
    assert kept_more(model, ParallelPlan(dp=2, sp=2, stage=3)) == rows * heads * width * two_bytes
    assert kept_more(model, ParallelPlan(dp=2, stage=3)) == 0


def test_a_spec_says_whether_a_loss_can_be_computed_in_tiles():
    from models import net

    head = tiny("llama", lora={"target_modules": ["q_proj", "lm_head"]})
    models = {
        "llama": tiny("llama"),
        "head": head,
        "q": tiny("llama", lora={"target_modules": ["q_proj"]}),
        "net": net(),
    }
    assert {name: outline(model, 8).tiles for name, model in models.items()} == {
        "llama": True, "head": False, "q": True, "net": False,
    }  # fmt: skip


class Half(nn.Module):
    """Rows by a matrix, with dropout before and a function behind: three kernels."""

    def __init__(self):
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.1), nn.Linear(64, 64, bias=False)

    def forward(self, hidden):
        return torch.relu(self.linear(self.drop(hidden)).view(hidden.shape))


def test_kernels_and_their_bytes_are_counted_and_views_are_not():
    """In bf16, an element of 64 read and written: dropout 2, 2 and a byte of its mask, a product, relu 2 and 2."""
    module, hidden = Half().bfloat16(), torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with StorageTracker() as live, dropout_of_cards():
        out = module(hidden)
        forward = list(live.launches)
        out.sum().backward()
    assert [nbytes for _, nbytes in forward] == [8 * 64 * 5, 0.0, 8 * 64 * 4]
    assert len(live.launches) > len(forward)


def test_a_block_is_launched_kernel_by_kernel_and_adapters_add_theirs():
    plain = trace(tiny("llama"), 32)
    adapted = trace(add_adapters(Opened(tiny("llama"), None), lora_of("r=4"), seed=0).module, 32)
    one, other = plain.blocks[0].operations, adapted.blocks[0].operations
    assert 20 < one.launches[0] < other.launches[0]
    assert one.passed[0] < other.passed[0]
    assert min(*one.passed, *other.passed, one.launches[1], other.launches[1]) > 0
