"""Span tables: every token exactly once, no span over two documents, the same targets."""

from itertools import pairwise

import numpy
import pytest
import torch
from corpora import opened, stream, write_lines

from zero3d.data.packing import Documents, best_fit, best_fit_in_two, count_targets, hold_out, plan
from zero3d.errors import ConfigError


def random_documents(seed, examples):
    """Documents with gaps between them (what was held out), some of them examples."""
    draw = numpy.random.default_rng(seed)
    sizes = draw.integers(1, 40, draw.integers(1, 60))
    stops = numpy.cumsum(sizes + draw.integers(0, 2, len(sizes)) * 5)
    flags = numpy.full(len(sizes), bool(examples)) if examples != "mixed" else draw.random(len(sizes)) < 0.5
    targets = (draw.random(int(stops[-1])) < 0.4).astype(numpy.uint8)
    return Documents(stops - sizes, stops, flags), targets


def covered(spans):
    return numpy.concatenate([numpy.arange(start, stop) for start, stop in spans] or [numpy.zeros(0, int)])


def owners(documents, spans):
    return numpy.searchsorted(documents.stops, spans[:, 0], side="right")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("examples", [False, True, "mixed"])
def test_random_documents_are_packed_without_loss_or_mixing(seed, packing, examples):
    documents, targets = random_documents(seed, examples)
    length = int(numpy.random.default_rng(seed).integers(2, 50))
    for marks in (None, targets):
        if packing and not examples and marks is not None:
            continue  # text is learnt throughout
        made = plan(documents, length, packing, marks)
        spans, pointers = made.spans, made.pointers
        owner = owners(documents, spans)
        assert (spans[:, 0] >= documents.starts[owner]).all()
        assert (spans[:, 1] <= documents.stops[owner]).all()
        used = numpy.add.reduceat(spans[:, 1] - spans[:, 0], pointers[:-1]) if len(spans) else numpy.zeros(0, int)
        assert (used >= 1).all()
        assert (used <= length).all()
        tokens = covered(spans)
        assert len(numpy.unique(tokens)) == len(tokens)
        reachable = sum(
            min(size, length) if example else size
            for size, example in zip(documents.stops - documents.starts, documents.examples, strict=True)
        )
        lost = reachable - len(tokens)
        assert lost == 0 if not made.dropped else lost <= made.dropped * length
        assert made.truncated == sum((documents.stops - documents.starts)[documents.examples] > length)
        for first, last in pairwise(pointers):
            assert count_targets(numpy.sort(spans[first:last], axis=0), marks).sum() > 0
        if not packing:
            assert (numpy.diff(pointers) == 1).all()


def test_packed_text_fills_every_sequence_but_the_last():
    documents, _ = random_documents(3, False)
    made = plan(documents, 16, True, None)
    used = numpy.add.reduceat(made.spans[:, 1] - made.spans[:, 0], made.pointers[:-1])
    assert (used[:-1] == 16).all()
    assert (numpy.diff(covered(made.spans)) > 0).all()  # in the documents' order


