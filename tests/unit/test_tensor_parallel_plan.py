"""Plans: what is read, what is refused and how, which parameters are cut; no ranks."""

import re
from pathlib import Path

import pytest
import torch
from families import family
from models import net
from tensors import tiny
from torch import nn
from transformers.pytorch_utils import Conv1D

from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.pipeline.split import split
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.parallelize import parallelize
from zero3d.tensor_parallel.plan import REFUSED, STYLES, parse, read_plan
from zero3d.tensor_parallel.proposal import propose
from zero3d.tensor_parallel.regions import Regions
from zero3d.tensor_parallel.shipped import SHIPPED, UNPLANNED, shipped_plan

NET = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def on_meta(name, **options):
    """A tiny model whose parameters have shapes only: cutting it needs no peers."""
    model = tiny(name, **options).to("meta")
    model.tie_weights()
    return model


def cut(model, size=2, rank=0, **options):
    return parallelize(model, Axis("tp", rank, size), Ledger(), **options)


def shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


# Styles in the tensor-parallel plans of all models, by version of transformers.
USED = {
    "5.17": {
        "all_reduce", "colwise", "colwise_gather_output", "embedding_rowwise", "mla_kv_a_proj", "moe_identity_expert",
        "moe_tp_experts", "packed_colwise", "packed_rowwise", "replicated_with_grad_allreduce", "rowwise",
        "rowwise_split_input",
    },
}  # fmt: skip
USED["5.23"] = USED["5.17"] | {"embedding_colwise", "local_params", "replicate"}
PLAN = r"^( *)\w*tp_plan\w*[^=\n]*= \{($.*?^\1|[^\n]*)\}$"  # in lines of its own or in one


def installed():
    """Version and styles of the transformers at hand; read as text, since some models need other packages."""
    import transformers

    files = Path(transformers.__file__).parent.glob("models/*/[cm]o*.py")
    plans = [plan for path in files for _, plan in re.findall(PLAN, path.read_text(), re.MULTILINE | re.DOTALL)]
    version = ".".join(transformers.__version__.split(".")[:2])
    return version, {style for plan in plans for style in re.findall(r'": "(\w+)"', plan)}


def test_every_style_that_the_installed_transformers_uses_is_known_or_refused_for_a_reason():
    version, styles = installed()
    assert styles == USED.get(version, styles | {"colwise", "rowwise", "packed_colwise", "moe_tp_experts"})
    assert styles <= set(STYLES) | set(REFUSED), styles - set(STYLES) - set(REFUSED)
    assert not set(STYLES) & set(REFUSED)


@pytest.mark.parametrize("style", sorted(set.union(*USED.values())))
def test_every_style_of_known_versions_is_read_or_refused_by_its_name(style):
    if style in REFUSED:
        with pytest.raises(ConfigError, match=f"layers.0: style '{style}' is not supported"):
            parse("layers.0", style)
    else:
        assert parse("layers.0", style).kind == {"local_params": "replicate"}.get(style, style)


def test_a_plan_is_read_from_the_model_and_the_users_map_wins():
    model = on_meta("llama")
    plan = read_plan(model, {"model.layers.*.mlp.*": "none", "layers.1.self_attn.o_proj": "replicate"})
    assert plan["model.layers.0.self_attn.q_proj"].kind == "colwise"
    assert plan["model.layers.1.self_attn.o_proj"].kind == "replicate"
    assert not any("mlp" in name for name in plan)


def test_names_inside_a_peft_wrapper_and_below_the_head_are_found():
    model = on_meta("llama", lora=True)
    done = cut(model, rank=1)
    start = "base_model.model.model.layers.0."
    assert done.cuts[start + "self_attn.q_proj.lora_B.default.weight"][:3] == (0, 2, 1)
    assert done.cuts[start + "self_attn.o_proj.lora_A.default.weight"][:3] == (1, 2, 1)
    assert done.cuts[start + "mlp.down_proj.base_layer.weight"][:3] == (1, 2, 1)
    lora = {name.removeprefix(start) for name in done.partial if name.startswith(start)}
    assert lora == {
        "self_attn.q_proj.lora_A.default.weight",
        "self_attn.o_proj.lora_B.default.weight",
        "mlp.down_proj.lora_B.default.weight",
    }


