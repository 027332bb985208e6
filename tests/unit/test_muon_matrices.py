"""Which parameters Muon takes, what is fused in them, and who owns which matrix."""

import math

import mixtures
import pytest
import torch
from tensors import tiny

from zero3d.blueprint.layout import UnitLayout
from zero3d.errors import ConfigError
from zero3d.optim import muon
from zero3d.optim.find import describe, find_matrices, groups_of
from zero3d.optim.matrices import Form, Split, adjusted, operations, ranges, read_split
from zero3d.optim.newton_schulz import COEFFICIENTS, EPS, orthogonalize
from zero3d.optim.owners import Owners, matrices_of, share_out


def model_of(family, **options):
    """A model of Hugging Face's, tiny: 4 heads of 8, 2 of keys and values."""
    import transformers as t

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | options
    config = t.AutoConfig.for_model(family, num_attention_heads=4, pad_token_id=2, **sizes)
    return t.AutoModelForCausalLM.from_config(config)


def seen(model, match=None, split=None, groups=None):
    """Splits of the first block's matrices, by the last names of parameters."""
    found = find_matrices(model, match, split or {}, groups)
    return {".".join(name.split(".")[-2:]): form for name, form in found.items() if ".0." in name}


FUSED = {
    "llama": (lambda: tiny("llama"), {"q_proj.weight": None, "down_proj.weight": None}),
    "phi3": (
        lambda: model_of("phi3", num_key_value_heads=2),
        {"qkv_proj.weight": Split(0, (32, 16, 16)), "gate_up_proj.weight": Split(0, (48, 48)), "o_proj.weight": None},
    ),
    "gpt_neox": (lambda: model_of("gpt_neox"), {"query_key_value.weight": Split(0, (8, 8, 8)), "dense.weight": None}),
    "bloom": (lambda: model_of("bloom", n_head=4, n_layer=2), {"query_key_value.weight": Split(0, (8, 8, 8))}),
    "gpt2": (lambda: tiny("gpt2"), {"c_attn.weight": Split(1, (32, 32, 32)), "c_proj.weight": None}),
    "persimmon": (lambda: model_of("persimmon"), {"query_key_value.weight": Split(0, (8, 8, 8))}),
    "gpt_bigcode": (lambda: model_of("gpt_bigcode", multi_query=False), {"c_attn.weight": Split(0, (8, 8, 8))}),
    "gpt_bigcode, one head": (lambda: model_of("gpt_bigcode"), {"c_attn.weight": Split(0, (32, 8, 8))}),
    "codegen": (lambda: model_of("codegen", rotary_dim=4), {"qkv_proj.weight": None}),
    "llama4": (lambda: tiny("llama4"), {"experts.gate_up_proj": Split(1, (48, 48)), "experts.down_proj": None}),
    "falcon, grouped": (
        lambda: model_of("falcon", new_decoder_architecture=True, num_kv_heads=2),
        {"query_key_value.weight": Split(0, (16, 8, 8))},
    ),
    "falcon, one head": (
        lambda: model_of("falcon", new_decoder_architecture=False, multi_query=True),
        {"query_key_value.weight": Split(0, (32, 8, 8))},
    ),
    "experts": (
        lambda: mixtures.mixture("qwen3_moe"),
        {"experts.gate_up_proj": Split(0, (32, 32)), "experts.down_proj": None, "gate.weight": None},
    ),
    "experts, transposed": (
        lambda: mixtures.mixture("gpt_oss"),
        {"experts.gate_up_proj": Split(1, (1, 1)), "experts.down_proj": None},
    ),
    "adapters": (lambda: tiny("llama", lora=True), {"default.weight": None}),
}


@pytest.mark.parametrize("family", list(FUSED))
def test_what_is_fused_in_models_of_many_families(family):
    build, wanted = FUSED[family]
    found = seen(build())
    assert {name: found[name].split for name in wanted} == wanted
    assert {name for name, form in found.items() if form.stacked} == {name for name in found if "experts." in name}
    assert not any(word in name for name in found for word in ("norm", "bias", "embed", "wte", "lm_head", "sinks"))


