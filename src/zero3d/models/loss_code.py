"""Reads in a model's code how its loss counts labels: whether they lose their first one, which of them are ignored.

Functions are read from a model's forward on, and each function and module that is handed labels. Code of transformers
and PEFT has been measured (`targets.py`): a shift anywhere in it is a shift. All other code may have more than one way
to its loss, and may call a criterion that ignores another label than -100, weighs labels or makes no mean:

    if shift: labels = labels[:, 1:]                nobody knows before the call: MAYBE
    if labels is not None: labels = labels[:, 1:]   YES: without labels there is no loss
    if self.shift: labels = labels[:, 1:]           as the attribute is
    nn.CrossEntropyLoss(ignore_index=0)             label 0 is no target
    F.cross_entropy(..., reduction="sum")           no mean: `unsure` says so
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from types import CodeType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.loss import _Loss

_ONE_TREE = Lock()  # at a time: threads that make some at once end in SystemError before Python 3.13 (gh-106905)
SHIFTED = "shift_labels"  # labels that have lost their first one already
IGNORE = "ignore_index"
OPTIONS = {SHIFTED, IGNORE}  # what a micro-batch may tell transformers' losses
LABELS = re.compile("label|target")
LOSSES = re.compile("loss|criterion|entropy", re.IGNORECASE)
ATTENDED = {"active_loss", "shift_attention_mask"}  # variables of forwards that leave out what nobody attends to
MEASURED = {"transformers", "peft"}  # packages whose losses targets.py was measured with
CHANGING = {"training"}  # attributes that say nothing of a later call
NO, MAYBE, YES = range(3)
UNKNOWN: Any = object()

Path = tuple[tuple[int, bool], ...]  # branches around a node: which if, and which of its two ways


class Found(NamedTuple):
    """Holds what was read in one function.

    shifts    whether labels lose their first one: NO, MAYBE or YES
    computes  whether there is a loss
    """

    shifts: int = NO
    computes: bool = False


class Loss(NamedTuple):
    """A call in which a loss is computed; `named` where it is handed something called labels or targets."""

    path: Path
    shifts: int
    named: bool


class Scope(NamedTuple):
    """A function whose names are resolved: the module that it is a method of, and local names that are bound once."""

    function: Any
    owner: nn.Module | None
    me: str
    bound: Mapping[str, ast.expr]


@dataclass
class LossCode:
    """Reads functions from a model's forward on, and each that is handed labels.

    attended  what nobody attends to is left out
    takes     which of OPTIONS are variables of what was read
    ignores   labels that criteria ignore, outside of measured code
    unsure    why a loss may be no mean over the labels that are not ignored
    """

    attended: bool = False
    takes: set[str] = field(default_factory=set)
    ignores: set[int] = field(default_factory=set)
    unsure: list[str] = field(default_factory=list)
    _read: dict[CodeType, Found] = field(default_factory=dict)

    def read(self, function: Any, owner: nn.Module | None) -> Found:
        """Read a function or method, with `owner` for its self."""
        code: CodeType | None = getattr(function, "__code__", None)
        if code is None or _package(function) == "torch":
            return Found()
        if code in self._read:
            return self._read[code]
        self._read[code] = Found()  # of what calls itself
        tree = _tree(function)
        if tree is None:
            return Found()
        self.attended |= not ATTENDED.isdisjoint(code.co_varnames)
        self.takes |= OPTIONS & set(code.co_varnames)
        found = self._measured(tree, function, owner) if _is_measured(function) else self._own(tree, function, owner)
        self._read[code] = found
        return found

    def _measured(self, tree: ast.AST, function: Any, owner: nn.Module | None) -> Found:
        scope = Scope(function, owner, _me(function, owner), {})
        shifts, computes = NO, False
        for node in ast.walk(tree):
            called = self._follow(node, scope) if isinstance(node, ast.Call) else Found()
            shifts = max(shifts, called.shifts, YES if _is_shift(node) else NO)
            computes |= called.computes
        return Found(shifts, computes)

    def _own(self, tree: ast.AST, function: Any, owner: nn.Module | None) -> Found:
        scope = Scope(function, owner, _me(function, owner), _bound(tree))
        shifts: list[tuple[Path, int]] = []
        losses: list[Loss] = []
        unread: list[str] = []
        makes = built = False
        for node, path in _walk(tree, (), scope):
            if _is_shift(node):
                shifts.append((path, YES))
            elif _takes_some(node):
                shifts.append((path, MAYBE))
            if not isinstance(node, ast.Call):
                continue
            called, callee = self._follow(node, scope), _callee(node, scope)
            makes |= called.computes
            if _is_criterion(callee):
                built = True
            elif called.computes:
                losses.append(Loss(path, called.shifts, _is_handed_labels(node)))
            elif called.shifts:
                shifts.append((path, called.shifts))
            self._note_criterion(node, callee, scope)
            if called.computes and callee is None and losses[-1].named:
                unread.append(f"{_name(node)}() cannot be read")
        self.unsure += unread if not built else []
        return Found(_ways(shifts, [loss for loss in losses if loss.named] or losses), makes)

    def _note_criterion(self, call: ast.Call, callee: Any, scope: Scope) -> None:
        """Note what a criterion of torch's says of its mean, where it is called or built."""
        if isinstance(callee, _Loss):
            if _package(type(callee).forward) != "torch":
                return  # its own forward is read
            ignores = hasattr(callee, IGNORE)
            told = {name: getattr(callee, name, None) for name in (IGNORE, "reduction", "weight")}
        else:
            parameters = _options_of(callee)
            if "reduction" not in parameters:
                return
            ignores = IGNORE in parameters
            told = {name: _option(name, call, parameters, scope) for name in (IGNORE, "reduction", "weight")}
        name = _name(call)
        if told["reduction"] is UNKNOWN or told["reduction"] != "mean":
            said = "that cannot be read" if told["reduction"] is UNKNOWN else repr(told["reduction"])
            self.unsure.append(f"{name} has a reduction {said}")
        if not ignores:
            return
        if told["weight"] is not None:
            self.unsure.append(f"{name} weighs labels, and its mean is over their weights")
        if isinstance(ignored := told[IGNORE], int):
            self.ignores.add(ignored)
        else:
            self.unsure.append(f"the ignore_index of {name} cannot be read")

    def _follow(self, call: ast.Call, scope: Scope) -> Found:
        """Read what a call calls, where it hands labels on."""
        callee = _callee(call, scope)
        computes = LOSSES.search(_name(call)) is not None or isinstance(callee, _Loss)
        named = _is_handed_labels(call)
        if not named and all(word.arg is not None for word in call.keywords):
            return Found(NO, computes)
        found = Found()
        with suppress(Exception):  # of a property that only a forward under way has, and the like
            owner = scope.owner
            if isinstance(callee, nn.Module):
                owner, callee = callee, forward_of(callee)
            callee = _plain(callee)
            if named or "labels" in inspect.signature(callee).parameters:
                found = self.read(callee, owner)
        return Found(found.shifts, found.computes or computes)


