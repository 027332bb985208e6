"""What ranks have begun, compared: a difference, or a circle of waits, is a proof; a shorter list is none."""

import pytest

from zero3d.distributed import order_log
from zero3d.distributed.order_log import (
    GATHERS,
    MORE_FORWARDS,
    ONCE_MORE,
    OWN_CALL,
    REDUCTIONS,
    REMEDY,
    STEPS,
    OrderLog,
    OwnCall,
    Post,
    Steps,
    Wait,
    find_disagreement,
)
from zero3d.distributed.unit_order import AHEAD

DP = {"dp": [0, 1]}


def log_of(*begun):
    """A log of "op unit" words: g of a gather, r of a reduction, x of an exchange."""
    log = OrderLog()
    for word in begun:
        kind, _, unit = word.partition(" ")
        log.add({"g": "all_gather", "r": "reduce_scatter", "x": "exchange"}[kind], unit or "-")
    return log


def post(*begun, axes=DP, wait=None, counts=None, call=None):
    """What a rank tells that has begun this on dp, as its peers read it."""
    log = log_of(*begun)
    entries = {("dp", sequence): log.recent(sequence) for sequence in (GATHERS, REDUCTIONS)}
    kinds = [("all_gather", "g"), ("reduce_scatter", "r"), ("exchange", "x")]
    counted = {("dp", op): sum(word[0] == kind for word in begun) for op, kind in kinds}
    return Post.unpack(Post.of(axes, entries, counted | (counts or {}), wait, call).pack())


def said(*posts):
    found = find_disagreement(dict(enumerate(posts)))
    return "" if found is None else found.text()


STEP = ("g embed", "g layers.0", "g head")


def test_ranks_that_have_left_out_unlike_steps_are_told_so_and_at_which_stage_gathers_are_of_steps():
    two = {rank: post(first)._replace(steps=Steps(2, rank)) for rank, first in enumerate(("g a", "x"))}
    found = find_disagreement({rank: Post.unpack(each.pack()) for rank, each in two.items()}).text()
    assert "after a backward (rank 1: 1; rank 0: 0)" in found
    assert "At stage" not in found
    alike = find_disagreement({rank: each._replace(steps=Steps(2, 1)) for rank, each in two.items()}).text()
    assert alike.endswith(STEPS.format(2))


def test_equal_orders_prove_nothing():
    assert said(post(*STEP, "x"), post(*STEP, "x")) == ""


def test_a_rank_that_has_begun_less_may_be_slow():
    assert said(post(*STEP, "x", *STEP), post("g embed")) == ""
    assert said(post(*STEP), post()) == ""
    assert find_disagreement({1: post(*STEP)}) is None  # the others have told nothing


def test_a_unit_that_one_rank_alone_gathers_is_named_with_what_the_other_does_instead():
    before = (*STEP, "x")
    found = said(post(*before, "g embed", "g tower"), post(*before, "g embed", "g layers.0"))
    assert "on axis dp rank 0 gathers unit 'tower', where rank 1 gathers unit 'layers.0' (operation 6 " in found
    assert found.endswith(order_log.REMEDY)


def test_the_unit_that_fewer_ranks_have_used_comes_first():
    axes = {"dp": [0, 1, 2]}
    posts = [post("g embed", *rest, axes=axes) for rest in (["g layers.0"], ["g experts.7"], ["g layers.0"])]
    assert "rank 1 gathers unit 'experts.7', where ranks 0, 2 gather unit 'layers.0'" in said(*posts)


def test_a_tower_after_which_the_others_have_ended_the_evaluation_is_named():
    found = said(post(*STEP, "x"), post(*STEP, "g tower"))
    assert "rank 1 gathers unit 'tower', where rank 0 comes to an exchange, as ends a step or an evaluation" in found


def test_a_difference_of_two_ranks_is_found_beside_one_that_is_late():
    axes = {"dp": [0, 1, 2]}
    posts = [post(*STEP, *later, axes=axes) for later in (["g embed"], STEP, ["g embed", "g tower"])]
    assert "rank 2 gathers unit 'tower', where rank 1 gathers unit 'layers.0' (operation 5 " in said(*posts)


