"""What is reduced when: orders, the window and what is forgotten, on units without tensors."""

import pytest
import torch

from zero3d.distributed.axis import Pending
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.zero.arrivals import Arrivals
from zero3d.zero.reductions import Closes, Reductions
from zero3d.zero.streams import SideStream
from zero3d.zero.unit_parts import State

CPU = Arena(torch.device("cpu"))


class Gradients:
    has_copies = False

    def __init__(self, name, log):
        self._name, self._log, self.state, self.taken = name, log, State.EMPTY, []
        self.differs_on_copies = False

    def hold(self, index, grad):
        self.taken.append(index)
        self.differs_on_copies = self.has_copies
        self.state = State.FILLING

    def land(self):
        pass

    def fill_up(self):
        self._filled_up = True

    def reduce(self, single):
        assert self._filled_up
        self._log.append(f"reduce {self._name}{'' if single else ' wide'}")
        self.state = State.REDUCING

    def finish(self):
        if self.state is not State.REDUCING:
            return
        assert self._log.pop() == f"join {self._name}"
        self._log.append(f"finish {self._name}")
        self._filled_up = False
        self.state = State.REDUCED

    def gather(self):
        self._log.append(f"gather {self._name}")

    def wait(self):
        assert self._log.pop() == f"join {self._name}"
        self._log.append(f"wait {self._name}")

    def complete(self):
        self._log.append(f"complete {self._name}")

    def sum_copies(self, step):
        self._log.append(f"sum {self._name}")
        self.differs_on_copies = False
        return Pending(lambda: self._log.append(f"summed {self._name}"))

    def close(self):
        self._log.append(f"close {self._name}")
        self.state = State.SUMMED

    def lend(self):
        self._log.append(f"lend {self._name}")

    def take_back(self):
        self._log.append(f"take {self._name} back")

    def reset(self):
        self.state = State.EMPTY
        self.differs_on_copies = self.has_copies


class Trained:
    """A unit of some parameters, `trained` of which are not frozen. deferred: its gradients may come at several times."""

    def __init__(self, name, log, params=1, deferred=False):
        self.name, self.deferred, self.trained = name, deferred, params
        self.grads = self.gradients = Gradients(name, log)
        self.sources = 1
        self.weights = type("", (), {"params": [torch.zeros(1) for _ in range(params)]})()
        self.layout = type("", (), {"slots": [type("", (), {"name": f"{name}.{i}"}) for i in range(params)]})()

    def slot_of(self, index):
        return self.layout.slots[index]


class Backwards:
    """Reductions of a, b (two parameters), root (deferred) and c, in layout order."""

    def __init__(self, closes=Closes.NOTHING, gathered="", copies=False, shared=False):
        self.log = []
        self.units = {
            name: Trained(name, self.log, 1 + (name == "b"), name == "root") for name in ("a", "b", "root", "c")
        }
        side = SideStream("side", CPU)
        side.join = lambda unit: self.log.append(f"join {unit}")
        across = SideStream("copies", CPU)
        units = list(self.units.values())
        self.reductions = Reductions(units, side, across, closes, [self.units[name] for name in gathered], shared)
        for unit in units:
            unit.gradients.has_copies = unit.gradients.differs_on_copies = copies
        self.reductions.arrivals.to_come = lambda unit, indices: True

    def take(self, names, due=True, final=False):
        """The log of gradients that arrive: `b0 b1` one parameter's each, other names a unit's."""
        self.log.clear()
        self.reductions.due, self.reductions.final = due, final
        for name in names.split():
            unit, index = (self.units[name[0]], int(name[1])) if name[1:] in ("0", "1") else (self.units[name], 0)
            self.reductions.receive(unit, index, torch.zeros(1))
        return list(self.log)

    def flush(self):
        self.log.clear()
        self.reductions.end_backward()
        return list(self.log)

    def run(self, names, due=True, final=False):
        """The log of a whole backward."""
        self.reductions.begin()
        return [*self.take(names, due, final), "|", *self.flush()]


