"""`zero3d models`: what a model supports is what the engine's checks say."""

import json

import pytest
import tiny_types
import torch
import vision
from families import family, llava
from hybrids import hybrid
from torch import nn

from zero3d.config import load
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.models.adapters import default_targets
from zero3d.models.copies import on_meta
from zero3d.models.trained import open_trained
from zero3d.sequence.group import check_sequence, own_loss
from zero3d.spec.formats import FORMATS
from zero3d.tensor_parallel.parallelize import parallelize
from zero3d.tools.cli.main import main
from zero3d.tools.cli.models import _of_type
from zero3d.train.setup.support import support_of

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def answers(model):
    return {row.name: row for row in support_of(model).rows}


def test_a_plain_decoder_supports_all_that_its_sizes_allow():
    found = answers(family("llama"))  # 4 heads, 2 of keys, 2 blocks
    said = {name: (row.supported, row.what) for name, row in found.items()}
    assert said == {
        "tp": (True, "2"),
        "fused": (None, ""),
        "pp": (True, "up to 2 stages of model.layers"),
        "ep": (None, "no experts"),
        "sp": (True, "any; by heads up to 4"),
        "images": (None, "text alone"),
        "packing": (True, "documents of a sequence do not see each other"),
        "lora": (True, "q_proj, v_proj"),
        "quantize": (True, said["quantize"][1]),
    }
    assert [row.refusal for row in found.values()] == [""] * 9


def test_a_copy_on_meta_keeps_what_is_tied_and_leaves_the_model_as_it_is():
    model = family("llama", tie_word_embeddings=True)
    model.lm_head.weight.requires_grad_(False)
    made = on_meta(model)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert not made.lm_head.weight.requires_grad
    assert {t.device.type for t in (*made.parameters(), *made.buffers())} == {"meta"}
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_sp_of_a_model_with_a_loss_of_its_own_is_answered_in_the_engine_s_words():
    model = tiny_types.model("whisper")
    row = answers(model)["sp"]
    assert (row.supported, row.refusal) == (False, own_loss(model))
    assert "WhisperForCausalLM computes a loss of its own from its labels" in row.refusal


def test_degrees_are_those_that_divide():
    found = answers(
        family("llama", num_attention_heads=12, num_key_value_heads=12, hidden_size=48, head_dim=4, vocab_size=60)
    )
    assert found["tp"].what == "2, 3, 4, 6, 12"
    experts = answers(family("gpt_oss"))
    assert (experts["ep"].supported, experts["ep"].what) == (True, "2, 4 (4 experts a layer)")
    fused = answers(family("mixtral", num_local_experts=2))["fused"]
    assert fused.what == "model.layers.*.mlp.experts.gate_up_proj (2 in one)"


@pytest.mark.parametrize("name", ["recurrent_gemma", "zaya"])
def test_a_row_that_says_no_has_the_words_of_the_engine(name):
    found = answers(hybrid(name))
    with pytest.raises(ConfigError) as refused:
        check_sequence(hybrid(name), 2, 1, "auto")
    assert (found["sp"].supported, found["sp"].refusal) == (False, str(refused.value))


@pytest.mark.parametrize(("name", "said"), [
    ("qwen3_vl", "documents of a sequence do not see each other, with images too"),
    ("paligemma", "documents of a sequence do not see each other where they have images; of text alone: data.packing"),
])  # fmt: skip
def test_packing_is_answered_for_text_and_for_images(name, said):
    packing = answers(vision.model(name))["packing"]
    assert packing.supported
    assert packing.what.startswith(said)


def test_a_model_without_a_plan_is_told_how_to_write_one():
    found = answers(family("bert"))
    with pytest.raises(ConfigError) as refused:
        parallelize(family("bert").to("meta"), Axis("tp", 0, 2), Ledger())
    assert (found["tp"].supported, found["tp"].refusal) == (False, str(refused.value))
    assert (found["fused"].supported, found["fused"].refusal) == (None, "")


def test_images():
    found = answers(llava())
    assert found["images"].supported is True
    assert found["pp"].what == "up to 2 stages of model.language_model.layers"


def test_layers_with_heads_of_their_own_are_asked_one_by_one():
    found = answers(family("gemma4_text"))
    assert found["tp"].supported is True
    assert found["sp"].supported is False  # inputs of each layer
    assert "mesh.sp" in found["sp"].refusal