def test_many_ranks_are_counted():
    axes = {"dp": list(range(3000))}
    alike, other = post("g embed", "g head", axes=axes), post("g embed", "g tower", axes=axes)
    found = find_disagreement({rank: other if rank == 77 else alike for rank in range(3000)}).text()
    assert "rank 77 gathers unit 'tower', where ranks 0, 1, 2, 3 and 2,995 more gather unit 'head'" in found


def test_reductions_have_an_order_of_their_own():
    assert said(post("g a", "r a", "g b"), post("g a", "g b", "r a")) == ""
    assert "rank 0 begins reduce_scatter of unit 'a', where rank 1 begins reduce_scatter of unit 'b'" in said(
        post("g a", "r a"), post("g a", "r b")
    )


def test_a_unit_that_one_rank_reduces_once_more_is_named_where_the_other_has_ended_its_step():
    found = said(post("g a", "r a", "r a"), post("g a", "r a", "x"))
    assert "rank 0 begins reduce_scatter of unit 'a', where rank 1 comes to an exchange" in found
    assert found.endswith(ONCE_MORE)


def test_ranks_that_run_more_forwards_in_a_step_are_told_so():
    found = said(post("g root", "x"), post("g root", "g root"))
    assert found.endswith(f": on axis dp rank 1 begins one more forward, where rank 0 is at an exchange, as ends a step "
                          f"or an evaluation. {MORE_FORWARDS}")  # fmt: skip
    axes = {"dp": list(range(4))}
    ends, more = post("g root", "x", axes=axes), post("g root", "g root", axes=axes)
    assert "ranks 1, 3 begin one more forward, where ranks 0, 2 are at an exchange" in said(ends, more, ends, more)


def test_of_gathers_it_is_said_how_many_run_ahead():
    assert f"; units are gathered up to {AHEAD} ahead of their use)" in said(post("g a"), post("g b"))
    assert "ahead of their use" not in said(post("r a"), post("r b"))


def test_gathers_have_the_remedies_of_units_that_are_not_used_alike():
    assert said(post("g a"), post("g b")).endswith(REMEDY)
    assert said(post("g a"), post("x")).endswith(REMEDY)


