"""What going on may not do: take over a folder of others, lose what stands there, or change the run in silence."""

import shutil
from unittest import mock

import numpy
import pytest
from training import contents, field, metrics, refused, save_model, save_rows, start, train, tree

EXPORT = {"export": True}


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


@pytest.fixture(scope="module")
def finished(ranks, tmp_path_factory):
    """A folder with runs that have ended, for what is refused and so changes none: `packed` and `rows` of two steps."""
    made = tmp_path_factory.mktemp("finished")
    save_model(made / "model")
    save_rows(made / "rows.npy")
    ranks(1, train, packed(made))
    ranks(1, train, tree(made, "rows", train={"steps": 2}))
    return made


# --- whose folder -------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["mine: 1", "seed: 1", "", None])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_others_is_refused_and_keeps_its_files(ranks, folder, config, overwrite):
    made = tree(folder, checkpoint=EXPORT)
    (folder / "out" / "hf").mkdir(parents=True)
    (folder / "out" / "hf" / "precious.txt").write_text("x")
    if config is not None:
        (folder / "out" / "config.yaml").write_text(config)
    error = refused(ranks, made, None if overwrite else "auto", None, overwrite)
    assert error.startswith("ConfigError: ")
    assert "no run wrote it" in error


@pytest.mark.parametrize(
    "start", [pytest.param(("auto",), marks=pytest.mark.long), (None, None, True)], ids=["auto", "overwrite"]
)
def test_an_export_of_others_in_the_runs_folder_is_not_replaced(ranks, folder, start):
    made = tree(folder, train={"steps": 1})
    ranks(1, train, made)
    save_model(folder / "out" / "hf")
    made["checkpoint"] = EXPORT
    assert "hf/model.safetensors was not exported by a run" in refused(ranks, made, *start)


def test_a_run_that_was_moved_goes_on_and_replaces_its_own_export(ranks, folder):
    made = tree(folder, train={"steps": 1}, checkpoint=EXPORT)
    ranks(1, train, made)
    (folder / "out").rename(folder / "moved")
    before = {path.name: data for path, data in contents(folder / "moved" / "hf").items()}
    made |= {"output": str(folder / "moved"), "train": {"steps": 2, "batch": 4}}
    assert field(ranks(2, train, made, "auto")[0], "step") == [1, 2]
    after = {path.name: data for path, data in contents(folder / "moved" / "hf").items()}
    assert after.keys() == before.keys()
    assert after != before
    assert not [path.name for path in (folder / "moved").iterdir() if "hf" in path.name and path.name != "hf"]


def fail_in_export(made):
    """train, on a disk that takes no exported weights."""
    from zero3d.checkpoint import export
    from zero3d.errors import CheckpointError

    original = export.write_tensors

    def write_tensors(path, tensors, **about):
        raise CheckpointError("the disk is full")

    export.write_tensors = write_tensors
    try:
        return train(made, "auto")
    finally:
        export.write_tensors = original


def test_an_export_that_fails_leaves_the_one_before(ranks, folder):
    made = tree(folder, train={"steps": 1}, checkpoint=EXPORT)
    ranks(1, train, made)
    before = contents(folder / "out" / "hf")
    made["train"]["steps"] = 2
    errors = [error for _, error in ranks(2, fail_in_export, made, check=False)]
    assert "the disk is full" in errors[0]
    assert contents(folder / "out" / "hf") == before


def test_the_folder_is_refused_before_the_model_and_the_data_are_opened(ranks, finished):
    made = tree(finished, "rows", train={"steps": 1})
    made["model"]["path"] = str(finished / "nowhere")
    assert "is used already" in refused(ranks, made)
    assert "no checkpoint in" in refused(ranks, made, str(finished / "nowhere"))
    errors = [error for _, error in ranks(2, train, made | {"output": None}, "auto", check=False)]
    assert "name it with output=FOLDER" in errors[0]


# --- the run's own settings ---------------------------------------------------------------------