def test_experts_are_cut_in_their_inner_width_and_norms_of_heads_are_partial():
    model = on_meta("moe")
    whole = shapes(model)
    done = cut(model)
    experts = "model.layers.0.mlp.experts."
    assert whole[experts + "gate_up_proj"] == (4, 32, 32)
    assert shapes(model)[experts + "gate_up_proj"] == (4, 16, 32)
    assert done.cuts[experts + "gate_up_proj"] == Cut(1, 2, 0, 2)
    assert shapes(model)[experts + "down_proj"] == (4, 32, 8)
    assert {name for name in done.partial if "layers.0." in name} == {
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
    }


def test_a_tied_head_is_one_parameter_with_one_cut():
    model = on_meta("qwen3")
    done = cut(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert shapes(model)["model.embed_tokens.weight"] == (32, 32)
    assert "lm_head.weight" not in done.cuts
    assert model.model.embed_tokens.num_embeddings == 32


def test_under_sequence_parallelism_all_that_is_whole_inside_the_blocks_is_partial():
    model = on_meta("llama")
    done = cut(model, sequence=True)
    inside = {name for name, _ in model.named_parameters() if ".layers." in name} - done.cuts.keys()
    assert done.partial == inside
    assert "model.layers.0.self_attn.o_proj.bias" in inside
    assert "model.norm.weight" not in done.partial


def test_only_part_of_a_model_is_cut_where_other_blocks_are_elsewhere():
    plan = {"transformer.h.1.attn.c_attn": "packed_colwise:3"}
    part = split(on_meta("gpt2"), [1, 1], 0)
    done = cut(part, plan=plan)  # names what is on the other part
    assert {name.split(".")[2] for name in done.cuts if ".h." in name} == {"0"}
    assert part.get_submodule("transformer.h.0.attn").split_size == 16


def test_one_rank_leaves_a_model_as_it_is():
    model = on_meta("gpt2")
    before = shapes(model)
    assert cut(model, size=1) == ({}, frozenset(), ())
    assert shapes(model) == before


@pytest.mark.parametrize(("model", "options", "message"), [
    ("net", {}, "'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'"),
    ("net", {"plan": {"layers.*.upp": "colwise"}}, "gives 'layers.*.upp' a style, but nothing in Net has that name"),
    ("llama", {"plan": {"layers.*.mlp.up_proj": "colwize"}}, "layers.*.mlp.up_proj: unknown tensor-parallel style 'colwize'"),
    ("llama", {"plan": {"layers.*.mlp.up_proj": "colwise:2"}}, "unknown tensor-parallel style 'colwise:2'"),
    ("llama", {"plan": {"layers.*.mlp.up_proj": "moe_identity_expert"}}, "style 'moe_identity_expert' is not supported"),
    ("llama", {"plan": {"layers.*.self_attn": "own_heads"}}, "unknown tensor-parallel style 'own_heads'"),
    ("llama", {"plan": {"layers.*.input_layernorm": "colwise"}}, "is a LlamaRMSNorm"),
    ("llama", {"plan": {"lm_head": "embedding_rowwise"}}, "is for an nn.Embedding, and this is a Linear"),
    ("llama", {"size": 4}, "num_key_value_heads=2: 2 / 4 is not a whole number"),
    ("llama", {"size": 3}, "num_attention_heads=4: 4 / 3 is not a whole number. Pass a tp that divides it (1, 2, 4)"),
    ("qwen3", {"plan": {"lm_head": "replicate"}}, "lm_head.weight is tied to a parameter that is cut"),
    ("moe", {"sequence": True}, "mlp.gate.weight (4, 32) is whole"),
    ("net", {"plan": {"head": "replicate"}, "sequence": True}, "needs one list of blocks"),
    ("net", {"plan": NET | {"head": "colwise"}}, "head.weight: 61 is not divisible by"),
    ("gpt2", {"plan": {"h.*.attn.split_size": "divided"}, "size": 4, "twice": True}, "'divided' is for whole numbers"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_names_and_numbers(model, options, message):
    built = net().to("meta") if model == "net" else on_meta(model)
    if options.pop("twice", False):
        built.transformer.h[0].attn.split_size = 30
    with pytest.raises(ConfigError, match=re.escape(message)):
        cut(built, **options)


@pytest.mark.parametrize("kind", ["rwkv", pytest.param("recurrent_gemma", marks=pytest.mark.long)])
def test_types_that_no_plan_is_for_are_refused_by_name_with_what_they_have(kind):
    with pytest.raises(ConfigError, match=f"zero3d has none for {kind}, which has {re.escape(UNPLANNED[kind])}. Write"):
        read_plan(family(kind).to("meta"))


def test_attention_of_low_rank_keeps_its_first_projections_whole():
    done = cut(on_meta("mla"))
    inside = {name.split(".")[-2] for name in done.cuts if "self_attn" in name}
    assert inside == {"q_b_proj", "kv_b_proj", "o_proj"}
    assert not done.partial


def test_numbers_of_heads_are_divided_only_where_matrices_are_cut():
    model = on_meta("bloom")
    cut(model, plan={f"h.0.self_attention.{name}": "none" for name in ("query_key_value", "dense")})
    first, second = model.transformer.h
    assert (first.self_attention.num_heads, second.self_attention.num_heads) == (4, 2)
    assert (len(first.self_attention._forward_pre_hooks), len(second.self_attention._forward_pre_hooks)) == (0, 1)


@pytest.mark.parametrize(("name", "attention"), [("bloom", "h.*.self_attention"), ("mpt", "blocks.*.attn")])
def test_a_plan_that_only_divides_heads_is_refused_where_every_head_has_a_slope(name, attention):
    with pytest.raises(ConfigError, match=r"cut over tp and takes \w+, which has a slope.*'own_heads:H'"):
        cut(on_meta(name), plan={attention: "none"})
    cut(on_meta(name), plan={attention: "own_heads:4"})


def test_sparse_mlps_that_take_the_mean_of_their_gates_give_it_whole():
    plan = read_plan(on_meta("gemma3n_text"))
    assert plan["model.layers.0.mlp.gate_proj"].kind == "colwise_gather_output"
    assert plan["model.layers.0.mlp.down_proj"].kind == "rowwise_split_input"
    assert plan["model.layers.1.mlp.gate_proj"].kind == "colwise"
    with pytest.raises(ConfigError, match=r"layers.0.mlp uses the mean and deviation of all its gates"):
        cut(on_meta("gemma3n_text"), plan={"layers.*.mlp.gate_proj": "colwise"})


def test_heads_that_are_another_number_in_some_layers_are_counted_in_each():
    options = {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1}
    with pytest.raises(ConfigError, match=r"tp=2 cannot split num_key_value_heads=1: 1 / 2 is not a whole number"):
        cut(on_meta("gemma4_text", **options))


def test_norms_of_every_head_and_one_key_for_all_heads_leave_attention_whole():
    for name, options in [
        ("stablelm", {"qk_layernorm": True}), ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    ]:  # fmt: skip
        plan = read_plan(on_meta(name, **options))
        kinds = {style.kind for module, style in plan.items() if "self_att" in module}
        assert kinds == {"colwise_gather_output", "rowwise_split_input"}


def test_heads_that_tp_does_not_divide_are_no_hindrance_where_attention_is_whole():
    sizes = {"num_attention_heads": 3, "hidden_size": 30, "multi_query": True, "new_decoder_architecture": False}
    assert cut(on_meta("falcon", **sizes), size=2).cuts


def test_attention_sinks_and_experts_with_biases_are_cut_and_the_last_bias_is_added_once():
    model = on_meta("gpt_oss")
    whole = shapes(model)
    done = cut(model)
    layer = "model.layers.0."
    halved = {n.removeprefix(layer) for n, shape in shapes(model).items() if n.startswith(layer) and shape != whole[n]}
    assert halved >= {"self_attn.sinks", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"}
    assert shapes(model)[layer + "mlp.experts.down_proj"] == (4, 24, 32)
    assert done.partial == {f"model.layers.{i}.mlp.experts.down_proj_bias" for i in range(2)}


def test_our_plan_is_found_inside_a_model_of_images_and_text_and_inside_pefts_wrapper():
    import peft

    model = nn.ModuleDict({"tower": nn.Linear(4, 4), "text": on_meta("opt").model})
    model.config = model.text.config
    assert shipped_plan(model)["text.decoder.layers.*.fc1"] == "colwise"
    adapted = peft.get_peft_model(tiny("opt"), peft.LoraConfig(target_modules=["q_proj"]))
    assert read_plan(adapted)["base_model.model.model.decoder.layers.0.fc2"].kind == "rowwise"


@pytest.mark.parametrize("style", ["none", "replicate"])
def test_embedding_and_head_are_whole_where_the_users_map_says_so(style):
    done = cut(on_meta("qwen3"), plan={"embed_tokens": style, "lm_head": style})
    assert all(".layers." in name for name in done.cuts)
    assert "lm_head.weight" in cut(on_meta("llama"), plan={"embed_tokens": style}).cuts


@pytest.mark.parametrize(
    "where", [{"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_an_embedding_in_pefts_wrapper_can_be_kept_whole_as_the_refusal_says(where):
    if "model.embed_tokens" not in read_plan(on_meta("llama")):
        pytest.skip("the plan of this transformers leaves Llama's embedding whole, as 5.17 and older")
    with pytest.raises(ConfigError, match="embed_tokens out of these") as error:
        cut(on_meta("llama", lora=where))
    name = re.search(r"with '(\S+)': 'replicate'", str(error.value))[1]
    assert not any(
        "embed_tokens" in parameter for parameter in cut(on_meta("llama", lora=where), plan={name: "replicate"}).cuts
    )


def test_a_plan_for_the_head_alone_is_none():
    model = on_meta("llama")
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(ConfigError, match="without a tensor-parallel plan for its blocks"):
        cut(model)


def test_names_that_only_the_models_own_plan_lacks_are_no_error():
    assert "layers.*.mlp.gate_proj" in on_meta("moe").config.base_model_tp_plan
    read_plan(on_meta("moe"))


def test_a_tensor_enters_once_until_it_is_written_or_something_leaves():
    regions = Regions(channel=Axis("tp", 0, 1), sequence=False)
    x = torch.ones(2, 3, requires_grad=True) * 1
    first = regions.copy_to(x, "q")
    assert regions.copy_to(x, "k") is first
    with torch.no_grad():
        assert regions.copy_to(x, "k") is not first
    again = regions.copy_to(x, "q")
    x += 1
    assert regions.copy_to(x, "v") is not again
    assert regions.copy_to(x + 0, "v") is not first
    kept = regions.copy_to(x, "q")
    regions.forget()
    assert regions.copy_to(x, "q") is not kept


def test_linear_layers_of_other_kinds_are_refused_by_class():
    model = nn.ModuleDict({"one": nn.Conv1d(4, 4, 1)})
    with pytest.raises(ConfigError, match="a Conv1d:"):
        cut(model.to("meta"), plan={"one": "rowwise"})


class Pair(nn.Module):
    """An MLP of two matrices, the first of `width` outputs, the second of `taken` inputs; of Conv1D on request."""

    def __init__(self, width, taken, conv=False):
        super().__init__()
        self.fc1 = Conv1D(width, 8) if conv else nn.Linear(8, width)
        self.fc2 = Conv1D(8, taken) if conv else nn.Linear(taken, 8)


@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize(
    ("width", "taken", "styles"),
    [
        (12, 12, ("colwise", "rowwise")),
        (24, 12, ("colwise_gather_output", "rowwise_split_input")),  # Moshi's: halves that gate each other
    ],
    ids=["plain", "gated halves"],
)
def test_only_matrices_that_fit_each_other_are_proposed_as_a_pair(width, taken, styles, conv):
    model = nn.Module()
    model.layers = nn.ModuleList(Pair(width, taken, conv) for _ in range(2))
    assert propose(model, [""]) == f"For example: {{'layers.*.fc1': '{styles[0]}', 'layers.*.fc2': '{styles[1]}'}}."


def test_the_last_matrix_of_a_recurrence_is_not_cut_alone(monkeypatch):
    monkeypatch.setitem(SHIPPED, "kimi_linear", {"layers.*.self_attn.o_proj": "rowwise"})  # as of attention
    with pytest.raises(ConfigError, match=r"cuts model\.layers\.0\.self_attn\.o_proj and nothing before it"):
        cut(family("kimi_linear").to("meta"))