def test_ranks_of_different_axes_may_do_different_things():
    posts = {
        rank: post(f"g layers.{rank // 2}", axes={"dp": [2 * (rank // 2), 2 * (rank // 2) + 1]}) for rank in range(4)
    }
    assert find_disagreement(posts) is None


def test_of_long_orders_the_last_operations_are_compared(monkeypatch):
    monkeypatch.setattr(order_log, "KEPT", 4)
    many = [f"g layers.{number}" for number in range(9)]
    assert [entry.place for entry in log_of(*many).recent(GATHERS)] == [5, 6, 7, 8]
    assert said(post(*many), post(*many[:7])) == ""
    assert "rank 0 gathers unit 'layers.8', where rank 1 gathers unit 'tower' (operation 9 " in said(
        post(*many), post(*many[:8], "g tower")
    )
    assert said(post(*many), post("g tower")) == ""  # what it had begun when that one came is forgotten


def waits(op, number, unit, peer=None):
    return Wait("dp", op, unit, number, peer)


def test_ranks_that_wait_for_each_other_in_different_operations_are_a_proof():
    held = post("g embed", "g tower", wait=waits("all_gather", 2, "tower"))
    ended = post("g embed", "r embed", wait=waits("reduce_scatter", 1, "embed"))
    found = said(held, ended)
    assert (
        "rank 0 waits in all_gather of unit 'tower' on axis dp, which rank 1 has not begun; rank 1 waits in " in found
    )
    assert "reduce_scatter of unit 'embed' on axis dp, which rank 0 has not begun" in found


def test_a_broadcast_that_a_rank_with_late_gradients_has_not_begun_is_a_proof():
    held = post("r a", wait=waits("broadcast", 1, "-"), counts={("dp", "broadcast"): 1})
    late = post("r a", "r a", wait=waits("reduce_scatter", 2, "a", peer=0))
    assert "rank 0 waits in broadcast on axis dp, which rank 1 has not begun" in said(held, late)
    assert said(held, late).endswith(ONCE_MORE)


BARRIER = OwnCall("barrier", [0, 1])


def test_a_collective_of_the_programs_own_that_a_blocked_rank_has_not_begun_is_a_proof():
    held = post("g embed", "g tower", wait=waits("all_gather", 2, "tower"))
    found = said(post("g embed", call=BARRIER), held)
    assert (
        "rank 0 waits in the program's own torch.distributed.barrier, which rank 1 has not begun; rank 1 waits in "
        "all_gather of unit 'tower' on axis dp, which rank 0 has not begun" in found
    )
    assert found.endswith(OWN_CALL)


def test_a_collective_of_the_programs_own_is_no_proof_where_a_rank_of_it_may_still_come():
    axes, three = {"dp": [0, 1, 2]}, OwnCall("barrier", [0, 1, 2])
    held = post("g embed", "g tower", axes=axes, wait=waits("all_gather", 2, "tower", peer=0))
    inside, slow = post("g embed", axes=axes, call=three), post("g embed", axes=axes)
    assert find_disagreement({0: inside, 1: held}) is None  # rank 2 has told nothing
    assert said(inside, held, slow) == ""
    assert said(inside, inside, inside) == ""
    assert said(post("g embed", "g tower", axes=axes, call=three), held, inside) == ""  # rank 0 has begun it
    assert "rank 0 waits in the program's own" in said(inside, held, inside)


def test_what_a_rank_began_last_is_told_with_the_call_in_which_it_is():
    told = post("g a", "r b", call=BARRIER)
    was = " and was in the program's own torch.distributed.barrier"
    assert told.last("dp", "all_gather") == f"had begun nothing since all_gather of unit 'a'{was}"
    assert told.last("dp", "broadcast") == f"had begun nothing since reduce_scatter of unit 'b'{was}"
    assert post().last("dp", "all_gather") == "had begun nothing since the mesh"


def test_a_wait_for_a_rank_that_does_not_wait_is_no_proof():
    assert said(post("g embed", "g tower", wait=waits("all_gather", 2, "tower")), post("g embed")) == ""


def test_a_wait_for_what_a_peer_has_begun_is_no_proof():
    one = post("g embed", "r embed", wait=waits("all_gather", 1, "embed"))
    other = post("g embed", wait=waits("reduce_scatter", 1, "embed", peer=0), counts={("dp", "reduce_scatter"): 1})
    assert said(one, other) == ""


def test_messages_between_two_ranks_are_not_counted_alike_and_prove_nothing():
    posts = [
        post("g a", wait=waits("send", 3, "a", peer), counts={("dp", "send"): 3 - rank})
        for rank, peer in ((0, 1), (1, 0))
    ]
    assert said(*posts) == ""


def test_a_circle_of_three_ranks_is_found_beside_one_that_only_waits():
    axes = {"dp": [0, 1, 2, 3]}
    posts = [
        post("g a", axes=axes, wait=waits("all_gather", 1, "a", peer)) if rank == 3 else
        post("g a", axes=axes, wait=waits("exchange", 1, "-", peer), counts={("dp", "exchange"): 1}) if rank == 2 else
        post("r a", axes=axes, wait=waits("reduce_scatter", 1, "a", peer)) if rank == 0 else
        post(axes=axes, wait=Wait("dp", "all_to_all", "b", 1, peer), counts={("dp", "all_to_all"): 1})
        for rank, peer in ((0, 1), (1, 2), (2, 0), (3, 0))
    ]  # fmt: skip
    found = find_disagreement(dict(enumerate(posts)))
    assert [rank for rank, _ in found.waits] == [0, 1, 2]
    assert "rank 2 waits in exchange on axis dp, which rank 0 has not begun" in found.text()


@pytest.mark.parametrize("text", ["", "e30=", "no base64", "eJyrVkpOVLIyqAUACl8CyA=="])
def test_what_is_no_post_is_a_value_error(text):
    with pytest.raises(ValueError):
        Post.unpack(text)
