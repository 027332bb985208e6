"""Sources with weights: one order at every dp, passes that miss and repeat nothing, what is refused."""

from fractions import Fraction
from itertools import chain

import numpy
import pytest
from corpora import opened, stream, write_lines

from zero3d.config import Data, DataSource, load, to_yaml
from zero3d.config.sources import parts_of
from zero3d.data.batches import BatchStream, Portions, validation_batches
from zero3d.data.dataset import open_data
from zero3d.data.mixture import Mixture
from zero3d.data.orders import MixedOrder
from zero3d.errors import ConfigError, DataError

WEIGHTS = [[1, 1], [3, 1], [0.7, 0.2, 0.1], [1, 2, 3, 4, 5], [0.999, 0.001], [1 / 3, 2 / 3]]


def mixed(tmp_path, sizes=(5, 9, 2), weights=(0.5, 0.3, 0.2), **options):
    """Sources of so many sequences of 8 tokens; the first token of each is its source."""
    paths = []
    for source, size in enumerate(sizes):
        paths.append(tmp_path / f"s{source}.npy")
        rows = numpy.arange(8 * size).reshape(size, 8) % 250
        rows[:, 0], rows[:, 1] = source, numpy.arange(size)
        numpy.save(paths[-1], rows)
    sources = tuple(map(DataSource, map(str, paths), weights or [None] * len(sizes)))
    data = Data(train=sources, length=8, cache=str(tmp_path / "cache"), **options)
    return open_data(data, None, 256)


