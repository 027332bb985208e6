"""Contract 4: wherever model states are, and whoever updates them, training has the bits of states on the device."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from buckets import buckets_of
from meshes import engine_of as mesh_engine_of, layers_of, mesh_of, step as mesh_step, sum_of, world_of
from models import adamw
from pipelines import covering
from tensors import tiny
from tiers import (
    INFINITE,
    OPTIMIZERS,
    PLACES,
    RESIDENT,
    STEPS,
    Case,
    check_run,
    compare,
    is_possible,
    places_of,
    trained,
    unplanned,
)

FEW_STEPS = (0, INFINITE, 2, 1)  # every way of waiting, a loss that is infinite, clipped and unclipped gradients
AWAY = [place for place in PLACES if place != RESIDENT]
FEW = [
    (Case(1, 0, moments=(4, "auto"), grouped=True), "host"),
    (Case(1, 3, "auto", master="split", model="tied"), "all on disk"),
    (Case(1, 2, moments=(4, "every_step"), optimizer="momentum"), "part on disk"),
    (Case(1, 1, precision="fp32", optimizer="Adagrad", grouped=True), "disk, device updates"),
    (Case(1, 3, precision="fp64", optimizer="amsgrad", frozen=True), "states on disk, weights on host"),
    (Case(1, 2, precision="fp16"), "part on host"),
    (Case(2, 3, moments=(4, "auto"), frozen=True, master="split"), "all on host"),
    (Case(2, 1, moments=(1, "auto"), exact=True, grouped=True, master="split"), "disk, device updates"),
    (Case(2, 3, "every_step", precision="fp32", optimizer="counting"), "host, device updates"),
    (Case(2, 2, moments=(4, "auto"), grouped=True), "gradients on host"),
    (Case(4, 0, moments=(1, "auto"), master="split"), "part on host"),
    (Case(4, 3, moments=(1, "auto"), model="tied"), "part of states on host, weights on disk"),
]  # fmt: skip
OFTEN = {
    1: ("all on disk", "part on host", "states on disk, weights on host"),
    2: ("disk, device updates", "gradients on host"),
}


@pytest.mark.parametrize("dp", [1, 2])
def test_often_places_have_the_bits_of_states_on_the_device(ranks, dp):
    pairs = [pair for pair in FEW if pair[0].dp == dp and pair[1] in OFTEN[dp]]
    assert len(pairs) == len(OFTEN[dp])
    ranks(dp, compare, pairs, FEW_STEPS)


@pytest.mark.long
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_wherever_states_are_the_bits_are_those_of_states_on_the_device(ranks, dp):
    ranks(dp, compare, [pair for pair in FEW if pair[0].dp == dp], FEW_STEPS)


# --- all pairs ------------------------------------------------------------------------------------

STAGES = ((0, "auto"), (1, "auto"), (2, "auto"), (3, "auto"), (3, "every_step"))  # stage, release
MOMENTS = ((1, "auto"), (4, "auto"), (4, "every_step"))  # micro-batches, reduce
FORMS = (("bf16", "fp32"), ("bf16", "split"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp32"))  # weights, masters
MODELS = (("net", False), ("tied", False), ("net", True))  # frozen


def cases_of(settings, make):
    """Pairs of a case and a place that have all pairs of settings, of which the last is the place, with the fewest cases.

    Each case is trained once more, with everything on the device.
    """
    few = {
        make((*given, RESIDENT))[0]
        for given in covering(settings[:-1], lambda given: is_possible(make((*given, RESIDENT))[0]))
    }
    found = covering(settings, lambda given: make(given)[0] in few and is_possible(*make(given)))
    return [make(given) for given in found]


def compare_in_turn(ranks, pairs):
    """Compare these; those of fp16 for more steps, in which its loss scale grows again."""
    for grows, steps in ((False, FEW_STEPS), (True, STEPS)):
        of_these = sorted(pair for pair in pairs if (pair[0].precision == "fp16") == grows)
        ranks(pairs[0][0].dp, compare, of_these, steps, timeout=1800)


def of_mesh(given):
    dp, (stage, release), moments, (precision, master), (model, frozen), exact, place = given
    case = Case(dp, stage, release, moments, precision, master, "fused AdamW", False, exact, model, frozen)
    return case, place


def of_optimizer(given):
    optimizer, grouped, stage, (precision, master), place = given
    return Case(1, stage, "auto", (1, "auto"), precision, master, optimizer, grouped), place


@pytest.mark.long
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_all_pairs_of_settings_have_the_bits_of_states_on_the_device(ranks, dp):
    pairs = cases_of(((1, 2, 4), STAGES, MOMENTS, FORMS, MODELS, (False, True), AWAY), of_mesh)
    compare_in_turn(ranks, [pair for pair in pairs if pair[0].dp == dp])


@pytest.fixture(scope="module")
def by_optimizer():
    """optimizer -> (case, place); of all together the fewest that have all pairs of settings."""
    pairs = cases_of((tuple(OPTIMIZERS), (False, True), (0, 2, 3), FORMS, AWAY), of_optimizer)
    return {name: [pair for pair in pairs if pair[0].optimizer == name] for name in OPTIMIZERS}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_has_at_every_place_the_bits_that_it_has_on_the_device(ranks, by_optimizer, optimizer):
    assert {place for _, place in by_optimizer[optimizer]} == set(AWAY)
    compare_in_turn(ranks, by_optimizer[optimizer])


# --- exact mode -----------------------------------------------------------------------------------

EXACT = {1: ("host", (4, "auto"), 2), 2: ("all on disk", (2, "auto"), 3), 4: ("disk, device updates", (1, "auto"), 1)}


def exactly(case, places):
    """What may depend neither on the place nor on dp: hashes, norms, and why steps were applied or not."""
    found = set()
    for place in places:
        run = trained(case, place, FEW_STEPS)
        check_run(run, case, place)
        found.add((run.bits["hash"], run.bits["weights"], run.bits["norms"], tuple(run.bits["reasons"])))
    return found


@pytest.mark.parametrize("dps", [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.long)], ids=str)
def test_exact_mode_has_one_hash_over_places_and_dp(ranks, dps):
    hashes = set()
    for dp in dps:
        place, moments, stage = EXACT[dp]
        case = Case(dp, stage, moments=moments, exact=True, master="split" if dp == 2 else "fp32")
        hashes.update(*ranks(dp, exactly, case, [place, RESIDENT] if dp == 1 else [place]))
    assert len(hashes) == 1


# --- tensor parallel, pipelines, adapters ---------------------------------------------------------


def on_mesh(family, shape, stage, schedule, lora, offloads, micro_batches=2):
    """For each offload: losses and norms, the fingerprint, bytes that were not planned, places of states."""
    found = []
    for offload in offloads:
        torch.manual_seed(dist.get_rank())
        with tempfile.TemporaryDirectory() as folder, buckets_of(1024):
            engine = mesh_engine_of(
                tiny(family, kv_heads=4, layers=layers_of(shape), lora=lora), mesh_of(shape), stage=stage, schedule=schedule,
                precision="bf16", optimizer=adamw, loss=sum_of, release="every_use" if stage == 3 else "auto",
                offload={**offload, "directory": folder},
            )  # fmt: skip
            steps = [mesh_step(engine, number, micro_batches * shape[0]) for number in range(2)]
            found.append((steps, engine.fingerprint(), unplanned(engine), places_of(engine)))
            del engine
    return found


def check_on_mesh(ranks, family, shape, stage, schedule, lora, places):
    for resident, *others in ranks(
        world_of(shape), on_mesh, family, shape, stage, schedule, lora, [{}, *[PLACES[place] for place in places]]
    ):
        for place, (steps, fingerprint, apart, held) in zip(places, others, strict=True):
            assert (steps, fingerprint) == resident[:2], place
            assert not apart, (place, apart)
            assert set(PLACES[place].values()) & {"host", "disk"} <= held


MESHES = [  # dp, tp, pp
    ("qwen3", (1, 1, 2), 3, "1f1b", False, ["all on host"]),
    ("llama", (1, 2, 1), 1, None, False, ["disk, device updates"]),
    ("llama", (2, 1, 1), 3, None, True, ["weights on disk"]),
]
MORE_MESHES = [
    ("qwen3", (1, 1, 2), 0, "zero-bubble", False, ["host", "disk, device updates"]),
    ("qwen3", (1, 1, 2), 3, "zero-bubble", False, ["all on disk", "weights on host"]),
    ("gpt2", (1, 1, 2), 2, "interleaved", False, ["part on host", "disk"]),
    ("gpt2", (2, 1, 2), 3, "zbv", False, ["all on host", "states on disk, weights on host"]),
    ("llama", (2, 2, 1), 3, None, False, ["all on disk", "all on host"]),
    ("moe", (1, 2, 1), 3, None, False, ["weights on host", "part on disk"]),
    ("qwen3", (1, 2, 2), 3, "1f1b", False, ["all on disk", "weights on host"]),
    ("llama", (1, 1, 2), 3, "gpipe", True, ["weights on disk", "all on host"]),
    ("llama", (2, 2, 1), 3, None, True, ["weights on disk", "all on host"]),
    ("gpt2", (2, 1, 1), 1, None, True, ["host", "part on disk"]),
    ("llama", (2, 1, 1), 3, None, True, ["weights on disk", "all on host"]),
]


@pytest.mark.parametrize(("family", "shape", "stage", "schedule", "lora", "places"), MESHES)
def test_on_a_mesh_the_bits_are_those_of_states_on_the_device(ranks, family, shape, stage, schedule, lora, places):
    check_on_mesh(ranks, family, shape, stage, schedule, lora, places)


@pytest.mark.long
@pytest.mark.parametrize(("family", "shape", "stage", "schedule", "lora", "places"), MORE_MESHES)
def test_on_more_meshes_the_bits_are_those_of_states_on_the_device(ranks, family, shape, stage, schedule, lora, places):
    check_on_mesh(ranks, family, shape, stage, schedule, lora, places)
