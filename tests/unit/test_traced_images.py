"""Images in plans and dry runs: a vision tower is traced on shapes, and counts as parts of a plan."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import vision

import zero3d.tools.vision
from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.models.images import repeated, tower_output, tower_parameters
from zero3d.tools.plan.emit import plan_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.footprint import footprints
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.kernels import KERNELS, works
from zero3d.tools.plan.rank_model import model_chunks
from zero3d.tools.plan.shapes import of_params
from zero3d.tools.plan.spec import Forward, ModelSpec, ParallelPlan, Patches
from zero3d.tools.plan.spec_json import from_json, to_json
from zero3d.tools.plan.traffic import _gathers
from zero3d.tools.sim.images import find_images
from zero3d.tools.sim.known import LARGEST, KnownValues
from zero3d.tools.sim.model_spec import open_spec, outline, trace
from zero3d.tools.sim.rank import dry_run
from zero3d.tools.sim.tower import measure_tower, operations_of
from zero3d.tools.sim.units import find_part_names
from zero3d.tools.vision.tiny import tiny_model

LENGTH = 48
TYPES = json.loads((Path(zero3d.tools.vision.__file__).parent / "types.json").read_text())["types"]
SIXTEEN = Patches(16)
OFTEN = ("llava", "qwen3_vl")
FAMILIES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in sorted(vision.EVERY)]
CARD = cluster("a6000", 8, 1)
SLOW = replace(CARD, gpu=replace(CARD.gpu, flops=1e9, bandwidth=1e9))  # kernels take longer than their launches


def made(family, trained):
    """A tiny model. trained: all of its tower, its projector, or none."""
    model = vision.model(family)
    for p, name in tower_parameters(model).items():
        p.requires_grad_(trained == "all" or (trained == "projector" and "projector" in name))
    return model


@cache
def traced(trained="all", family="qwen3_vl", packed=False):
    """The spec of a tiny model."""
    return trace(made(family, trained), LENGTH, packed=packed, patches=SIXTEEN)


@cache
def operations(family, trained="all", patches=SIXTEEN):
    """What its tower does: before its blocks, in each of them, behind them."""
    model = made(family, trained)
    images = find_images(model, LENGTH, packed=False, patches=patches)
    found, _ = measure_tower(model, images)
    return [operations_of(seen, name in images.blocks, LENGTH, False) for name, seen in found.items()]


def towers(spec):
    return [part for part in spec.parts if part.kind == "tower"]


# --- what a sequence has ------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_what_the_processor_would_make(family):
    model = vision.model(family)
    images = find_images(model, LENGTH, packed=False, patches=SIXTEEN)
    if family == "gemma4":
        assert images is None, "its own image has more tokens than a sequence"
        return
    made = images.of(ids := torch.zeros(3, LENGTH, dtype=torch.int64))
    real = vision.micro_batch(family, torch.Generator().manual_seed(0), sequences=3, length=LENGTH)
    left_out = ("input_ids", "labels", "pixel_attention_mask")
    assert {name: t.dim() for name, t in made.items()} == {n: t.dim() for n, t in real.items() if n not in left_out}
    assert (ids == images.image).sum(1).tolist() == [images.tokens] * 3
    assert images.patches >= 16 or family in ("gemma3", "llava", "llava_next", "mistral3", "paligemma")
    with torch.no_grad():
        features = tower_output(
            model, {n: t for n, t in made.items() if not n.endswith("token_type_ids")}
        ).pooler_output
    assert sum(t.shape[:-1].numel() for t in features) == 3 * images.tokens


def test_patches_are_a_sequences_whatever_the_number_of_its_images():
    model = vision.model("qwen3_vl")
    four = find_images(model, LENGTH, packed=False, patches=Patches(60, images=4))
    assert (four.count, four.patches, four.tokens) == (4, 64, 16)
    assert four.inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    of_tiles = find_images(vision.model("llava"), LENGTH, packed=False, patches=Patches(9))
    assert (of_tiles.count, of_tiles.patches) == (3, 12)
    tiles = find_images(vision.model("llava"), LENGTH, packed=False, patches=Patches(3, tiles=True))
    assert (tiles.count, tiles.patches) == (3, 12)


def test_without_a_number_it_is_one_image_as_large_as_a_sequence_holds_and_at_most_a_megapixel():
    model = vision.model("qwen3_vl")
    assert find_images(model, LENGTH, packed=False).patches == 4 * 6 * 6
    assert find_images(model, 2048, packed=False).patches == 4 * 36 * 36, "1024 // 14 patches high and wide"


def test_more_patches_than_a_sequence_holds_are_refused_where_they_were_asked_for():
    model = vision.model("qwen3_vl")
    with pytest.raises(
        ConfigError, match=r"--patches 400: these images have 100 tokens, and a sequence 48: type --seq 101"
    ):
        find_images(model, LENGTH, packed=False, patches=Patches(400, asked=True))
    assert find_images(model, LENGTH, packed=False, patches=Patches(400)) is None


def test_values_of_whole_numbers_are_known_and_a_known_mask_chooses_as_many_rows():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        rows = torch.arange(6)
        hidden = torch.ones(6, 2)
        assert rows.tolist() == [0, 1, 2, 3, 4, 5]
        assert isinstance(hidden, FakeTensor)
        assert hidden[rows > 3].shape == (2, 2)
        hidden[rows > 3] = hidden[rows > 3] + 1
        assert isinstance(torch.arange(LARGEST + 1), FakeTensor)
        assert isinstance(torch.arange(1 << 14)[:, None] < torch.arange(1 << 14), FakeTensor)


# --- the tower as parts -------------------------------------------------------------------------


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_blocks_of_a_plan_are_the_language_models(family):
    made = vision.model(family)
    language = next(name for name, module in made.named_modules() if module is made.model.get_decoder())
    assert find_part_names(made).blocks == (f"{language}.layers.0", f"{language}.layers.1")


@pytest.mark.parametrize("family", [
    "qwen3_vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("llava", "qwen2_5_vl"))
])  # fmt: skip
def test_a_tower_has_all_of_its_parameters_and_stands_before_the_blocks(family):
    spec, model = traced(family=family), vision.model(family)
    of_tower = set(tower_parameters(model).values())
    named = [w.name for part in towers(spec) for unit in part.units for w in unit.weights]
    assert sorted(named) == sorted(of_tower)
    kinds = [part.kind for part in spec.parts]
    assert kinds == ["embedding", *["tower"] * kinds.count("tower"), "block", "block", "head"]
    assert spec.params == sum(p.numel() for p in model.parameters())
    assert from_json(ModelSpec, json.loads(json.dumps(to_json(spec)))) == spec


def kept_by(model, images):
    """Bytes that a real forward of the tower keeps for its backward, in bf16, on random pixels."""
    model = model.to(torch.bfloat16)
    given = repeated(images.inputs, images.count)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *given.values())}
    kept = {}

    def pack(t):
        kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = tower_output(model, given)
        torch.stack([t.sum() for t in output.pooler_output]).sum()
    return sum(s.nbytes() for key, s in kept.items() if key not in own)


def test_bytes_that_a_trained_tower_keeps_are_those_of_a_real_forward():
    model = vision.model("qwen2_5_vl")
    images = find_images(model, LENGTH, packed=False, patches=SIXTEEN)
    planned = LENGTH * sum(part.kept_whole for part in operations("qwen2_5_vl"))
    assert planned == pytest.approx(kept_by(model, images), rel=0.02)


@pytest.mark.parametrize("family", [pytest.param("llava", marks=pytest.mark.long), "qwen3_vl"])
def test_a_frozen_tower_keeps_nothing_and_has_no_backward(family):
    frozen, trained = operations(family, "none"), operations(family)
    assert [(part.back, part.kept_whole, part.transient, part.input) for part in frozen] == [(0, 0, 0, 0)] * len(frozen)
    assert [part.matrices for part in frozen] == [part.matrices for part in trained]
    assert [part.trained for part in frozen] == [part.trained for part in trained]
    for part in frozen:
        assert part.launches[0] > 0 < part.passed[0]
        assert part.launches[1] == part.passed[1] == 0
    backs = {part.back for part in trained[1:-1]}
    assert backs == {2} if family == "qwen3_vl" else backs == {0, 2}, "LLaVA's features are its last block but one's"


def test_seconds_of_a_frozen_tower_are_those_of_its_forward():
    for plan in (ParallelPlan(), ParallelPlan(stage=3, dp=2, compile=True)):
        frozen, trained = (evaluate(traced(which), SLOW, plan).seconds.parts["tower"] for which in ("none", "all"))
        assert 2 < trained / frozen < 3.5
        spec = traced("none")
        done = zip(spec.parts, works(spec, plan, SLOW, 1.0, KERNELS), strict=True)
        assert {work.backward for part, work in done if part.kind == "tower"} == {0}
    flops = [evaluate(traced(which), CARD, ParallelPlan()).flops for which in ("none", "all")]
    seen = LENGTH * sum(part.operations.matrices + part.operations.scores for part in towers(traced()))
    assert flops[1] - flops[0] > 1.8 * seen


def test_a_trained_projector_has_a_backward_and_what_is_before_it_none():
    *others, last = operations("llava", "projector")
    assert [part.back for part in others] == [0] * len(others)
    assert 1 < last.back < 2, "no gradient of its input"
    assert last.kept_whole > 0


@pytest.mark.long
def test_attention_of_a_window_costs_by_patches_and_of_an_image_by_their_square():
    small, large = (operations("qwen2_5_vl", "none", Patches(n)) for n in (16, 64))
    windowed, whole = ([parts[at].scores for parts in (small, large)] for at in (1, 2))
    assert windowed[1] == 4 * windowed[0]
    assert whole[1] == 16 * whole[0]
    assert large[1].matrices == 4 * small[1].matrices


def test_every_tp_and_sp_rank_runs_the_whole_tower():
    spec = traced()
    settings = ({}, {"tp": 2}, {"dp": 2, "sp": 2}, {"tp": 2, "sequence_parallel": True})
    plans = [ParallelPlan(**each) for each in settings]
    place = spec.parts.index(towers(spec)[1])
    block = spec.parts.index(spec.blocks[0])
    seconds = [[works(spec, plan, SLOW, 1.0, KERNELS)[i].forward for i in (place, block)] for plan in plans]
    assert len({tower for tower, _ in seconds}) == 1
    assert len({language for _, language in seconds}) > 1
    text = replace(spec, parts=tuple(part for part in spec.parts if part.kind != "tower"), patches=0)
    assert evaluate(spec, SLOW, plans[1]).seconds.parts["tp"] == evaluate(text, SLOW, plans[1]).seconds.parts["tp"]
    kept = [footprints(spec, plan)[spec.parts[place]].kept for plan in plans]
    assert len(set(kept)) == 1


def test_units_of_a_frozen_tower_are_gathered_once_a_micro_batch():
    plan = ParallelPlan(dp=2, stage=3, accumulate=3)
    sent = [evaluate(traced(which), CARD, plan).traffic["all_gather dp"] for which in ("none", "all")]
    names = {u.name.partition("/")[0] for part in towers(traced("none")) for u in part.units} - {"root"}
    once, twice = (_gathers(traced(which), ParallelPlan(), 0, 1, 1) for which in ("none", "all"))
    assert {once[f"0 {name}"] for name in names} == {1}
    assert {twice[f"0 {name}"] for name in names} == {1, 2}, (
        "a table of places is looked up in, and not multiplied with"
    )
    assert sent[0] < sent[1]


def test_a_trained_towers_blocks_are_recomputed_and_a_frozen_ones_are_not():
    for trained, again in (("all", True), ("none", False)):
        spec = traced(trained)
        none, full = (footprints(spec, ParallelPlan(activations=kind)) for kind in ("none", "full"))
        block, last = towers(spec)[1], towers(spec)[-1]
        assert (full[block].kept < none[block].kept) is again
        assert full[last].kept == none[last].kept, "what is behind the blocks is none"
        seconds = [
            evaluate(spec, CARD, ParallelPlan(activations=kind)).seconds.parts["tower"] for kind in ("none", "full")
        ]
        assert (seconds[1] > seconds[0]) is again


def test_the_first_stage_of_a_pipeline_has_the_tower_and_its_seconds():
    spec, plan = traced(), ParallelPlan(pp=2, accumulate=4)
    first, second = model_chunks(spec, plan)
    assert [part for part in first if part.kind == "tower"] == towers(spec)
    assert not [part for part in second if part.kind == "tower"]
    heavy = replace(spec, parts=tuple(
        replace(p, operations=replace(p.operations, matrices=1e6 * p.operations.matrices)) if p.kind == "tower" else p
        for p in spec.parts
    ))  # fmt: skip
    parts = evaluate(heavy, CARD, plan).seconds.parts
    assert parts["tower"] > 0.9 * sum(parts.values())


def test_only_plans_with_images_have_a_tower_among_their_seconds():
    assert "tower" in evaluate(traced(), CARD, ParallelPlan()).seconds.parts
    plain = of_params(10**6, 64)
    assert plain.patches == 0
    assert "tower" not in evaluate(plain, CARD, ParallelPlan()).seconds.parts


def test_pixels_of_a_step_are_on_the_device():
    spec = traced()
    one, four = (evaluate(spec, CARD, ParallelPlan(micro_batch=2, accumulate=n)).memory.parts["batch"] for n in (1, 4))
    assert spec.pixels == 16 * 3 * 2 * 14 * 14 * 4 + 3 * 8
    assert one == 2 * (spec.pixels + 16 * LENGTH)
    assert four == 4 * one


def test_the_forward_of_a_large_frozen_tower_may_be_the_fullest_instant():
    spec = traced("none")
    lora = replace(spec, seeing=9 * spec.seeing, parts=tuple(
        replace(p, units=tuple(replace(u, weights=tuple(replace(w, trainable=False) for w in u.weights)) for u in p.units))
        for p in spec.parts
    ))  # fmt: skip
    memory = evaluate(lora, CARD, ParallelPlan(micro_batch=64, activations="full")).memory
    assert memory.instant == "forward of the vision tower"
    assert memory.parts["temporary"] == 9 * spec.seeing * 64 * LENGTH > 0


@pytest.mark.long
@pytest.mark.parametrize(("family", "packed", "told"), [
    ("llava", False, "every sequence was traced with 4 images of 16 patches and 16 tokens"),
    ("llava", None, "every sequence was traced with 4 images of 16 patches and 16 tokens"),
    ("qwen3_vl", True, "every sequence was traced with an image of 16 patches and 4 tokens"),
    ("gemma4", False, "text alone was traced"),
])  # fmt: skip
def test_a_plan_says_what_was_traced(family, packed, told):
    notes = evaluate(traced("all", family, packed), CARD, ParallelPlan()).notes
    assert [note.startswith(told) for note in notes].count(True) == 1


@pytest.mark.long
@pytest.mark.parametrize("row", [
    row for row in TYPES if row["trained"] == "trained" and row["type"] != "t5gemma2"  # which does not run on shapes
], ids=lambda row: row["type"])  # fmt: skip
def test_axes_that_a_type_was_tried_on_are_those_that_a_search_offers(row):
    model = tiny_model(row["type"])
    spec = outline(model, LENGTH)
    cut = any(w.cut is not None for part in spec.blocks for unit in part.units for w in unit.weights)
    assert ("yes" if spec.chain else "no", "yes" if cut else "no") == (row["pp"], row["tp"])


# --- against the engine -------------------------------------------------------------------------

MANY = Patches(144)
SETTINGS = {
    "trained": {},
    "adapters": {"lora": {"rank": 4}},
    "recomputed": {"activations": "full", "zero": {"stage": 2}},
    "frozen": {"lora": {"rank": 4}, "activations": "full", "zero": {"stage": 2}},
    "tp": {"mesh": {"tp": 2}},
    "sp": {"mesh": {"sp": 2}},
}


def simulated(path, tree):
    """What a dry run of the first rank of two says: its peak, what it sends, and its images."""
    config = load(tree)
    found = dry_run(config, 0, 2, patches=MANY)
    sent = {}
    for entry in found.traffic:
        sent[f"{entry.op} {entry.axis}"] = sent.get(f"{entry.op} {entry.axis}", 0) + entry.nbytes
    return found.peak.nbytes, sent, found.images


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), [
    *(("qwen3_vl", name) for name in SETTINGS),
    *(("qwen2_5_vl", name) for name in ("trained", "frozen")),
    ("llava", "frozen"),
])  # fmt: skip
def test_a_plan_has_the_peak_and_the_messages_of_the_dry_run(tmp_path, alone, family, name):
    vision.model(family).save_pretrained(tmp_path)
    data = {"length": LENGTH, "packing": False}
    tree = {
        "model": {"path": str(tmp_path)},
        "data": data,
        "zero": {"stage": 3},
        "train": {"batch": 8, "micro_batch": 2},
    }
    tree |= SETTINGS[name]
    peak, sent, said = alone(simulated, str(tmp_path), tree)
    assert "of 144 patches" in said or family in ("llava", "gemma3")
    config = load(tree)
    spec = open_spec(str(tmp_path), LENGTH, config.model, config.lora, forward=Forward(patches=MANY))
    planned = evaluate(spec, CARD, plan_of(config, 2))
    assert planned.memory.allocated == pytest.approx(peak, rel=0.06)
    for key in ("all_gather dp", "reduce_scatter dp", "all_reduce tp"):
        assert planned.traffic.get(key, 0) == pytest.approx(sent.get(key, 0), rel=0.08), key
