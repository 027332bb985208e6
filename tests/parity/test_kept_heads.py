"""Multi-token heads of a model's folder are kept, not trained: full exports have their bytes, whatever the mesh."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hybrids import HYBRIDS, hybrid
from models import adamw, batch
from safetensors.torch import load_file, save_file
from training import save_rows, told, train, tree

import zero3d
import zero3d.checkpoint.export
from zero3d.config import load
from zero3d.errors import CheckpointError
from zero3d.models.kept import find_heads, of_file
from zero3d.models.trained import open_trained
from zero3d.reading import tensor_places

DEEPSEEK = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "head_dim": 4,
}  # fmt: skip
HYBRIDS = HYBRIDS | {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK | {"head_dim": 8, "num_key_value_heads": 2}}
MTP = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.up_proj.weight": (48, 32)}
ERNIE = {"model.mtp_block.0.mlp.up_proj.weight": (48, 32), "model.mtp_linear_proj.0.weight": (32, 64)}
BEHIND = {f"model.layers.2.{name}": shape for name, shape in (
    ("eh_proj.weight", (32, 64)), ("enorm.weight", (32,)), ("embed_tokens.weight", (64, 32)),
    ("self_attn.o_proj.weight", (32, 32)), ("shared_head.head.weight", (64, 32)),
)}  # fmt: skip
HEADS = {
    "deepseek_v3": BEHIND, "glm4_moe": BEHIND, "nemotron_h": MTP, "qwen3_5_text": MTP, "qwen3_5_moe_text": MTP,
    "qwen3_next": MTP,
}  # fmt: skip
JUNK = {"model.layers.7.stray.weight": torch.ones(4), "tower.blocks.0.weight": torch.ones(3, 3)}


def with_heads(folder, name, files=1):
    """A tiny model in a folder as it is published: bf16 heads beside its weights, and what else it has no place for."""
    from unittest import mock

    with mock.patch.dict("hybrids.HYBRIDS", HYBRIDS):
        hybrid(name).save_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(Path(folder) / "model.safetensors") | JUNK
    for key, shape in HEADS[name].items():
        tensors[key] = torch.randn(shape, generator=generator).bfloat16()
    if files == 1:
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        return str(folder)
    (Path(folder) / "model.safetensors").unlink()
    names = {f"model-{n + 1:05d}-of-{files:05d}.safetensors": sorted(tensors)[n::files] for n in range(files)}
    for file, keys in names.items():
        save_file({key: tensors[key] for key in keys}, Path(folder) / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in names.items() for key in keys}}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def content(folder):
    """Bytes, dtype and shape of all tensors of a folder, by name."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        data = file.read_bytes()
        for name, (start, stop, dtype, shape) in tensor_places(file).items():
            assert name not in found
            found[name] = data[start:stop], dtype, shape
    return found


def check(name, base, out):
    """A full export has the heads of its base, bit for bit, its own weights and nothing else."""
    wanted, found = content(base), content(out)
    assert found.keys() == wanted.keys() - JUNK.keys()
    assert HEADS[name].keys() <= found.keys()
    for key in HEADS[name]:
        assert found[key] == wanted[key]
    index = Path(out) / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text())
        assert listed["weight_map"].keys() == found.keys()
        assert listed["metadata"]["total_size"] == sum(len(data) for data, _, _ in found.values())


def engine_of(folder, stage=3, mesh=None, **settings):
    opened = open_trained(load({"model": {"path": folder}, **settings}))
    return zero3d.Engine(
        opened.module, weights=opened.weights, stage=stage, precision="bf16", optimizer=adamw,
        mesh=zero3d.Mesh(**mesh) if mesh else None,
    )  # fmt: skip


def step(engine, micro=1):
    batches = [{"input_ids": (ids := batch(part)), "labels": ids} for part in range(micro)]
    engine.train_batch(batches)


# --- which ----------------------------------------------------------------------------------------


class Model:
    _keys_to_ignore_on_load_unexpected = (r"model\.layers\.3.*",)


