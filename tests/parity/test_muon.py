"""Muon at any stage and dp: in exact mode the bits of torch.optim.Muon on whole matrices, in one process."""

import pytest
import torch
from muon import STAGES, build, engine_of, states_of, train, written_out

STEPS = range(3)
BLOCKS = {f"net.layers.{i}.{name}.weight": lambda p: [p] for i in (0, 1) for name in ("up", "down")}


def outcome(cases, **options):
    """Of cases (stage, moment of reduction): the curve, the fingerprint, this rank's states, what is not as planned."""
    found = []
    for stage, reduce in cases:
        engine = engine_of(stage=stage, reduce=reduce, **options)
        curve = train(engine, STEPS)
        apart = [(e.category, e.planned, e.measured) for e in engine.memory if e.planned not in (None, e.measured)]
        found.append((curve, engine.fingerprint(), states_of(engine), apart))
    return found


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_exact_training_has_the_bits_of_the_written_out_loop(ranks, dp):
    cases = STAGES if dp == 2 else STAGES[::3]
    results = ranks(dp, outcome, cases)
    norms = [float.fromhex(norm) for _, norm in results[0][0][0]]
    wanted = written_out(build(), BLOCKS, norms)
    for of_rank in results:
        for _, _, states, apart in of_rank:
            assert apart == []
            assert states
            for name, key, start, values in states:
                assert torch.equal(values, wanted[name, key][start : start + len(values)]), (name, key)
    assert len({(str(curve), states) for of_rank in results for curve, states, *_ in of_rank}) == 1
