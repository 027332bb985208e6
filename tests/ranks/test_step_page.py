"""The page of a training step (engine/step.py) says what a step does: its calls are those of a step that is traced."""

import ast
import inspect
import re
import sys
import textwrap
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from models import batch, loss_of, net
from torch.optim.lr_scheduler import LambdaLR

import zero3d
from zero3d.engine import step as page
from zero3d.engine.execution import Direct
from zero3d.engine.health import Health
from zero3d.engine.step import Stepper
from zero3d.zero.optimizer import APPLIED, NOT_DUE, OVERFLOW, ShardedOptimizer

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
OWNERS = {"self": Stepper, "execution": Direct, "optimizer": ShardedOptimizer}
CALLED = re.compile(r"\b[A-Z]\w+\.[a-z_]+\b")
OTHER = {
    "Stepper._around",
    "Stepper._result",
    "Stepper._is_due",
    "Stepper._forgotten_where_it_fails",
    "Stepper._nothing_due",
}  # nothing of a step
FAILING = {"Stepper.abandon", "Direct.apart"}


@contextmanager
def traced(calls):
    """Note the functions of zero3d that are entered and left inside, and whether the page calls them."""

    def note(frame, event, _):
        code = frame.f_code
        if event in ("call", "return") and "zero3d" in code.co_filename:
            calls.append((event, code.co_qualname, frame.f_back.f_code.co_filename == page.__file__))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def on_the_page(method):
    """The calls of a method of the page, in the order in which they are written."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    found = []
    for node in sorted(calls, key=lambda node: (node.end_lineno, node.end_col_offset)):  # what is inside comes first
        owner = OWNERS.get(ast.unparse(node.func.value).rpartition(".")[2])
        if owner is not None and hasattr(owner, node.func.attr):
            found.append(getattr(owner, node.func.attr).__qualname__)
    return [name for name in found if name not in OTHER | FAILING]


def a_step_s_calls():
    model = net()
    engine = zero3d.Engine(
        model, stage=3, precision="fp32", loss=lambda output, _: (output.float().logsumexp(-1).sum(), output.numel())
    )
    ids = [[batch(step, engine.dp.rank), batch(step + 1, engine.dp.rank)] for step in range(2)]
    engine.train_batch(ids[0])
    calls = []
    with traced(calls):
        engine.train_batch(ids[1])
    return calls


@pytest.fixture(scope="module")
def steps(ranks):
    """The calls of a step on each of two ranks."""
    return ranks(2, a_step_s_calls)


def first_calls(calls, names):
    """Names in the order in which the page first called them."""
    return list(dict.fromkeys(name for event, name, by_page in calls if event == "call" and by_page and name in names))


def inside(calls, name):
    """What was called inside of all calls of a function."""
    found, depth = set(), 0
    for event, called, _ in calls:
        if called == name:
            depth += 1 if event == "call" else -1
        elif depth and event == "call":
            found.add(called)
    return found


def test_the_page_calls_its_parts_in_the_order_of_a_step_that_is_traced(steps):
    for calls in steps:
        written = [*on_the_page(Stepper.train_batch), *on_the_page(Stepper.step)]
        written.remove("Stepper.step")  # it is below
        assert len(written) == len(set(written)) > 9
        assert first_calls(calls, set(written)) == written


def test_what_the_page_says_of_hooks_happens_inside_of_its_calls(steps):
    said = dict(re.findall(r"^    (forward|backward)  +(.*(?:\n {17}.*)*)$", page.__doc__, re.MULTILINE))
    assert set(said) == {"forward", "backward"}
    for calls in steps:
        for name, call in (("forward", "Direct.forward"), ("backward", "Direct.backward_sum")):
            named = set(CALLED.findall(said[name]))
            assert len(named) >= 2
            assert named <= inside(calls, call)


def test_what_is_behind_a_decision_comes_in_the_order_of_the_page():
    """The count of steps first, whatever fails behind it; features before the loss scale falls; then the schedule."""
    seen = []
    engine = zero3d.Engine(net(), stage=2, precision="fp16", scheduler=lambda torchs: LambdaLR(torchs, lambda _: 1.0))
    scales = [engine.loss_scale.value]

    def after_update(_, outcome):
        seen.append((outcome.reason, engine.steps, engine.loss_scale.value))

    engine._parts.hooks[0].without_weights.add("of an earlier step")
    with mock.patch.object(Health, "after_update", after_update):
        for factor in (1.0, 1e30, 1e30):  # the first overflow costs patience alone
            engine.backward(factor * loss_of(engine, batch(0)))
            engine.step()
            scales.append(engine.loss_scale.value)
    assert seen == [(APPLIED, 1, scales[0]), (OVERFLOW, 1, scales[1]), (OVERFLOW, 1, scales[2])]
    assert scales[3] < scales[2]
    assert not engine._parts.hooks[0].without_weights


def test_a_step_whose_update_fails_is_forgotten():
    engine = zero3d.Engine(net(), stage=2)
    with mock.patch.object(ShardedOptimizer, "update", side_effect=RuntimeError("an optimizer's own")):
        engine.backward(loss_of(engine, batch(0)))
        with pytest.raises(RuntimeError, match="own"):
            engine.step()
    assert not engine.accumulation.reached
    assert engine.step().reason == NOT_DUE  # nothing is left of it


def test_a_step_that_is_not_due_returns_with_the_weights_of_the_last_one_in_place():
    engine = zero3d.Engine(net(), stage=2)
    with mock.patch.object(ShardedOptimizer, "wait", autospec=True) as wait:
        engine.step()
    wait.assert_called_once()


def test_logits_are_gone_when_their_backward_begins():
    outputs, seen = [], []

    def loss(output, _):
        outputs.append(weakref.ref(output))
        total = output.float().sum()
        total.register_hook(lambda _: seen.append(outputs[-1]() is None))
        return total, output.numel()

    zero3d.Engine(net(), stage=2, loss=loss, accumulate=2).train_batch([batch(0), batch(1)])
    assert seen == [True, True]


def test_architecture_shows_the_page_as_it_is():
    shown = re.findall(r"```python\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    written = [textwrap.dedent(inspect.getsource(method)) for method in (Stepper.train_batch, Stepper.step)]
    assert len(shown) == 2
    for block, method in zip(shown, written, strict=True):
        assert textwrap.indent(block, "    ") in method