USED = [f"model.layers.{n}.up.weight" for n in range(2)] + ["lm_head.weight", "model.visual.layers.0.up.weight"]


@pytest.mark.parametrize(("unused", "heads"), [
    (["mtp.fc.weight", "other.weight"], ["mtp.fc.weight"]),
    (["model.mtp_block.0.weight", "model.mtp_emb_norm.0.weight"], ["model.mtp_block.0.weight", "model.mtp_emb_norm.0.weight"]),
    (["model.smtp.weight", "encoder.attempt.weight"], []),
    (["model.layers.2.eh_proj.weight", "model.layers.2.up.weight"], ["model.layers.2.eh_proj.weight", "model.layers.2.up.weight"]),
    (["model.layers.2.up.weight", "model.layers.3.up.weight"], []),  # of a config.json with fewer layers
    (["model.layers.2.eh_proj.weight", "model.layers.3.up.weight"], ["model.layers.2.eh_proj.weight", "model.layers.3.up.weight"]),
    (["model.layers.3.eh_proj.weight", "model.layers.3.up.weight"], []),  # behind a layer that is not there
    (["model.layers.1.eh_proj.weight"], []),  # inside
    (["tower.layers.2.eh_proj.weight"], []),
    (["model.layers.2.my_eh_projection.weight"], []),
])  # fmt: skip
def test_heads_are_told_from_what_else_a_model_has_no_place_for(unused, heads):
    assert find_heads(unused, USED, Model()) == heads


# --- exports --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", *(pytest.param(n, marks=pytest.mark.long) for n in HEADS if n != "qwen3_5_text")]
)
def test_a_full_export_has_the_heads_and_an_adapters_has_none(tmp_path, monkeypatch, name):
    from transformers import AutoModelForCausalLM

    base = with_heads(tmp_path / "base", name, files=3)
    monkeypatch.setattr(zero3d.checkpoint.export, "FILE_BYTES", 6_000)
    opened = open_trained(load({"model": {"path": base}}))
    lines = [note for note in opened.notes if "kept, not trained" in note]
    assert len(lines) == 1
    assert lines[0].startswith(f"{len(HEADS[name])} tensors of {base} are kept, not trained")
    assert any(note.startswith(f"{len(JUNK)} tensors of {base} are not used") for note in opened.notes)
    engine = engine_of(base)
    step(engine)
    check(name, base, engine.export(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    with engine.full_params(), torch.no_grad():
        assert loaded(input_ids=batch(9)).logits.equal(engine.module.eval()(input_ids=batch(9)).logits)
    adapted = engine_of(base, lora={"rank": 2, "targets": ["all-linear"]})
    step(adapted)
    assert not [key for key in content(adapted.export(tmp_path / "adapter")) if key.endswith(tuple(HEADS[name]))]
    for kind in ("merged", "base"):
        check(name, base, adapted.export(tmp_path / f"as-{kind}", kind))


def exported(base, out, mesh, stage, micro):
    engine = engine_of(base, stage, mesh)
    step(engine, micro)
    engine.export(out)


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "ranks_of", "stage"), [
    ("qwen3_5_text", {}, 2, 3), ("qwen3_5_text", {"tp": 2}, 2, 1), ("nemotron_h", {"pp": 2}, 2, 1),
    ("qwen3_5_text", {"pp": 2, "tp": 2}, 4, 0), ("glm4_moe", {"ep": 2}, 2, 3), ("deepseek_v3", {"ep": 2}, 2, 2),
])  # fmt: skip
def test_every_mesh_has_them(ranks, tmp_path, name, mesh, ranks_of, stage):
    base = with_heads(tmp_path / "base", name)
    ranks(ranks_of, exported, base, str(tmp_path / "out"), mesh, stage, 2)
    check(name, base, tmp_path / "out")


def test_a_stream_into_a_folder_has_them(tmp_path):
    from zero3d.checkpoint.streamed_folder import FolderSender

    base = with_heads(tmp_path / "base", "qwen3_5_text")
    engine = engine_of(base)
    engine.send_weights(FolderSender(tmp_path / "out"))
    check("qwen3_5_text", base, tmp_path / "out")


