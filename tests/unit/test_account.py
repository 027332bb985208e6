"""The account by hand: masters and states of each optimizer, sources of experts, what is off the device, padding.

And of buffers that come and go: units that are whole, reductions, records on their way.
"""

from fractions import Fraction

import pytest
from blueprints import unit_plan

from zero3d.account.optimizers import CODE, OptimizerBytes, state_width, states_by_slot, states_of
from zero3d.account.states import NOTHING, Held, StateBytes, per_parameter, unit_bytes
from zero3d.account.traffic import Moved
from zero3d.account.transients import (
    CopySum,
    Reduction,
    arriving_bytes,
    coded_messages,
    gathered_at_once,
    norm_scratch,
    passing_bytes,
    record_scratch,
    reduction_of,
    ring_bytes,
    sum_of_sources,
    sum_over_copies,
    whole_units,
)
from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.policy import Policy
from zero3d.blueprint.state_spans import Span, Updated
from zero3d.distributed.choice import NATIVE, PAIRWISE
from zero3d.distributed.unit_order import AHEAD
from zero3d.memory.scratch import update_bucket
from zero3d.spec.dtypes import BF16
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.spec.sections import Spec
from zero3d.spec.tiers import TIERS


@pytest.mark.parametrize(("weight", "wide", "splits", "stored"), [
    (2, 4, False, 4), (2, 4, True, 2), (4, 4, False, 0), (4, 4, True, 0), (8, 8, False, 0), (4, 8, False, 8),
])  # fmt: skip
def test_a_master_is_stored_whole_as_a_remainder_or_not_at_all(weight, wide, splits, stored):
    policy = Policy.of(Spec(precision="fp64" if wide == 8 else "bf16"))._replace(splits=splits)
    assert policy.stored(weight) == stored


def test_a_state_is_as_wide_as_a_master_unless_it_is_rounded_or_coded():
    assert [state_width(4, "fp32"), state_width(8, "fp32"), state_width(4, "bf16")] == [4, 8, 2]
    assert Fraction(65, 32) == 2 * CODE  # bytes of both moments of a parameter in 8 bits


# A norm of 256 elements and a matrix of 512, laid out in this order on one rank, with 15,616 elements of padding.
LAYOUT = UnitLayout([("norm", (256,), 0), ("matrix", (16, 32), 1)], 1)
MATRIX = {1}


def bytes_of(optimizer):
    updated, has = Updated.of(LAYOUT, None), states_by_slot(optimizer, MATRIX)
    cuts = [(stop - start, len(names)) for start, stop, names in updated.segments(has)]
    return OptimizerBytes.of(4, [(span, 4) for span in updated.spans(has).values()], LAYOUT.total), cuts


def test_adamw_has_two_states_of_all_and_muon_two_of_the_norm_and_one_of_the_matrix():
    assert (LAYOUT.numel, LAYOUT.padding) == (768, 15_616)
    for optimizer in ("adamw", "adamw8bit"):
        assert bytes_of(optimizer) == (OptimizerBytes(12), [(16_384, 2)])
    muon, cut = bytes_of("muon")
    assert muon == OptimizerBytes(4, 8 * 256 + 4 * 512, 4 * 15_616)
    assert cut == [(256, 2), (16_128, 1)]


def test_a_matrix_has_one_state_with_muon_and_all_else_has_two():
    found = {
        name: (states_of(name, matrix=True), states_of(name, matrix=False)) for name in ("adamw", "adamw8bit", "muon")
    }
    assert found == {"adamw": (2, 2), "adamw8bit": (2, 2), "muon": (1, 2)}


def test_a_shard_of_padding_has_no_states_but_room_for_all_of_them_in_a_record():
    for optimizer, states in (("adamw", 2), ("muon", 3)):
        padding, has = Updated(64, 8, []), states_by_slot(optimizer, MATRIX)
        assert padding.spans(has) == {}
        assert padding.segments(has) == [(0, 64, list(OPTIMIZERS[optimizer].states))]
        assert len(has) == states


def test_states_whose_parameters_are_mixed_have_room_in_all_elements():
    mixed = UnitLayout([("norm", (256,), 0), ("matrix", (16, 32), 1), ("bias", (256,), 0)], 1)
    spans = Updated.of(mixed, None).spans(states_by_slot("muon", MATRIX))
    assert list(spans.values()) == [Span(0, mixed.total, mixed.numel)] * 3


def test_each_rank_has_the_states_of_its_own_shard_whose_elements_stand_for_their_part_of_all_parameters():
    """A norm of 256 elements and a matrix of 16,384, of which the second rank has 256, and padding behind them."""
    layout, has = UnitLayout([("norm", (256,), 0), ("matrix", (128, 128), 1)], 2), states_by_slot("muon", MATRIX)
    first, second = (Updated.of(layout, rank).spans(has) for rank in (0, 1))
    assert (layout.shard, layout.numel) == (16_384, 16_640)
    assert sorted(first.values()) == [Span(0, 256, 256)] * 2 + [Span(256, 16_384, 8_320 - 256)]
    assert list(second.values()) == [Span(0, 16_384, 8_320)]