def train_and_tell(made, resume=None):
    """train; each parameter group's settings when it is over."""
    from zero3d.engine.engine import Engine

    engines, load = [], Engine.load

    def noted(engine, directory):
        engines.append(engine)
        return load(engine, directory)

    Engine.load = noted
    try:
        records = train(made, resume)
    finally:
        Engine.load = load
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for engine in engines
        for group in engine.optimizer.torch.param_groups
    ]
    return records, groups


def test_settings_that_are_typed_win_over_those_of_the_checkpoint(ranks, folder):
    made = tree(folder, train={"steps": 1})
    ranks(1, train, made)
    typed = {"lr": 1e-5, "betas": [0.5, 0.6], "eps": 1e-4, "weight_decay": 0.25}
    made |= {"train": {"steps": 2, "batch": 4}, "optimizer": typed, "schedule": {"name": "constant"}}
    records, groups = ranks(1, train_and_tell, made, "auto")[0]
    assert field(records, "lr")[1:] == [1e-5]
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.25]
    for group in groups:
        assert (group["lr"], tuple(group["betas"]), group["eps"]) == (1e-5, (0.5, 0.6), 1e-4)


@pytest.mark.long
def test_the_place_in_the_schedule_is_the_checkpoints(ranks, folder):
    whole = tree(folder, "whole", schedule={"name": "linear", "warmup": 2})
    expected = field(ranks(1, train, whole)[0], "lr")
    made = tree(folder, schedule={"name": "linear", "warmup": 2}, optimizer={"lr": 0.5})
    ranks(1, train, made, None, 3)
    made["optimizer"]["lr"] = whole["optimizer"]["lr"]
    assert field(ranks(1, train, made, "auto")[0], "lr")[3:] == expected[3:]


def test_steps_of_a_run_that_never_saved_are_told_once(ranks, folder):
    made = tree(folder, train={"steps": 2})
    ranks(1, train, made)
    shutil.rmtree(folder / "out" / "checkpoints")  # as a crash before the first one leaves it
    assert field(ranks(1, train, made, "auto")[0], "step") == field(metrics(made), "step") == [1, 2]


# --- the same data, and how much of them --------------------------------------------------------


def packed(folder, **data):
    """A run, in `packed`, over documents of several lengths."""
    (folder / "documents").mkdir(exist_ok=True)
    for number, length in enumerate((40, 29, 17, 51, 23, 33)):
        numpy.save(folder / "documents" / f"{number}.npy", numpy.arange(length) % 50 + 3)
    return tree(
        folder, "packed", train={"steps": 2}, data={"train": str(folder / "documents"), "shuffle": True, **data}
    )


CHANGES = {
    "shuffle": (lambda f: packed(f, shuffle=False), "shuffle was True and is now False. Give the same data.shuffle"),
    "length": (lambda f: packed(f, length=15), "length was 16 and is now 15. Give the same data.length"),
    "packing": (lambda f: packed(f, packing=False), "packing was True and is now False. Give the same data.packing"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "length" else ()) for name in CHANGES]
)
def test_data_in_another_order_are_no_continuation(ranks, finished, name):
    change, message = CHANGES[name]
    assert message in refused(ranks, change(finished) | {"train": {"steps": 3, "batch": 4}}, "auto")


def test_other_data_of_the_same_shape_are_refused_and_the_same_elsewhere_go_on(ranks, folder):
    made = tree(folder, train={"steps": 1})
    ranks(1, train, made)
    made["train"]["steps"] = 2
    save_rows(folder / "rows.npy", seed=1)
    assert "digest was " in refused(ranks, made, "auto")
    (folder / "rows.npy").unlink()
    made["data"]["train"] = str(save_rows(folder / "copied.npy"))
    assert field(ranks(1, train, made, "auto")[0], "step") == [1, 2]


@pytest.mark.long
def test_epochs_end_where_they_should_with_another_batch(ranks, folder):
    made = tree(folder, train={"steps": None, "epochs": 2, "batch": 4}, schedule={"name": "linear", "final": 0})
    ranks(1, train, made, None, 3)  # 12 of 28 sequences are seen
    made["train"] |= {"batch": 2, "accumulate": 1}
    records = ranks(1, train, made, "auto")[0]
    assert (len(records), records[-1]["epoch"], records[-1]["lr"]) == (3 + 8, 2.0, 0.0)


