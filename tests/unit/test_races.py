"""No two streams of an engine touch the same memory in no order: vector clocks over every operation of training steps.

The cases have every possible pair of two settings' values.
"""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from meshes import LOSSES, engine_of, micro_batches, sum_of
from models import adamw, batch, net
from pipelines import covering
from tensors import tiny

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import Arena
from zero3d.zero import weights
from zero3d.zero.exact.gradients import ExactGradients
from zero3d.zero.gradients import Gradients
from zero3d.zero.hooks import Hooks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import COMPUTE, FAULTS, Model, alone_in, collectives_of, lonely_mesh, modelled

SETTINGS = (
    ((4, 1, 1), (1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)),  # dp, tp, pp
    (0, 1, 2, 3),
    (1, 2),  # micro-batches; a pipeline's are 4
    ("rank order", "exact"),
    ("fp32", "bf16", "bf16 reduced in bf16", "bf16 split"),
    ("auto", "every_use", "every_step"),  # release; and reduce, which is every micro-batch for every use
    ("none", "every:2"),
    (None, "1f1b", "zbv"),
    ("llama", "qwen3"),
    LOSSES,
)
SHAPES, STAGES, COUNTS, ORDERS, PRECISIONS, RELEASES, ACTIVATIONS, SCHEDULES, FAMILIES, _ = SETTINGS


def is_possible(case):
    (_, _, pp), stage, _, order, precision, release, _, schedule, _, _ = case
    if order == "exact" and (precision == PRECISIONS[2] or (pp > 1 and stage > 1 and release == "every_use")):
        return False
    return (schedule is None) == (pp == 1) and (release == "auto" or stage > 1)


def run(case, without=""):
    """The model of two steps and an evaluation."""
    (dp, tp, pp), stage, count, order, precision, release, activations, schedule, family, loss = case
    count = 4 if pp > 1 else count
    numbers, _, wire = precision.removesuffix(" split").partition(" reduced in ")
    reduce = {"auto": "auto", "every_use": "every_micro_batch", "every_step": "every_step"}[release]
    stage_with_loss = 0 if schedule == "zbv" else pp - 1
    with alone_in(dp * tp * pp, rank=stage_with_loss * dp * tp), collectives_of(Model()):
        module = tiny(family, kv_heads=4, layers=4 if pp > 1 else 2)
        recompute(module, activations)
        engine = engine_of(
            module, lonely_mesh(dp, tp, pp), stage=stage, precision=numbers, reduce_dtype=wire or "fp32",
            release=release, reduce=reduce, exact=order == "exact", schedule=schedule, accumulate=count,
            optimizer=adamw, loss=None if loss == "model's" else sum_of,
            master="split" if precision.endswith("split") else "fp32",
        )  # fmt: skip
        with modelled(engine, without) as model:
            for number in range(2):
                engine.train_batch(micro_batches(number, count), wait=False)
                assert engine.last_step.reason == "applied"
            engine.evaluate(micro_batches(0, 2))
    assert model.operations > 500
    return model


PAIRS = covering(SETTINGS, is_possible)
FEW = PAIRS[:2]  # those with most pairs come first


@pytest.mark.parametrize("case", [
    *FEW, *(pytest.param(case, marks=pytest.mark.long) for case in PAIRS[2:]),
], ids=lambda case: " ".join(map(str, case)))  # fmt: skip
def test_accesses_are_ordered_and_all_memory_is_of_computes_pool(case):
    model = run(case)
    assert model.races == {}
    assert {allocation.stream for allocation in model.allocations} == {COMPUTE}
    lent = {allocation.buffer for allocation in model.allocations}
    assert "wire" in lent or case[0][0] == 1 or "fp32" in case  # whose sums of one micro-batch land where they stay


def read_by(engine):
    """What reads all weights after a step: by name, how."""

    def in_full_params():
        with engine.full_params():
            return list(engine.module.parameters())

    def after_a_bare_step():
        for given in micro_batches(2, engine.accumulation.usual):
            engine.backward(engine(**given).loss)
        engine.step()
        return list(engine.module.parameters())

    def after(do):
        do()
        return list(engine.module.parameters())

    ids = micro_batches(1, 1)[0]["input_ids"]
    return {
        "full_params": in_full_params,
        "state_dict": lambda: list(engine.module.state_dict().values()),
        "evaluate": lambda: after(lambda: engine.evaluate(micro_batches(1, 1))),
        "generate": lambda: after(lambda: engine.generate(ids, max_new_tokens=1)),
        "step": after_a_bare_step,
        "no method": lambda: list(engine.module.parameters()),
    }


