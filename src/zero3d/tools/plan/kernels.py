"""Seconds of a part's forward and backward on one rank: a roofline per matrix, attention, and what memory bounds.

    matrix product    flops / (e x peak) + bytes / bandwidth, for each weight; backward twice, once if frozen. Where a
                      machine was measured, e falls with the smallest side: e / (1 + half / side)
    packed matrix     and bytes that its decoding moves / bandwidth, forward and backward
    experts           the same of all experts that a rank reads, each source's rows apart; beyond one rank the busiest
                      has `imbalance` times the mean's rows; packed ones are computed once more in backward
    attention, flash  flops / (a x peak); backward 2.5 times (scores are computed again). a is of a causal mask, with
                      masked scores counted: without one, in towers, it is half, but where a machine was measured
    attention, eager  flops / (e/2 x peak) + 2.6 passes over the kept scores; backward twice
    mixers' kernels   flops as of flash attention, and bytes that they move / bandwidth (mixers.py); of these backward
                      twice
    the rest          what every kernel between products reads and writes, where a trace has counted that and kernels
                      run one by one; else (compiled blocks, closed forms) 2 passes over the bytes kept for the
                      backward (written, then read), backward 2 again
    a vision tower    the same, whole on every rank of tp and sp; backward as often as its products were traced to run,
                      none where it is frozen
    host              what launching the kernels takes beyond all of that, where they run one by one

e and a are what kernels reach of a card's peak; small matrices lose by their bytes. constants.py says
where the numbers are from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from zero3d.sequence.shares import Halo, Scanned
from zero3d.tools.plan.constants import VALUES, Values, constant, of_system
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.spec import ClusterSpec, Gpu, ModelSpec, Operations, ParallelPlan, Part

# Cards whose rates are known, by the start of their names; the longer of two starts is first.
CARDS = ("v100", "a100", "h100-96", "h100", "h200", "rtx", CPU)
OTHER_CARDS = "other cards"
BY_KERNEL = ("nf4", "nf4-double")
HOPPER = ("h100-96", "h100", "h200")
IMBALANCE = constant("experts", "imbalance")
APART = constant("step", "apart")
PRODUCTS = 3  # of a stack of experts, with what surrounds them: kernels for each source
FP8, MULTIPLE = "fp8", 16  # of model.linear; both sizes of its matrices are a multiple
SCALED = 2 + 2 + 1  # bytes that are moved to scale and round a value in bf16


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
    dispatch        seconds in which the host launches a kernel, where each is launched by itself
    decoded         bytes that are moved for each weight that is decoded before a product, by torch's operators
    decoded_nf4     the same by bitsandbytes' kernel, which decodes nf4 on a card
    counted         passes over memory and launches are as a trace has counted them
    fp8             matrix products in 8 bits over those in 16, quantising included
    odd_head        eager attention whose heads are not a multiple of 8 misses the tensor cores
    hopper          flash attention by kernels written for Hopper, over those that were not
    cards           rates by the start of a card's name
    """

    eager_passes: float
    rest_passes: float
    flash_backward: float
    launch: float
    dispatch: float
    decoded: float
    decoded_nf4: float
    fp8: float
    odd_head: float
    hopper: float
    cards: Mapping[str, CardRates]
    counted: bool = True

    @classmethod
    def of(cls, values: Values = VALUES) -> Kernels:
        """Read the constants."""
        cards = {name: CardRates(**of_system(name, values)) for name in (*CARDS, OTHER_CARDS)}
        numbers: dict[str, Any] = of_system("kernels", values)
        return cls(cards=cards, **numbers)

    def for_hopper(self) -> Kernels:
        """Return the constants where attention's kernels are those that were written for Hopper."""
        faster = {name: replace(self.cards[name], flash=self.hopper * self.cards[name].flash) for name in HOPPER}
        return replace(self, cards={**self.cards, **faster})

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


NO_WORK = Work(0.0, 0.0)


