"""Whether a model keeps packed documents apart is tried: what passes trains on packed rows as on the documents apart."""

import copy
from types import MethodType

import pytest
import tiny_types
import torch
import vision
from corpora import opened, write_lines
from families import family, llava
from hybrids import HYBRIDS, hybrid
from models import VOCAB, hf
from torch import nn

import zero3d
from zero3d.errors import ConfigError
from zero3d.models import packing
from zero3d.models.build import build
from zero3d.models.layer_kinds import kinds_left_out
from zero3d.models.packing import (
    as_row,
    check_packing,
    document_ends,
    forward_options,
    packing_verdict,
    position_rows,
    with_position_rows,
)
from zero3d.tools.cli.models import depending, usual_config
from zero3d.train.setup.support import Row, Support

TEXTS = ["\x05\x06\x07\x08", "\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10\x11", "\x12\x13", "\x14\x15\x16\x17\x18\x19\x1a"]
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
M_ROPE = vision.TEXT | {"head_dim": 8, "rope_parameters": ROPE}
TOWER = vision.QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
OF_QWEN = {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
OF_GLM = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ROTATES_ALL = {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}


def composed(name, tower, **text):
    """A tiny vision-language model of a type whose image tokens have usual names."""
    import transformers as t

    torch.manual_seed(3)
    ids = vision.QWEN_TOKENS | {"image_start_token_id": 62, "image_end_token_id": 61}
    config = t.AutoConfig.for_model(name, text_config=M_ROPE | text, vision_config=tower, **ids)
    model = t.AutoModelForImageTextToText.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()


GLM_TOWER = TOWER | {"image_size": 56}
QWEN3_TOWER = TOWER | {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
KEEPS_APART = {
    "llava": llava,
    "qwen2_5_vl": lambda: vision.model("qwen2_5_vl"),
    "stablelm": lambda: family("stablelm"),
    "qwen2_vl": lambda: vision.model("qwen2_vl"),
    "gemma3": lambda: vision.model("gemma3"),
    "idefics3": lambda: vision.model("idefics3"),
    "internvl": lambda: vision.model("internvl"),
    "llava_next": lambda: vision.model("llava_next"),
    "mistral3": lambda: vision.model("mistral3"),
    "gemma4": lambda: vision.model("gemma4"),
    "glm4v": lambda: composed("glm4v", GLM_TOWER, **ROTATES_ALL),
    "glm46v": lambda: composed("glm46v", GLM_TOWER, **ROTATES_ALL),
    "glm4v_moe": lambda: composed("glm4v_moe", GLM_TOWER, **ROTATES_ALL, **EXPERTS, **OF_GLM),
    "qwen3_vl": lambda: composed("qwen3_vl", QWEN3_TOWER),
    "qwen3_vl_moe": lambda: composed("qwen3_vl_moe", QWEN3_TOWER, **EXPERTS, **OF_QWEN),
    "deepseek_v3": lambda: family("deepseek_v3"),
    "gemma3n_text": lambda: family("gemma3n_text"),
    "gemma4_text": lambda: family("gemma4_text"),
    "gptj": lambda: family("gptj"),
    "gpt_oss": lambda: family("gpt_oss"),
    "falcon": lambda: family("falcon"),
    "opt": lambda: family("opt"),
    "bloom": lambda: family("bloom"),
    "mpt": lambda: family("mpt"),
    "lfm2": lambda: family("lfm2"),
    "jamba": lambda: family("jamba"),
    "falcon_h1": lambda: family("falcon_h1"),
}
FOUR_ROWS = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glm4v_moe")
REFUSED = {
    "bert": "BertLMHeadModel does not make its attention mask from position_ids",
    "bart": "BartForCausalLM lets documents see each other",
}
SHORT = ("llava", "qwen2_5_vl", "stablelm", "gpt_oss")


def some(names, short):
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


def first_loss(tmp_path, model, packed):
    """The loss of a step over the same documents, read as a run reads them: in one row, or a row each."""
    file = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    data = opened(tmp_path, file, length=64, packing="best_fit" if packed else False).train
    engine = zero3d.Engine(copy.deepcopy(model), stage=2, precision="fp32")
    return float(engine.train_batch([data.stack([data[index] for index in range(len(data))])]))


@pytest.mark.parametrize("name", some(KEEPS_APART, SHORT))
def test_what_passes_the_trial_trains_on_packed_documents_as_on_the_documents_apart(tmp_path, name):
    model = KEEPS_APART[name]()
    model.config.get_text_config().use_cache = True  # as folders say
    assert check_packing(model) is None
    assert position_rows(model) == (4 if name in FOUR_ROWS else 1)
    apart, packed = (first_loss(tmp_path, model, packed) for packed in (False, True))
    assert packed == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("name", some(REFUSED, ("bloom",)))
def test_what_is_refused_would_train_on_something_else(tmp_path, name):
    model = family(name)
    with pytest.raises(ConfigError, match=rf"data\.packing=true cannot be used: .*{REFUSED[name]}"):
        check_packing(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)  # convolutions of new weights hand on little
    apart, packed = (first_loss(tmp_path, model, packed) for packed in (False, True))
    assert packed != pytest.approx(apart, rel=1e-5)


def test_a_text_model_that_sees_later_tokens_is_not_told_to_train_without_packing_alone():
    """PaliGemma: its mask is made of what a processor says of an image's prefix, and there is none without."""
    with pytest.raises(ConfigError, match=r"tokens of text see later ones.*Train it on what its masks are made for"):
        check_packing(vision.model("paligemma"))


class Mean(nn.Module):
    """A module of one's own: a token is told by the mean of those before, of its document if it `heeds` positions."""

    def __init__(self, heeds):
        super().__init__()
        self.embed, self.head, self.heeds = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), heeds

    def forward(self, input_ids, position_ids=None):
        length = input_ids.shape[1]
        place = torch.arange(length)
        begins = place - (place if position_ids is None or not self.heeds else position_ids)
        sees = (place[:, None] >= place) & (begins[..., None] <= place)
        return self.head((sees.float() / sees.sum(-1, keepdim=True)) @ self.embed(input_ids))


class Scalar(Mean):
    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids, position_ids).mean()


