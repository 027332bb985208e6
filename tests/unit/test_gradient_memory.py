"""Gradients have memory from their first use in a step to their unit's update, and none between steps."""

import sys
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from blueprints import poisoned
from buckets import buckets_of
from by_hand import model_of
from models import adamw, batch, build, loss_of

import zero3d
from zero3d.account.states import gradient_bytes
from zero3d.memory.arena import Arena
from zero3d.optim import adamw8bit, muon
from zero3d.tools.plan.memory import instants
from zero3d.tools.plan.rank_model import rank_model
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.states import states
from zero3d.tools.plan.windows import backwards
from zero3d.zero.gradient_memory import GradientMemory

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import Model, alone_in, collectives_of, lonely_mesh, modelled

LATER = {"optimizer": "host", "executor": "device"}  # updates are made behind `step()`


def engine_of(model=None, **options):
    """An engine whose units have several buckets each."""
    with buckets_of(2048):
        made = {"stage": 2, "precision": "bf16", "clip_norm": 0.5, "optimizer": adamw} | options
        return zero3d.Engine(model or build("net", width=40), **made)


def summed(output, ids):
    return loss_of(lambda _: output, ids), 1.0


def backward(engine, number, last=None):
    engine.backward(loss_of(engine, batch(number)), last=last)


def held(engine):
    """Bytes of gradients that are there now."""
    return engine.arena.live("gradients")


# --- the memory itself --------------------------------------------------------------------------

FLOAT = torch.float32


def test_an_arena_knows_what_was_there_at_its_fullest_instant():
    arena = Arena(torch.device("cpu"))
    arena.allocate("parameters", 4, 3, FLOAT)
    memory = GradientMemory(arena, 4, 4, FLOAT)
    memory.drain()
    gathered = arena.borrow("gathered", 6, FLOAT)
    arena.give_back("gathered", gathered)
    memory.fill()
    wire = arena.borrow("wire", 3, FLOAT)
    arena.give_back("wire", wire)
    kinds = ("parameters", "padding", "gradients", "gathered", "wire")
    assert [arena.at_peak(kind) for kind in kinds] == [12, 4, 16, 0, 12]
    assert [arena.peak(kind) for kind in kinds] == [12, 4, 16, 24, 12]
    arena.reset_peaks()
    assert [arena.at_peak(kind) for kind in kinds] == [12, 4, 16, 0, 0]


def test_states_that_an_arena_has_let_go_are_in_no_later_instant():
    arena = Arena(torch.device("cpu"))
    arena.allocate("parameters", 4, 3, FLOAT)
    arena.let_go("parameters", 4, 3, FLOAT)
    wire = arena.borrow("wire", 3, FLOAT)
    arena.give_back("wire", wire)
    kinds = ("parameters", "padding", "wire")
    assert [arena.at_peak(kind) for kind in kinds] == [12, 4, 0]
    assert [arena.live(kind) for kind in kinds] == [0, 0, 0]


def test_what_an_engine_says_of_its_fullest_instant_is_of_one_time():
    with alone_in(2), collectives_of(Model()):
        engine = engine_of(mesh=lonely_mesh(2), stage=3)
        for number in range(2):
            backward(engine, number)
            engine.step()
        entries = {entry.category: entry for entry in engine.memory}
    peaks, at_once = (sum(getattr(entry, name) for entry in entries.values()) for name in ("peak", "at_peak"))
    assert at_once < peaks
    assert all(entry.at_peak <= entry.peak for entry in entries.values())
    assert entries["gradients"].now == 0 < entries["gradients"].at_peak


def test_a_memory_that_comes_and_goes_is_counted_with_its_padding_and_for_the_last_time():
    arena = Arena(torch.device("cpu"))
    memory, other = (GradientMemory(arena, 16, Fraction(21, 2), FLOAT) for _ in range(2))
    view = memory.buffer[2:4]

    def counted():
        return [(arena.live(name), arena.held(name)) for name in ("gradients", "padding")]

    assert counted() == [(84, 84), (44, 44)]
    for _ in range(2):
        memory.drain()
        assert not memory.there
        assert memory.buffer.untyped_storage().size() == 0
        assert counted() == [(42, 84), (22, 44)]
    for _ in range(2):
        memory.fill().fill_(7)
        assert counted() == [(84, 84), (44, 44)]
    assert view.tolist() == [7, 7]
    memory.drop()
    assert counted() == [(42, 42), (22, 22)]
    other.drain()
    other.drop()
    assert counted() == [(0, 0), (0, 0)]
    assert arena.peak("gradients") == 84


