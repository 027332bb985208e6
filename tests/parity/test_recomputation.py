"""Contract 4: recomputation on the blocks equals none bit for bit at every stage, and moves what the formula says."""

import pytest
import torch
from models import adamw, batch, bits, loss_of, net

import zero3d
from zero3d.account.traffic import step_traffic
from zero3d.activations.recomputation import recompute
from zero3d.zero.tokens import TokenEvent, count_gathers, token_order

LAYERS = 5
NAMES = [f"layers.{i}" for i in range(LAYERS)]
SEGMENTS = {"none": [], "full": [], "every:2": [NAMES[:2], NAMES[2:4], NAMES[4:]]}


def with_replays(events, segments):
    """The tokens of a micro-batch, with every segment run once more as the backward of its last unit begins.

    At stage 3 that is at most one gather more per unit: the last one of a segment is there already.
    """
    segment_of = {units[-1]: units for units in segments}
    for event in events:
        yield event
        if event.acquire and isinstance(event.token, tuple) and event.token[0] == "backward":
            for unit in segment_of.get(event.unit, ()):
                yield from (TokenEvent(unit, "replay", acquire) for acquire in (True, False))


def run_policies(stage, precision, micro_batches):
    """On each rank, by policy: losses and norms, the weights' hash, gathers, the ledger, and the formula."""
    rank = torch.distributed.get_rank()
    found = {}
    for policy in SEGMENTS:
        model = net(layers=LAYERS, dropout=0.2).train()
        recompute(model, policy)
        engine = zero3d.Engine(
            model, stage=stage, precision=precision, clip_norm=0.5, accumulate=micro_batches, optimizer=adamw
        )
        torch.manual_seed(rank)
        curve = []
        for step in range(2):
            engine.traffic.reset()
            engine.gathers.events = []
            for m in range(micro_batches):
                loss = loss_of(engine, batch(10 * step + m, rank))
                engine.backward(loss)
                curve.append(float(loss.detach()))
            curve.append(float(engine.step().grad_norm))
        gathers = count_gathers(engine.gathers.events)
        moved = {(e.op, e.unit): (e.calls, e.elements, e.bytes) for e in engine.traffic}
        formula = step_traffic(stage, engine.traffic_units, engine.dp.size, gathers, micro_batches)
        with engine.full_params():
            weights = bits(model.parameters())
        found[policy] = (curve, weights), dict(gathers), moved, {key: tuple(row) for key, row in formula.items()}
    return found


@pytest.mark.parametrize(("stage", "precision", "micro_batches"), [
    (3, "bf16", 2),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (0, "bf16", 2), (1, "fp32", 1), (2, "fp32", 2), (3, "bf16", 1),
    )),
])  # fmt: skip
def test_recomputation_equals_none_and_the_ledger_the_formula(ranks, stage, precision, micro_batches):
    for found in ranks(2, run_policies, stage, precision, micro_batches):
        for policy, (run, gathers, moved, formula) in found.items():
            assert run == found["none"][0], policy
            assert moved == formula, policy
            if stage == 3:
                order = token_order(["embed", *NAMES, "head"], root="root", no_backward=["embed"])
                each = count_gathers(with_replays(order, SEGMENTS[policy]))
                assert gathers == {unit: count * micro_batches for unit, count in each.items()}, policy
        assert found["full"][1] == found["none"][1]
