"""Units that some ranks use and others do not, at stage 3: one OrderError on all ranks, and none where one is only slow.

Ranks look at short intervals here; what they conclude does not depend on time.
"""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from models import VOCAB, batch, bits
from torch import nn

import zero3d
from zero3d.distributed import choice, order_watch

LOOK = 0.02  # seconds
UNITS = ["tower", "experts.*", "layers.*"]
FAR = 600.0  # seconds until a wait would end by itself


class Optional(nn.Module):
    """Layers, and before them a tower and two experts that a forward may leave out; all of one size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(VOCAB, 16)
        self.tower = nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids, calls=(), sleep=0.0):
        x = self.embed(ids)
        time.sleep(sleep)
        for name in calls:
            x = x + self.get_submodule(name)(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def sum_of_squares(output, batch):
    return output.square().sum(), output.numel()


def without_grad(engine, batches):
    with torch.no_grad():
        return [engine(**batch) for batch in batches]


WAYS = {"training": zero3d.Engine.train_batch, "evaluate": zero3d.Engine.evaluate, "no_grad": without_grad}


def run(ways, calls, native=False, look=LOOK, **more):
    """Do these things one after another; calls[k][rank] are the optional modules that a rank calls in the k-th."""
    order_watch.LOOK, order_watch.PATIENCE = look, 1.5 * look
    choice.PAIRWISE_MAX_RANKS = 0 if native else 8
    try:
        engine = zero3d.Engine(Optional(), stage=3, precision="fp32", units=UNITS, loss=sum_of_squares)
        for way, of_ranks in zip(ways, calls, strict=True):
            WAYS[way](engine, [{"ids": batch(0), "calls": of_ranks[dist.get_rank()], **more}])
        return engine.steps
    finally:
        order_watch.LOOK, order_watch.PATIENCE = 1.0, 1.5
        choice.PAIRWISE_MAX_RANKS = 8


def errors_of(answers):
    """The errors of all ranks, which say the same of the units and each where it was itself."""
    assert all(result is None for result, _ in answers)
    said = {error.partition(" (")[0] for _, error in answers}
    assert len(said) == 1, answers
    for rank, (_, error) in enumerate(answers):
        assert error.startswith("OrderError: ranks do not run the same units and wait for each other for ever: ")
        assert f"rank {rank} of axis dp" in error
    return answers[0][1]


NOBODY, TOWER, FIRST = ((), ()), ((), ("tower",)), (("experts.0",), ("experts.1",))
CASES = {
    "training": (["training"] * 2, [NOBODY, TOWER]),
    "evaluate": (["evaluate"] * 2, [NOBODY, TOWER]),
    "no_grad": (["training", "no_grad", "training"], [NOBODY, TOWER, NOBODY]),
    "no_grad before an evaluation": (["no_grad", "no_grad", "evaluate"], [NOBODY, TOWER, NOBODY]),
}


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES)
def test_a_tower_that_one_rank_alone_calls_is_an_error_with_its_name_on_all_ranks(ranks, case, native):
    error = errors_of(ranks(2, run, *CASES[case], native, group_timeout=FAR, check=False))
    assert "rank 1 gathers unit 'tower', where rank 0 " in error
    for remedy in ("units=[...]", "leaf module", "full_params()", "blank input", "stage=2"):
        assert remedy in error


def test_ranks_that_call_different_experts_are_both_named(ranks):
    error = errors_of(ranks(2, run, ["training"], [FIRST], group_timeout=FAR, check=False))
    assert "unit 'experts.0'" in error
    assert "unit 'experts.1'" in error


def test_a_tower_that_one_rank_leaves_out_after_all_have_called_it(ranks):
    both = (("tower",), ("tower",))
    error = errors_of(ranks(2, run, ["training"] * 3, [both, both, TOWER], group_timeout=FAR, check=False))
    assert "of unit 'tower'" in error


def test_units_of_one_size_that_ranks_swap_are_named_where_no_rank_waits(ranks):
    swapped = (("experts.0", "experts.1"), ("experts.1", "experts.0"))
    for way in ("training", "evaluate"):
        error = errors_of(ranks(2, run, [way], [swapped], True, group_timeout=FAR, check=False))
        assert "unit 'experts.0'" in error
        assert "unit 'experts.1'" in error


def evaluate_then(name):
    """Rank 1 calls its tower without gradients; rank 0 goes on to a collective of the program's own."""
    try:
        run(["no_grad"] * 2, [NOBODY, TOWER])
        order_watch.LOOK, order_watch.PATIENCE = LOOK, 1.5 * LOOK
        dist.barrier() if name == "barrier" else dist.all_reduce(torch.ones(1))
    finally:
        order_watch.LOOK, order_watch.PATIENCE = 1.0, 1.5


