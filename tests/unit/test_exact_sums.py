"""Exact mode's arithmetic: numbers of summands, sums in halves, the counter and its buffers, what a resume promises."""

import pytest
import torch
from blueprints import unit_plan

from zero3d.account.states import engine_bytes
from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.stages import counter_buffers
from zero3d.checkpoint.resume_contract import resume_guarantee
from zero3d.distributed.axis import Axis
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.zero.exact.summands import Summands, check_exact
from zero3d.zero.exact.sums import Counter, add_tree
from zero3d.zero.gradient_memory import GradientMemory

CPU = torch.device("cpu")


def summands_of(rank, n, per_step, micro_batches, seed=5):
    return Summands(Comm(Axis("dp", rank, n), Arena(CPU), Ledger()), per_step, micro_batches, seed)


def halves(values):
    """Filled up with zeros to a power of two, written down: what is added to nothing but zeros stays as it is."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    left, right = values[:half], values[half:]
    return halves(left) + halves(right)


@pytest.mark.parametrize("per_step", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_every_summand_has_one_rank_and_a_sum_does_not_depend_on_how_many(n, per_step):
    values = torch.randn(16, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 5
    table = torch.zeros(n, 16 // n, dtype=torch.float64)
    seen = []
    for rank in range(n):
        summands = summands_of(rank, n, per_step, 16 // n)
        for k in range(16 // n):
            seen.append(summands.number(k))
            table[rank, k] = values[summands.number(k)]
    assert sorted(seen) == list(range(16))
    assert summands.total(table) == halves(values)
    assert summands.total(table) != values.sum()


def test_parts_of_a_sequence_are_one_micro_batch():
    summands = Summands(Comm(Axis("dp", 0, 4), Arena(CPU), Ledger()), False, 2, 5, parts=2)
    assert summands.per_batch == 4
    assert summands.state(1, 1)["covers"]["dp"] == [2, 4, 8]


@pytest.mark.parametrize(("n", "count"), [(1, 3), (1, 5), (1, 12), (2, 6), (2, 10), (4, 12), (8, 24)])
def test_summands_are_filled_up_with_zeros_at_their_end(n, count):
    """A sum over the summands that there are, whatever stands behind them."""
    values = torch.randn(count, 64, generator=torch.Generator().manual_seed(count), dtype=torch.float64) ** 5
    given = values.view(count // n, n, 64).transpose(0, 1)
    outcome = summands_of(0, n, False, count // n).total(given)
    assert torch.equal(outcome, halves(list(values)))
    assert not torch.equal(outcome, halves([torch.zeros_like(values[0]), *values]))  # zeros in front: other pairs
    evaluated = summands_of(0, n, True, 1).total(given, per_step=False)
    assert torch.equal(evaluated, outcome)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 13])
def test_the_counter_sums_in_halves_and_needs_the_buffers_of_the_formula(count):
    summands = list(torch.randn(count, 16, generator=torch.Generator().manual_seed(count)))
    counter, arena = None, Arena(CPU)
    for parts in (1, 2):
        counter = Counter(arena, 16, torch.float32, lambda: GradientMemory(arena, 16, 16, torch.float32))
        counter.grow(counter_buffers(count))
        pairs = [torch.randn(parts, 16, generator=torch.Generator().manual_seed(i)) for i in range(count)]
        for pair in pairs:
            counter.push(list(pair))
        wanted = halves([pair[0] + pair[1] if parts == 2 else pair[0] for pair in pairs])
        assert torch.equal(counter.total(), wanted)
        assert not arena.live("wire")
    assert len(summands) == count


def test_parts_are_summed_in_halves_in_the_wider_dtype():
    parts = list(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    wanted = halves([part.float() for part in parts])
    assert torch.equal(add_tree(parts, torch.empty(64), Arena(CPU)), wanted)


def draws(rank, n, batch, part=0, seed=5):
    outcome = {}
    summands = summands_of(rank, n, False, 8 // n, seed)
    summands.batches = batch
    for k in range(8 // n):
        summands.draw(k, part)
        outcome[summands.number(k)] = torch.rand(1).item()
    return outcome


def test_random_numbers_belong_to_the_micro_batch_and_not_to_the_rank():
    one = draws(0, 1, batch=3)
    four = {number: value for rank in range(4) for number, value in draws(rank, 4, batch=3).items()}
    assert four == one
    assert len(set(one.values())) == 8
    assert not set(one.values()) & set(draws(0, 1, batch=4).values())
    assert not set(one.values()) & set(draws(0, 1, batch=3, seed=6).values())


def test_every_part_of_a_pipeline_draws_other_numbers_the_same_on_any_rank():
    """Blocks of two parts that drew alike would drop out alike."""
    parts = [draws(0, 1, batch=3, part=part) for part in range(4)]
    assert len({value for part in parts for value in part.values()}) == 4 * 8
    for part, one in enumerate(parts):
        assert {n: v for rank in range(2) for n, v in draws(rank, 2, batch=3, part=part).items()} == one


def test_micro_batches_of_another_size_than_before_a_checkpoint_are_warned_of():
    summands = summands_of(0, 2, False, 4)
    summands.see([{"ids": torch.zeros(2, 9)}])
    later = summands_of(1, 4, False, 2)
    later.restore(summands.state(1, 1))
    later.see([(torch.zeros(2, 7),)])
    with pytest.warns(UserWarning, match="had 2 rows and have 4 now"):
        later.see([{"ids": torch.zeros(4, 9)}])


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_grid_cells_do_not_depend_on_the_number_of_ranks(n):
    layout = UnitLayout([("a", (300, 70), 0), ("b", (17,), 0)], n)
    outcome = []
    for rank in range(n):
        for piece in layout.pieces(rank):
            begin = rank * layout.shard + piece.offset
            for cell, low, high in layout.grid_cells(begin, piece.stop - piece.start):
                outcome.append((cell, begin + low, begin + high))
    one = UnitLayout([("a", (300, 70), 0), ("b", (17,), 0)], 1)
    wanted = [(s, p.offset + a, p.offset + b) for p in one.pieces(0) for s, a, b in one.grid_cells(p.offset, p.stop)]
    assert sorted(outcome) == sorted(wanted)


@pytest.mark.parametrize(
    ("dp", "words"),
    [
        (6, r"dp=6 must be a power of two that divides 64, and 64 / 6 = 10\.67\. Pass dp=4 or dp=8"),
        (128, r"64 / 128 = 0\.5\. Pass dp=64"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_arithmetic(dp, words):
    with pytest.raises(ConfigError, match=words):
        check_exact(dp)


@pytest.mark.parametrize(
    ("stage", "options", "gradients"),
    [
        (3, {"accumulate": 1}, 4 / 4),  # one shard
        (3, {"accumulate": 8}, 3 * 4 / 4),  # ones of 0111
        (2, {"accumulate": 8, "reduce": "every_step"}, 3 * 4),
        (1, {"accumulate": 1}, 4 / 4),  # its bucket comes and goes
        (0, {"accumulate": 1}, 4),
        (0, {"accumulate": 4}, 2 * 4),
    ],
)
def test_gradients_hold_the_counters_buffers(stage, options, gradients):
    assert engine_bytes(stage, 4, exact=True, **options).gradients == gradients


def test_summands_travel_narrow_and_sums_wide():
    def travels(**settings):
        return unit_plan(exact=True, **settings).gradients.travels.itemsize

    assert travels(stage=3, accumulate=4) == 2
    assert travels(stage=1, accumulate=4) == 4
    assert travels(stage=1, accumulate=1) == 2
    assert travels(stage=1, accumulate=1, precision="fp32") == 4


FACTS = {"stage": 3, "reduce": "every_step", "accumulate": 2, "dp": 4, "tp": 1, "pp": 1, "precision": "bf16", "wire": "float32",
         "algorithm": "pairwise", "torch": "2", "kernels": "AVX2", "threads": 1, "leaves": None}  # fmt: skip


def test_a_resume_says_whether_it_is_bitwise_and_if_not_why():
    exact = FACTS | {"leaves": 8}
    assert resume_guarantee(FACTS, FACTS).startswith("bitwise")
    native = {"algorithm": "native"}
    for other in ({}, native):  # as a single rank has
        assert resume_guarantee(FACTS, FACTS | {"dp": 2} | other) == (
            "not bitwise: dp 4 -> 2 (sums over ranks have other terms and differ in their last bits; zero.exact=true "
            "would be bitwise)"
        )
    assert resume_guarantee(FACTS, FACTS | native) == (
        "not bitwise: algorithm pairwise -> native (ranks' terms are summed in another order)"
    )
    assert "dp 4 -> 2" in resume_guarantee(exact, exact | {"dp": 2, "stage": 1, "reduce": "every_step"})
    assert resume_guarantee(exact, exact | {"dp": 2, "stage": 1, "reduce": "every_step"}).startswith("bitwise")
    micro = FACTS | {"reduce": "every_micro_batch"}
    assert resume_guarantee(FACTS, micro) == (
        "not bitwise: reduce every_step -> every_micro_batch (2 micro-batches a step are summed in another order)"
    )
    assert resume_guarantee(FACTS, FACTS | {"stage": 1}).startswith(
        "bitwise: as if it had not been interrupted, stage 3 -> 1,"
    )
    once = {"accumulate": 1}
    assert resume_guarantee(FACTS | once, micro | once).startswith("bitwise")
    older = {name: value for name, value in FACTS.items() if name != "accumulate"}
    assert resume_guarantee(older, micro).startswith(
        "not bitwise: reduce every_step -> every_micro_batch (several micro"
    )
    assert resume_guarantee(exact, exact | {"tp": 2, "dp": 2}).startswith("not bitwise: tp 1 -> 2 (matrix products")
    assert resume_guarantee(FACTS, FACTS | {"wire": "bfloat16"}).startswith(
        "not bitwise: wire float32 -> bfloat16 (gradients"
    )
    assert resume_guarantee(exact, exact | {"leaves": 4}).startswith("not bitwise: leaves 8 -> 4")
    parts = "sp 1 -> 2 (gradients are summed over other parts of sequences)"
    assert (
        resume_guarantee(exact, exact | {"sp": 2})
        == resume_guarantee(FACTS, FACTS | {"sp": 2})
        == f"not bitwise: {parts}"
    )
    assert resume_guarantee(exact, exact | {"ep": 2}).startswith(
        "bitwise: as if it had not been interrupted, ep 1 -> 2,"
    )
    masks = {"sp": 2, "sp_masks": "flex_attention beyond 4,000 B"}
    assert resume_guarantee(FACTS | masks, FACTS | masks).startswith("bitwise")
    assert resume_guarantee(FACTS | masks, FACTS | masks | {"sp_masks": "flex_attention beyond 900 B"}) == (
        "not bitwise: sp_masks flex_attention beyond 4,000 B -> flex_attention beyond 900 B (other kernels attend where "
        "a mask would be larger)"
    )
    halved = resume_guarantee(FACTS, FACTS | {"dp": 2, "accumulate": 4})
    assert halved.startswith("not bitwise: dp 4 -> 2 (")
    assert "accumulate" not in halved, "there are as many in a step"
    fast = {"experts": "fast"}
    assert resume_guarantee(FACTS, FACTS | fast) == (
        "not bitwise: experts exact -> fast (one product of all sources sums in another order)"
    )
    assert resume_guarantee(exact, exact | fast).startswith("bitwise: ")
    by_rows = {"sp": 2, "sp_kind": "gather"}
    assert resume_guarantee(exact | {"sp": 2}, exact | by_rows).startswith("not bitwise: sp_kind heads -> gather (")
    assert resume_guarantee(FACTS, exact) == "not bitwise: exact was False when it was saved, and is True now"