def forward_of(module: nn.Module) -> Any:
    """Return the function that a module's forward is, under what was put around it."""
    own = _plain(vars(module).get("forward"))
    return own if hasattr(own, "__code__") else _plain(type(module).forward)


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    function = function if function is None else inspect.unwrap(function)
    return getattr(function, "__func__", function)


# --- ways to a loss -----------------------------------------------------------------------------------


def _walk(node: ast.AST, path: Path, scope: Scope) -> Iterator[tuple[ast.AST, Path]]:
    """Yield all nodes with the branches around each; a branch that an attribute has ruled out is left out."""
    yield node, path
    if not isinstance(node, ast.If | ast.IfExp):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, path, scope)
        return
    yield from _walk(node.test, path, scope)
    known, asks = _truth(node.test, scope), _asks_for_labels(node.test)
    for way, branch in ((True, node.body), (False, node.orelse)):
        if known is None or known is way:
            inside = path if asks or known is way else (*path, (id(node), way))
            for child in branch if isinstance(branch, list) else [branch]:
                yield from _walk(child, inside, scope)


def _truth(test: ast.expr, scope: Scope) -> bool | None:
    """Return what a condition on the model's own attributes is; None where only the call says."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        known = _truth(test.operand, scope)
        return None if known is None else not known
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        parts = [_truth(part, scope) for part in test.values if not _asks_for_labels(part)]
        return False if False in parts else None if None in parts or not parts else True
    if isinstance(test, ast.Constant):
        return bool(test.value)
    value = _value(test, scope) if isinstance(test, ast.Attribute) and test.attr not in CHANGING else UNKNOWN
    return bool(value) if value is None or isinstance(value, bool | int | str) else None


def _asks_for_labels(test: ast.expr) -> bool:
    """Return whether a condition is that there are labels, or none."""
    return (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Is | ast.IsNot)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
        and _is_label(test.left)
    )


def _ways(shifts: list[tuple[Path, int]], losses: list[Loss]) -> int:
    """Return whether labels have lost their first one on all ways to a loss, on none, or on some."""
    if not losses:
        return max((how if not path else MAYBE for path, how in shifts), default=NO)
    ways = {max([loss.shifts, *(_before(path, how, loss.path) for path, how in shifts)]) for loss in losses}
    return ways.pop() if len(ways) == 1 else MAYBE


def _before(path: Path, shifts: int, of_loss: Path) -> int:
    """Return whether a shift in these branches is one of a loss in those: not on the other way of the same if."""
    if any((number, not way) in path for number, way in of_loss):
        return NO
    return shifts if of_loss[: len(path)] == path else MAYBE


def _is_shift(node: ast.AST) -> bool:
    """Return whether labels lose their first one here: labels[..., 1:], roll or narrow."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and _loses_first(node.slice) and _is_label(node.value)
    return isinstance(node, ast.Call) and _name(node) in ("roll", "narrow") and _is_label(node)


