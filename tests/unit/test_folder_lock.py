"""One run per output folder: a lock that no dead process holds, and what a second run is told."""

import json
import os
import shutil
import signal

import pytest
from lock_holder import locked_by_another

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.memory import file_lock as module
from zero3d.train.folder import Folder
from zero3d.train.lock import LOCK, FolderLock, check_free
from zero3d.train.start import Start, check_start

FORKED = """import os, time
    if child := os.fork(): Path(sys.argv[1], "child").write_text(str(child))
    else: time.sleep(600)
"""  # as a data worker that outlives its rank


def test_a_held_folder_is_refused_with_the_holder_and_what_to_type(tmp_path):
    with locked_by_another(tmp_path) as pid:
        for refused in (
            FolderLock().acquire,
            check_free,
            lambda root: Folder(root).claim(FolderLock(), "auto", overwrite=False),
        ):
            with pytest.raises(ConfigError) as caught:
                refused(tmp_path)
            message = str(caught.value)
            assert f"in use by process {pid} on host {os.uname().nodename} since 2" in message
            assert f"kill {pid}" in message
            assert "output=FOLDER" in message
            assert "Ranks whose launcher was killed save and end within seconds: then try again" in message


@pytest.mark.parametrize("resume", [None, "auto", "checkpoint"])
def test_a_start_in_a_held_folder_is_refused_before_anything_is_read(tmp_path, resume):
    config = load(None, [f"output={tmp_path / 'out'}"])
    (tmp_path / "out").mkdir()
    resume = resume and resume.replace("checkpoint", str(tmp_path / "out" / "checkpoints" / "step-1"))
    with locked_by_another(tmp_path / "out"), pytest.raises(ConfigError, match="is in use by process"):
        check_start(config, Start(resume=resume), alone=True)


def test_a_folder_is_free_after_its_run_and_holds_nothing_of_it(tmp_path):
    with locked_by_another(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["host"] == os.uname().nodename
        assert not Folder(tmp_path).used
    assert list(tmp_path.iterdir()) == []
    with FolderLock() as lock:
        lock.acquire(tmp_path)
        lock.acquire(tmp_path)
        assert list(tmp_path.iterdir()) == [tmp_path / LOCK]
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_folder_was_made_anew_leaves_the_new_runs_lock(tmp_path):
    root = tmp_path / "out"
    root.mkdir()
    with FolderLock() as first:
        first.acquire(root)
        shutil.rmtree(root)
        root.mkdir()
        with locked_by_another(root):
            first.release()
            with pytest.raises(ConfigError, match="is in use by process"):
                check_free(root)


def test_a_killed_run_holds_nothing_though_its_children_live(tmp_path):
    with locked_by_another(tmp_path, FORKED) as pid:
        child = int((tmp_path / "child").read_text())
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        try:
            os.kill(child, 0)
            check_free(tmp_path)
            with FolderLock() as lock:
                lock.acquire(tmp_path)
                assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_whose_file_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    lockf, calls = module.fcntl.lockf, []

    def late(file, how):
        if not calls:
            (tmp_path / LOCK).unlink()  # its holder ends between our open and our lock
        calls.append(how)
        lockf(file, how)

    monkeypatch.setattr(module.fcntl, "lockf", late)
    with FolderLock() as lock:
        lock.acquire(tmp_path)
        assert len(calls) == 2
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_file_system_without_locks_is_told_and_a_folder_without_rights_refused(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(module.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "lockf", none)
    with FolderLock() as lock:
        lock.acquire(tmp_path)
        assert "has no locks (No locks available)" in lock.note
    with pytest.raises(ConfigError, match="cannot be written"):
        FolderLock().acquire(tmp_path / "nowhere")


def test_an_odd_lock_file_is_no_traceback(tmp_path):
    with locked_by_another(tmp_path):
        (tmp_path / LOCK).write_bytes(b"\xff[")
        with pytest.raises(ConfigError, match="in use by process unknown"):
            check_free(tmp_path)