def test_a_module_of_one_s_own_is_tried_too():
    assert check_packing(Mean(heeds=True)) is None
    with pytest.raises(ConfigError, match=r"Mean lets documents see each other \(of two, the second is off by"):
        check_packing(Mean(heeds=False))
    said = check_packing(Scalar(heeds=True))
    assert "Scalar keeps documents of a sequence apart was not tried (what its forward returns has no row" in said


class Places(Mean):
    """A module whose output tells positions, and nothing of tokens."""

    def forward(self, input_ids, position_ids=None):
        place = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        return self.embed(place) + 0 * self.embed(input_ids)


def test_a_module_in_which_tokens_change_nothing_counts_as_not_tried():
    assert "was not tried (another token changes nothing in its own document" in check_packing(Places(heeds=True))


class Heeds(nn.Module):
    """A block as in `Mean`, alike in its modules and parameters whether or not it heeds positions."""

    def __init__(self, heeds):
        super().__init__()
        self.mix, self.heeds = nn.Linear(8, 8), heeds

    def forward(self, x, position_ids):
        place = torch.arange(x.shape[1])
        begins = place - position_ids if self.heeds else place * 0
        sees = (place[:, None] >= place) & (begins[..., None] <= place)
        return x + self.mix((sees.float() / sees.sum(-1, keepdim=True)) @ x)


class Stack(nn.Module):
    def __init__(self, *heeds):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, 8), nn.ModuleList(map(Heeds, heeds))

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, torch.arange(x.shape[1])[None] if position_ids is None else position_ids)
        return x


def test_a_block_that_only_its_flag_tells_from_the_others_is_tried_too():
    assert check_packing(Stack(True, True, True)) is None
    with pytest.raises(ConfigError, match="Stack lets documents see each other"):
        check_packing(Stack(True, False, True))


