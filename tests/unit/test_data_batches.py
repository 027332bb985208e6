"""The stream of batches: one order for every dp, exact positions, workers that change nothing."""

import multiprocessing
import os
import signal
from itertools import chain, islice

import pytest
import torch
from corpora import opened, stream, write_lines

from zero3d.data.batches import BatchStream, Grouping, Portions, steps_of, validation_batches
from zero3d.data.sequences import padded_alike
from zero3d.errors import DataError


@pytest.fixture
def sequences(tmp_path):
    return opened(tmp_path, stream(tmp_path, 88)).train  # 11 sequences of 8, each known by its first token


def names(batch):
    """The sequences of a micro-batch."""
    return [token // 8 for token in batch["input_ids"][:, 0].tolist()]


def global_batches(sequences, steps, dp=1, micro_batch=2, accumulate=2, state=None, **options):
    """Each step's samples over all ranks, in rank order."""
    portions = Portions(micro_batch * accumulate * dp, micro_batch, accumulate, dp)
    streams = [BatchStream(sequences, portions, rank=rank, **options) for rank in range(dp)]
    for each in streams:
        each.restore(state or each.state())
    found = [[name for each in streams for batch in next(each) for name in names(batch)] for _ in range(steps)]
    assert all(each.state() == streams[0].state() for each in streams)
    return found, streams[0].state()


def test_an_epoch_shows_everything_once_in_an_order_of_its_own(sequences):
    steps, state = global_batches(sequences, 11, micro_batch=1, accumulate=3)
    order = list(chain(*steps))
    epochs = [order[:11], order[11:22], order[22:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(11))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (state["epoch"], state["index"], state["seed"], state["sequences"]) == (3, 0, 0, 11)
    assert global_batches(sequences, 11, micro_batch=1, accumulate=3)[0] == steps
    assert global_batches(sequences, 11, micro_batch=1, accumulate=3, seed=1)[0] != steps
    assert list(chain(*global_batches(sequences, 3, shuffle=False)[0])) == [*range(11), 0]


@pytest.mark.parametrize(("dp", "micro_batch", "accumulate"), [(1, 4, 1), (1, 1, 4), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
def test_the_global_batch_does_not_depend_on_how_it_is_divided(sequences, dp, micro_batch, accumulate):
    expected, _ = global_batches(sequences, 9)
    assert global_batches(sequences, 9, dp, micro_batch, accumulate)[0] == expected


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("done", [1, 4, 7])
def test_a_run_goes_on_in_the_middle_of_an_epoch_at_any_dp(sequences, dp, done):
    whole, _ = global_batches(sequences, 10)
    _, state = global_batches(sequences, done)
    assert global_batches(sequences, 10 - done, dp, 1, 4 // dp, state)[0] == whole[done:]


def test_a_run_goes_on_with_another_batch(sequences):
    whole = list(chain(*global_batches(sequences, 6)[0]))
    _, state = global_batches(sequences, 3)
    assert list(chain(*global_batches(sequences, 2, micro_batch=3, state=state)[0])) == whole[12:24]


def test_data_smaller_than_a_batch_are_seen_several_times(tmp_path):
    few = opened(tmp_path, stream(tmp_path, 24)).train
    steps, state = global_batches(few, 1, micro_batch=8, accumulate=1)
    assert [sorted(steps[0][i : i + 3]) for i in (0, 3)] == [[0, 1, 2]] * 2
    assert (state["epoch"], state["index"]) == (2, 2)


def test_other_data_or_another_seed_are_no_continuation(sequences):
    each = BatchStream(sequences, Portions(4, 2, 2, 1))
    with pytest.raises(DataError, match="sequences was 12 and is now 11"):
        each.restore(each.state() | {"sequences": 12})
    with pytest.raises(DataError, match="seed was 7 and is now 0"):
        each.restore(each.state() | {"seed": 7})
    with pytest.raises(DataError, match="shuffle was False and is now True"):
        each.restore(each.state() | {"shuffle": False})


def test_reading_ahead_neither_moves_the_position_nor_draws_random_numbers(sequences):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    each = BatchStream(sequences, Portions(4, 2, 2, 1))
    list(islice(each, 2))
    assert each.state()["index"] == 8
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long
def test_workers_give_the_same_batches_outlive_a_signal_to_the_job_and_end(sequences):
    others = set(multiprocessing.active_children())  # of other tests
    alone = BatchStream(sequences, Portions(4, 2, 2, 1))
    helped = BatchStream(sequences, Portions(4, 2, 2, 1), workers=2)
    try:
        for expected, found in islice(zip(alone, helped, strict=True), 4):
            for worker in set(multiprocessing.active_children()) - others:
                os.kill(worker.pid, signal.SIGTERM)  # as a scheduler does to every process of a job
            for one, other in zip(expected, found, strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[name], other[name]) for name in one)
        assert helped.state() == alone.state()
        assert len(set(multiprocessing.active_children()) - others) == 2
    finally:
        helped.close()
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 4), (2, 2), (4, 3), (2, 50)])
def test_validation_sees_every_sequence_once_and_as_many_batches_on_every_rank(sequences, dp, micro_batch):
    ranks = [list(validation_batches(sequences, micro_batch, dp=dp, rank=rank)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert {len(batch["input_ids"]) for batches in ranks for batch in batches} == {micro_batch}
    rows = [row for batches in ranks for batch in batches for row in batch["labels"] if (row >= 0).any()]
    assert sorted(int(row[1]) // 8 for row in rows) == list(range(11))
    assert sum(int((row >= 0).sum()) for row in rows) == sequences.count()[1]


def test_validation_can_be_limited(sequences):
    assert len(list(validation_batches(sequences, 2, dp=2, limit=2))) == 2
    assert len(list(validation_batches(sequences, 2, dp=2, limit=9))) == 3


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_limit_of_all_ranks_together_shows_the_same_sequences_at_every_dp(sequences, dp):
    seen = [
        name
        for rank in range(dp)
        for batch in validation_batches(sequences, 2, dp=dp, rank=rank, limit=3, together=True)
        for name, labels in zip(names(batch), batch["labels"], strict=True)
        if (labels != -100).any()
    ]
    assert sorted(seen) == list(range(6))


def test_passes_are_rounded_up_to_steps():
    assert [steps_of(*given) for given in [(1, 100, 8), (2, 100, 8), (0.5, 100, 50), (0.01, 3, 8)]] == [13, 25, 1, 1]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_dealt_micro_batches_go_round_the_ranks_in_turn(sequences, dp):
    portions = Portions(8, 2, 4 // dp, dp)
    streams = [BatchStream(sequences, portions, rank=rank, dealt=True) for rank in range(dp)]
    order = Portions(8, 2, 4, 1)
    wanted = [[names(batch) for batch in step] for step in islice(BatchStream(sequences, order), 3)]
    found = []
    for _ in range(3):
        rows = [[names(batch) for batch in next(stream)] for stream in streams]
        found.append([rows[rank][k] for k in range(4 // dp) for rank in range(dp)])
    assert found == wanted


def test_micro_batches_of_a_step_are_padded_to_one_length_and_pixels_stay_as_they_are():
    short = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)}
    kinds = {"mm_token_type_ids": torch.ones(2, 3, dtype=torch.long), "pixel_values": torch.ones(2, 3)}
    kinds["position_ids"] = torch.ones(4, 2, 3, dtype=torch.long)
    long = {name: torch.ones(2, 5, dtype=torch.long) for name in ("input_ids", "labels")}
    padded, same = padded_alike([{**short, **kinds}, long], pad=7)
    assert padded["input_ids"].tolist() == [[1, 1, 1, 7, 7]] * 2
    assert padded["labels"].tolist() == [[1, 1, 1, -100, -100]] * 2
    assert padded["mm_token_type_ids"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert padded["position_ids"].tolist() == [[[1, 1, 1, 0, 0]] * 2] * 4, "of M-RoPE models"
    assert padded["pixel_values"] is kinds["pixel_values"]
    assert same is long


def test_a_stream_pads_the_micro_batches_of_a_step_alike_where_it_is_told_to(tmp_path):
    texts = [{"text": "a" * length} for length in (3, 9, 4, 12, 5, 7, 10, 6)]
    sequences = opened(tmp_path, write_lines(tmp_path / "texts.jsonl", texts), packing=False, length=16).train
    portions = Portions(4, 2, 2, 1)
    each, alike = BatchStream(sequences, portions), BatchStream(sequences, portions, grouped=Grouping(alike=0))
    steps = [[batch["input_ids"].shape[1] for batch in step] for step in islice(each, 2)]
    assert any(len(set(lengths)) > 1 for lengths in steps)
    assert [[batch["input_ids"].shape[1] for batch in step] for step in islice(alike, 2)] == [
        [max(lengths)] * len(lengths) for lengths in steps
    ]
