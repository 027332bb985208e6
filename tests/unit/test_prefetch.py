"""What is gathered ahead and what is reduced when: orders, windows and what they forget, on units without tensors."""

import pytest
import torch

from zero3d.errors import ConfigError
from zero3d.zero.gathers import STEP, Gathers
from zero3d.zero.policy import State
from zero3d.zero.reductions import Reductions
from zero3d.zero.stages import WINDOW
from zero3d.zero.streams import Lane
from zero3d.zero.traffic import ROOT_TURN, TURN

CPU = torch.device("cpu")


class Weights:
    """A unit's parameters: their state, and a log of what was done to them."""

    sharded = True

    def __init__(self, name, log):
        self._name, self._log, self.state = name, log, State.SHARDED

    def gather(self):
        assert self.state is State.SHARDED
        self._log.append(f"gather {self._name}")
        self.state = State.GATHERING

    def ready(self):
        assert self.state is not State.SHARDED
        self.state = State.FULL

    def hold(self):
        self.state = State.HELD

    def release(self):
        assert self.state is not State.SHARDED
        self._log.append(f"free {self._name}")
        self.state = State.SHARDED


class Unit:
    def __init__(self, name, log):
        self.name, self.users, self.weights = name, set(), Weights(name, log)


class Model:
    """Units that are gathered, and what happens to them, joins of the lane among it."""

    def __init__(self, **options):
        self.log = []
        self.gathers = Gathers(Lane("lane", CPU), **options)
        self.gathers._lane.join = lambda unit: self.log.append(f"join {unit}")
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


ALONE = [f"gather {name} join {name} free {name}" for name in "abcd"]
AHEAD = [
    "gather a gather b gather c join a free a", "gather d join b free b", "join c free c", "join d free d", "",
]  # fmt: skip


def test_the_order_of_one_micro_batch_is_gathered_a_window_ahead_in_the_next():
    assert WINDOW == 2
    model = Model()
    assert model.micro_batch("abcd") == [*ALONE, ""]
    for _ in range(3):
        assert model.micro_batch("abcd") == AHEAD


def test_another_order_gives_back_what_was_gathered_for_the_old_one_and_is_the_next_plan():
    model = Model()
    for _ in range(2):
        model.micro_batch("abcd")
    assert model.micro_batch("acbd") == [
        "gather a gather b gather c join a free a",
        "join b free b join c free c",  # c came where b should: b is not wanted, c is there already
        "gather b join b free b",
        "gather d join d free d",  # and nothing is gathered ahead of what is unknown
        "",
    ]
    assert model.micro_batch("acbd")[:2] == ["gather a gather c gather b join a free a", "gather d join c free c"]


def test_a_shorter_micro_batch_leaves_nothing_gathered_whose_weights_a_step_would_make_old():
    model = Model()
    for _ in range(2):
        model.micro_batch("abcd")
    assert model.micro_batch("a")[-1] == "join b free b join c free c"
    assert model.states() == {}
    assert model.micro_batch("abcd") == ["gather a join a free a", *ALONE[1:], ""]
    assert model.micro_batch("abcd") == AHEAD


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
        assert model.states() == {"a": State.HELD}
    model.release("a", token)
    assert model.states() == {}


# --- reductions -------------------------------------------------------------------------------------


class Gradients:
    def __init__(self, name, log):
        self._name, self._log, self.state, self.taken = name, log, State.EMPTY, []

    def take(self, index, grad):
        self.taken.append(index)
        self.state = State.FILLING

    def reduce(self, single):
        self._log.append(f"reduce {self._name}{'' if single else ' wide'}")
        self.state = State.REDUCING

    def finish(self):
        assert self.state is State.REDUCING
        assert self._log.pop() == f"join {self._name}"
        self._log.append(f"finish {self._name}")
        self.state = State.REDUCED

    def complete(self):
        self._log.append(f"complete {self._name}")

    def close(self):
        self._log.append(f"close {self._name}")
        self.state = State.SUMMED

    def reset(self):
        self.state = State.EMPTY


class Trained:
    """A unit of some parameters. deferred: its gradients may come at several times."""

    def __init__(self, name, log, params=1, deferred=False):
        self.name, self.deferred = name, deferred
        self.grads = self.gradients = Gradients(name, log)
        self.weights = type("", (), {"params": [torch.zeros(1) for _ in range(params)]})()
        self.layout = type("", (), {"slots": [type("", (), {"name": f"{name}.{i}"}) for i in range(params)]})()


class Backwards:
    """Reductions of a, b (two parameters), root (deferred) and c, in layout order."""

    def __init__(self, closes=""):
        self.log = []
        self.units = {
            name: Trained(name, self.log, 1 + (name == "b"), name == "root") for name in ("a", "b", "root", "c")
        }
        lane = Lane("lane", CPU)
        lane.join = lambda unit: self.log.append(f"join {unit}")
        self.reductions = Reductions(list(self.units.values()), lane, closes)

    def take(self, names, due=True):
        """The log of gradients that arrive: `b0 b1` one parameter's each, other names a unit's."""
        self.log.clear()
        self.reductions.due = due
        for name in names.split():
            unit, index = (self.units[name[0]], int(name[1])) if name[1:] in ("0", "1") else (self.units[name], 0)
            self.reductions.take(unit, index, torch.zeros(1))
        return list(self.log)

    def flush(self):
        self.log.clear()
        self.reductions.flush()
        return list(self.log)

    def run(self, names, due=True):
        """The log of a whole backward."""
        self.reductions.begin()
        return [*self.take(names, due), "|", *self.flush()]


