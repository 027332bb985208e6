"""The position of a training step: its phase, micro-batch and module, without a mark on autograd's graph.

    forward     a module's call: global hooks keep a stack of names
    backward    the node that autograd runs has the number it got when the forward made it; between which calls
                of modules that was, the forward has noted
    recomputed  a module's call inside a backward
    step        the engine's

A gradient's accumulation has no such number: it belongs to the node before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zero3d.engine.engine import Engine
from zero3d.pipeline.actions import Action

FORWARD, BACKWARD, RECOMPUTED, STEP = "forward", "backward", "recomputed", "step"
PHASES = (FORWARD, BACKWARD, RECOMPUTED, STEP)
ACCUMULATES = 1 << 62  # autograd numbers these nodes 2^64 - 1, to run them first


class Position(NamedTuple):
    """An instant: the micro-batch is -1 in the step, the chunk 0 without a pipeline."""

    phase: str
    micro_batch: int
    chunk: int
    module: str


NOWHERE = Position("", -1, 0, "")


class PositionTracker:
    """Follows an engine's modules while `watching()`, and says where its step is."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._names: dict[nn.Module, str] = {}
        self._roots: set[nn.Module] = set()
        self._stack: list[str] = []
        self._numbers: list[int] = [0]  # of autograd's nodes: from each on they were made in
        self._makers: list[str] = [""]  # these modules
        self._micro_batch = 0
        self._begun = 0
        self._stepping = False
        self._last = ""

    def follow(self, engine: Engine) -> None:
        """Begin to follow an engine; before, every position is NOWHERE."""
        self._engine = engine
        self._names = {module: name for chunk in engine.chunks.values() for name, module in chunk.named_modules()}
        self._roots = set(engine.chunks.values())

    @property
    def action(self) -> Action | None:
        """Return what this rank does in a pipeline, None without one."""
        pipeline = None if self._engine is None else self._engine.pipeline
        return pipeline.recorded[-1] if pipeline is not None and pipeline.recorded else None

    def now(self) -> Position:
        """Return the position."""
        if self._engine is None:
            return NOWHERE
        if self._stepping:
            return Position(STEP, -1, 0, "")
        chunk, micro_batch = 0, self._micro_batch
        if (action := self.action) is not None:
            _, chunk, micro_batch = action
        if torch._C._current_graph_task_id() == -1:
            return Position(FORWARD, micro_batch, chunk, self._stack[-1] if self._stack else "")
        if self._stack:
            return Position(RECOMPUTED, micro_batch, chunk, self._stack[-1])
        return Position(BACKWARD, micro_batch, chunk, self._running())

    def _running(self) -> str:
        """Name the module whose forward made the node that autograd runs."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._last
        number = node._sequence_nr()
        if number < ACCUMULATES:
            self._last = self._makers[bisect_right(self._numbers, number) - 1]
        return self._last

    def restart(self) -> None:
        """Begin a new step: micro-batches are counted from 0."""
        self._begun = self._micro_batch = 0
        self._numbers, self._makers = [0], [""]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep `now()` true inside the block."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Say STEP inside the block, which is the engine's step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module not in self._names:
            return
        if module in self._roots and torch._C._current_graph_task_id() == -1:
            self._micro_batch, self._begun = self._begun, self._begun + 1
            self._stack.clear()  # of a call that ended early
        self._stack.append(self._names[module])
        self._note()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        name = self._names.get(module)
        if name is None or name not in self._stack:
            return
        while self._stack.pop() != name:  # a recomputation that stopped early left some
            pass
        self._note()

    def _note(self) -> None:
        """Remember that from here on autograd's nodes are made by the module on top."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._makers.append(self._stack[-1] if self._stack else "")
