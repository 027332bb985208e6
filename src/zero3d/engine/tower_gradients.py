"""Which parameters of a vision tower images give a gradient to: looked at once, after the first step with images.

    none on any rank    the model does not read what they make, as the last layer of LLaVA's tower: people are told
    some ranks alone    told, too: at stage 3 all ranks make the tower run alike, and ranks that reached other
                        parameters of it would wait for each other some day

At stage 3 all ranks know when the tower has run, and compare. Below it a rank looks at its own first step with images,
and sends nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.distributed.agreement import name_ranks
from zero3d.distributed.collectives import Comm
from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.memory.arena import device_values
from zero3d.models.bases import base_of, model_of, sees_images
from zero3d.models.images import BlankImages, calls_of, tower_parameters
from zero3d.zero.optimizer import Outcome
from zero3d.zero.reductions import Reductions
from zero3d.zero.released_parameters import untold
from zero3d.zero.unit import Unit

SHOWN = 3  # names in a message

Place = tuple[Unit, int]  # a parameter's unit, and its number there


class TowerGradients(Feature):
    """Looks at the gradients of a tower's parameters until a step with images is over.

    names   of the parameters, by place
    blanks  say whether the tower has run on all ranks; None where they need not agree
    tell    is told a line for people
    """

    tell: Callable[[str], object]

    def __init__(
        self,
        base: nn.Module,
        names: Mapping[Place, str],
        reductions: Reductions,
        dp: Comm,
        blanks: BlankImages | None,
        first: bool,
    ) -> None:
        self._names, self._reductions = names, reductions
        self._dp, self._blanks = dp, blanks
        self._first, self._own = first, 0
        self.tell = _warn
        reductions.heard = set()
        self._hook = base.register_forward_pre_hook(self._look, with_kwargs=True)

    @classmethod
    def opened(cls, parts: Runtime) -> Self | None:
        for root in parts.partition.chunks.values():
            tower = tower_parameters(root) if sees_images(root) else {}
            names = {
                (unit, index): tower[p]
                for unit in parts.units
                for index, p in enumerate(unit.weights.params)
                if p in tower and unit.grads is not None
            }
            if names:
                dp, everyone = parts.axes.dp, parts.axes.world
                base = base_of(model_of(root))
                return cls(base, names, parts.reductions, dp, parts.blanks, everyone.rank == 0)
        return None

    def _look(self, base: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._own += calls_of(kwargs)

    def after_update(self, outcome: Outcome) -> None:
        """Compare, once the tower has run: one number for each of its parameters, which no ledger counts."""
        heard = self._reductions.heard
        if heard is None or not (self._own if self._blanks is None else self._blanks.ran):
            return
        self._reductions.heard = None
        self._hook.remove()
        with untold():
            trained = [place for place in self._names if place[0].weights.params[place[1]].requires_grad]
        if not trained or isinstance(torch.empty(0), FakeTensor):
            return
        rows = self._of_all([float(place in heard) for place in trained])
        reached = [sum(column) for column in zip(*rows, strict=True)]
        none = [self._names[place] for place, ranks in zip(trained, reached, strict=True) if not ranks]
        some = [k for k, ranks in enumerate(reached) if 0 < ranks < len(rows)]
        if none and self._first:
            self.tell(
                f"images give {len(none)} of {len(trained)} parameters outside the language model no gradient, on any "
                f"rank: {_listed(none)}. The loss does not depend on them, and weight decay alone changes them, unless "
                "they are frozen"
            )
        if some and self._first:
            ranks = [rank for rank, row in enumerate(rows) if row[some[0]]]
            names = [self._names[trained[k]] for k in some]
            self.tell(
                f"images give {len(some)} parameters a gradient on some ranks alone, though the tower has run on all: "
                f"{_listed(names)}, the first on {name_ranks(ranks)} of {len(rows)}. At stage 3 ranks may wait for "
                "each other; at stage 2 they do not"
            )

    def _of_all(self, own: list[float]) -> list[list[float]]:
        """Return every rank's row, by rank; this one's alone where ranks do not know of each other's images."""
        if self._blanks is None:
            return [own]
        rows: Tensor = self._dp.exchange(device_values(own, self._dp.device), recorded=False)
        flat = self._dp.read(rows.flatten(), own * self._dp.size)
        return [[float(value) for value in flat[k : k + len(own)]] for k in range(0, len(flat), len(own))]


def _warn(line: str) -> None:
    warnings.warn(f"{line}.", stacklevel=7)  # the caller of engine.step or train_batch


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} others' if len(names) > SHOWN else ''}"