def test_embeddings_heads_norms_and_frozen_weights_are_adamws():
    model = tiny("qwen3")
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    found = find_matrices(model, None, {})
    others = {name for name, p in model.named_parameters() if name not in found}
    assert others >= {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"}
    assert all(p.dim() == 2 for name, p in model.named_parameters() if name in found)


class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image = torch.nn.Conv2d(3, 8, (2, 4))
        self.line = torch.nn.Conv1d(4, 8, 3)
        self.narrow = torch.nn.Linear(16, 1)
        self.place = torch.nn.Parameter(torch.zeros(5))


def test_convolutions_and_narrow_matrices():
    model = torch.nn.ModuleList([torch.nn.ModuleList([Odd(), Odd()])])
    found = find_matrices(model, None, {})
    assert {name.removeprefix("0.0."): form.parts(model.get_parameter(name).shape) for name, form in found.items()
            if name.startswith("0.0.")} == {"image.weight": [(8, 24)], "line.weight": [(8, 12)], "narrow.weight": [(1, 16)]}  # fmt: skip


def test_patterns_and_groups_choose():
    model = tiny("llama")
    assert set(seen(model, "*.mlp.*")) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    groups = [{"match": "*.q_proj.weight", "name": "adamw"}, {"match": "lm_head.weight", "name": "muon"},
              {"match": "*.up_proj.weight", "lr": 0.5}]  # fmt: skip
    found = find_matrices(model, None, {}, groups)
    assert "lm_head.weight" in found
    assert not any("q_proj" in name for name in found)
    made = groups_of(model, found, groups)
    assert [(group["matrices"], group.get("lr")) for group in made] == [
        (False, None), (False, None), (True, None), (True, 0.5), (True, None)
    ]  # fmt: skip
    named = [name for group in made for name in group["match"].split("|")]
    assert len(named) == len(set(named)) == len(dict(model.named_parameters()))


def test_heads_by_themselves_are_an_option():
    found = seen(tiny("llama"), split={"*.q_proj.weight": "equal:4", "*.k_proj.weight": "none"})
    assert found["q_proj.weight"].split == Split(0, (8, 8, 8, 8))
    assert found["k_proj.weight"].split is None


NOT_FOUND = {
    "no blocks": (lambda: (torch.nn.Linear(4, 4), None, {}), "no trainable one in a list"),
    "pattern": (lambda: (tiny("llama"), "*.nothing", {}), "'.*nothing' names no trainable matrix"),
    "unused split": (lambda: (tiny("llama"), None, {"*.qkv.weight": "equal:3"}), "names no matrix of Llama"),
    "style": (lambda: (tiny("llama"), None, {"*.q_proj.weight": "thirds"}), "unknown style 'thirds'. Known are none"),
    "size": (lambda: (tiny("llama"), None, {"*.q_proj.weight": "equal:5"}), r"equal:5 does not fit its 32 outputs"),
    "sizes": (lambda: (tiny("llama"), None, {"*.q_proj.weight": "sizes:8,8"}), r"\(32 and not 16\)"),
    "zero": (lambda: (tiny("llama"), None, {"*.q_proj.weight": "equal:0"}), "unknown style"),
}


@pytest.mark.parametrize("case", list(NOT_FOUND))
def test_what_names_nothing_or_does_not_fit_is_one_line(case):
    build, words = NOT_FOUND[case]
    with pytest.raises(ConfigError, match=words):
        find_matrices(*build())


def test_a_group_of_another_optimizer_is_refused():
    with pytest.raises(ConfigError, match="has the name 'sgd': take muon or adamw"):
        find_matrices(tiny("llama"), None, {}, [{"match": "*", "name": "sgd"}])


@pytest.mark.parametrize(
    "wrong", [{"adjust_lr": "rms"}, {"lr": -1}, {"ns_steps": 0}, {"momentum": 1.5}, {"adamw_lr": -1}]
)
def test_numbers_that_cannot_be_are_one_line(wrong):
    with pytest.raises(ConfigError, match=r"muon: .*"):
        muon(**wrong)


def test_groups_that_leave_no_matrix_are_named():
    with pytest.raises(ConfigError, match=r"groups \(optimizer.groups\) give AdamW to every matrix"):
        find_matrices(tiny("llama"), None, {}, [{"match": "*", "name": "adamw"}])


def test_the_table_of_rules_has_a_line_for_what_is_alike():
    model = mixtures.mixture("qwen3_moe")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    lines = describe(shapes, set(shapes), find_matrices(model, None, {}))
    assert (
        "muon   model.layers.*.mlp.experts.gate_up_proj [8, 64, 32]: 8 matrices, each of [32, 32] + [32, 32] x 2"
        in lines
    )
    assert "adamw  model.embed_tokens.weight [64, 32]" in lines
    assert [line[:5] for line in lines] == sorted((line[:5] for line in lines), reverse=True)


# --- arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "shape", "dim", "parts"),
    [
        ("equal:2", (6, 4), 0, [(3, 4), (3, 4)]),
        ("sizes:4,1,1", (6, 4), 0, [(4, 4), (1, 4), (1, 4)]),
        ("in_turn:2,1", (6, 4), 0, [(4, 4), (2, 4)]),
        ("in_turn:1,1", (3, 4), 1, [(3, 2), (3, 2)]),
    ],
)
def test_styles(style, shape, dim, parts):
    split = read_split("weight", style, shape, dim)
    form = Form(split=split)
    assert form.parts(shape) == parts
    # Every element is in the matrix that its place along `dim` belongs to.
    numbers = torch.arange(math.prod(shape)).view(shape)
    owners = split.owners(shape)
    found = {}
    for start, stop, part in ranges(shape, dim, owners, parts):
        for element in range(start, stop):
            found[element] = part
    places = (numbers // shape[1] if dim == 0 else numbers % shape[1]).flatten().tolist()
    assert found == {element: parts[owners[place]] for element, place in enumerate(places)}


def test_factors_of_the_learning_rate_are_torchs():
    for rows, columns in ((8, 2), (2, 8), (1, 7), (5, 5)):
        for ours, torchs in (("original", "original"), ("match_rms_adamw", "match_rms_adamw")):
            p = torch.nn.Parameter(torch.zeros(rows, columns))
            p.grad = torch.eye(rows, columns)
            torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=torchs).step()
            made = orthogonalize(p.grad, COEFFICIENTS, 5, EPS).float() * adjusted(rows, columns, ours)
            torch.testing.assert_close(-p.detach(), made)


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (1, 9), (8, 8)])
def test_a_batch_has_the_bits_of_its_matrices(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    kept = matrices.clone()
    together = orthogonalize(matrices, COEFFICIENTS, 5, EPS)
    assert torch.equal(matrices, kept)
    for one, of_batch in zip(matrices, together, strict=True):
        assert torch.equal(orthogonalize(one, COEFFICIENTS, 5, EPS), of_batch)
    values = torch.linalg.svdvals(together.float())
    assert bool(((values > 0.5) & (values < 1.5)).all())


def test_operations_are_those_of_three_products_a_step():
    assert operations(4, 10, 1) == operations(10, 4, 1) == 2 * (4 * 10 * 4 + 4 * 4 * 4 + 4 * 4 * 10)


# --- owners -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_owners_share_the_operations(n):
    costs = [int(c) for c in torch.randint(1, 1000, (50,), generator=torch.Generator().manual_seed(n))]
    owners = share_out(costs, n)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(n)]
    assert max(loads) <= sum(costs) / n + max(costs)
    assert max(loads) - min(loads) <= max(costs)
    assert share_out([7] * n, n) == list(range(n))


