"""Tokenizing with several processes: the same bytes, the same errors; lines where it takes long."""

import copy
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from corpora import APPENDS, CHAT, tiny_tokenizer, write_lines

from zero3d.data import tokenize
from zero3d.data.encode import Encoder
from zero3d.data.files import Source, find_sources
from zero3d.data.store import prepare
from zero3d.data.tokenize import Tokenizing, TokenizingProgress, processes_for
from zero3d.data.tokenizers import ByteTokenizer
from zero3d.errors import DataError


def build(tmp_path, cache, processes, tokenizer=None, **options):
    how = Tokenizing(processes)
    sources = find_sources([str(tmp_path / "data")])
    return prepare(sources, tokenizer or ByteTokenizer(), cache=str(tmp_path / cache), how=how, **options)


@pytest.fixture
def data(tmp_path):
    """Lines, a bad one among them, a long text and an array of ids."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [*[{"text": "what is one"}, {"prompt": "one", "completion": "two"}] * 750, "{"])
    (folder / "b.txt").write_text("one is two and four\n" * 20_000)
    numpy.save(folder / "c.npy", numpy.arange(9, dtype=numpy.int32))
    return folder


@pytest.fixture
def threads(monkeypatch):
    """Threads in the place of processes, which take seconds to start."""

    def pool(processes, context, start, initial):
        monkeypatch.setattr(tokenize, "_encoder", copy.copy(*initial), raising=False)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(tokenize, "ProcessPoolExecutor", pool)


def same_files(tmp_path, tokenizer=None):
    """Build with 1 and with 2 processes, and compare."""
    alone, shared = (build(tmp_path, f"by{n}", n, tokenizer, skip=True) for n in (1, 2))
    assert alone.meta == shared.meta
    assert alone.meta.skipped == 1
    assert alone.meta.documents == 1502
    for file in alone.folder.iterdir():
        assert file.read_bytes() == (shared.folder / file.name).read_bytes()


def test_the_files_are_the_same_however_encoding_is_shared_out(tmp_path, data, threads):
    same_files(tmp_path)


@pytest.mark.long
def test_the_files_are_the_same_with_any_number_of_processes(tmp_path, data):
    write_lines(data / "a.jsonl", [*[{"messages": CHAT}, {"text": "one"}, {"text": "two"}] * 500, "{"])
    same_files(tmp_path, tiny_tokenizer(tmp_path / "tokenizer", APPENDS))


def test_the_first_bad_record_ends_it_though_later_ones_are_read_before(tmp_path, threads):
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"text": "one"}] * 1500 + ["{"])
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a\.jsonl:1501: not JSON"):
        build(tmp_path, "cache", 2)
    (folder / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"b\.txt:1 is not UTF-8"):
        build(tmp_path, "cache", 2)


class Killed(ByteTokenizer):
    """A tokenizer whose process dies in the middle, as one does that the system ends for its memory."""

    def encode(self, texts, start=True):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_killed_process_is_one_clear_error_and_leaves_nothing(tmp_path, data):
    with pytest.raises(DataError, match=r"was ended from outside \(data\.processes=2\).* smaller data\.processes"):
        build(tmp_path, "cache", 2, Killed())
    assert list((tmp_path / "cache").iterdir()) == []


def test_processes_are_as_many_as_the_data_are_worth_and_arrays_need_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(tokenize, "WORTH", 100)
    words, ours = Encoder(tiny_tokenizer(tmp_path / "tokenizer")), Encoder(ByteTokenizer())
    text, array = [Source(tmp_path / "a.txt", "text")], [Source(tmp_path / "a.txt", "npy")]
    for size, wanted in ((10, 1), (250, 2), (9999, 4)):
        (tmp_path / "a.txt").write_bytes(b"a" * size)
        assert processes_for(text, words, None) == wanted
        assert processes_for(text, ours, None) == 1
    assert processes_for(text, ours, 3) == 3
    assert processes_for(array, words, 3) == 1


def test_lines_come_where_it_takes_long(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 4_000_000)
    now, lines = [0.0], []
    progress = TokenizingProgress([Source(path, "text")], lines.append, lambda: now[0])
    for _ in range(6):
        now[0] += 2.0
        progress.passed(200_000)
        progress.count(ended=True)
    assert lines == [
        "tokenizing: 3 documents, 1 of 4 MB (15%), 0.1 MB/s, 0:34 left",
        "tokenizing: 6 documents, 1 of 4 MB (30%), 0.1 MB/s, 0:28 left",
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "list.json", "a.npy", "a.parquet"])
def test_all_bytes_of_a_file_are_told_when_it_is_read(tmp_path, name):
    path = tmp_path / name
    if name == "a.npy":
        numpy.save(path, numpy.arange(4096).reshape(-1, 4))
    elif name == "a.parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": ["one", "two"] * 5000}), path)
    elif name == "list.json":
        path.write_text("[" + ", ".join(['{"text": "one"}'] * 400) + "]")
    else:
        path.write_text('{"text": "one"}\n' * 400)
    progress = TokenizingProgress(find_sources([str(path)]), print)
    for group in tokenize._read(find_sources([str(path)]), progress):
        list(Encoder(ByteTokenizer()).encode(group[1]))
    assert progress._read == pytest.approx(path.stat().st_size, rel=0.01, abs=150)
