"""Images in plans and dry runs: one in each sequence, of the models whose towers run without values."""

import re
from functools import cache

import pytest
import torch
import vision

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.images import find_images
from zero3d.tools.sim.model_spec import trace
from zero3d.tools.sim.rank import dry_run
from zero3d.tools.sim.units import find_part_names

TRACED = ("gemma3", "internvl", "llava", "paligemma")  # the others read values
LENGTH = 24


@cache
def traced(family, packed):
    return trace(vision.model(family), LENGTH, packed=packed)


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_a_family_whose_tower_runs_without_values_has_an_image_a_sequence(family):
    images = find_images(vision.model(family), LENGTH, packed=False)
    if family not in TRACED:
        assert images is None
        return
    assert images.tokens == 4
    made = images.of(torch.zeros(3, LENGTH, dtype=torch.int64))
    real = vision.micro_batch(family, torch.Generator().manual_seed(0), sequences=3, length=LENGTH)
    assert {name: t.shape for name, t in made.items()} == {
        name: t.shape for name, t in real.items() if name not in ("input_ids", "labels")
    }


def test_packed_sequences_have_none_and_short_ones_no_room_for_one():
    model = vision.model("llava")
    assert find_images(model, LENGTH, packed=True) is None
    assert find_images(model, 4, packed=False).tokens == 4
    assert find_images(model, 3, packed=False) is None


@pytest.mark.long
@pytest.mark.parametrize(("family", "packed", "told"), [
    ("llava", False, "every sequence was traced with an image of 4 tokens"),
    pytest.param("llava", None, "every sequence was traced with an image of 4 tokens", marks=pytest.mark.long),
    ("llava", True, "text alone was traced"),
    pytest.param("idefics3", False, "text alone was traced", marks=pytest.mark.long),
])  # fmt: skip
def test_a_plan_says_what_was_traced(family, packed, told):
    notes = evaluate(traced(family, packed), cluster("a6000", 1, 1), ParallelPlan()).notes
    assert [note.startswith(told) for note in notes].count(True) == 1


def test_the_tower_counts_with_the_embedding():
    seen, unseen = (traced("llava", packed) for packed in (False, True))
    work = [spec.parts[0].operations for spec in (seen, unseen)]
    tower = vision.model("llava").model
    read = sum(
        p.numel() for p in (*tower.vision_tower.parameters(), *tower.multi_modal_projector.parameters()) if p.dim() == 2
    )
    assert work[1].matrices == 0
    assert work[0].matrices * LENGTH >= 2 * read * 4  # of every patch
    assert work[0].kept_whole > work[1].kept_whole
    assert [part.operations.matrices for part in seen.blocks] == [part.operations.matrices for part in unseen.blocks]


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_blocks_of_a_plan_are_the_language_models(family):
    made = vision.model(family)
    language = next(name for name, module in made.named_modules() if module is made.model.get_decoder())
    assert find_part_names(made).blocks == (f"{language}.layers.0", f"{language}.layers.1")


def simulated(path, stage):
    """What a dry run of the model in this folder says of images."""
    tree = {"model": {"path": path}, "data": {"length": LENGTH, "packing": False}, "zero": {"stage": stage}}
    try:
        return dry_run(load(tree), 0, 2).images
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(("stage", "said"), [
    (3, r"its vision tower, .* reads values of tensors .* pass zero.stage=2"),
    pytest.param(2, r"^as text alone$", marks=pytest.mark.long),
])  # fmt: skip
def test_a_dry_run_says_what_it_saw_and_refuses_a_tower_that_reads_values(tmp_path, alone, stage, said):
    vision.model("qwen2_vl").save_pretrained(tmp_path)
    assert re.search(said, alone(simulated, str(tmp_path), stage))
