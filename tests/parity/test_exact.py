"""Contract 7: with exact=True a curve is the same bit for bit at any number of data-parallel ranks."""

from itertools import product

import pytest
import torch
from models import Net, adamw
from pipelines import covering

import zero3d
from zero3d.activations import recompute

STEPS, LEAVES, VOCAB = 12, 8, 61
STAGES = ((0, "every_step"), (1, "every_step"), (2, "every_micro_batch"), (3, "every_micro_batch"), (2, "every_step"),
          (3, "every_step"))  # fmt: skip
SETTINGS = (STAGES, ("fp32", "bf16"), (0.05, None), ("none", "full"), (0.0, 0.2))  # clip, recomputation, dropout
FIRST = (STAGES[0], "fp32", 0.05, "none", 0.0)


def build(dropout=0.0, tied=False):
    torch.manual_seed(7)
    return Net(width=96, layers=2, dropout=dropout, tied=tied)  # units that four ranks share


def leaf(step, number):
    """Micro-batch `number` of a step: other numbers of targets in each."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
    labels = ids.clone()
    labels[0, : 2 + number % 5] = -100
    return ids, labels


def loss(output, batch):
    labels = batch[1][:, 1:]
    total = torch.nn.functional.cross_entropy(
        output[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (labels != -100).sum()


class Given(torch.nn.Module):
    """A model that is called with (ids, labels)."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, ids, labels=None):
        return self.net(ids)


def engine_of(model=None, *, stage=3, reduce="auto", leaves=LEAVES, exact=True, **options):
    torch.manual_seed(torch.distributed.get_rank() + 100)  # ranks' own seeds count for nothing
    made = {"precision": "fp32", "optimizer": adamw, "clip_norm": 0.05, "loss": loss} | options
    accumulate = leaves // torch.distributed.get_world_size()
    model = Given(build()) if model is None else model
    return zero3d.Engine(model, stage=stage, reduce=reduce, accumulate=accumulate, exact=exact, **made)


def mine(engine, step, leaves=LEAVES):
    """This rank's micro-batches of the global list."""
    n, rank = engine.comm.size, engine.comm.rank
    of_rank = leaves // n
    every = engine.policy.reduce == "every_micro_batch"
    return [leaf(step, k * n + rank if every else rank * of_rank + k) for k in range(of_rank)]


def train(engine, steps, leaves=LEAVES):
    """Losses and norms, all digits."""
    curve = []
    for step in steps:
        value = engine.train_batch(mine(engine, step, leaves))
        curve.append((float(value).hex(), float(engine.last_step.grad_norm).hex(), bool(engine.last_step.applied)))
    return curve


def run(cases, exact=True):
    """On each rank, for every case of SETTINGS: the curve and a hash of parameters and moments."""
    found = []
    for (stage, reduce), precision, clip, activations, dropout in cases:
        model = Given(build(dropout))
        recompute(model, activations)
        engine = engine_of(model, stage=stage, reduce=reduce, precision=precision, clip_norm=clip, exact=exact)
        found.append((train(engine, range(STEPS)), engine.fingerprint()))
    return found


def at_every_dp(ranks, case, *args):
    """Results of dp 1, 2 and 4, which agree within each; all of them are the first if the curve is exact."""
    found = {}
    for dp in (1, 2, 4):
        results = ranks(dp, case, *args)
        assert all(result == results[0] for result in results), dp
        found[dp] = results[0]
    return found


def check_one_curve(found):
    assert found[2] == found[1]
    assert found[4] == found[1]


PAIRS = [case for case in covering(SETTINGS) if case != FIRST]


def test_a_curve_is_the_same_at_dp_1_2_and_4(ranks):
    found = at_every_dp(ranks, run, PAIRS)
    for case, *runs in zip(PAIRS, *(found[dp] for dp in (1, 2, 4)), strict=True):
        assert runs[1] == runs[0], case
        assert runs[2] == runs[0], case
    norms = [float.fromhex(norm) for _, norm, _ in found[1][0][0]]
    assert min(norms) > 0.05  # clipping is active


def test_all_stages_and_moments_of_reduction_give_one_curve(ranks):
    cases = [(stage, *FIRST[1:]) for stage in STAGES]
    for precision in ("fp32", "bf16"):
        found = ranks(2, run, [(stage, precision, *FIRST[2:]) for stage in STAGES])[0]
        assert all(each == found[0] for each in found), precision
    assert len(cases) == len(STAGES)


def test_a_plain_curve_is_not_the_same(ranks):
    cases = [((1, "every_step"), *FIRST[1:]), ((3, "every_micro_batch"), *FIRST[1:])]
    one, two, four = (ranks(dp, run, cases, False)[0] for dp in (1, 2, 4))
    for a, b, c in zip(one, two, four, strict=True):
        assert len({a[1], b[1], c[1]}) == 3
        assert len({str(a[0]), str(b[0]), str(c[0])}) == 3


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_curve_is_the_same_for_all_combinations(ranks, stage):
    check_one_curve(at_every_dp(ranks, run, list(product((stage,), *SETTINGS[1:]))))
