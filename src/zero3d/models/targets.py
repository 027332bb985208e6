"""What a model's own loss is the mean of: how many targets a micro-batch has.

    labels                           a target is                                   of
    [batch, length] of next tokens   one of labels[..., 1:] that is not ignored    causal language models
    [batch, length] of tokens        a label that is not ignored                   masked language models, token
                                                                                   classification, encoder-decoders
    [batch], or numbers              an example                                    classification, rewards, regression
    of several kinds together        an example                                    heads that add losses up
    none, but start_positions        an example whose answer is in the sequence    question answering

Nothing declares which of the first two it is. Of transformers' classes some call their `loss_function`, whose kind
follows from the class's name or from what its constructor says; the others compute a loss themselves, whatever that
function would be (T5's is ForCausalLMLoss); and a module of one's own may do either. So the code is read, from
`forward` on to each function and module that it hands labels to: targets are next tokens where labels lose their first
one (`labels[..., 1:]`), and tokens where a loss is computed without that. Measured with transformers 5.23: 449 of its
classes with a head that could be made tiny, and of each the loss of three rows was theirs apart, weighed so.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor, nn

from zero3d.models.packing import inner_model

IGNORED = -100  # transformers' label of a position that is no target
SHIFTED = "shift_labels"  # labels that have lost their first one already
OPTIONS = {SHIFTED, "ignore_index"}  # what a micro-batch may tell transformers' losses
LABELS = re.compile("label|target")
LOSSES = re.compile("loss|criterion|entropy", re.IGNORECASE)
ATTENDED = {"active_loss", "shift_attention_mask"}  # variables of forwards that leave out what nobody attends to
AFTER_PROMPTS = ("PREFIX_TUNING", "CARTRIDGE")  # of PEFT's prompts those that are keys and values, not tokens


@dataclass(frozen=True)
class Targets:
    """How a model's loss counts its targets.

    kind      the model's class
    shifts    of labels [batch, length] the first is none; None where the code does not say
    attended  only what `attention_mask` has counts
    takes     which of OPTIONS the functions of its loss take
    labels    entries of a micro-batch with labels of other kinds
    pixels    the label [batch, height, width] of a pixel that is no target
    numbers   labels [batch] are numbers, not classes
    """

    kind: str
    shifts: bool | None
    attended: bool = False
    takes: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()
    pixels: int = IGNORED
    numbers: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Targets:
        """Read a model's code, before its loss is replaced by that of several ranks or of tiles."""
        inner = inner_model(model)
        reader = _Reader()
        reader.read(_forward_of(inner), inner)
        config = getattr(inner, "config", None)
        pixels = getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", IGNORED))
        return cls(
            kind=type(inner).__name__,
            shifts=(reader.shifts and not _is_prompted(model)) if reader.shifts or reader.computes else None,
            attended=reader.attended,
            takes=frozenset(reader.takes),
            labels=frozenset(name for name in _parameters(inner) if "label" in name) - {"labels", SHIFTED},
            pixels=pixels if isinstance(pixels, int) else IGNORED,
            numbers=getattr(config, "num_labels", None) == 1 or getattr(config, "problem_type", None) == "regression",
        )

    @classmethod
    def next_tokens(cls, model: nn.Module) -> Targets:
        """Count next tokens, whatever the model's code does."""
        return cls(type(inner_model(model)).__name__, shifts=True)

    def count(self, batch: Mapping[str, Any], output: Any = None) -> float | Tensor | None:
        """Return the targets of a micro-batch, of which the device is not read; None where nothing says how many."""
        labels = batch.get("labels")
        if labels is None:
            return _answers(batch, output)
        if not isinstance(labels, Tensor):
            return float(len(labels))
        examples = float(len(labels)) if labels.dim() else 1.0
        if any(batch.get(name) is not None for name in self.labels):
            return examples
        if labels.is_floating_point():
            return (labels != IGNORED).sum() if labels.dim() > 2 else examples
        ignored = batch["ignore_index"] if "ignore_index" in batch and "ignore_index" in self.takes else IGNORED
        if labels.dim() < 2 and not self.shifts:
            return examples if self.numbers else (labels != ignored).sum()
        return self._tokens(labels, batch, self.pixels if labels.dim() == 3 else ignored)

    def _tokens(self, labels: Tensor, batch: Mapping[str, Any], ignored: int) -> Tensor:
        shifts = self.shifts
        if shifts is None:
            warnings.warn(
                f"{self.kind} computes its loss where zero3d cannot read how: labels are counted as those of next "
                "tokens, labels[..., 1:]. If its mean is over other targets, pass Engine(loss=lambda output, batch: "
                "(output.loss * n, n)) with their number n.",
                stacklevel=2,
            )
            shifts = True
        mask = batch.get("attention_mask") if self.attended else None
        if shifts:
            given = batch.get(SHIFTED) if SHIFTED in self.takes else None
            labels, mask = labels[..., 1:] if given is None else given, None if mask is None else mask[..., 1:]
        counted = labels != ignored
        return (counted if mask is None else counted & (mask != 0)).sum()


