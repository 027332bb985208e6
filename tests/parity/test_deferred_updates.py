"""Updates of states off the device: behind the next forward, each before its unit's weights are used, with what step() fixed."""

import gc
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from itertools import product
from unittest import mock

import pytest
import torch
from buckets import buckets_of
from models import Block, adamw, batch, bits, build, loss_of, net
from tiers import PLACES, RESIDENT, sum_of
from torch import nn

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.offload.tiered_records import TieredRecords
from zero3d.offload.updates import RecordUpdates
from zero3d.zero.pending_parameters import PendingParameter
from zero3d.zero.reductions import Reductions

HOST, DISK = "host, device updates", "disk"
RESIDENTS = {}


def paired(*chosen, places=("host", DISK), stages=(0, 2, 3)):
    """All pairs of a place and a stage, those that are not chosen long."""
    return [pytest.param(*pair, marks=() if pair in chosen else pytest.mark.long) for pair in product(places, stages)]


def given(number):
    return [{"ids": batch(number), "factor": torch.tensor(1.0)}]


@contextmanager
def engine_of(place, folder, stage=2, model=None, **options):
    """An engine whose states are in records of 2048 elements."""
    with buckets_of(2048):
        made = {"stage": stage, "optimizer": adamw, "loss": sum_of, "clip_norm": 0.5} | options
        offload = {**PLACES[place], "directory": folder}
        yield zero3d.Engine(model or build("net", width=40), offload=offload, **made)


def resident(run, *args):
    """What a run with everything on the device finds, which needs no folder. Made once."""
    if (key := (run, *args)) not in RESIDENTS:
        RESIDENTS[key] = run(RESIDENT, None, *args)
    return RESIDENTS[key]


def due(engine):
    """Names of units whose update is due."""
    updates = engine.optimizer.updates
    return [] if updates is None else [unit.name for unit in updates._queue]


# --- order ----------------------------------------------------------------------------------------


@contextmanager
def logged(engine):
    """What an engine does inside: updates, forwards of modules with units, records asked for, gradients."""
    log, names = [], {id(p): unit.name for unit in engine.units for p in unit.weights.params}
    update, ahead, receive = RecordUpdates._update_bucket, TieredRecords.ahead, Reductions.receive

    def updated(self, portion, weights):
        update(self, portion, weights)
        log.append(("updated", portion.unit.name))

    def asked(self, index):
        log.append(("asked for", index))
        ahead(self, index)

    def received(self, unit, index, grad):
        receive(self, unit, index, grad)
        log.append(("gradient", unit.name))

    with ExitStack() as stack:
        for module in (engine.module.embed, *engine.module.layers, engine.module.head):
            name = names[id(next(module.parameters()))]
            hook = module.register_forward_pre_hook(lambda *_, name=name: log.append(("forward", name)))
            stack.callback(hook.remove)
        stack.enter_context(mock.patch.object(RecordUpdates, "_update_bucket", updated))
        stack.enter_context(mock.patch.object(TieredRecords, "ahead", asked))
        stack.enter_context(mock.patch.object(Reductions, "receive", received))
        yield log


