"""2 is for bad input alone: which errors, and what the system has to do with it."""

import errno
import json
import os
from pathlib import Path

import pytest

import zero3d.errors
from zero3d.errors import (
    CheckpointError,
    ConfigError,
    CopyError,
    CorruptionError,
    DataError,
    LayoutError,
    MemoryExhaustedError,
    MeshError,
    NonFiniteError,
    OrderError,
    OutOfBudget,
    RankError,
    ReleasedParameterError,
    RetiredFormatError,
    StreamError,
    TokenError,
    Zero3dError,
)
from zero3d.tools.cli.worker import leave_exception

CODES = {
    ConfigError: 2, MeshError: 2, DataError: 2, CheckpointError: 2, CopyError: 2, RetiredFormatError: 2,
    OutOfBudget: 2, TokenError: 2,
    Zero3dError: 1, LayoutError: 1, OrderError: 1, ReleasedParameterError: 1, RankError: 1,
    NonFiniteError: 1, MemoryExhaustedError: 1, CorruptionError: 1, StreamError: 1,
}  # fmt: skip


def code(kind, number=None):
    """The exit code of an error, of a system's error if that is given."""
    try:
        raise kind("x") from (None if number is None else OSError(number, os.strerror(number)))
    except Zero3dError as error:
        return error.exit_code


def test_every_error_has_its_code_and_the_drawing_says_the_same():
    kinds = {item for item in vars(zero3d.errors).values() if isinstance(item, type) and issubclass(item, Exception)}
    assert set(CODES) == kinds
    assert {kind: code(kind) for kind in kinds} == CODES
    drawn = {line.split()[0]: line.rstrip().endswith(" 2") for line in zero3d.errors.__doc__.splitlines()
             if line.startswith(" ") and line.split()[0].endswith(("Error", "Budget"))}  # fmt: skip
    assert drawn == {kind.__name__: code == 2 for kind, code in CODES.items()}


@pytest.mark.parametrize("kind", [ConfigError, DataError, CheckpointError])
def test_a_path_that_cannot_be_is_bad_input_and_a_disk_that_fails_is_not(kind):
    assert [code(kind, number) for number in (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EROFS)] == [2, 2, 2, 2]
    assert [code(kind, number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE)] == [1, 1, 1, 1]


def test_the_code_of_another_rank_counts():
    error = CheckpointError("x")
    error.agreed = 1
    assert error.exit_code == 1


def test_a_launcher_that_looks_at_any_moment_finds_a_whole_error_file_or_none(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    seen = []

    def write_text(self, text):
        with self.open("w") as opened:
            seen.append(file.exists())
            opened.write(text)

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(
        "zero3d.tools.cli.worker.notify_peers", lambda *_: None
    )  # other tests of this process are no peers
    assert leave_exception(ConfigError("x")) == 2
    assert seen == [False]
    assert json.loads(file.read_text())["message"]["message"] == "ConfigError: x"


@pytest.mark.parametrize(("raised", "note", "told"), [
    (RuntimeError("Application timeout caused pair closure"), "OrderError: rank 0 waits", "OrderError: rank 0 waits"),
    (RuntimeError("Connection closed by peer"), "ValueError: x", "RuntimeError: Connection closed by peer"),
    (RuntimeError("a bug of the program's"), "OrderError: rank 0 waits", "RuntimeError: a bug of the program's"),
])  # fmt: skip
def test_a_collective_of_the_programs_that_was_ended_is_reported_by_its_reason(monkeypatch, raised, note, told):
    from zero3d.distributed import axis
    from zero3d.tools.cli import worker

    monkeypatch.setattr(axis, "read_note", lambda: note)
    found = worker._reason_of(raised)
    assert f"{type(found).__name__}: {found}" == told