def test_frozen_parameters_and_units_are_not_waited_for():
    backwards = Backwards()
    backwards.units["b"].trained, backwards.units["c"].trained = 1, 0
    assert backwards.run("root b1 a") == IN_ORDER
    backwards.units["b"].trained, backwards.units["c"].trained = 2, 1
    backwards.reductions.reset()
    assert backwards.run("root c b0 b1 a") == IN_ORDER


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


def to_come(backwards, *names):
    """Let autograd say that these gradients are still to come: `b1` one parameter's, other names a unit's."""

    def asked(unit, indices):
        return any(unit.name in names or f"{unit.name}{index}" in names for index in indices)

    backwards.reductions.arrivals.to_come = asked


def leave(backwards, name):
    """The log of the end of a unit's module."""
    backwards.log.clear()
    backwards.reductions.leave(backwards.units[name], 0)
    return list(backwards.log)


def test_a_unit_with_a_hole_is_complete_when_backward_leaves_its_module():
    backwards = Backwards()
    backwards.units["b"].trained, backwards.units["b"].weights.params = 3, [torch.zeros(1) for _ in range(3)]
    to_come(backwards, "b1", "a", "root")
    backwards.reductions.begin()
    assert backwards.take("c b0 b1") == ["reduce c"]
    assert leave(backwards, "b") == ["reduce b"]
    assert backwards.take("a root") == ["finish c", "reduce a"]
    assert leave(backwards, "a") == []
    assert backwards.flush() == ["finish b", "reduce root", "finish a", "finish root"]


def test_a_module_s_end_reduces_nothing_of_which_more_is_to_come():
    """Its first call's is still to come, or that of a weight which others read."""
    backwards = Backwards()
    to_come(backwards, "b1", "a", "root")
    backwards.reductions.begin()
    backwards.take("c b0")
    assert leave(backwards, "b") == []
    assert backwards.take("a") == []
    assert backwards.take("b1") == ["reduce b", "finish c", "reduce a"]


def test_what_was_still_to_come_when_backward_left_completes_a_unit_beside_a_hole():
    backwards = Backwards()
    backwards.units["b"].trained, backwards.units["b"].weights.params = 3, [torch.zeros(1) for _ in range(3)]
    to_come(backwards, "b1")
    backwards.reductions.begin()
    backwards.take("c b0")
    assert leave(backwards, "b") == []
    to_come(backwards)
    assert backwards.take("b1") == ["reduce b"]


def test_a_hole_ends_when_another_unit_s_gradients_begin():
    backwards = Backwards()
    to_come(backwards, "a", "root")
    backwards.reductions.begin()
    assert backwards.take("c b0 a") == ["reduce c", "reduce b", "finish c", "reduce a"]


def test_a_unit_of_which_nothing_came_waits_for_the_end_unless_no_module_s_end_tells_of_it():
    """Its gradients may come in a checkpoint's backward of its own, which autograd does not know of yet."""
    for unheard in (False, True):
        backwards = Backwards()
        to_come(backwards, "a", "root")
        backwards.reductions.arrivals.unheard.update([backwards.units["b"]] if unheard else [])
        backwards.reductions.begin()
        assert backwards.take("c a") == ["reduce c", *["reduce b", "finish c", "reduce a"][: 3 * unheard]]


def test_nothing_is_judged_inside_a_backward_of_which_autograd_does_not_know_what_follows():
    backwards = Backwards()
    to_come(backwards, "a", "root")
    backwards.reductions.begin(task=5)  # another than the one under way
    assert backwards.take("c b0 a") == ["reduce c"]
    assert leave(backwards, "b") == ["reduce b", "finish c", "reduce a"], "but the one whose module it has left"


def test_a_gradient_that_a_function_does_not_give_counts_as_one_that_came():
    backwards = Backwards()
    backwards.reductions.begin()
    backwards.take("c b0")
    backwards.reductions.receive(backwards.units["b"], 1, None)
    assert backwards.log == ["reduce c", "reduce b"]
    backwards.reductions.receive(backwards.units["c"], 0, None)
    assert backwards.log == ["reduce c", "reduce b"], "nothing is waited for"