def test_a_folder_that_is_gone_is_told_before_anything_is_written(tmp_path):
    base = with_heads(tmp_path / "base", "qwen3_5_text")
    engine = engine_of(base)
    file = Path(base) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"carries on 3 tensors .* has become shorter: put the folder back"):
        engine.export(tmp_path / "out")
    kept = open_trained(load({"model": {"path": with_heads(tmp_path / "other", "qwen3_5_text")}})).weights.kept
    kept.check()
    file = tmp_path / "other" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="has become shorter"):
        kept.check()
    shutil.rmtree(base)
    with pytest.raises(
        CheckpointError,
        match=r"mtp\.fc\.weight and so on, 7,232 bytes.*/model\.safetensors cannot be read \(No such file",
    ):
        engine.export(tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_heads_of_a_folder_in_8_bits_are_decoded_like_its_other_matrices(tmp_path):
    from zero3d.models.load import FileWeights
    from zero3d.models.open import open_bare

    base = with_heads(tmp_path / "base", "qwen3_5_text")
    file, settings = Path(base) / "model.safetensors", Path(base) / "config.json"
    tensors = load_file(file)
    values = tensors["mtp.fc.weight"].float().clamp(-2, 2).to(torch.float8_e4m3fn)
    tensors |= {"mtp.fc.weight": values, "mtp.fc.weight_scale_inv": torch.tensor([[0.5, 2.0]])}
    save_file(tensors, file, {"format": "pt"})
    quantised = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"quantization_config": quantised}))
    model = load({"model": {"path": base}}).model
    kept = FileWeights(Path(base), open_bare(model).module).kept
    wanted = torch.cat([values[:, :32].float() * 0.5, values[:, 32:].float() * 2.0], 1).bfloat16()
    assert b"".join(map(bytes, kept.blocks("mtp.fc.weight"))) == wanted.view(torch.uint8).numpy().tobytes()
    assert kept.tensors.keys() == MTP.keys()
    engine = engine_of(base)
    found = content(engine.export(tmp_path / "out"))
    assert found["mtp.fc.weight"] == (wanted.view(torch.uint8).numpy().tobytes(), "BF16", (32, 64))
    assert found["mtp.norm.weight"] == content(base)["mtp.norm.weight"]


