"""data.streaming: records read by index when a batch needs them, the same in every format, and resumed exactly."""

import json
import pickle
from itertools import chain

import pytest
import torch
from corpora import opened, write_lines

from zero3d.data.batches import BatchStream, Portions
from zero3d.data.files import find_sources
from zero3d.data.streamed import ENDS, STRIDE, StreamedRecords
from zero3d.errors import ConfigError, DataError

LINES = [{"text": f"{at} is one"} for at in range(3 * STRIDE + 5)]


def streamed(tmp_path, *paths, **options):
    return opened(tmp_path, *paths, **({"streaming": True, "packing": False, "length": 16} | options))


def write(tmp_path, name, rows):
    """Write rows as what the name says: lines with empty ones between, row groups and record batches of 7."""
    path = tmp_path / name
    if path.suffix == ".jsonl":
        return write_lines(path, chain.from_iterable((row, "") if at % 3 else (row,) for at, row in enumerate(rows)))
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(table, path, row_group_size=7)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_records_are_those_that_are_read_in_order_and_nothing_is_kept(tmp_path, name):
    path = write(tmp_path, name, LINES)
    train = streamed(tmp_path, path).train
    assert not (tmp_path / "cache").exists()
    assert len(train) == len(LINES)
    again = pickle.loads(pickle.dumps(train))
    for index in (*range(len(LINES) - 1, 0, -5), 0):
        whole = json.dumps(LINES[index]["text"])[1:-1].encode() + b"\0"
        assert bytes(train[index]["input_ids"].tolist()) == whole[:16]
        assert torch.equal(train[index]["input_ids"], again[index]["input_ids"])
    kept = opened(tmp_path, path, packing=False, length=16).train
    assert all(torch.equal(train[at]["labels"], kept[at]["labels"]) for at in range(len(LINES)))


def test_texts_are_a_sequence_each_and_files_come_one_after_another(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.md").write_text("mark")
    train = streamed(tmp_path, tmp_path / "a.txt", tmp_path / "b.md", write(tmp_path, "c.jsonl", LINES)).train
    assert [bytes(train[at]["input_ids"].tolist()) for at in range(3)] == [b"text\0", b"mark\0", b"0 is one\0"]
    assert len(train) == len(LINES) + 2


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_order_is_the_same_at_every_dp_and_after_going_on_at_another(tmp_path, dp):
    train = streamed(tmp_path, write(tmp_path, "a.jsonl", LINES)).train

    def numbers(steps, dp, state=None):
        streams = [BatchStream(train, Portions(8, 2, 4 // dp, dp), rank=rank, seed=5) for rank in range(dp)]
        for each in streams:
            each.restore(state or each.state())
        rows = [[bytes(r.tolist()) for s in streams for b in next(s) for r in b["input_ids"]] for _ in range(steps)]
        return [sorted(row) for row in rows], streams[0].state()

    whole, state = numbers(10, 1)
    assert len(set(chain(*(numbers(len(LINES) // 8, 1)[0])))) == len(LINES) // 8 * 8
    assert numbers(4, dp, state)[0] == numbers(14, 1)[0][10:]
    assert numbers(10, dp)[0] == whole


def test_what_is_trained_on_is_known_again_wherever_it_lies(tmp_path):
    def identity(path):
        return streamed(tmp_path, path).train.identity

    first = identity(write(tmp_path, "a.jsonl", LINES))
    assert identity(write(tmp_path, "b.jsonl", LINES)) == first
    assert identity(write(tmp_path, "b.jsonl", [*LINES[:-1], {"text": "?"}])) != first


def test_a_file_longer_than_both_ends_of_its_digest_is_known_by_them(tmp_path):
    path, lines = tmp_path / "a.jsonl", [f'{{"text": "{at:07} {"x" * 65000}"}}' for at in range(2 * ENDS // 65000 + 2)]

    def said(rows):
        path.write_text("\n".join(rows))
        assert path.stat().st_size > 2 * ENDS
        return StreamedRecords(find_sources([str(path)])).says

    first = said(lines)
    assert said(lines) == first
    assert said(["?".join(lines[0].split("0", 1)), *lines[1:]]) != first
    assert said([*lines[:-1], "?".join(lines[-1].split("0", 1))]) != first


@pytest.mark.parametrize(("line", "why"), [
    ('{"text": "ab', r"a\.jsonl:3: not JSON: .* Correct it in the file\."),
    ('{"text": "a\x0bb"}', r"a\.jsonl:3: not JSON: Invalid control character at column 12\. "),
    ("[1]", r"a\.jsonl:3: expected one JSON object per line, found a list"),
    ('{"txt": 1}', r"a\.jsonl:3 gives the keys txt; expected"),
    ('{"text": 3}', r"a\.jsonl:3: text is a int, not a string\. Correct it in the file"),
    ('{"text": ""}', r"a\.jsonl:3 has no target .* leave it out in the file"),
])  # fmt: skip
def test_a_bad_record_is_one_line_that_names_its_place(tmp_path, line, why):
    path = write_lines(tmp_path / "a.jsonl", ["", {"text": "ab"}, line, {"text": "cd"}])
    with pytest.raises(DataError, match=why):
        streamed(tmp_path, path).train[1]


def test_what_cannot_be_streamed_is_refused_in_one_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "ab"}])
    for options, why in (
        ({"packing": True}, "each a sequence: set data.packing=false"),
        ({"skip_bad_lines": True}, "set data.skip_bad_lines or data.streaming to false"),
    ):
        with pytest.raises(ConfigError, match=why):
            streamed(tmp_path, path, **options)
    with pytest.raises(ConfigError, match=r"group_by_length .* nobody knows how long"):
        _ = streamed(tmp_path, path).train.lengths
    (tmp_path / "list.json").write_text('[{"text": "ab"}]')
    with pytest.raises(ConfigError, match=r"list\.json is one JSON list"):
        streamed(tmp_path, tmp_path / "list.json")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"no record: .*empty\.jsonl hold nothing"):
        streamed(tmp_path, tmp_path / "empty.jsonl")


def test_a_file_that_shrinks_under_a_run_is_told(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", LINES)
    records = StreamedRecords(find_sources([str(path)]))
    write_lines(path, LINES[:2])
    with pytest.raises(DataError, match="has become shorter"):
        records.item(9)
