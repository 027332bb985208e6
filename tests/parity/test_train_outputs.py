"""What a run writes beside its checkpoints: TensorBoard, Weights & Biases, traces."""

import json
import math
import os
import struct
from pathlib import Path

import pytest
import yaml
from corpora import save_tokenizer
from safetensors.torch import load_file
from training import field, metrics, save_model, save_rows, start, train, tree


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


def scalars(folder):
    """name -> {step: value} of all event files, read by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_reads_what_metrics_jsonl_says_also_after_a_resume(ranks, folder):
    pytest.importorskip("tensorboard")
    made = tree(folder, log={"to": "tensorboard"}, checkpoint={"every": 2, "keep": 9}, data={"validation": 0.2})
    made["evaluate"] = {"every": 2}
    for checkpoint in (None, "step-4"):  # as after a crash in step 5
        ranks(1, train, made, checkpoint and str(Path(made["output"]) / "checkpoints" / checkpoint))
    read, lines = scalars(Path(made["output"]) / "tensorboard"), metrics(made)
    assert set(read) == set().union(*lines) - {"step"}
    assert {"validation_loss", "perplexity", "loss", "lr", "grad_norm", "tokens_per_s"} <= set(read)
    for name, points in read.items():
        expected = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        assert [step for step, _ in points] == [step for step, _ in expected]
        assert [value for _, value in points] == pytest.approx([float(value) for _, value in expected], rel=1e-6)


def test_a_finished_run_that_is_resumed_opens_nothing_that_records_would_go_to(ranks, folder):
    pytest.importorskip("tensorboard")
    made = tree(folder, train={"steps": 1})
    ranks(1, train, made)
    before = metrics(made)
    assert len(ranks(1, train, made | {"log": {"to": "tensorboard"}}, "auto")[0]) == len(before) == 1
    assert not (Path(made["output"]) / "tensorboard").exists()
    assert metrics(made) == before


@pytest.mark.long
@pytest.mark.parametrize("named", ["its own file", "the user's"])
def test_a_run_of_an_earlier_version_goes_on_with_the_trackers_that_its_file_asked_for(ranks, folder, named):
    pytest.importorskip("tensorboard")
    whole = ranks(1, train, tree(folder, output="whole"))[0]
    made = tree(folder, output="out")
    ranks(1, train, made, None, 2)
    own = Path(made["output"]) / "config.yaml"
    config = yaml.safe_load(own.read_text())
    config["log"] |= {"tensorboard": True, "wandb": None}
    config["plan"] |= {"write_back": False}
    own.write_text(yaml.safe_dump(config))
    given = str(own) if named == "its own file" else made | {"log": {"to": "tensorboard"}}
    assert field(ranks(1, train, given, "auto")[0], "loss") == field(whole, "loss")
    assert [step for step, _ in scalars(Path(made["output"]) / "tensorboard")["loss"]] == [3, 4, 5]
    assert not {"tensorboard", "wandb"} & yaml.safe_load(own.read_text())["log"].keys()


@pytest.mark.long  # its packages are larger than all others of the tests: who wants it installs zero3d[wandb]
def test_weights_and_biases_gets_the_records_offline_in_one_run_over_a_resume(ranks, folder):
    pytest.importorskip("wandb", reason="pip install 'zero3d[wandb]'")
    made = tree(
        folder, log={"to": "wandb", "project": "zero3d-test"}, checkpoint={"every": 2}, data={"validation": 0.2}
    )
    ranks(1, offline, made, None, 2)
    ranks(1, offline, made, "auto")
    files = sorted((Path(made["output"]) / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 1, "one run's number"
    sessions = [logged(file) for file in files]
    assert [step for session in sessions for step, _ in session] == [1, 2, 3, 4, 5]
    for line, (_, values) in zip(metrics(made), [entry for session in sessions for entry in session], strict=True):
        expected = {name: value for name, value in line.items() if name != "step" and value is not None}
        assert {name: values[name] for name in expected} == expected


def offline(made, *how):
    os.environ["WANDB_MODE"] = "offline"
    try:
        return train(made, *how)
    finally:
        del os.environ["WANDB_MODE"]


def logged(file):
    """[(step, values by name), ...] of an offline run, in messages of Weights & Biases' own."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for data in chunks(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            found.append((record.history.step.num, values))
    return found


def chunks(raw, head=7, block=1 << 15, whole=1, last=4):
    """What LevelDB's log format holds: in blocks, pieces of (checksum, length, kind), after seven bytes of the file's own."""
    at, data = head, b""
    while at + head <= len(raw):
        if block - at % block < head:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        data += raw[at + head : at + head + length]
        at += head + length
        if kind in (whole, last):
            yield data
            data = b""


@pytest.mark.long
def test_a_trace_of_the_asked_steps_is_readable(ranks, folder):
    made = tree(folder, profile={"steps": 2, "after": 1}, train={"steps": 4})
    ranks(2, train, made)
    files = sorted(path.name for path in Path(made["output"]).glob("trace*"))
    assert files == ["trace-rank-0.json", "trace-rank-1.json", "trace.json"]
    for file, ranks_in_it in zip(files, (1, 1, 2), strict=True):
        events = json.loads((Path(made["output"]) / file).read_text())["traceEvents"]
        embeddings = [event for event in events if event.get("name") == "aten::embedding"]
        assert len(embeddings) == ranks_in_it * 2 * 2, "two steps of two micro-batches"
        assert len({event["pid"] for event in embeddings}) == ranks_in_it