def test_each_source_of_an_experts_gradients_costs_what_a_rank_keeps_whole():
    def gradients(stage, sources, accumulate=1):
        return per_parameter(unit_plan(stage, ep=sources, accumulate=accumulate), 12).gradients

    assert gradients(1, 1) == 2 + 4 / 4
    assert gradients(1, 3) == 3 * 2 + 4 / 4  # three in bf16, and a shard of their sum
    assert gradients(1, 3, accumulate=2) == 3 * 4
    assert gradients(0, 3) == 3 * 4
    assert gradients(3, 3) == gradients(3, 1) == 4 / 4


def test_what_is_off_the_device_costs_it_nothing():
    here = per_parameter(unit_plan(3), 12)
    assert here == StateBytes(Fraction(1, 2), Fraction(1), Fraction(3))
    for params, gradients in (("host", "device"), ("none", "host"), ("disk", "host")):
        offload = Offload(optimizer="host", params=params, gradients=gradients)
        gone = {"parameters": params, "gradients": gradients}
        away = [category for category, place in gone.items() if place in TIERS]
        assert per_parameter(unit_plan(3, offload=offload), 12) == here._replace(**dict.fromkeys(away, 0))


def test_padding_costs_what_parameters_do_and_units_add_up():
    held = unit_bytes(unit_plan(0, 1), LAYOUT, OptimizerBytes(4, 100, 7))
    assert held == Held(StateBytes(*(Fraction(each) for each in (2 * 768, 4 * 768, 4 * 768 + 100))), 10 * 15_616 + 7)
    both = sum([held, held], NOTHING)
    assert both.total == 2 * held.total == sum(both.by_category.values())
    frozen = unit_bytes(unit_plan(0, 1, trainable=False), LAYOUT, OptimizerBytes(0))
    assert frozen.total == 2 * 16_384


# --- what comes and goes --------------------------------------------------------------------------


def test_the_root_is_whole_all_the_time_beside_two_blocks_at_a_hand_over_and_two_units_on_their_way():
    sizes = [("root", 1), ("a", 10), ("b", 20), ("root", 2)]
    assert whole_units(sizes) == 1 + 2 + 4 * 20
    assert whole_units(sizes, at_once=4) == 1 + 2 + 6 * 20
    assert whole_units(sizes[:1]) == 1
    assert whole_units(iter(sizes)) == whole_units(sizes)
    apart = [("root/frozen", 3), ("a", 10), ("a/frozen", 15), ("b", 20)]
    assert whole_units(apart) == 3 + 2 * 25 + 2 * 20


@pytest.mark.parametrize(("casts", "terms", "lands", "slots"), [
    (False, False, True, 0), (False, False, False, 1), (True, False, True, 8), (True, False, False, 9),
    (False, True, False, 8), (True, True, True, 16),
])  # fmt: skip
def test_a_reduction_over_eight_ranks_receives_sums_or_terms_beside_what_it_casts(casts, terms, lands, slots):
    assert Reduction(8, 4, casts, terms, lands).nbytes(100) == slots * 400


@pytest.mark.parametrize(("settings", "adds", "travels", "casts", "terms", "lands"), [
    ({"algorithm": NATIVE}, False, 4, False, False, True), ({"algorithm": NATIVE}, True, 4, False, False, False),
    ({"stage": 1, "algorithm": NATIVE}, False, 4, True, False, True), ({}, False, 2, False, True, False),
    # sources are summed first, in fp32; exact mode adds up terms and casts them as they come
    ({"ep": 2}, False, 4, False, False, True), ({"exact": True}, False, 2, False, True, False),
    ({"stage": 1, "exact": True, "accumulate": 4, "algorithm": NATIVE}, False, 4, False, True, True),
])  # fmt: skip
def test_gradients_travel_as_sums_or_terms_and_are_cast_where_they_are_narrower(
    settings, adds, travels, casts, terms, lands
):
    unit = unit_plan(**{"stage": 3} | settings)
    assert reduction_of(unit, 1 + adds) == Reduction(4, travels, casts, terms, lands)


def test_sources_are_summed_apart_unless_the_first_of_them_has_the_sum_s_dtype():
    assert sum_of_sources(unit_plan(3, ep=2), 100) == 100 * 4
    assert sum_of_sources(unit_plan(3, ep=2, precision="fp32"), 100) == sum_of_sources(unit_plan(3), 100) == 0
    assert sum_of_sources(unit_plan(3, ep=2, precision="fp32", exact=True), 100) == 100 * 4


