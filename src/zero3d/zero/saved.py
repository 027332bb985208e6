"""Weights that autograd saves at stage 3: their unit is gathered when the node that saved them runs.

The hooks on a module's outputs gather its unit before a gradient enters (hooks.py). They do not see every gradient: it
may come from a tensor inside a closure or an object of the caller's own class, from an inner activation that the loss
uses, or through a gradient of a gradient. Then the unit is gathered here.

    pack      a saved tensor -> (the tensor, its version, its unit; None for what is no weight)
    unpack    gather the unit if it is released; return the tensor

Note 1, versions. torch does not look at versions of tensors that hooks pack: a write in place between forward and
backward would go unnoticed, so `unpack` looks.
Note 2, gradients of gradients (create_graph=True). Nodes made by a backward save weights, too. `unpack` pushes the
hooks: they are in force until its node has run, since autograd restores the state of its thread after every node.
Note 3, hooks around ours, such as those of torch's checkpoint, pack what they would have packed without ours.
Note 4, cycles. A node that keeps its own output would keep itself alive, so a detached tensor is kept, which shares
memory and version.
Note 5, Functions of the caller's own that keep a weight as an attribute of ctx. Nothing is unpacked when their nodes
run, so Note 2 does not reach what these save for gradients of gradients. A backward with create_graph looks for such
nodes ahead of it, once, and pushes the hooks as they begin. Where such a node has made others of the kind, the units
in use stay gathered until the step.
Note 6, hooks that a module's own forward puts in force (torch's save_on_cpu, offload_wrapper) are inside of ours and
may pack the parameter itself. Modules called under them put ours in force once more, inside of theirs. What such a
forward reads by itself is not seen as it is saved: its unit stays gathered until the step (hooks.py, `_read`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero3d.zero.gathers import OPENED
from zero3d.zero.unit import Unit
from zero3d.zero.unit_parts import State

RELEASED = (State.SHARDED, State.GATHERING)


class SavedWeights:
    """Hooks on the tensors saved by autograd in forwards of modules that have weights of their own.

    units    sharded ones (stage 3)
    gather   brings back a unit's weights
    hold     keeps them until the step, for nodes that a backward makes from other nodes' saved tensors
    """

    def __init__(self, units: Iterable[Unit], gather: Callable[[Unit], None], hold: Callable[[Unit], None]) -> None:
        self._gather, self._hold = gather, hold
        self._units = {unit.weights.full.untyped_storage()._cdata: unit for unit in units}
        self._calls: list[tuple[nn.Module, bool]] = []  # under way, and which of them have pushed the hooks
        self._followed: set[nn.Module] = set()
        self._task = -1  # the backward with create_graph under way, and what of its graph is known (Note 5)
        self._seen: set[Any] = set()
        self._begun: list[RemovableHandle] = []

    def follow(self, module: nn.Module) -> None:
        """Have the hooks in force during a module's forwards."""
        if module in self._followed:
            return
        self._followed.add(module)

        def begins(module: nn.Module, args: Any) -> None:
            innermost = any(pushed for _, pushed in self._calls) and not callers_hooks_pack()  # Note 6
            pushes = (
                not innermost
                and torch._C._current_graph_task_id() == -1
                and _hooks_are_allowed()
                and self._may_be_released()
            )
            if pushes:
                self._put_in_force()
            self._calls.append((module, pushes))

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            known = self._calls and self._calls[-1][0] is module  # else a hook before `begins` raised
            if known and self._calls.pop()[1]:
                torch._C._autograd._pop_saved_tensors_default_hooks()

        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends, always_call=True)

    def _may_be_released(self) -> bool:
        """Return whether some unit is released: inside full_params() none is before its backward."""
        return any(OPENED not in unit.users for unit in self._units.values())

    def revive(self, t: Tensor) -> None:
        """Gather the unit of what others have saved, if it is a released weight, and keep it for nodes made of it."""
        if (unit := self._unit_of(t)) is None:
            return
        if unit.weights.state in RELEASED:
            self._gather(unit)
        if torch.is_grad_enabled():
            self._hold(unit)

    def follow_functions(self) -> None:
        """Have the hooks in force in nodes of the caller's own Functions ahead of the one that runs (Note 5)."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self.forget_functions()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.forget_functions)
        for node in self._functions_from([torch._C._current_autograd_node()]):
            self._begun += [node.register_prehook(self._begins_function), node.register_hook(self._ends_function)]

    def _functions_from(self, left: list[Any]) -> Iterator[Any]:
        """Yield the nodes of the caller's own Functions that these nodes lead to, each once in a backward."""
        while left:
            node = left.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                yield node
            left += [following for following, _ in node.next_functions]

    def forget_functions(self) -> None:
        """Forget a backward with create_graph, which has ended or died."""
        for handle in self._begun:
            handle.remove()
        self._task = -1
        self._seen = set()
        self._begun = []

    def _begins_function(self, grads: Any) -> None:
        if torch.is_grad_enabled():
            self._put_in_force()

    def _ends_function(self, made: Sequence[Tensor | None], grads: Any) -> None:
        if next(self._functions_from([t.grad_fn for t in made if t is not None]), None) is not None:
            for unit in [unit for unit in self._units.values() if unit.users]:
                self._hold(unit)

    def _put_in_force(self) -> None:
        """Put the hooks in force, inside of any other hooks in force."""
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if around is None:
            _push(self._pack, self._unpack)
        else:
            pack, unpack = around

            def unpack_gathered(saved: tuple[Any, Unit | None]) -> Tensor:
                value: Tensor = unpack(self._gathered(*saved))
                if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
                    self._put_in_force()  # Note 2: it may be the weight itself, as of torch's save_on_cpu on a CPU
                return value

            _push(lambda t: (pack(t), self._unit_of(t)), unpack_gathered)  # Note 3

    def _unit_of(self, t: Tensor) -> Unit | None:
        try:
            return self._units.get(t.untyped_storage()._cdata)
        except NotImplementedError:  # sparse tensors and wrappers have no storage
            return None

    def _pack(self, t: Tensor) -> tuple[Tensor, int, Unit | None]:
        kept = t.detach()  # Note 4
        return kept, kept._version, self._unit_of(kept)

    def _unpack(self, saved: tuple[Tensor, int, Unit | None]) -> Tensor:
        value, version, unit = saved
        if unit is not None:
            self._gathered(value, unit)
        if value._version != version:  # Note 1
            raise RuntimeError(
                f"one of the tensors needed for gradient computation has been modified by an inplace operation: "
                f"{list(value.shape)} {value.dtype} is at version {value._version}; version {version} was saved."
            )
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            _push(self._pack, self._unpack)  # Note 2
        return value

    def _gathered(self, value: Any, unit: Unit | None) -> Any:
        """Gather the unit of a saved tensor if it is released; return the tensor."""
        if unit is not None and unit.weights.state in RELEASED:
            self._gather(unit)
        return value


