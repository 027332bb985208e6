"""What an export writes, refuses and leaves alone."""

from pathlib import Path

import pytest
import torch
from models import build
from safetensors.torch import load_file, save_file

import zero3d
import zero3d.checkpoint.export
from zero3d.checkpoint import folders
from zero3d.checkpoint.export import export_places, prepare_export
from zero3d.checkpoint.folders import put_in_place
from zero3d.checkpoint.hub_names import named_as_saved
from zero3d.errors import CheckpointError, ConfigError, NonFiniteError
from zero3d.train.export_places import ExportPlace


def engine_of(name, change=lambda model: None):
    model = build(name)
    change(model)
    return zero3d.Engine(model, stage=3, precision="fp32")


def test_files_have_at_most_the_bytes_they_may_or_one_tensor_and_nothing_else_is_written(tmp_path, monkeypatch):
    limit = 5_000  # of Llama's matrices some are larger, some are not
    monkeypatch.setattr(zero3d.checkpoint.export, "FILE_BYTES", limit)
    engine = engine_of("llama")
    before = engine.module.config.to_dict()
    (tmp_path / ".hf.tmp").mkdir()  # of an export that was killed
    save_file({"old": torch.zeros(1)}, tmp_path / ".hf.tmp" / "part-0-99")
    (tmp_path / "hf").mkdir()
    folder = engine.export(tmp_path / "hf")
    files = [load_file(path) for path in sorted(folder.glob("model-*"))]
    sizes = [[tensor.nbytes for tensor in file.values()] for file in files]
    assert all(sum(each) <= limit or len(each) == 1 for each in sizes)
    assert any(sum(each) > limit for each in sizes)
    assert min(len(each) for each in sizes) == 1 < max(len(each) for each in sizes)
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    extra = ["README.md", "config.json", "generation_config.json", "model.safetensors.index.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, *extra])
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert engine.module.config.to_dict() == before  # it is the user's


def test_what_is_in_the_way_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(zero3d.checkpoint.export, "_add_units", None)
    engine = engine_of("net")
    (tmp_path / "file").write_text("of somebody")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("of somebody")
    for name in ("file", "full"):
        with pytest.raises(CheckpointError, match=f"{name} exists and is not empty: export to a new directory"):
            engine.export(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "file", "full"]
    assert {path.read_text() for path in tmp_path.rglob("file")} == {"of somebody"}


def test_an_earlier_export_is_replaced_once_the_new_one_is_whole(tmp_path, monkeypatch):
    engine, place = engine_of("net"), tmp_path / "hf"
    (tmp_path / "mine").mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "mine" / "model.safetensors")
    before = load_file(engine.export(place, overwrite=True) / "model.safetensors")
    with engine.full_params(), torch.no_grad():
        next(engine.module.parameters()).add_(1.0)
    with pytest.raises(CheckpointError, match="hf exists and is not empty"):
        engine.export(place)
    with pytest.raises(
        CheckpointError, match=r"mine/model\.safetensors was not exported by zero3d, and nothing else is replaced"
    ):
        engine.export(tmp_path / "mine", overwrite=True)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="full"):
        patched.setattr(zero3d.checkpoint.export, "_join", fail)
        engine.export(place, overwrite=True)
    kept = load_file(place / "model.safetensors")
    assert all(torch.equal(kept[name], weight) for name, weight in before.items())
    after = load_file(engine.export(place, overwrite=True) / "model.safetensors")
    assert sum(not torch.equal(after[name], weight) for name, weight in before.items()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine"]


def fail(*_):
    raise RuntimeError("the disk is full")


def exported(folder, value=0.0):
    """A folder with the weights of an export, all of them of one value."""
    folder.mkdir()
    save_file({"w": torch.full((1,), value)}, folder / "model.safetensors", metadata={"writer": "zero3d"})
    return folder


def value_of(folder):
    return load_file(folder / "model.safetensors")["w"].item()


@pytest.mark.parametrize(
    "foreign",
    [
        "README.md",
        "gguf/model.gguf",
        "mine.safetensors",
        "model-00001-of-00002.safetensors",
        "additional_chat_templates/mine.txt",
    ],
)
def test_an_export_with_files_of_others_is_not_replaced(tmp_path, foreign):
    place = exported(tmp_path / "hf")
    beside = ("config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json", "vocab.json")
    (place / "additional_chat_templates").mkdir()
    for name in (*beside, "spiece.model", "chat_template.jinja", "additional_chat_templates/tool.jinja"):
        (place / name).write_text("of the export")
    prepare_export(place, tmp_path / ".hf.tmp", overwrite=True)
    ExportPlace(tmp_path, "whole", "hf").refuse()
    (place / foreign).parent.mkdir(exist_ok=True)
    (place / foreign).write_text("of somebody")
    entry = place / Path(foreign).parts[0]
    with pytest.raises(CheckpointError, match=f"{entry} was not exported by zero3d, and nothing else is replaced"):
        prepare_export(place, tmp_path / ".hf.tmp", overwrite=True)
    with pytest.raises(ConfigError, match=f"{entry} was not exported by a run and would be replaced"):
        ExportPlace(tmp_path, "whole", "hf").refuse()


@pytest.mark.parametrize("killed", [False, True], ids=["before", "between-renames"])
def test_the_export_before_stays_where_the_new_one_cannot_be_put_in_its_place(tmp_path, monkeypatch, killed):
    """Also after an earlier process died between its two renames."""
    exported(tmp_path / (".hf.old" if killed else "hf"), 1.0)
    fresh, rename = exported(tmp_path / ".hf.tmp", 2.0), Path.rename

    def full(path, target):
        if path == fresh:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(Path, "rename", full)
        put_in_place(fresh, tmp_path / "hf")
    assert value_of(tmp_path / "hf") == 1.0
    put_in_place(fresh, tmp_path / "hf")
    assert value_of(tmp_path / "hf") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_export_before_goes_once_the_disk_has_the_new_one_under_its_name(tmp_path, monkeypatch):
    there = []
    monkeypatch.setattr(folders, "sync", lambda parent: there.extend(path.name for path in parent.iterdir()))
    exported(tmp_path / "hf", 1.0)
    exported(tmp_path / ".hf.old", 0.0)  # of a process that died before it went
    put_in_place(exported(tmp_path / ".hf.tmp", 2.0), tmp_path / "hf")
    assert sorted(there) == [".hf.old", "hf"]
    assert value_of(tmp_path / "hf") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_neither_a_checkpoint_nor_what_is_somebody_elses_makes_way_for_an_export(tmp_path):
    with pytest.raises(CheckpointError, match=f"step-10 has the name of a checkpoint: export to {tmp_path}/hf"):
        export_places(tmp_path / "step-10")
    (tmp_path / ".hf.old").mkdir()
    (tmp_path / ".hf.old" / "manifest.json").write_text("of somebody")
    with pytest.raises(CheckpointError, match=r"\.hf\.old/manifest\.json was not exported by zero3d, .*: move it"):
        put_in_place(exported(tmp_path / ".hf.tmp"), tmp_path / "hf")
    assert (tmp_path / ".hf.old" / "manifest.json").read_text() == "of somebody"


def test_only_who_has_the_option_is_told_of_it(tmp_path):
    place, engine = exported(tmp_path / "hf"), engine_of("net")
    with pytest.raises(CheckpointError, match=r"so that nothing is lost\.$"):
        prepare_export(place, tmp_path / ".hf.tmp")
    with pytest.raises(
        CheckpointError, match=r"so that nothing is lost \(engine\.export\(\.\.\., overwrite=True\) replaces"
    ):
        engine.export(place)


@pytest.mark.parametrize(("kind", "message"), [
    ("adapter", "has no adapters of PEFT: export it as whole, not as adapter"),
    ("merged", "has no adapters of PEFT: export it as whole, not as merged"),
    ("both", "an export is one of whole, merged, base, adapter, not 'both'"),
])  # fmt: skip
def test_a_form_that_a_model_cannot_have_is_refused(tmp_path, kind, message):
    with pytest.raises(CheckpointError, match=message):
        engine_of("net").export(tmp_path / "hf", kind)
    assert not any(tmp_path.iterdir())


def test_several_weights_that_are_not_finite_are_counted(tmp_path):
    engine = engine_of("net")
    with engine.full_params(), torch.no_grad():
        for weight in (engine.module.layers[1].up.weight, engine.module.layers[1].norm.bias):
            weight.view(-1)[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"layers\.1\.norm\.bias and 1 more beside it has values"):
        engine.export(tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_mask_of_infinities_and_weights_without_elements_are_exported(tmp_path):
    def change(model):
        model.nothing = torch.nn.Parameter(torch.zeros(0))
        model.register_buffer("mask", torch.full((2,), -torch.inf))

    found = load_file(engine_of("net", change).export(tmp_path / "hf") / "model.safetensors")
    assert found["mask"].tolist() == [-torch.inf] * 2
    assert found["nothing"].shape == (0,)


def test_weights_that_are_turned_for_their_published_names_are_written_in_order(monkeypatch):
    """safetensors takes contiguous tensors only; some conversions of transformers turn or cut."""
    conversion = "transformers.core_model_loading.revert_weight_conversion"
    monkeypatch.setattr(conversion, lambda model, tensors: {name: t.T for name, t in tensors.items()})
    weight = torch.arange(6.0).view(2, 3)
    (found,) = named_as_saved(build("llama"), {"w": weight}).values()
    assert found.is_contiguous()
    assert torch.equal(found, weight.T)


def test_the_language_model_of_text_and_images_is_found_by_its_config(tmp_path):
    import transformers as t

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text = t.models.mllama.MllamaTextConfig(
        **sizes, num_hidden_layers=2, cross_attention_layers=[], bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    engine = zero3d.Engine(t.MllamaForCausalLM(text), precision="fp32")
    folder = engine.export(tmp_path / "hf")
    loaded = t.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is t.MllamaForCausalLM
    with engine.full_params():
        for key, values in engine.module.state_dict().items():
            assert values.equal(loaded.state_dict()[key]), key