@pytest.mark.parametrize(("place", "stage"), paired(("host", 0), (DISK, 2), (DISK, 3)))
def test_a_forward_begins_after_its_units_update_and_before_those_of_later_units(tmp_path, place, stage):
    with engine_of(place, tmp_path, stage) as engine:
        engine.train_batch(given(0), wait=False)
        units = [unit.name for unit in engine.optimizer.updates.buckets]
        assert due(engine) == units
        with logged(engine) as log:
            engine.train_batch(given(1), wait=False)
    updated = {unit: max(i for i, event in enumerate(log) if event == ("updated", unit)) for unit in units}
    assert units == ["root", "embed", "layers.0", "layers.1", "layers.2", "head"]
    forward = {unit: log.index(("forward", unit)) for unit in units[1:]}
    assert all(updated[unit] < forward[unit] for unit in forward)
    assert sorted(units, key=updated.get) == units
    ahead = {0: 0, 2: 1, 3: 2}[stage]  # one is sent, gathers of two are begun, before they are used
    for unit in forward:
        later = units[units.index(unit) + 1 + ahead :]
        assert all(forward[unit] < updated[other] for other in later), unit
    assert len([event for event in log if event[0] == "updated"]) == sum(
        map(len, engine.optimizer.updates.buckets.values())
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_records_are_asked_for_before_the_backward_ends(tmp_path, stage):
    with engine_of(HOST, tmp_path, stage) as engine:
        engine.train_batch(given(0))
        engine.optimizer.flush()
        with logged(engine) as log:
            engine.train_batch(given(1), wait=False)
    first = [record for what, record in log if what == "asked for"][:2]
    assert first == [0, 1]
    assert log.index(("asked for", 1)) < max(i for i, (what, _) in enumerate(log) if what == "gradient")


# --- what step() fixes ----------------------------------------------------------------------------


def changed_after_steps(place, folder, stage):
    """The caller changes learning rate, weight decay and betas between a step and the next forward."""
    groups = [{"match": "*norm*|*.bias", "weight_decay": 0.0}]
    with engine_of(place, folder, stage, param_groups=groups) as engine:
        for number in range(4):
            engine.train_batch(given(number), wait=False)
            for group in engine.optimizer.torch.param_groups:
                group.update(lr=1e-3 * (1 + number), weight_decay=0.02 * number, betas=(0.5 + 0.1 * number, 0.99))
        return engine.fingerprint(), [group["lr"] for group in engine.optimizer.torch.param_groups]


@pytest.mark.parametrize(
    ("place", "stage"),
    paired(("host", 3), (HOST, 1), ("part on disk", 3), places=("host", HOST, "part on disk"), stages=(1, 3)),
)
def test_options_that_change_after_a_step_are_of_the_next_one(tmp_path, place, stage):
    found = changed_after_steps(place, tmp_path, stage)
    assert found == resident(changed_after_steps, stage)
    assert found[1] == [4e-3, 4e-3]


# --- who reads weights finds the new ones ---------------------------------------------------------


def after_steps(place, folder, stage, wait, read):
    with engine_of(place, folder, stage) as engine:
        for number in range(2):
            if wait is None:
                engine.backward(loss_of(engine, batch(number)))
                engine.step()
            else:
                engine.train_batch(given(number), wait=wait)
        waiting = [type(p) is PendingParameter for p in engine.module.parameters()], due(engine)
        return waiting, read(engine)


def plain(engine):
    """Every parameter read on its own, the last one first."""
    return [bits([p]) for p in reversed(list(engine.module.parameters()))], due(engine)


def whole(engine):
    with engine.full_params():
        return [bits([p]) for p in engine.module.parameters()], due(engine)


# Of stages, places and ways to end a step every pair but a few; the rest is long.
READ = {
    (0, "host", None),
    (1, DISK, None),
    (0, DISK, True),
    (2, "host", True),
    (0, "host", False),
    (1, "host", False),
    (2, DISK, False),
}


@pytest.mark.parametrize(("stage", "place", "wait"), [
    pytest.param(*case, marks=() if case in READ else pytest.mark.long)
    for case in product((0, 1, 2), ("host", DISK), (None, True, False))
])  # fmt: skip
def test_below_stage_3_a_plain_read_after_a_step_gives_the_new_weights(tmp_path, place, stage, wait):
    (classes, left), (found, after) = after_steps(place, tmp_path, stage, wait, plain)
    assert found == resident(after_steps, stage, wait, plain)[1][0]
    assert set(classes) == {wait is False}
    assert bool(left) == (wait is False)
    assert after == []


@pytest.mark.parametrize(("place", "wait"), [
    ("host", None), ("all on disk", True), ("all on disk", False),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (("all on disk", None), ("host", True), ("host", False))),
])  # fmt: skip
def test_at_stage_3_updates_are_left_and_full_params_has_the_new_weights(tmp_path, place, wait):
    (_, left), (found, after) = after_steps(place, tmp_path, 3, wait, whole)
    assert found == resident(after_steps, 3, wait, whole)[1][0]
    assert "head" in left
    assert after == []


def written_between(place, folder):
    """A part of the model is opened while updates are due, and one parameter is read before."""
    found = []
    with engine_of(place, folder, 3) as engine:
        for number in range(3):
            engine.train_batch(given(number), wait=False)
            with engine.full_params(engine.module.layers[1]), torch.no_grad():
                found.append(bits(engine.module.layers[1].parameters()))
                engine.module.layers[1].up.weight[::2] *= 1.25
        return [*found, engine.fingerprint()]


@pytest.mark.parametrize("place", ["host", "all on disk"])
def test_a_part_that_is_written_between_steps_has_its_update_before(tmp_path, place):
    assert written_between(place, tmp_path) == resident(written_between)


# --- what drains ----------------------------------------------------------------------------------


def drained(place, folder, stage):
    """After each method: what it returned, and how many units were due before and after."""
    found, counts = [], []
    with engine_of(place, folder / "tier", stage, build("llama"), loss=None) as engine:
        ids = batch(0)
        batches = [[{"input_ids": batch(n), "labels": batch(n)}] for n in range(8)]
        methods = {
            "save": lambda: engine.save(folder / f"saved-{place}") and "",
            "load": lambda: engine.load(folder / f"saved-{place}"),
            "full_params": lambda: whole(engine)[0],
            "export": lambda: (engine.export(folder / f"out-{place}") / "model.safetensors").read_bytes(),
            "evaluate": lambda: float(engine.evaluate([batches[0][0]])),
            "generate": lambda: engine.generate(ids[:, :2], max_new_tokens=4).tolist(),
            "fingerprint": engine.fingerprint,
            "release": engine.release,
        }
        for number, (name, method) in enumerate(methods.items()):
            engine.train_batch(batches[number], wait=False)
            before = len(due(engine))
            found.append((name, method()))
            counts.append((before, len(due(engine))))
        return [*found, engine.fingerprint()], counts