def test_memory_that_somebody_made_an_array_of_stays_and_is_counted_once():
    arena = Arena(torch.device("cpu"))
    memory = GradientMemory(arena, 4, 3, FLOAT)
    memory.buffer.fill_(5)
    array = memory.buffer.numpy()
    for _ in range(2):
        memory.drain()
        assert (arena.live("gradients"), arena.live("padding")) == (12, 4)
        memory.fill()
    assert array.tolist() == [5] * 4
    assert arena.held("gradients") == 12


# --- in a step ----------------------------------------------------------------------------------


def there(engine):
    """Units whose reduced gradients, or local ones that are kept, have memory."""
    return {unit.name for unit in engine.units if any(memory.there for memory in unit.gradients.memory)}


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_have_no_memory_before_their_first_use(stage):
    engine, seen = engine_of(stage=stage), []
    engine.module.layers[0].register_full_backward_hook(lambda *_: seen.append(there(engine)))
    for number in range(2):
        loss = loss_of(engine, batch(number))
        assert held(engine) == 0
        engine.backward(loss)
        assert held(engine) == engine.arena.held("gradients")
        assert engine.step().applied
        assert held(engine) == 0
    assert seen[0] == seen[1] > {"head", "layers.2"}
    assert "embed" not in seen[0]


@pytest.mark.parametrize(("stage", "exact"), [(0, False), (1, False), (2, True)])
def test_gradients_that_add_up_stay_from_the_first_micro_batch_to_the_step(stage, exact):
    engine = engine_of(stage=stage, accumulate=4, exact=exact, reduce="every_step")
    for number in range(8):
        backward(engine, number)
        assert there(engine) == {unit.name for unit in engine.units}
        assert engine.step().applied == (number % 4 == 3)
        assert bool(there(engine)) == (number % 4 < 3)


def test_what_an_engine_says_that_it_holds_is_the_same_at_any_time_and_what_is_there_now_is_not():
    engine = engine_of(stage=1, reduce="every_step")
    rows = []
    for number in range(2):
        rows.append(row := {entry.category: entry for entry in engine.memory})
        assert row["gradients"].now == 0
        assert row["gradients"].measured == row["gradients"].planned > 0
        backward(engine, number)
        row = {entry.category: entry for entry in engine.memory}
        assert row["gradients"].now == row["gradients"].measured == rows[0]["gradients"].measured
        assert row["padding"].now == row["padding"].measured == rows[0]["padding"].measured > rows[0]["padding"].now
        engine.step()
    assert rows[0]["padding"].measured == rows[1]["padding"].measured == rows[1]["padding"].planned


def test_frozen_weights_beside_adapters_have_no_gradients():
    model = build("net", width=40)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("layers.1"))
    engine = engine_of(model, stage=3)
    assert [unit.name for unit in engine.units if unit.grads is not None] == ["layers.1"]
    backward(engine, 0)
    assert held(engine) == 4 * sum(p.numel() for p in build("net", width=40).layers[1].parameters())
    engine.step()
    assert held(engine) == 0


# --- what goes otherwise ------------------------------------------------------------------------


def interrupted(stage, exact, **options):
    """The bits of a run that leaves steps out, in every way; between any two steps no gradient is there."""
    engine = engine_of(stage=stage, exact=exact, precision="bf16", accumulate=2, reduce="every_step", **options)

    def step(number, factor=1.0):
        for m in range(2):
            engine.backward(loss_of(engine, batch(10 * number + m)) * factor)
        return engine.step().reason

    found = [step(0), step(1, float("inf"))]
    assert held(engine) == 0
    backward(engine, 1)
    die(engine, 2)
    assert held(engine) == 0
    backward(engine, 3)
    backward(engine, 4)
    engine.zero_grad()
    assert held(engine) == 0
    engine.freeze("layers.1.*")
    found.append(step(5))
    assert held(engine) == 0
    engine.unfreeze("layers.1.*")
    engine.train_batch([batch(number) for number in range(4)])
    engine.optimizer.flush()
    assert held(engine) == 0
    bits, arena = engine.fingerprint(), engine.arena
    backward(engine, 6)
    assert arena.live("gradients") > 0
    engine.close()
    assert arena.live("gradients") == 0
    return found, bits


@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_run_that_leaves_steps_out_gives_memory_back_each_time_and_has_the_same_bits_at_all_stages(exact):
    def run(stage, poison):
        with poisoned() if poison else nullcontext():
            return interrupted(stage, exact, loss=summed)

    first, *others = [run(*case) for case in ((0, False), (0, True), (1, False), (2, True), (3, False), (3, True))]
    assert first[0] == ["applied", first[0][1], "applied"]
    assert first[0][1].startswith("overflow")
    assert others == [first] * len(others)