class PartWork(NamedTuple):
    """Seconds of one micro-batch through a part on one rank, by kind of kernel."""

    matrices: Work
    attention: Work
    rest: Work
    host: Work = NO_WORK

    @property
    def forward(self) -> float:
        """Return the seconds of the forward."""
        return sum(work.forward for work in self)

    @property
    def backward(self) -> float:
        """Return the seconds of the backward, nothing recomputed."""
        return sum(work.backward for work in self)


class Matrix(NamedTuple):
    """A weight that tokens are multiplied with: rows, columns, the dimension that tp cuts, and how many.

    packed  it is decoded before each product
    """

    shape: tuple[int, int]
    cut: int | None
    trainable: bool
    packed: bool
    many: int


class Stack(NamedTuple):
    """A layer's experts: their elements, the share of them that a token meets, and whether tp cuts them.

    packed  elements that are decoded before the products
    """

    elements: int
    share: float
    cut: bool
    trainable: bool
    packed: int = 0


class Shape(NamedTuple):
    """All of a part that its time depends on. dispatched: its operations where tokens are sent to experts."""

    kind: str
    matrices: tuple[Matrix, ...]
    operations: Operations
    head: int
    stack: Stack | None = None
    dispatched: Operations | None = None
    attends: bool = True
    convolutions: tuple[Halo, ...] = ()
    scans: tuple[Scanned, ...] = ()


class Divided(NamedTuple):
    """How a plan divides a part's work.

    sources  of rows that experts compute apart, 0 where nothing is dispatched; busy: rows of the busiest over the mean
    """

    tp: int
    sequence_parallel: bool
    ep: int
    sources: int
    busy: float

    @classmethod
    def of(cls, plan: ParallelPlan, busy: float = IMBALANCE) -> Divided:
        """Read it off a plan."""
        sources = (plan.ep if plan.mesh.experts == "exact" else 1) if plan.dispatches else 0
        return cls(plan.tp, plan.mesh.sequence_parallel, plan.ep, sources, busy)


class Digest(NamedTuple):
    """A model's parts, in order, alike ones the same object; all parameters, and those that get gradients.

    numels, stacked  parameters of each part, and of those experts
    width            bytes in which one of them is gathered, in a 16-bit run
    still            parameters of a frozen tower, which no backward uses
    """

    shapes: tuple[Shape, ...]
    numels: tuple[int, ...]
    stacked: tuple[int, ...]
    params: int
    trainable: int
    width: float
    still: int