def taken(train, steps, dp=1, state=None, batch=8, **options):
    """(source, number within it) of each sample of each step, in rank order, and the place after them."""
    streams = [BatchStream(train, Portions(batch, 2, batch // dp // 2, dp), rank=r, **options) for r in range(dp)]
    for each in streams:
        each.restore(state or each.state())
    found = [
        [(int(row[0]), int(row[1])) for each in streams for micro in next(each) for row in micro["input_ids"]]
        for _ in range(steps)
    ]
    return found, streams[0].state()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_source_has_its_share_at_every_place(weights):
    counts, weights = [7] * len(weights), [Fraction(repr(float(weight))) for weight in weights]
    order = MixedOrder(counts, weights, 0, True)
    seen = [0] * len(weights)
    for place in range(2000):
        assert order.taken(place) == seen
        source, own = order.locate(place)
        assert own == seen[source]
        seen[source] += 1
        shares = [abs(n - (place + 1) * w / sum(weights)) for n, w in zip(seen, weights, strict=True)]
        assert max(shares) < len(weights)


def test_a_place_far_away_is_found_without_those_before_it():
    order = MixedOrder([10, 10], [Fraction(1, 3), Fraction(2, 3)], 0, True)
    far = 10**15
    assert sum(order.taken(far)) == far
    assert len(order.samples(far, far + 3)) == 3


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("packing", [True, False])
def test_the_order_is_the_same_at_every_dp_and_after_going_on_at_another(tmp_path, dp, packing):
    train = mixed(tmp_path, packing=packing).train
    whole, _ = taken(train, 12)
    assert taken(train, 12, dp)[0] == whole
    _, state = taken(train, 5, dp)
    assert taken(train, 7, 1, state)[0] == whole[5:]
    assert taken(train, 7, 4, state)[0] == whole[5:]


def test_no_sample_comes_twice_or_is_lost_within_a_pass_over_its_source(tmp_path):
    sizes = (5, 9, 2)
    steps, _ = taken(mixed(tmp_path, sizes).train, 20, seed=3)
    for source, size in enumerate(sizes):
        own = [number for of, number in chain(*steps) if of == source]
        passes = [own[first : first + size] for first in range(0, len(own) - size + 1, size)]
        assert len(passes) > 1
        assert all(sorted(each) == list(range(size)) for each in passes)
    assert len({tuple(number for of, number in chain(*steps[i : i + 4]) if of == 1) for i in (0, 8)}) == 2


def test_without_weights_an_epoch_shows_every_sequence_once(tmp_path):
    train = mixed(tmp_path, weights=None).train
    steps, state = taken(train, 2)
    assert sorted(chain(*steps)) == [(s, n) for s, size in enumerate((5, 9, 2)) for n in range(size)]
    assert (state["epoch"], state["index"], state["sequences"]) == (1, 0, 16)


def test_a_source_of_weight_0_is_evaluated_and_never_trained_on(tmp_path):
    data = mixed(tmp_path, (5, 9, 4), (1, 1, 0), validation=0.25)
    assert {source for source, _ in chain(*taken(data.train, 8)[0])} == {0, 1}
    assert [member.name for member in data.validation.members] == ["s0", "s1", "s2"]


def test_a_fraction_is_held_out_of_each_source_and_evaluated_one_after_another(tmp_path):
    data = mixed(tmp_path, (8, 12, 4), validation=0.25)
    assert [len(member.samples) for member in data.validation.members] == [2, 3, 1]
    assert [len(member.samples) for member in data.train.members] == [6, 9, 3]
    rows = [row for batch in validation_batches(data.validation, 2) for row in batch["labels"] if (row >= 0).any()]
    assert [int(row[1]) for row in rows] != []
    assert len(rows) == 6
    assert len(list(validation_batches(data.validation, 1, limit=1))) == 3
    padding = data.validation[len(data.validation)]
    assert (padding["labels"] < 0).all()
    assert any("source s1: 30.0% of the samples; an epoch passes 0.6 times over it" in note for note in data.notes)


def test_a_list_of_plain_paths_is_one_source_as_ever(tmp_path):
    one, two = stream(tmp_path, 40, "a.npy"), stream(tmp_path, 40, "b.npy")
    data = opened(tmp_path, one, two)
    assert not isinstance(data.train, Mixture)
    assert data.train.documents == 2
    single = open_data(Data(train=(DataSource(str(one), 3.0),), length=8, cache=str(tmp_path / "cache")), None, 256)
    assert not isinstance(single.train, Mixture)


def test_other_weights_or_sources_are_no_continuation(tmp_path):
    train = mixed(tmp_path).train
    _, state = taken(train, 3)
    with pytest.raises(
        DataError, match=r"weights was 0\.5, 0\.3, 0\.2 and is now 0\.5, 0\.2, 0\.3.*weights in data\.train"
    ):
        taken(mixed(tmp_path, weights=(0.5, 0.2, 0.3)).train, 1, state=state)
    with pytest.raises(DataError, match="are not those of the checkpoint"):
        taken(mixed(tmp_path, (5, 9), (0.5, 0.3)).train, 1, state=state)
    with pytest.raises(DataError, match="are not those of the checkpoint"):
        taken(opened(tmp_path, tmp_path / "s1.npy").train, 1, state=state)


def test_each_source_has_a_format_and_a_name_of_its_own(tmp_path):
    write_lines(tmp_path / "a.data", [{"text": "hello there"}] * 3)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("some other text")
    sources = [{"path": str(tmp_path / "a.data"), "format": "jsonl"}, str(tmp_path / "sub" / "a.txt")]
    config = load({"data": {"train": sources, "tokenizer": "bytes"}})
    assert config.data.train == (DataSource(sources[0]["path"], None, "jsonl"), DataSource(sources[1]))
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "again.yaml") == config
    assert load(None, [f"data.train=[{{path: {tmp_path}/a.txt, weight: 2}}]"]).data.train[0].weight == 2.0
    assert [(part.name, part.format) for part in parts_of(config.data.train, "auto")] == [
        ("a", "jsonl"),
        ("a~2", "auto"),
    ]


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (
            [{"path": "a", "weight": -1}, {"path": "b", "weight": 1}],
            "has a with the weight -1: a weight is a number from 0",
        ),
        ([{"path": "a", "weight": float("nan")}], "has a with the weight nan: a weight is a number from 0"),
        ([{"path": "a", "weight": "much"}], "has a with the weight much"),
        ([{"path": "a", "weight": True}], "has a with the weight True"),
        ([{"path": "a", "weight": 0}, {"path": "b", "weight": 0.0}], r"weights that are all 0 \(2 sources\)"),
        ([{"path": "a", "weight": 1}, "b"], "weights for 1 of 2 sources: give b one, or none any"),
        ([{"path": "a", "wieght": 1}], "the key wieght: a source has path, weight, format"),
        ([{"weight": 1}], "a source whose path is None"),
        ([{"path": "a", "format": "csv"}], "a with the format 'csv': take auto, text"),
        ([{"path": "a"}, 3], "found 3 among them"),
    ],
)
def test_a_source_that_cannot_be_is_refused_in_one_line(train, why):
    with pytest.raises(ConfigError, match=rf"^data\.train {why}|^data\.train takes .*{why}|^data\.train has .*{why}"):
        load({"data": {"train": train}})


def test_a_weight_of_what_is_only_evaluated_is_refused():
    with pytest.raises(ConfigError, match="a a weight, but evaluates all of it: leave the weight out"):
        load({"data": {"validation": [{"path": "a", "weight": 1}]}})
