"""Input that cannot work: one line that says what to type, exit code 2, nothing written. A full disk: exit code 1."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import yaml
from lock_holder import locked_by_another
from training import field, metrics, refused, save_model, save_rows, train, tree


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


def text(folder, name, *lines):
    """A configuration of the demo's model on a file of these lines."""
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return {"model": {"path": "demo"}, "data": {"train": str(folder / name), "tokenizer": "bytes"}}


def with_config(folder, **changes):
    """The model's config.json changed under its weights."""
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return {}


def without(folder, name, content=None):
    """A file of the model removed, or cut off."""
    (folder / "model" / name).unlink()
    if content is not None:
        (folder / "model" / name).write_bytes(content)
    return {}


def beyond_vocabulary(folder):
    numpy.save(folder / "rows.npy", numpy.full((4, 16), 61))
    return {}


def empty(folder):
    (folder / "nothing").mkdir()
    return {"data": {"train": str(folder / "nothing")}}


GOOD, BAD = json.dumps({"text": "some words"}), '{"text": "some'
CASES = {
    "batch that dp does not divide": (lambda f: {"train": {"batch": 5}}, "train.batch 5 is not a multiple of"),
    "three portions that disagree": (lambda f: {"train": {"micro_batch": 4}}, "= 16. Type train.batch=16"),
    "data that are not there": (lambda f: {"data": {"train": str(f / "row.npy")}}, "Did you mean"),
    "a folder without data": (empty, "holds 0 files, none of which ends in"),
    "a file without text": (lambda f: text(f, "a.txt"), "hold nothing to train on"),
    "a line that does not parse": (lambda f: text(f, "a.jsonl", GOOD, GOOD, BAD), "a.jsonl:3: not JSON:"),
    "a line without the keys": (lambda f: text(f, "a.jsonl", GOOD, '{"words": 1}'), "a.jsonl:2: the keys are words;"),
    "a model without weights": (lambda f: without(f, "model.safetensors"), "has no weights (it has none)"),
    "a model without config": (lambda f: without(f, "config.json"), "has no config.json (it has"),
    "a config that is none": (lambda f: without(f, "config.json", b"{"), "is not a config that transformers knows"),
    "weights that are cut off": (lambda f: without(f, "model.safetensors", b"\x80\0\0\0\0\0\0\0{"), "model.safetensors"),
    "weights of other shapes": (lambda f: with_config(f, intermediate_size=40), "mlp"),
    "weights of another depth": (lambda f: with_config(f, num_hidden_layers=3), "layers.2"),
    "a tokenizer beyond the vocabulary": (lambda f: {"data": {"tokenizer": "bytes"}}, "bytes has 256 tokens, the model's vocabulary 61"),
    "ids beyond the vocabulary": (beyond_vocabulary, "highest token id is 61"),
    "more tokens than positions": (lambda f: {"data": {"length": 65}}, "set data.length=64 or less"),
    "rows that are no sequence": (lambda f: {"data": {"length": 8}}, "rows of 16 tokens"),
    "attention nobody knows": (lambda f: {"model": {"path": str(f / "model"), "attn": "quick"}}, "attn='quick'"),
    "a module that is not there": (lambda f: {"model": {"path": "no_such_module:make"}}, "cannot be imported"),
    "a folder that cannot be made": (lambda f: {"output": str(f / "rows.npy" / "out")}, "choose another with output="),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_on_all_ranks_and_leaves_nothing(ranks, folder, case):
    change, message = CASES[case]
    made = tree(folder, **change(folder))
    before = sorted(folder.iterdir())
    for rank, (_, error) in enumerate(ranks(2, train, made, check=False)):
        assert error is not None, f"rank {rank} found nothing wrong"
        assert error.partition(": ")[0] in ("ConfigError", "DataError"), error
        assert message in error
        assert "\n" not in error
        assert len(error) < 500
    assert not Path(made["output"]).exists()
    assert [path for path in sorted(folder.iterdir()) if path.name != "cache"] == before


# --- folders and checkpoints --------------------------------------------------------------------


def test_a_used_folder_is_refused_with_three_choices_and_each_works(ranks, folder):
    made = tree(folder, train={"steps": 2})
    ranks(1, train, made)
    error = refused(ranks, made)
    for choice in ("--resume auto", "output=FOLDER", "--overwrite"):
        assert choice in error
    made["train"]["steps"] = 3
    assert field(ranks(2, train, made, "auto")[0], "step") == [1, 2, 3]
    made["train"]["steps"] = 1
    assert field(ranks(1, train, made, None, None, True)[0], "step") == [1]
    assert [path.name for path in (folder / "out" / "checkpoints").iterdir()] == ["step-1"]


def test_a_second_job_in_a_folder_is_refused_on_all_ranks_while_the_first_one_runs(ranks, folder):
    made = tree(folder, train={"steps": 2})
    ranks(1, train, made)
    with locked_by_another(folder / "out") as pid:
        for how in ((None,), ("auto",), (None, None, True)):
            assert f"is in use by process {pid} on host" in refused(ranks, made, *how)
    made["train"]["steps"] = 3
    assert field(ranks(2, train, made, "auto")[0], "step") == [1, 2, 3]
    assert not (folder / "out" / ".lock").exists()


def test_overwrite_does_not_touch_a_folder_that_no_run_has_written(ranks, folder):
    made = tree(folder)
    Path(made["output"]).mkdir()
    (folder / "out" / "thesis.tex").write_text("x")
    assert "no run wrote it" in refused(ranks, made, None, None, True)


def test_a_checkpoint_that_does_not_fit_changes_nothing(ranks, folder):
    made = tree(folder, train={"steps": 1})
    ranks(1, train, made)
    assert "no checkpoint in" in refused(ranks, made, str(folder / "nowhere"))
    save_rows(folder / "rows.npy", rows=9)
    assert "sequences was 14 and is now 9" in refused(ranks, made, "auto")
    save_rows(folder / "rows.npy")
    assert "seed was 0 and is now 1" in refused(ranks, made | {"seed": 1}, "auto")
    save_model(folder / "model", "gpt2")
    assert "another model" in refused(ranks, made, "auto")


def test_a_missing_checkpoint_makes_no_folder(ranks, folder):
    made = tree(folder)
    assert "no checkpoint in" in refused(ranks, made, str(folder / "nowhere"))
    assert not Path(made["output"]).exists()


def test_a_checkpoint_of_another_run_does_not_go_into_a_used_folder(ranks, folder):
    one, other = tree(folder, "one", train={"steps": 1}), tree(folder, "other", train={"steps": 1})
    ranks(1, train, one)
    ranks(1, train, other)
    assert "is used already" in refused(ranks, other, str(folder / "one" / "checkpoints"))


# --- a full disk --------------------------------------------------------------------------------


def train_until_full(made, full_at, world_rank):
    """train, on a disk that takes no checkpoint of rank `world_rank` from step `full_at` on."""
    import errno

    import torch.distributed as dist

    from zero3d.checkpoint import writing

    original = writing._give

    def half(file, start):
        stop = original(file, start)
        if dist.get_rank() == world_rank and f".step-{full_at}.tmp" in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return stop

    writing._give = half
    try:
        return train(made)
    finally:
        writing._give = original


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_full_disk_leaves_the_older_checkpoints_and_the_run_goes_on_later(ranks, folder, rank):
    made = tree(folder, train={"steps": 4}, checkpoint={"every": 1, "keep": 2, "export": False})
    errors = [error for _, error in ranks(2, train_until_full, made, 4, rank, check=False)]
    for error in errors:
        assert error.startswith("CheckpointError: cannot write ")
        assert "No space left on device" in error
        assert re.search(
            r"it takes [\d,]+ bytes, and [\d,]+ are free\): make room; the older checkpoints are whole\.", error
        )
        assert "\n" not in error
    left = sorted(path.name for path in (folder / "out" / "checkpoints").iterdir())
    assert left == ["step-2", "step-3"]
    assert field(ranks(2, train, made, "auto")[0], "step") == field(metrics(made), "step") == [1, 2, 3, 4]


def train_limited(made):
    """train, where files of rank 1 may have 20,000 bytes."""
    import resource

    import torch.distributed as dist

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if dist.get_rank() == 1 else before[0], before[1]))
    try:
        return train(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_limit(error, folder):
    assert error.startswith("CheckpointError: cannot write ")
    assert "File too large" in error
    assert error.endswith("make room and try again.")
    assert "\n" not in error
    assert list((folder / "out" / "checkpoints").iterdir()) == []


def test_a_rank_that_cannot_write_its_part_is_told_by_all(ranks, folder):
    made = tree(folder, zero={"stage": 0})
    for _, error in ranks(2, train_limited, made, check=False):
        check_limit(error, folder)


# --- through the command line -------------------------------------------------------------------


def command(folder, **environment):
    return subprocess.run(
        [sys.executable, "-m", "zero3d.tools.cli.main", "train", "run.yaml", "--ranks", "2"],
        cwd=folder, capture_output=True, text=True, timeout=600, env=os.environ | environment,
    )  # fmt: skip


COMMANDS = {
    "a typo": (["trian.steps=3"], "train.steps"),
    "impossible arithmetic": (["train.batch=5"], "train.batch 5 is not a multiple of"),
    "a used folder": (["output=model"], "output model is used already"),
    "a checkpoint that is not there": (["--resume", "nowhere"], "no checkpoint in nowhere"),
    "a folder that cannot be made": (["output=rows.npy/out"], "cannot be created"),
    "a broken config": (["model.path=broken"], "is not a config that transformers knows"),
}
QUICK = {"a typo"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in COMMANDS])
def test_the_command_says_one_line_and_exits_with_2(zero3d_in_fork, folder, case):
    words, message = COMMANDS[case]
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(folder)))
    before = sorted(folder.iterdir())
    done = zero3d_in_fork(folder, "train", "run.yaml", "--ranks=2", *words)
    assert done.returncode == 2, done.stderr
    assert done.stdout in ("", "starting 2 ranks: torch is imported, model and data are read\n")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path for path in sorted(folder.iterdir()) if path.name != "cache"] == before


BUGGY = """
from torch import nn
class Model(nn.Module):
    def forward(self, input_ids): ...
    @property
    def config(self):
        raise KeyError("a bug")
"""


@pytest.mark.long
def test_a_bug_before_the_first_step_is_told_once_with_its_callstack_and_exit_code_1(folder):
    (folder / "buggy.py").write_text(BUGGY)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(folder, model={"path": "buggy:Model"})))
    done = command(folder)
    assert done.returncode == 1, done.stderr
    assert re.match(r"rank [01] failed:\nTraceback", done.stderr)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("\nKeyError: 'a bug'\n")


LIMITED = """
import os
if os.environ.get("RANK") == "1":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
"""


@pytest.mark.long
def test_a_worker_that_cannot_write_its_part_is_told_once_with_exit_code_1(folder):
    (folder / "sitecustomize.py").write_text(LIMITED)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(folder, zero={"stage": 0})))
    done = command(folder, PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 1, done.stderr
    check_limit(done.stderr.removesuffix("\n"), folder)