@pytest.mark.parametrize(("reader", "planted"), [
    ("full_params", False), ("state_dict", True), ("no method", True), ("no method", False),
    *(pytest.param(reader, planted, marks=pytest.mark.long) for reader, planted in (
        ("full_params", True), ("state_dict", False),
        *product(("evaluate", "generate", "step"), (False, True)),
    )),
])  # fmt: skip
def test_new_weights_are_waited_for_by_all_that_reads_them(monkeypatch, reader, planted):
    if planted:
        monkeypatch.setattr(weights, "expect", lambda params, wait: True)
    with alone_in(4), collectives_of(Model()):
        engine = engine_of(tiny("llama"), lonely_mesh(4), stage=1, precision="bf16", optimizer=adamw)
        with modelled(engine) as model:
            engine.train_batch(micro_batches(0, 2), wait=False)
            for weight in read_by(engine)[reader]():
                weight.detach().sum()
    assert bool(model.races) is (planted and reader in ("state_dict", "no method"))


def test_what_the_root_uses_is_sent_first_so_that_nothing_else_is_waited_for_with_it():
    with alone_in(4), collectives_of(Model()):
        engine = engine_of(tiny("llama"), lonely_mesh(4), stage=1, precision="bf16", optimizer=adamw)
        with modelled(engine) as model:
            engine.train_batch(micro_batches(0, 2), wait=False)
            (root,) = (unit for unit in engine.units if unit.deferred)
            root.weights.ready()
            root.weights.full.sum()
            assert not model.races
            engine.units[0].weights.full.sum()  # nobody has waited for it
    assert model.races


@pytest.mark.parametrize("planted", [False, True])
def test_gradients_that_come_after_the_sum_is_gathered_wait_for_that(monkeypatch, planted):
    if planted:
        monkeypatch.setattr(Gradients, "_forget_gather", lambda self: setattr(self, "_gathering", None))
        monkeypatch.setattr(Gradients, "wait", lambda self: None)
    with alone_in(4), collectives_of(Model()):
        engine = zero3d.Engine(net(), stage=0, mesh=lonely_mesh(4), optimizer=adamw)
        with modelled(engine) as model:
            for number in range(2):
                output = engine(batch(number)).float()
                for loss in (output.square().mean(), output.sin().mean()):
                    loss.backward(retain_graph=True)
                assert engine.step().applied
    assert bool(model.races) is planted


def test_modules_and_parameters_that_do_not_wait_for_new_weights_are_found(monkeypatch):
    monkeypatch.setattr(Hooks, "_waiter", lambda self, units: lambda *_: self._called.update(units))
    monkeypatch.setattr(weights, "expect", lambda params, wait: True)
    assert run(((4, 1, 1), 1, *PLAIN[1:])).races


PLAIN = (3, 2, "rank order", "bf16", "auto", "none", None, "llama", "model's")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.long), 4])
def test_a_missing_wait_is_found(dp, fault):
    """One rank has nothing to wait for: no collectives, and no copies of weights and gradients."""
    assert bool(run(((dp, 1, 1), *PLAIN), without=fault).races) is (dp > 1)


@pytest.mark.parametrize("order", ORDERS)
def test_terms_are_added_up_beside_compute(monkeypatch, order):
    """Each unit's when the next one's are on their way, and the last one's before compute waits for it."""
    sums, owner, name = [], *((Comm, "_sum") if order == "rank order" else (ExactGradients, "_sum"))
    real = getattr(owner, name)

    def seen(*given, **named):
        sums.append(torch.accelerator.current_stream().name)
        real(*given, **named)

    monkeypatch.setattr(owner, name, seen)
    model = run(((4, 1, 1), 3, 2, order, "bf16", "every_use", "none", None, "llama", "model's"))
    assert not model.races
    assert len(sums) > 10
    assert COMPUTE not in sums


def test_memory_that_a_side_stream_gives_back_at_once_is_a_race(monkeypatch):
    def give_back(self, category, buffer):
        self._account(category, -buffer.nbytes)

    monkeypatch.setattr(Arena, "give_back", give_back)
    assert run(((4, 1, 1), *PLAIN)).races