@lru_cache(maxsize=8)
def digest(model: ModelSpec) -> Digest:
    """Digest a model's parts, alike ones as one object."""
    alike: dict[Shape, Shape] = {}
    met = model.chosen / model.experts if model.experts else 0.0
    listed = [_shape(part, model.hidden // max(1, model.heads), met) for part in model.parts]
    shapes = tuple(alike.setdefault(shape, shape) for shape in listed)
    numels = tuple(part.numel for part in model.parts)
    weights = [weight for part in model.parts for unit in part.units if not unit.copy_of for weight in unit.weights]
    packed = sum(weight.numel for weight in weights if weight.matrix is not None)
    width = 2.0 - packed / max(1, sum(numels))
    stacked, still = tuple(part.stacked for part in model.parts), sum(part.numel for part in model.parts if part.still)
    return Digest(shapes, numels, stacked, sum(numels), model.trainable, width, still)


def step_operations(model: ModelSpec, plan: ParallelPlan) -> float:
    """Return the operations of a step on all ranks, without those of recomputation."""
    tokens, known = plan.rows * plan.accumulate * plan.micro_batch * model.length, digest(model)
    passes = 2.0 + known.trainable / known.params  # a frozen weight's gradient is not computed: 4 N, not 6 N
    text, seeing = _operations_per_token(model)
    return tokens * (passes * text + seeing)


@lru_cache(maxsize=8)
def _operations_per_token(model: ModelSpec) -> tuple[float, float]:
    """Return the operations of a forward of the language model, and of a tower's forward and backward."""
    done = [(part.operations.matrices + part.operations.scores, part.operations.back) for part in model.parts]
    return sum(n for n, back in done if back is None), sum(n * (1 + back) for n, back in done if back is not None)


@lru_cache(maxsize=4096)
def _shape(part: Part, head: int, met: float) -> Shape:
    counts: dict[tuple[tuple[int, int], int | None, bool, bool], int] = {}
    for unit in part.units if part.kind != "embedding" else ():
        for weight in unit.weights:
            shape, packed = weight.matrix or weight.shape, weight.matrix is not None
            if len(shape) == 2 and not weight.stacked:
                key = (shape[0], shape[1]), weight.cut, weight.trainable, packed
                counts[key] = counts.get(key, 0) + 1
    matrices = tuple(Matrix(*key, many) for key, many in counts.items())
    return Shape(part.kind, matrices, part.operations, head, _stack(part, met), part.dispatched, *part.mixes)


def _stack(part: Part, met: float) -> Stack | None:
    """Return the experts of a part, if it has any. Biases, [experts, width], cost nothing."""
    stacks = [w for unit in part.units for w in unit.weights if w.stacked and len(w.matrix or w.shape) > 2]
    if not stacks:
        return None
    cut, trainable = (any(of(w) for w in stacks) for of in (lambda w: w.cut is not None, lambda w: w.trainable))
    packed = sum(prod(w.matrix) for w in stacks if w.matrix is not None)
    return Stack(packed + sum(w.numel for w in stacks if w.matrix is None), met, cut, trainable, packed)


def part_work(
    shape: Shape,
    model: ModelSpec,
    plan: ParallelPlan,
    cluster: ClusterSpec,
    speed: float = 1.0,
    kernels: Kernels = KERNELS,
    busy: float = IMBALANCE,
) -> PartWork:
    """Return the seconds of one micro-batch. speed: what a system's kernels reach of the card's rates.

    busy  rows of the busiest ep rank over those of the mean
    """
    return _part_work(shape, _run(model, plan, cluster, speed, kernels, busy))


def works(
    model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, speed: float, kernels: Kernels, busy: float = IMBALANCE
) -> tuple[PartWork, ...]:
    """Return the same of all parts of a model, in order."""
    return _works(model, _run(model, plan, cluster, speed, kernels, busy))


def faster_blocks(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with compiled blocks, if they take less time by more than predictions tell apart, else as it is.

    Where a machine's own steps were measured, or nobody counted kernels, both take as long.
    """
    if cluster.step is not None or cluster.gpu.name == CPU:
        return plan
    run = _run(model, plan, cluster, 1.0, KERNELS, IMBALANCE)
    return plan.having(compile=True) if _is_faster_compiled(model, run, _decoded(plan, True, cluster)) else plan


@lru_cache(maxsize=1024)
def _is_faster_compiled(model: ModelSpec, run: _Run, decoded: float) -> bool:
    blocks = [i for i, shape in enumerate(digest(model).shapes) if shape.kind == "block"]
    runs = run, run._replace(compiled=True, decoded=decoded)
    eager, compiled = (sum(sum(map(sum, of_parts[i])) for i in blocks) for of_parts in (_works(model, r) for r in runs))
    return compiled < (1 - APART) * eager


class _Run(NamedTuple):
    """Holds what the seconds of a part depend on, beside the part.

    whole   tokens of whole sequences
    narrow  what products gain by a narrow precision
    """

    tokens: int
    whole: int
    by: Divided
    gpu: Gpu
    speed: float
    narrow: float
    kernels: Kernels
    compiled: bool
    decoded: float
    linear: bool


def _run(
    model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, speed: float, kernels: Kernels, busy: float
) -> _Run:
    narrow = kernels.fp8 if plan.precision == "fp8" else 1.0
    tokens = plan.tokens(model.length)
    decoded = _decoded(plan, plan.compile, cluster, kernels)
    whole, how = plan.micro_batch * model.length, (kernels, plan.compile, decoded, plan.linear == FP8)
    return _Run(tokens, whole, Divided.of(plan, busy), cluster.gpu, speed, narrow, *how)


def _decoded(plan: ParallelPlan, compiled: bool, cluster: ClusterSpec, kernels: Kernels = KERNELS) -> float:
    """Return the bytes that are moved for each packed weight: compiled blocks do not call the kernel of a card."""
    by_kernel = plan.quantize in BY_KERNEL and cluster.gpu.name != CPU and not compiled
    return kernels.decoded_nf4 if by_kernel else kernels.decoded


@lru_cache(maxsize=1024)
def _works(model: ModelSpec, run: _Run) -> tuple[PartWork, ...]:
    alike = {id(shape): shape for shape in digest(model).shapes}
    found = {key: _part_work(shape, run) for key, shape in alike.items()}
    return tuple(found[id(shape)] for shape in digest(model).shapes)


@lru_cache(maxsize=4096)
def _part_work(shape: Shape, run: _Run) -> PartWork:
    tokens, whole, by, gpu, speed, narrow, kernels, compiled, decoded, linear = run
    rates, tp = kernels.rates_of(gpu), by.tp
    if shape.kind == "tower":
        tokens, tp = whole, 1
        by = by._replace(sequence_parallel=False)
    operations = shape.dispatched if by.sources and shape.dispatched is not None else shape.operations
    bandwidth, peak = rates.memory * gpu.bandwidth, rates.matrix * speed * gpu.flops
    routed = 0.0 if shape.stack is None else 2.0 * shape.stack.share * shape.stack.elements
    dense = operations.matrices - routed
    in_8_bits = kernels.fp8 if linear and shape.kind == "block" else 0.0
    reached = _Products(narrow * peak, bandwidth, kernels.launch, gpu.half, decoded, in_8_bits)
    counted = sum(2.0 * n * k * many for (n, k), *_, many in shape.matrices) if shape.kind == "tower" else 0.0
    if counted:  # rows are of patches, or of several as one
        matrices = _matrices(shape, counted, max(1, round(tokens * dense / counted)), tp, reached)
    else:
        matrices = _matrices(shape, dense, tokens, tp, reached)
    if operations.back is not None:
        matrices = Work(matrices.forward, operations.back * matrices.forward)
    if shape.stack is not None:
        experts = _experts(shape.stack, routed * tokens, by, reached)
        matrices = Work(*(a + b for a, b in zip(matrices, experts, strict=True)))
    flops = operations.scores * tokens / tp
    if operations.eager:
        slow = kernels.odd_head if shape.head % 8 else 1.0
        scores = 2 * flops / peak * slow + kernels.eager_passes * operations.attention * tokens / tp / bandwidth
        attention = Work(scores, 2 * scores)
    else:
        masked = 2.0 if shape.kind == "tower" and gpu.flash is None else 1.0
        flash = masked * flops / (rates.flash * speed * gpu.flops)
        attention = Work(flash, kernels.flash_backward * flash)
    moved = operations.moved * tokens / tp / bandwidth
    attention = Work(attention.forward + moved, attention.backward + 2 * moved)
    on_each = operations.kept_whole / (tp if by.sequence_parallel else 1)
    kept = operations.trained or (operations.kept_cut - operations.attention) / tp + on_each
    rest = Work(*[kernels.rest_passes * kept * tokens / bandwidth] * 2)
    if operations.back == 0:
        attention, rest = attention._replace(backward=0.0), rest._replace(backward=0.0)
    if not kernels.counted or compiled or not any(operations.launches):
        return PartWork(matrices, attention, rest)
    divided = operations.kept_cut / tp + on_each
    share = divided / (operations.kept_cut + operations.kept_whole) if divided else 1 / tp
    rest = Work(*(passed * share * tokens / bandwidth for passed in operations.passed))
    device = PartWork(matrices, attention, rest)
    launching = [kernels.dispatch * count for count in operations.launches]
    waits = (max(0.0, a - b) for a, b in zip(launching, (device.forward, device.backward), strict=True))
    return device._replace(host=Work(*waits))


class _Products(NamedTuple):
    """Bounds the time of matrix products: by operations and bytes per second, a kernel's launch, and small sides.

    half     the side of a square product at which a card reaches half of `peak`
    decoded  bytes moved for each weight that is decoded
    eighths  products of linear layers in 8 bits over those in 16; 0 where none are in 8 (model.linear)
    """

    peak: float
    bandwidth: float
    launch: float
    half: float
    decoded: float
    eighths: float


def _experts(stack: Stack, flops: float, by: Divided, rates: _Products) -> Work:
    """Time the products of a layer's experts: every rank reads its own once for each source of rows."""
    peak, bandwidth, launch, decoded = rates.peak, rates.bandwidth, rates.launch, rates.decoded
    # how many rows an expert gets is a router's to say, so none is called small
    tp = by.tp if stack.cut and not by.sources else 1
    read = 2.0 * stack.elements / tp * max(1, by.sources) / by.ep
    busy = by.busy if by.ep > 1 else 1.0
    forward = busy * flops / tp / peak + read / bandwidth + PRODUCTS * max(1, by.sources) * launch
    if stack.packed:  # a backward runs the forward again
        forward += decoded * stack.packed / tp / by.ep * max(1, by.sources) / bandwidth
        return Work(forward, 2 * forward)
    return Work(forward, forward * (2 if stack.trainable else 1))


def _matrices(shape: Shape, dense: float, tokens: int, tp: int, rates: _Products) -> Work:
    """Time all products with weights; `dense` operations beyond these (convolutions) run at the same rate."""
    peak, bandwidth, launch, half, decoded, eighths = rates
    forward = backward = counted = 0.0
    for (rows, columns), cut, trainable, packed, many in shape.matrices:
        n, k = rows // (tp if cut == 0 else 1), columns // (tp if cut == 1 else 1)
        reached = peak / (1 + half / min(tokens, n, k))
        counted += many * 2.0 * rows * columns
        if eighths and multiplies_in_fp8(rows, columns) and not packed:
            there, back = _in_8_bits(tokens, n, k, rates._replace(peak=eighths * reached))
            forward += many * there
            backward += many * (back if trainable else there)
            continue
        seconds = 2.0 * tokens * n * k / reached + 2.0 * (tokens * n + n * k + tokens * k) / bandwidth + launch
        seconds += decoded * n * k / bandwidth if packed else 0.0
        forward += many * seconds
        backward += many * seconds * (2 if trainable else 1)
    if not counted:
        return Work(dense * tokens / tp / peak, 2 * dense * tokens / tp / peak)
    scale = dense / counted
    return Work(forward * scale, backward * scale)


def multiplies_in_fp8(rows: int, columns: int) -> bool:
    """Return whether a linear layer of a block multiplies in fp8 under model.linear, by its sizes (models/fp8.py)."""
    return rows % MULTIPLE == columns % MULTIPLE == 0


def _in_8_bits(tokens: int, n: int, k: int, rates: _Products) -> Work:
    """Time a linear layer whose products are in 8 bits: forward, and both products of the backward.

    Each product's factors are scaled and rounded first: read for their largest value, read again, written as bytes.
    """
    inputs, weights, outputs = tokens * k, n * k, tokens * n
    product = 2.0 * tokens * n * k / rates.peak + rates.launch
    forward = (SCALED + 1) * (inputs + weights) + 2.0 * outputs
    backward = SCALED * (inputs + weights + outputs) + (3.0 * inputs + 3.0 * weights + 2.0 * outputs)
    return Work(product + forward / rates.bandwidth, 2 * product + backward / rates.bandwidth)


def total(works: Iterable[PartWork]) -> PartWork:
    """Sum parts that run one after the other."""
    listed = list(works)
    kinds = zip(*listed, strict=True) if listed else [()] * len(PartWork._fields)
    return PartWork(*(Work(sum(w.forward for w in kind), sum(w.backward for w in kind)) for kind in kinds))
