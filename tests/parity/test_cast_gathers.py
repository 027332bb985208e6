"""Weights that are cast from their masters in each gather: the same bits, nothing of them between uses, its own bytes."""

import math
from dataclasses import replace

import meshes
import pytest
import torch
from models import adamw, batch, bits, build, loss_of, planned_bytes, train_engine
from test_gather_wires import MESHES, account, course, engine_of
from training import save_model, save_rows, told, tree

import zero3d
from zero3d.engine.transients import transient_bounds
from zero3d.errors import Zero3dError
from zero3d.optim import adamw8bit, muon

CAST = {"weight_shards": "cast"}


@pytest.mark.parametrize("options", [
    {},
    *(pytest.param(options, marks=pytest.mark.long) for options in (
        {"gather_wire": "int8", "second_shard": 2}, {"precision": "fp16"}, {"second_shard": 2}, {"gather_wire": "int8"}, {"shard": 2}, {"communicators": 1}, {"reduce": "every_step"},
    )),
], ids=str)  # fmt: skip
def test_no_bit_of_a_course_changes(ranks, tmp_path, options):
    kept = ranks(4, course, tmp_path / "kept", dict(options))
    assert ranks(4, course, tmp_path / "cast", options | CAST) == kept


def on_mesh(name, options):
    """Losses and all bits of a course on a mesh, with kept weights and with cast ones; what the latter holds of them."""
    family, degrees = MESHES[name]
    schedule, mesh = "zbv" if name == "zbv" else None, zero3d.Mesh(**degrees)
    count, found, held = 4 if mesh.pp > 1 else 2 * mesh.dp // mesh.sp, [], 0
    for weights in ({}, CAST):
        model = meshes.model_of(family, (1, 1, mesh.pp))
        engine = meshes.engine_of(model, mesh, precision="bf16", stage=3, schedule=schedule, **options, **weights)
        losses = []
        for step in range(2):
            given = meshes.own(meshes.micro_batches(step, count), mesh.row, mesh.dp // mesh.sp)
            losses += [float(engine.train_batch(given)), float(engine.evaluate(given))]
        found.append((losses, engine.fingerprint()))
        held = engine.arena.held("parameters")
        assert [each for each in engine.memory if each.planned not in (None, each.measured)] == []
    return found, int(held)


@pytest.mark.parametrize("name", [
    name if name in ("pp", "edp") else pytest.param(name, marks=pytest.mark.long) for name in MESHES
])  # fmt: skip
def test_every_axis_computes_with_cast_weights_and_keeps_none(ranks, name):
    world = math.prod(degree for axis, degree in MESHES[name][1].items() if axis in ("dp", "tp", "pp"))
    for (kept, cast), held in ranks(world, on_mesh, name, {}):
        assert cast == kept
        assert held == 0


MODES = {
    "exact": {"exact": True}, "averages": {"ema": 0.5, "optimizer": adamw}, "replay": {"replay": 1},
    "muon": {"optimizer": muon(lr=0.01)}, "8 bits": {"optimizer": adamw8bit(lr=0.01)},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_other_modes_compute_with_cast_weights(ranks, mode):
    for (kept, cast), _ in ranks(2, on_mesh, "sp", MODES[mode]):
        assert cast == kept


def test_ledger_and_arena_equal_the_formulas(ranks):
    for planned, measured, arena, states, held, _ in ranks(2, account, dict(CAST)):
        assert measured == {key: tuple(value) for key, value in planned.items()}
        assert arena["parameters"] == states.parameters == held["parameters"]
        assert math.ceil(arena["padding"]) == held["padding"]
        assert arena["wire"] == arena["gathered"] == arena["bucket"] == 0


def alive():
    """Bytes of weights between steps, kept and cast, of a rank's shard; peaks in a step and their bounds."""
    rank, found = torch.distributed.get_rank(), []
    for options in ({}, CAST, CAST | {"gather_wire": "int8"}):
        engine = engine_of(**options)
        engine.arena.reset_peaks()
        engine.backward(loss_of(engine, batch(0, rank)))
        engine.step()
        bounds = transient_bounds(engine._parts, 1)
        peaks = {category: int(engine.arena.peak(category)) for category in bounds}
        found.append((int(engine.arena.live("parameters")), peaks, bounds))
    return found


def test_nothing_of_weights_is_there_between_steps_and_casts_find_room_in_what_is_gathered(ranks):
    for kept, cast, coded in ranks(2, alive):
        assert kept[0] > cast[0] == coded[0] == 0
        for _, peaks, bounds in (kept, cast, coded):
            assert {category: peak for category, peak in peaks.items() if peak > bounds[category]} == {}
        assert cast[1]["gathered"] == kept[1]["gathered"]
        assert cast[1]["wire"] <= kept[1]["wire"]


def test_one_rank_keeps_masters_alone(ranks):
    batches = [batch(step) for step in range(3)]
    kept, cast = engine_of(), engine_of(**CAST)
    assert train_engine(cast, batches) == train_engine(kept, batches)
    assert cast.arena.live("parameters") == 0 < kept.arena.live("parameters")
    assert planned_bytes(cast).parameters == 0


def test_casts_to_fp16_take_no_scratch():
    engine = engine_of(precision="fp16", **CAST)
    train_engine(engine, [batch(0)], through_engine=True)
    assert engine.arena.peak("wire") == transient_bounds(engine._parts, 1)["wire"] == 0


def unfrozen():
    """Bits of a course in which a whole unit is trained after all, kept and cast, and bytes of weights before and after."""
    rank, found = torch.distributed.get_rank(), []
    for options in ({}, CAST):
        model = build("net")
        model.layers[1].requires_grad_(False)
        engine = engine_of(model, **options)
        seen = [train_engine(engine, [batch(0, rank)])]
        before = int(engine.arena.live("parameters"))
        engine.unfreeze("layers.1.*")
        seen.append(train_engine(engine, [batch(1, rank)]))
        engine.freeze("layers.1.*")
        seen.append(train_engine(engine, [batch(2, rank)]))
        found.append((seen, before, int(engine.arena.live("parameters"))))
        assert [each for each in engine.memory if each.planned not in (None, each.measured)] == []
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_unit_that_is_trained_after_all_gives_its_shard_back(ranks, world):
    for (kept, *_), (cast, before, after) in ranks(world, unfrozen):
        assert cast == kept
        assert before > 0
        assert after == (before if world == 1 else 0)  # one rank alone had all of it in use: it stays whole


def overflowing(folder):
    """What saving says where a master is finite and its weight is not."""
    engine = engine_of(precision="fp16", **CAST)
    with engine.full_params(), torch.no_grad():
        engine.module.head.weight[0, 0] = 1.0
    masters = engine.units[-1].weights.masters
    masters.stored[:1] = 1e6
    with pytest.raises(Zero3dError, match="are NaN or infinite") as refused:
        engine.export(folder)
    return str(refused.value)


def test_weights_that_a_cast_makes_infinite_are_not_exported(ranks, tmp_path):
    assert all(said.startswith("head.weight has values") for said in ranks(2, overflowing, tmp_path / "out"))


def written():
    """Of kept and cast weights whether reading changes bits, what writes borrow, bits of ties and after the writes."""
    rank, found = torch.distributed.get_rank(), []
    for options in ({}, CAST):
        engine = zero3d.Engine(build("net"), stage=3, optimizer=adamw, **options)
        for unit in engine.units:
            halves = unit.weights.masters.stored.view(torch.int16)
            halves[::2] = -0x8000  # halfway between two weights
            unit.weights.refresh().wait()
        with engine.full_params():
            rounded = bits(engine.module.parameters())
        train_engine(engine, [batch(0, rank)])
        before = engine.fingerprint()
        with engine.full_params():
            sum(float(p.detach().sum()) for p in engine.module.parameters())
        read = engine.fingerprint() == before
        engine.arena.reset_peaks()
        with engine.full_params(), torch.no_grad():
            engine.module.embed.weight[3].mul_(-0.5)
        borrowed = int(engine.arena.peak("wire"))
        engine.backward(loss_of(engine, batch(1, rank)))
        engine.step()
        with engine.full_params():
            found.append((read, borrowed, rounded, bits(engine.module.parameters()), engine.fingerprint()))
    return found


def test_what_is_written_into_weights_goes_to_their_masters(ranks):
    for kept, cast in ranks(2, written):
        assert cast == kept
        assert cast[0]


def run_with(folder, steps, flops):
    """The lines that a run of so many steps says whose card has such a rate, and whether gathers cast."""
    from zero3d.tools.advice.planned_run import run_cluster
    from zero3d.train.setup.build import build_engine

    built = []

    def of_rate(*given):
        found = run_cluster(*given)
        return replace(found, gpu=replace(found.gpu, flops=flops))

    def noted(*given):
        built.append(build_engine(*given))
        return built[-1]

    made = tree(folder, f"{steps}-{flops:g}", precision="bf16", zero={"weights": "auto"}, train={"steps": steps})
    _, lines = told(
        made, zero3d__tools__advice__planned_run__run_cluster=of_rate, zero3d__train__run__build_engine=noted
    )
    return [line for line in lines if line.startswith("zero.weights=auto")], built[0].policy.from_masters


@pytest.mark.parametrize(("steps", "flops", "chosen", "why"), [
    (3, 1e6, "cast", "3 more casts take"),
    pytest.param(3, 1e18, "kept", "3 more casts take", marks=pytest.mark.long),
    pytest.param(2, 1e6, "kept", "this run has no plan to choose by", marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_says_what_auto_becomes_and_its_engine_does_so(ranks, tmp_path, steps, flops, chosen, why):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    (said, casts), (_, other) = ranks(2, run_with, tmp_path, steps, flops)
    assert len(said) == 1
    assert said[0].startswith(f"zero.weights=auto: {chosen}: {why}")
    assert casts == other == (chosen == "cast")
