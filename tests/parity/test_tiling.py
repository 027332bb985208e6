"""Losses and linear layers in tiles compute what whole ones do, on every mesh, and the same bits at every stage."""

from functools import cache, partial

import pytest
import torch
from meshes import STEPS, engine_of, mesh_of, micro_batches, model_of, oracle, own, step, world_of
from models import LiftCasts, adamw, batch, bits, loss_of, net
from training import save_model, save_rows, told, tree

import zero3d
from zero3d.account.traffic import step_traffic
from zero3d.activations.recomputation import recompute
from zero3d.distributed.unit_order import AHEAD
from zero3d.zero.tokens import count_gathers


def trained(case, precision, *settings):
    """For each of some settings of an engine: [(loss, norm), ...] of its steps, and the ledger of the last one."""
    family, shape, stage, schedule, sequence, activations = case
    results = []
    for options in settings:
        model = model_of(family, shape)
        recompute(model, activations)
        made = {"stage": stage, "schedule": schedule, "sequence_parallel": sequence, "precision": precision}
        with LiftCasts():
            engine = engine_of(model, mesh_of(shape), **made | options)
            steps = []
            for number in range(STEPS):
                engine.traffic.reset()
                steps.append(step(engine, number))
        ledger = sorted((e.op, e.axis, e.unit, e.calls, e.elements, e.bytes) for e in engine.traffic)
        results.append((steps, ledger))
    return results


