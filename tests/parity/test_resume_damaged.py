"""`--resume auto` where the newest checkpoint is damaged: it says so, and what to type; it never chooses by itself."""

import shlex
import shutil
from pathlib import Path

import pytest
from damage import as_retired
from training import field, metrics, refused, save_model, save_rows, train, tree


@pytest.fixture(scope="module")
def once(ranks, tmp_path_factory):
    """A run of five steps with its last three checkpoints."""
    folder = tmp_path_factory.mktemp("once")
    save_model(folder / "model")
    save_rows(folder / "rows.npy")
    made = tree(folder, checkpoint={"every": 1, "keep": 3, "best": False}, train={"steps": 5, "batch": 4})
    ranks(2, train, made)
    return made


@pytest.fixture
def done(once, tmp_path):
    """It again, in a folder of its own."""
    shutil.copytree(once["output"], tmp_path / "out", symlinks=True)
    return once | {"output": str(tmp_path / "out"), "train": {"steps": 5, "batch": 4}}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_auto_names_the_damaged_one_the_newest_good_one_and_the_command(ranks, done):
    steps = Path(done["output"]) / "checkpoints"
    flip(steps / "step-5" / "rank-00001.safetensors")
    error = refused(ranks, done, "auto")
    assert error.startswith("CheckpointError: step-5, the newest checkpoint, is damaged: ")
    assert f"{steps}/step-5/rank-00001.safetensors differs from what was saved" in error
    flip(steps / "step-4" / "manifest.json")
    (steps / "step-5" / "manifest.json").unlink()
    error = refused(ranks, done, "auto")
    assert f"{steps}/step-5/manifest.json is missing" in error
    command = f"zero3d train {done['output']}/config.yaml --resume {steps}/step-3"
    assert error.endswith(f"The newest one that is whole is {steps}/step-3: type {command}")
    done["train"]["steps"] = 6
    assert field(ranks(2, train, done, shlex.split(command)[-1])[0], "step") == [1, 2, 3, 4, 5, 6]
    assert field(metrics(done), "step") == [1, 2, 3, 4, 5, 6]
    assert field(ranks(2, train, done, "auto")[0], "step") == [1, 2, 3, 4, 5, 6], "what is saved since is whole"


def test_auto_with_nothing_whole_left_says_so_and_does_not_start_anew(ranks, done):
    steps = Path(done["output"]) / "checkpoints"
    for step in (3, 4, 5):
        flip(steps / f"step-{step}" / "manifest.sha256")
    error = refused(ranks, done, "auto")
    assert f"No other checkpoint in {steps} is whole: start anew with --overwrite." in error
    shutil.rmtree(steps / "step-5")
    assert "step-4, the newest checkpoint, is damaged" in refused(ranks, done, "auto")


def test_auto_goes_on_from_an_only_copy_that_a_kill_left_between_two_renames(ranks, done):
    steps = Path(done["output"]) / "checkpoints"
    (steps / "step-5").rename(steps / ".step-5.old")
    (steps / ".step-9.tmp").mkdir()
    done["train"]["steps"] = 6
    assert field(ranks(2, train, done, "auto")[0], "step") == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in steps.iterdir()) == ["step-4", "step-5", "step-6"]


@pytest.mark.parametrize(("change", "message"), [
    ({"step": 7}, "loop.step is 7, but should be 5"), ({"tokens": -1}, "loop.tokens is -1"),
    ({"skipped": 0.5}, "loop.skipped is 0.5"), ({"in_a_row": 1}, "loop.in_a_row is 1"), ({"best": [9, 1.0]}, "loop.best[0] is 9"),
    ({"position": {"epoch": 0, "index": 99, "sequences": 14}}, "loop.position.index is 99"),
])  # fmt: skip
def test_a_record_of_the_loop_that_cannot_be_is_refused(change, message):
    from zero3d.errors import CheckpointError
    from zero3d.train.loop_state import check_loop_state

    good = {"step": 5, "skipped": 0, "tokens": 320, "best": None,
            "position": {"epoch": 1, "index": 6, "sequences": 14}}  # fmt: skip
    assert check_loop_state(Path("step-5"), good, 5) == good
    with pytest.raises(CheckpointError) as caught:
        check_loop_state(Path("step-5"), good | change, 5)
    assert f"step-5/manifest.json: {message}" in str(caught.value)


def test_a_run_whose_newest_checkpoint_has_a_retired_format_ends_in_that_line_alone(ranks, done):
    newest = Path(done["output"]) / "checkpoints" / "step-5"
    as_retired(newest, 2)
    told = refused(ranks, done, "auto")
    assert told.startswith(f"RetiredFormatError: {newest} has format 2, and this zero3d reads formats 4 and 5")
    assert "damaged" not in told
