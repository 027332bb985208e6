"""`zero3d plan` on a run's images: how many patches its data have, what they take, and --patches."""

import json
from argparse import Namespace
from dataclasses import replace

import pytest
from pictures import record, save_data, save_model

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.tools.cli.main import main
from zero3d.tools.cli.plan_options import patches_of
from zero3d.tools.cli.planned_images import images_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.images import FileImages, Speed, as_json, cores, lines, percentile, with_mean_patches
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import Estimate, Memory, ModelSpec, Operations, ParallelPlan, Part, Patches, Seconds
from zero3d.tools.sim.sampled_records import sampled

MODEL = ModelSpec("m", (), 100, 8, 8, 1, 1, patches=64)
STEP = Estimate(
    Memory(0, 0, 0, 0, 0), Seconds(1.9, 2.0, 2.1, {"matrices": 1.5, "tower": 0.5}), {}, 900, 1.0
)  # of 1600 with padding
PLAN = ParallelPlan(dp=2, micro_batch=2, accumulate=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models with their processors, and one file of images and texts."""
    folder = tmp_path_factory.mktemp("run")
    for family in ("llava", "qwen3_vl"):
        save_model(folder / family, family, positions=256)
    save_data(folder, pictured=20, plain=5)
    return folder


def run(folder, family="qwen3_vl", rows=None, **data):
    """The configuration of a run on these data."""
    file = folder / "data.json"
    if rows is not None:
        file = folder / "rows.json"
        file.write_text(json.dumps(rows))
    given = {"train": str(file), "images": str(folder / "images"), "length": 64, "packing": False}
    return load({"model": {"path": str(folder / family)}, "data": given | data, "train": {"micro_batch": 2}})


def test_patches_are_those_of_the_files_own_sizes(folder):
    found, why = images_of(run(folder))
    assert why == ""
    assert (found.records, found.shown) == (25, 20)
    assert found.patches == Patches(16, 1)
    assert found.largest == 16
    assert 4 < found.mean < 16
    assert found.speed.files == 8
    assert found.speed.seconds > 0


def test_processors_of_one_size_count_tiles(folder):
    found, _ = images_of(run(folder, "llava"))
    assert found.patches == Patches(1, 1, tiles=True)


def test_packed_sequences_have_the_patches_of_all_their_documents(folder):
    alone, packed = (images_of(run(folder, packing=packing))[0] for packing in (False, True))
    assert packed.patches.images > alone.patches.images == 1
    assert packed.images > 1
    assert packed.largest <= sum([16] * packed.patches.images)


def test_a_budget_of_patches_is_a_sequences_share_of_it(folder):
    assert images_of(run(folder, patches=24))[0].patches.number == 12


def test_what_is_not_known_is_said(folder):
    assert images_of(None) == (None, "")
    assert images_of(load({"model": {"path": "demo"}})) == (None, " (demo has no processor)")
    assert images_of(run(folder, train="FILL-ME"))[1] == " (the file names no data)"
    texts = images_of(run(folder, rows=[record(answer="a red circle")]))
    assert texts == (None, " (no record of its data that was looked at has an image)")
    missing, why = images_of(run(folder, train=str(folder / "none.json")))
    assert missing is None
    assert "could not be read" in why


def test_records_are_a_sample_of_equal_chances_that_repeats(folder):
    config = run(folder)
    first, again = ([record.place for _, record in sampled(config, 6)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 6
    assert max(int(place.rpartition(" ")[2].strip(":")) for place in first) > 6, "not the first ones"


@pytest.mark.parametrize(("values", "place"), [([5], 0), (list(range(100)), 98), (list(range(101)), 99), ([1, 2], 1)])
def test_99_of_100_have_at_most_as_many(values, place):
    assert percentile(values) == place
    assert sum(value <= values[place] for value in values) >= 0.99 * len(values)


def test_cores_prepare_as_many_images_as_a_gpu_takes():
    file = FileImages(Patches(64), 32.0, 64, 1.5, 100, 80, Speed(8, 0.4))
    assert cores(STEP, PLAN, file) == pytest.approx(0.8 * 1.5 * 16 / 2 * 0.05 / 2.0)
    told, prepared = lines(MODEL, STEP, PLAN, file, asked=False)
    assert told == (
        "Images: 64 patches of a sequence are planned, which 99% of those with images do not exceed (mean 32.0 patches, "
        "largest 64; of 100 records of the data, of which 80% have images). A step is priced by the mean of all records."
    )
    assert prepared == (
        "The vision tower takes 25% of a step; 0.2 cores a GPU prepare its images, 20.0 images/s a core (measured here on "
        "8 files)."
    )
    assert as_json(MODEL, STEP, PLAN, file) == {
        "patches": 64, "tower_share": 0.25, "mean": 32.0, "largest": 64, "records": 100, "shown": 80,
        "images_per_second_and_core": pytest.approx(20), "cores_per_gpu": pytest.approx(0.24),
    }  # fmt: skip


def test_a_step_takes_the_mean_of_patches_and_memory_those_that_are_planned():
    """Of 64 patches 32 on the mean, which 80 % of records have: 0.4 of a tower's seconds."""
    file = FileImages(Patches(64), 32.0, 64, 1.5, 100, 80, None)
    text = gpt(2, 64, 4, 100, 1024)
    tower = Part("tower", (), Operations(8e6, 4e6, 2.0, back=0.5))
    model = replace(text, parts=(text.parts[0], tower, *text.parts[1:]), patches=64)
    plan, place = ParallelPlan(), cluster("a100-80", 1)
    planned, found = (priced(model, place, plan) for priced in (evaluate, with_mean_patches(evaluate, file)))
    assert found.memory == planned.memory
    assert found.tokens == planned.tokens
    parts, most = found.seconds.parts, planned.seconds.parts
    assert parts.pop("tower") == pytest.approx(0.4 * most.pop("tower"))
    assert parts == most
    whole = evaluate(text, place, plan).flops
    assert found.flops - whole == pytest.approx(0.4 * (planned.flops - whole))


def test_what_was_not_measured_is_said():
    told = list(lines(MODEL, STEP, PLAN, None, asked=False, why=" (m has no processor)"))
    assert told[0] == (
        "Images: 64 patches of each sequence, one image: nothing else is known (m has no processor). --patches N says how "
        "many."
    )
    assert told[1].endswith("cores that prepare images are not known: a run's data and its model's processor tell.")
    assert next(lines(MODEL, STEP, PLAN, None, asked=True)) == "Images: 64 patches of each sequence, by --patches."
    text = ModelSpec("m", (), 100, 8, 8, 1, 1)
    assert list(lines(text, STEP, PLAN, None, asked=False)) == []
    [left_out] = lines(text, STEP, PLAN, None, asked=True)
    assert left_out == "Images: --patches is left out, since m is planned by its text alone."


def test_explain_takes_the_patches_that_are_asked_for(folder, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": {"path": str(folder / "qwen3_vl")}, "data": {"length": 64}}))
    words = ["plan", "explain", str(file), "--gpus", "1", "--gpu", "a6000", "--patches", "32", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["images"]["patches"] == 32


@pytest.mark.parametrize("asked", ["0", "0.5", "2e6", "-4"])
def test_patches_that_no_sequence_has_are_refused(asked):
    with pytest.raises(ConfigError, match="--patches"):
        patches_of(Namespace(patches=asked))


def test_patches_are_written_as_other_numbers():
    assert patches_of(Namespace(patches="4096")) == Patches(4096, asked=True)
    assert patches_of(Namespace(patches=None)) is None
