"""Which folders are checkpoints, which may be removed, and what is put back; no model, no torch."""

import os
import warnings
from pathlib import Path

import pytest

from zero3d.checkpoint import folders
from zero3d.checkpoint.folders import checkpoints, complete_steps, find, tidied_path, tidy
from zero3d.errors import CheckpointError
from zero3d.train.folder import Folder


def checkpoint(directory, name, text="{}"):
    (directory / name).mkdir(parents=True)
    (directory / name / "manifest.json").write_text(text)
    return directory / name


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def put_odd_things(directory):
    """What people and other programs leave beside checkpoints."""
    (directory / "step-1").write_text("a file")
    (directory / "step-3").symlink_to(checkpoint(directory.parent, "elsewhere"))
    (directory / "step-4").symlink_to("nowhere")
    (directory / "step-5").mkdir()
    for name in ("step-²", "step-٣", "step-0007", "step-", "step--1", "step-8.bak", "step-8 ", "STEP-8", "xstep-8"):
        checkpoint(directory, name)
    (directory / "step-6").mkdir()
    os.mkfifo(directory / "step-6" / "manifest.json")
    (directory / "best").mkdir()
    return names(directory)


def test_prune_removes_complete_checkpoints_of_ours_and_nothing_else(tmp_path):
    directory = tmp_path / "checkpoints"
    for step in (10, 20, 30, 40):
        checkpoint(directory, f"step-{step}")
    odd = put_odd_things(directory)
    with warnings.catch_warnings(action="ignore"):
        Folder(tmp_path).prune(30, keep=1, best=10)
    assert complete_steps(directory) == [10, 30]
    assert names(directory) == sorted({*odd} - {"step-20", "step-40"})
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_prune_points_at_the_best(tmp_path):
    for step in (1, 2, 3):
        checkpoint(tmp_path / "checkpoints", f"step-{step}")
    Folder(tmp_path).prune(3, keep=1, best=1)
    assert names(tmp_path / "checkpoints") == ["best", "step-1", "step-3"]
    assert os.readlink(tmp_path / "checkpoints" / "best") == "step-1"
    Folder(tmp_path).prune(3, keep=1, best=None)
    assert names(tmp_path / "checkpoints") == ["step-3"]


@pytest.mark.parametrize("refuses", ["rename", "rmtree"])
def test_what_cannot_be_removed_is_told_and_kills_no_run(tmp_path, monkeypatch, refuses):
    for step in (1, 2, 3):
        checkpoint(tmp_path / "checkpoints", f"step-{step}")

    def refused(path, *args, **kwargs):
        if not kwargs:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(*((Path, "rename") if refuses == "rename" else (folders.shutil, "rmtree")), refused)
    with pytest.warns(UserWarning, match="could not be removed .Permission denied.: remove it yourself"):
        Folder(tmp_path).prune(3, keep=1, best=None)
    assert complete_steps(tmp_path / "checkpoints")[-1] == 3


def test_a_removal_that_dies_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    checkpoint(tmp_path, "step-1")
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)
    folders.discard(tmp_path, 1)
    assert names(tmp_path) == [".step-1.tmp"]
    assert checkpoints(tmp_path) == {}
    monkeypatch.undo()
    tidy(tmp_path)
    assert names(tmp_path) == []


def test_an_only_copy_is_found_and_put_back(tmp_path):
    checkpoint(tmp_path, "step-1")
    checkpoint(tmp_path, ".step-2.old", "old")
    checkpoint(tmp_path, ".step-2.tmp", "new")
    actual = find(tmp_path)
    assert actual == tmp_path / ".step-2.old"
    assert tidied_path(actual) == actual
    tidy(tmp_path)
    assert names(tmp_path) == ["step-1", "step-2"]
    assert tidied_path(actual) == find(tmp_path) == tmp_path / "step-2"
    assert (tmp_path / "step-2" / "manifest.json").read_text() == "old"


def test_leftovers_beside_a_whole_checkpoint_go(tmp_path):
    checkpoint(tmp_path, "step-2", "new")
    checkpoint(tmp_path, ".step-2.old", "old")
    checkpoint(tmp_path, "step-1")
    (tmp_path / ".step-1.old").mkdir()  # half removed
    (tmp_path / ".step-3.tmp").mkdir()
    (tmp_path / ".step-4.tmp").symlink_to(tmp_path.parent)
    (tmp_path / ".step-5.old").mkdir()  # no checkpoint, and nothing that we leave
    (tmp_path / ".step-x.tmp").mkdir()
    assert find(tmp_path).name == "step-2"
    tidy(tmp_path)
    assert names(tmp_path) == [".step-4.tmp", ".step-5.old", ".step-x.tmp", "step-1", "step-2"]
    assert (tmp_path / "step-2" / "manifest.json").read_text() == "new"


def test_the_newest_is_found_by_number_and_one_that_lost_its_manifest_is_not_passed_over(tmp_path):
    for step in (9, 10):
        checkpoint(tmp_path, f"step-{step}")
    assert find(tmp_path).name == "step-10"
    assert find(tmp_path / "step-9").name == "step-9"
    (tmp_path / "step-11").mkdir()
    assert find(tmp_path).name == "step-11"
    assert find(tmp_path / "step-11").name == "step-11"
    (tmp_path / "step-12").write_text("a file is no checkpoint")
    checkpoint(tmp_path, "step-²")
    assert find(tmp_path).name == "step-11"
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find(tmp_path / "nowhere")


def test_auto_finds_what_is_put_back(tmp_path):
    folder = Folder(tmp_path / "out")
    assert folder.resume_from("auto") is None
    checkpoint(folder.checkpoints, ".step-7.old")
    actual = folder.resume_from("auto")
    tidy(folder.checkpoints)
    assert names(folder.checkpoints) == ["step-7"]
    assert folder.resume_from("auto") == tidied_path(actual)