def of_units(n, whole=False, units=4):
    """Owners of matrices in units of an uneven number of parameters."""
    shapes = [("norm", (40,), 0), ("up", (96, 40), 1), ("down", (40, 96), 1), ("stack", (3, 20, 40), 1)]
    layouts = {number: UnitLayout(shapes, n) for number in range(units)}
    forms = {1: Form(), 2: Form(), 3: Form(stacked=True)}
    found = [matrix for number, layout in layouts.items() for matrix in matrices_of(number, layout, forms, {})]
    return Owners(found, layouts, n, whole)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_element_of_every_matrix_reaches_its_owner(n):
    owners = of_units(n)
    assert sorted(index for turn in owners.rounds for own in turn for index in own) == list(range(20))
    for index, matrix in enumerate(owners.matrices):
        covered = [owners.part(index, rank) for rank in range(n)]
        assert covered[0][0] == 0
        assert [stop for _, stop in covered if stop][-1] == matrix.numel
        assert sum(stop - start for start, stop in covered) == matrix.numel
    for turn in owners.rounds:
        table = [owners.sends(turn, rank) for rank in range(n)]
        assert [list(column) for column in zip(*table, strict=True)] == [owners.receives(turn, r) for r in range(n)]


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_sends_about_twice_its_share(n):
    owners = of_units(n, units=16)
    elements = sum(matrix.numel for matrix in owners.matrices)
    sent = [owners.moved(rank)[1] for rank in range(n)]
    assert sum(sent) <= 2 * elements
    assert max(sent) <= 2.6 * elements / n


def test_at_stage_0_results_are_gathered_and_one_rank_sends_nothing():
    owners = of_units(2, whole=True)
    calls, elements = owners.moved(0)
    assert calls == len(owners.rounds)
    assert elements >= sum(matrix.numel for matrix in owners.matrices) // 2
    assert of_units(1).moved(0) == (0, 0)


def test_a_matrix_larger_than_a_round_has_one_for_itself(monkeypatch):
    monkeypatch.setattr("zero3d.optim.owners.ROUND", 2000)
    owners = of_units(2)
    assert sorted({matrix.numel for matrix in owners.matrices}) == [800, 3840]
    assert {len(own) for turn in owners.rounds for own in turn} == {1, 2}
    for turn in owners.rounds:
        for own in turn:
            assert len(own) == 1 or sum(owners.matrices[index].numel for index in own) <= 2000
            assert len({owners.matrices[index].shape for index in own}) <= 1