def _answers(batch: Mapping[str, Any], output: Any) -> Tensor | None:
    """Return how many examples have their answer in the sequence, whose positions beyond it transformers ignores."""
    starts, scores = batch.get("start_positions"), getattr(output, "start_logits", None)
    if not isinstance(starts, Tensor) or not isinstance(scores, Tensor):
        return None
    return (starts < scores.shape[1]).sum()


def _is_prompted(model: Any) -> bool:
    """Return whether PEFT puts tokens before a sequence, after which its first one is a target, too."""
    config = getattr(model, "active_peft_config", None)
    kind = getattr(getattr(config, "peft_type", None), "value", "")
    return bool(getattr(config, "is_prompt_learning", False)) and kind not in AFTER_PROMPTS


class _Reader:
    """Reads functions from a model's forward on, and each that is handed labels.

    shifts    labels lose their first one somewhere
    computes  something that is called a loss is called
    attended  what nobody attends to is left out
    takes     which of OPTIONS are variables of what was read
    """

    def __init__(self) -> None:
        self.shifts = self.computes = self.attended = False
        self.takes: set[str] = set()
        self._read: set[CodeType] = set()

    def read(self, function: Any, owner: nn.Module | None) -> None:
        """Read a function or method, with `owner` for its self."""
        code: CodeType | None = getattr(function, "__code__", None)
        tree = None if code in self._read or code is None or _of_torch(function) else _tree(function)
        if tree is None:
            return
        assert code is not None
        self._read.add(code)
        self.attended |= not ATTENDED.isdisjoint(code.co_varnames)
        self.takes |= OPTIONS & set(code.co_varnames)
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript):
                self.shifts |= isinstance(node.ctx, ast.Load) and _loses_first(node.slice) and _is_label(node.value)
            elif isinstance(node, ast.Call):
                self._follow(node, function, owner)

    def _follow(self, call: ast.Call, function: Any, owner: nn.Module | None) -> None:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        self.computes |= LOSSES.search(name) is not None
        handed = [*call.args, *(word.value for word in call.keywords if word.arg is not None)]
        named = any(map(_is_label, handed)) or any(LABELS.search(word.arg or "") for word in call.keywords)
        self.shifts |= name in ("roll", "narrow") and _is_label(call)
        if not named and all(word.arg is not None for word in call.keywords):
            return
        with suppress(Exception):  # of a property that only a forward under way has, and the like
            callee = _resolve(call.func, function, owner)
            if isinstance(callee, nn.Module):
                owner, callee = callee, _forward_of(callee)
            callee = _plain(callee)
            if named or "labels" in inspect.signature(callee).parameters:
                self.read(callee, owner)


def _forward_of(module: nn.Module) -> Any:
    """Return the function that a module's forward is, under what was put around it."""
    own = _plain(vars(module).get("forward"))
    return own if hasattr(own, "__code__") else _plain(type(module).forward)


def _plain(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    function = function if function is None else inspect.unwrap(function)
    return getattr(function, "__func__", function)


def _resolve(node: ast.expr, function: Any, owner: nn.Module | None) -> Any:
    """Return what an expression such as self.decoder or super().forward names; None where that is not known."""
    if isinstance(node, ast.Name):
        return owner if node.id == "self" else function.__globals__.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
        kinds = type(owner).__mro__
        here = next(i for i, kind in enumerate(kinds) if _plain(vars(kind).get(function.__name__)) is function)
        return next(vars(kind)[node.attr] for kind in kinds[here + 1 :] if node.attr in vars(kind))
    return getattr(_resolve(node.value, function, owner), node.attr)


def _tree(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


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


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
