"""Module and autograd events to the verbs of `Gathers` and `Reductions`. No policy of its own.

    event                                     verb
    ----------------------------------------  ----------------------------------------------------
    a user module's forward starts            acquire a forward token; take the turn token (stage 3)
                                              wait for new weights (below stage 3)
    its forward ends, also by an exception    release the forward token
    a parameter is read outside of it         its unit is one of the root's from now on (stage 3)
    ... under hooks of the caller's own       keep its unit gathered until the step (stage 3)
    a gradient reaches any of its outputs     acquire a backward token
    gradients of all its inputs are done      release the backward token
    ... of the one that was made last         leave its units (stage 3; Note 9)
    a node reads a saved weight (saved.py)    acquire a backward token, if its unit is released (stage 3)
    a parameter's gradient is accumulated     take it
    the root's forward ends                   wait for new weights of units that were not called
    a gradient reaches an output of the root  a backward begins (once per graph task), if it reaches parameters
    the backward ends                         flush reductions; drop backward and turn tokens

Note 1, leaf inputs. The AccumulateGrad node of a leaf jumps autograd's queue; a view of it waits
behind the block. Each leaf input that needs a gradient is passed on as a view.
Note 2, `always_call`. Recomputation stops early by an exception, which skips ordinary forward
hooks; the forward token would leak.
Note 3, embeddings. Their backward needs indices only, so they take no backward token.
Note 4, the end-of-backward callback is queued from the root's output: queued elsewhere it would
fire at the end of a reentrant checkpoint's inner backward.
Note 5, graphs that no backward goes through to its end (a replay's, one of split backwards). torch's hook on all of
several tensors holds their nodes, which hold it: such a graph would stay, with its activations. A hook on one tensor,
as most blocks have, does not.
Note 6, gradients of inputs (torch.autograd.grad, as for a penalty on them) reach no parameter: they count no
micro-batch and reduce nothing. A schedule of a pipeline makes whole backwards of them, and says itself what they are.
Note 7, torch's recomputation. Where no gradient came through the module's outputs, the weights that its second forward
saves would be released before their nodes run. zero3d's asks for them (`revive`).
Note 8, recomputation in a backward with create_graph: the nodes that it makes save weights, under hooks that are not
ours. The unit stays gathered until the step.
Note 9, modules of several inputs. Autograd executes what is ready in the reverse order in which it was made: when it
comes to what made the latest input, it has left the module, whatever other inputs had a gradient (the hidden states of
an encoder, which one rank may have and another not).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from zero3d.errors import ReleasedParameterError
from zero3d.nested import map_tensors, tensors_in, tensors_out
from zero3d.zero.accumulation import Accumulation
from zero3d.zero.arrivals import Reached
from zero3d.zero.external import watch
from zero3d.zero.gathers import OPENED, STEP, Gathers, Order, refuse_export
from zero3d.zero.reductions import Reductions
from zero3d.zero.released_parameters import GRAD, untold
from zero3d.zero.saved import SavedWeights, callers_hooks_pack, saved_behind
from zero3d.zero.tokens import ROOT_TURN, TURN
from zero3d.zero.unit import Unit
from zero3d.zero.unit_parts import State

GRAPH = "graph"  # a graph of a backward may read it until the step
KEEP = "keep"  # gathered without grad: stays until the next forward with grad, step or load
NO_MEMORY = ("out of bounds for storage of size 0", "its data is not allocated yet")  # torch of a released weight
SAVE = "A torch.autograd.Function keeps what its backward needs by ctx.save_for_backward, not as an attribute of ctx."


class Hooks:
    """Hooks of a model and its parameters, installed at construction.

    root   the module whose call is a micro-batch's forward
    uses   user module -> the units its forward needs, in layout order
    cast   applied to the root's floating inputs
    shows_masters  parameters have their masters' dtype now, and the root's forward runs in autocast
    aside  is given the gradients of forwards and backwards that belong to no step; None in steps
    scheduled  backwards are those of a pipeline's schedule (Note 6)
    whole      a backward through the root gives the gradients of its parameters, too: not where they come later
    """

    aside: Callable[[Unit, int, Tensor], None] | None = None
    saved: SavedWeights | None = None
    shows_masters = False

    def __init__(
        self,
        root: nn.Module,
        uses: Mapping[nn.Module, Sequence[Unit]],
        gathers: Gathers,
        reductions: Reductions,
        accumulation: Accumulation,
        cast: Callable[[Tensor], Tensor],
        scheduled: bool = False,
        whole: bool = True,
    ) -> None:
        self.keep_full = True
        self._gathers = gathers
        self._reductions = reductions
        self._accumulation = accumulation
        self._cast = cast
        self._scheduled, self._whole = scheduled, whole
        self._calls = count()
        self._open: dict[nn.Module, list[int]] = {}
        self._mode: str | None = None  # of the root forward under way: "train" | "eval"
        self._task: int | None = None  # of the backward under way
        self._dropping: int | None = None  # the backward under way drops tokens at its end
        self._last_call: dict[Unit, int] = {}
        self._inputs: list[ref[Tensor]] = []  # of the last forward, leaves that need a gradient
        self._creates_graph = False  # the backward under way
        self._last_node = 0  # the number of autograd's nodes when the last forward ended
        self.without_weights: set[str] = set()  # units that gave gradients in this step while they were released
        self._fresh = [False]  # whether the last forward of the root has had no backward yet
        units = list(dict.fromkeys(unit for group in uses.values() for unit in group))
        embedding = {unit for module, group in uses.items() if _is_plain_embedding(module) for unit in group}
        self._needed_in_backward = {unit for unit in units if unit.weights.sharded} - embedding  # Note 3
        self._trainable = [unit for unit in units if unit.grads is not None]
        self._sharded = [unit for unit in units if unit.weights.sharded]
        self._persistent = [unit for unit in units if not unit.weights.sharded]
        self._with_root = [unit for unit in uses.get(root, ()) if unit.weights.sharded]
        self._without_grad = Order()
        for order in (self._without_grad, gathers.training):  # until there is a record
            order.expect([unit for unit in units if unit.weights.sharded and unit not in self._with_root])
        self._called: set[Unit] = set()  # persistent ones, by their modules in the last forward
        # The root's turn token must be taken before its forward token is given back: first hook first.
        root.register_forward_pre_hook(self._root_begins, with_kwargs=True)
        root.register_forward_hook(self._root_ends, always_call=True)
        self._calls_of_root = self._open.setdefault(root, [])
        if len(self._persistent) < len(units):
            self._hook_user(root, self._with_root)
        for module, needed in uses.items():
            sharded = [unit for unit in needed if unit.weights.sharded]
            if sharded and module is not root:
                self._hook_user(module, sharded)
            if late := [unit for unit in needed if unit.weights.comes_late]:
                module.register_forward_pre_hook(self._waiter(late))
        self._follow_saved(root, uses)
        self._of_root = set(root.parameters())
        for unit in units:
            if unit.grads is not None:
                self._take_from(unit)

    @property
    def with_root(self) -> Sequence[Unit]:
        """Units that are gathered as long as the root is: what has been read outside of its module's forward, too."""
        return self._with_root

    def train(self, unit: Unit) -> None:
        """Take gradients of a unit that was frozen, if it is one of the root's."""
        if not self._of_root.isdisjoint(unit.weights.params):
            self._trainable.append(unit)
            self._take_from(unit)

    def _take_from(self, unit: Unit) -> None:
        for index, p in enumerate(unit.weights.params):
            trained = p.requires_grad
            p.requires_grad_(True)  # a hook stays while its parameter is frozen, but does not come to one that is
            p.register_post_accumulate_grad_hook(self._gradient_hook(unit, index))  # type: ignore[no-untyped-call]
            p.requires_grad_(trained)

    def _follow_saved(self, root: nn.Module, uses: Mapping[nn.Module, Sequence[Unit]]) -> None:
        """Follow weights that autograd saves (saved.py) in modules that use units, and of the root's in their own."""
        sharded = {unit for group in uses.values() for unit in group if unit.weights.sharded}
        if not sharded:
            return
        self.saved = saved = SavedWeights(sharded, self._node_needs, lambda unit: self._gathers.acquire(unit, GRAPH))
        of_root = {p for unit in self._with_root for p in unit.weights.params}
        unit_of = {p: unit for unit in sharded for p in unit.weights.params}
        for module in root.modules():
            own = {name: unit_of[p] for name, p in module._parameters.items() if p in unit_of}
            if own:
                watch(module, own, partial(self._read, module))
            uses_unit = module is not root and any(unit in sharded for unit in uses.get(module, ()))
            unwatched = bool(own) and isinstance(module, nn.RNNBase)  # reads a list of its own
            if uses_unit or unwatched or not of_root.isdisjoint(module.parameters(recurse=False)):
                saved.follow(module)

    # --- a unit's users -------------------------------------------------------------------------

    def _hook_user(self, module: nn.Module, units: list[Unit]) -> None:
        needed_in_backward = not _is_plain_embedding(module)  # Note 3

        def begins(module: nn.Module, args: Any, kwargs: Any) -> Any:
            call = next(self._calls)
            self._open.setdefault(module, []).append(call)
            if self._mode == "train":
                self._gathers.pass_turn(units)
            token = KEEP if self._keeps else ("forward", call)
            for unit in units:
                self._gathers.acquire(unit, token)
                self._last_call[unit] = call
            if not torch.is_grad_enabled():
                return None
            if not needed_in_backward:
                self._reductions.arrivals.unheard.update(units)
                return None
            given = args, kwargs
            inputs = [t for t in tensors_in(given) if t.requires_grad]
            if any(t.is_leaf for t in inputs):  # Note 1
                args, kwargs = map_tensors(given, _unleaf)
                inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            if inputs:
                self._expect_end(units, call, inputs, given)
            else:
                self._reductions.arrivals.unheard.update(units)
            return args, kwargs

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            if not self._open.get(module):  # a hook before `begins` raised: its error is on the way
                return
            call = self._open[module].pop()
            again = torch._C._current_graph_task_id() != -1  # in a backward: recomputation
            for unit in units if again else ():
                if _is_torchs_recomputation() and not any(_is(token, "backward") for token in unit.users):
                    self._node_needs(unit)  # Note 7
                if self._creates_graph:
                    self._gathers.acquire(unit, GRAPH)  # Note 8
            for unit in units:
                self._gathers.release(unit, ("forward", call))
            outputs = [t for t in tensors_out(output) if t.requires_grad]
            if torch.is_grad_enabled() and needed_in_backward and outputs:
                _on_gradient_of_any(outputs, lambda _: self._backward_needs(units, call))

        module.register_forward_pre_hook(untraced(begins), with_kwargs=True)
        module.register_forward_hook(untraced(ends), always_call=True)  # Note 2

    def _expect_end(self, units: list[Unit], call: int, inputs: list[Tensor], given: Any) -> None:
        """Tell where backward will leave a call: recomputed ones, in a backward, may have no backward of their own.

        inputs  tensors with gradients; given: the call's own arguments, whose leaves are still leaves
        """
        if len(inputs) == 1:

            def done_and_left(_: Tensor) -> None:
                self._backward_done(units, call)
                self._left(units, call)

            end: Tensor | None = inputs[0]
            _on_gradient_of_any(inputs, done_and_left)
        else:
            end = _latest(t for t in tensors_in(given) if t.requires_grad)
            register_multi_grad_hook(inputs, lambda _: self._backward_done(units, call), mode="all")
            _on_gradient_of_any([inputs[0] if end is None else end], lambda _: self._left(units, call))
        if end is None:
            self._reductions.arrivals.unclear.update(units)
        elif self.aside is None and torch._C._current_graph_task_id() == -1:
            for unit in units:
                self._reductions.arrivals.call(unit, call)

    def _left(self, units: list[Unit], call: int) -> None:
        for unit in units if self._reduces else ():
            if unit.grads is not None:
                self._reductions.leave(unit, call)

    def _read(self, module: nn.Module, unit: Unit) -> None:
        """Gather a unit that is read outside of its module's forward; keep one that hooks of the caller's may pack."""
        if unit.weights.state is not State.FULL:
            self._gather_with_root(unit)
        in_forward = torch._C._current_graph_task_id() == -1 and any(_is(token, "forward") for token in unit.users)
        if self.saved is not None and in_forward and torch.is_grad_enabled() and callers_hooks_pack():
            self._gathers.acquire(unit, GRAPH)
            self.saved.follow(module)

    def _gather_with_root(self, unit: Unit) -> None:
        """Gather a unit with the root's, whose forward is under way, from now on."""
        if self._mode is not None and self._calls_of_root and unit not in self._with_root:
            call = self._calls_of_root[-1]
            self._with_root.append(unit)
            self._last_call.setdefault(unit, call)
            self._reductions.arrivals.unclear.add(unit)
            self._gathers.acquire(unit, KEEP if self._keeps else ("forward", call))

    def _waiter(self, units: list[Unit]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, args: Any) -> None:
            self._called.update(units)
            for unit in units:
                self._gathers.ready(unit)

        return wait

    def _backward_needs(self, units: list[Unit], call: int) -> None:
        self._creates_graph = torch.is_grad_enabled()
        if self._creates_graph and self.saved is not None:
            self.saved.follow_functions()
        if units is not self._with_root:  # whose outputs the loss is made of: logits are still there
            self._gathers.begin_backward()
        if self._reduces:
            self._reductions.look()  # before the gather, as ranks on which the last unit has no hole have begun it
        for unit in units:
            self._gathers.acquire(unit, ("backward", call))
            self._gathers.release(unit, TURN)  # the turn has served its purpose

    def _node_needs(self, unit: Unit) -> None:
        """Gather a unit for a node that runs though no gradient came through its module's outputs."""
        if torch._C._current_graph_task_id() == -1:  # somebody reads a graph
            self._gathers.acquire(unit, KEEP)
            return
        self._drop_at_end()
        self._backward_needs([unit], self._last_call[unit])

    def _backward_done(self, units: list[Unit], call: int) -> None:
        for unit in units:
            self._gathers.release(unit, ("backward", call))

    @property
    def _reduces(self) -> bool:
        """Return whether the step takes the gradients of the backward under way."""
        return self._task is not None and self.aside is None and self._whole

    @property
    def _keeps(self) -> bool:
        without_grad = self._mode == "eval" or (self._mode is None and not torch.is_grad_enabled())
        return without_grad and self.keep_full

    @property
    def stay_gathered(self) -> bool:
        """Return whether what the forward under way gathers stays gathered behind it, for later forwards."""
        return self._keeps or self._gathers.every_step

    def _gradient_hook(self, unit: Unit, index: int) -> Callable[[Tensor], None]:
        weak_self, weak_unit = ref(self), ref(unit)  # the garbage collector does not see what a parameter's hook holds

        def pass_on(p: Tensor) -> None:
            if (hooks := weak_self()) is not None and (unit := weak_unit()) is not None:
                if type(p) is nn.Parameter:
                    grad, p.grad = p.grad, None
                else:
                    with untold():
                        grad, p.grad = GRAD.__get__(p), None
                if grad is not None:
                    hooks.pass_on(unit, index, grad.detach())
                elif hooks._reduces:  # a Function has none for it
                    hooks.pass_on(unit, index, None)

        return pass_on

    def gradient_hook_of_sources(self, unit: Unit, index: int) -> Callable[[int, Tensor | None], None]:
        """Return a hook that takes a parameter's gradient from a source, or None for it."""
        weak_self, weak_unit = ref(self), ref(unit)

        def pass_on(source: int, grad: Tensor | None) -> None:
            if (hooks := weak_self()) is not None and (unit := weak_unit()) is not None:
                hooks.pass_on(unit, source * len(unit.layout.slots) + index, None if grad is None else grad.detach())

        return pass_on

    def pass_on(self, unit: Unit, index: int, grad: Tensor | None) -> None:
        """Pass a gradient on to `Reductions.receive`, or to `aside`."""
        if self._task is None and self._fresh[0] and not self._scheduled:
            self._through_root(self._fresh)  # of a loss of inner activations: no output of the root is on its way
        if grad is not None and unit in self._needed_in_backward and unit.weights.state is not State.FULL:
            self.without_weights.add(unit.name)
        if self.aside is None:
            self._reductions.receive(unit, index, grad)
        elif grad is not None:
            self.aside(unit, index, grad)

    # --- the root -------------------------------------------------------------------------------

    def _root_begins(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        for unit in self._needed_in_backward if torch.compiler.is_exporting() else ():
            if OPENED not in unit.users:
                refuse_export(unit)  # here: later torch, which puts the model's parameters back, would fail in it
        inside_backward = torch._C._current_graph_task_id() != -1
        if self._task is not None and not inside_backward:
            self.abandon()
        if not inside_backward:
            self._mode = "train" if torch.is_grad_enabled() else "eval"
            if self._mode == "train":
                if self.aside is None:
                    self._accumulation.forward_begins()
                self._gathers.drop(lambda token: token in (KEEP, TURN, ROOT_TURN))
                self._gathers.begin()
            else:
                self._gathers.begin_forward(self._without_grad)
            self._inputs = [ref(t) for t in tensors_in((args, kwargs)) if t.is_leaf and t.requires_grad]
        awaited, self._called = self._called, set()
        for unit in self._persistent:
            # Without grad torch's encoders ask whether a parameter has operations of its own, and take another path.
            if unit in awaited and unit.weights.pending and torch.is_grad_enabled():
                continue  # nobody has touched it since
            self._gathers.ready(unit)
            if OPENED not in unit.users:
                unit.weights.check()
        cast = without_fp64 if self.shows_masters else self._cast
        return map_tensors((args, kwargs), lambda t: cast(t) if t.is_floating_point() else t)

    def _root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        mode, self._mode = self._mode, None
        if mode == "eval":
            self._gathers.end_forward()
        for unit in self._persistent:
            self._gathers.ready(unit)
        if mode != "train":
            return
        self._fresh = fresh = [True]
        outputs = [t for t in tensors_out(output) if t.requires_grad]
        self._last_node = max((t.grad_fn._sequence_nr() for t in outputs if t.grad_fn is not None), default=0)
        if not outputs:
            return
        for unit in self._with_root:
            self._gathers.acquire(unit, ROOT_TURN)

        def begins(_: Tensor) -> None:
            if self._computes_gradients_of_inputs():
                self._drop_at_end()
            else:
                self._through_root(fresh)

        _on_gradient_of_any(outputs, begins)

    def _computes_gradients_of_inputs(self) -> bool:
        """Return whether what is under way are gradients of inputs: by torch.autograd.grad, or all else is frozen."""
        if self._scheduled or self._accumulation.is_announced:
            return False
        inputs = [t for known in self._inputs if (t := known()) is not None]
        transforms = torch._C._functorch  # torch.func.grad, jacrev and others, and what vjp has returned, call autograd
        if transforms.maybe_current_level() is not None or any(map(transforms.is_functorch_wrapped_tensor, inputs)):
            return True
        asked_for = any(Reached.of(t) is Reached.ASKED_FOR for t in inputs)
        with untold():
            trained = [p for unit in self._trainable for p in unit.weights.params if p.requires_grad]
            for p in trained:
                reached = Reached.of(p)
                if reached is Reached.ACCUMULATED:
                    return False
                asked_for = asked_for or reached is Reached.ASKED_FOR
        return asked_for or not trained or torch.is_grad_enabled()

    def _through_root(self, fresh: list[bool]) -> None:
        """Begin a backward, or go on with it. fresh: of the root's forward that it goes through."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if self.aside is None:
                self._accumulation.backward_begins()
                self._reductions.begin(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)  # Note 4
        if self.aside is None:
            first, fresh[0] = fresh[0], False
            self._reductions.due = self._accumulation.through_root(first)
            self._reductions.final = self._accumulation.reached

    def _drop_at_end(self) -> None:
        """Drop the tokens of a backward at its end, also of one that does not go through the root's outputs."""
        task = torch._C._current_graph_task_id()
        if task not in (self._task, self._dropping):
            self._dropping = task
            torch.autograd.Variable._execution_engine.queue_callback(self._drop_tokens)

    def _drop_tokens(self) -> None:
        self._dropping = None
        self._gathers.drop(lambda token: _is(token, "backward"))

    def _backward_ends(self) -> None:
        if self.aside is None:
            self._reductions.end_backward()
        self._task = None
        self._gathers.drop(lambda token: token in (TURN, ROOT_TURN) or _is(token, "backward"))

    def refuse_released(self, loss: Tensor) -> None:
        """Raise ReleasedParameterError where a loss that is NaN uses a released parameter."""
        name, in_forward = next(self._released_behind(loss, since=self._last_node), ""), False
        if not name:
            name, in_forward = next(self._placeholders_behind(loss), ("", False))
        if name:
            where = "in the forward, but not as an attribute of its module" if in_forward else "outside of a forward"
            raise ReleasedParameterError(
                f"the loss is NaN: it uses parameter {name!r} {where}, where at stage 3 it has no "
                "values. Put `with engine.full_params():` around forward, loss and backward, or pass stage=2."
            )

    def refuse_unsaved(self, loss: Tensor, error: BaseException) -> None:
        """Raise ReleasedParameterError where a backward failed because the memory of a weight is released.

        Weights saved by autograd are gathered; a weight kept as an attribute by the caller's own Function is unseen.
        """
        if not any(sign in str(error) for sign in NO_MEMORY):
            return
        if name := next(self._released_behind(loss), None):
            raise ReleasedParameterError(
                f"a backward used memory of a weight that is released, perhaps of {name!r}: at stage 3 those that "
                f"autograd has saved are gathered again. {SAVE} Under hooks on saved tensors, such as "
                "torch's save_on_cpu, a forward reads its weights inside of them, not before. Or pass stage=2."
            ) from error

    def _released_behind(self, loss: Tensor, since: int = -1) -> Iterator[str]:
        """Yield released parameters that a loss depends on, through nodes of autograd made after the `since`-th."""
        names = {
            get_gradient_edge(p).node: slot.name
            for unit in self._trainable
            if unit.weights.sharded and OPENED not in unit.users and unit.weights.state is not State.FULL
            for slot, p in zip(unit.layout.slots, unit.weights.params, strict=True)
            if p.requires_grad
        }
        seen, left = set(), [loss.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in seen or node._sequence_nr() <= since:
                continue
            seen.add(node)
            following = [child for child, _ in node.next_functions]
            yield from (names[child] for child in following if child in names)
            left += following

    def _placeholders_behind(self, loss: Tensor) -> Iterator[tuple[str, bool]]:
        """Yield released parameters whose NaN a loss's graph has saved, and whether the root's forward read it."""
        released = {
            p.untyped_storage()._cdata: (slot.name, unit, p)
            for unit in self._sharded
            if OPENED not in unit.users and unit.weights.state is not State.FULL
            for slot, p in zip(unit.layout.slots, unit.weights.params, strict=True)
        }
        for number, storage, saved in saved_behind(loss) if released else ():
            if storage in released:
                name, unit, p = released[storage]
                in_forward = number <= self._last_node
                if not (in_forward and saved is p and unit in self._with_root):  # else it had values when it was saved
                    yield name, in_forward

    def abandon(self) -> None:
        """Forget a backward that died by an exception, and the step it belonged to."""
        self._task = self._dropping = None
        if self.saved is not None:
            self.saved.forget_functions()
        self.without_weights.clear()
        for calls in self._open.values():
            calls.clear()
        self._mode = None
        over = (TURN, ROOT_TURN, STEP, GRAPH)
        self._gathers.drop(lambda token: token in over or _is(token, "backward") or _is(token, "forward"))
        self._reductions.reset()
        self._accumulation.reset()


def without_fp64(t: Tensor) -> Tensor:
    """Return a floating input of a forward in autocast, which does not take fp64."""
    return t.float() if t.dtype == torch.float64 else t


def _is(token: object, kind: str) -> bool:
    return isinstance(token, tuple) and token[0] == kind


def _is_torchs_recomputation() -> bool:
    """Return whether hooks of torch's checkpoint are in force, or none, as in its reentrant form."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return around is None or getattr(around[0], "__module__", "") == "torch.utils.checkpoint"


def _is_plain_embedding(module: nn.Module) -> bool:
    return type(module).forward is nn.Embedding.forward and len(list(module.parameters())) == 1


def _on_gradient_of_any(tensors: Sequence[Tensor], call: Callable[[Tensor], None]) -> None:
    """Call once in a backward, at the first gradient of these tensors: one tensor, as most blocks have, gets one."""
    if len(tensors) == 1:
        tensors[0].register_hook(call)  # type: ignore[no-untyped-call]
    else:
        register_multi_grad_hook(tensors, call, mode="any")


def _latest(inputs: Iterable[Tensor]) -> Tensor | None:
    """Return the input that was made last by an operation; None where all are leaves."""
    made = [t for t in inputs if t.grad_fn is not None]
    return max(made, key=lambda t: t.grad_fn._sequence_nr(), default=None)  # type: ignore[union-attr]


def _unleaf(t: Tensor) -> Tensor:
    return t.view_as(t) if t.is_leaf and t.requires_grad else t


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that torch.compile calls as it is, where it compiles a module with its hooks.

    A hook's changes to parameters belong to no graph: traced into one, they may come too late.
    """
    as_it_is = _disable_dynamo(hook)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():  # else torch's compiler, which takes seconds to import, is not needed
            return as_it_is(*args)
        return hook(*args)

    return call
