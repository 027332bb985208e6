"""A folder of a vision-language model opens whole; model.part=text gives the language model in it alone."""

import json

import pytest
import torch
from models import adamw, bits
from safetensors import safe_open
from vision import NEWER, model, text_alone

import zero3d
from zero3d.config import Model, load
from zero3d.errors import ConfigError
from zero3d.models import packing
from zero3d.models.open import open_bare, open_model
from zero3d.models.parts import choose, key_in_text
from zero3d.pipeline.split import chain_of
from zero3d.shards.boxes import whole
from zero3d.train.setup.text_part import naming_text_part, older_run, part_of

LONG = pytest.mark.long
TEXTS = {  # the class of the language model alone, by the type of the whole one
    "qwen3_5": "Qwen3_5ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "llava": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "idefics3": "LlamaForCausalLM",
    "mistral3": "MistralForCausalLM",
}
SHORT = ("llama4", "qwen3_5", "qwen3_vl")


def marked(names):
    return [name if name in SHORT else pytest.param(name, marks=LONG) for name in names]


def saved(folder, name, **changed):
    """A folder of a tiny model with a processor's file beside its weights, its config changed; and the model."""
    made = model(name)
    made.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (folder / "preprocessor_config.json").write_text("{}")
    return made


def filled(opened):
    """The module of an opened model with its weights."""
    shapes = {name: tuple(p.shape) for name, p in opened.module.named_parameters()}
    values = {name: opened.weights(name, whole(shape)) for name, shape in shapes.items()}
    opened.module.load_state_dict(values, strict=False, assign=True)
    opened.module.tie_weights()
    return opened.module.train()


@pytest.mark.parametrize("name", marked(NEWER))
def test_a_folder_opens_as_the_class_that_its_config_names_and_its_export_has_the_towers(tmp_path, name):
    import transformers as t

    made = saved(tmp_path / "model", name)
    opened = open_model(Model(path=str(tmp_path / "model")))
    assert type(opened.module) is type(made)
    assert opened.notes == ()
    engine = zero3d.Engine(opened.module, weights=opened.weights, stage=3, precision="fp32", optimizer=adamw)
    engine.export(tmp_path / "out")
    again = t.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert type(again) is type(made)
    assert bits(again.parameters()) == bits(made.parameters())
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as first:
        with safe_open(tmp_path / "out" / "model.safetensors", "pt") as second:
            assert sorted(first.keys()) == sorted(second.keys())