def arrivals_of_calls():
    """A unit that is complete where backward leaves its modules, of which there are calls."""
    arrivals = Arrivals()
    arrivals.at_module_ends = True
    return arrivals, Trained("a", [])


def call(arrivals, unit, *calls):
    for number in calls:
        arrivals.call(unit, number)


def leave_all(arrivals, unit, *calls):
    """Whether the unit is complete after each of these calls was left, in a backward of its own."""
    arrivals.begin(0)
    found = []
    for number in calls:
        arrivals.leave(unit, number)
        found.append(arrivals.has_all(unit))
    return found


def test_each_micro_batch_s_backward_ends_a_unit_with_the_last_of_its_own_calls():
    arrivals, unit = arrivals_of_calls()
    call(arrivals, unit, 1, 2)
    assert leave_all(arrivals, unit, 1, 2) == [False, True]
    assert leave_all(arrivals, unit, 1, 2) == [False, True], "a second backward of one forward"
    for calls in ((3, 4), (5, 6)):
        call(arrivals, unit, *calls)
        assert leave_all(arrivals, unit, *calls) == [False, True]


def test_a_unit_that_was_closed_ends_with_its_next_call():
    arrivals, unit = arrivals_of_calls()
    call(arrivals, unit, 1)
    assert leave_all(arrivals, unit, 1) == [True]
    arrivals.forget(unit)
    call(arrivals, unit, 2)
    assert not arrivals.has_all(unit)
    arrivals.leave(unit, 2)
    assert arrivals.has_all(unit)


def test_calls_of_a_step_that_had_no_backward_are_not_waited_for():
    arrivals, unit = arrivals_of_calls()
    call(arrivals, unit, 1)
    arrivals.reset()
    call(arrivals, unit, 2)
    assert leave_all(arrivals, unit, 2) == [True]


def test_what_ends_a_unit_only_with_its_module_makes_room_when_its_gradients_have_come():
    """Before the next unit is gathered, so that no more buckets live at once than where it is reduced then."""
    backwards = Backwards()
    backwards.reductions.arrivals.at_module_ends = True
    for unit in backwards.units.values():
        backwards.reductions.arrivals.call(unit, 0)
    backwards.reductions.begin()
    for names, taken, left in (
        ("c", [], ["reduce c"]), ("b0 b1", [], ["reduce b"]), ("a", ["finish c"], ["reduce a"]),
    ):  # fmt: skip
        assert backwards.take(names) == taken
        assert leave(backwards, names[0]) == left


def test_an_exact_unit_with_a_hole_is_closed_at_its_module_s_end_once():
    backwards = Backwards(Closes.CHUNK)
    to_come(backwards)
    backwards.reductions.begin()
    backwards.take("c b0", due=False)
    assert leave(backwards, "b") == ["close b"]
    backwards.reductions.receive(backwards.units["b"], 1, None)
    assert backwards.log == ["close b"]


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


def test_sums_are_gathered_as_soon_as_they_are_there_and_awaited_when_the_backward_ends():
    backwards = Backwards(gathered="cb")
    assert backwards.run("root c b0 b1 a") == [
        "reduce c", "reduce b", "finish c", "gather c", "reduce a", "|",
        "finish b", "gather b", "reduce root", "finish a", "finish root", "wait c", "wait b",
    ]  # fmt: skip


@pytest.mark.parametrize("late", ["b0", "c"])
def test_sums_end_and_are_gathered_in_one_order_wherever_more_gradients_come(late):
    """Ranks on which they come before the first sums are over, after them, or when nothing is left to be reduced."""
    orders = []
    for arriving in ((f"c b0 b1 {late} a root",), (f"c b0 b1 a {late} root",), ("c b0 b1 a root", late)):
        backwards = Backwards(gathered="cba")
        backwards.reductions.begin()
        log = [what for names in arriving for what in backwards.take(names)] + backwards.flush()
        orders.append([[what for what in log if what.startswith(kind)] for kind in ("reduce", "gather")])
    assert orders[0] == orders[1] == orders[2]
    reduced, gathered = orders[0]
    assert reduced == [*(f"reduce {name}" for name in ("c", "b", "a", "root")), f"reduce {late[0]}"]
    assert gathered == [*(f"gather {name}" for name in "cba"), f"gather {late[0]}"]


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
    assert len(backwards.log) == 4 + 4 + 4
    backwards.log.clear()
    backwards.reductions.catch_up()
    assert backwards.log == completed


