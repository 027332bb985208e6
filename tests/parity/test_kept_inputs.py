"""Inputs of recomputed blocks in parts over tp, on the host or both: the bits of inputs that are kept as they are."""

import pytest
import torch
from meshes import engine_of, micro_batches, model_of, own
from models import adamw
from tensors import tiny

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.train.measure import Activations

HOW = {
    "as they are": {},
    "in parts": {"partition_activations": True},
    "on the host": {"offload": {"activations": "host"}},
    "parts on the host": {"partition_activations": True, "offload": {"activations": "host"}},
}


def runs(shape, policy, hows, options):
    """For each of `hows`: losses, norms and the fingerprint of two steps; bytes on the host, and gathered over tp.

    And the bytes that autograd keeps on the device of the first micro-batch.
    """
    found = {}
    for how in hows:
        mesh = zero3d.Mesh(**shape)
        model = model_of("llama", (1, 2, mesh.pp), dropout=0.1)
        recompute(model, policy)
        engine = engine_of(model, mesh, optimizer=adamw, **{"precision": "fp32"} | options | HOW[how])
        curve, kept = [], Activations(engine)
        for step in range(2):
            given = own(micro_batches(step, mesh.dp * 2 * mesh.pp), mesh.place.dp, mesh.dp)
            curve.append(float(engine.train_batch(given)))
            curve.append(float(engine.last_step.grad_norm))
        slots = engine.kept_inputs and engine.kept_inputs.slots
        gathers = sum(e.bytes for e in engine.traffic if (e.op, e.axis) == ("all_gather", "tp") and "layers" in e.unit)
        found[how] = (curve, engine.fingerprint()), slots and slots.footing.host, gathers, sum(kept.bytes.values())
    return found


CASES = [
    ({"tp": 2}, "full", {"stage": 3}),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ({"tp": 2}, "every:3", {"stage": 2}), ({"tp": 2}, "selective", {"stage": 0}),
        ({"tp": 2, "dp": 2}, "full", {"stage": 3, "precision": "bf16"}),
        ({"tp": 2, "dp": 2}, "every:2", {"stage": 2, "exact": True}),
        ({"tp": 2, "pp": 2}, "full", {"stage": 1, "schedule": "1f1b"}),
        ({"tp": 2, "pp": 2}, "every:2", {"stage": 3, "schedule": "zbv"}),
        ({"tp": 2, "pp": 2}, "selective", {"stage": 2, "schedule": "interleaved"}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "policy", "options"), CASES)
def test_inputs_in_parts_and_on_the_host_change_no_bit(ranks, shape, policy, options):
    world = torch.tensor(list(shape.values())).prod().item()
    for found in ranks(world, runs, shape, policy, list(HOW), options):
        plain, _, nothing, all_of_them = found["as they are"]
        assert [run for run, *_ in found.values()] == [plain] * len(HOW)
        assert nothing == found["on the host"][2] == 0
        assert found["in parts"][2] == found["parts on the host"][2] > 0
        whole, parts = (found[how][1] for how in ("on the host", "parts on the host"))
        assert whole >= parts > 0
        here = {how: all_of_them - nbytes for how, (_, _, _, nbytes) in found.items()}
        away = here["on the host"]
        assert away == here["parts on the host"] == 2 * here["in parts"] > 0
        if (shape, policy) == ({"tp": 2}, "full"):
            assert away == 2 * (2 * 8 * 32) * 4  # of two blocks


FAMILIES = ("gemma3n_text", "gemma4_text", "moe", "gpt_oss", "falcon_h1", "mla", "bloom", "gpt2", "lfm2")


def families(names, policy):
    """For each model: whether inputs in parts on the host change a bit of losses, norms and weights."""
    same = {}
    for name in names:
        found = []
        for how in (HOW["as they are"], HOW["parts on the host"]):
            model = tiny(name)
            recompute(model, policy)
            engine = engine_of(model, zero3d.Mesh(tp=2), precision="fp32", stage=3, optimizer=adamw, **how)
            curve = [float(engine.train_batch(micro_batches(step, 2))) for step in range(2)]
            found.append((curve, float(engine.last_step.grad_norm), engine.fingerprint()))
        same[name] = found[0] == found[1]
    return same


@pytest.mark.long
@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
def test_families_with_ways_of_their_own(ranks, policy):
    names = [name for name in FAMILIES if policy != "selective" or name not in ("gemma3n_text", "lfm2")]
    assert ranks(2, families, names, policy) == [dict.fromkeys(names, True)] * 2


@pytest.mark.long
@pytest.mark.parametrize(("shape", "schedule"), [
    ({"tp": 2, "pp": 2}, "1f1b"), ({"pp": 2}, "zero-bubble"), ({"pp": 2}, "gpipe"),
])  # fmt: skip
def test_several_micro_batches_in_flight(ranks, shape, schedule):
    options = {"stage": 3, "schedule": schedule}
    hows = ["as they are", "parts on the host" if "tp" in shape else "on the host"]
    for found in ranks(len(shape) * 2, runs, shape, "full", hows, options):
        (plain, *_), (on_host, nbytes, *_) = found.values()
        assert on_host == plain
        assert nbytes % (2 * 4096) == 0  # two blocks a rank, each with an input of 2 x 8 x 32 fp32 elements
