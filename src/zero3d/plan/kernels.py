"""Seconds of a part's forward and backward on one rank: a roofline per matrix, attention, and what memory bounds.

    matrix product    flops / (e x peak) + bytes / bandwidth, for each weight; backward twice, once if frozen
    attention, flash  flops / (a x peak); backward 2.5 times (scores are computed again)
    attention, eager  flops / (e/2 x peak) + 2.6 passes over the kept scores; backward twice
    the rest          2 passes over the bytes kept for the backward (written, then read); backward 2 again

e and a are what kernels reach of a card's peak; small matrices lose by their bytes. constants.py says
where the numbers are from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from zero3d.plan.constants import VALUES, Values, of_system
from zero3d.plan.spec import ClusterSpec, Gpu, ModelSpec, Operations, ParallelPlan, Part

CARDS = ("v100", "a100", "h100", "h200", "cpu")  # whose rates are known, by the start of a card's name
OTHER_CARDS = "other cards"


@dataclass(frozen=True)
class CardRates:
    """Rates that kernels reach: fractions of a card's peak (matrix products, flash attention) and of its bandwidth."""

    matrix: float
    flash: float
    memory: float


@dataclass(frozen=True, eq=False)
class Kernels:
    """The constants of kernels' time. Equal to itself alone: a key of caches.

    eager_passes    over kept scores, in eager attention
    rest_passes     over what is kept for the backward
    flash_backward  of flash attention, of its forward
    launch          seconds per kernel, where the device waits for the host
    fp8             matrix products in 8 bits over those in 16, quantising included
    odd_head        eager attention whose heads are no multiple of 8 misses the tensor cores
    cards           rates by the start of a card's name
    """

    eager_passes: float
    rest_passes: float
    flash_backward: float
    launch: float
    fp8: float
    odd_head: float
    cards: Mapping[str, CardRates]

    @classmethod
    def of(cls, values: Values = VALUES) -> Kernels:
        """Read the constants."""
        cards = {name: CardRates(**of_system(name, values)) for name in (*CARDS, OTHER_CARDS)}
        return cls(cards=cards, **of_system("kernels", values))

    def rates_of(self, gpu: Gpu) -> CardRates:
        """Return a card's rates, or those that `zero3d calibrate` measured (its bandwidth is a measured one)."""
        if gpu.matrix is not None and gpu.flash is not None:
            return CardRates(gpu.matrix, gpu.flash, 1.0)
        return self.cards[next((name for name in CARDS if gpu.name.startswith(name)), OTHER_CARDS)]


KERNELS = Kernels.of()


class Work(NamedTuple):
    """Seconds of one kind of kernel, forward and backward."""

    forward: float
    backward: float


class PartWork(NamedTuple):
    """Seconds of one micro-batch through a part on one rank, by kind of kernel."""

    matrices: Work
    attention: Work
    rest: Work

    @property
    def forward(self) -> float:
        """Return the seconds of the forward."""
        return sum(work.forward for work in self)

    @property
    def backward(self) -> float:
        """Return the seconds of the backward, nothing recomputed."""
        return sum(work.backward for work in self)


class Matrix(NamedTuple):
    """A weight that tokens are multiplied with: rows, columns, the dimension that tp cuts, and how many."""

    shape: tuple[int, int]
    cut: int | None
    trainable: bool
    many: int


class Shape(NamedTuple):
    """All of a part that its time depends on."""

    kind: str
    matrices: tuple[Matrix, ...]
    operations: Operations
    head: int


class Digest(NamedTuple):
    """A model's parts, in order, alike ones the same object; all parameters, and those that get gradients."""

    shapes: tuple[Shape, ...]
    numels: tuple[int, ...]
    params: int
    trainable: int


@lru_cache(maxsize=8)
def digest(model: ModelSpec) -> Digest:
    """Digest a model's parts, alike ones as one object."""
    alike: dict[Shape, Shape] = {}
    listed = [_shape(part, model.hidden // model.heads) for part in model.parts]
    shapes = tuple(alike.setdefault(shape, shape) for shape in listed)
    numels = tuple(part.numel for part in model.parts)
    return Digest(shapes, numels, sum(numels), model.trainable)


def _shape(part: Part, head: int) -> Shape:
    counts: dict[tuple[tuple[int, int], int | None, bool], int] = {}
    for unit in part.units if part.kind != "embedding" else ():
        for weight in unit.weights:
            if len(weight.shape) == 2:
                key = (weight.shape[0], weight.shape[1]), weight.cut, weight.trainable
                counts[key] = counts.get(key, 0) + 1
    return Shape(part.kind, tuple(Matrix(*key, many) for key, many in counts.items()), part.operations, head)


def part_work(
    shape: Shape,
    model: ModelSpec,
    plan: ParallelPlan,
    cluster: ClusterSpec,
    speed: float = 1.0,
    kernels: Kernels = KERNELS,
) -> PartWork:
    """Return the seconds of one micro-batch. speed: what a system's kernels reach of the card's rates."""
    narrow = kernels.fp8 if plan.precision == "fp8" else 1.0
    tokens = plan.micro_batch * model.length
    return _part_work(shape, tokens, plan.tp, plan.sequence_parallel, cluster.gpu, speed, narrow, kernels)


@lru_cache(maxsize=4096)
def _part_work(
    shape: Shape, tokens: int, tp: int, sequence_parallel: bool, gpu: Gpu, speed: float, narrow: float, kernels: Kernels
) -> PartWork:
    rates, operations = kernels.rates_of(gpu), shape.operations
    bandwidth, peak = rates.memory * gpu.bandwidth, rates.matrix * speed * gpu.flops
    matrices = _matrices(shape, tokens, tp, narrow * peak, bandwidth, kernels.launch)
    flops = operations.scores * tokens / tp
    if operations.eager:
        slow = kernels.odd_head if shape.head % 8 else 1.0
        scores = 2 * flops / peak * slow + kernels.eager_passes * operations.attention * tokens / tp / bandwidth
        attention = Work(scores, 2 * scores)
    else:
        flash = flops / (rates.flash * speed * gpu.flops)
        attention = Work(flash, kernels.flash_backward * flash)
    whole = operations.kept_whole / (tp if sequence_parallel else 1)
    kept = (operations.kept_cut - operations.attention) / tp + whole
    rest = kernels.rest_passes * kept * tokens / bandwidth
    return PartWork(matrices, attention, Work(rest, rest))


def _matrices(shape: Shape, tokens: int, tp: int, peak: float, bandwidth: float, launch: float) -> Work:
    """Time all products with weights; operations beyond these (routed experts, convolutions) run at the same rate."""
    forward = backward = counted = 0.0
    for (rows, columns), cut, trainable, many in shape.matrices:
        n, k = rows // (tp if cut == 0 else 1), columns // (tp if cut == 1 else 1)
        seconds = 2.0 * tokens * n * k / peak + 2.0 * (tokens * n + n * k + tokens * k) / bandwidth + launch
        forward += many * seconds
        backward += many * seconds * (2 if trainable else 1)
        counted += many * 2.0 * rows * columns
    if not counted:
        return Work(shape.operations.matrices * tokens / tp / peak, 2 * shape.operations.matrices * tokens / tp / peak)
    scale = shape.operations.matrices / counted
    return Work(forward * scale, backward * scale)


def total(works: Iterable[PartWork]) -> PartWork:
    """Sum parts that run one after the other."""
    listed = list(works)
    return PartWork(*(Work(sum(w[i].forward for w in listed), sum(w[i].backward for w in listed)) for i in range(3)))