def test_metrics_are_valid_json_and_count_what_was_done(ranks, folder):
    made = tree(folder, data={"validation": 0.2}, evaluate={"every": 2})
    records = ranks(2, train, made)[0]
    lines = metrics(made)
    assert lines == records
    assert field(lines, "step") == [1, 2, 3, 4, 5]
    assert field(lines, "tokens") == [step * 4 * 16 for step in range(1, 6)]
    rows = 14 - round(14 * 0.2)
    assert field(lines, "epoch") == pytest.approx([step * 4 / rows for step in range(1, 6)])
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 5]
    for line in lines[1::2]:
        assert line["perplexity"] == pytest.approx(math.exp(line["validation_loss"]))


def test_an_export_has_the_models_tokenizer_though_the_data_are_token_ids(ranks, folder):
    from transformers import AutoTokenizer

    bare = tree(folder, "bare", train={"steps": 1}, checkpoint={"export": True})
    ranks(1, train, bare)
    save_tokenizer(folder / "model")
    ranks(1, train, tree(folder, train={"steps": 1}, checkpoint={"export": True}))
    exported = AutoTokenizer.from_pretrained(folder / "out" / "hf", local_files_only=True)
    own = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    assert exported("one and two")["input_ids"] == own("one and two")["input_ids"] != []
    assert not list((folder / "bare" / "hf").glob("tokenizer*"))


KINDS = (True, "adapter", "merged", "both", False)


def adapted(folder, output, export, **checkpoint):
    """A run of adapters on a saved model, evaluated and exported."""
    return tree(
        folder, output, lora={"rank": 4, "train_also": ["model.norm"]}, data={"validation": 0.3},
        optimizer={"lr": 1e-2}, train={"steps": 2}, checkpoint={"export": export, "verify": True, **checkpoint},
    )  # fmt: skip


def results(made):
    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.report import as_json, summary
    from zero3d.train.run import run

    result = run(load(made), start("test"), Progress(Console(quiet=True)))
    return as_json(result) | {"lines": list(summary(result))}


@pytest.mark.parametrize(("export", "places", "loader"), [
    (True, ["adapter"], "PeftModel"),
    pytest.param("merged", ["hf"], "AutoModelForCausalLM", marks=pytest.mark.long),
    pytest.param("both", ["hf", "adapter"], "AutoModelForCausalLM", marks=pytest.mark.long),
])  # fmt: skip
def test_adapters_are_exported_for_peft_or_merged_and_load_as_anybody_would_load_them(
    ranks, folder, export, places, loader
):
    found = ranks(2, results, adapted(folder, f"export-{export}", export))[0]
    assert [Path(path).name for path in found["paths"]["exports"]] == places
    assert found["reloaded_loss"] == pytest.approx(found["held_out_loss"], rel=1e-6)
    assert any(
        f"loaded with {loader}.from_pretrained: " in line and line.endswith("the same") for line in found["lines"]
    )


def test_adapters_on_new_weights_are_exported_with_them(tmp_path):
    from zero3d.config import Model
    from zero3d.models.places import has_base
    from zero3d.train.export_places import export_places

    bases = {based: Model(path=str(tmp_path), init=init) for based, init in ((True, "weights"), (False, "random"))}
    for based, model in bases.items():
        assert has_base(model) == based
        places = {export: [place.name for place in export_places(tmp_path, export, True, based)] for export in KINDS}
        assert places == {
            True: ["adapter" if based else "hf"], "adapter": ["adapter"], "merged": ["hf"], "both": ["hf", "adapter"],
            False: [],
        }  # fmt: skip
    assert has_base(Model(path="module:function"))
    assert not has_base(Model(path="demo"))


@pytest.mark.long
def test_a_checkpoint_without_its_base_is_exported_offline_as_the_run_did(ranks, folder, capsys):
    from zero3d.tools.cli.main import main

    made = adapted(folder, "lora", "both", verify=False)
    ranks(2, train, made)
    step = Path(made["output"]) / "checkpoints" / "step-2"
    assert sum(file.stat().st_size for file in step.glob("*.safetensors")) < 60_000, "of 12 bytes each"
    (folder / "model").rename(folder / "moved")
    for kind, run in (("adapter", "adapter/adapter_model"), ("merged", "hf/model")):
        out = folder / f"offline-{kind}"
        assert main(["ckpt", "export", str(step), str(out), "--as", kind, "--base", str(folder / "moved")]) == 0
        name = f"{run.split('/')[1]}.safetensors"
        assert (out / name).read_bytes() == (Path(made["output"]) / f"{run}.safetensors").read_bytes()
    base = folder / "moved"
    assert main(["ckpt", "export", str(step), str(folder / "base"), "--as", "base", "--base", str(base)]) == 0
    before, after = (load_file(each / "model.safetensors") for each in (base, folder / "base"))
    assert before.keys() == after.keys()
    changed = [name for name, tensor in before.items() if not tensor.to(after[name].dtype).equal(after[name])]
    assert changed == ["model.norm.weight"]  # trained in full beside the adapters
    capsys.readouterr()
    assert main(["ckpt", "export", str(step), str(folder / "none")]) == 2
    assert "model" in capsys.readouterr().err


@pytest.mark.parametrize(("sections", "why"), [
    ({"checkpoint": {"export": "merged"}}, "is for a model with adapters, and LlamaForCausalLM has none: type lora.rank=16"),
    ({"checkpoint": {"export": "adapters"}}, "Did you mean adapter"),
    ({"lora": {"rank": 2}, "model": {"init": "random"}, "checkpoint": {"export": "adapter", "verify": True}},
     "loads an adapter on the folder of its base"),
])  # fmt: skip
def test_an_export_that_cannot_be_is_refused_at_the_start(ranks, folder, sections, why):
    errors = [error for _, error in ranks(2, train, tree(folder, "not-exported", **sections), check=False)]
    assert why in errors[0]
