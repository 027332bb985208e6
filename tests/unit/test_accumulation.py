"""When a step is due and what its micro-batches weigh, without a model."""

import pytest

from zero3d.zero.accumulation import Accumulation, Contribution


def plain(accumulation, fresh=True):
    """A `loss.backward()`; whether it ends in a reduction."""
    accumulation.backward_begins()
    return accumulation.through_root(fresh)


def driven(accumulation, weight=1.0, last=None, fresh=True):
    """An `engine.backward`; whether it ends in a reduction."""
    with accumulation.counting(Contribution(weight, last)):
        accumulation.backward_begins()
        return accumulation.through_root(fresh)


def state(accumulation):
    return accumulation.count, accumulation.weight, accumulation.weights, accumulation.reached


def counter_of(accumulate, every=False, draw=None):
    return Accumulation(accumulate, every, False, draw)


@pytest.mark.parametrize("backward", [plain, driven])
def test_a_step_is_due_after_so_many_micro_batches_and_stays_due(backward):
    accumulation = counter_of(2)
    assert [backward(accumulation) for _ in range(3)] == [False, True, True]
    assert state(accumulation) == (3, 3.0, [1.0] * 3, True)
    accumulation.reset()
    assert state(accumulation) == (0, 0.0, [], False)
    assert [backward(accumulation) for _ in range(2)] == [False, True]


def test_where_every_micro_batch_is_reduced_the_step_is_due_no_earlier():
    accumulation = counter_of(2, every=True)
    assert driven(accumulation)
    assert not accumulation.reached
    assert driven(accumulation)
    assert accumulation.reached


def test_the_caller_may_end_a_step_earlier_or_later():
    accumulation = counter_of(2)
    assert driven(accumulation, last=True)
    assert state(accumulation) == (1, 1.0, [1.0], True)
    accumulation.reset()
    assert [driven(accumulation, last=False) for _ in range(3)] == [False] * 3
    assert driven(accumulation, last=True)
    assert accumulation.count == 4


def test_further_backwards_of_a_forward_add_gradients_only_and_may_end_the_step():
    accumulation = counter_of(3)
    driven(accumulation, 2.0)
    assert not driven(accumulation, 5.0, fresh=False)
    assert not plain(accumulation, fresh=False)
    assert state(accumulation) == (1, 2.0, [2.0], False)
    assert driven(accumulation, 5.0, last=True, fresh=False)
    assert state(accumulation) == (1, 2.0, [2.0], True)


def test_one_backward_through_two_forwards_counts_once():
    accumulation = counter_of(3)
    accumulation.backward_begins()
    assert not accumulation.through_root(True)
    assert not accumulation.through_root(True)
    with accumulation.counting(Contribution(4.0)):
        accumulation.backward_begins()
        accumulation.through_root(True)
        accumulation.through_root(True)
    assert state(accumulation) == (2, 5.0, [1.0, 4.0], False)


def test_a_weight_given_after_a_partial_backward_replaces_its_1_once():
    accumulation = counter_of(4)
    driven(accumulation, 2.0)
    plain(accumulation)
    driven(accumulation, 7.0, fresh=False)
    driven(accumulation, 9.0, fresh=False)
    assert state(accumulation) == (2, 9.0, [2.0, 7.0], False)
    plain(accumulation)
    driven(accumulation, 3.0)  # of a forward of its own
    driven(accumulation, 9.0, fresh=False)
    assert state(accumulation) == (4, 13.0, [2.0, 7.0, 1.0, 3.0], True)


def test_what_came_before_a_step_counts_for_nothing_in_it():
    accumulation = counter_of(1)
    plain(accumulation)
    accumulation.reset()
    driven(accumulation, 5.0, last=True, fresh=False)  # of a graph that was retained
    assert state(accumulation) == (1, 5.0, [5.0], True)


def test_the_last_micro_batch_ends_the_step_even_if_its_loss_hangs_on_no_parameter():
    accumulation = counter_of(2)
    with accumulation.counting(Contribution(3.0, last=True)):
        pass
    assert state(accumulation) == (1, 3.0, [3.0], True)
    with accumulation.counting(Contribution(4.0, last=False)):
        pass
    assert state(accumulation) == (1, 3.0, [3.0], False)


def test_a_backward_that_fails_is_not_taken_for_the_next_one():
    accumulation = counter_of(1)
    with pytest.raises(ValueError, match="broken"), accumulation.counting(Contribution(5.0, last=False)):
        raise ValueError("broken")
    accumulation.reset()
    assert plain(accumulation)
    assert state(accumulation) == (1, 1.0, [1.0], True)


def test_a_step_has_as_many_micro_batches_as_the_last_one_that_was_due():
    accumulation = counter_of(2)
    assert accumulation.usual == 2
    for last in (None, None, None):
        driven(accumulation, last=last)
    accumulation.reset()
    assert accumulation.usual == 3
    driven(accumulation)
    accumulation.reset()
    assert accumulation.usual == 3
    accumulation.finish(8, [])
    accumulation.reset()
    assert accumulation.usual == 8


def test_a_pipeline_rank_without_a_loss_has_weights_of_0():
    accumulation = counter_of(1)
    accumulation.finish(3, [])
    assert state(accumulation) == (3, 0.0, [0.0] * 3, True)
    accumulation.finish(2, [4.0, 5.0])
    assert state(accumulation) == (2, 9.0, [4.0, 5.0], True)


def test_random_numbers_are_drawn_once_per_micro_batch():
    drawn = []
    accumulation = counter_of(2, draw=drawn.append)
    for _ in range(2):
        for _ in range(2):
            accumulation.forward_begins()
            accumulation.forward_begins()  # one more of the same micro-batch: it goes on with the same numbers
            driven(accumulation)
        accumulation.reset()
    assert drawn == [0, 1, 0, 1]
    accumulation.forward_begins()
    accumulation.reset()
    accumulation.forward_begins()
    assert drawn[4:] == [0, 0]