@pytest.mark.parametrize("exact", [False, True])
def test_more_micro_batches_than_before_have_other_memory_and_what_went_is_not_counted(exact):
    """Exact sums of two and more are another buffer, which grows; bf16 gradients of more than one become wide."""
    engine, planned = (
        engine_of(stage=2, reduce="every_step", exact=exact, accumulate=count, loss=summed) for count in (1, 4)
    )
    for count in (1, 2, 4, 1):
        engine.train_batch([batch(number) for number in range(count)])
        assert held(engine) == 0
    planned.train_batch([batch(number) for number in range(4)])
    rows = [{entry.category: entry for entry in each.memory} for each in (engine, planned)]
    for name in ("gradients", "padding"):
        assert rows[0][name].measured == rows[0][name].planned == rows[1][name].measured


@pytest.mark.parametrize(("options", "stage"), [
    ({"optimizer": adamw8bit(1e-2)}, 2), ({"optimizer": muon(lr=0.02)}, 1), ({"master": "split"}, 3),
])  # fmt: skip
def test_what_stood_between_parameters_decides_nothing(options, stage):
    """Gaps of a borrowed buffer are NaN where memory that is given back is poisoned."""
    found = []
    for within in (nullcontext, poisoned):
        with within():
            engine = engine_of(stage=stage, **options)
            for number in range(3):
                backward(engine, number)
                assert engine.step().applied
            found.append(engine.fingerprint())
    assert found[0] == found[1]


# --- what dies ----------------------------------------------------------------------------------


def die(engine, number):
    """A backward that ends in an error in the first of the model's layers."""

    def fail(*_):
        raise RuntimeError("of the test")

    hook = engine.module.layers[0].register_full_backward_hook(fail)
    loss = loss_of(engine, batch(number))
    with pytest.raises(RuntimeError, match="of the test"):
        engine.backward(loss)
    hook.remove()


@pytest.mark.parametrize(("stage", "options"), [(0, {}), (2, {"shard": 2}), (3, {"exact": True})])
def test_memory_of_a_backward_that_died_is_not_given_back_under_what_still_writes_there(stage, options):
    """Reductions on the side stream; sums over copies of shards, which are waited for by the next backward."""
    with alone_in(4), collectives_of(Model()):
        mesh = lonely_mesh(4, shard=options.get("shard"))
        engine = engine_of(stage=stage, mesh=mesh, exact=options.get("exact", False))
        with modelled(engine) as model:
            die(engine, 0)
            under_way = [unit for unit, _ in engine.reductions._over_copies]
            assert bool(under_way) == ("shard" in options)
            engine.zero_grad()
            assert all(unit.gradients.is_there == (unit in under_way) for unit in engine.units)
            backward(engine, 1)
            engine.step()
    assert not model.races
    assert held(engine) == 0


# --- freezing -----------------------------------------------------------------------------------


def unfrozen(stage, mesh):
    """An engine, and a unit that was unfrozen behind the last backward of the step that is due."""
    model = build("net", width=40)
    model.layers[0].requires_grad_(False)
    engine = engine_of(model, stage=stage, mesh=mesh)
    backward(engine, 0)
    with engine.full_params():
        model.layers[0].requires_grad_(True)
    return engine, next(unit for unit in engine.units if unit.name == "layers.0")


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_unfrozen_behind_the_last_backward_of_a_step_has_gradients_of_zero(stage):
    with poisoned():
        engine, unit = unfrozen(stage, None)
    assert not unit.gradients.is_there
    engine.grad_norm()
    assert not any(piece.any() for piece in unit.gradients.reduced.owned_pieces())
    assert engine.step().applied
    assert held(engine) == 0


@pytest.mark.parametrize(("stage", "shard"), [(1, 1), (3, 2)])
def test_gradients_of_zero_have_memory_for_their_sum_over_copies(stage, shard):
    with alone_in(4), collectives_of(Model()):
        engine, unit = unfrozen(stage, lonely_mesh(4, shard=shard))
        engine.grad_norm()
        assert unit.gradients.is_there
        assert engine.step().applied
        assert held(engine) == 0


# --- updates behind the step --------------------------------------------------------------------


