"""No two streams of an engine touch the same memory in no order: vector clocks over every operation of training steps.

The cases have every possible pair of two settings' values.
"""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from bases import base_folder
from meshes import LOSSES, engine_of, micro_batches, sum_of
from mixtures import mixture, summand
from models import adamw, batch, net
from pipelines import covering
from tensors import tiny

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.config import load
from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import Arena
from zero3d.models.trained import open_trained
from zero3d.zero import weights
from zero3d.zero.exact.gradients import ExactShard
from zero3d.zero.gradient_shards import GradientShard
from zero3d.zero.hooks import Hooks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import COMPUTE, FAULTS, Model, alone_in, collectives_of, lonely_mesh, modelled, uneven_experts

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


AXES = (
    ("", "tp", "pp", "ep", "ep fast", "sp", "sp gather", "shard", "shard 1"),  # of 4 ranks
    (2, 3, "3 cast"),
    ("same", "int8"),  # zero.gather_wire
    (None, 2),  # zero.second_shard
    ("same", "bf16", "int8", "int4", "int4 stochastic"),  # zero.slow_wire
    ("none", "lora", "qlora"),
    (False, True),  # tiles of layers and of the loss
    ("none", "full"),  # recomputation
    (0, 1),  # replay
    (False, True),  # exact
)


def is_possible_on_axes(case):
    axis, stage, wire, second, slow, adapters, tiled, _, replay, exact = case
    of_stage_3 = stage != 2 or (wire == "same" and second is None)
    of_copies = axis.startswith("shard") or slow == "same"
    experts = axis.startswith("ep")
    return (
        of_stage_3 and of_copies and not (exact and (replay or slow != "same" or wire != "same"))
        and not (second and (axis in ("tp", "pp", "shard", "shard 1") or experts))
        and not (experts and (tiled or replay or adapters != "none")) and not (axis == "ep fast" and exact)
        and not (adapters == "qlora" and (tiled or axis in ("tp", "pp", "sp", "sp gather")))
    )  # fmt: skip


def tiny_batches(number, count):
    """Those of `micro_batches` with 9 tokens each: ranks of an sp group have 5 and 4."""
    return [summand(number, each) for each in range(count)]


def run_on_axes(case, folder):
    """The model of two steps, an evaluation and a stream of weights."""
    axis, stage, wire, second, slow, adapters, tiled, activations, replay, exact = case
    name, _, how = axis.partition(" ")
    degrees = {"dp": 2, name: 2} if name in ("tp", "pp") else {"dp": 4}
    degrees |= {"ep": {"ep": 2}, "sp": {"sp": 2}, "shard": {"shard": 1 if how == "1" else 2}}.get(name, {})
    form, _, rounding = slow.partition(" ")
    options = {"weights": None, "weight_shards": "cast" if stage == "3 cast" else "kept"}
    with alone_in(4, rank=2 if name == "pp" else 1), collectives_of(Model()), uneven_experts():
        if adapters == "qlora":
            model = {"path": str(folder), "quantize": "nf4"}
            opened = open_trained(load({"model": model, "lora": {"rank": 4, "targets": ["all-linear"]}}))
            module, options["weights"] = opened.module, opened.weights
        else:
            layers = 4 if name == "pp" else 2
            module = mixture() if name == "ep" else tiny("llama", kv_heads=4, layers=layers, lora=adapters == "lora")
        recompute(module, activations)
        engine = engine_of(
            module, lonely_mesh(**degrees), stage=2 if stage == 2 else 3, precision="bf16", gather_wire=wire, second_shard=second, slow_wire=form,
            slow_rounding=rounding or "nearest", gather_budget=4096 if tiled else None, tiled_loss=tiled, replay=replay, exact=exact,
            experts="fast" if axis == "ep fast" else "exact", sp_kind="gather" if axis == "sp gather" else "auto", optimizer=adamw,
            accumulate=4 if name == "pp" else 2, schedule="1f1b" if name == "pp" else None, **options,
        )  # fmt: skip
        given = tiny_batches if name in ("ep", "sp") else micro_batches
        with modelled(engine) as model:
            for number in range(2):
                engine.train_batch(given(number, engine.accumulation.usual), wait=False)
                assert engine.last_step.reason == "applied"
            engine.evaluate(given(0, 2))
            for bucket in engine.stream_weights(bucket_bytes=8192):
                assert bucket
    return model


PAIRS = covering(SETTINGS, is_possible)
ON_AXES = covering(AXES, is_possible_on_axes)
FEW_ON_AXES = [next(case for case in ON_AXES if case[:2] == (axis, 3)) for axis in ("sp", "shard 1", "ep")]
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


@pytest.mark.parametrize("case", [
    *FEW_ON_AXES, *(pytest.param(case, marks=pytest.mark.long) for case in ON_AXES if case not in FEW_ON_AXES),
], ids=lambda case: " ".join(map(str, case)))  # fmt: skip
def test_on_every_axis_and_wire_accesses_are_ordered_and_all_memory_is_of_computes_pool(case, base):
    model = run_on_axes(case, base)
    assert model.races == {}
    assert {allocation.stream for allocation in model.allocations} == {COMPUTE}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("base") / "llama", intermediate_size=96)


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
        monkeypatch.setattr(GradientShard, "_forget_gather", lambda self: setattr(self, "_gathering", None))
        monkeypatch.setattr(GradientShard, "wait", lambda self: None)
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
    sums, owner, name = [], *((Comm, "_sum") if order == "rank order" else (ExactShard, "_sum"))
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
