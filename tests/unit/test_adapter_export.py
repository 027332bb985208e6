"""Adapters in PEFT's format and merged into plain weights: others' libraries load them, and compute the same bits."""

import json
import warnings

import pytest
import torch
from bases import base_folder, engine_of, engine_on, steps
from models import batch
from safetensors import safe_open

import zero3d
import zero3d.checkpoint.export
from zero3d.config import Lora, Model, load
from zero3d.errors import CheckpointError, ConfigError
from zero3d.models.adapters import add_adapters
from zero3d.models.open import open_model
from zero3d.models.saved_adapters import read_adapter
from zero3d.models.trained import open_trained
from zero3d.shards.boxes import whole

CASES = {  # the model, and settings of a file or what PEFT is asked for
    "llama": ("llama", {"lora": {"rank": 4}}),
    "dora": ("llama", {"lora": {"rank": 4, "dora": True}}),
    "transposed": ("gpt2", {"lora": {"rank": 2, "alpha": 2}}),
    "embeddings": ("llama", {"lora": {"rank": 4, "targets": ["embed_tokens", "q_proj"]}}),
    "mixture": ("llama", {"lora": {"rank": 4, "targets": ["all-linear"], "train_also": ["lm_head", "model.norm"]}}),
    "tied": ("qwen3", {"lora": {"rank": 4, "train_also": ["embed_tokens"]}}),
    "stacked": ("moe", {"lora": {"rank": 2, "targets": ["experts", "q_proj"]}}),
    "wrapped": ("llama", {}),
    "replaced": ("llama", {"modules_to_save": ["lm_head"]}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of bases, each saved once."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = base_folder(tmp_path_factory.mktemp("bases") / name, name)
        return made[name]

    return of


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=batch(9)).logits


def live(engine):
    """Those of the engine."""
    with engine.full_params():
        return logits(engine.module)


def of_peft(base, adapter):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)


