"""No two streams of an engine touch the same memory in no order: vector clocks over every operation of training steps.

The cases have every possible pair of two settings' values.
"""

import sys
from pathlib import Path

import pytest
from meshes import LOSSES, engine_of, micro_batches, sum_of
from models import adamw
from pipelines import covering
from tensors import tiny

from zero3d.activations.recomputation import recompute
from zero3d.zero.weights import Weights

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import COMPUTE, FAULTS, Model, alone_in, collectives_of, lonely_mesh, modelled

SETTINGS = (
    ((4, 1, 1), (1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)),  # dp, tp, pp
    (0, 1, 2, 3),
    (1, 2),  # micro-batches; a pipeline's are 4
    ("rank order", "exact"),
    ("fp32", "bf16", "bf16 reduced in bf16"),
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
    numbers, _, wire = precision.partition(" reduced in ")
    reduce = {"auto": "auto", "every_use": "every_micro_batch", "every_step": "every_step"}[release]
    stage_with_loss = 0 if schedule == "zbv" else pp - 1
    with alone_in(dp * tp * pp, rank=stage_with_loss * dp * tp), collectives_of(Model()):
        module = tiny(family, kv_heads=4, layers=4 if pp > 1 else 2)
        recompute(module, activations)
        engine = engine_of(
            module, lonely_mesh(dp, tp, pp), stage=stage, precision=numbers, reduce_dtype=wire or "fp32",
            release=release, reduce=reduce, exact=order == "exact", schedule=schedule, accumulate=count,
            optimizer=adamw, loss=None if loss == "model's" else sum_of,
        )  # fmt: skip
        with modelled(engine, without) as model:
            for number in range(2):
                engine.train_batch(micro_batches(number, count))
                assert engine.last_step.reason == "applied"
            engine.evaluate(micro_batches(0, 2))
    assert model.operations > 500
    return model


@pytest.mark.parametrize("case", covering(SETTINGS, is_possible), ids=lambda case: " ".join(map(str, case)))
def test_accesses_are_ordered_and_all_memory_is_of_computes_pool(case):
    model = run(case)
    assert model.races == {}
    assert {allocation.stream for allocation in model.allocations} == {COMPUTE}
    lent = {allocation.buffer for allocation in model.allocations}
    assert "wire" in lent or case[0][0] == 1 or "fp32" in case  # whose sums of one micro-batch land where they stay


def test_new_weights_that_nobody_waits_for_are_found(monkeypatch):
    monkeypatch.setattr(Weights, "ready", lambda self: None)
    assert run(((4, 1, 1), 1, *PLAIN[1:])).races


PLAIN = (3, 2, "rank order", "bf16", "auto", "none", None, "llama", "model's")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dp", [1, 4])
def test_a_missing_wait_is_found(dp, fault):
    """What waits for a collective waits for its lane, too; one rank has no collectives."""
    expected = fault != ("wait" if dp == 1 else "join")
    assert bool(run(((dp, 1, 1), *PLAIN), without=fault).races) is expected
