"""What is gathered ahead and what is given back: orders, the window and what is forgotten, on units without tensors."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from zero3d.distributed.unit_order import AHEAD
from zero3d.memory.arena import Arena
from zero3d.zero.gathers import STEP, Gathers, Order
from zero3d.zero.streams import SideStream
from zero3d.zero.tokens import ROOT_TURN, TURN
from zero3d.zero.unit_parts import State
from zero3d.zero.weights import placeholder

CPU = Arena(torch.device("cpu"))


class Weights:
    """A unit's parameters: their state, and a log of what was done to them."""

    sharded, from_records = True, False

    def __init__(self, name, log):
        self._name, self._log, self.state, self.place = name, log, State.SHARDED, self

    def flush(self):
        assert self.state is State.SHARDED

    def ahead(self):
        assert self.state is State.SHARDED

    def gather(self, exactly=False):
        assert self.state is State.SHARDED
        self._log.append(f"gather {self._name}")
        self.state = State.GATHERING

    def ready(self):
        assert self.state is not State.SHARDED
        self.state = State.FULL

    def keep(self):
        self.state = State.KEPT

    def release(self):
        assert self.state is not State.SHARDED
        self._log.append(f"free {self._name}")
        self.state = State.SHARDED


class Unit:
    def __init__(self, name, log):
        self.name, self.users, self.weights = name, set(), Weights(name, log)


class Model:
    """Units that are gathered, and what happens to them, joins of the side stream among it."""

    def __init__(self, **options):
        self.log = []
        self.gathers = Gathers(SideStream("side", CPU), **options)
        self.gathers._side.join = lambda unit: self.log.append(f"join {unit}")
        self.units = {name: Unit(name, self.log) for name in "abcdef"}

    def acquire(self, name, token="forward"):
        self.gathers.acquire(self.units[name], token)

    def release(self, name, token="forward"):
        self.gathers.release(self.units[name], token)

    def turn(self, *names):
        self.gathers.pass_turn([self.units[name] for name in names])

    def micro_batch(self, names):
        """The log of a micro-batch that uses these units one after another."""
        self.gathers.begin()
        done = [self.use(name) for name in names]
        return [*done, self.end()]

    def use(self, name):
        """The log of one use: what is gathered before it is waited for."""
        self.log.clear()
        self.acquire(name)
        self.release(name)
        return " ".join(self.log)

    def end(self, *tokens):
        self.log.clear()
        self.gathers.drop(lambda token: token in (tokens or (TURN, ROOT_TURN)))
        return " ".join(self.log)

    def states(self):
        return {
            name: unit.weights.state for name, unit in self.units.items() if unit.weights.state is not State.SHARDED
        }


@contextmanager
def in_backward():
    """A backward is under way, by autograd's number of it."""
    with mock.patch("torch._C._current_graph_task_id", return_value=7):
        yield


ALONE = [f"gather {name} join {name} free {name}" for name in "abcd"]
RAN_AHEAD = [
    "gather a gather b gather c join a free a", "gather d join b free b", "join c free c", "join d free d", "",
]  # fmt: skip


def test_the_order_of_one_micro_batch_is_gathered_a_window_ahead_in_the_next():
    assert AHEAD == 2
    model = Model()
    assert model.micro_batch("abcd") == [*ALONE, ""]
    for _ in range(3):
        assert model.micro_batch("abcd") == RAN_AHEAD


def test_another_order_finds_its_place_in_the_plan_again_and_is_the_next_one():
    model = Model()
    for _ in range(2):
        model.micro_batch("abcd")
    assert model.micro_batch("acbd") == [
        "gather a gather b gather c join a free a",
        "gather d join c free c",  # c came where b should: the plan goes on behind it
        "join b free b",  # what was gathered too early is kept for its use, and nothing is planned behind that
        "join d free d",
        "",
    ]
    assert model.micro_batch("acbd")[:2] == ["gather a gather c gather b join a free a", "gather d join c free c"]


def test_what_the_plan_does_not_have_is_gathered_alone_and_the_plan_waits_for_its_next_unit():
    model = Model()
    for _ in range(2):
        model.micro_batch("abcd")
    assert model.micro_batch("aebfcd") == [
        "gather a gather b gather c join a free a",
        "gather e join e free e",
        "gather d join b free b",
        "gather f join f free f",
        "join c free c",
        "join d free d",
        "",
    ]


def test_a_first_micro_batch_follows_what_is_expected():
    model = Model()
    model.gathers.training.expect([model.units[name] for name in "abcd"])
    assert model.micro_batch("abcdcba") == [*RAN_AHEAD[:4], "gather c join c free c", *ALONE[1::-1], ""]
    assert model.micro_batch("ad") == [RAN_AHEAD[0], "gather d join d free d", "join b free b join c free c"]
    assert model.micro_batch("ad") == ["gather a gather d join a free a", "join d free d", ""]


