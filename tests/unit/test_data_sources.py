"""Files to records: formats, and one clear error for each kind of bad input."""

import json
import os
import re
from pathlib import Path

import numpy
import pytest
from corpora import opened, tiny_tokenizer, write_lines

from zero3d.config import Data
from zero3d.data import records
from zero3d.data.dataset import needs_tokenizer, open_data
from zero3d.data.files import find_sources
from zero3d.data.json_list import list_items
from zero3d.data.streamed import StreamedRecords
from zero3d.data.tokenizers import ByteTokenizer, check_length, check_vocabulary, load_tokenizer
from zero3d.errors import ConfigError, DataError


def texts(path, format="auto"):
    return [r.text for source in find_sources([str(path)], format) for r in records.read(source)]


def test_a_folder_is_read_with_everything_below_it_in_sorted_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/x.txt", "c.bin", "a/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/b.py", "a/z.md", "b.txt"]
    assert texts(tmp_path, "text") == ["a/b.py", "a/z.md", "b.txt", "c.bin"]


def test_the_standard_library_is_text_without_its_tests():
    sources = find_sources(["stdlib"])
    assert len(sources) > 100
    assert {source.format for source in sources} == {"text"}
    assert not any("test" in source.path.parts[-3:-1] for source in sources)


def test_a_long_text_comes_in_pieces_that_join_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "PIECE", 10)
    text = "".join(f"line {n}\n" for n in range(9)) + "no end"
    (tmp_path / "a.txt").write_text(text)
    pieces = list(records.read(find_sources([str(tmp_path)])[0]))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    data = opened(tmp_path, tmp_path / "a.txt", length=128)
    assert data.train.documents == 1
    assert bytes(data.train[0]["input_ids"][: len(text) + 1].tolist()) == text.encode() + b"\0"


def test_jsonl_keys_choose_what_is_learnt(tmp_path):
    lines = [
        {"text": "ab"},
        {"prompt": "abc", "completion": "de", "other": 1},
        {"text": None, "prompt": "x", "completion": "y"},
    ]
    data = opened(tmp_path, write_lines(tmp_path / "a.jsonl", lines), packing=False)
    learnt = [[label for label in data.train[i]["labels"].tolist() if label >= 0] for i in range(3)]
    assert learnt == [[ord("b"), 0], [ord("d"), ord("e"), 0], [ord("y"), 0]]


