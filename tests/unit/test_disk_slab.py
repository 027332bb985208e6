"""Records on a disk: any size, whole steps whatever happens, one error with path and bytes for everything else."""

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import disk_steps
import pytest
from disk_steps import OWNER, RECORDS, holds, memory, write_step

from zero3d.errors import CheckpointError, ConfigError, OutOfBudget
from zero3d.memory.blocks import BLOCK, padded
from zero3d.offload import direct_file, disk_slab
from zero3d.offload.disk_slab import DiskSlab, common_step

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(params=["direct", "buffered"])
def io(request, monkeypatch):
    """Direct and buffered transfers, in chunks of two blocks."""
    monkeypatch.setattr(direct_file, "CHUNK", 2 * BLOCK)
    if request.param == "buffered":
        monkeypatch.setattr(direct_file, "DIRECT", 0)
    return request.param


def open_slab(folder, records=RECORDS, owner=OWNER, rank=0, **how):
    return DiskSlab(folder, rank, records, owner, **how)


def committed(folder, last):
    """A closed slab with the steps up to `last`."""
    with open_slab(folder) as slab:
        for step in range(last + 1):
            write_step(slab, step)
            slab.commit(step)
            slab.confirm(step)
    return folder


# --- records --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_records_of_any_size_come_back(tmp_path, io, seed):
    draw = random.Random(seed)
    sizes = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, *(draw.randrange(1, 9 * BLOCK) for _ in range(6))]
    draw.shuffle(sizes)
    records = {f"r{i}": nbytes for i, nbytes in enumerate(sizes)}
    wanted = [draw.randbytes(nbytes) for nbytes in sizes]
    with open_slab(tmp_path, records) as slab:
        assert slab.nbytes == slab.path.stat().st_size == 2 * sum(map(padded, sizes))
        for index in draw.sample(range(len(sizes)), len(sizes)):
            given = memory(sizes[index])
            given[: sizes[index]] = wanted[index]
            slab.write(index, given)
        for index in draw.sample(range(len(sizes)), len(sizes)):
            taken = memory(sizes[index] + 5 * BLOCK)  # a buffer for the largest of them
            slab.read(index, taken)
            assert bytes(taken[: sizes[index]]) == wanted[index]
            assert not any(taken[padded(sizes[index]) :])


def test_this_file_system_has_direct_transfers_or_says_so(tmp_path):
    with open_slab(tmp_path) as slab:
        flags = fcntl.fcntl(slab._file._file, fcntl.F_GETFL)
        assert slab.direct == bool(direct_file.DIRECT and flags & direct_file.DIRECT)


