"""Models without weights and weights by slices: exact, named when wrong, the same for every dp degree."""

import copy
import json
import re

import pytest
import torch
import transformers
from models import hf
from safetensors.torch import load_file, save_file

from zero3d.config import Model
from zero3d.errors import ConfigError
from zero3d.models.build import RandomWeights, build
from zero3d.models.load import FileWeights
from zero3d.models.open import open_bare, open_model, read_config
from zero3d.models.presets import PRESETS
from zero3d.shards.boxes import boxes, slices, whole

FAMILIES = ("llama", "qwen3", "gpt2", "qwen3_moe")


@pytest.fixture(params=FAMILIES)
def saved(request, tmp_path):
    """A model and the folder it was saved to, in several files."""
    model = hf(request.param)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return model, tmp_path


def test_every_box_of_every_parameter_is_read_as_it_was_saved(saved):
    model, folder = saved
    hollow = build(read_config(folder))
    weights = FileWeights(folder, hollow)
    expected = dict(model.named_parameters())
    assert [name for name, _ in hollow.named_parameters()] == list(expected)
    for name, p in hollow.named_parameters():
        assert p.is_meta
        shape, size = tuple(p.shape), p.numel()
        last = (*whole(shape)[:-1], (shape[-1] // 2, shape[-1]))  # a column of the tp axis
        for start, stop in ((0, size), (size // 3, size // 2 + 1), (size - 1, size), (1, size - 1)):
            for box in [*boxes(shape, start, stop), last]:
                assert torch.equal(weights(name, box), expected[name].detach()[slices(box)]), (name, box)
    assert weights.unused == []


def test_buffers_are_those_of_the_model(saved):
    model, folder = saved
    expected = dict(model.named_buffers())
    built = dict(build(read_config(folder)).named_buffers())
    assert list(built) == list(expected)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in built.items())


def test_only_the_experts_that_are_asked_for_are_read(tmp_path):
    hf("qwen3_moe").save_pretrained(tmp_path)
    weights = FileWeights(tmp_path, build(read_config(tmp_path)))
    read = []
    tensor = weights._files.tensor
    weights._files.tensor = lambda key: read.append(key) or tensor(key)
    for columns in ((0, 24), (24, 48)):  # what a rank holds of the gates and of the ups
        weights("model.layers.0.mlp.experts.gate_up_proj", ((1, 2), columns, (0, 32)))
    assert sorted(read) == [f"model.layers.0.mlp.experts.1.{part}_proj.weight" for part in ("gate", "up")]


def test_more_than_ten_experts_are_stacked_in_their_order(tmp_path):
    """Number 10 comes behind number 9 and not behind number 1; all of them, and those that are asked for."""
    config = hf("qwen3_moe").config
    config.num_experts = 12
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    weights, layers = FileWeights(tmp_path, build(read_config(tmp_path))), dict(model.named_parameters())
    for name in (f"model.layers.1.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")):
        expected, shape = layers[name].detach(), tuple(layers[name].shape)
        assert shape[0] == 12
        assert torch.equal(weights(name, whole(shape)), expected)
        for first, last in ((2, 3), (9, 11), (10, 12)):
            assert torch.equal(weights(name, ((first, last), *whole(shape)[1:])), expected[first:last])


def test_persistent_buffers_come_from_the_file(tmp_path):
    model = hf("llama")
    model.model.register_buffer("seen", torch.zeros(3))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.seen": torch.tensor([1.0, 2.0, 3.0])}, tmp_path / "model.safetensors")
    hollow = build(read_config(tmp_path))
    hollow.model.register_buffer("seen", torch.zeros(3))
    FileWeights(tmp_path, hollow)
    assert hollow.model.seen.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_those_of_the_models_own_initialiser(family):
    model = hf(family)
    hollow = build(copy.deepcopy(model.config))
    weights = RandomWeights(hollow, seed=3)
    for name, p in model.named_parameters():
        made = weights(name, whole(tuple(p.shape)))
        spread, expected = float(made.std()), float(p.detach().std())
        assert spread == pytest.approx(expected, rel=4 / p.numel() ** 0.5), name
        assert (spread == 0) == (expected == 0)


def test_a_parameter_that_the_initialiser_leaves_out_is_refused():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(4))
            self.inner = torch.nn.Linear(4, 4)

        def _init_weights(self, module):
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.ones_(module.weight)
                torch.nn.init.zeros_(module.bias)

    weights = RandomWeights(Scaled().to("meta"), seed=3)
    assert weights("inner.weight", whole((4, 4))).eq(1).all()
    with pytest.raises(ConfigError, match="_init_weights gives 1 of 1 parameters no values, first 'gain'"):
        weights("gain", whole((4,)))


def test_new_weights_depend_on_the_seed_and_not_on_the_boxes_asked_for():
    hollow = build(hf("llama").config)
    name = "model.layers.1.mlp.up_proj.weight"
    everything, some = ((0, 48), (0, 32)), ((3, 7), (16, 32))
    made = RandomWeights(hollow, seed=3)(name, everything)
    other = RandomWeights(hollow, seed=3)
    other("model.embed_tokens.weight", ((5, 9), (0, 32)))
    assert torch.equal(other(name, some), made[slices(some)])
    assert not torch.equal(RandomWeights(hollow, seed=4)(name, everything), made)
    blocks = [other(f"model.layers.{i}.mlp.up_proj.weight", some) for i in range(2)]
    assert not torch.equal(*blocks)


def damaged(tmp_path, how):
    model = hf("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if how == "no weights":
        file.unlink()
    elif how == "only a pickle":
        file.rename(tmp_path / "pytorch_model.bin")
    elif how == "missing tensor":
        del tensors["model.norm.weight"]
        save_file(tensors, file)
    elif how == "integers":
        ints = {name: t.to(torch.int8) for name, t in tensors.items() if "layers.1.mlp" in name}
        save_file(tensors | ints | {"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}, file)
    elif how == "integers of experts":
        hf("qwen3_moe").save_pretrained(tmp_path)
        tensors = load_file(file)
        name = "model.layers.0.mlp.experts.3.up_proj.weight"
        save_file(tensors | {name: tensors[name].to(torch.int32)}, file)
    elif how == "other shapes":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    elif how == "cut off":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "no config":
        (tmp_path / "config.json").unlink()
    elif how == "unknown architecture":
        (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    return str(tmp_path)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no weights", "model.init=random"),
        ("only a pickle", "pytorch_model.bin"),
        ("missing tensor", "model.norm.weight is in no file"),
        ("other shapes", r"mlp.down_proj.weight: file \(32, 48\), model \(32, 40\)"),
        ("integers", r"mlp.down_proj.weight is I8, .*mlp.gate_proj.weight is I8, .*, and 1 more of 21 tensors"),
        ("integers of experts", "model.layers.0.mlp.experts.3.up_proj.weight is I32 of"),
        ("cut off", "cannot be read as safetensors"),
        ("no config", "has no config.json"),
        ("unknown architecture", "not a config that transformers knows"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path, how, said):
    with pytest.raises(ConfigError, match=said):
        open_model(Model(path=damaged(tmp_path, how)))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("llama-3-8", "Did you mean 'llama-3-8b'"),
        ("meta-llama/Llama-3.2-1B", "downloads nothing"),
        ("no_such_module:build", "cannot be imported"),
        ("json:dumps_", "cannot be imported"),
        ("json:__name__", "must return a torch.nn.Module"),
    ],
)
def test_a_model_path_that_leads_nowhere_says_what_may_stand_there(path, said):
    with pytest.raises(ConfigError, match=said):
        open_model(Model(path=path))


def test_an_unknown_attention_is_refused(tmp_path):
    hf("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attn='sdpaa'"):
        open_model(Model(path=str(tmp_path), attn="sdpaa"))


@pytest.mark.parametrize(("attn", "asked"), [(None, ""), ("eager", " with attn='eager'")])
def test_sizes_beyond_all_memory_are_refused_by_the_file(tmp_path, attn, asked):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 10**12}))
    with pytest.raises(ConfigError) as told:
        open_model(Model(path=str(file), attn=attn))
    assert str(told.value).startswith(f"LlamaConfig of {file} cannot be built{asked}: ")
    assert str(32_000 * 10**12 * 4) in str(told.value)  # bytes of the embedding
    assert not re.search("enforce|err ==|Error code", str(told.value))