def test_the_model_is_as_before():
    model = family("llama")
    before = {name: (p.data_ptr(), p.shape) for name, p in model.named_parameters()}
    modules = [type(module) for module in model.modules()]
    support_of(model)
    assert {name: (p.data_ptr(), p.shape) for name, p in model.named_parameters()} == before
    assert [type(module) for module in model.modules()] == modules


def test_a_plain_module():
    found = answers(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]))
    assert found["tp"].supported is False
    assert found["sp"].supported is False


def test_peft_may_name_what_it_adapts_by_one_expression(monkeypatch):
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    monkeypatch.setitem(TABLE, "llama", r"model\.layers\.1\..*\.(q_proj|v_proj)")  # as it does for gemma4
    layer = "model.layers.1.self_attn"
    assert default_targets(family("llama")) == (f"{layer}.q_proj", f"{layer}.v_proj")
    assert answers(family("llama"))["lora"].what == "q_proj, v_proj"


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "mixtral"])
def test_what_formats_hold_is_what_an_engine_packs(tmp_path, name):
    tiny = family(name, hidden_size=64, intermediate_size=128, head_dim=16)
    tiny.save_pretrained(tmp_path / name)
    packed = {}
    for kind in FORMATS:
        settings = {"model": {"path": str(tmp_path / name), "quantize": kind}, "lora": {"rank": 4}}
        packed[kind] = sum(
            p.numel() for p in open_trained(load(settings)).module.parameters() if p.dtype == torch.uint8
        )
    weights = sum(
        p.numel() for n, p in tiny.named_parameters() if p.dim() > 1 and ".layers." in n and "gate.w" not in n
    )
    share = weights / sum(p.numel() for p in tiny.parameters())
    widths = ", ".join(f"{kind} {nbytes / (2 * weights):.2f}x" for kind, nbytes in packed.items())
    wanted = f"{share:.1%} of the parameters, in {widths} of their bytes in bf16"
    assert answers(tiny)["quantize"] == ("quantize", True, wanted, "")


@pytest.mark.parametrize(("settings", "what", "refusal"), [
    ({**FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "kept as nf4-double", ""),
    ({"quant_method": "gptq", "bits": 4}, "", "(gptq), whose weights no library here decodes"),
    pytest.param(FOUR | {"bnb_4bit_quant_type": "fp4"}, "", "bitsandbytes' fp4, and its nf4 is taken",
                 marks=pytest.mark.long),
    pytest.param(FOUR, "", "bitsandbytes' fp4, and its nf4 is taken", marks=pytest.mark.long),
    pytest.param({"quant_method": "mxfp4"}, "in mxfp4 already, decoded as they are read", "", marks=pytest.mark.long),
    pytest.param({"quant_method": "awq"}, "", "it was made from, with model.quantize=nf4", marks=pytest.mark.long),
])  # fmt: skip
def test_a_folder_in_few_bits_is_taken_or_refused_as_a_run_does(tmp_path, capsys, settings, what, refusal):
    config = family("llama").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert main(["models", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][-1]
    assert (row["name"], row["supported"]) == ("quantize", not refusal)
    assert what in row["what"]
    assert refusal in row["refusal"]


def test_the_verb_prints_text_and_json(capsys):
    assert main(["models", "demo-moe"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Qwen3MoeForCausalLM: ")
    assert "  ep       yes  2, 4, 8, 16 (16 experts a layer)\n" in text
    assert main(["models", "demo-moe", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == [
        "tp",
        "fused",
        "pp",
        "ep",
        "sp",
        "images",
        "packing",
        "lora",
        "quantize",
    ]
    assert main(["models"]) == 0
    assert "demo-moe" in capsys.readouterr().out


def test_a_wrong_name_gets_the_nearest(capsys):
    assert main(["models", "gpt_os"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'gpt_oss'?" in said
    assert main(["models", "demo", "--families"]) == 2


@pytest.mark.long
def test_a_type_of_images_whose_usual_sizes_fit_no_model_is_asked_about_by_a_tiny_one():
    model = _of_type("granite4_vision")
    assert type(model).__name__ == "Granite4VisionForConditionalGeneration"
    assert answers(model)["images"].supported