def saved_behind(loss: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each tensor saved in a loss's graph, as hooks have packed it: its node's number, its storage's, itself."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                for saved in _packed(node, name):
                    with suppress(NotImplementedError):  # as in `_unit_of`
                        yield node._sequence_nr(), saved.untyped_storage()._cdata, saved


def _packed(node: Any, name: str) -> Iterator[Tensor]:
    """Yield tensors that a node has saved under a name, without unpacking them."""
    try:
        saved = getattr(node, name)
    except RuntimeError:  # an earlier backward has freed them
        return
    for each in saved if isinstance(saved, tuple) else (saved,):
        value = getattr(each, "data", None)
        while isinstance(value, tuple) and value:  # (what was saved, ...), of hooks around ours again
            value = value[0]
        if isinstance(value, Tensor):
            yield value


_push = torch._C._autograd._push_saved_tensors_default_hooks


def _hooks_are_allowed() -> bool:
    """Return whether a forward saves anything, and may be followed: torch.func's gradients allow no hooks."""
    allowed: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return torch.is_grad_enabled() and allowed


def callers_hooks_pack() -> bool:
    """Return whether the innermost hooks on saved tensors are neither ours nor of torch's checkpoint.

    Code that torch.compile traces calls no hooks.
    """
    if torch.compiler.is_compiling():
        return False
    innermost = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if innermost is None:
        return False
    module = getattr(innermost[0], "__module__", None) or ""
    return module != "torch.utils.checkpoint" and not module.startswith("zero3d.")
