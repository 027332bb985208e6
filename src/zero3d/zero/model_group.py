"""One replica as one: what the ranks that share a model must agree on in a step.

    weight   targets are counted where the loss is, on the last pipeline stage, once for all its tp ranks
    order    a dp group that ran other units than its peers stops all
    norms    one per parameter, in model order over all pipeline stages: the vector, and so the bits, that one
             rank with the whole model has. Of a parameter cut over tp one per part; of any other tp rank 0's,
             and the others' must be alike: else the plan forgot that its gradients are parts
    ties     a parameter that two pipeline stages hold, each its copy: the gradients are summed, on both alike,
             and the copy's norm is left out; what is written into one is carried to the other
    partial  a parameter that all tp ranks hold, and whose gradient on each is a part: the parts are summed

Every dp rank has its own replica; of one rank all of this is the identity and sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import host_value
from zero3d.zero.unit import Unit

STRIDE = 1 << 24  # more than parameters of a model: a number for (segment, place)
APART = 0.01  # of a norm: more than an accelerator's order of sums can change


class Tied(NamedTuple):
    """A unit of one parameter that another pipeline stage holds, too.

    peer   its rank on the pp axis
    there  the unit itself where that is this rank (a V-shaped schedule)
    copy   the other one is the owner
    """

    unit: Unit
    peer: int
    there: Unit | None
    copy: bool


class Slices(NamedTuple):
    """What the tp axis does to parameters, by name: `cut` ones are other on every rank, the rest is the same.

    partial  of the rest, those whose gradients are parts of a sum over the tp ranks
    """

    tp: Comm
    cut: Collection[str] = ()
    partial: Collection[str] = ()


class Places(NamedTuple):
    """Where the norms of a replica are in [ranks, longest]; known from the first step on.

    rows, columns  of all of them, by segment and in model order
    segments       of each of them
    counted        [ranks, longest] 1.0, or 0.0 where another tp rank's norm of the same parameter counts
    common         [stages, longest] the parameter's place in the model; -1.0 where parts of it are on tp ranks
    """

    rows: list[int]
    columns: list[int]
    segments: list[int]
    counted: Tensor
    common: Tensor


class Peers:
    """Asks the ranks of a group, in its first step, which norms they have. A dry run has another one: nobody is there.

    A norm's code is 2 x (segment x STRIDE + the parameter's place in the model), plus 1 where tp cuts the parameter.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def norm_counts(self, count: int) -> list[int]:
        """Return how many norms every rank has, this one `count`; 8 bytes to each other rank."""
        return [int(number) for number in self._exchange([float(count)])]

    def norm_codes(self, codes: list[float]) -> list[float]:
        """Return the codes of every rank, one row after the other; this one's are filled up with -1 to the longest."""
        return self._exchange(codes)

    def _exchange(self, row: list[float]) -> list[float]:
        values = torch.tensor(row, dtype=torch.float64, device=self.comm.device)
        return host_value(self.comm.exchange(values).view(-1), row * self.comm.size)