def test_a_forward_gathers_nothing_ahead_for_its_backward_which_does_so_itself():
    """Though logits would hide it: they are the fullest instant. A pipeline's plan has many such turns."""
    for options in ({}, {"plans_step": True}):
        model, seen = Model(**options), []
        for _ in range(2):
            model.gathers.begin()
            seen = [model.use(name) for name in "abc"]
            with in_backward():
                model.log.clear()
                for _ in range(2):
                    model.gathers.begin_backward()
                seen.append(" ".join(model.log))
                seen += [model.use(name) for name in "bad"]
            seen += [model.use(name) for name in "ae"]  # of a second forward
            model.end(STEP, TURN)
        assert seen == [
            "gather a gather b gather c join a free a",
            "join b free b",
            "join c free c",
            "gather b gather a",
            "gather d join b free b",
            "join a free a",
            "gather a gather e join d free d",
            "join a free a",
            "join e free e",
        ]


def test_a_backward_bounds_what_is_near_but_not_what_has_a_long_way():
    """What comes from a host or a disk is asked for AHEAD units early, whichever way the model goes."""
    order, units = Order(), "abcdefg"
    for _ in range(2):
        order.begin()
        planned = [order.follow(unit, in_backward=unit in "defg") for unit in units]
    words = [("".join(each.near), "".join(each.far)) for each in planned]
    assert words == [("bc", "d"), ("c", "e"), ("", "f"), ("ef", "g"), ("fg", ""), ("g", ""), ("", "")]


def test_a_forward_without_grad_has_a_plan_of_its_own_and_the_micro_batch_around_it_goes_on():
    model, order = Model(), Order()
    for _ in range(2):
        model.micro_batch("abc")
    model.gathers.begin()
    assert model.use("a") == RAN_AHEAD[0]

    def forward(names):
        model.gathers.begin_forward(order)
        done = [model.use(name) for name in names]
        model.log.clear()
        model.gathers.end_forward()
        return [*done, " ".join(model.log)]

    assert forward("de") == ["gather d join d free d", "gather e join e free e", "join b free b join c free c"]
    assert forward("de") == ["gather d gather e join d free d", "join e free e", ""]
    assert forward("d") == ["gather d gather e join d free d", "join e free e"]
    assert model.states() == {}
    assert model.use("b") == "gather b gather c join b free b"
    assert model.use("c") == "join c free c"


def test_a_shorter_micro_batch_leaves_nothing_gathered_whose_weights_a_step_would_make_old():
    model = Model()
    for _ in range(2):
        model.micro_batch("abcd")
    assert model.micro_batch("a")[-1] == "join b free b join c free c"
    assert model.states() == {}
    assert model.micro_batch("abcd") == ["gather a join a free a", *ALONE[1:], ""]
    assert model.micro_batch("abcd") == RAN_AHEAD


def test_a_micro_batch_that_gathers_nothing_forgets_no_plan():
    """As the later ones of a step do, where units stay gathered to its end."""
    model = Model(every_step=True)
    assert model.micro_batch("abc") == ["gather a join a", "gather b join b", "gather c join c", ""]
    assert model.micro_batch("abc") == ["", "", "", ""]
    assert model.end(STEP) == "free a free b free c"
    assert model.micro_batch("abc") == ["gather a gather b gather c join a", "join b", "join c", ""]


def test_a_unit_in_use_is_not_gathered_ahead_nor_what_comes_behind_it():
    model = Model()
    for times in range(2):
        model.gathers.begin()
        model.log.clear()
        model.acquire("a")
        model.use("b")
        if times == 0:
            model.release("a")
            model.use("a")
            model.use("c")
            model.end()
    assert model.states() == {"a": State.FULL}  # not c, which comes after a is gathered again


def test_a_plan_of_a_whole_step_goes_on_from_micro_batch_to_micro_batch():
    model, steps = Model(plans_step=True), []
    for _ in range(2):
        steps.append([*model.micro_batch("a"), *model.micro_batch("b"), model.end(STEP)])
    assert steps[0] == [ALONE[0], "", ALONE[1], "", ""]
    assert steps[1] == ["gather a gather b join a free a", "", "join b free b", "", ""]


def test_the_unit_used_last_keeps_its_turn_until_another_is_used_or_a_forward_begins():
    model, seen = Model(), []
    model.gathers.begin()
    for name in "aab":
        model.log.clear()
        model.turn(name)
        model.acquire(name)
        model.release(name)
        seen.append(" ".join(model.log))
    assert seen == ["gather a join a", "", "free a gather b join b"]
    model.log.clear()
    model.gathers.begin()
    assert model.log == ["free b"]


@pytest.mark.parametrize("token", [TURN, ROOT_TURN, STEP])
def test_a_unit_that_is_only_kept_reads_as_nan_until_somebody_needs_it(token):
    model = Model()
    model.acquire("a", token)
    assert model.states() == {"a": State.FULL}
    for _ in range(2):
        model.acquire("a")
        assert model.states() == {"a": State.FULL}
        model.acquire("a", "another")
        model.release("a")
        assert model.states() == {"a": State.FULL}
        model.release("a", "another")
        assert model.states() == {"a": State.KEPT}
    model.release("a", token)
    assert model.states() == {}


def test_bytes_that_stand_for_a_released_weight_are_those_of_a_nan():
    packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    stands = placeholder(packed, torch.uint8, torch.device("cpu"))
    assert stands.contiguous().view(torch.bfloat16).isnan().all()
