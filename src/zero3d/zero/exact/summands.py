"""The numbers of a step's micro-batches in the global list, and what follows from them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero3d.blueprint.layout import CANONICAL
from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.nested import tensors_in


class Summands:
    """Owns the numbers of this rank's micro-batches in the global list, and what follows from them.

    micro_batches  of a rank in the present step, which numbers need where gradients are reduced every step
    seed, batches  of dropout: rank 0's at construction, and steps so far, skipped ones too
    parts          ranks that share a sequence out: its parts are as many neighbours in the list
    rows           of a micro-batch, as `train_batch` saw it last, here or before a checkpoint
    """

    def __init__(self, comm: Comm, per_step: bool, micro_batches: int, seed: int, parts: int = 1) -> None:
        self.comm = comm
        self.per_step = per_step
        self.parts = parts
        self._usual = micro_batches
        self.seed, self.batches = seed, 0
        self.rows: int | None = None
        self.begin(micro_batches)

    def begin(self, micro_batches: int | None = None) -> None:
        """Begin a step of so many micro-batches, or of as many as usual. Raises ConfigError."""
        micro_batches = self._usual if micro_batches is None else micro_batches
        if self.per_step and micro_batches & (micro_batches - 1):
            raise ConfigError(
                "exact=True with reduce='every_step' sums a rank's micro-batches before those of others, in halves: "
                f"{micro_batches} per rank and step is not a power of two. Pass {1 << micro_batches.bit_length() - 1} "
                f"or {1 << micro_batches.bit_length()}, or reduce='every_micro_batch' (stages 2 and 3)."
            )
        if self.per_step and self.parts > 1 and micro_batches > 1:
            raise ConfigError(
                f"exact=True with mesh.sp and reduce='every_step' would sum {micro_batches} micro-batches of a rank "
                "before the other parts of their sequences: type zero.reduce=every_micro_batch (stages 2 and 3), or "
                "one micro-batch per step (train.accumulate=1)."
            )
        self.micro_batches = micro_batches

    def see(self, batch: Any) -> None:
        """Warn if a step's first micro-batch is not of the size of those before."""
        rows = next((len(t) for t in tensors_in(batch) if t.dim()), None)
        if rows != self.rows and None not in (rows, self.rows):
            warnings.warn(
                f"exact=True: micro-batches had {self.rows} rows and have {rows} now, and matrix products of other "
                "shapes have other bits: the curve is not that of the run before.",
                stacklevel=4,
            )
        self.rows = rows

    def end(self, count: int) -> None:
        """End a step that had `count` micro-batches on this rank. Raises ConfigError if it was to have others."""
        wanted = self.micro_batches
        if self.per_step and count != wanted:
            raise ConfigError(
                f"exact=True with reduce='every_step' needs to know how many micro-batches a rank's step has, to "
                f"number them: this one had {count}, and was to have {wanted}. Pass Engine(accumulate={count}), or "
                "call engine.train_batch(micro_batches)."
            )
        self.batches += 1

    @property
    def per_batch(self) -> int:
        """Micro-batches of a usual step, over all ranks."""
        return self._usual * self.comm.size // self.parts

    def state(self, tp: int, pp: int) -> dict[str, Any]:
        """Return the state for a checkpoint; `covers`: degrees and rows with which a resumed run has the same bits."""
        rows = [1 << i for i in range(CANONICAL.bit_length()) if self.per_batch % (1 << i) == 0]
        fits = [n * self.parts for n in rows if n * self.parts <= CANONICAL]
        covers = {"dp": fits, "tp": tp, "pp": pp, "rows": self.rows}
        return {"seed": self.seed, "batches": self.batches, "covers": covers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.seed = int(state["seed"])
        self.batches = int(state["batches"])
        self.rows = state["covers"]["rows"]

    def number(self, k: int) -> int:
        """Return the number of this rank's k-th micro-batch in the global list."""
        return self.comm.rank * self.micro_batches + k if self.per_step else k * self.comm.size + self.comm.rank

    def draw(self, k: int, chunk: int = 0) -> None:
        """Seed torch for the forward of this rank's k-th micro-batch through a model chunk."""
        name = f"{self.seed} {self.batches} {self.number(k)} {chunk}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))

    def sum_of(
        self, losses: Sequence[tuple[Tensor, float | Tensor]], micro_batches: int, per_step: bool | None
    ) -> Tensor:
        """Return [2], sum and weight of all ranks' micro-batches; `losses`: of this rank's, all of them or none."""
        values = torch.zeros(micro_batches, 2, dtype=torch.float64, device=self.comm.device)
        for row, (total, weight) in zip(values, losses, strict=False):
            row[0], row[1] = total.detach().double(), weight
        return self.total(self.comm.exchange(values.flatten()).view(-1, micro_batches, 2), per_step)

    def total(self, values: Tensor, per_step: bool | None = None) -> Tensor:
        """Return the sum [...] in the tree over all ranks' micro-batches [N, M, ...]."""
        contiguous = self.per_step if per_step is None else per_step
        rows = (values if contiguous else values.transpose(0, 1)).flatten(0, 1)
        size = 1 << (len(rows) - 1).bit_length()
        rows = torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
        while len(rows) > 1:
            rows = rows[0::2] + rows[1::2]
        return rows[0]


def check_exact(n: int) -> None:
    """Raise ConfigError for a dp degree at which sums would have other bits."""
    if n & (n - 1) or CANONICAL % n:
        near = [str(1 << n.bit_length() - 1), str(1 << n.bit_length())]
        ways = " or ".join(f"dp={degree}" for degree in near if int(degree) <= CANONICAL) or f"dp={CANONICAL}"
        raise ConfigError(
            f"exact=True cuts a sum in halves and a unit in {CANONICAL} cells: dp={n} must be a power of two that "
            f"divides {CANONICAL}, and {CANONICAL} / {n} = {CANONICAL / n:.4g}. Pass {ways}, or exact=False."
        )
