"""Frozen weights that came from a folder are left out of checkpoints, and taken from such a folder again."""

import json
import re
import shutil

import pytest
import torch
from bases import base_folder, engine_on, steps, weights
from damage import edit
from tensors import tiny

import zero3d
from zero3d.checkpoint.frozen_base import BLOCK_BYTES, BLOCKS, digest_of
from zero3d.errors import CheckpointError, ConfigError
from zero3d.tools.cli.main import main


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("bases") / "other", seed=1)


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    """Checkpoints of two steps, and the losses of the next two."""
    engine = engine_on(base)
    folder = tmp_path_factory.mktemp("saved")
    steps(engine, (1,))
    engine.save(folder)
    steps(engine, (2,))
    engine.save(folder)
    return folder, steps(engine, (3, 4)), engine.fingerprint()


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_a_run_goes_on_bitwise_without_frozen_weights_in_the_checkpoint(base, saved, tmp_path):
    folder, losses, fingerprint = saved
    manifest = manifest_of(folder / "step-2")
    assert manifest["format"] == 5
    assert manifest["base"]["folder"] == str(base)
    rows = json.loads((folder / "step-2" / "rank-00000.json").read_text())["tensors"]
    assert rows
    assert all("lora_" in row["name"] and row["state"] != "weight" for row in rows)
    moved = shutil.copytree(base, tmp_path / "moved")
    engine = engine_on(moved)
    engine.load(folder)
    assert engine.resumed.startswith("bitwise")
    assert steps(engine, (3, 4)) == losses
    assert engine.fingerprint() == fingerprint


def test_a_checkpoint_of_large_adapters_is_little_more_than_their_states(tmp_path):
    folder = base_folder(tmp_path / "base", hidden_size=128, intermediate_size=256)
    engine = engine_on(folder, lora={"r": 64})
    steps(engine, (1,))
    step = engine.save(tmp_path / "saved")
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    assert 12 * trained < sum(path.stat().st_size for path in step.iterdir()) <= 1.1 * 12 * trained


def test_another_base_is_refused_in_one_line_that_names_both(saved, other):
    engine = engine_on(other)
    before = weights(engine)
    with pytest.raises(CheckpointError) as refused:
        engine.load(saved[0])
    line, digest = str(refused.value), manifest_of(saved[0] / "step-2")["base"]
    assert "\n" not in line
    assert all(each in line for each in (digest["folder"], digest["digest"], str(other)))
    assert line.count("digest") == 2
    assert "model.path" in line
    assert weights(engine) == before


def test_an_engine_without_a_base_is_told_which_folder_to_load(saved, base):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), options)
    engine = zero3d.Engine(model, precision="fp32")
    with pytest.raises(
        CheckpointError, match=f"frozen weights of '{base}'.*took them from no such folder: load that folder"
    ):
        engine.load(saved[0])


def test_without_a_folder_frozen_weights_are_saved_and_the_format_is_as_ever(tmp_path):
    engine = zero3d.Engine(tiny("llama", lora=True), precision="fp32")
    steps(engine, (1,))
    manifest = manifest_of(engine.save(tmp_path))
    assert manifest["format"] == 4
    assert "base" not in manifest
    assert not any("base" in parameter for parameter in manifest["parameters"].values())


def test_frozen_weights_in_fp64_lose_no_bit_in_a_checkpoint(tmp_path):
    models = [tiny("llama", lora=True).double() for _ in range(2)]
    with torch.no_grad():
        for p in models[0].parameters():
            p.div_(3)  # 53 bits, of which fp32 keeps 24
    saved, again = (zero3d.Engine(model, precision="fp64") for model in models)
    assert weights(saved) != weights(again)
    saved.save(tmp_path)
    again.load(tmp_path)
    assert weights(again) == weights(saved)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_that_were_written_are_saved_from_then_on_and_a_load_brings_the_bases_back(
    base, saved, tmp_path, stage
):
    engine = engine_on(base, stage=stage)
    steps(engine, (1,))
    name = "base_model.model.model.norm.weight"
    with engine.full_params():
        dict(engine.module.named_parameters())[name].data.mul_(2)
    changed = manifest_of(engine.save(tmp_path))["parameters"]
    assert changed["base_model.model.lm_head.weight"]["base"]
    assert "base" not in changed[name]
    again = engine_on(base)
    again.load(tmp_path)
    assert weights(again) == weights(engine)
    assert steps(again, (2,)) == steps(engine, (2,))
    engine.load(saved[0])
    assert steps(engine, (3, 4)) == saved[1]


