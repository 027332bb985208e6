"""Records of steps on a disk that is full or fails: one message, ours; and what a killed run has cut off is kept."""

import errno
import json
import os

import pytest
from full_disks import limited

from zero3d.config import load
from zero3d.errors import REMEDIES, CheckpointError, OutOfBudget, remedy_of
from zero3d.train.folder import UNREAD, Folder
from zero3d.train.metrics import JsonLines, Metrics

CONFIG = load(None, [])
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Failing:
    """A sink that fails where it is told to."""

    def __init__(self, write=None, close=None):
        self.errors, self.closed = {"write": write, "close": close}, 0

    def write(self, record):
        self._fail("write")

    def close(self):
        self.closed += 1
        self._fail("close")

    def _fail(self, where):
        if self.errors[where] is not None:
            raise self.errors[where]


@pytest.fixture
def opened(tmp_path):
    """Metrics of a fresh folder that has these sinks."""

    def of(*sinks):
        made = Metrics(Folder(tmp_path), CONFIG, 0)
        made._sinks[0].close()
        made._sinks = sinks
        return made

    return of


def test_a_disk_that_is_full_at_a_write_and_at_the_end_is_told_once_by_us(opened):
    sinks = Failing(FULL, FULL), Failing(close=FULL)
    with pytest.raises(CheckpointError, match=r"at step 3 \(No space left on device\): make room, then go on") as told:
        with opened(*sinks) as made:
            made.write({"step": 3, "loss": 1.0})
    assert told.value.__cause__ is FULL
    assert told.value.exit_code == 1
    assert [sink.closed for sink in sinks] == [1, 1]


def test_what_a_full_disk_refuses_is_refused_again_at_the_end(tmp_path):
    """The same of a real file: what could not be flushed is still there when it is closed."""
    with pytest.raises(CheckpointError, match=r"at step 9 \(File too large\): raise `ulimit -f` or make room"):
        with limited(4096), Metrics(Folder(tmp_path), CONFIG, 0) as made:
            for step in range(1, 10):
                made.write({"step": step} | {f"field {number:02}": 0.125 for number in range(24)})
    with pytest.warns(UserWarning, match="1 line that"):
        assert len(Folder(tmp_path).keep_metrics(99)) == 8


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), KeyboardInterrupt()])
def test_an_error_of_the_run_is_what_is_told_whatever_fails_behind_it(opened, error):
    with pytest.raises(type(error)) as told, opened(Failing(close=FULL), Failing(close=RuntimeError("of a service"))):
        raise error
    assert told.value is error


def test_a_disk_that_does_not_take_the_end_of_a_good_run_is_told_by_us(opened):
    sinks = Failing(), Failing(close=FULL), Failing()
    with pytest.raises(CheckpointError, match=r"after step 2 \(No space left on device\): make room"):
        with opened(*sinks) as made:
            made.write({"step": 2})
    assert [sink.closed for sink in sinks] == [1, 1, 1]


def test_metrics_that_cannot_be_opened_are_told_by_us(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"before step 8 \(Is a directory\): move away what else has this name"):
        Metrics(Folder(tmp_path), CONFIG, 0, 8)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Folder(tmp_path).keep_metrics(3)


# --- what to do about an error of the system -------------------------------------------------------


@pytest.mark.parametrize("number", sorted({*errno.errorcode} - {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}))
def test_only_of_a_full_disk_room_is_wanted(number):
    assert "room" not in remedy_of(OSError(number, os.strerror(number)))


def test_each_remedy_is_of_its_error():
    found = {number: remedy_of(OSError(number, "x")) for number in REMEDIES}
    assert found[errno.ENOSPC] == found[errno.EDQUOT] == "make room"
    assert found[errno.EEXIST] == found[errno.ENOTDIR] == "move away what else has this name"
    assert found[errno.EMFILE] == "raise `ulimit -n`"
    assert remedy_of(OSError(errno.EIO, "x")) == remedy_of(OSError("no number")) == "have the disk looked at"
    assert remedy_of(ConnectionResetError(errno.ECONNRESET, "x")) == "look at the network"
    assert all(text[:1].islower() and text[-1:] != "." for text in found.values())


# --- a line that is cut off -------------------------------------------------------------------------

LINES = [json.dumps({"step": step, "loss": step / 2}) for step in (1, 2, 3)]


def lines_of(folder):
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


@pytest.mark.parametrize("cut", ['{"step": 3, "lo', "{", '{"step": 3, "loss": 1.5', "\ufffd"])
def test_a_line_that_a_killed_run_cut_off_is_kept_aside_and_said_and_the_next_ones_are_whole(tmp_path, cut):
    folder = Folder(tmp_path)
    for times in (1, 2):
        folder.metrics.write_text("\n".join([*LINES[:2], cut]))
        with pytest.warns(UserWarning, match=rf"metrics\.jsonl has 1 line that cannot be read.*kept in .*{UNREAD}"):
            assert folder.keep_metrics(2) == [json.loads(line) for line in LINES[:2]]
        assert (tmp_path / UNREAD).read_text().splitlines() == [cut] * times
    with Metrics(folder, CONFIG, 0, 3) as made:
        made.write(json.loads(LINES[2]))
    assert lines_of(folder) == [json.loads(line) for line in LINES]
    assert folder.keep_metrics(3) == lines_of(folder)  # nothing more is said


def test_a_whole_line_without_its_end_is_no_loss(tmp_path):
    folder = Folder(tmp_path)
    folder.metrics.write_text("\n".join(LINES))
    assert len(folder.keep_metrics(3)) == 3
    assert not (tmp_path / UNREAD).exists()


@pytest.mark.parametrize("before", ["", LINES[0], LINES[0] + "\n", '{"step": 1, "lo'])
def test_a_record_begins_a_line_of_its_own_whatever_is_before_it(tmp_path, before):
    folder = Folder(tmp_path)
    folder.metrics.write_text(before)
    sink = JsonLines(folder)
    sink.write({"step": 2})
    sink.close()
    assert folder.metrics.read_text() == before + "\n" * (before not in ("", LINES[0] + "\n")) + '{"step": 2}\n'
    assert folder.last_step == 2


def test_bytes_are_kept_aside_as_they_were_and_go_with_a_run_that_is_overwritten(tmp_path):
    folder = Folder(tmp_path)
    folder.metrics.write_bytes(b"\xff\xfe\n\n" + LINES[0].encode() + b"\n\0\0\0")
    with pytest.warns(UserWarning, match="has 2 lines that"):
        folder.keep_metrics(1)
    assert (tmp_path / UNREAD).read_bytes() == b"\xff\xfe\n\0\0\0\n"
    folder.clear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [UNREAD, ".metrics.jsonl.new"])
def test_where_a_line_cannot_be_kept_metrics_stay_as_they_were(tmp_path, name):
    folder = Folder(tmp_path)
    folder.metrics.write_text(before := f"{LINES[0]}\n{LINES[1]}\n{{")
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write to .* \(Is a directory\): move away what else") as told:
        folder.keep_metrics(1)
    assert not isinstance(told.value, OutOfBudget)
    assert folder.metrics.read_text() == before
