"""The cache: complete or absent, found again, made again when anything changed."""

import os
import pickle
from pathlib import Path

import numpy
import pytest
from corpora import tiny_tokenizer, write_lines

from zero3d.data import store
from zero3d.data.files import find_sources
from zero3d.data.store import prepare
from zero3d.data.tokenizers import ByteTokenizer
from zero3d.errors import DataError


@pytest.fixture
def text(tmp_path):
    return write_lines(tmp_path / "a.jsonl", [{"text": "hello"}, {"prompt": "one", "completion": "two"}, {"text": ""}])


def build(tmp_path, path, tokenizer=None, **options):
    return prepare(find_sources([str(path)]), tokenizer or ByteTokenizer(), cache=str(tmp_path / "cache"), **options)


def folders(tmp_path):
    return sorted(entry.name for entry in (tmp_path / "cache").iterdir())


def test_a_store_holds_tokens_targets_and_documents(tmp_path, text):
    made = build(tmp_path, text)
    assert bytes(made.tokens.tolist()) == b"hello\0onetwo\0\0"
    assert made.targets.tolist() == [1] * 6 + [0] * 3 + [1] * 5
    documents = made.documents()
    assert documents.starts.tolist() == [0, 6, 13]
    assert documents.stops.tolist() == [6, 13, 14]
    assert documents.examples.tolist() == [False, True, False]
    assert (made.meta.tokens, made.meta.targets, made.meta.highest, made.meta.dtype) == (14, 11, ord("w"), "uint16")
    assert [entry.name for entry in made.folder.iterdir() if entry.name == "targets"]


def test_marks_are_not_kept_where_everything_is_learnt(tmp_path):
    made = build(tmp_path, write_lines(tmp_path / "b.jsonl", [{"text": "hello"}]))
    assert made.targets is None
    assert not (made.folder / "targets").exists()


def test_the_second_call_reads_nothing(tmp_path, text, monkeypatch):
    first = build(tmp_path, text)
    monkeypatch.setattr(store, "read", lambda source: pytest.fail("read again"))
    assert build(tmp_path, text).folder == first.folder


def test_changed_files_settings_and_tokenizers_are_tokenized_again(tmp_path, text):
    made = {build(tmp_path, text).folder, build(tmp_path, text, skip=True).folder}
    made.add(build(tmp_path, text, vocabulary=100_000).folder)
    made.add(build(tmp_path, text, tiny_tokenizer(tmp_path / "t")).folder)
    os.utime(text, ns=(0, 0))
    made.add(build(tmp_path, text).folder)
    assert len(made) == 5
    assert build(tmp_path, text, vocabulary=100_000).tokens.dtype == numpy.uint32


def test_a_killed_build_blocks_nobody(tmp_path, text, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_commit", killed)
        patch.setattr(store.shutil, "rmtree", lambda *_, **__: None)  # as if there had been no time for it
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, text)
    assert len(folders(tmp_path)) == 1
    assert folders(tmp_path)[0].endswith(".tmp")
    assert build(tmp_path, text).meta.documents == 3


def test_a_failed_build_leaves_nothing(tmp_path):
    path = write_lines(tmp_path / "b.jsonl", [{"text": "hello"}, "{"])
    with pytest.raises(DataError, match=r"b\.jsonl:2"):
        build(tmp_path, path)
    assert folders(tmp_path) == []


def test_of_two_builders_one_wins(tmp_path, text, monkeypatch):
    commit = store._commit

    def slow(building, folder):
        monkeypatch.setattr(store, "_commit", commit)
        first.append(build(tmp_path, text).folder.stat().st_ino)
        commit(building, folder)

    first = []
    monkeypatch.setattr(store, "_commit", slow)
    assert build(tmp_path, text).folder.stat().st_ino == first[0]  # the first stays: others may have mapped it
    assert len(folders(tmp_path)) == 1


@pytest.mark.parametrize("name", ["tokens", "offsets", "meta.json"])
def test_a_damaged_folder_is_made_again(tmp_path, text, name):
    file = build(tmp_path, text).folder / name
    file.write_bytes(file.read_bytes()[:3])
    assert bytes(build(tmp_path, text).tokens.tolist()) == b"hello\0onetwo\0\0"


def test_a_full_disk_or_a_folder_that_cannot_be_written_says_data_cache(tmp_path, text, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"tokens cannot be kept in .*file/x: .*Set data\.cache"):
        prepare(find_sources([str(text)]), ByteTokenizer(), cache=str(tmp_path / "file" / "x"))

    full = Path("/dev/full")  # writes fail when they are flushed, again and again
    monkeypatch.setattr(store._Writer, "_create", lambda writer, _: writer._files.enter_context(full.open("wb")))
    for path in (text, write_lines(tmp_path / "b.jsonl", [{"text": "long " * 9999}])):  # at the end, in the middle
        with pytest.raises(DataError, match=r"No space left on device\. Set data\.cache to a folder with room"):
            build(tmp_path, path)
    assert folders(tmp_path) == []


def test_a_store_travels_to_a_worker_as_a_path(tmp_path, text):
    made = build(tmp_path, text)
    carried = pickle.dumps(made)
    assert len(carried) < 400
    assert pickle.loads(carried).tokens.tolist() == made.tokens.tolist()