def test_what_was_unfrozen_is_saved_with_its_states(base, tmp_path):
    def unfrozen():
        engine = engine_on(base)
        engine.unfreeze("*model.norm*")
        return engine

    engine = unfrozen()
    steps(engine, (1,))
    parameters = manifest_of(engine.save(tmp_path))["parameters"]
    assert "base" not in parameters["base_model.model.model.norm.weight"]
    assert parameters["base_model.model.lm_head.weight"]["base"]
    again = unfrozen()
    again.load(tmp_path)
    assert weights(again) == weights(engine)
    assert steps(again, (2, 3)) == steps(engine, (2, 3))


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.pop("base"), "there is no 'base'"),
    (lambda m: m["base"].update(digest="x"), "base.digest is 'x', but should be an XXH3 in 32 digits"),
    (lambda m: m["base"].update(folder=3), "base.folder is 3, but should be a text"),
    (lambda m: m["parameters"]["base_model.model.lm_head.weight"].pop("base"), "differently than the ranks' parts"),
    (lambda m: m.update(format=4), "nothing at (0:64, 0:32) of weight of 'base_model.model.model.embed_tokens.weight'"),
    (lambda m: m.update(format=6), "has format 6, and this zero3d reads formats 4 and 5: upgrade zero3d"),
])  # fmt: skip
def test_what_a_manifest_says_of_its_base_is_checked(saved, tmp_path, capsys, change, message):
    step = shutil.copytree(saved[0] / "step-2", tmp_path / "step-2")
    edit(step, change)
    assert main(["ckpt", "verify", str(step)]) == 1
    assert message in capsys.readouterr().out


def test_the_commands_know_it(saved, base, other, tmp_path, capsys):
    folder = saved[0]
    assert main(["ckpt", "verify", str(folder)]) == 0
    capsys.readouterr()
    assert main(["ckpt", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "format 5" in shown
    assert re.search(rf"base +{base}, digest \w{{32}}: has \d+ frozen parameters", shown)
    assert re.search(r"lm_head\.weight +64 x 32 +float32 +frozen +in the base", shown)
    engine = engine_on(other)
    steps(engine, (1, 2))
    engine.save(tmp_path)
    assert main(["ckpt", "diff", str(folder / "step-2"), str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in found["differences"] if each["kind"] == "base"} >= {
        "base_model.model.lm_head.weight"
    }
    assert {"base.folder", "base.digest"} <= found["facts"].keys()
    assert main(["ckpt", "diff", str(folder / "step-2"), str(folder / "step-2")]) == 0


# --- the digest -----------------------------------------------------------------------------------


def files_of(folder):
    return sorted(folder.glob("*.safetensors"))


def test_a_digest_is_that_of_the_tensors_and_not_of_their_files(base, other, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(files_of(tmp_path)) > 1
    assert digest_of(files_of(tmp_path)) == digest_of(files_of(base)) != digest_of(files_of(other))


@pytest.mark.parametrize("at", [0, -1])
def test_a_digest_sees_both_ends_of_every_tensor(tmp_path, at):
    from safetensors.torch import save_file

    large = torch.zeros(2 * BLOCKS * BLOCK_BYTES, dtype=torch.uint8)
    save_file({"a": large}, tmp_path / "one.safetensors")
    large[at] = 1
    save_file({"a": large}, tmp_path / "two.safetensors")
    assert digest_of([tmp_path / "one.safetensors"]) != digest_of([tmp_path / "two.safetensors"])


@pytest.mark.parametrize(("damage", "message"), [
    (lambda data: data[:-1], "ends before byte"),
    (lambda data: data[:20], "cannot be read as safetensors"),
    (lambda data: b"", "cannot be read as safetensors"),
])  # fmt: skip
def test_a_damaged_base_is_named(base, tmp_path, damage, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(files_of(base)[0].read_bytes()))
    with pytest.raises(ConfigError, match=f"{file}.*{message}.*: copy it again"):
        digest_of([file])