@pytest.mark.parametrize("name", ["barrier", pytest.param("all_reduce", marks=pytest.mark.long)])
def test_a_tower_that_one_rank_calls_where_the_others_are_in_a_collective_of_the_programs_own(ranks, name):
    (_, first), (_, second) = ranks(2, evaluate_then, name, group_timeout=FAR, check=False)
    assert f"rank 0 waits in the program's own torch.distributed.{name}, which rank 1 has not begun" in second
    assert "rank 1 waits in all_gather of unit 'tower' on axis dp, which rank 0 has not begun" in second
    assert first.startswith("RuntimeError: ")  # it is the program's call


REMEDIES = {  # stage, units, whether inside full_params(), the factor of the loss of a rank without anything for the tower
    "the block as a unit": (3, ["layers.*"], False, None),
    "full_params()": (3, UNITS, True, None),
    "a blank input": (3, UNITS, False, 0.0),
    "stage=2": (2, UNITS, False, None),
}


def train_with(remedy):
    """Rank 1 alone has something for the tower; all ranks do what a remedy says."""
    stage, units, inside, factor = REMEDIES[remedy]
    engine = zero3d.Engine(Optional(), stage=stage, precision="fp32", units=units, loss=sum_of_squares)
    mine = dist.get_rank() == 1
    for _ in range(2):
        with engine.full_params() if inside else nullcontext():
            output = engine(batch(0), ("tower",) if mine or factor is not None else ())
            engine.backward(output.square().mean() * (1.0 if mine or factor is None else factor))
        engine.step()
    with engine.full_params():
        return engine.steps, bits(engine.module.parameters())


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedies_that_the_error_names_train_to_the_end(ranks, remedy):
    first, second = ranks(2, train_with, remedy)
    assert first == second
    assert first[0] == 2


def slow(look, sleep):
    """Rank 1 sleeps in its forwards, for longer than a silent rank waits before it compares."""
    calls = [(("tower",), ("tower",))] * 3
    return run(["training", "evaluate", "training"], calls, look=look, sleep=sleep * dist.get_rank())


def test_a_slow_rank_is_no_error(ranks):
    assert ranks(2, slow, LOOK, 10 * LOOK, group_timeout=FAR) == [2, 2]


@pytest.mark.long
def test_a_rank_that_is_slower_than_a_silent_one_waits_is_no_error(ranks):
    assert ranks(2, slow, 1.0, 4.0, group_timeout=FAR) == [2, 2]


@pytest.mark.long
@pytest.mark.parametrize("world", [3, 4])
def test_the_one_rank_of_several_is_named(ranks, world):
    tower = ((),) * (world - 1) + (("tower",),)
    answers = ranks(world, run, ["training"] * 2, [((),) * world, tower], False, 1.0, group_timeout=FAR, check=False)
    others = "ranks 0, 1 gather" if world == 3 else "ranks 0, 1, 2 gather"
    assert f"rank {world - 1} gathers unit 'tower', where {others} unit 'layers." in errors_of(answers)