def test_a_byte_order_mark_and_empty_lines_are_no_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\r\n  \n{"text": "cd"}')
    assert texts(tmp_path) == ["ab", "cd"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{oops", "not JSON"),
        ("[1, 2]", "found a list"),
        ('{"txt": "a"}', "the keys are txt; expected text"),
        ('{"prompt": "a"}', "the keys are prompt; expected text"),
        ('{"text": 3}', "text is a int, not a string"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"messages": []}', "not a list of"),
        ('{"messages": [{"content": "a"}]}', "message 0 has no role"),
        ('{"messages": [{"role": "assistant", "content": 7}]}', "content of message 0 is a int"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message is the assistant's"),
        (b'{"text": "\xff"}', "not UTF-8"),
        ('{"text": ' + "1" * 5000 + "}", r"Exceeds the limit \(4300 digits\)"),
    ],
)
def test_a_bad_line_is_named_with_its_file_or_left_out_and_counted_if_asked(tmp_path, line, why):
    path = tmp_path / "a.jsonl"
    good = b'{"text": "hello"}\n\n'
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)
    with pytest.raises(DataError, match=rf"a\.jsonl:3: .*{why}.*skip_bad_lines"):
        opened(tmp_path, path)
    data = opened(tmp_path, path, skip_bad_lines=True)
    assert data.train.documents == 2
    assert any("1 bad record left out" in note for note in data.notes)


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nb\xe4d\n")
    with pytest.raises(DataError, match=r"a\.txt:3 is not UTF-8"):
        opened(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("path", "options", "why"),
    [
        ("corpus.tx", {}, r"corpus\.tx does not exist\. Did you mean .*corpus\.txt"),
        ("cropus", {}, r"cropus does not exist\.$"),
        ("nowhere/corpus.txt", {}, r"Neither does its folder"),
        ("corpus.txt/a.txt", {}, r"Neither does its folder"),
        ("link.txt", {}, r"link\.txt is a link to corpus\.tex, which does not exist: make the link anew"),
        ("pipe.jsonl", {}, r"pipe\.jsonl is a pipe, not a regular file"),
        ("/dev/zero", {"format": "text"}, r"/dev/zero is a device, not a regular file"),
        ("zero", {"format": "npy"}, r"zero is a device, not a regular file"),
        ("l" * 300, {}, r"l\.\.\. cannot be read: File name too long|l* cannot be read: File name too long"),
        ("~nobody-of-this-name/a.txt", {}, r"does not exist"),
        ("odd.xyz", {}, r"suffix \.xyz is none of \.txt .*set data\.format"),
        ("empty", {}, r"holds 0 files"),
        ("empty.txt", {}, r"no document"),
        ("empty.jsonl", {}, r"no document"),
        ("corpus.txt", {"validation": 0.5}, r"one document of 3 tokens leaves nothing"),
        ("one.jsonl", {}, r"nothing to learn: 1 documents make no sequence with a target"),
    ],
)
def test_missing_and_empty_data_are_refused(tmp_path, path, options, why):
    (tmp_path / "corpus.txt").write_text("ab")
    (tmp_path / "odd.xyz").write_text("ab")
    (tmp_path / "link.txt").symlink_to("corpus.tex")
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "one.jsonl").write_text('{"text": ""}')
    (tmp_path / "empty").mkdir()
    for name in ("empty.txt", "empty.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises((DataError, ConfigError), match=why):
        opened(tmp_path, tmp_path / path, **options)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied"):
        opened(tmp_path, tmp_path)


def test_arrays_are_one_stream_or_a_sequence_per_row(tmp_path):
    numpy.save(tmp_path / "stream.npy", numpy.arange(20, dtype=numpy.uint16))
    numpy.save(tmp_path / "rows.npy", numpy.arange(12, dtype=numpy.int64).reshape(3, 4))
    whole = opened(tmp_path, tmp_path / "stream.npy").train
    assert [whole[i]["input_ids"].tolist() for i in range(3)] == [
        list(range(8)),
        list(range(8, 16)),
        [16, 17, 18, 19, 0, 0, 0, 0],
    ]
    rows = opened(tmp_path, tmp_path / "rows.npy", packing=False).train
    assert [rows[i]["input_ids"].tolist() for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    data = Data(train=(str(tmp_path / "stream.npy"),), length=8, cache=str(tmp_path / "cache"))
    assert not needs_tokenizer(data)
    assert len(open_data(data, None).train) == 3


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (numpy.zeros(4), "holds float64"),
        (numpy.zeros((2, 2, 2), int), r"shape \[2, 2, 2\]"),
        (numpy.zeros((2, 9), int), r"rows of 9 tokens, which do not fit data\.length=8"),
        (numpy.array([3, -1]), "token id -1"),
        (numpy.array([3, 70_000]), "token id 70000"),
        (numpy.array([3, 300]), r"highest token id is 300, and the model's vocabulary of 256"),
        (numpy.array([{}, 1]), "not an npy array"),
    ],
)
def test_arrays_that_are_no_token_ids_are_refused(tmp_path, array, why):
    numpy.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=why):
        opened(tmp_path, tmp_path / "a.npy", vocabulary=256)


