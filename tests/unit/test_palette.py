"""The palette: colours that people with any kind of colour vision can tell apart, and which no file has beside it.

What somebody sees who lacks one kind of cones: the matrices of Machado, Oliveira and Fernandes (2009), at full severity, on
linear RGB. Distances are those of CIELAB: 2 is just seen, 10 is another colour at a glance.
"""

import re
from itertools import combinations
from pathlib import Path

import pytest

from zero3d.spec.palette import CATEGORIES, INKS, RUNS, category, light
from zero3d.train.comparison import CATEGORIES as COMPARED

ROOT = Path(__file__).parents[2]
VISIONS = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
STATES = ("parameters", "gradients", "optimizer", "activations")
MARKED = ("raw", "average", "held", "saved", "bad", "slow")
OWN = {"src/zero3d/spec/palette.py", "src/zero3d/tools/page/paint.py"}


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb):
    r, g, b = (min(1.0, max(0.0, part)) for part in rgb)
    x, y, z = (
        0.4124 * r + 0.3576 * g + 0.1805 * b,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        0.0193 * r + 0.1192 * g + 0.9505 * b,
    )
    f, h, k = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.9505, y, z / 1.089))
    return 116 * h - 16, 500 * (f - h), 200 * (h - k)


def distance(one, other, vision):
    seen = [
        lab([sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in VISIONS[vision]])
        for colour in (one, other)
    ]
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_categories_can_be_told_apart_and_those_of_training_at_a_glance(ground, vision):
    for one, other in combinations(CATEGORIES, 2):
        apart = distance(CATEGORIES[one][ground], CATEGORIES[other][ground], vision)
        assert apart >= (25 if {one, other} <= {*STATES} else 12), (one, other, apart)
    for ink in MARKED:
        for other in {*MARKED} - {ink}:
            far = 3 if {ink, other} == {"held", "bad"} else 8  # a line, and a cross that is named in a legend
            assert distance(INKS[ink][ground], INKS[other][ground], vision) >= far, (ink, other)


def test_every_name_of_memory_in_tables_and_pictures_means_a_category():
    assert [category(name) for name in COMPARED] == [
        "parameters",
        "gradients",
        "optimizer",
        "padding",
        "temporary",
        "activations",
    ]
    assert category("temporary: gathered") == "gathered"
    assert category("device: reserved") is None
    assert light("optimizer states") == CATEGORIES["optimizer"].light
    assert light("text") == INKS["text"].light


def test_pictures_and_pages_have_no_colours_of_their_own():
    """Files that draw: of the package, of the benchmarks and of the examples; a grey is no colour."""
    files = [
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("src/**/*.css"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("examples/**/*.py"),
    ]
    drawing = [
        path
        for path in files
        if re.search(r"savefig|matplotlib|<svg|xmlns", path.read_text()) or "tools/page" in str(path)
    ]
    assert len(drawing) > 10
    for path in drawing:
        if str(path.relative_to(ROOT)) in OWN:
            continue
        own = {
            each
            for each in re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text())
            if len({each[1:3], each[3:5], each[5:7]}) > 1
        }
        assert not own, f"{path}: {own} are not of spec/palette.py"
    assert len(set(RUNS)) == len(RUNS)
