"""Who computes whose micro-batch again, who is wrong, and sums of bits that no flipped bit leaves as they are."""

import pytest
import torch

from zero3d.engine.replay.hashes import AGAIN, ROW, GradientHashes, bit_sums, digest
from zero3d.engine.replay.inputs import Inputs
from zero3d.engine.replay.verdict import Reason, judge, partner_of, third_of


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("turn", range(4))
def test_partners_compute_each_others_and_one_of_an_odd_number_is_alone(n, turn):
    partners = [partner_of(rank, n, turn) for rank in range(n)]
    assert [partners[partner] for partner in partners] == list(range(n))
    alone = [rank for rank in range(n) if partners[rank] == rank]
    assert len(alone) == n % 2
    assert all((partners[rank] - rank) % n in (1, n - 1) for rank in range(n) if rank not in alone)


@pytest.mark.parametrize("n", range(3, 10))
def test_in_two_turns_every_rank_meets_both_neighbours_or_all_it_can(n):
    met = [{partner_of(rank, n, turn) for turn in (0, 1)} - {rank} for rank in range(n)]
    assert all(met)
    assert sum(map(len, met)) == 2 * (n - n % 2)


def test_a_third_is_neither_of_two():
    assert [third_of(0, 1, 3), third_of(0, 2, 3), third_of(2, 1, 3), third_of(0, 1, 2), third_of(0, 0, 1)] == [
        2, 1, 0, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "again", "verdict"), [
    ({0: "a", 1: "b"}, {0: "a", 1: "a"}, ((1,), Reason.CHANGED)),
    ({0: "b", 1: "a"}, {0: "a", 1: "a", 2: "a"}, ((0,), Reason.CHANGED)),
    ({0: "a", 1: "b"}, {0: "c", 1: "d"}, ((0, 1), Reason.CHANGED)),
    ({0: "a", 1: "b"}, {0: "a", 1: "b"}, ((0, 1), Reason.OPEN)),
    ({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "b"}, ((0,), Reason.OUTVOTED)),
    ({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c"}, ((0, 1), Reason.OPEN)),
    ({3: "a"}, {3: "b"}, ((3,), Reason.CHANGED)),
])  # fmt: skip
def test_who_changes_or_is_outvoted_is_wrong(first, again, verdict):
    found = judge(first, again)
    assert (tuple(found.ranks), found.reason) == verdict


# --- sums of bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (64, 33), (129, 257)])
def test_every_flip_of_a_bit_changes_both_sums(dtype, shape):
    torch.manual_seed(0)
    t = torch.randn(shape).to(dtype)
    words = t.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])
    sums, bits = bit_sums(t), 8 * t.itemsize
    places = {0, len(words) - 1, len(words) // 2, *torch.randint(len(words), (4,)).tolist()}
    for place in places:
        for bit in range(bits):
            mask = torch.tensor(1 << bit if bit < bits - 1 else -(1 << bit), dtype=torch.int64).to(words.dtype)
            words[place] ^= mask
            assert (bit_sums(t) != sums).all()
            words[place] ^= mask
    assert torch.equal(bit_sums(t), sums)


def test_values_that_change_places_and_the_sign_of_zero_are_seen():
    t = torch.arange(512.0).view(8, 64)
    assert not torch.equal(bit_sums(t), bit_sums(t.flip(0)))
    assert not torch.equal(bit_sums(t), bit_sums(t.flip(1)))
    assert not torch.equal(bit_sums(torch.zeros(5)), bit_sums(-torch.zeros(5)))


def test_words_of_one_row_that_change_places_are_seen_by_the_second_sum_and_those_of_one_column_by_the_first():
    words = torch.randn(3, ROW, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    in_row, in_column = words.clone(), words.clone()
    in_row[1, [3, 40]] = words[1, [40, 3]]
    in_column[[0, 2], 3] = words[[2, 0], 3]
    assert (bit_sums(in_row) == bit_sums(words)).tolist() == [True, False]
    assert (bit_sums(in_column) == bit_sums(words)).tolist() == [False, True]


def test_sums_are_of_values_however_they_lie():
    t = torch.randn(33, 65, dtype=torch.float32)
    wide = torch.zeros(33 * 65 + 1)
    wide[1:] = t.flatten()
    for same in (t.t().contiguous().t(), wide[1:].view(33, 65), torch.stack([t, t], 2)[..., 1]):
        assert torch.equal(bit_sums(same), bit_sums(t))
    assert bit_sums(torch.empty(0, 4)).tolist() == [0, 0]
    nan = torch.tensor([float("nan"), float("inf")])
    assert torch.equal(bit_sums(nan), bit_sums(nan.clone()))


def test_a_sparse_gradient_is_hashed_with_its_places():
    values = torch.ones(2, 3)
    one, other = (torch.sparse_coo_tensor([rows], values, (5, 3), check_invariants=True) for rows in ([0, 2], [1, 2]))
    assert not torch.equal(bit_sums(one), bit_sums(other))
    assert torch.equal(bit_sums(one), bit_sums(one.clone()))


def test_a_table_has_a_row_for_each_parameter_and_adds_what_comes_twice():
    hashes, grad = GradientHashes(), torch.ones(3)
    hashes.add("unit", 1, grad)
    hashes.add("unit", 0, grad)
    hashes.add("unit", 1, grad)
    assert hashes.came == [("unit", 1), ("unit", 0)]
    table = hashes.table([("unit", 0), ("unit", 1), ("unit", 2)], torch.device("cpu"))
    sums = bit_sums(grad)
    assert torch.equal(table, torch.stack([sums, sums * AGAIN + sums, torch.zeros(2, dtype=torch.int64)]))
    assert not torch.equal(digest(table), digest(table.flip(0)))


# --- inputs -----------------------------------------------------------------------------------------


class Two:
    """An axis of two ranks in one process: what one sends, the other has sent before."""

    device = torch.device("cpu")

    def __init__(self, theirs):
        self.theirs = iter(theirs)
        self.sent = []

    def trade(self, values, peer, unit):
        self.sent.append(values.clone())
        received = next(self.theirs, values)
        return received if len(received) == len(values) else torch.cat([received, received.new_zeros(len(values))])

    def read(self, values, assumed):
        return values.tolist()


def inputs(batch, seed=0):
    torch.manual_seed(seed)
    return Inputs.now(batch, torch.nn.BatchNorm1d(4), torch.device("cpu"))


def through(here, there):
    """What the one gets of the other."""
    first = Two([])
    there.trade(first, 1)
    return here.trade(Two(first.sent), 0)


def test_a_micro_batch_arrives_as_it_is_with_random_states_and_buffers():
    mine = {"x": torch.zeros(2, 3), "mask": torch.ones(2, dtype=torch.bool), "deep": [torch.zeros(()), 5], "on": True}
    x = torch.randn(4, 7).t()
    theirs = {"x": x, "mask": torch.tensor([True, False, True]), "deep": [torch.tensor(2.5), 5], "on": True}
    there = inputs(theirs, seed=3)
    got = through(inputs(mine), there)
    assert torch.equal(got.batch["x"], x)
    assert got.batch["x"].stride() == x.stride()
    assert torch.equal(got.batch["mask"], theirs["mask"])
    assert (got.batch["deep"][0].item(), got.batch["deep"][1], got.batch["on"]) == (2.5, 5, True)
    assert all(torch.equal(a, b) for a, b in zip(got.buffers, there.buffers, strict=True))
    assert all(torch.equal(got.rng[name], state) for name, state in there.rng.items())
    assert str(got.plain) == str(there.plain).replace("(", "[").replace(")", "]")


@pytest.mark.parametrize(
    "other", [{"y": torch.zeros(2)}, {"x": torch.zeros(2, 2)}, {"x": torch.zeros(2).double()}, {"x": 1}]
)
def test_what_is_not_alike_is_not_traded(other):
    assert through(inputs({"x": torch.zeros(2)}), inputs(other)) is None