def test_a_trial_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(packing, "_found", {})
    model = hf("qwen3")
    state, before = torch.get_rng_state(), {key: t.clone() for key, t in model.state_dict().items()}
    kinds, own = [type(module) for module in model.modules()], model.config.to_dict()
    torch.set_default_dtype(torch.float64)
    try:
        assert packing_verdict(model) == packing.Verdict()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == own
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


def test_there_is_one_trial_for_a_configuration(monkeypatch):
    monkeypatch.setattr(packing, "_found", {})
    check_packing(hf("llama"))
    monkeypatch.setattr(packing, "judge", None)  # whoever called it would fail, and read the source
    assert check_packing(hf("llama")) is None
    assert "was not tried (TypeError" in check_packing(hf("qwen3"))


def test_a_model_with_a_patched_module_is_tried_itself(monkeypatch):
    monkeypatch.setattr(packing, "_found", {})
    model, patched, by_forward = hf("llama"), hf("llama"), hf("llama")
    attention = type(model.model.layers[0].self_attn)

    def blind(self, *args, **options):
        return attention.forward(self, *args, **options | {"attention_mask": None, "position_ids": None})

    check_packing(model)
    for layer in patched.model.layers:
        layer.self_attn.__class__ = type("Blind", (attention,), {"forward": blind})
    with pytest.raises(ConfigError, match="lets documents see each other"):
        check_packing(patched)
    by_forward.model.layers[1].self_attn.forward = MethodType(blind, by_forward.model.layers[1].self_attn)
    assert packing.key_of(hf("llama")) == packing.key_of(model) != packing.key_of(by_forward)


def test_kernels_without_masks_are_tried_by_where_documents_end():
    class Deaf(type(hf("llama"))):
        def forward(self, input_ids, position_ids=None, **options):
            kept = {name: value for name, value in options.items() if not name.startswith("cu_seq_lens")}
            return super().forward(input_ids=input_ids, position_ids=position_ids, **kept)

    for kind, verdict in ((type(hf("llama")), True), (Deaf, False)):
        model = kind(hf("llama").config)
        model.config._attn_implementation = "flash_attention_2"
        assert (packing_verdict(model).leak is None) is verdict
        assert model.config._attn_implementation == "flash_attention_2"
    model = vision.model("qwen2_5_vl")
    model.config.text_config._attn_implementation = "flash_attention_2"
    assert packing_verdict(model) == packing.Verdict()  # positions of any form, and ends beside them


def test_a_model_in_groups_of_bits_is_tried_as_a_plain_one(monkeypatch):
    from zero3d.models.codecs import CODECS
    from zero3d.models.quantised import QuantisedLinear

    monkeypatch.setattr(packing, "_found", {})
    model = hf("llama", inner=64)
    for layer in model.model.layers:
        layer.mlp.up_proj = QuantisedLinear(layer.mlp.up_proj, CODECS["nf4"], torch.bfloat16)
    assert packing_verdict(model) == packing.Verdict()


def test_a_micro_batch_of_four_rows_of_positions_is_one_row_of_documents_too():
    assert document_ends(POSITIONS.expand(4, 2, 6)).tolist() == document_ends(POSITIONS).tolist() == [0, 3, 5, 6, 8, 12]
    of_text = torch.cat([POSITIONS[None], torch.zeros(3, 2, 6, dtype=torch.long)])
    assert torch.equal(document_ends(of_text), document_ends(POSITIONS))
    batch = {"input_ids": POSITIONS + 5, "position_ids": POSITIONS}
    four = with_position_rows(batch, 4)
    assert four["position_ids"].shape == (4, 2, 6)
    assert with_position_rows(four, 4) is four
    assert with_position_rows(batch, 1) is batch
    row = as_row(four, {"max_length_q": 6})
    assert torch.equal(row["position_ids"], POSITIONS.reshape(1, 12).expand(4, 1, 12))
    assert torch.equal(row["input_ids"], POSITIONS.reshape(1, 12) + 5)