def test_parquet_has_the_keys_of_jsonl(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import Table

    lines = [{"text": "ab", "id": 1}, {"text": "cde", "id": 2}]
    parquet.write_table(Table.from_pylist(lines), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", lines)
    one, other = (opened(tmp_path, tmp_path / name).train for name in ("a.parquet", "a.jsonl"))
    assert one[0]["input_ids"].tolist() == other[0]["input_ids"].tolist()
    parquet.write_table(Table.from_pylist([{"txt": "ab"}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="the keys are txt"):
        opened(tmp_path, tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"c\.parquet is not a parquet file"):
        opened(tmp_path, tmp_path / "c.parquet")


def test_make_demo_installs_what_reads_parquet():
    made = (Path(__file__).parents[2] / "Makefile").read_text()
    extras = [set(found.split(",")) for found in re.findall(r"pip install .* -e '\.\[(.*)\]'", made)]
    assert len(extras) >= 2
    assert all({"hf", "plot", "data"} <= each for each in extras)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match=r"pip install 'zero3d\[data\]'"):
        opened(tmp_path, tmp_path / "a.parquet")


def test_text_gets_the_start_the_tokenizer_adds_and_one_end(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "one and two"}, {"prompt": "one", "completion": " two"}])
    for adds_start in (True, False):
        tokenizer = tiny_tokenizer(tmp_path / f"tokenizer{adds_start}", adds_start=adds_start)
        data = opened(tmp_path, tmp_path / "a.jsonl", tokenizer=tokenizer, packing=False)
        starts = ["<s>"] if adds_start else []
        words = [tokenizer.inner.convert_ids_to_tokens(data.train[i]["input_ids"].tolist()) for i in range(2)]
        assert words == [[*starts, "one", "and", "two", "</s>"], [*starts, "one", "two", "</s>"]]


def test_a_tokenizer_that_is_no_folder_is_refused_without_a_download(tmp_path):
    nowhere, none = "zero3d does not download", "the model brings no tokenizer: set data.tokenizer to a folder"
    asked_for = (
        ("gpt2", None, nowhere),
        (str(tmp_path / "none"), None, nowhere),
        (None, None, none),
        (None, "demo", nowhere),
    )
    for asked, model, said in asked_for:
        with pytest.raises(ConfigError, match=said):
            load_tokenizer(asked, model)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"holds no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_saved_tokenizer_loads_again(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "a")
    tokenizer.save(tmp_path / "b")
    again = load_tokenizer(None, str(tmp_path / "b"))
    assert again.encode(["one and two"]) == tokenizer.encode(["one and two"])
    assert again.decode(again.encode(["one and two"])[0]) == "one and two"
    assert ByteTokenizer().decode([104, 105, 0, 195, 164, 7]) == "hi\u00e4\N{REPLACEMENT CHARACTER}"


def test_the_byte_tokenizer_is_saved_as_one_that_loads_and_has_the_same_ids(tmp_path):
    from transformers import AutoTokenizer

    assert ByteTokenizer().save(tmp_path) is None
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id) == (256, 0, 0)
    every = "".join(map(chr, range(1, 0x250))) + " two  spaces\n\tend \N{SNOWMAN}\U0001f600"
    for text in (every, "", " ", "Ā", "<0x00>", "\0a\0"):
        assert loaded(text)["input_ids"] == list(text.encode())
        assert loaded.decode(list(text.encode()), skip_special_tokens=True) == text.replace("\0", "")
    assert load_tokenizer(None, str(tmp_path)).encode([every]) == ByteTokenizer().encode([every])


def test_numbers_that_disagree_are_both_said(tmp_path):
    with pytest.raises(ConfigError, match=r"bytes has 256 tokens, the model's vocabulary 61"):
        check_vocabulary(ByteTokenizer(), 61)
    with pytest.raises(DataError, match=r"highest token id is 61, .* vocabulary of 61"):
        check_vocabulary(None, 61, 61)
    with pytest.raises(ConfigError, match=r"data\.length=4,096 is more than the model's 2,048 positions"):
        check_length(4096, 2048)
    check_vocabulary(ByteTokenizer(), 256, 255)
    check_length(4096, None)


def test_data_without_text_need_a_tokenizer_only_for_text(tmp_path):
    write_lines(tmp_path / "a.jsonl", [json.dumps({"text": "a b"})])
    data = Data(train=(str(tmp_path / "a.jsonl"),), length=8, cache=str(tmp_path / "cache"))
    assert needs_tokenizer(data)
    with pytest.raises(ConfigError, match=r"need a tokenizer: set data\.tokenizer"):
        open_data(data, None)


@pytest.mark.parametrize("damage", [False, True], ids=["whole", "cut off"])
def test_a_zip_of_arrays_is_no_array_whatever_its_name(tmp_path, damage):
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        numpy.savez(file, ids=numpy.arange(9))
    if damage:
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a\.npy is (not an npy array|a zip of arrays.*numpy\.save\.)"):
        opened(tmp_path, path)


