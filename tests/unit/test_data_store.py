"""The cache: complete or absent, found again, made again when anything changed."""

import json
import os
import pickle
import random
from pathlib import Path

import numpy
import pytest
from corpora import opened, tiny_tokenizer, write_lines

from zero3d.data import store, tokenize
from zero3d.data.files import find_sources
from zero3d.data.store import prepare
from zero3d.data.tokenize import Tokenizing
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
    monkeypatch.setattr(tokenize, "read", lambda *_: pytest.fail("read again"))
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


HELLO = b"hello\0onetwo\0\0"


@pytest.mark.parametrize("name", ["tokens", "offsets", "meta.json"])
def test_a_damaged_folder_is_made_again(tmp_path, text, name):
    file = build(tmp_path, text).folder / name
    file.write_bytes(file.read_bytes()[:3])
    assert bytes(build(tmp_path, text).tokens.tolist()) == HELLO


def flip(file, place, bit):
    whole = bytearray(file.read_bytes())
    whole[place] ^= 1 << bit
    file.write_bytes(whole)


def test_a_flipped_bit_anywhere_is_found_told_and_made_again(tmp_path, text):
    made = build(tmp_path, text)
    assert made.note is None
    source, sizes = random.Random(0), {file.name: file.stat().st_size for file in made.folder.iterdir()}
    places = [(name, source.randrange(size)) for name, size in sizes.items() for _ in range(8)]
    assert len(places) == 40
    for name, place in places:
        flip(made.folder / name, place, source.randrange(8))
        again = build(tmp_path, text)
        assert bytes(again.tokens.tolist()) == HELLO
        assert "were damaged: they have been made again" in again.note
        assert again.meta == made.meta
    assert build(tmp_path, text).note is None


def test_a_token_beyond_the_vocabulary_never_trains(tmp_path, text):
    opened(tmp_path, text, vocabulary=256)
    folder = build(tmp_path, text, vocabulary=256).folder
    tokens = numpy.fromfile(folder / "tokens", "uint16")
    tokens[3] = 300
    tokens.tofile(folder / "tokens")
    again = opened(tmp_path, text, vocabulary=256)
    assert max(int(row["input_ids"].max()) for row in map(again.train.__getitem__, range(len(again.train)))) < 256
    assert any("made again" in note for note in again.notes)


@pytest.mark.parametrize("meta", [
    "[]", "null", "{", '{"dtype": 1}', "[" * 50_000, '{"tokens": NaN}', "\0", '{"tokens": 1e999}', '{"dtype": "object"}',
])  # fmt: skip
def test_odd_counts_are_made_again(tmp_path, text, meta):
    file = build(tmp_path, text).folder / "meta.json"
    odd = json.loads(meta) if meta.startswith("{") and meta.endswith("}") else None
    file.write_text(json.dumps(json.loads(file.read_text()) | odd) if odd else meta)
    assert bytes(build(tmp_path, text).tokens.tolist()) == HELLO


def test_those_that_need_not_verify_do_not_read_it_again(tmp_path, text, monkeypatch):
    build(tmp_path, text)
    monkeypatch.setattr(store, "_digest", lambda _: pytest.fail("read again"))
    assert build(tmp_path, text, verify=False).note is None


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


def test_every_document_that_is_tokenized_is_told_and_none_that_is_there(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    told = []
    for _ in range(2):
        build(tmp_path, path, how=Tokenizing(made=lambda: told.append(1)))
        assert len(told) == 3
