"""Data of a user's own function: read by index, resumed exactly, and nonsense of it in one line."""

import pickle
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from zero3d.config import Data
from zero3d.data.batches import BatchStream, Grouping, Portions
from zero3d.data.dataset import needs_tokenizer, open_data
from zero3d.data.tokenizers import ByteTokenizer
from zero3d.errors import ConfigError, DataError


def data_of(name, tokenizer=None, vocabulary=256, **options):
    settings = {"packing": False, "length": 8} | options
    return open_data(Data(train=(f"own_data:{name}",), **settings), tokenizer, vocabulary)


def test_items_are_sequences_with_their_labels():
    train = data_of("numbered").train
    assert len(train) == 23
    assert train[2]["input_ids"].tolist() == [0, 2, 3, 4, 5]
    assert train[2]["labels"].tolist() == [-100, 2, 3, 4, 5]
    assert train[23]["labels"].tolist() == [-100]
    batch = train.stack([train[0], train[4]])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 7)
    assert data_of("masked").train[5]["labels"].tolist() == [-100, -100, 2, 3]
    assert not needs_tokenizer(Data(train=("own_data:masked",)))


def test_texts_are_tokenized_as_lines_of_a_file_are():
    train = data_of("texts", ByteTokenizer()).train
    assert bytes(train[1]["input_ids"].tolist()) == b"abcabc\0"
    assert len(train[9]["input_ids"]) == 8  # truncated
    assert data_of("completions", ByteTokenizer()).train[0]["labels"].tolist() == [-100, -100, ord("c"), ord("d"), 0]
    assert needs_tokenizer(Data(train=("own_data:texts",)))


@pytest.mark.parametrize("dp", [1, 2])
def test_a_run_goes_on_by_index_at_any_dp_and_items_are_the_same_in_another_process(dp):
    train = data_of("numbered").train

    def numbers(steps, dp, state=None):
        streams = [BatchStream(train, Portions(4, 2, 2 // dp, dp), rank=rank, seed=5) for rank in range(dp)]
        for each in streams:
            each.restore(state or each.state())
        rows = [[int(r[1]) for s in streams for b in next(s) for r in b["input_ids"]] for _ in range(steps)]
        return rows, streams[0].state()

    whole, _ = numbers(12, 1)
    assert sorted(list(chain(*whole))[:23]) == list(range(23))
    _, state = numbers(5, 1)
    assert numbers(7, dp, state)[0] == whole[5:]
    again = pickle.loads(pickle.dumps(train))
    assert torch.equal(again[7]["input_ids"], train[7]["input_ids"])


def test_a_fraction_is_held_out_and_lengths_group_items():
    data = data_of("measured", validation=0.25)
    assert (len(data.train), len(data.validation)) == (30, 10)
    own = {int(samples[i]["input_ids"][1]) for samples in (data.train, data.validation) for i in range(len(samples))}
    assert own == set(range(40))
    assert max(data.train.lengths) == 8
    assert list(data.train.lengths) == [len(data.train[i]["input_ids"]) for i in range(30)]
    BatchStream(data.train, Portions(4, 4, 1, 1), grouped=Grouping(length=True))
    with pytest.raises(DataError, match=r"own_data:numbered returns does not say how long.*attribute lengths"):
        BatchStream(data_of("numbered").train, Portions(4, 4, 1, 1), grouped=Grouping(length=True))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", r"own_data:raises raised: LookupError: no such folder \(.*own_data.py:\d+\)"),
        ("generator", r"returns a list_iterator without __len__ and __getitem__: .* read by index"),
        ("nothing", "of length 0: there is nothing to train on"),
        ("negative", r"raised when asked for its length: ValueError: __len__\(\) should return >= 0"),
        ("fraction", "raised when asked for its length: TypeError: 'float' object cannot be interpreted as an integer"),
        ("listed", "at index 0 of 10 gives a list; expected {input_ids"),
        ("keyless", "at index 0 of 10 gives the keys image; expected {input_ids"),
        ("floats", r"input_ids of own_data:floats at index 0 of 10 is float64 of shape \[2\]; expected whole numbers"),
        ("nested", r"is int64 of shape \[1, 2\]; expected whole numbers \[n\]"),
        ("ragged", "is a list that makes no array; expected whole numbers"),
        ("empty", "input_ids of own_data:empty at index 0 of 10 is empty"),
        ("below", "gives the token id -2, which is none"),
        ("beyond", "gives the token id 999, which is none: the model's vocabulary has 256"),
        ("unequal", "gives 2 labels for 3 input_ids: expected one for each"),
        ("odd_labels", "gives the label -7: expected a token id, or -100"),
        ("untaught", "has no target among its first 3 tokens"),
        ("no_text", "at index 0 of 10: text is a int, not a string. Correct it in the function"),
        ("missing_item", r"at index 9 of 10: IndexError: list index out of range"),
        ("not_a_function", "returns a int without __len__ and __getitem__"),
    ],
)
def test_nonsense_is_one_line_that_names_the_function_the_index_and_what_is_wanted(name, why):
    with pytest.raises(DataError, match=why) as caught:
        data_of(name, ByteTokenizer())
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_is_not_there_and_what_is_packed_is_refused():
    with pytest.raises(ConfigError, match=r"data\.train 'own_data:no_such' cannot be imported"):
        data_of("no_such")
    with pytest.raises(ConfigError, match=r"own_data:numbered gives items one by one, .* set data\.packing=false"):
        data_of("numbered", packing=True)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        data_of("texts")


@pytest.mark.long
def test_nonsense_that_a_worker_meets_is_the_same_one_line():
    sys.path.insert(0, str(Path(__file__).parents[1]))
    stream = BatchStream(data_of("late_nonsense").train, Portions(2, 2, 1, 1), workers=1, shuffle=False)
    with pytest.raises(
        DataError, match=r"^input_ids of own_data:late_nonsense at index \d of 10 is float64 of shape \[1\]"
    ) as caught:
        for _ in range(5):
            next(stream)
    assert "\n" not in str(caught.value)
    stream.close()