def test_a_file_system_that_refuses_direct_transfers_when_they_come_is_read_through_the_cache(tmp_path, monkeypatch):
    preadv = os.preadv

    def refusing(file, given, offset):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(file, given, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    with open_slab(tmp_path) as slab:
        assert not slab.direct
        write_step(slab, 0)
        slab.commit(0)
        assert holds(slab, 0)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_short_transfers_go_on_where_they_ended(tmp_path, io, monkeypatch, name):
    call, odd = getattr(os, name), io == "buffered"

    def short(file, given, offset):
        return call(file, [given[0][: BLOCK if not odd else 1 + len(given[0]) // 2]], offset)

    monkeypatch.setattr(os, name, short)
    with open_slab(tmp_path) as slab:
        write_step(slab, 3)
        assert holds(slab, 3)


@pytest.mark.parametrize(("name", "what"), [("preadv", "read"), ("pwritev", "written")])
@pytest.mark.parametrize("moved", [0, 1])
def test_a_transfer_that_moves_nothing_more_is_one_error(tmp_path, monkeypatch, name, what, moved):
    monkeypatch.setattr(direct_file, "CHUNK", 2 * BLOCK)
    with open_slab(tmp_path) as slab:
        write_step(slab, 0)
        slab.commit(0)
        slab.confirm(0)
        if not slab.direct and moved:
            pytest.skip("any byte is progress through the page cache")
        call = getattr(os, name)
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda file, given, at: moved if at % (16 * BLOCK) else call(file, given, at))
            with pytest.raises(CheckpointError) as caught:
                for index, nbytes in enumerate(RECORDS.values()):
                    slab.read(index, memory(nbytes)) if what == "read" else slab.write(index, memory(nbytes))
        message = str(caught.value)
        assert f"record block.0 (4096 bytes) cannot be {what}: {slab.path}: only 0 of 4096 bytes were moved" in message
        assert "step 0 is whole there" in message
        slab.resume(0)
        assert holds(slab, 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_record_that_cannot_be_written_keeps_what_it_held(tmp_path, io, monkeypatch, number):
    with open_slab(committed(tmp_path, 1)) as slab:
        slab.resume(1)
        write_step(slab, 2)
        pwritev = os.pwritev

        def full(file, given, offset):
            if given[0][0] == 7:
                raise OSError(number, os.strerror(number))
            return pwritev(file, given, offset)

        monkeypatch.setattr(os, "pwritev", full)
        given = memory(RECORDS["block.1"])
        given[4 * BLOCK] = 7  # in the third chunk of five
        with pytest.raises(
            CheckpointError, match=rf"record block\.1 \(40001 bytes\) .*: {os.strerror(number)}"
        ) as caught:
            slab.write(2, given)
        assert caught.value.exit_code == 1
        taken = memory(RECORDS["block.1"])
        slab.read(2, taken)
        assert bytes(taken[:40_001]) == disk_steps.contents(1, 2)
        with pytest.raises(AssertionError, match=r"step 2 is committed without record block\.1"):
            slab.commit(2)
    with open_slab(tmp_path) as slab:
        assert slab.steps[0] == 1
        assert holds(slab, 1)


def test_all_transfers_have_ended_when_one_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_file, "CHUNK", 2 * BLOCK)
    failed, ended = threading.Event(), []

    def pwritev(file, given, offset):
        if offset % (16 * BLOCK) == 2 * BLOCK:  # the first of the record's five
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        failed.wait()
        time.sleep(0.05)
        ended.append(offset)
        return len(given[0])

    with open_slab(tmp_path) as slab:
        monkeypatch.setattr(os, "pwritev", pwritev)
        with pytest.raises(CheckpointError):
            slab.write(2, memory(RECORDS["block.1"]))
        assert len(ended) == 4


def test_memory_that_is_too_short_or_begins_inside_of_a_block_is_refused(tmp_path):
    with open_slab(tmp_path) as slab:
        with pytest.raises(AssertionError, match=r"record block\.1 takes 40960 bytes, not 36864"):
            slab.write(2, memory(9 * BLOCK))
        with pytest.raises(AssertionError, match="record embed: its memory begins inside of a block"):
            slab.read(0, memory(2 * BLOCK)[512:])


# --- steps ----------------------------------------------------------------------------------------------------------


def test_a_record_is_read_from_where_it_was_written_last(tmp_path, io):
    with open_slab(committed(tmp_path, 0)) as slab:
        slab.resume(0)
        given, taken = memory(1), memory(1)
        given[0] = 200
        slab.write(0, given)
        slab.read(0, taken)
        assert taken[0] == 200
        slab.resume(0)
        assert holds(slab, 0)


def test_steps_take_turns_in_two_slots_and_the_newest_comes_back(tmp_path, io):
    for last in range(3):
        with open_slab(tmp_path) as slab:
            assert slab.steps[:1] == ((last - 1,) if last else ())
            if last:
                slab.resume(last - 1)
                assert holds(slab, last - 1)
            write_step(slab, last)
            assert slab.steps[:1] == ((last - 1,) if last else ())
            slab.commit(last)
            assert holds(slab, last)


def test_nothing_is_written_before_all_ranks_have_committed(tmp_path):
    with open_slab(committed(tmp_path, 4)) as slab:
        with pytest.raises(AssertionError, match="written before all ranks have committed"):
            slab.write(0, memory(1))
        slab.resume(4)
        write_step(slab, 5)
        slab.commit(5)
        with pytest.raises(AssertionError, match="written before all ranks have committed"):
            slab.write(0, memory(1))
        with pytest.raises(AssertionError, match="has not committed step 4"):
            slab.confirm(4)
        slab.confirm(5)
        slab.write(0, memory(1))
        with pytest.raises(AssertionError, match=r"step 6 is committed without record block\.0"):
            slab.commit(6)


@pytest.mark.parametrize(
    ("steps", "common"),
    [
        ([(3,)], 3), ([(3, 2), (3, 2)], 3), ([(3, 2), (2, 1)], 2), ([(2, 1), (3, 2)], 2), ([(3, 2), (2,)], 2),
        ([(0,), ()], None), ([(3, 2), (1, 0)], None), ([(3, 7), (7, 6)], 7), ([(3, 7), (3, 7)], 3),
        ([(7, 5), (6, 5)], None),
    ],
)  # fmt: skip
def test_ranks_go_on_from_the_newest_step_that_all_have(steps, common):
    assert common_step(steps) == common


def test_a_rank_that_is_one_step_further_goes_back_and_is_not_mistaken_for_further_again(tmp_path):
    """Two ranks: one has committed 3, the other was killed before; then the first is killed while it writes 3 anew."""
    first, second = tmp_path / "first", tmp_path / "second"
    committed(first, 2)
    committed(second, 2)
    with open_slab(first) as slab:
        slab.resume(2)
        write_step(slab, 3)
        slab.commit(3)
    with open_slab(first) as ours, open_slab(second) as theirs:
        agreed = common_step([ours.steps, theirs.steps])
        assert (ours.steps, theirs.steps, agreed) == ((3, 2), (2, 1), 2)
        ours.resume(agreed)
        assert holds(ours, 2)
        given = memory(1)
        ours.write(0, given)  # half of step 3
    with open_slab(first) as slab:
        assert slab.steps == (2,)
        slab.resume(2)
        assert holds(slab, 2)


def test_a_step_is_on_the_disk_before_it_is_said_to_be(tmp_path, monkeypatch):
    calls = []
    with open_slab(committed(tmp_path, 0)) as slab:
        slab.resume(0)
        write_step(slab, 1)
        for name in ("fdatasync", "fsync", "replace"):
            call = getattr(os, name)
            monkeypatch.setattr(
                os,
                name,
                lambda *given, name=name, call=call, **how: (
                    calls.append((name, target(given[0]))),
                    call(*given, **how),
                )[1],
            )
        slab.commit(1)
    assert calls == [
        ("fdatasync", "rank-00000.states"), ("fsync", ".rank-00000.commit.tmp"), ("replace", ".rank-00000.commit.tmp"),
        ("fsync", tmp_path.name),
    ]  # fmt: skip


def target(file):
    return Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file).name


@pytest.mark.parametrize("name", ["fdatasync", "fsync", "replace"])
def test_a_step_that_cannot_be_committed_leaves_the_one_before(tmp_path, monkeypatch, name):
    with open_slab(committed(tmp_path, 0)) as slab:
        slab.resume(0)
        write_step(slab, 1)

        def failing(*_, **__):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(os, name, failing)
            with pytest.raises(
                CheckpointError, match=r"step 1 \(65536 bytes\) cannot be committed in .*rank-00000\.commit"
            ):
                slab.commit(1)
        assert slab.steps[0] == 0
        with pytest.raises(AssertionError, match="written before all ranks"):  # what the disk says now is unknown
            slab.write(0, memory(1))
    with open_slab(tmp_path) as slab:
        slab.resume(0)
        assert holds(slab, 0)


# --- damage ---------------------------------------------------------------------------------------------------------


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def places():
    """Where each record is in its slot, and a slot's bytes."""
    starts = [0]
    for nbytes in RECORDS.values():
        starts.append(starts[-1] + padded(nbytes))
    return dict(zip(RECORDS, starts, strict=False)), starts[-1]


@pytest.mark.parametrize("step", [3, 2])
def test_records_are_what_was_committed_in_either_slot_and_stay_so_while_others_are_written(tmp_path, io, step):
    with open_slab(committed(tmp_path, 2)) as slab:
        slab.resume(2)
        write_step(slab, 3)
        slab.commit(3)
    with open_slab(tmp_path) as slab:
        slab.resume(step)
        for _ in range(2):
            assert slab.verify()
            for index, nbytes in enumerate(RECORDS.values()):
                slab.write(index, memory(nbytes))
        slab.resume(step)
        assert slab.verify()
        assert holds(slab, step)
    with open_slab(tmp_path) as slab:
        assert slab.steps == (step,)
        assert slab.verify()


DAMAGES = {
    "a bit": lambda draw, data: bytes([data[0] ^ 1 << draw.randrange(8)]) + data[1:],
    "4 kB flipped": lambda draw, data: bytes(byte ^ 255 for byte in data[:BLOCK]) + data[BLOCK:],
    "a page of zeros": lambda draw, data: bytes(min(BLOCK, len(data))) + data[BLOCK:],
    "all zeros": lambda draw, data: bytes(len(data)),
    "another record's": lambda draw, data: draw.randbytes(len(data)),
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_record_is_one_error_with_file_record_and_what_to_type(tmp_path, monkeypatch, kind, name):
    monkeypatch.setattr(disk_slab, "AT_ONCE", 2 * BLOCK)
    (starts, whole), draw = places(), random.Random(f"{kind} {name}")
    with open_slab(committed(tmp_path, 4)) as slab:
        first = slab._commit.slot * whole + starts[name]
    at = draw.randrange(RECORDS[name])
    data = slab.path.read_bytes()[first + at : first + RECORDS[name]]
    overwrite(slab.path, first + at, DAMAGES[kind](draw, data))
    with open_slab(tmp_path) as slab:
        slab.resume(4)
        with pytest.raises(CheckpointError) as caught:
            slab.verify()
    message = str(caught.value)
    where = f"{slab.path}: record {name} of step 4 (bytes {first} to {first + RECORDS[name]})"
    assert message.startswith(f"{where} is not what was written: its checksum is ")
    assert message.endswith(f"remove {tmp_path}, and go on from the last checkpoint with --resume auto.")
    assert caught.value.exit_code == 2


def test_damage_in_the_other_slot_or_behind_a_record_is_none(tmp_path):
    starts, whole = places()
    with open_slab(committed(tmp_path, 4)) as slab:
        here = slab._commit.slot
    for name, nbytes in RECORDS.items():
        overwrite(slab.path, (1 - here) * whole + starts[name], bytes([99]))
        if nbytes % BLOCK:
            overwrite(slab.path, here * whole + starts[name] + nbytes, bytes([99]))
    with open_slab(tmp_path) as slab:
        slab.resume(4)
        assert slab.verify()


def test_a_file_that_is_cut_is_refused_and_one_that_is_filled_up_again_is_damaged(tmp_path):
    with open_slab(committed(tmp_path, 3)) as slab:
        whole = slab.nbytes
    os.truncate(slab.path, 3 * BLOCK)
    with pytest.raises(
        CheckpointError, match=f"rank-00000.states has {3 * BLOCK} bytes, and its commit is for {whole}"
    ):
        open_slab(tmp_path)
    os.truncate(slab.path, whole)
    with open_slab(tmp_path) as slab:
        slab.resume(3)
        with pytest.raises(CheckpointError, match=r"record .* of step 3 .* is not what was written"):
            slab.verify()


def test_a_record_that_cannot_be_read_is_the_same_error_and_the_disks_fault(tmp_path, monkeypatch):
    with open_slab(committed(tmp_path, 1)) as slab:
        slab.resume(1)

        def broken(*_):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match=r"record embed of step 1 .* cannot be read \(Input/output") as caught:
            slab.verify()
        assert caught.value.exit_code == 1


def rewrite_commit(folder, change):
    """Change a commit, its checksum with it."""
    path = folder / "rank-00000.commit"
    entries = json.loads(path.read_text())
    del entries["sha256"]
    change(entries)
    path.write_text(json.dumps(entries | {"sha256": disk_slab.commit_file.sha256_of(entries)}))


def as_format_1(entries):
    entries["format"] = 1
    for key in ("sums", "sums_before"):
        del entries[key]


def test_of_a_folder_without_checksums_nobody_knows_and_the_next_step_has_them(tmp_path):
    rewrite_commit(committed(tmp_path, 2), as_format_1)
    with open_slab(tmp_path) as slab:
        assert slab.steps == (2, 1)
        slab.resume(2)
        assert not slab.verify()
        assert holds(slab, 2)
        write_step(slab, 3)
        slab.commit(3)
    with open_slab(tmp_path) as slab:
        slab.resume(3)
        assert slab.verify()


@pytest.mark.parametrize("lost", [{"sums": None}, {"sums_before": 7}, {"format": 3}, {"format": None}])
def test_a_commit_that_says_nothing_of_checksums_where_it_should_is_damaged(tmp_path, lost):
    rewrite_commit(committed(tmp_path, 2), lambda entries: entries.update(lost))
    with pytest.raises(CheckpointError, match=r"commit is damaged, or of another version"):
        open_slab(tmp_path)


def test_a_commit_with_too_few_checksums_is_damage_of_the_first_record_without_one(tmp_path):
    rewrite_commit(committed(tmp_path, 2), lambda entries: entries.update(sums=entries["sums"][:32]))
    with open_slab(tmp_path) as slab:
        slab.resume(2)
        with pytest.raises(CheckpointError, match=r"record block\.1 of step 2 .* is not what was written"):
            slab.verify()


@pytest.mark.parametrize("name", ["rank-00000.states", ".rank-00000.commit.tmp"])
def test_a_link_in_the_place_of_a_file_that_is_to_be_made_is_not_followed(tmp_path, name):
    victim, folder = tmp_path / "mine", tmp_path / "states"
    victim.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    committed(folder, 1)
    assert not (folder / name).is_symlink()
    assert victim.read_text() == "precious"


def test_states_behind_a_link_are_refused_though_their_commit_is_whole(tmp_path):
    victim, folder = tmp_path / "mine", committed(tmp_path / "states", 1)
    states = folder / "rank-00000.states"
    states.rename(victim)
    before = victim.read_bytes()
    states.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"cannot be opened \(Too many levels of symbolic links\)"):
        open_slab(folder)
    assert victim.read_bytes() == before


# --- kills ----------------------------------------------------------------------------------------------------------


@contextmanager
def writing(folder, *words):
    """A process that writes steps, and what it says."""
    command = [sys.executable, disk_steps.__file__, str(folder), *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(Path(direct_file.__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def check(folder, said, copies):
    """What the process had said is there, whole: the newest step, and the one before until all have the newest."""
    reached, confirmed = (
        [int(line.split()[1]) for line in said if line.startswith(word)] for word in ("committed", "confirmed")
    )
    shutil.copytree(folder, copies)
    with open_slab(folder) as slab, open_slab(copies) as copy:
        if reached:
            assert slab.steps[0] in (reached[-1], reached[-1] + 1)
        for opened, step in zip((slab, copy), slab.steps, strict=False):
            if opened is slab or (slab.steps[0] not in confirmed and len(reached) > 1):
                opened.resume(step)
                assert holds(opened, step)
    shutil.rmtree(copies)


@pytest.mark.parametrize("calls", [
    (5, 27), *(pytest.param(calls, marks=pytest.mark.long) for calls in ((1, 5, 12), (15, 3, 27), (18, 30, 6))),
])  # fmt: skip
def test_a_process_killed_at_a_call_of_the_system_leaves_whole_steps(tmp_path, calls):
    for call in calls:
        with writing(tmp_path / "slab", 5, call) as process:
            said = process.stdout.read().splitlines()
        assert process.returncode == -signal.SIGKILL
        check(tmp_path / "slab", said, tmp_path / "copy")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_a_process_killed_at_random_leaves_whole_steps(tmp_path, seed):
    draw = random.Random(seed)
    for _ in range(3):
        with writing(tmp_path / "slab", 10**6) as process:
            said = [process.stdout.readline() for _ in range(draw.randrange(1, 20))]
            time.sleep(draw.random() / 50)
            process.kill()
            said += process.stdout.read().splitlines()
        assert process.returncode == -signal.SIGKILL
        check(tmp_path / "slab", said, tmp_path / "copy")


# --- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_that_another_process_uses_is_refused_and_free_when_it_was_killed(tmp_path):
    with writing(tmp_path, 10**6) as process:
        process.stdout.readline()
        with pytest.raises(
            ConfigError, match=rf"{tmp_path} is in use by process {process.pid} on host .* kill {process.pid}"
        ):
            open_slab(tmp_path)
        with open_slab(tmp_path, rank=1):  # of the same job, beside it
            pass
        process.kill()
        process.wait()
        with open_slab(tmp_path) as slab:
            assert slab.steps
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize("name", ["posix_fallocate", "RLIMIT_FSIZE"])
def test_a_full_disk_is_refused_at_the_start_with_path_and_bytes_and_stays_as_it_was(tmp_path, monkeypatch, name):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if name == "posix_fallocate":

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, name, full)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OutOfBudget) as caught:
            open_slab(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = str(caught.value)
    assert f"{tmp_path}/rank-00000.states takes 131.07 kB (131072 bytes: two slots for each record)" in message
    assert "free (" in message
    assert "offload.directory=FOLDER" in message
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_reserved_before_anything_is_written(tmp_path):
    with open_slab(tmp_path) as slab:
        assert slab.path.stat().st_blocks * 512 >= slab.nbytes


def test_a_file_system_that_reserves_nothing_is_asked_for_what_is_free(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with open_slab(tmp_path / "a") as slab:
        write_step(slab, 0)
        slab.commit(0)
        assert holds(slab, 0)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(OutOfBudget, match=r"the disk has 100\.00 kB free \(No space left on device\)"):
        open_slab(tmp_path / "b")


@pytest.mark.parametrize("place", ["file/below", "/proc/zero3d"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"offload\.directory .* cannot be written .*: choose another with") as caught:
        open_slab(tmp_path / place)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["rank-00000.lock", "rank-00000.states"])
def test_files_without_rights_are_refused(tmp_path, monkeypatch, name):
    opened = os.open

    def forbidden(path, *arguments, **named):
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(ConfigError, match="Permission denied") as caught:
        open_slab(tmp_path)
    assert caught.value.exit_code == 2
    monkeypatch.undo()
    with open_slab(tmp_path):
        pass


def test_a_folder_that_vanishes_is_one_error_at_the_commit(tmp_path):
    folder = tmp_path / "slab"
    with open_slab(committed(folder, 0)) as slab:
        slab.resume(0)
        shutil.rmtree(folder)
        write_step(slab, 1)
        assert holds(slab, 1)
        with pytest.raises(
            CheckpointError, match=rf"step 1 .* cannot be committed in {folder}/rank-00000\.commit \(No such"
        ):
            slab.commit(1)
    assert not folder.exists()


# --- commits that are not ours --------------------------------------------------------------------------------------


def test_a_commit_of_another_run_or_model_is_refused_and_nothing_touched(tmp_path):
    committed(tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for how, what in (
        ({"owner": "run 2, rank 0 of 1"}, "belongs to run 1, rank 0 of 1, and this is run 2, rank 0 of 1: go on from"),
        ({"records": RECORDS | {"head": 12_289}}, "has records of other names or sizes"),
        ({"records": {"embed": 1}}, "has records of other names or sizes"),
    ):
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/rank-00000\.commit {what}"):
            open_slab(tmp_path, **how)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with open_slab(tmp_path) as slab:
        slab.resume(2)
        assert holds(slab, 2)


def test_what_is_there_is_discarded_on_request(tmp_path):
    committed(tmp_path, 2)
    with open_slab(tmp_path, {"embed": 5000}, "run 2", discard=True) as slab:
        assert slab.steps == ()
        assert slab.path.stat().st_size == 4 * BLOCK


@pytest.mark.parametrize("damage", ["cut", "step", "empty", "format", "folder"])
def test_a_damaged_commit_is_refused(tmp_path, damage):
    path = committed(tmp_path, 2) / "rank-00000.commit"
    text = path.read_text()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_text(
            {
                "cut": text[: len(text) // 2], "step": text.replace('"step": 2', '"step": 3'), "empty": "",
                "format": json.dumps({"format": 2}),
            }[damage]
        )  # fmt: skip
        assert path.read_text() != text
    with pytest.raises(CheckpointError, match=r"rank-00000\.commit .*offload\.directory=FOLDER"):
        open_slab(tmp_path)


def test_a_commit_whose_states_are_gone_is_refused(tmp_path):
    (committed(tmp_path, 2) / "rank-00000.states").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.states has 0 bytes, and its commit is for 131072"):
        open_slab(tmp_path)


# --- file systems ---------------------------------------------------------------------------------------------------


def in_memory(folder):
    return folder.is_dir() and os.access(folder, os.W_OK) and disk_slab._file_system(folder) == "tmpfs"


@pytest.mark.skipif(not in_memory(SHARED_MEMORY), reason="no tmpfs that can be written")
def test_memory_that_looks_like_a_disk_is_warned_of_and_works():
    folder = SHARED_MEMORY / f"zero3d-test-{os.getpid()}"
    try:
        with pytest.warns(UserWarning, match=r"is on tmpfs, which is memory of the host and no disk"):
            slab = open_slab(folder)
        with slab:
            write_step(slab, 0)
            slab.commit(0)
            assert holds(slab, 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with pytest.warns(UserWarning, match=r"has no locks \(No locks available\)"):
        open_slab(tmp_path).close()


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path, monkeypatch):
    part = namedtuple("part", "mountpoint fstype")
    parts = [part("/", "ext4"), part(str(tmp_path), "xfs"), part(str(tmp_path / "ram"), "tmpfs")]
    monkeypatch.setattr(disk_slab.psutil, "disk_partitions", lambda all: parts)
    assert disk_slab._file_system(tmp_path / "ram" / "a") == "tmpfs"
    assert disk_slab._file_system(tmp_path / "ramp") == "xfs"
    assert disk_slab._file_system(Path("/elsewhere")) == "ext4"


def test_a_slab_that_is_dropped_leaves_no_file_open(tmp_path):
    slab = open_slab(tmp_path)
    file = slab._file._file
    del slab
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_no_torch_is_needed():
    script = "import sys, zero3d.offload.disk_slab\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