@pytest.mark.long
def test_a_text_part_has_the_heads_and_no_tower(tmp_path):
    import transformers as t
    from families import SIZES

    text = SIZES | HYBRIDS["qwen3_5_text"]
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = t.AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    whole = t.AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(base := tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    heads = {name: torch.randn(shape).bfloat16() for name, shape in MTP.items()}
    save_file(tensors | heads, base / "model.safetensors", {"format": "pt"})
    engine = engine_of(str(base), model={"path": str(base), "part": "text"})
    found, wanted = content(engine.export(tmp_path / "out")), content(base)
    assert not [name for name in found if "visual" in name]
    assert {name: found[name] for name in MTP} == {name: wanted[name] for name in MTP}
    engine = engine_of(str(base))
    assert content(engine.export(tmp_path / "whole")).keys() == wanted.keys()


# --- runs -----------------------------------------------------------------------------------------


def run(folder, **sections):
    return tree(folder, saved="base", data={"packing": False}, **sections)


def losing(made, base):
    """A run whose model's folder goes when its steps are done."""
    from unittest import mock

    from zero3d.train.loop import Loop

    steps = Loop.run

    def and_then(self, *given):
        steps(self, *given)
        shutil.rmtree(base)

    with mock.patch.object(Loop, "run", and_then):
        return train(made)


@pytest.mark.long
def test_a_run_keeps_a_copy_so_that_the_models_folder_may_go(ranks, tmp_path, capsys):
    from zero3d.tools.cli.main import main

    base = with_heads(tmp_path / "base", "qwen3_5_text")
    shutil.copytree(base, tmp_path / "before")
    save_rows(tmp_path / "rows.npy")
    made = run(tmp_path, train={"steps": 1}, checkpoint={"export": True, "every": 1, "verify": False})
    ranks(1, losing, made, base)
    out = Path(made["output"])
    assert not Path(base).exists()
    check("qwen3_5_text", tmp_path / "before", out / "hf")
    assert content(out).keys() == MTP.keys()
    step_1 = out / "checkpoints" / "step-1"
    before = str(tmp_path / "before" / "config.json")
    assert main(["ckpt", "export", str(step_1), str(tmp_path / "offline"), "--config", before]) == 0
    assert content(tmp_path / "offline") == content(out / "hf")
    assert "heads for further tokens" not in capsys.readouterr().out
    (out / "kept.safetensors").unlink()
    whole = str(tmp_path / "before")
    assert main(["ckpt", "export", str(step_1), str(tmp_path / "from folder"), "--config", whole]) == 0
    assert content(tmp_path / "from folder") == content(out / "hf")
    assert main(["ckpt", "export", str(step_1), str(tmp_path / "without"), "--config", before]) == 0
    assert "heads for further tokens, which a folder of Qwen3_5ForCausalLM may have" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not content(tmp_path / "without").keys() & MTP.keys()


@pytest.mark.long
def test_a_run_that_goes_on_keeps_its_copy_and_one_with_adapters_has_none(ranks, tmp_path):
    base = with_heads(tmp_path / "base", "qwen3_5_text")
    save_rows(tmp_path / "rows.npy")
    made = run(tmp_path, train={"steps": 1}, checkpoint={"export": True, "every": 1})
    _, lines = ranks(1, told, made)[0]
    assert sum("3 tensors" in line and "kept, not trained" in line for line in lines) == 1
    copy = Path(made["output"]) / "kept.safetensors"
    first = copy.stat().st_ino
    ranks(1, train, made | {"train": {"steps": 2, "batch": 4, "accumulate": 2}}, "auto")
    assert copy.stat().st_ino == first
    check("qwen3_5_text", base, Path(made["output"]) / "hf")
    adapted = run(tmp_path, output="lora", train={"steps": 1}, lora={"rank": 2}, checkpoint={"export": True})
    ranks(1, train, adapted)
    assert not (Path(adapted["output"]) / "kept.safetensors").exists()
    assert (Path(adapted["output"]) / "adapter").is_dir()


def test_an_export_reads_the_runs_copy_and_one_of_other_heads_is_made_again(tmp_path):
    from zero3d.checkpoint.writing import write_kept
    from zero3d.train.exported_folder import _keep

    base = Path(with_heads(tmp_path / "base", "qwen3_5_text"))
    kept = open_trained(load({"model": {"path": str(base)}})).weights.kept
    write_kept(tmp_path / "kept.safetensors", kept, list(kept.tensors))
    assert kept.is_in(tmp_path / "kept.safetensors")
    tensors = load_file(base / "model.safetensors")
    tensors["mtp.fc.weight"][-1, -1] += 1
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    kept = open_trained(load({"model": {"path": str(base)}})).weights.kept
    assert not kept.is_in(tmp_path / "kept.safetensors")
    _keep(kept, tmp_path / "kept.safetensors")
    assert kept.is_in(tmp_path / "kept.safetensors")
    assert {tensor.file for tensor in kept.tensors.values()} == {tmp_path / "kept.safetensors"}
    assert load_file(tmp_path / "kept.safetensors")["mtp.fc.weight"].equal(tensors["mtp.fc.weight"])
    assert of_file(tmp_path / "kept.safetensors").tensors == kept.tensors


def test_a_copy_of_other_ends_is_another(tmp_path):
    values = torch.zeros(3000)  # more than is read of each end
    save_file({"mtp.fc.weight": values}, tmp_path / "one.safetensors")
    values[-1] = 1
    save_file({"mtp.fc.weight": values}, tmp_path / "other.safetensors")
    kept = of_file(tmp_path / "one.safetensors")
    assert kept.is_in(tmp_path / "one.safetensors")
    assert not kept.is_in(tmp_path / "other.safetensors")