@pytest.mark.parametrize("name", marked(TEXTS))
def test_part_text_opens_the_language_model_alone_which_computes_what_the_whole_one_does_of_text(tmp_path, name):
    import transformers as t

    made = saved(tmp_path / "model", name)
    opened = open_model(Model(path=str(tmp_path / "model"), part="text"))
    assert type(opened.module).__name__ == TEXTS[name]
    assert [note.partition(" tensors")[2].partition(",")[0] for note in opened.notes] == [
        f" of {tmp_path / 'model'} are not used by model.part=text"
    ]
    text = filled(opened)
    batch = text_alone({"input_ids": (ids := torch.arange(3, 23).view(2, 10)), "labels": ids})
    made.eval(), text.eval()
    assert torch.equal(text(**batch, use_cache=False).logits, made(**batch, use_cache=False).logits)
    engine = zero3d.Engine(text, stage=3, precision="fp32", optimizer=adamw)
    engine.export(tmp_path / "out")
    again = t.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == TEXTS[name]
    assert torch.equal(again.eval()(**batch, use_cache=False).logits, made(**batch, use_cache=False).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_models_config_says_whether_the_head_of_its_text_is_tied(tied):
    import transformers as t

    config = t.LlavaConfig(text_config=t.LlamaConfig(tie_word_embeddings=not tied))
    config.tie_word_embeddings = tied
    assert choose(config, "text").config.tie_word_embeddings is tied


@pytest.mark.parametrize(("key", "wanted"), [
    ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("language_model.model.norm.weight", "model.norm.weight"), ("language_model.lm_head.weight", "lm_head.weight"),
    ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight"),
    ("model.vision_tower.language_model.weight", "model.vision_tower.language_model.weight"),
])  # fmt: skip
def test_keys_of_a_text_model_are_known_in_folders_of_whole_models_of_any_age(key, wanted):
    assert key_in_text(key) == wanted


def test_a_type_without_a_class_for_its_language_model_says_so(tmp_path):
    saved(tmp_path, "qwen3_vl")
    with pytest.raises(ConfigError) as refused:
        open_bare(Model(path=str(tmp_path), part="text"))
    assert str(refused.value) == (
        "model.part=text: transformers has no class for the language model of Qwen3VLConfig alone "
        "(Qwen3VLTextConfig): type model.part=whole, and freeze='[...]' with the names of its towers if they shall stay "
        "as they are."
    )


@pytest.mark.parametrize(
    ("architectures", "said"),
    [
        (
            None,
            "the config names no class, and transformers builds Qwen3_5ForCausalLM or Qwen3_5ForConditionalGeneration "
            'of it: opened as Qwen3_5ForCausalLM; for another write "architectures": '
            '["Qwen3_5ForConditionalGeneration"] into config.json',
        ),
        (
            ["Own"],
            "the config names 'Own', and transformers builds Qwen3_5ForCausalLM or Qwen3_5ForConditionalGeneration of "
            "it: opened as Qwen3_5ForCausalLM",
        ),
    ],
)
def test_a_config_that_names_no_class_that_is_known_opens_as_a_language_model_and_a_note_says_so(
    tmp_path, architectures, said
):
    saved(tmp_path, "qwen3_5", architectures=architectures)
    opened = open_model(Model(path=str(tmp_path)))
    assert type(opened.module).__name__ == "Qwen3_5ForCausalLM"
    assert opened.notes[0] == f"{tmp_path / 'config.json'}: {said}"


def test_a_refusal_that_the_language_model_alone_would_not_get_names_it(tmp_path, monkeypatch):
    saved(tmp_path, "gemma3", mm_tokens_per_image=256)  # more than its tower makes
    config = load({"model": {"path": str(tmp_path)}, "mesh": {"pp": 2}})
    with pytest.raises(ConfigError) as refused, naming_text_part(config):
        chain_of(open_bare(config.model).module, None)
    assert str(refused.value).endswith(
        "Pass pp=1. For training on text alone type model.part=text: it opens Gemma3ForCausalLM, which can."
    )
    saved(tmp_path, "qwen3_5")
    config = load({"model": {"path": str(tmp_path)}, "mesh": {"pp": 2}})
    with pytest.raises(ConfigError) as refused, naming_text_part(config):
        monkeypatch.setattr(packing, "packing_verdict", lambda *_: packing.Verdict(leak="its layers leak"))
        packing.check_packing(open_bare(config.model).module)  # the language model has the same layers
    assert "model.part" not in str(refused.value)


def test_a_checkpoint_of_a_run_from_before_there_were_parts_is_known_by_its_parameters(tmp_path):
    saved(tmp_path, "qwen3_5")
    config = load({"model": {"path": str(tmp_path)}})
    of_text = [name for name, _ in open_bare(Model(path=str(tmp_path), part="text")).module.named_parameters()]
    of_whole = [name for name, _ in open_bare(config.model).module.named_parameters()]
    assert part_of(config, of_text) == "text"
    assert part_of(config, of_whole) == "whole"
    tower = load({"model": {"path": str(tmp_path)}, "lora": {"rank": 2, "train_also": ["visual"]}})
    assert part_of(tower, of_whole) == "whole"  # which the language model alone has not
    assert older_run(config, of_text).endswith(": type model.part=text to go on.")
    assert older_run(config, of_whole) == ""