def of_transformers(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("case", CASES)
def test_adapters_load_with_peft_and_merged_ones_are_what_peft_merges(folders, tmp_path, case):
    name, lora = CASES[case]
    engine = engine_of(folders(name), lora) if "lora" in lora else engine_on(folders(name), lora)
    steps(engine, (1,))
    adapter = engine.export(tmp_path / "adapter")
    expected = live(engine)
    loaded = of_peft(folders(name), adapter)
    assert logits(loaded).equal(expected)
    merged = of_transformers(engine.export(tmp_path / "merged", "merged"))
    theirs = loaded.merge_and_unload()
    assert merged.state_dict().keys() == theirs.state_dict().keys()
    for key, values in theirs.state_dict().items():
        assert values.equal(merged.state_dict()[key]), key
    assert logits(merged).equal(logits(theirs))


@pytest.mark.parametrize("case", [pytest.param("stacked", marks=pytest.mark.long), "replaced"])
def test_a_base_leaves_the_engine_as_it_came(folders, tmp_path, case):
    name, lora = CASES[case]
    engine = engine_of(folders(name), lora) if "lora" in lora else engine_on(folders(name), lora)
    steps(engine, (1,))
    original = of_transformers(folders(name)).state_dict()
    found = of_transformers(engine.export(tmp_path / "base", "base")).state_dict()
    assert found.keys() == original.keys()
    assert [key for key, values in original.items() if not values.equal(found[key])] == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_with_new_dora_adapters_computes_what_its_base_does(folders, name):
    engine = engine_of(folders(name), {"lora": {"rank": 4, "dora": True}})
    expected = logits(of_transformers(folders(name)))
    torch.testing.assert_close(live(engine), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_tied_weight_is_trained_whichever_of_its_names_is_given(folders, name):
    lora = {"rank": 4, "train_also": [name]}
    model = open_trained(load({"model": {"path": str(folders("qwen3"))}, "lora": lora})).module
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.requires_grad
    assert not model.model.norm.weight.requires_grad


def test_an_adapters_folder_holds_what_was_trained_and_names_its_base(folders, tmp_path):
    base = folders("llama")
    engine = engine_on(base)
    folder = engine.export(tmp_path / "adapter", "adapter")
    page, *files = sorted(path.name for path in folder.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    card = (folder / page).read_text()
    assert f"| base | `{base.name}` |" in card
    assert "library_name: peft\n" in card
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["inference_mode"]) == (str(base.resolve()), True)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        keys = set(file.keys())
    assert keys == {
        f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
        for layer in (0, 1) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj") for side in "AB"
    }  # fmt: skip


def test_modules_that_were_trained_whole_are_peft_s_and_single_parameters_lie_beside(folders, tmp_path):
    from safetensors.torch import load_file

    also = ("model.norm.weight", "model.layers.1.self_attn.k_proj.bias")
    engine = engine_on(folders("llama"), also=also)
    steps(engine, (1,))
    folder = engine.export(tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] == ["model.norm"]
    beside = load_file(folder / "trained.safetensors")
    assert list(beside) == ["model.layers.1.self_attn.k_proj.bias"]
    model = of_transformers(folders("llama"))
    model.load_state_dict(beside, strict=False)
    from peft import PeftModel

    assert logits(PeftModel.from_pretrained(model, folder)).equal(live(engine))
    merged = of_transformers(engine.export(tmp_path / "merged", "merged"))
    assert merged.model.layers[1].self_attn.k_proj.bias.equal(beside["model.layers.1.self_attn.k_proj.bias"])


def test_a_merge_holds_a_block_and_a_file_and_an_adapter_gathers_nothing_frozen(folders, tmp_path, monkeypatch):
    from zero3d.checkpoint.forms import MergedForm

    monkeypatch.setattr(zero3d.checkpoint.export, "FILE_BYTES", 10_000)
    waiting, feed = [], MergedForm.feed

    def watched(self, tensors):
        ready = feed(self, tensors)
        waiting.append(len(self._waiting))
        return ready

    monkeypatch.setattr(MergedForm, "feed", watched)
    engine = engine_on(folders("llama"))
    whole = engine.export(tmp_path / "merged", "merged")
    assert max(waiting) == 1
    assert waiting[-1] == 0
    assert len(list(whole.glob("model-*.safetensors"))) > 5
    gathered, acquire = [], engine.gathers.acquire_on_first
    monkeypatch.setattr(
        engine.gathers, "acquire_on_first", lambda unit, *token: (gathered.append(unit), acquire(unit, *token))
    )
    engine.export(tmp_path / "adapter")
    assert gathered
    assert all(unit.grads is not None for unit in gathered)


def saved_adapter(folder, weights=("model.layers.0.self_attn.q_proj",), **options):
    """A folder of PEFT's with the A of these layers."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    LoraConfig(r=4, target_modules=["q_proj"], **options).save_pretrained(folder)
    tensors = {f"base_model.model.{name}.lora_A.weight": torch.ones(4, 32) for name in weights}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_a_saved_adapter_says_what_it_is_and_has_matrices_by_the_models_names(tmp_path):
    saved = read_adapter(saved_adapter(tmp_path, lora_alpha=6, use_rslora=True))
    assert saved.choice == Lora(4, 6, ("q_proj",), rslora=True)
    name = "model.layers.{}.self_attn.q_proj.lora_A.default.weight"
    assert saved.matrix(name.format(0), (4, 32)).equal(torch.ones(4, 32))
    with pytest.raises(ConfigError, match=r"another model's: .*lora_A.weight has the shape \(4, 32\) in it, and needs"):
        saved.matrix(name.format(0), (4, 64))
    with pytest.raises(ConfigError, match=r"layers\.1\..* is not in it"):
        saved.matrix(name.format(1), (4, 32))


@pytest.mark.parametrize(("options", "said"), [
    ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern="),
    ({"bias": "all"}, "has bias='all', for which section lora has no key"),
    ({"trainable_token_indices": [1, 2]}, r"has trainable_token_indices=\[1, 2\], .* model\.merge_and_unload\(\)"),
    ({"lora_bias": True}, "has lora_bias=True"),
    ({"alora_invocation_tokens": [1]}, r"has alora_invocation_tokens=\[1\]"),
    ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa', .*path_initial_model_for_weight_conversion"),
    (None, "it has no adapter_config.json"),
])  # fmt: skip
def test_a_saved_adapter_that_section_lora_cannot_describe_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        read_adapter(tmp_path if options is None else saved_adapter(tmp_path, **options))


def test_a_saved_adapter_with_tensors_that_the_model_has_no_parameter_for_is_refused(folders, tmp_path):
    layers = ("model.layers.0.self_attn.q_proj", "model.layers.7.self_attn.q_proj")
    saved = read_adapter(saved_adapter(tmp_path, layers))
    with pytest.raises(
        ConfigError, match=r"another model's: \S*layers\.7\.self_attn\.q_proj\.lora_A\.weight is in it, one of 1"
    ):
        add_adapters(open_model(Model(path=str(folders("llama")))), saved.choice, 0, saved)


def test_an_adapter_of_embeddings_goes_on_although_peft_saves_these_beside_it(folders, tmp_path):
    engine = engine_on(folders("llama"), {"target_modules": ["embed_tokens"]})
    with engine.full_params(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.module.save_pretrained(tmp_path)
    saved = read_adapter(tmp_path)
    base = "base_model.model.model.embed_tokens.base_layer.weight"
    assert base in saved.matrices
    opened = add_adapters(open_model(Model(path=str(folders("llama")))), saved.choice, 0, saved)
    name, p = next((name, p) for name, p in opened.module.named_parameters() if "lora_embedding_A" in name)
    assert opened.weights(name, whole(tuple(p.shape))).equal(saved.matrix(name, tuple(p.shape)))


def test_whole_weights_of_a_model_with_adapters_are_refused(folders, tmp_path):
    with pytest.raises(CheckpointError, match="exported as adapter, merged or base: whole weights have PEFT's names"):
        engine_on(folders("llama")).export(tmp_path / "hf", "whole")


def test_a_disk_that_is_full_is_told_with_the_file_and_the_remedy_and_nothing_is_left(folders, tmp_path, monkeypatch):
    import zero3d.checkpoint.adapter_folder as adapter_folder
    from zero3d.checkpoint.writing import told

    def full(path, tensors, **about):
        with told(path, 1000):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapter_folder, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*adapter_model.safetensors \(No space left on device; it "
                       r"takes 1,000 bytes, and [\d,]+ are free\): make room"):  # fmt: skip
        engine_on(folders("llama")).export(tmp_path / "adapter")
    assert not any(tmp_path.iterdir())
