"""Tokens by expert are counted once, and a router's bias moves by those of all ranks, at any ep."""

from functools import partial

import pytest
import torch
from mixtures import SUMMANDS, curve, engine_of, mixture, own_part, summand

from zero3d.activations.recomputation import recompute
from zero3d.errors import ConfigError

RATE, STEPS, FEW = 0.125, range(2), 4
FAMILY = "deepseek_v3"
BIAS = "e_score_correction_bias"


def biases(engine):
    return {name: buffer.tolist() for name, buffer in engine.module.named_buffers() if name.endswith(BIAS)}


def levelled(cases, summands=FEW):
    """Curve, biases and counts of cases (ep, stage, recomputed) in exact mode, with evaluations between the steps."""
    found = []
    for ep, stage, recomputed in cases:
        model = mixture(FAMILY)
        if recomputed:
            recompute(model, "full")
        accumulate = summands // torch.distributed.get_world_size()
        engine = engine_of(
            model, ep=ep, stage=stage, exact=True, accumulate=accumulate, clip_norm=0.05, expert_bias_rate=RATE
        )
        curves = []
        for step in STEPS:
            curves.append(curve(engine, [step], summands=summands))
            engine.evaluate(own_part(engine, 100 + step, summands=FEW))
        found.append((curves, biases(engine), engine.expert_load.over_dp()))
    return found


CASES = [(1, 3, False), (2, 3, True), (2, 0, False)]  # ep, stage, recomputed


@pytest.mark.parametrize("cases", [CASES[1:2], pytest.param(CASES, marks=pytest.mark.long)], ids=["few", "all"])
def test_one_fingerprint_and_one_bias_at_any_ep(ranks, cases):
    of_one = ranks(1, levelled, [(1, 3, False)])[0]
    assert ranks(2, levelled, cases)[0] == of_one * len(cases)
    moved = [value for values in of_one[0][1].values() for value in values]
    assert any(moved)


@pytest.mark.long
def test_one_bias_at_four_ranks(ranks):
    of_one = ranks(1, levelled, [(1, 3, False)], SUMMANDS)[0]
    cases = [(1, 1, True), (2, 2, False), (4, 3, True), (4, 0, False)]
    assert ranks(4, levelled, cases, SUMMANDS)[0] == of_one * len(cases)


def add_counts(count, router, args, chosen):
    count += torch.bincount(chosen[2].reshape(-1), minlength=len(count))


def one_step():
    """Biases before and after a step, counts by hand, and the engine's."""
    model = mixture(FAMILY)
    counted = {}
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            count = torch.zeros(8, dtype=torch.int64)
            counted[f"{name}.{BIAS}"] = count
            module.register_forward_hook(partial(add_counts, count))
    engine = engine_of(model, dp=1, expert_bias_rate=RATE, accumulate=SUMMANDS)
    before = biases(engine)
    engine.train_batch([summand(0, number) for number in range(SUMMANDS)])
    by_hand = {name: count.tolist() for name, count in counted.items()}
    return before, biases(engine), by_hand, engine.expert_load.over_dp()


def test_a_bias_moves_by_the_sign_of_mean_less_count(ranks):
    before, after, counted, load = ranks(1, one_step)[0]
    assert list(counted.values()) == list(load.values())
    for name, count in counted.items():
        mean = sum(count) / len(count)
        moves = [RATE * ((mean > tokens) - (mean < tokens)) for tokens in count]
        assert after[name] == pytest.approx([bias + move for bias, move in zip(before[name], moves, strict=True)])


def resumed(folder):
    """Biases of a run of two steps, and of one that stopped and went on with another ep."""
    options = {"exact": True, "expert_bias_rate": RATE, "accumulate": FEW // 2}
    whole = engine_of(mixture(FAMILY), **options)
    curve(whole, range(2), summands=FEW)
    first = engine_of(mixture(FAMILY), ep=2, **options)
    curve(first, range(1), summands=FEW)
    first.save(folder)
    again = engine_of(mixture(FAMILY), **options)
    again.load(folder)
    curve(again, range(1, 2), summands=FEW)
    return (biases(whole), whole.fingerprint()), (biases(again), again.fingerprint())


def test_a_bias_goes_on_where_it_was_saved(ranks, tmp_path):
    whole, again = ranks(2, resumed, tmp_path)[0]
    assert whole == again


@pytest.mark.parametrize(("family", "options", "said"), [
    ("qwen3_moe", {"expert_bias_rate": 0.1}, "no module of Qwen3MoeForCausalLM has one"),
    (FAMILY, {"expert_bias_rate": -0.1}, "pass 0"),
    (FAMILY, {"expert_bias_rate": 0.1, "replay": 2}, "counts every token once"),
])  # fmt: skip
def test_what_cannot_be_is_refused(family, options, said):
    with pytest.raises(ConfigError, match=said):
        engine_of(mixture(family), dp=1, **options)