class Replica:
    """The ranks that train one replica with this one.

    comm    all of them: pipeline stage by pipeline stage, each with its tp ranks
    across  the pp axis, which carries ties
    """

    def __init__(self, comm: Comm, across: Comm, slices: Slices, ties: Sequence[Tied] = ()) -> None:
        self._comm, self._across, self._slices, self._ties = comm, across, slices, ties
        self.peers = Peers(comm)
        self.copies = {tied.unit for tied in ties if tied.copy}
        self.tied = {tied.unit for tied in ties}
        self._places: Places | None = None
        self.longest = 0  # the most norms that one rank of the replica has; known from the first step on
        self.summed = 0  # elements of partial gradients that a step sums; likewise

    @property
    def traded(self) -> list[Unit]:
        """Units whose gradients are sent to another rank."""
        return [tied.unit for tied in self._ties if tied.there is None and tied.unit.grads is not None]

    @property
    def has_norms(self) -> bool:
        """Whether a step exchanges norms: false where all shards of this dp rank are padding."""
        return self._places is not None and bool(self._places.rows)

    @property
    def alone(self) -> bool:
        """This rank is the whole replica."""
        return self._comm.size == 1

    def exchange(self, values: Tensor) -> Tensor:
        """[k] -> [ranks, k] float64; 8 k bytes to each other rank."""
        return values[None] if self.alone else self._comm.exchange(values.double())

    def sum(self, values: Tensor) -> Tensor:
        """[k] -> [k] float64, summed over pipeline stages in order; of tp ranks, which agree, the first counts."""
        return values if self.alone else self.count_once(self.exchange(values)).sum(0)

    def count_once(self, rows: Tensor) -> Tensor:
        """Of [ranks, ...] those of the first tp rank of each pipeline stage."""
        return rows[:: self._slices.tp.size]

    def sum_partial(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """Add up the reduced gradients of partial parameters, by name; their shards to every other tp rank."""
        if self._slices.tp.size == 1:
            return
        parts = [grad for name, grad in grads if name in self._slices.partial]
        if not parts:
            return
        mine = torch.cat(parts)
        self.summed = mine.numel()
        total = self._slices.tp.exchange(mine).sum(0)
        for part, values in zip(parts, torch.split(total, [part.numel() for part in parts]), strict=True):
            part.copy_(values)

    def sum_ties(self) -> None:
        """Add up the reduced gradients of tied parameters; Psi/N elements to the peer for each."""
        for tied in self._ties:
            if tied.unit.grads is None:
                continue
            shard = tied.unit.gradients.shard
            if tied.there is None:
                shard.add_(self._across.trade(shard, tied.peer, tied.unit.name))
            elif not tied.copy:
                shard.add_(tied.there.gradients.shard)
                tied.there.gradients.shard.copy_(shard)

    def share_ties(self, written: Collection[Unit]) -> None:
        """Carry what was written into one copy of a tied parameter to the other; where both were, the owner's.

        All of `tied` are gathered. One number to the peer for each, and Psi/N elements of a written one.
        """
        for tied in self._ties:
            master = tied.unit.weights.master
            if tied.there is None:
                mine = torch.tensor([float(tied.unit in written)], dtype=torch.float64, device=self._across.device)
                theirs = self._across.trade(mine, tied.peer, tied.unit.name)
                own, other = float(mine) > 0, float(theirs) > 0
                if own or other:
                    values = self._across.trade(master, tied.peer, tied.unit.name)
                    if other and (tied.copy or not own):
                        _overwrite(tied.unit, values)
            elif tied.unit in written and not (tied.copy and tied.there in written):
                _overwrite(tied.there, master)

    def norm(self, parts: Sequence[tuple[int, str, Tensor]], dtype: torch.dtype) -> Tensor:
        """Of all gradients of the replica; `parts`: (place in the model, name, norm) of this rank's, in model order.

        -1 - k where tp ranks do not agree on parameter k, which they should have alike.
        """
        return self.norms([(0, *part) for part in parts], 1, dtype)[0]

    def norms(self, parts: Sequence[tuple[int, int, str, Tensor]], segments: int, dtype: torch.dtype) -> Tensor:
        """[segments]: as `norm`, of each segment alone. `parts`: (segment, place, name, norm), in this order."""
        norms = torch.stack([norm for *_, norm in parts] or [torch.zeros((), dtype=dtype, device=self._comm.device)])
        if self._places is None and not self.alone:
            self._places = self._arrange([(segment * STRIDE + place, name) for segment, place, name, _ in parts])
        if self._places is None or not self._places.rows:  # alone, or all of this dp rank's shards are padding
            return _lengths(norms, [segment for segment, *_ in parts], segments)
        mine = torch.zeros(self.longest, dtype=torch.float64, device=self._comm.device)
        mine[: len(parts)] = norms[: len(parts)].double()
        seen = self._comm.exchange(mine)
        counted = (seen * self._places.counted)[self._places.rows, self._places.columns]  # what is not finite stays so
        uneven = find_uneven(seen.view(-1, self._slices.tp.size, self.longest), self._places.common)
        lengths = _lengths(counted.to(dtype), self._places.segments, segments)
        return torch.where(uneven < 0, lengths, -1 - uneven.to(dtype))

    def _arrange(self, parts: Sequence[tuple[int, str]]) -> Places:
        """Places of all norms, which never change, from those of this rank's."""
        device, tp = self._comm.device, self._slices.tp.size
        self.longest = max(*self.peers.norm_counts(len(parts)), 1)
        told = [2.0 * place + (name in self._slices.cut) for place, name in parts]
        told += [-1.0] * (self.longest - len(parts))
        table = self.peers.norm_codes(told)
        found = [(*divmod(int(value), 2), *divmod(i, self.longest)) for i, value in enumerate(table) if value >= 0]
        counted = [[1.0] * self.longest for _ in range(self._comm.size)]
        common = [[-1.0] * self.longest for _ in range(self._comm.size // tp)]
        for place, cut, rank, column in found:
            if not cut:
                counted[rank][column] = float(rank % tp == 0)
                common[rank // tp][column] = float(place % STRIDE)
        order = sorted((place, rank, column) for place, _, rank, column in found)
        rows, columns = [rank for _, rank, _ in order], [column for *_, column in order]
        segments = [place // STRIDE for place, _, _ in order]
        masks = (torch.tensor(mask, dtype=torch.float64, device=device) for mask in (counted, common))
        return Places(rows, columns, segments, *masks)


def find_uneven(norms: Tensor, common: Tensor) -> Tensor:
    """The last parameter of which a stage's tp ranks have other norms, or -1.0; one that is not finite is passed over.

    norms   [stages, tp, longest]
    common  [stages, longest], see `Places`
    """
    low, high = norms.aminmax(dim=1)
    return common.where(high - low > APART * high, -1.0).amax()


def _lengths(norms: Tensor, segments: Sequence[int], count: int) -> Tensor:
    """[k] -> [count]: the norm of what has these norms, of each segment alone; `segments`: of each norm, ascending."""
    if not segments:
        return norms.new_zeros(count)
    found = Counter(segments)
    sizes = [found[segment] for segment in range(count)]
    return torch.stack([torch.linalg.vector_norm(part) for part in torch.split(norms, sizes)])


def _overwrite(unit: Unit, master: Tensor) -> None:
    """Give a gathered unit other values; (N-1)/N Psi elements over the dp axis above stage 0."""
    unit.weights.master.copy_(master)
    unit.weights.refresh().wait()
    if unit.weights.sharded:
        unit.weights.share()
