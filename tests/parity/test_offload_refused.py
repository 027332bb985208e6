"""What cannot be offloaded, budgets and disks that are too small, disks that fail: one error, and training states intact."""

import errno
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from buckets import buckets_of
from models import batch, bits, build, loss_of
from tiers import PLACES, RESIDENT, Case, engine_of, step

import zero3d
from zero3d.errors import CheckpointError, ConfigError, Zero3dError

CASE = Case(stage=2)


@pytest.mark.parametrize(("offload", "stage", "says"), [
    ({"optimizer": "disk"}, 2, "offload.optimizer=disk needs a folder: type offload.directory=FOLDER"),
    ({"params": "disk"}, 3, "offload.params=disk needs a folder"),
    ({"params": "host"}, 2, "offload.params=host needs stage 3, and stage=2"),
    ({"optimizer": "host", "gradients": "host"}, 1, "offload.gradients=host needs stage 2 or 3, and stage=1"),
    ({"optimizer": "host", "executor": "host"}, 1, "pass one of them with fused=True"),
    ({"optimizer": "host", "moments": "bf16"}, 1, "offload.moments=bf16 rounds the two moments of Adam and AdamW"),
])  # fmt: skip
def test_what_cannot_be_offloaded_is_refused_before_the_model_is_touched(offload, stage, says):
    model = build("net")
    before = bits(model.parameters())
    with pytest.raises(ConfigError, match=re.escape(says)):
        zero3d.Engine(model, stage=stage, offload=offload, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    assert bits(model.parameters()) == before


# --- budgets, full disks, at the start ------------------------------------------------------------


def refused(offload, full_on=None):
    """Ask for it on each rank; the disk of one rank may be full."""

    def fallocate(file, offset, nbytes):
        if dist.get_rank() == full_on:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("os.posix_fallocate", fallocate):
        engine_of(Case(2, 2), offload)


def test_a_budget_that_is_too_small_is_refused_on_all_ranks(pool):
    found = pool.run(2, refused, {"optimizer": "host", "host_budget": "100kB"}, check=False)
    for _, error in found:
        assert error.startswith("OutOfBudget: a rank's states on the host take ")
        assert "100.00 kB offload.host_budget / 2 ranks = 50.00 kB for each" in error
        assert "raise offload.host_budget to" in error


def test_a_disk_that_is_full_on_one_rank_is_refused_on_all(pool, tmp_path):
    found = pool.run(2, refused, {"optimizer": "disk", "directory": str(tmp_path)}, 1, check=False)
    for _, error in found:
        assert error.startswith("OutOfBudget: ")
        assert re.search(r"rank-00001.states takes .* bytes: two slots for each record\), and the disk has", error)


HOLDER = """
import sys
from pathlib import Path
from zero3d.memory.file_lock import FileLock
lock = FileLock()
lock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_that_another_process_uses_is_refused_and_the_model_can_be_used_elsewhere(tmp_path):
    offload = {"optimizer": "disk", "directory": tmp_path / "tier"}
    offload["directory"].mkdir()
    command = [sys.executable, "-c", HOLDER, str(offload["directory"] / "rank-00000.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as caught:
            zero3d.Engine(build("net"), stage=2, offload=offload)
        process.stdin.close()
    assert f"offload.directory {offload['directory']} is in use by process {process.pid} on host" in str(caught.value)
    engine = zero3d.Engine(build("net"), stage=2, offload=offload)
    engine.backward(loss_of(engine, batch(0)))
    assert engine.step().applied


@pytest.mark.long
def test_a_folder_that_another_engine_of_this_process_uses_is_refused_until_that_is_dropped(tmp_path):
    offload = {"optimizer": "disk", "directory": tmp_path}
    engine = zero3d.Engine(build("net"), stage=2, offload=offload)
    with pytest.raises(ConfigError, match="in use by another engine of this process: drop that one"):
        zero3d.Engine(build("net"), stage=2, offload=offload)
    engine.backward(loss_of(engine, batch(0)))
    assert engine.step().applied
    del engine
    zero3d.Engine(build("net"), stage=2, offload=offload)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory")
def test_a_folder_in_memory_is_warned_of():
    folder = Path("/dev/shm") / f"zero3d-test-{os.getpid()}"
    try:
        with pytest.warns(UserWarning, match="is on tmpfs, which is memory of the host and no disk"):
            zero3d.Engine(build("net"), stage=2, offload={"optimizer": "disk", "directory": folder})
    finally:
        shutil.rmtree(folder)


# --- disks that fail during training --------------------------------------------------------------


@contextmanager
def failing(name, number):
    """Let a call of the system fail."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with mock.patch.object(os, name, fail):
        yield


def vanish(folder):
    shutil.rmtree(folder)
    return failing("sched_yield", 0)  # nothing of what is used


FAULTS = {
    "full": lambda folder: failing("pwritev", errno.ENOSPC),
    "broken": lambda folder: failing("preadv", errno.EIO),
    "gone": vanish,
}
CALLS = {
    "train_batch": lambda engine, folder: step(engine, CASE, 0),
    "evaluate": lambda engine, folder: engine.evaluate([{"ids": batch(0), "factor": torch.tensor(1.0)}]),
    "fingerprint": lambda engine, folder: engine.fingerprint(),
    "save": lambda engine, folder: engine.save(folder / "another"),
    "full_params": lambda engine, folder: engine.full_params().__enter__(),
    "release": lambda engine, folder: engine.release(),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=() if fault == "full" else pytest.mark.long) for fault in FAULTS]
)
@pytest.mark.parametrize(("place", "stage"), [
    pytest.param("disk", 2, marks=pytest.mark.long), pytest.param("disk, device updates", 2, marks=pytest.mark.long),
    ("all on disk", 3),
])  # fmt: skip
def test_a_disk_that_fails_is_one_error_after_which_nothing_goes_on_but_a_checkpoint(tmp_path, fault, place, stage):
    folder, saved = tmp_path / "tier", tmp_path / "saved"
    case = CASE._replace(stage=stage)
    with buckets_of(1024):
        engine = engine_of(case, {**PLACES[place], "directory": folder})
        step(engine, case, 0)
        engine.save(saved)
        step(engine, case, 1)
        engine.optimizer.flush()
        with FAULTS[fault](folder), pytest.raises(CheckpointError) as caught:
            step(engine, case, 2)
            engine.optimizer.flush()
        assert re.search(rf"\d+ bytes.*{re.escape(str(folder))}", str(caught.value)), caught.value
        assert "go on from a checkpoint" in str(caught.value)
        if fault != "broken" or stage < 3:  # weights that a forward could not read have not changed
            for name, call in CALLS.items():
                with pytest.raises(Zero3dError, match="go on from a checkpoint") as again:
                    call(engine, tmp_path)
                chain = [again.value]
                while chain[-1].__cause__ is not None:
                    chain.append(chain[-1].__cause__)
                assert caught.value in chain, name
            assert not (tmp_path / "another").exists()
        found = []
        for place_after in (RESIDENT, place):
            other = engine_of(case, {**PLACES[place_after], "directory": tmp_path / "new"})
            other.load(saved)
            step(other, case, 1)
            found.append(other.fingerprint())
        assert found[0] == found[1]
