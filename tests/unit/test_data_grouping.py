"""Sequences of similar length in a batch, and packing that cuts no document that fits."""

from itertools import chain

import numpy
import pytest
from corpora import opened, write_lines
from test_data_mixture import mixed, taken

from zero3d.config import load
from zero3d.data.batches import BatchStream, Grouping, Portions
from zero3d.data.orders import WINDOW, GroupedOrder, Order
from zero3d.errors import ConfigError, DataError


@pytest.mark.parametrize(("count", "batch"), [(1000, 8), (1001, 8), (37, 5), (3, 8)])
def test_each_pass_has_every_sample_once_and_windows_do_not_depend_on_where_one_begins(count, batch):
    lengths = numpy.random.default_rng(0).integers(1, 500, count)
    order = GroupedOrder(Order(count, 0, True), lengths, batch, 0)
    whole = order.samples(0, 3 * count)
    passes = [whole[first : first + count] for first in range(0, 3 * count, count)]
    assert all(sorted(each) == list(range(count)) for each in passes)
    assert passes[0] != passes[1] or count < batch
    fresh = GroupedOrder(Order(count, 0, True), lengths, batch, 0)
    assert fresh.samples(2 * count + 1, 3 * count) == whole[2 * count + 1 :]


def test_a_batch_has_similar_lengths_and_batches_come_in_random_order():
    count, batch = 4 * WINDOW * 8, 8
    lengths = numpy.random.default_rng(0).integers(1, 500, count)
    batches = lengths[GroupedOrder(Order(count, 0, True), lengths, batch, 0).samples(0, count)].reshape(-1, batch)
    spread = (batches.max(1) - batches.min(1)).mean()
    assert spread < 500 / WINDOW * 2
    means = batches.mean(1)
    assert abs(numpy.corrcoef(means[:-1], means[1:])[0, 1]) < 0.25  # neither ascending nor descending


@pytest.mark.parametrize("dp", [2, 4])
def test_the_order_is_the_same_at_every_dp_and_another_batch_is_no_continuation(tmp_path, dp):
    train = mixed(tmp_path, (50, 31), (2, 1), packing=False).train
    whole, _ = taken(train, 14, grouped=Grouping(length=True))
    assert taken(train, 14, dp, grouped=Grouping(length=True))[0] == whole
    assert whole != taken(train, 14)[0]
    _, state = taken(train, 6, dp, grouped=Grouping(length=True))
    assert taken(train, 8, 1, state, grouped=Grouping(length=True))[0] == whole[6:]
    with pytest.raises(
        DataError, match=r"grouped was 8 and is now 16\. Give the same data\.group_by_length and train\.batch"
    ):
        taken(train, 1, 1, state, batch=16, grouped=Grouping(length=True))
    with pytest.raises(DataError, match="grouped was 8 and is now 0"):
        taken(train, 1, 1, state)


def test_less_padding_is_made(tmp_path):
    words = numpy.random.default_rng(0).integers(2, 60, 200)
    data = opened(
        tmp_path, write_lines(tmp_path / "a.jsonl", [{"text": "a" * n} for n in words]), length=64, packing=False
    )
    assert sorted(data.train.lengths) == sorted(words + 1)

    def padded(grouped):
        batches = BatchStream(data.train, Portions(8, 8, 1, 1), grouped=Grouping(length=grouped))
        return sum(next(batches)[0]["input_ids"].numel() for _ in range(25))

    assert padded(True) < 0.65 * padded(False)


def test_grouping_of_packed_sequences_is_refused():
    with pytest.raises(ConfigError, match=r"all have data\.length: type data\.packing=false"):
        load({"data": {"group_by_length": True}})


def test_best_fit_cuts_only_texts_that_are_longer_than_a_sequence_and_loses_nothing(tmp_path):
    sizes = [30, 50, 64, 1, 13, 70, 33, 33, 20, 9]
    path = write_lines(tmp_path / "a.jsonl", [{"text": chr(97 + i) * n} for i, n in enumerate(sizes)])
    options = {"length": 64, "cache": str(tmp_path / "cache")}
    best = opened(tmp_path, path, packing="best_fit", **options)
    spans = list(
        chain(
            *(
                [t for t in row["input_ids"].tolist() if t]
                for row in map(best.train.__getitem__, range(len(best.train)))
            )
        )
    )
    assert sorted(spans) == sorted(ord("a") + i for i, n in enumerate(sizes) for _ in range(n))
    whole = [n for n in sizes if n < 64]
    rows = [best.train[i]["input_ids"].tolist() for i in range(len(best.train))]
    for i, n in enumerate(sizes):
        holding = [row.count(ord("a") + i) for row in rows if ord("a") + i in row]
        assert holding == [n] if n in whole else sum(holding) == n
    assert any("% full" in note for note in best.notes)
    cut = opened(tmp_path, path, **options)
    assert len(cut.train) <= len(best.train)
    with pytest.raises(DataError, match="packing was best_fit and is now True"):
        BatchStream(cut.train, Portions(2, 2, 1, 1)).restore(BatchStream(best.train, Portions(2, 2, 1, 1)).state())