def everywhere(folder, stage):
    return {place: drained(place, folder, stage) for place in (RESIDENT, "host", DISK)}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_whatever_looks_at_states_finds_them_updated(ranks, tmp_path, stage):
    (found,) = ranks(1, everywhere, tmp_path, stage)
    wanted, none = found.pop(RESIDENT)
    assert set(none) == {(0, 0)}
    for results, counts in found.values():
        assert results == wanted
        assert {after for _, after in counts} == {0}
        assert min(before for before, _ in counts) > 0


def weights_after_the_engine(place, folder):
    model = build("net", width=40)
    with engine_of(place, folder, 1, model) as engine:
        engine.train_batch(given(0), wait=False)
        left = due(engine)
        del engine
    gc.collect()
    return left, bits(model.parameters())


@pytest.mark.parametrize("place", ["host", DISK])
def test_a_model_that_outlives_its_engine_has_the_new_weights(tmp_path, place):
    left, found = weights_after_the_engine(place, tmp_path)
    assert left
    assert found == resident(weights_after_the_engine)[1]


ENDS = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from parity.test_deferred_updates import due, engine_of, given
with engine_of({place!r}, Path({folder!r}), {stage}) as engine:
    for number in range(2):
        engine.train_batch(given(number), wait=False)
    assert due(engine)
{then}
"""


@pytest.mark.long
@pytest.mark.parametrize("then", ["", "raise SystemExit(0)", "del engine"])
@pytest.mark.parametrize(("place", "stage"), [("host", 1), (DISK, 3), ("all on disk", 3)])
def test_a_process_that_ends_with_updates_due_ends_quietly(tmp_path, place, stage, then):
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    script = ENDS.format(tests=tests, place=place, folder=str(tmp_path), stage=stage, then=then)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# --- what the next forward does not use -----------------------------------------------------------


class Branched(nn.Module):
    """Has the blocks that the caller says; they come after the head in the order of units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(61, 40)
        self.head = nn.Linear(40, 61)
        self.layers = nn.ModuleList(Block(40) for _ in range(3))
        self.takes = (0, 1, 2)

    def forward(self, ids):
        if self.takes is None:  # no parameter has a gradient
            return torch.nn.functional.one_hot(ids, 61).float().requires_grad_() * 2
        x = self.embed(ids)
        for i in self.takes:
            x = self.layers[i](x)
        return self.head(x)


BRANCHES = ((0, 1, 2), (0,), (0,), (2,), None, (1, 2), None, (), (), (0, 2), (0, 1, 2))


def branched(place, folder, stage, micro_batches=1):
    """The fingerprint, and which units were still due after each forward."""
    left = []

    def loss(output, given):
        left.append(due(engine))
        return sum_of(output, given)

    with engine_of(place, folder, stage, Branched(), accumulate=micro_batches, loss=loss) as engine:
        for number, takes in enumerate(BRANCHES):
            engine.module.takes = takes
            engine.train_batch([*given(number), *given(50 + number)][:micro_batches], wait=False)
        return engine.fingerprint(), left


@pytest.mark.parametrize(("place", "stage", "micro_batches"), [
    ("host", 2, 2), (DISK, 3, 1),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in (("host", 0, 1), (DISK, 0, 1), ("host", 1, 2), (DISK, 1, 2), (DISK, 2, 2), ("host", 3, 1))),
])  # fmt: skip
def test_units_that_the_next_forward_skips_are_updated_by_the_next_step(tmp_path, place, stage, micro_batches):
    found, left = branched(place, tmp_path, stage, micro_batches)
    assert found == resident(branched, stage, micro_batches)[0]
    assert any(left) == (stage == 3)  # below, a forward that ends has all weights


# --- recomputation, compilation -------------------------------------------------------------------


def with_blocks(place, folder, stage, change):
    model = net(width=40)
    with engine_of(place, folder, stage, model) as engine:
        change(engine.module)
        losses = [float(engine.train_batch(given(number), wait=False)) for number in range(4)]
        return losses, engine.fingerprint()


def compiled(model):
    for block in model.layers:
        block.compile(backend="eager")


@pytest.mark.parametrize(("policy", "stage"), [
    ("every:2", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in [("full", 2), ("full", 3), ("every:2", 2)]),
])  # fmt: skip
def test_blocks_that_are_recomputed_use_the_new_weights(tmp_path, stage, policy):
    found = [with_blocks(place, tmp_path / place, stage, lambda model: recompute(model, policy))
             for place in (RESIDENT, "host", DISK)]  # fmt: skip
    assert found[1:] == [found[0]] * 2


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks_use_the_new_weights(tmp_path, stage):
    found = [
        with_blocks(place, tmp_path / place, stage, compiled)
        for place in (RESIDENT, "host", "all on disk" if stage == 3 else DISK)
    ]
    assert found[1:] == [found[0]] * 2