def test_a_cache_that_only_the_text_model_has_is_off():
    model = llava()
    assert not hasattr(model.config, "use_cache")
    assert forward_options(model) == {"use_cache": False}


# --- gradients, and what is said of a type --------------------------------------------------------------------------


class Backward(torch.autograd.Function):
    """Hands its input on, and gives another gradient."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.how(grad), None


class Wrong(Mean):
    """A module as above whose forward is right and whose backward is not."""

    def __init__(self, how):
        super().__init__(heeds=True)
        self.how = how

    def forward(self, input_ids, position_ids=None):
        length = input_ids.shape[1]
        place = torch.arange(length)
        begins = place - (place if position_ids is None else position_ids)
        sees = (place[:, None] >= place) & (begins[..., None] <= place)
        x = Backward.apply(self.embed(input_ids), self.how)
        return self.head((sees.float() / sees.sum(-1, keepdim=True)) @ x)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda grad: grad + 1e-6 * grad.sum(1, keepdim=True), "the backward of the first reaches the second"),
        (lambda grad: grad.cumsum(1), "the backward of the first reaches the second"),
        (lambda grad: grad.flip(1).cumsum(1).flip(1), "the backward of the second reaches the first"),
        (lambda grad: grad * torch.linspace(1, 2, grad.shape[1])[:, None], "gradients of the first are off"),
    ],
)
def test_a_model_whose_backward_alone_leaks_is_refused(how, said):
    with pytest.raises(ConfigError, match=rf"Wrong lets documents see each other \(of two, {said}"):
        check_packing(Wrong(how))
    assert check_packing(Wrong(lambda grad: grad)) is None


class Faint(Mean):
    """A module as above that hands a trace of the first token on to all."""

    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids, position_ids) + 1e-9 * self.embed(input_ids).mean(-1)[:, :1, None].detach()


def test_what_is_said_of_a_type_is_exact():
    model = Faint(heeds=True)
    assert check_packing(model) is None
    with pytest.raises(ConfigError, match="Faint lets documents see each other"):
        check_packing(model, exact=True)
    assert check_packing(Mean(heeds=True), exact=True) is None


@pytest.mark.parametrize("name", some(HYBRIDS, ("qwen3_5_text", "lfm2", "rwkv")))
def test_hybrids_keep_documents_apart_exactly(name):
    assert packing_verdict(hybrid(name), exact=True) == packing.Verdict()


@pytest.mark.parametrize("name", some(("lfm2", "bamba", "granitemoehybrid", "jamba", "nemotron_h"), ("lfm2",)))
def test_a_type_is_asked_about_with_a_layer_of_each_kind(name):
    """The sizes that transformers gives LFM2 have attention alone."""
    from transformers import AutoConfig

    config = usual_config(name)
    model = build(config)
    assert kinds_left_out(model) == ()
    left_out = kinds_left_out(build(AutoConfig.for_model(name)))
    assert left_out == {
        "lfm2": ("Lfm2ShortConv",),
        "bamba": ("BambaAttention",),
        "granitemoehybrid": ("GraniteMoeHybridAttention",),
    }.get(name, ())
    assert config.num_hidden_layers == AutoConfig.for_model(name).num_hidden_layers


def test_of_a_type_whose_kinds_cannot_be_had_packing_and_sp_depend_on_its_layers():
    from transformers import AutoConfig

    model = build(AutoConfig.for_model("lfm2"))
    found = depending(
        Support("", 0, "", (Row("pp", True, "2"), Row("sp", True, "any"), Row("packing", True, ""))), model
    )
    assert [row.supported for row in found.rows] == [True, None, None]
    assert found.rows[2].what.startswith("depends on layer_types: the type has layers of Lfm2ShortConv, too")
    assert depending(found._replace(rows=()), hybrid("lfm2")).rows == ()


def test_queries_that_are_a_parameter_have_rows_of_their_own():
    assert packing_verdict(tiny_types.model("inkling2_text"), exact=True) == packing.Verdict()
