"""What an export writes, refuses and leaves alone."""

import pytest
import torch
from models import build
from safetensors.torch import load_file, save_file

import zero3d
import zero3d.checkpoint.export
from zero3d.checkpoint.hub_names import named_as_saved
from zero3d.errors import CheckpointError, NonFiniteError


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
    extra = ["config.json", "generation_config.json", "model.safetensors.index.json"]
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
    with pytest.raises(CheckpointError, match="mine was not exported by zero3d, and nothing else is replaced"):
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