COPIES = ["sum c", "sum b", "summed c", "sum a", "summed b", "sum root", "summed a", "summed root"]


def of_copies(log):
    return [what for what in log if what.startswith("sum")]


def test_sums_over_copies_begin_behind_reductions_of_the_last_backward_two_at_a_time():
    backwards = Backwards(copies=True)
    assert of_copies(backwards.run("root c b0 b1 a")) == [], "another micro-batch comes"
    assert backwards.run("root c b0 b1 a", final=True) == [
        "reduce c", "reduce b", "finish c", "sum c", "reduce a", "|", "finish b", "sum b", "reduce root",
        "finish a", "summed c", "sum a", "finish root", "summed b", "sum root", "summed a", "summed root",
    ]  # fmt: skip
    backwards.log.clear()
    for _ in range(2):
        backwards.reductions.catch_up()
    assert of_copies(backwards.log) == [], "once a step"
    backwards.reductions.reset()
    assert of_copies(backwards.run("root c b0 b1 a", final=True)) == COPIES


def test_sums_over_copies_that_no_backward_began_are_made_at_the_boundary():
    for announced in (False, True):
        backwards = Backwards(copies=True)
        if announced:
            backwards.run("c b0 b1 a root")
        else:
            backwards.run("c", due=False)
        backwards.log.clear()
        backwards.reductions.catch_up()
        assert of_copies(backwards.log) == COPIES


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("late", ["b0", "c"])
def test_sums_over_copies_have_one_order_wherever_more_gradients_come(late, shared):
    """Also what is waited for before another one begins: its second half is an operation of the same ranks."""
    orders = []
    for arriving in ((f"c b0 b1 {late} a root",), (f"c b0 b1 a {late} root",), ("c b0 b1 a root", late)):
        backwards = Backwards(copies=True, shared=shared)
        backwards.reductions.begin()
        log = [what for names in arriving for what in backwards.take(names, final=True)] + backwards.flush()
        orders.append(of_copies(log))
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] == [*COPIES[:-1], f"sum {late[0]}", "summed root", f"summed {late[0]}"]


def test_what_comes_in_another_backward_after_the_last_one_is_summed_over_copies_once_more():
    backwards = Backwards(copies=True)
    backwards.run("c b0 b1 a root", final=True)
    again = backwards.run("c b0", final=True)
    assert of_copies(again) == ["sum c", "sum b", "summed c", "summed b"]


def test_a_step_that_died_waits_for_no_sum_over_copies_before_the_next_backward():
    backwards = Backwards(copies=True)
    backwards.reductions.begin()
    assert backwards.take("c b0 b1 a", final=True)[-2:] == ["sum c", "reduce a"]
    backwards.log.clear()
    backwards.reductions.reset()
    assert backwards.log == ["join c", "join b", "join a", "join root", "lend c"]
    backwards.log.clear()
    backwards.reductions.begin()
    assert backwards.log == ["summed c", "take c back"]


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
    backwards = Backwards(Closes.BACKWARD)
    for _ in range(2):
        assert backwards.run("root c b0 b1", due=False) == ["close c", "close b", "|", "close a", "close root"]
    backwards.reductions.begin()
    backwards.take("c", due=False)
    with pytest.raises(ConfigError, match=r"c\.0 got a second gradient in one backward"):
        backwards.take("c", due=False)


def test_exact_chunks_of_a_pipeline_are_closed_for_themselves():
    backwards = Backwards(Closes.CHUNK)
    backwards.reductions.begin()
    assert backwards.take("c b0", due=False) == ["close c"]
    for expected in (["close b"], ["close c", "close b"]):
        backwards.log.clear()
        backwards.reductions.close([backwards.units["c"], backwards.units["b"]])
        assert backwards.log == expected
    assert backwards.take("b1 c b0 a", due=False) == ["close c", "close b", "close a"]  # of the next micro-batch
