"""When a step is due and what its micro-batches weigh, without a model."""

import pytest

from zero3d.zero.accumulation import Boundary, Driven


def plain(boundary, fresh=True):
    """A `loss.backward()`; whether it ends in a reduction."""
    boundary.backward_begins()
    return boundary.through_root(fresh)


def driven(boundary, weight=1.0, last=None, fresh=True):
    """An `engine.backward`; whether it ends in a reduction."""
    with boundary.driving(Driven(weight, last)):
        boundary.backward_begins()
        return boundary.through_root(fresh)


def state(boundary):
    return boundary.count, boundary.weight, boundary.weights, boundary.reached


def counter_of(accumulate, every=False, draw=None):
    return Boundary(accumulate, every, False, draw)


@pytest.mark.parametrize("backward", [plain, driven])
def test_a_step_is_due_after_so_many_micro_batches_and_stays_due(backward):
    boundary = counter_of(2)
    assert [backward(boundary) for _ in range(3)] == [False, True, True]
    assert state(boundary) == (3, 3.0, [1.0] * 3, True)
    boundary.reset()
    assert state(boundary) == (0, 0.0, [], False)
    assert [backward(boundary) for _ in range(2)] == [False, True]


def test_where_every_micro_batch_is_reduced_the_step_is_due_no_earlier():
    boundary = counter_of(2, every=True)
    assert driven(boundary)
    assert not boundary.reached
    assert driven(boundary)
    assert boundary.reached


def test_the_caller_may_end_a_step_earlier_or_later():
    boundary = counter_of(2)
    assert driven(boundary, last=True)
    assert state(boundary) == (1, 1.0, [1.0], True)
    boundary.reset()
    assert [driven(boundary, last=False) for _ in range(3)] == [False] * 3
    assert driven(boundary, last=True)
    assert boundary.count == 4


def test_further_backwards_of_a_forward_add_gradients_only_and_may_end_the_step():
    boundary = counter_of(3)
    driven(boundary, 2.0)
    assert not driven(boundary, 5.0, fresh=False)
    assert not plain(boundary, fresh=False)
    assert state(boundary) == (1, 2.0, [2.0], False)
    assert driven(boundary, 5.0, last=True, fresh=False)
    assert state(boundary) == (1, 2.0, [2.0], True)


def test_one_backward_through_two_forwards_counts_once():
    boundary = counter_of(3)
    boundary.backward_begins()
    assert not boundary.through_root(True)
    assert not boundary.through_root(True)
    with boundary.driving(Driven(4.0)):
        boundary.backward_begins()
        boundary.through_root(True)
        boundary.through_root(True)
    assert state(boundary) == (2, 5.0, [1.0, 4.0], False)


def test_a_weight_given_after_a_partial_backward_replaces_its_1_once():
    boundary = counter_of(4)
    driven(boundary, 2.0)
    plain(boundary)
    driven(boundary, 7.0, fresh=False)
    driven(boundary, 9.0, fresh=False)
    assert state(boundary) == (2, 9.0, [2.0, 7.0], False)
    plain(boundary)
    driven(boundary, 3.0)  # of a forward of its own
    driven(boundary, 9.0, fresh=False)
    assert state(boundary) == (4, 13.0, [2.0, 7.0, 1.0, 3.0], True)


def test_what_came_before_a_step_counts_for_nothing_in_it():
    boundary = counter_of(1)
    plain(boundary)
    boundary.reset()
    driven(boundary, 5.0, last=True, fresh=False)  # of a graph that was retained
    assert state(boundary) == (1, 5.0, [5.0], True)


def test_the_last_micro_batch_ends_the_step_even_if_its_loss_hangs_on_no_parameter():
    boundary = counter_of(2)
    with boundary.driving(Driven(3.0, last=True)):
        pass
    assert state(boundary) == (1, 3.0, [3.0], True)
    with boundary.driving(Driven(4.0, last=False)):
        pass
    assert state(boundary) == (1, 3.0, [3.0], False)


def test_a_backward_that_fails_is_not_taken_for_the_next_one():
    boundary = counter_of(1)
    with pytest.raises(ValueError, match="broken"), boundary.driving(Driven(5.0, last=False)):
        raise ValueError("broken")
    boundary.abandon()
    assert plain(boundary)
    assert state(boundary) == (1, 1.0, [1.0], True)


def test_a_step_has_as_many_micro_batches_as_the_last_one_that_was_due():
    boundary = counter_of(2)
    assert boundary.usual == 2
    for last in (None, None, None):
        driven(boundary, last=last)
    boundary.reset()
    assert boundary.usual == 3
    driven(boundary)
    boundary.abandon()
    assert boundary.usual == 3
    boundary.finish(8, [])
    boundary.reset()
    assert boundary.usual == 8


def test_a_pipeline_rank_without_a_loss_has_weights_of_0():
    boundary = counter_of(1)
    boundary.finish(3, [])
    assert state(boundary) == (3, 0.0, [0.0] * 3, True)
    boundary.finish(2, [4.0, 5.0])
    assert state(boundary) == (2, 9.0, [4.0, 5.0], True)


def test_random_numbers_are_drawn_once_per_micro_batch():
    drawn = []
    boundary = counter_of(2, draw=drawn.append)
    for _ in range(2):
        for _ in range(2):
            boundary.forward_begins()
            boundary.forward_begins()  # one more of the same micro-batch: it goes on with the same numbers
            driven(boundary)
        boundary.reset()
    assert drawn == [0, 1, 0, 1]
    boundary.forward_begins()
    boundary.abandon()
    boundary.forward_begins()
    assert drawn[4:] == [0, 0]