def test_where_autotokenizer_takes_another_one_for_a_model_it_is_said(tmp_path):
    from transformers import AutoConfig, PreTrainedTokenizerFast

    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)
    assert "AutoTokenizer takes Qwen2Tokenizer" in ByteTokenizer().save(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    assert loaded("e\u0301 <|endoftext|>")["input_ids"] == list("e\u0301 <|endoftext|>".encode())


def test_links_are_followed_and_each_real_file_is_read_once(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (elsewhere / "sub").mkdir(parents=True)
    data.mkdir()
    (data / "a.txt").write_text("a")
    (elsewhere / "sub" / "c.txt").write_text("c")
    (data / "b.txt").symlink_to("a.txt")
    (data / "hard.txt").hardlink_to(data / "a.txt")
    (data / "loop").symlink_to(".")
    (data / "more").symlink_to("../elsewhere")
    (data / "more-of-it").symlink_to("../elsewhere/sub")
    (elsewhere / "back").symlink_to(data)
    assert texts(data) == ["a", "c"]
    (tmp_path / "linked").symlink_to(data)
    assert texts(tmp_path / "linked") == ["a", "c"]


@pytest.mark.parametrize("name", ["gone.jsonl", "sub/gone.txt", "gone", "circle.txt"])
def test_a_link_to_nothing_in_a_folder_is_named(tmp_path, name):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").symlink_to("missing")
    assert texts(tmp_path) == ["a"]
    (tmp_path / name).symlink_to("circle.txt" if name == "circle.txt" else "missing")
    with pytest.raises(
        DataError, match=rf"{name} is a link to .*, which does not exist: make the link anew, or remove"
    ):
        find_sources([str(tmp_path)])


def test_a_pipe_in_a_folder_is_named_where_it_would_be_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    os.mkfifo(tmp_path / "control")
    assert texts(tmp_path) == ["a"]
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl is a pipe, not a regular file: write its contents to one"):
        find_sources([str(tmp_path)])


def test_a_line_longer_than_any_record_is_bad_and_those_around_it_are_read(tmp_path, monkeypatch):
    for module in ("records", "streamed", "json_list"):
        monkeypatch.setattr(f"zero3d.data.{module}.LONGEST", 100)
    monkeypatch.setattr(records, "PIECE", 30)
    monkeypatch.setattr("zero3d.data.json_list.PIECE", 30)
    lines = [json.dumps({"text": "x" * length}) for length in (5, 400, 87, 89, 6)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, " " * 400, lines[0]]))
    found = list(records.read(find_sources([str(tmp_path / "a.jsonl")])[0]))
    bad = [isinstance(record, records.BadRecord) for record in found]
    assert bad == [False, True, False, True, False, True, False]
    assert [record.place.rpartition(":")[2] for record in found] == list("1234567")
    assert found[1].why.startswith("a line of more than 100 bytes, which no record is")
    streamed = StreamedRecords(find_sources([str(tmp_path / "a.jsonl")]))
    assert streamed.count == 7
    assert streamed.item(6) == {"text": "xxxxx"}
    with pytest.raises(DataError, match=r"a\.jsonl:2: a line of more than 100 bytes"):
        streamed.item(1)
    (tmp_path / "list.json").write_text("[" + ",".join([lines[0], lines[1], lines[4]]) + "]")
    with pytest.raises(DataError, match="behind record 1: an item has more than 100 characters"):
        list(records.read(find_sources([str(tmp_path / "list.json")])[0]))


def test_a_long_record_comes_in_pieces_that_join_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "PIECE", 10)
    monkeypatch.setattr(records, "LONG", 40)
    for text in ("word " * 20, "line\n" * 20, "x" * 95, "y" * 40):
        write_lines(tmp_path / "a.jsonl", [{"text": text}, {"text": "next"}])
        *pieces, last = records.read(find_sources([str(tmp_path / "a.jsonl")])[0])
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.first for piece in pieces] == [True, *(False for _ in pieces[1:])]
        assert [piece.last for piece in pieces] == [*(False for _ in pieces[1:]), True]
        assert all(0 < len(piece.text) <= 40 for piece in pieces)
        assert (len(pieces) == 1) == (len(text) <= 40)
        assert (last.text, last.first, last.last) == ("next", True, True)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_a_list_is_read_alike_in_pieces_of_any_size(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("zero3d.data.json_list.PIECE", piece)
    items = [{"text": "a" * 50}, 1234567, -1.5e10, True, None, "x", [1, 22], {}, 98]
    for text in (json.dumps(items), json.dumps(items, indent=3), json.dumps(items, separators=(",", ":")) + "\n"):
        (tmp_path / "list.json").write_text(text)
        assert list(list_items(tmp_path / "list.json")) == items
    for text, number in (("[1, 2", 2), ("[1 2]", 1), ("[1,", 1), ("[", 0), ("[1, tru]", 1), ("[1]", 1)):
        (tmp_path / "list.json").write_text(text)
        found = list_items(tmp_path / "list.json")
        if text == "[1]":
            assert list(found) == [1]
        else:
            with pytest.raises(DataError, match=f"behind record {number}"):
                list(found)
