"""Arrow files and folders as save_to_disk writes them: the same samples as of the same lines."""

import json

import pytest
from corpora import CHAT, opened, tiny_tokenizer, write_lines

from zero3d.data import columns
from zero3d.data.conversations import from_llava
from zero3d.data.files import Source, find_sources
from zero3d.data.records import Pictured, read
from zero3d.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
LINES = [{"text": f"what is {word}", "id": at} for at, word in enumerate(["one", "two", "four", "I", "is"])]


def write_arrow(path, rows, as_file=False):
    """Write record batches of 2 rows: a stream, as the datasets library does, or a file with an index."""
    table = pyarrow.Table.from_pylist(rows)
    with (pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def save_to_disk(folder, *files):
    """Write what Dataset.save_to_disk does: rows of each file, and its bookkeeping."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05}-of-{len(files):05}.arrow" for at in range(len(files))]
    for name, rows in zip(names, files, strict=True):
        write_arrow(folder / name, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def rows_of(samples):
    return [samples[index]["input_ids"].tolist() for index in range(len(samples))]


@pytest.mark.parametrize("as_file", [False, True])
def test_rows_of_arrow_are_lines(tmp_path, as_file):
    one = opened(tmp_path, write_arrow(tmp_path / "a.arrow", LINES, as_file)).train
    other = opened(tmp_path, write_lines(tmp_path / "a.jsonl", LINES)).train
    assert rows_of(one) == rows_of(other)


def test_a_saved_folder_is_its_files_in_its_order_without_its_bookkeeping(tmp_path):
    folder = save_to_disk(tmp_path / "saved", LINES[:2], LINES[2:])
    assert [source.path.name[:10] for source in find_sources([str(folder)])] == ["data-00000", "data-00001"]
    assert len(find_sources([str(tmp_path)])) == 2  # below another folder, too
    one = opened(tmp_path, folder).train
    assert rows_of(one) == rows_of(opened(tmp_path, write_lines(tmp_path / "a.jsonl", LINES)).train)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json names data-00001-of-00002\.arrow, which is not there"):
        find_sources([str(folder)])
    (folder / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json is not JSON"):
        find_sources([str(folder)])


def test_of_a_folder_of_splits_train_is_trained_on_and_validation_evaluated(tmp_path):
    folder = tmp_path / "splits"
    save_to_disk(folder / "train", LINES[:3])
    save_to_disk(folder / "validation", LINES[3:])
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    found = opened(tmp_path, folder, validation=(str(folder),), packing=False)
    assert (found.train.documents, found.validation.documents) == (3, 2)
    with pytest.raises(DataError, match="is a DatasetDict, below"):
        find_sources([str(tmp_path)])
    (folder / "validation").rename(folder / "test")
    with pytest.raises(DataError, match="of the splits test, train, and validation is wanted: name one, such as"):
        opened(tmp_path, folder, validation=(str(folder),))


def test_columns_have_the_forms_of_keys_and_a_bad_row_is_named(tmp_path):
    talk = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It."}]
    pictured = {"conversations": talk, "image": "a.jpg"}
    path = write_arrow(tmp_path / "pictured.arrow", [pictured])
    assert list(read(Source(path, "arrow"))) == [Pictured(*from_llava(pictured), f"{path}:row 1")]
    tokenizer = tiny_tokenizer(tmp_path / "t", "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}")
    chats = opened(tmp_path, write_arrow(tmp_path / "c.arrow", [{"messages": CHAT}]), tokenizer=tokenizer, length=64)
    lines = opened(tmp_path, write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]), tokenizer=tokenizer, length=64)
    assert rows_of(chats.train) == rows_of(lines.train)
    bad = write_arrow(tmp_path / "bad.arrow", [{"text": "ab"}, {"text": "cd"}, {"text": None}])
    with pytest.raises(DataError, match=r"bad\.arrow:row 3"):
        opened(tmp_path, bad)
    assert opened(tmp_path, bad, skip_bad_lines=True).train.documents == 2
    with pytest.raises(DataError, match=r"odd\.arrow: the keys are txt"):
        opened(tmp_path, write_arrow(tmp_path / "odd.arrow", [{"txt": "ab"}]))
    (tmp_path / "no.arrow").write_bytes(b"no")
    with pytest.raises(DataError, match=r"no\.arrow is not an Arrow file"):
        opened(tmp_path, tmp_path / "no.arrow")


def test_a_batch_of_rows_is_held_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "ROWS", 3)
    path = write_arrow(tmp_path / "a.arrow", [{"text": "ab"}] * 10, as_file=True)
    batches = list(columns.read_rows(path, "arrow", ["text"], lambda read: None))
    assert sum(map(len, batches)) == 10
    assert max(map(len, batches)) <= 3
