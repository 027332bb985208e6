"""Which message a pipeline rank says that it waits for, as torch's schedules drive it."""

import pytest

from zero3d.distributed.axis import Axis
from zero3d.pipeline.acknowledgements import Work
from zero3d.pipeline.actions import Action
from zero3d.pipeline.waits import Waits
from zero3d.watchdog.heartbeat import TRAINING, Heartbeat, read_beat


@pytest.fixture
def said(tmp_path):
    """What a rank of three says; waits made for an order of actions."""
    heartbeat = Heartbeat.begin(tmp_path, 1, TRAINING)

    def now():
        beat = read_beat((tmp_path / "rank-1").read_bytes())
        return beat.op, beat.unit, beat.peer, beat.depth

    def waits(owners, order=()):
        return Waits(Axis("pp", 1, 3, heartbeat=heartbeat), owners, order)

    return now, waits


def test_1f1b_says_what_is_sent_and_received_together_only_where_both_are_of_one_peer(said):
    now, waits = said
    middle = waits([0, 1, 2])
    middle.begin()
    middle.receiving(Work(False, 1, 0))
    assert now() == ("receive", "the activations of micro-batch 0 for model chunk 1", 0, 0)
    middle.sending(Work(False, 1, 0))
    middle.receiving(Work(True, 1, 0))
    assert now() == (
        "send and receive",
        "the activations of micro-batch 0 from model chunk 1 and the gradients of micro-batch 0 for model chunk 1", 2, 0,
    )  # fmt: skip
    middle.over(Action("B", 1, 0))
    middle.sending(Work(True, 1, 0))
    middle.receiving(Work(True, 1, 1))  # of the other neighbour: the gradient goes by itself
    assert now() == ("receive", "the gradients of micro-batch 1 for model chunk 1", 2, 0)
    middle.over(Action("B", 1, 1))
    assert now() == ("send", "the gradients of micro-batch 0 from model chunk 1", 0, 0)
    middle.begin()
    middle.receiving(Work(False, 1, 0))
    assert now() == ("receive", "the activations of micro-batch 0 for model chunk 1", 0, 0)


def test_where_messages_are_asked_for_ahead_it_says_what_the_next_action_needs(said):
    now, waits = said
    order = [Action("F", 1, 0), Action("F", 4, 0), Action("I", 4, 0), Action("W", 4, 0), Action("F", 1, 1)]
    looped = waits([0, 1, 2, 0, 1, 2], order)
    looped.begin()
    assert now()[:3] == ("receive", "the activations of micro-batch 0 for model chunk 1", 0)
    looped.receiving(Work(True, 4, 0))
    assert now()[1].endswith("activations of micro-batch 0 for model chunk 1")
    looped.over(order[0])
    assert now()[:3] == ("receive", "the activations of micro-batch 0 for model chunk 4", 0)
    looped.over(order[1])
    assert now()[:3] == ("receive", "the gradients of micro-batch 0 for model chunk 4", 2)
    looped.over(order[2])  # a backward of weights needs no message
    assert now()[1].endswith("gradients of micro-batch 0 for model chunk 4")


def test_where_nobody_watches_nothing_is_said():
    waits = Waits(Axis("pp", 1, 3), [0, 1, 2], [])
    waits.begin()
    waits.receiving(Work(False, 1, 0))
