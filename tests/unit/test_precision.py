"""The one cast, and what it must keep."""

import math

import pytest
import torch

from zero3d.errors import ConfigError, Zero3dError
from zero3d.precision import (
    LossScale,
    LossScaling,
    Precision,
    are_finite,
    at_least_fp32,
    cast_all,
    join_master,
    slow_products,
    split_master,
    to_compute,
)
from zero3d.train.setup.losses import IGNORED, next_token_loss


def half_away(value):
    """Reference: bf16 neighbours of a float32, the nearer one, ties away from zero."""
    exact = torch.tensor([value], dtype=torch.float32).view(torch.int32).item()
    low = exact & ~0xFFFF
    rest = exact & 0xFFFF
    chosen = low + 0x10000 if rest >= 0x8000 else low
    chosen = chosen - (1 << 32) if chosen >= 1 << 31 else chosen
    return torch.tensor([chosen], dtype=torch.int32).view(torch.float32).item()


def test_ties_round_away_from_zero_and_nothing_else_changes():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, generator=generator) * torch.logspace(-30, 30, 3000)
    bits = values.view(torch.int32)
    ties = ((bits & ~0xFFFF) | 0x8000).view(torch.float32)
    near = ((bits & ~0xFFFF) | 0x7FFF).view(torch.float32)
    for tensor in (values, ties, near):
        expected = torch.tensor([half_away(float(v)) for v in tensor])
        assert torch.equal(to_compute(tensor, torch.bfloat16).float(), expected)
    assert not torch.equal(to_compute(ties, torch.bfloat16), ties.bfloat16())  # torch rounds half to even


def test_infinities_nans_zeros_and_large_tensors():
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4028235e38])
    cast = to_compute(special, torch.bfloat16)
    assert cast[:2].tolist() == [math.inf, -math.inf]
    assert cast[2].isnan()
    assert math.copysign(1, cast[4]) == -1
    assert cast[5] == math.inf
    big = torch.randn(1 << 19)
    assert torch.equal(to_compute(big, torch.bfloat16), to_compute(big.view(2, -1), torch.bfloat16).flatten())
    assert torch.equal(to_compute(big, torch.float16), big.half())


def test_the_loss_of_bf16_logits_is_summed_in_fp32():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 61, generator=generator).bfloat16()
    labels = torch.randint(61, (2, 9), generator=generator)
    labels[0, :4] = IGNORED
    total, count = next_token_loss(logits, {"labels": labels})
    rows = logits.double()[:, :-1].log_softmax(-1)
    counted = [(i, t) for i in range(2) for t in range(8) if labels[i, t + 1] != IGNORED]
    assert (total.dtype, int(count)) == (torch.float32, 13)
    assert float(total) == pytest.approx(-sum(float(rows[i, t, labels[i, t + 1]]) for i, t in counted), rel=1e-5)


def test_every_bf16_value_survives_a_round_trip():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    again = to_compute(every.float(), torch.bfloat16)
    same = again.view(torch.int16) == every.view(torch.int16)
    assert bool((same | every.isnan()).all())
    assert bool(again[every.isnan()].isnan().all())


def by_integers(values):
    """Reference: bits of bf16, ties away from zero; what is not finite is cut off, a NaN stays one."""
    exact = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    exact += torch.where(exact & 0x7F800000 == 0x7F800000, 0, 0x8000)
    return (exact >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)