def widened(stage, offload):
    """Two steps, in the first of which two backwards behind its reduction have a wider buffer of local gradients."""
    engine = engine_of(stage=stage, reduce="every_step", offload=offload)
    for last in (True, False, True):
        backward(engine, int(last), last)
    for number in (2, 3):
        assert engine.step().applied
        backward(engine, number)
    engine.zero_grad()
    return engine.fingerprint(), held(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_shard_moves_into_a_wider_buffer_when_a_deferred_update_has_read_it(stage):
    assert widened(stage, LATER) == widened(stage, {})


@pytest.mark.parametrize("place", ["host", "part"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_units_gradients_go_with_its_own_update_behind_the_step(stage, place):
    offload = {"host": LATER, "part": {"optimizer": "host", "fraction": 0.5}}[place]
    resident, engine = engine_of(stage=stage), None
    with poisoned():
        engine = engine_of(stage=stage, offload=offload)
    for number in range(3):
        for each in (resident, engine):
            loss = loss_of(each, batch(number))
            assert held(each) == 0
            each.backward(loss)
            each._parts.stepper.step(wait=False)
        updates = engine.optimizer.updates
        due = [unit.name for unit in updates._queue]
        assert there(engine) == set(due) == {unit.name for unit in engine.units}
        updates.through(updates._queue[1])
        assert there(engine) == set(due[2:])
    assert engine.fingerprint() == resident.fingerprint()
    assert held(engine) == 0


# --- in a plan ----------------------------------------------------------------------------------


def planned(**options):
    """Gradients in the turns of a backward, by unit when it is reduced and before that, and in the instants of a plan."""
    plan = ParallelPlan(**{"micro_batch": 2} | options)
    model = model_of(root=64)
    ((moving,),) = [backwards(model, plan, 0).values()]
    units = [unit for each in rank_model(model, plan, 0).units.values() for unit in each]
    whole, opened = (
        {unit.name: sum(gradient_bytes(unit.plan(plan), unit.layout, reduced)) for unit in units}
        for reduced in (True, False)
    )
    found = [(name, parts.get("gradients", 0.0) + parts["padding"]) for name, parts in instants(model, plan)]
    return [sum(each) for each in moving.gradients], whole, opened, found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plan_of_one_micro_batch_has_gradients_that_have_come_by_each_instant(stage):
    turns, whole, opened, found = planned(dp=2, stage=stage)
    at_rest = found[-1][1]
    of_block = whole["blocks.3"]
    assert opened["blocks.3"] == {0: of_block, 1: of_block / 2, 2: 0, 3: 0}[stage], (
        "bf16, and a half in fp32 at stage 1"
    )
    passed = [0.0, *(whole["head"] + number * of_block for number in range(5))]
    own = [0.0, *[opened["blocks.3"] + opened["root"]] * 4, opened["embed"] + opened["root"]]
    assert turns == pytest.approx([sum(each) for each in zip(passed, own, strict=True)])
    assert [size - at_rest for _, size in found[:-3]] == pytest.approx(turns)
    assert [name for name, _ in found[-3:]] == ["end of the backward", "optimizer step", "between two steps"]
    assert [size - at_rest for _, size in found[-3:-1]] == pytest.approx([sum(whole.values())] * 2)
    device = states(model_of(root=64), ParallelPlan(dp=2, stage=stage, micro_batch=2)).device
    assert found[-2][1] == pytest.approx(float(device.states.gradients + device.padding))


@pytest.mark.parametrize("options", [{"accumulate": 4}, {"accumulate": 4, "exact": True}])
def test_a_plan_of_several_micro_batches_has_all_gradients_in_each_backward(options):
    _, whole, _, found = planned(dp=2, stage=2, **options)
    assert [size - found[-1][1] for _, size in found[:-1]] == pytest.approx([sum(whole.values())] * (len(found) - 1))


@pytest.mark.parametrize(("place", "waits"), [("optimizer", True), ("gradients", False)])
def test_a_plan_has_gradients_between_two_steps_where_the_engine_has(place, waits):
    """Updates of states off the device are made behind the next forward, and gradients on the host are not here."""
    offload = {"offload": "host", "gradients": "host"} if place == "gradients" else {"offload": "host"}
    _, whole, _, found = planned(dp=2, stage=3, **offload)
    resting, stepping = (dict(found)[name] for name in ("between two steps", "optimizer step"))
    assert resting == stepping
    assert (sum(whole.values()) > 0) == waits
    engine = engine_of(stage=3, offload={"optimizer": "host"} | ({} if waits else {"gradients": "host"}))
    backward(engine, 0)
    engine.step()
    assert (held(engine) > 0) == waits