LOSSES = [
    ("qwen3", (1, 2, 1), 2, None, True, "none"),
    *(pytest.param(case, marks=pytest.mark.long) for case in (
        ("llama", (2, 1, 1), 3, None, False, "full"), ("moe", (1, 2, 2), 3, "1f1b", False, "none"),
        ("gpt2", (2, 1, 2), 3, "zero-bubble", False, "none"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_a_tiled_loss_is_one_process_loss_in_float64_and_sends_what_the_whole_one_does(ranks, case):
    family, shape, *_ = case
    expected = oracle(family, shape, "model's")
    for (_, of_plain), (found, ledger) in ranks(world_of(shape), trained, case, "fp64", {}, {"tiled_loss": True}):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=0)
        assert ledger == of_plain


def by_stage(stages, options):
    """Losses, norms and a hash of weights of some stages, and the held-out loss."""
    results = []
    for stage in stages:
        engine = engine_of(model_of("llama", (2, 1, 1)), mesh_of((2, 1, 1)), precision="fp32", stage=stage, **options)
        steps = [step(engine, number) for number in range(STEPS)]
        held_out = float(engine.evaluate(own(micro_batches(9, 2), engine.mesh.place.dp, 2)))
        with engine.full_params():
            results.append((steps, held_out, bits(engine.module.parameters())))
    return results


@pytest.mark.long
@pytest.mark.parametrize("stages", [range(4)], ids=["all"])
def test_a_tiled_loss_has_the_same_bits_at_all_stages_and_is_near_the_whole_one(ranks, stages):
    tiled, plain = ranks(2, by_stage, stages, {"tiled_loss": True})[0], ranks(2, by_stage, (0,), {})[0]
    assert all(each == tiled[0] for each in tiled)
    (steps, held_out, _), (of_plain, held_out_plain, _) = tiled[0], plain[0]
    assert torch.allclose(torch.tensor(steps), torch.tensor(of_plain), rtol=1e-5, atol=0)
    assert held_out == pytest.approx(held_out_plain, rel=1e-5)


# --- linear layers ----------------------------------------------------------------------------------

ROWS = 2048  # bytes: of 32 numbers in fp64 eight rows, in fp32 sixteen, so every matrix of the tiny models has tiles
LAYERS = [
    ("llama", (1, 2, 1), 3, None, True, "every:2", True),
    *(pytest.param(case, marks=pytest.mark.long) for case in (
        ("llama", (2, 1, 1), 3, None, False, "none", False), ("qwen3", (2, 1, 1), 3, None, False, "selective", False),
        ("qwen3", (1, 2, 1), 3, None, False, "full", True), ("moe", (1, 2, 2), 3, "interleaved", False, "none", True),
        ("llama", (2, 1, 2), 3, "1f1b", False, "full", True), ("llama", (1, 2, 2), 2, "zero-bubble", False, "none", True),
    )),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:gathered whole, above gather_budget")
@pytest.mark.parametrize("case", LAYERS)
def test_tiled_layers_are_one_process_model_in_float64(ranks, poison, case):
    *case, tiled_loss = case
    family, shape, *_ = case
    options = {"gather_budget": ROWS, "tiled_loss": tiled_loss}
    for ((found, _),) in ranks(world_of(shape), trained, case, "fp64", options):
        assert torch.allclose(torch.tensor(found), torch.tensor(oracle(family, shape, "model's")), rtol=1e-10, atol=0)


def account(stage, activations, precision, offload=None):
    """Of two steps: losses, norms, hash of weights; of the last its ledger, formula and gathers; peak of gathered."""
    torch.manual_seed(7)
    model = net(width=128, layers=3, vocab=256)
    recompute(model, activations)
    made = {"precision": precision, "clip_norm": 0.5, "optimizer": adamw, "offload": offload}
    engine = zero3d.Engine(model, stage=stage, gather_budget=BUDGET, **made)
    rank, steps = torch.distributed.get_rank(), []
    for number in range(2):
        engine.traffic.reset()
        engine.gathers.events = []
        loss = loss_of(engine, batch(number, rank))
        engine.backward(loss)
        steps.append((float(loss.detach()), float(engine.step().grad_norm)))
    gathers = count_gathers(engine.gathers.events)
    planned = step_traffic(stage, engine.traffic_units, engine.dp.size, gathers)
    measured = {(e.op, e.unit): (e.calls, e.elements, e.bytes) for e in engine.traffic}
    held = [(entry.category, entry.planned, entry.measured) for entry in engine.memory if entry.planned is not None]
    peak = engine.arena.peak("gathered")
    with engine.full_params():
        weights = bits(engine.module.parameters())
    return (steps, weights), measured, {key: tuple(value) for key, value in planned.items()}, gathers, held, peak


@pytest.fixture(scope="module")
def account_of(ranks):
    """What two ranks return of an account, each once."""
    return cache(lambda *case: ranks(2, account, *case))


BUDGET = 128 * 128 * 4  # bytes of half of a matrix of the net below in fp32, which fills its unit's storage
UNIT = 128 * 128 * 4  # bytes of a unit of less: what is not tiled of a block, and the root unit


@pytest.mark.parametrize("activations", ["none", "full"])
def test_no_more_than_a_tile_and_the_window_is_gathered_and_all_is_as_the_formulas_say(account_of, activations):
    for result, measured, planned, gathers, held, peak in account_of(3, activations, "fp32"):
        assert result[0][0][0] > 0
        assert measured == planned
        assert all(entry_planned == found for _, entry_planned, found in held)
        again = activations == "full"  # a replay gathers tiles anew, but for that whose backward has begun
        tiles = {name: count for name, count in gathers.items() if ".tiles." in name}
        assert len(tiles) == 3 * 2 * 2 + 2 + 2
        once = ("embed.tiles.0", "embed.tiles.1", "head.tiles.1")  # no backward needs it, and it begins with the last
        block = {name: 3 if again and not name.endswith("down.tiles.1") else 2 for name in tiles if "layers" in name}
        assert tiles == block | dict.fromkeys(once, 1) | {"head.tiles.0": 2}
        assert peak <= UNIT + UNIT + (1 + again + AHEAD) * BUDGET  # root, rest of a block, in use, ahead


PLACES = ((0, None), (1, None), (2, {"optimizer": "host"}), (3, None), (3, {"optimizer": "host", "params": "host"}))


@pytest.mark.parametrize(("precision", "places"), [
    ("bf16", PLACES[1:3] + PLACES[4:]), *(pytest.param(name, PLACES, marks=pytest.mark.long) for name in ("fp32", "bf16")),
], ids=["few in bf16", "fp32", "bf16"])  # fmt: skip
def test_tiled_layers_have_the_same_bits_at_all_stages_and_places(ranks, precision, places):
    found = [[of_rank[0] for of_rank in ranks(2, account, stage, "none", precision, place)] for stage, place in places]
    assert all(each == found[0] for each in found)


def untiled(precision):
    model = net(width=128, layers=3, vocab=256)
    engine = zero3d.Engine(model, stage=3, precision=precision, clip_norm=0.5, optimizer=adamw)
    steps = []
    for number in range(2):
        loss = loss_of(engine, batch(number, torch.distributed.get_rank()))
        engine.backward(loss)
        steps.append((float(loss.detach()), float(engine.step().grad_norm)))
    return steps, engine.arena.peak("gathered")


def test_tiled_layers_are_near_whole_ones_in_float32_and_take_less(ranks, account_of):
    (steps, peak), *_ = ranks(2, untiled, "fp32")
    (((found, _), *_, tiled_peak), *_) = account_of(3, "none", "fp32")
    assert torch.allclose(torch.tensor(found), torch.tensor(steps), rtol=1e-5, atol=0)
    assert 3 * tiled_peak <= peak


def exact_fingerprint(stage):
    """Of two steps over one global list of four micro-batches."""
    model, mesh = model_of("qwen3", (1, 1, 1)), zero3d.Mesh()
    made = {
        "precision": "fp32",
        "exact": True,
        "optimizer": adamw,
        "reduce": "every_step",
        "stage": stage,
        "tiled_loss": True,
    }
    engine = zero3d.Engine(model, mesh=mesh, gather_budget=ROWS, **made)
    for number in range(2):
        engine.train_batch(own(micro_batches(number, 4), mesh.place.dp, mesh.dp))
    return engine.fingerprint()


@pytest.mark.long
def test_exact_mode_has_one_fingerprint_at_any_dp_and_stage(ranks):
    found = [ranks(dp, exact_fingerprint, stage)[0] for dp, stage in ((1, 3), (2, 3), (2, 1), (4, 3))]
    assert len(set(found)) == 1


@pytest.mark.long
def test_a_run_with_large_logits_computes_them_in_tiles_and_says_so(ranks, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    whole, plain = ranks(2, told, tree(tmp_path, "whole"))[0]
    tiled, said = ranks(2, partial(told, zero3d__train__setup__losses__LOGITS_BUDGET=1), tree(tmp_path, "tiled"))[0]
    assert not any("tiled_loss" in line for line in plain)
    (line,) = (line for line in said if "tiled_loss" in line)
    assert "train.tiled_loss=auto: in tiles: 16 tokens x 61 logits take" in line
    assert tiled == pytest.approx(whole, rel=1e-6)  # contract 3, one process