LOW_HALVES = (0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF)


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_every_high_half_is_cast_right(low):
    """All signs and exponents, denormals, infinities and NaNs, with low halves on both sides of a tie."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    every = (high | low).view(torch.float32)
    cast, wanted = to_compute(every, torch.bfloat16), by_integers(every)
    same = cast.view(torch.int16) == wanted.view(torch.int16)
    assert torch.equal(cast.isnan(), every.isnan())
    assert bool((same | every.isnan()).all())


@pytest.mark.parametrize("room", [1, 7, 64, 1000])
def test_many_tensors_are_cast_like_each_of_them_in_groups_of_any_size(room):
    sizes = (5, 0, 64, 1, 200, 63)
    masters = [torch.randn(size) for size in sizes]
    for master in masters:
        master.view(torch.int32)[::2].bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    before = [master.clone() for master in masters]
    weights = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    cast_all(list(zip(masters, weights, strict=True)), torch.empty(2 * room))
    assert all(map(torch.equal, masters, before))
    assert all(torch.equal(w, to_compute(m, torch.bfloat16)) for w, m in zip(weights, masters, strict=True))
    assert all(torch.equal(w, by_integers(m)) for w, m in zip(weights, masters, strict=True))


# --- masters in two halves ------------------------------------------------------------------------


def halves_of(master, scratch=None):
    weights, remainder = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    split_master(master, weights, remainder, scratch)
    return weights, remainder


@pytest.mark.parametrize("low", LOW_HALVES, ids=hex)
def test_a_weight_and_its_remainder_are_the_master_to_the_bit(low):
    """All signs and exponents, denormals, infinities and NaNs; the weight is the cast's, as far as it is a number."""
    every = ((torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16) | low).view(torch.float32)
    weights, remainder = halves_of(every)
    again = join_master(weights, remainder, torch.empty(1 << 16))
    same = again.view(torch.int32) == every.view(torch.int32)
    as_cast = weights.view(torch.int16) == to_compute(every, torch.bfloat16).view(torch.int16)
    assert bool(((same & as_cast) | every.isnan()).all())
    assert torch.equal(again.isnan(), every.isnan())
    assert torch.equal(weights.isnan(), every.isnan())


@pytest.mark.parametrize(
    "bits", [0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7F800001, -1], ids=lambda bits: hex(bits & 0xFFFFFFFF)
)
def test_a_nan_of_any_machine_is_one_in_the_weight_too(bits):
    """Accelerators make the first; rounding it up would carry into the sign, and the weight would be a zero."""
    weights, remainder = halves_of(torch.full((20,), bits, dtype=torch.int32).view(torch.float32))
    assert weights.isnan().all()
    assert join_master(weights, remainder, torch.empty(20)).isnan().all()


@pytest.mark.parametrize("room", [1, 7, 64, 1000])
def test_masters_are_split_and_joined_alike_in_groups_of_any_size(room):
    master = torch.randn(333) * torch.logspace(-44, 38, 333)
    wanted = halves_of(master)
    weights, remainder = halves_of(master, torch.empty(room))
    assert torch.equal(weights, wanted[0])
    assert torch.equal(remainder, wanted[1])
    assert torch.equal(join_master(weights, remainder, torch.empty(333)), master)
    assert join_master(weights[:0], remainder[:0], torch.empty(0)).numel() == 0
    in_place = master.clone()
    assert all(map(torch.equal, halves_of(in_place, in_place), wanted))  # the masters lend their memory


# --- the loss scale -------------------------------------------------------------------------------


def scale_of(**rule):
    return LossScale(Precision("fp16", LossScaling(**{"initial": 64.0, "window": 3, "hysteresis": 1} | rule)))


def values(scale, overflows):
    """The scale after each of these boundaries: "." is a good one, "x" overflows."""
    found = []
    for each in overflows:
        scale.update(overflow=each == "x")
        found.append(scale.value)
    return found


@pytest.mark.parametrize(("rule", "overflows", "wanted"), [
    # the first overflow counts as at boundary -1: it doubles at boundaries 2, 5, 8
    ({}, ".........", [64, 64, 128, 128, 128, 256, 256, 256, 512]),
    # the window is counted from the last overflow, at boundary 1: it doubles at 4 and 7, and not at 2
    ({}, ".x......", [64, 32, 32, 32, 64, 64, 64, 128]),
    ({}, ".x.x....", [64, 32, 32, 16, 16, 16, 32, 32]),
    # so many overflows but one are tolerated; from then on each halves
    ({"hysteresis": 3}, "x.xxx", [64, 64, 64, 32, 16]),
    # what was tolerated is forgotten where the scale doubles, and not before
    ({"hysteresis": 2}, "x..xx", [64, 64, 64, 32, 16]),
    ({"hysteresis": 2}, "x...xx", [64, 64, 64, 128, 128, 64]),
    # an overflow that is tolerated begins a window, too
    ({"hysteresis": 2}, ".x...", [64, 64, 64, 64, 128]),
    # it never falls below the minimum, also where half of it would
    ({"initial": 6.0, "minimum": 4.0}, "x...", [4, 4, 4, 8]),
])  # fmt: skip
def test_each_rule_of_the_loss_scale(rule, overflows, wanted):
    assert values(scale_of(**rule), overflows) == wanted


