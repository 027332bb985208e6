"""A vision tower as parts of a plan: it is run once, apart from its language model, on the images of one sequence.

    before its blocks    patches, places                            EMBEDDING
    its blocks           in the order in which they run             their names
    behind them          merging, projection into the language      HEAD

The whole of it is run, and backward as far as something is trained: nothing is kept of a frozen one, and it has no
backward. A second forward with all of it trained tells how many bytes go through memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zero3d.models.copies import copy_with
from zero3d.models.images import read_features, repeated, tower_output
from zero3d.models.placeholders import first_argument
from zero3d.nested import map_tensors, tensors_out
from zero3d.tools.plan.spec import Operations
from zero3d.tools.sim.card_autocast import lists_of_cards
from zero3d.tools.sim.figures import EMBEDDING, HEAD, Figures, OutputForms, Recorder, ReducedModel, run_dtype
from zero3d.tools.sim.images import Images
from zero3d.tools.sim.known import KnownValues
from zero3d.tools.sim.live import StorageTracker
from zero3d.tools.sim.patches import without_values
from zero3d.tools.sim.stand_ins import empty_like
from zero3d.tools.sim.units import RUN


class TowerRecorder(Recorder):
    """Marks the instants of a tower's run.

    What a block is given and returns has several readers, some of them late (DeepStack), and the gradient of a tensor
    is there when the last of them is done. So each block reads and returns a view of its own: torch runs the node of
    a view just before and just after those of the block.
    """

    def _begins(self, kind: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._entering[kind] = (hidden := first_argument(args, kwargs)).untyped_storage().nbytes()
        self._live.mark(("F", kind, "begin"))
        own = hidden.view_as(hidden)
        if own.grad_fn is not None:
            own.grad_fn.register_hook(lambda *_: self._live.mark(("B", kind, "end")))
        swap = {id(hidden): own}
        return tuple(swap.get(id(a), a) for a in args), {name: swap.get(id(a), a) for name, a in kwargs.items()}

    def _ends(self, kind: Any, module: nn.Module, args: Any, output: Any) -> Any:
        self._live.mark(("F", kind, "end"))
        hidden = next(iter(tensors_out(output)))
        own = hidden.view_as(hidden)
        if own.grad_fn is not None:
            own.grad_fn.register_prehook(lambda *_: self._live.mark(("B", kind, "begin")))
        return map_tensors(output, lambda t: own if t is hidden else t)

    def _forward_of(self, part: Any) -> tuple[int, int]:
        return (0, self._live.marks["F", HEAD, "end"]) if not self._kinds else super()._forward_of(part)

    def _backward_of(self, part: Any) -> tuple[int, int]:
        """Return when a part's backward begins and ends: never, where no gradient reaches it."""
        marks, over = self._live.marks, self._live.marks["end",]
        if part == HEAD:
            begun = [marks["B", kind, "begin"] for kind in self._kinds if ("B", kind, "begin") in marks]
            return marks["B", HEAD, "begin"], min(begun, default=over)
        if part == EMBEDDING:
            return marks.get(("B", self._kinds[0], "end"), over), over
        return super()._backward_of(part)

    def backward_of(self, part: Any) -> float:
        """Return the operations of a part's backward, products of attention left out."""
        begin, end = self._backward_of(part)
        return sum(n for at, n, scores in self._live.flops if begin <= at < end and not scores)

    def most_in_forward(self) -> float:
        """Return the most bytes that are alive at an instant of the forward."""
        forward = self._live.events[: self._live.marks["F", HEAD, "end"]]
        return float(max(accumulate(change for change, _ in forward), default=0))

    def _waiting(self) -> set[int]:
        return set()  # nothing of it is tied


class TowerFigures(NamedTuple):
    """Figures of one part of a tower for one sequence.

    own    as it is trained
    whole  were all of it trained: operations, since products without a gradient have other names, and bytes in passing
    back   operations of its backward over those of its forward
    """

    own: Figures
    whole: Figures
    back: float


def measure_tower(
    model: nn.Module, images: Images, autocast: str | None = None
) -> tuple[dict[Any, TowerFigures], float]:
    """Return the figures of what runs before the tower's blocks, of each of them by name, and of what runs behind.

    And the most bytes that are alive in its forward.
    """
    own = _run(model, images, autocast, trained=False)
    trained = _run(model, images, autocast, trained=True)
    parts = (*((EMBEDDING,) if images.blocks else ()), *images.blocks, HEAD)
    return {
        part: TowerFigures(
            own.figures(part), whole := trained.figures(part), own.backward_of(part) / max(1.0, whole.matrices)
        )
        for part in parts
    }, own.most_in_forward()


def operations_of(figures: TowerFigures, block: bool, length: int, eager: bool) -> Operations:
    """Return a part's operations and bytes, for each token of a sequence of `length`; block: it may be recomputed."""
    own, whole = figures.own, figures.whole
    curve = own.curve if figures.back else ()
    most = max(curve, key=sum, default=(0.0, 0.0))
    return Operations(
        whole.matrices / length,
        whole.scores / length,
        kept_whole=own.kept / length if figures.back else 0.0,
        attention=own.attention / length,
        eager=eager,
        input=own.entering / length if block and figures.back else 0.0,
        transient=max(0.0, sum(most)) / length,
        launches=own.launches,
        passed=(own.passed[0] / length, own.passed[1] / length),
        trained=whole.kept / length,
        back=figures.back,
    )


def _run(model: nn.Module, images: Images, autocast: str | None, trained: bool) -> TowerRecorder:
    """Run a tower, and backward as far as something is trained.

    trained  all of it is, and there is no backward
    """
    given = repeated(images.inputs, images.count)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, without_values(packed=False):
        tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
        copies: dict[nn.Module | Tensor, object] = {t: empty_like(t, run_dtype(t)) for t in tensors}
        run = copy_with(model, copies).train()
        if trained:
            for p in run.parameters():
                p.requires_grad_(p.is_floating_point())
        live = StorageTracker()
        live.leave_out(*run.parameters(), *run.buffers(), *given.values())
        by_name: Any = {name: name for name in images.blocks}
        recorder = TowerRecorder(live, ReducedModel(run, by_name, OutputForms()))
        recorder.install(run)
        cast = nullcontext() if autocast is None else torch.autocast("cpu", RUN)
        lists = nullcontext() if autocast in (None, "cpu") else lists_of_cards()
        with fake, KnownValues(), live, recorder.constants(), lists:
            with cast:
                loss = _sum(run, {name: t.to(RUN) if t.is_floating_point() else t for name, t in given.items()})
            live.mark(("F", HEAD, "end"))
            live.mark(("B", HEAD, "begin"))
            if loss.requires_grad and not trained:
                loss.backward()  # type: ignore[no-untyped-call]
            live.mark(("end",))
    return recorder


def _sum(run: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return the sum of all that a language model reads of these images' features: its gradient needs none of them."""
    features = [t.sum() for t in read_features(run, tower_output(run, given))]
    return torch.stack(features).sum()