@pytest.mark.parametrize(
    ("told", "key"),
    [
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 10**8}}, "depth"),
        ({"model_type": "xlstm", "num_blocks": 10**7}, "num_blocks"),
        ({"model_type": "gpt2", "n_layer": 10**7}, "n_layer"),
        ({"model_type": "clip", "vision_layers": 10**7}, "vision_layers"),
        ({"model_type": "swin", "depths": [2, 10**7]}, "depths"),
    ],
)
def test_a_number_of_layers_nobody_builds_is_refused(tmp_path, told, key):
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is 10+, but at most 10,000 layers can be built"):
        read_config(tmp_path / "config.json")


def test_large_numbers_beside_layers_are_no_numbers_of_layers(tmp_path):
    told = {"model_type": "gemma3n_text", "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 20_000,
            "block_size": 65_536}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert read_config(tmp_path / "config.json").vocab_size_per_layer_input == 262_144


def test_presets_build_without_memory():
    opened = open_model(Model(path="llama-3-8b"))
    assert sum(p.numel() for p in opened.module.parameters()) == 8_030_261_248
    assert all(p.is_meta for p in opened.module.parameters())


def test_an_error_of_the_users_function_is_told_with_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_module.py").write_text("def make():\n    return {}['one\\nkey']\n")
    with pytest.raises(ConfigError, match=r"'their_module:make': make\(\) raised KeyError: .*their_module\.py:2\)"):
        open_model(Model(path="their_module:make"))
    with pytest.raises(ConfigError, match=r"'json:loads': loads\(\) raised TypeError: loads\(\) missing 1 .*'s'$"):
        open_model(Model(path="json:loads"))


# Billions, as their cards and papers have them.
PUBLISHED = {
    "gpt2": 0.124, "llama-3-1b": 1.24, "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3-405b": 406, "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "mistral-7b": 7.25, "mixtral-8x7b": 46.7, "gemma-3-1b": 1.00,
    "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "gpt-oss-20b": 20.9, "gpt-oss-120b": 117,
    "deepseek-v2-lite": 15.7, "deepseek-v3": 671, "glm-4.5-air": 107, "glm-4.5": 353, "llava-1.5-7b": 7.06,
}  # fmt: skip


@pytest.mark.long
def test_presets_have_the_numbers_of_parameters_that_are_published():
    assert {*PUBLISHED, "demo", "demo-moe"} == PRESETS.keys()
    found = {
        name: sum(p.numel() for p in open_bare(Model(path=name, init="random")).module.parameters())
        for name in PUBLISHED
    }
    assert {name: float(f"{count / 1e9:.3g}") for name, count in found.items()} == PUBLISHED