def written_out_best_fit(sizes, length):
    """How many bins the textbook's loop needs."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, index) for index, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(length - size)
    return len(rooms)


@pytest.mark.parametrize("seed", range(4))
def test_examples_stay_whole_and_fill_as_few_sequences_as_the_written_out_loop(seed):
    length = (32, 32, 100, 7)[seed]
    sizes = numpy.random.default_rng(seed).integers(1, length + 1, 300)
    order, pointers = best_fit(sizes, length)
    assert sorted(order.tolist()) == list(range(300))
    assert numpy.add.reduceat(sizes[order], pointers[:-1]).max() <= length
    assert len(pointers) - 1 == written_out_best_fit(sizes.tolist(), length)


def written_out_in_two(sizes, length, patches, most):
    """The bins of best fit in two, item by item: [(room for tokens, room for patches, items)]."""
    bins = []
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], -patches[item])):
        fits = [each for each in bins if each[0] >= sizes[item] and each[1] >= patches[item]]
        if not fits:
            bins.append([length, most, []])
            fits = bins[-1:]
        chosen = min(fits, key=lambda each: (each[0], -each[1]))
        chosen[0], chosen[1] = chosen[0] - sizes[item], chosen[1] - patches[item]
        chosen[2].append(item)
    return sorted(sorted(items) for _, _, items in bins)


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_in_two_has_room_for_tokens_and_patches_and_chooses_as_written_out(seed):
    draw = numpy.random.default_rng(seed)
    length, most = (int(number) for number in draw.integers(1, 40, 2))
    sizes, patches = (draw.integers(low, high + 1, 40) for low, high in ((1, length), (0, most)))
    order, pointers = best_fit_in_two(sizes, length, patches, most)
    bins = [order[start:stop].tolist() for start, stop in pairwise(pointers)]
    assert all(sizes[each].sum() <= length and patches[each].sum() <= most for each in bins)
    assert sorted(sorted(each) for each in bins) == written_out_in_two(sizes.tolist(), length, patches.tolist(), most)
    assert [each[0] for each in bins] == sorted(each[0] for each in bins)


def test_items_of_one_size_are_placed_together_in_their_order():
    order, pointers = best_fit(numpy.full(200_000, 7), 32)
    assert len(pointers) - 1 == 50_000
    assert order.tolist() == list(range(200_000))


def test_targets_are_counted_without_a_segment_s_first_token():
    targets = numpy.array([1, 1, 0, 1, 1, 0, 0, 1], numpy.uint8)
    spans = numpy.array([[0, 3], [3, 4], [4, 8]])
    assert count_targets(spans, targets).tolist() == [1, 0, 1]
    assert count_targets(spans, None).tolist() == [2, 0, 3]


def test_a_fraction_is_held_out_at_even_distances_and_at_least_one():
    stops = numpy.arange(1, 101) * 3
    documents = Documents(stops - 3, stops, numpy.zeros(100, bool))
    train, held, note = hold_out(documents, 0.04)
    assert (held.starts // 3).tolist() == [12, 37, 62, 87]
    assert len(train.starts) == 96
    assert note == "100 documents (empty files have none): 4 held out, 96 to train on"
    assert len(hold_out(documents, 0.001)[1].starts) == 1


def test_of_a_single_stream_the_end_is_held_out(tmp_path):
    data = opened(tmp_path, stream(tmp_path, 100), validation=0.1, length=10)
    assert [data.train.count(), data.validation.count()] == [(90, 81), (10, 9)]
    assert data.validation[0]["input_ids"].tolist() == list(range(90, 100))
    assert "the last 10 of 100 tokens held out (there is one document)" in data.notes
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "one", "completion": "two"}])
    with pytest.raises(ConfigError, match="one document of 7 tokens leaves nothing"):
        opened(tmp_path, path, validation=0.1)


def test_files_can_be_held_out(tmp_path):
    other = write_lines(tmp_path / "b.jsonl", [{"text": "held"}])
    data = opened(tmp_path, stream(tmp_path, 20), validation=(str(other),))
    assert bytes(data.validation[0]["input_ids"].tolist()) == b"held\0\0\0\0"
    assert len(data.train) == 3


def test_positions_and_labels_start_again_in_every_segment_and_in_the_padding(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "defg"}, {"text": "h"}])
    data = opened(tmp_path, path, length=6)
    first, second = data.train[0], data.train[1]
    assert bytes(first["input_ids"].tolist()) == b"abc\0de"
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1]
    assert first["labels"].tolist() == [-100, ord("b"), ord("c"), 0, -100, ord("e")]
    assert bytes(second["input_ids"].tolist()) == b"fg\0h\0\0"
    assert second["position_ids"].tolist() == [0, 1, 2, 0, 1, 0]
    assert second["labels"].tolist() == [-100, ord("g"), 0, -100, 0, -100]
    assert {tensor.dtype for tensor in first.values()} == {torch.int64}
    assert data.notes == ["training: 1 file, 3 documents, 11 tokens (7 targets), 2 sequences of 6 (91.7% full)"]


def test_what_is_truncated_or_without_a_target_is_counted(tmp_path):
    pairs = [("a", "bcdefghijk"), ("a prompt that is too long", "never seen"), ("ab", "c")]
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": p, "completion": c} for p, c in pairs])
    data = opened(tmp_path, path)
    assert [bytes(data.train[i]["input_ids"].tolist()) for i in range(2)] == [b"abcdefgh", b"abc\0\0\0\0\0"]
    assert data.notes[1:] == ["training: 2 examples truncated to 8 tokens; 1 sample without a target dropped"]


def test_without_packing_a_micro_batch_is_padded_on_the_right_and_has_no_positions(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abcdefghij"}, {"text": "kl"}])
    train = opened(tmp_path, path, packing=False).train
    batch = train.stack([train[i] for i in range(3)])
    assert set(batch) == {"input_ids", "labels"}
    assert [bytes(row.tolist()) for row in batch["input_ids"]] == [b"abcdefgh", b"ij\0\0\0\0\0\0", b"kl\0\0\0\0\0\0"]
    assert batch["labels"][2].tolist() == [-100, ord("l"), 0] + [-100] * 5


def test_without_packing_a_micro_batch_may_be_padded_to_a_multiple(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abcd"}])
    batch = (train := opened(tmp_path, path, packing=False, multiple=4).train).stack([train[0]])
    assert bytes(batch["input_ids"][0].tolist()) == b"abcd\0\0\0\0"
    assert batch["labels"][0, 4:].tolist() == [0, -100, -100, -100]