IN_ORDER = ["reduce c", "reduce b", "finish c", "reduce a", "|", "finish b", "reduce root", "finish a", "finish root"]


def test_units_are_reduced_in_reverse_layout_order_as_they_complete_with_a_window_of_two():
    backwards = Backwards()
    for _ in range(2):
        assert backwards.run("root c b0 b1 a") == IN_ORDER
        backwards.reductions.reset()


def test_a_unit_waits_for_those_before_it_and_for_all_its_gradients_of_this_backward():
    backwards = Backwards()
    assert backwards.run("c b0 b1 a root", due=False) == ["|"]
    backwards.reductions.begin()
    assert backwards.take("a b0") == []
    assert backwards.take("c") == ["reduce c wide"]
    assert backwards.take("root") == []
    assert backwards.take("b1") == ["reduce b wide", "finish c", "reduce a wide"]


def test_only_gradients_of_one_backward_travel_narrow():
    backwards = Backwards()
    backwards.run("c", due=False)
    assert backwards.run("c b0 b1 a root")[0] == "reduce c wide"
    backwards.reductions.reset()
    assert backwards.run("c b0 b1 a root")[0] == "reduce c"
    assert backwards.run("c b0 b1 a root")[0] == "reduce c"  # each micro-batch for itself
    backwards.run("c", due=False)
    backwards.reductions.reset()  # a step that failed
    assert backwards.run("c b0 b1 a root")[0] == "reduce c"


def test_what_did_not_come_is_reduced_at_the_end_and_what_comes_late_once_more():
    backwards = Backwards()
    assert backwards.run("c a") == [
        "reduce c", "|", "reduce b", "finish c", "reduce a", "finish b", "reduce root", "finish a", "finish root",
    ]  # fmt: skip
    backwards.reductions.begin()
    backwards.take("c b0 b1 a")
    assert backwards.take("c") == []
    late = backwards.flush()
    assert late.count("reduce c") == late.count("reduce root") == 1
    assert late[-1] == "finish c"
    assert not backwards.reductions.pending


def test_the_recorded_order_has_deferred_and_absent_units_behind_the_others():
    backwards = Backwards()
    backwards.run("root a c")
    assert backwards.reductions.observed() == [2, 0, 1, 3]  # of c, b, a, root
    assert not backwards.reductions.adopted
    backwards.reductions.adopt(backwards.reductions.observed())
    assert backwards.reductions.adopted
    backwards.reductions.reset()
    assert backwards.run("root a c b0 b1")[:4] == ["reduce a", "reduce c", "finish a", "reduce b"]


def test_what_no_root_forward_announced_is_reduced_when_the_step_is_due():
    backwards = Backwards()
    backwards.run("c", due=False)
    assert backwards.reductions.pending
    backwards.log.clear()
    backwards.reductions.catch_up()
    completed = [f"complete {name}" for name in ("c", "b", "a", "root")]
    assert backwards.log[-4:] == completed
    assert backwards.log[0] == "reduce c"
    assert len(backwards.log) == 4 + 2 * 4
    backwards.log.clear()
    backwards.reductions.catch_up()
    assert backwards.log == completed


def test_a_failed_step_s_reductions_are_forgotten():
    backwards = Backwards()
    backwards.reductions.begin()
    assert backwards.take("c") == ["reduce c"]
    backwards.reductions.reset()
    assert backwards.run("c b0 b1 a root") == IN_ORDER


def test_gradients_without_a_hook_are_taken_once():
    backwards = Backwards()
    weight = backwards.units["b"].weights.params[1]
    weight.grad = torch.ones(1)
    for _ in range(2):
        backwards.reductions.sweep()
    assert backwards.units["b"].gradients.taken == [1]
    assert weight.grad is None


def test_an_exact_backward_closes_every_unit_once_and_refuses_a_second_gradient():
    backwards = Backwards("backward")
    for _ in range(2):
        assert backwards.run("root c b0 b1", due=False) == ["close c", "close b", "|", "close a", "close root"]
    backwards.reductions.begin()
    backwards.take("c", due=False)
    with pytest.raises(ConfigError, match=r"c\.0 got a second gradient in one backward"):
        backwards.take("c", due=False)


def test_exact_chunks_of_a_pipeline_are_closed_for_themselves():
    backwards = Backwards("part")
    backwards.reductions.begin()
    assert backwards.take("c b0", due=False) == ["close c"]
    for expected in (["close b"], ["close c", "close b"]):
        backwards.log.clear()
        backwards.reductions.close([backwards.units["c"], backwards.units["b"]])
        assert backwards.log == expected
    assert backwards.take("b1 c b0 a", due=False) == ["close c", "close b", "close a"]  # of the next micro-batch
