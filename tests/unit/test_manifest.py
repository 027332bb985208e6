"""The manifest by itself: boxes that are a tensor exactly once, and JSON that is read by type and range."""

import itertools
import json
import random

import pytest

from zero3d.checkpoint.fields import Field, parse_fields
from zero3d.checkpoint.manifest_parser import _mesh
from zero3d.checkpoint.tiling import TilingSums, tiling_fault
from zero3d.distributed.degrees import Degrees
from zero3d.errors import CheckpointError
from zero3d.shards.boxes import boxes
from zero3d.shards.cuts import Cut


def cells(box):
    return itertools.product(*(range(a, b) for a, b in box))


def fault_by_counting(shape, made):
    counted = dict.fromkeys(cells([(0, size) for size in shape]), 0)
    for box in made:
        for cell in cells(box):
            counted[cell] += 1
    return any(count != 1 for count in counted.values())


def cut_in_pieces(shape, rng):
    """Boxes of flat ranges, as ranks of any number save them, over tp or not."""
    tp = rng.choice([size for size in (1, 2) if shape and shape[-1] % size == 0] or [1])
    made = []
    for rank in range(tp):
        cut = Cut(len(shape) - 1, tp, rank) if tp > 1 else None
        local = cut.local_shape(shape) if cut else shape
        numel = 1
        for size in local:
            numel *= size
        edges = sorted({0, numel, *(rng.randrange(numel + 1) for _ in range(rng.randrange(4)))})
        for start, stop in itertools.pairwise(edges):
            for box in boxes(local, start, stop):
                made += [there for there, _ in cut.boxes(box, local)] if cut else [box]
    return made


def sums_to(shape, made):
    sums = TilingSums()
    for box in made:
        sums.add("state", box)
    return sums.whole("state", shape)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_of_any_ranks_are_a_tensor_once_and_without_one_of_them_they_are_not(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(4)))
    made = cut_in_pieces(shape, rng)
    rng.shuffle(made)
    assert tiling_fault(shape, made) is None
    assert sums_to(shape, made)
    assert not sums_to(shape, made[1:])
    assert not sums_to(shape, [*made, rng.choice(made)])
    assert "nothing" in tiling_fault(shape, made[1:])
    assert "2 boxes" in tiling_fault(shape, [*made, rng.choice(made)])
    for _ in range(10):
        moved = [list(map(list, box)) for box in made]
        if shape:
            edges = rng.choice(rng.choice(moved))
            edges[rng.randrange(2)] += rng.choice([1, -1])
        moved = [
            tuple((max(0, min(a, s)), max(0, min(b, s))) for (a, b), s in zip(box, shape, strict=True)) for box in moved
        ]
        if all(a < b for box in moved for a, b in box):
            assert (tiling_fault(shape, moved) is not None) == fault_by_counting(shape, moved)
            assert sums_to(shape, moved) != fault_by_counting(shape, moved)


@pytest.mark.parametrize("made", [
    [((0, 2),), ((1, 2),), ((2, 3),), ((3, 5),)], [((0, 1),), ((0, 1),), ((3, 4),), ((3, 4),), ((4, 5),)],
    [((0, 5),), ((0, 5),)], [],
])  # fmt: skip
def test_sums_are_no_count_of_elements(made):
    """As many elements as the tensor has, or their places adding up alike, are not enough."""
    assert not sums_to((5,), made)


def test_sums_keep_states_apart():
    sums = TilingSums()
    sums.add("m", ((0, 2), (0, 3)))
    sums.add("v", ((0, 1), (0, 3)))
    assert sums.whole("m", (2, 3))
    assert not sums.whole("v", (2, 3))
    assert not sums.whole("master", (2, 3))
    assert sums.whole("master", (0, 3))


def test_faults_say_where_they_are():
    assert tiling_fault((4, 3), [((0, 2), (0, 3)), ((2, 4), (0, 2))]) == "nothing at (2:4, 2)"
    assert tiling_fault((4, 3), [((0, 4), (0, 3)), ((1, 2), (1, 3))]) == "2 boxes at (1, 1:3)"
    assert tiling_fault((), []) == "nothing at ()"
    assert tiling_fault((0, 3), []) is None


@pytest.mark.parametrize(("text", "message"), [
    (b'{"a": 1, "a": 2}', "has the key 'a' twice"), (b"[" * 100_000, "nested too deep"), (b"\xff", "not UTF-8 text"),
    (b"1" * 10_000, "digits"), (b"", "Expecting value"),
])  # fmt: skip
def test_what_is_no_json_names_its_file(text, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_fields(text, "F.json")
    assert str(caught.value).startswith("F.json ")


@pytest.mark.parametrize(("value", "take", "message"), [
    (True, Field.integer, "x.y is True, but should be a whole number from 0"),
    (-1, Field.integer, "x.y is -1, but should be a whole number from 0"),
    (1.0, Field.integer, "x.y is 1.0, but should be a whole number from 0"),
    (10**400, Field.integer, "x.y is a number of 1329 bits"),
    (10**400, Field.number, "should be a finite number"),
    (float("nan"), Field.number, "x.y is nan, but should be a finite number"),
    ("x" * 999, Field.number, f"x.y is '{'x' * 59}..., but should be a finite number"),
    ("\ud800\n", Field.flag, "x.y is '\\ud800\\n', but should be true or false"),
    ([1], Field.text, "x.y is a list of 1, but should be a text"),
    ({}, Field.rows, "x.y is a mapping of 0, but should be a list"),
])  # fmt: skip
def test_values_of_another_type_or_range_name_file_and_field(value, take, message):
    field = parse_fields(b'{"x": {"y": 0}}', "F.json").entry("x").entry("y")._replace(value=value)
    with pytest.raises(CheckpointError) as caught:
        take(field)
    assert str(caught.value).startswith("F.json: ")
    assert message in str(caught.value)
    str(caught.value).encode()


def mesh_of_four_ranks(**folds):
    text = json.dumps({"mesh": {"pp": 1, "dp": 4, "tp": 1, **folds}, "parts": dict.fromkeys("0123", "")})
    fields = parse_fields(text.encode(), "manifest.json")
    return _mesh(fields, fields.entry("parts"))


def test_a_manifest_names_what_folds_dp_and_an_axis_that_it_does_not_name_is_1():
    assert mesh_of_four_ranks() == Degrees(1, 4, 1)
    assert mesh_of_four_ranks(ep=2) == Degrees(1, 4, 1, ep=2)
    for wrong, takes in ((3, "a divisor of dp, 4"), (8, "4"), (0, "1")):
        with pytest.raises(CheckpointError, match=rf"mesh\.ep.*{takes}"):
            mesh_of_four_ranks(ep=wrong)
