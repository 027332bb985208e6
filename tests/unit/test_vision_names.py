"""Names of vision-language models: opened, trained, exported and opened again, of older folders, of adapters elsewhere."""

import json
import re
from pathlib import Path

import pytest
import torch
import vision
from bases import engine_of
from models import adamw, bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zero3d
from zero3d.config import Model
from zero3d.errors import ConfigError
from zero3d.models.load import FileWeights
from zero3d.models.open import open_model
from zero3d.tools.vision.tiny import micro_batch, tiny_model, types

SHORT = ("gemma4", "qwen3_5_moe", "smolvlm")  # tied tables, matrices that are cut as they are read, stacked experts
WITHOUT = {  # types without a tiny model that trains on images
    "blip", "blip-2", "diffusion_gemma", "evolla", "fast_vlm", "gemma3n", "git", "idefics", "instructblip",
    "instructblipvideo", "kosmos-2", "kosmos-2.5", "mistral4", "mllama", "perception_lm", "pi0", "pix2struct",
    "pp_formulanet", "udop", "vision-encoder-decoder",
}  # fmt: skip
UNREADABLE = "shieldgemma2"  # transformers saves it under names that it does not read again
EVERY = [kind for kind in types() if kind not in {*WITHOUT, UNREADABLE}]
READ = json.loads((Path(__file__).parents[1] / "data" / "adapter_names.json").read_text())["types"]  # by a server


def keys(folder):
    """Names of all tensors of a folder's files."""
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def trained(opened, kind):
    """An engine of an opened folder after a step on images."""
    engine = zero3d.Engine(opened.module, weights=opened.weights, stage=3, precision="fp32", optimizer=adamw)
    engine.train_batch([micro_batch(tiny_model(kind), torch.Generator().manual_seed(1))])
    return engine


@pytest.mark.parametrize(
    "kind", [kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long) for kind in EVERY]
)
def test_a_type_is_exported_under_the_names_of_its_folder_and_opens_as_the_same_class(kind, tmp_path):
    from transformers import AutoModelForImageTextToText

    saved = tiny_model(kind)
    saved.save_pretrained(tmp_path / "given")
    opened = open_model(Model(path=str(tmp_path / "given")))
    assert (type(opened.module), opened.notes) == (type(saved), ())
    engine = trained(opened, kind)
    engine.export(tmp_path / "exported")
    assert keys(tmp_path / "exported") == keys(tmp_path / "given")
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert type(again) is type(saved)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with engine.full_params():
        assert bits(engine.module.parameters()) == bits(again.parameters())


OLDER = {  # names of Qwen2-VL's and LLaVA's first folders -> those of today
    "qwen2_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "llava": {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
              "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."},
}  # fmt: skip


def of_older(kind, folder):
    """Save a type's tiny model under its older names; returns it."""
    saved = tiny_model(kind)
    saved.save_pretrained(folder)
    tensors = {}
    for name, values in saved.state_dict().items():
        old = next((old + name.removeprefix(new) for old, new in OLDER[kind].items() if name.startswith(new)), name)
        tensors[old] = values
    assert any(not name.startswith("model.") and name not in saved.state_dict() for name in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return saved


@pytest.mark.parametrize("kind", OLDER)
def test_older_names_are_renamed_where_a_folder_is_opened(kind, tmp_path):
    from zero3d.shards.boxes import whole

    saved = of_older(kind, tmp_path)
    opened = open_model(Model(path=str(tmp_path)))
    assert opened.notes == ()
    for name, wanted in saved.named_parameters():
        assert torch.equal(opened.weights(name, whole(wanted.shape)), wanted), name


def test_two_engines_may_have_models_that_share_functions():
    """transformers has its linear attention in modules without parameters, the same ones in every model."""
    batch = micro_batch(tiny_model("qwen3_5"), torch.Generator().manual_seed(1))
    for _ in range(2):
        engine = zero3d.Engine(tiny_model("qwen3_5"), stage=3, precision="fp32", optimizer=adamw)
        assert engine.train_batch([batch]).isfinite()


def test_a_folder_that_transformers_does_not_read_again_is_refused_by_name(tmp_path):
    tiny_model(UNREADABLE).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight is in no file"):
        open_model(Model(path=str(tmp_path)))


def test_a_missing_tensor_of_a_tower_is_refused_by_its_name(tmp_path):
    tiny_model("qwen3_vl").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.visual.blocks.1.attn.qkv.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.visual\.blocks\.1\.attn\.qkv\.weight is in no file"):
        open_model(Model(path=str(tmp_path)))


def read_elsewhere(key, prefixes):
    """The module that a tensor of an adapter is for, as its reader finds it."""
    name = key.removeprefix("base_model.model.")
    start, instead = next(((a, b) for a, b in prefixes.items() if name.startswith(a)), ("", ""))
    return (instead + name.removeprefix(start)).rpartition(".lora_")[0]


@pytest.mark.parametrize("kind", READ)
def test_adapters_have_names_that_peft_and_a_server_read(tmp_path, kind):
    """The server maps the start of a name, and has these modules: tests/data/adapter_names.json says where."""
    read = READ[kind]
    tiny_model(kind).save_pretrained(tmp_path / "base")
    engine = engine_of(tmp_path / "base", {"lora": {"rank": 2, "targets": read["targets"]}})
    found = keys(engine.export(tmp_path / "adapter", "adapter"))
    assert type(tiny_model(kind)).__name__ == read["class"]
    assert {re.sub(r"\.\d+\.", ".*.", read_elsewhere(key, read["prefixes"])) for key in found} == set(read["modules"])
    assert {key.split(".lora_")[1] for key in found} == {"A.weight", "B.weight"}
    assert all(key.startswith("base_model.model.model.") for key in found)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(tiny_model(kind), tmp_path / "adapter")
    assert {name for name in loaded.state_dict() if ".lora_" in name} == {
        key.replace(".weight", ".default.weight") for key in found
    }


def test_experts_that_a_rank_has_cut_are_read_as_the_whole_model_has_them(tmp_path):
    model = vision.model("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    weights = FileWeights(tmp_path, model)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters() if ".experts." in name}
    for name in wanted:  # by shapes a converter tells files of earlier releases, whose matrices are transposed
        owner, _, own = name.rpartition(".")
        experts = model.get_submodule(owner)
        setattr(experts, own, nn.Parameter(getattr(experts, own)[:2].detach().clone()))
    for name, whole in wanted.items():
        box = ((2, 4), *((0, size) for size in whole.shape[1:]))
        assert torch.equal(weights(name, box), whole[2:4])