def test_units_in_blocks_are_messages_until_they_are_used_and_none_comes_ahead():
    layout = UnitLayout([("weight", (100, 256), 0)], 4)

    def gathered(*names, **settings):
        return gathered_at_once([(name, unit_plan(3, **settings), layout) for name in names], "cpu")

    each = 2 * layout.total
    assert gathered("a", "b") == (2 * each + AHEAD * each, 0)
    assert gathered("a", "b", gather_wire="int8") == (2 * each, coded_messages(layout.total, "cpu"))
    assert gathered("a", release="every_step") == (0, 0)


@pytest.mark.parametrize(("ranks", "settings", "weight", "scratch"), [
    (4, {}, 0, 0),  # others' slots have room
    (1, {}, 0, 8), (4, {"gather_wire": "int8"}, 2, 8), (1, {"precision": "fp16"}, 0, 0),
    (4, {"precision": "fp16", "gather_wire": "int8"}, 2, 0), (4, {"trainable": False, "gather_wire": "int8"}, 0, 0),
])  # fmt: skip
def test_casts_in_gathers_borrow_what_finds_no_room_in_others_slots(ranks, settings, weight, scratch):
    layout = UnitLayout([("weight", (100, 256), 0)], ranks)

    def messages(weights):
        return gathered_at_once([("a", unit_plan(3, ranks, weights=weights, **settings), layout)], "cpu")[1]

    assert messages("cast") - messages("kept") == (weight + scratch) * layout.shard


def test_copies_of_a_shard_sum_in_the_dtype_of_sums_over_their_own_number():
    def summed(**settings):
        return sum_over_copies(unit_plan(2, copies=3, **settings))

    assert summed() == CopySum(3, "same", Reduction(3, 4, casts=False, terms=False, lands=True), wide=4)
    assert summed(reduce_dtype="bf16").plain == Reduction(3, 2, casts=True, terms=True, lands=True)
    assert summed(algorithm=PAIRWISE).plain == Reduction(2, 4, casts=False, terms=True, lands=True)
    assert summed(slow_wire="int8").form == "int8"


def test_sums_on_their_way_to_the_host_are_two_and_one_that_leaves_in_the_dtype_it_has_there():
    shards, policy = [10, 20, 30, 40], Policy.of(Spec())._replace(gradients=True)
    assert arriving_bytes(shards, policy) == (30 + 40) * 4 + 20 * 4
    assert arriving_bytes(shards, policy._replace(held=BF16)) == (30 + 40) * (4 + 2) + 20 * 2
    assert arriving_bytes(shards, policy._replace(gradients=False)) == 0


def test_the_host_widens_a_piece_for_each_thread_to_take_norms_of_gradients_in_fewer_bits():
    policy = Policy.of(Spec())._replace(gradients=True)
    assert norm_scratch([10, 40, 20], policy, threads=2) == 0
    assert norm_scratch([10, 40, 20], policy._replace(held=BF16), threads=2) == 4 * (40 + 20)


def test_records_that_pass_the_device_have_a_ring_and_masters_in_halves_are_widened():
    assert passing_bytes("host", 4096, "cuda", splits=True) == 0
    assert passing_bytes("device", 4096, "cuda", splits=False) == 3 * 4096
    assert passing_bytes("device", 4096, "cuda", splits=True) == 3 * 4096 + 4 * update_bucket("cuda")
    assert passing_bytes("device", 4096, "cuda", splits=True, temporaries=2) == 3 * 4096 + 3 * 4 * update_bucket("cuda")


def test_records_pass_through_three_buffers_of_whole_blocks():
    assert [ring_bytes(longest) for longest in (0, 1, 4096, 4097)] == [0, 3 * 4096, 3 * 4096, 6 * 4096]


def test_a_record_is_updated_in_fp32_of_what_it_has_in_16_bits():
    many = 1 << 20  # a CPU casts 2^18 at a time, with a copy of each
    assert record_scratch(many, "cuda", splits=False) == 0
    assert record_scratch(many, "cuda", splits=True) == 4 * many
    assert record_scratch(many, "cuda", splits=True, rounded=True) == 4 * (3 + 1) * many
    assert record_scratch(many, "cuda", splits=False, casts=True) == 4 * 2 * many
    assert record_scratch(many, "cpu", splits=False, casts=True) == 4 * 2 * (1 << 18)
    assert record_scratch(many, "cuda", splits=False, rounded=True, casts=True) == 4 * (2 + 2) * many


def test_what_is_sent_is_multiplied_and_added_up_by_calls_elements_and_bytes():
    moved = Moved(calls=2, elements=10, bytes=40)
    assert moved.times(3) == (6, 30, 120)
    assert Moved.total([moved, moved.times(3)]) == (8, 40, 160)
    assert Moved.total([]) == Moved() == (0, 0, 0)