def test_fewer_steps_than_are_done_are_refused_in_one_line(ranks, finished):
    made = tree(finished, "rows", train={"steps": 1})
    error = refused(ranks, made, "auto")
    assert error.startswith("ConfigError: train.steps asks for 1 steps, and ")
    assert "checkpoints/step-2 has done 2" in error


# --- what comes after the training --------------------------------------------------------------


def save_small(folder):
    """GPT-2 over bytes with 32 positions, and a text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(folder)
    (folder / "text.txt").write_text("some words and more of them " * 40)


@pytest.mark.parametrize("length", [pytest.param(4, marks=pytest.mark.long), 40])
def test_a_prompt_in_a_model_of_few_positions_does_not_end_the_run(ranks, folder, length):
    save_small(folder / "small")
    made = tree(folder, saved="small", train={"steps": 1}, checkpoint=EXPORT, evaluate={"prompt": "x" * length})
    made["data"] |= {"train": str(folder / "small" / "text.txt"), "tokenizer": "bytes"}
    result, message = ranks(1, sampled, made)[0]
    assert (folder / "out" / "hf" / "config.json").exists()
    if length < 32:
        assert result.startswith("x" * length)
        assert len(result) > length
    else:
        assert result == ""
        assert "no sample for evaluate.prompt: ConfigError: evaluate.prompt has 40 tokens and the model 32" in message


def sampled(made):
    """The sample of a run, and what it said."""
    from io import StringIO

    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    out = StringIO()
    return run(load(made), start("test"), Progress(Console(file=out, width=500))).sample, out.getvalue()


def plain_module():
    """What transformers does not know."""
    import torch

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(61, 8)
            self.head = torch.nn.Linear(8, 61)

        def forward(self, input_ids):
            return self.head(self.table(input_ids))

    return Plain()


def test_an_export_that_could_not_be_verified_is_refused_at_the_start(ranks, folder):
    made = tree(
        folder,
        train={"steps": 1},
        model={"path": "test_resume_guards:plain_module"},
        checkpoint=EXPORT | {"verify": True},
    )
    made["data"]["packing"] = False
    assert "checkpoint.verify=false" in refused(ranks, made)
    made["checkpoint"]["verify"] = False
    assert len(ranks(2, train, made)[0]) == 1


# --- a stop where an evaluation is due ----------------------------------------------------------


def train_and_note(made, stop_in):
    """train; in which order it saved and evaluated."""
    from zero3d.train.evaluations import Evaluations
    from zero3d.train.loop import Loop

    noted = []

    def noting(name, original):
        def noted_first(*arguments, **options):
            noted.append(name)
            return original(*arguments, **options)

        return noted_first

    with (
        mock.patch.object(Loop, "save", noting("save", Loop.save)),
        mock.patch.object(Evaluations, "at", noting("evaluate", Evaluations.at)),
    ):
        return train(made, None, stop_in), noted


def test_a_stop_saves_before_anything_else(ranks, folder):
    made = tree(folder, data={"validation": 0.2}, evaluate={"every": 2}, train={"steps": 3})
    message, noted = ranks(2, train_and_note, made, 2)[0]
    assert message == f"step 2 of 3 is saved in {made['output']}/checkpoints/step-2"
    assert noted == ["save"]
    assert field(ranks(2, train, made, "auto")[0], "step") == field(metrics(made), "step") == [1, 2, 3]


@pytest.mark.long
def test_a_stop_in_the_last_step_saves_and_then_ends_the_run_as_usual(ranks, folder):
    made = tree(folder, data={"validation": 0.2}, train={"steps": 2})
    records, noted = ranks(2, train_and_note, made, 2)[0]
    assert noted[:2] == ["save", "evaluate"]
    assert "validation_loss" in records[-1]
    assert (folder / "out" / "checkpoints" / "best").resolve().name == "step-2"