def _takes_some(node: ast.AST) -> bool:
    """Return whether some positions of labels are taken, such as labels[:, index], which may leave out the first."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple) or not _is_label(node.value):
        return False
    whole = (ast.unparse(part) in (":", "...", "None") for part in node.slice.elts[1:])
    return isinstance(node.ctx, ast.Load) and not all(whole)


def _is_handed_labels(call: ast.Call) -> bool:
    handed = [*call.args, *(word.value for word in call.keywords if word.arg is not None)]
    return any(map(_is_label, handed)) or any(LABELS.search(word.arg or "") for word in call.keywords)


def _is_label(node: ast.expr) -> bool:
    return LABELS.search(ast.unparse(node)) is not None


def _loses_first(index: ast.expr) -> bool:
    """Return whether an index such as [..., 1:] leaves the first of something out."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(
        isinstance(part, ast.Slice)
        and isinstance(part.lower, ast.Constant)
        and part.lower.value == 1
        and part.upper is None
        for part in parts
    )


# --- names and values ---------------------------------------------------------------------------------


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _callee(call: ast.Call, scope: Scope) -> Any:
    with suppress(Exception):  # of a property that only a forward under way has, and the like
        return _resolve(call.func, scope)
    return None


def _resolve(node: ast.expr, scope: Scope) -> Any:
    """Return what an expression such as self.decoder or super().forward names; None where that is not known."""
    if isinstance(node, ast.Name):
        if node.id == scope.me:
            return scope.owner
        if node.id in scope.bound:
            others = {name: value for name, value in scope.bound.items() if name != node.id}
            return _resolve(scope.bound[node.id], scope._replace(bound=others))
        return scope.function.__globals__.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
        kinds, function = type(scope.owner).__mro__, scope.function
        here = next(i for i, kind in enumerate(kinds) if _plain(vars(kind).get(function.__name__)) is function)
        return next(vars(kind)[node.attr] for kind in kinds[here + 1 :] if node.attr in vars(kind))
    return getattr(_resolve(node.value, scope), node.attr)


def _value(node: ast.expr, scope: Scope) -> Any:
    """Return the value of a constant, or of an attribute of the model; UNKNOWN where only the call says."""
    with suppress(ValueError):
        return ast.literal_eval(node)
    if isinstance(node, ast.Name) and node.id in _parameters(scope.function):
        default = _parameters(scope.function)[node.id].default
        return default if node.id == IGNORE and isinstance(default, int) else UNKNOWN  # `takes` hears another one
    with suppress(Exception):
        value = _resolve(node, scope)
        return UNKNOWN if value is None and not isinstance(node, ast.Attribute) else value
    return UNKNOWN


def _options_of(callee: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a criterion that is built, or of a function of torch's; none of all else."""
    function = callee.__init__ if _is_criterion(callee) else callee
    if _package(function) != "torch" or not inspect.isfunction(function):
        return {}
    parameters = dict(_parameters(function))
    parameters.pop("self", None)
    return parameters


def _option(name: str, call: ast.Call, parameters: Mapping[str, inspect.Parameter], scope: Scope) -> Any:
    """Return what a call says of an option; UNKNOWN where it may say something that is not read."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(word.arg is None for word in call.keywords):
        return UNKNOWN
    given = dict(zip(parameters, call.args, strict=False)) | {str(word.arg): word.value for word in call.keywords}
    if name in given:
        return _value(given[name], scope)
    return parameters[name].default if name in parameters else None


def _me(function: Any, owner: nn.Module | None) -> str:
    """Return the name that a method has for its module: that of its first argument."""
    for kind in type(owner).__mro__:
        own = vars(kind).get(getattr(function, "__name__", ""))
        if own is not None and not isinstance(own, staticmethod) and _plain(own) is function:
            return str(next(iter(_parameters(function)), "self"))
    return "self"


def _bound(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the values of local names that are bound once, by name = value."""
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    return {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        if stored.count(node.targets[0].id) == 1
    }


def _is_criterion(callee: Any) -> bool:
    """Return whether a class of torch's criteria is called, which builds one."""
    return inspect.isclass(callee) and issubclass(callee, _Loss)


def _is_measured(function: Any) -> bool:
    return _package(function) in MEASURED


def _package(function: Any) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _tree(function: Any) -> ast.AST | None:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        with _ONE_TREE:
            return ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return None
