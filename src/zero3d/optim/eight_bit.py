"""AdamW whose two moments are in 8 bits between steps, 2.03 bytes a parameter for 8.

    some pieces at a time, of memory.scratch's longest bucket together:
        read    m, v in fp32 = their blocks          (blockwise.py)
        step    torch's own fused AdamW
        write   their blocks = m, v

Every piece begins at a block of its parameter, and its last block is the parameter's last one or whole: what a block
has never depends on how many ranks there are, and neither does a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from zero3d.errors import ConfigError
from zero3d.memory.scratch import update_bucket
from zero3d.optim.blockwise import BLOCK, Blocks, decode, encode
from zero3d.spec.optimizer import OPTIMIZERS, OptimizerRow

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
ROW = OPTIMIZERS["adamw8bit"]


class Run(NamedTuple):
    """Some blocks of a piece: from first to before last."""

    piece: Tensor
    first: int
    last: int

    @property
    def elements(self) -> slice:
        """Those of the piece."""
        return slice(self.first * BLOCK, min(self.last * BLOCK, self.piece.numel()))


class AdamW8bit(Optimizer):
    """Updates 1-D pieces of parameters by AdamW, with moments in blocks of 8 bits."""

    row = ROW
    coded = SIGNED
    block = BLOCK

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})

    def state_names(self, group: Any) -> tuple[str, ...]:
        """Return the names of the moments."""
        return tuple(SIGNED)

    def stored(self, key: str, codes: Tensor, scales: Tensor, numel: int) -> Blocks:
        """Return a moment of a piece of so many elements, in memory that is there."""
        return Blocks(codes.view(-1, BLOCK), scales, numel, SIGNED[key])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all pieces that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            pieces = [p for p in group["params"] if p.grad is not None and p.numel()]
            for p in pieces:
                self._begin(p)
            counts = [self.state[p]["step"] for p in pieces]
            for runs in _runs(pieces, update_bucket(pieces[0].device.type) // BLOCK) if pieces else ():
                self._update(runs, group)
            if counts:
                torch._foreach_add_(counts, 1)
        return loss

    def _begin(self, p: Tensor) -> None:
        state, blocks = self.state[p], -(-p.numel() // BLOCK)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for key in SIGNED:
                codes = torch.empty(blocks * BLOCK, dtype=torch.uint8, device=p.device)
                state[key] = self.stored(key, codes, torch.empty(blocks, device=p.device), p.numel())
                state[key].write(torch.zeros((), device=p.device))

    def _update(self, runs: Sequence[Run], group: dict[str, Any]) -> None:
        """Update some blocks of pieces."""
        values = {key: self._read(runs, key) for key in SIGNED}
        sizes = [run.last - run.first for run in runs]
        moments = {
            key: [
                part.view(-1)[: run.elements.stop - run.elements.start]
                for part, run in zip(torch.split(blocks, sizes), runs, strict=True)
            ]
            for key, blocks in values.items()
        }
        gradients = [run.piece.grad[run.elements] for run in runs if run.piece.grad is not None]
        counts = torch._foreach_add([self.state[run.piece]["step"] for run in runs], 0)
        adamw(
            [run.piece[run.elements] for run in runs],
            gradients,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            list(counts),
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        del moments  # what is written is given back before the next is
        for key in SIGNED:
            self._write(runs, key, values.pop(key))

    def _read(self, runs: Sequence[Run], key: str) -> Tensor:
        """Return a moment of all blocks of runs, in fp32."""
        codes = [self.state[run.piece][key].codes[run.first : run.last] for run in runs]
        scales = [self.state[run.piece][key].scales[run.first : run.last] for run in runs]
        return decode(torch.cat(codes), torch.cat(scales), SIGNED[key])

    def _write(self, runs: Sequence[Run], key: str, blocks: Tensor) -> None:
        """Store a moment of all blocks of runs."""
        sizes = [run.last - run.first for run in runs]
        for name, made in zip(("codes", "scales"), encode(blocks, SIGNED[key]), strict=True):
            targets = [getattr(self.state[run.piece][key], name)[run.first : run.last] for run in runs]
            torch._foreach_copy_(targets, list(torch.split(made, sizes)))


def _runs(pieces: Sequence[Tensor], blocks: int) -> Iterator[list[Run]]:
    """Yield pieces, cut between blocks, so many blocks at a time."""
    runs: list[Run] = []
    room = blocks
    for piece in pieces:
        last, first = -(-piece.numel() // BLOCK), 0
        while first < last:
            stop = min(last, first + room)
            runs.append(Run(piece, first, stop))
            room -= stop - first
            first = stop
            if not room:
                yield runs
                runs, room = [], blocks
    if runs:
        yield runs


@dataclass(frozen=True)
class AdamW8bitRule:
    """What `adamw8bit` returns: builds the optimizer of groups of pieces."""

    options: dict[str, Any]
    row: ClassVar[OptimizerRow] = ROW
    block: ClassVar[int] = BLOCK

    def __call__(self, params: Any) -> AdamW8bit:
        """Return the optimizer of pieces, or groups of pieces."""
        return AdamW8bit(params, **self.options)


def adamw8bit(
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> AdamW8bitRule:
    """Return what `Engine(optimizer=...)` takes for AdamW whose moments are in 8 bits.

    States take 6.03 bytes per parameter (fp32 master, moments of 65/64 bytes each), and 4.03 with master="split".
    Losses are near those of AdamW, not its bits; at any stage and dp they are the same where AdamW's are. Checkpoints
    have the moments in fp32, from which 8 bits are made again without a change. Arguments as of torch.optim.AdamW.
    Raises ConfigError. Source: blockwise.py.
    """
    if not (lr >= 0 and weight_decay >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
        raise ConfigError(
            f"adamw8bit: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: pass numbers from 0, and "
            "betas below 1."
        )
    return AdamW8bitRule({"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