def test_the_rule_that_fp16_has_by_default():
    """It begins at 2^16, doubles after 1,000 good steps, tolerates one overflow and gives up at 1."""
    assert values(LossScale(Precision("fp16")), "." * 1000)[-2:] == [2.0**16, 2.0**17]
    worst = LossScale(Precision("fp16"))
    assert values(worst, "x" * 17) == [2.0**16, *(2.0**i for i in range(15, -1, -1))]
    with pytest.raises(Zero3dError, match="minimum loss scale 1 "):
        worst.update(overflow=True)


def test_losses_of_16_bits_are_widened_and_others_are_themselves():
    for dtype in (torch.bfloat16, torch.float16):
        assert at_least_fp32(torch.ones((), dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        loss = torch.ones((), dtype=dtype)
        assert at_least_fp32(loss) is loss


def test_a_precision_without_a_loss_scale_has_none():
    scale = LossScale(Precision("bf16", LossScaling(initial=64.0, window=1, hysteresis=1)))
    assert values(scale, ".x.") == [1.0, 1.0, 1.0]


def test_an_overflow_at_the_minimum_scale_is_an_error_that_names_the_way_out():
    scale = scale_of(initial=2.0, minimum=1.0, hysteresis=2)
    assert values(scale, "xx") == [2.0, 1.0]
    with pytest.raises(Zero3dError, match=r"minimum loss scale 1 \(boundary 2\).*bf16"):
        scale.update(overflow=True)
    assert (scale.state()["steps"], scale.state()["last_overflow"]) == (3, 2), "it counts, and can be saved"
    above = scale_of(initial=1.5, minimum=1.0)
    assert values(above, "x") == [1.0]


def test_an_overflow_at_the_minimum_is_tolerated_while_there_is_patience():
    scale = scale_of(initial=1.0, minimum=1.0, hysteresis=2)
    assert values(scale, "x") == [1.0]
    with pytest.raises(Zero3dError):
        scale.update(overflow=True)


OVERFLOWS = ".x..xx....x.xx......x....x"


@pytest.mark.parametrize("cut", range(len(OVERFLOWS)))
def test_the_scale_resumes_where_it_was(cut):
    """Every number of the state decides about something later: nothing of it may stay behind."""
    rule = {"initial": 256.0, "window": 3, "hysteresis": 2}
    straight, first, second = scale_of(**rule), scale_of(**rule), scale_of(**rule | {"initial": 1.0})
    curve = values(straight, OVERFLOWS)
    assert set(curve) == {256.0, 128.0, 64.0, 32.0}
    assert values(first, OVERFLOWS[:cut]) == curve[:cut]
    second.restore(first.state())
    assert values(second, OVERFLOWS[cut:]) == curve[cut:]
    assert second.state() == straight.state()


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_scale_means_nothing_to_a_precision_without_one(saved, loaded):
    rule = LossScaling(initial=64.0, hysteresis=1)
    source, target = LossScale(Precision(saved, rule)), LossScale(Precision(loaded, rule))
    source.update(overflow=True)
    before = target.state()
    target.restore(source.state())
    assert target.state() == before


def test_unknown_precisions_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'fp16'"):
        Precision.of("f16")


def test_a_cpu_without_vectors_for_bf16_says_so(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert "--precision fp32 is faster" in slow_products("bf16", cpu)
    assert slow_products("fp32", cpu) is slow_products("bf16", torch.device("meta")) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert slow_products("bf16", cpu) is None


def test_finite_values_are_told_by_tensor_whatever_their_dtypes_are():
    infinite, lost = torch.tensor([1.0, float("-inf")]), torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    large = torch.tensor([1e300], dtype=torch.float64)
    assert are_finite([torch.ones(2, 3), infinite, large, lost]) == [True, False, True, False]
    assert are_finite([lost, torch.tensor(3e38)]) == [False, True]
    assert are_finite([]) == []


class OnACard(torch.Tensor):
    """Says that it is on a card, and is in no list with tensors that are not."""

    device = torch.device("cuda")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.stack and len({tensor.device for tensor in args[0]}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs)


def test_finite_values_are_told_by_tensor_wherever_they_are():
    whole, lost = torch.ones(3), torch.tensor([float("nan"), 1.0])
    card = [tensor.as_subclass(OnACard) for tensor in (whole, lost)]
    assert are_finite([card[0], lost, card[0], whole, card[1]]) == [True, False, True, True, False]
