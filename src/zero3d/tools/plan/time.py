"""Seconds of a step, and what they are made of.

compute      matrices, attention, rest of the rank that works most (kernels.py)       x micro-batches
recompute    its forwards that run again
tower        forward, backward and recomputation of a vision tower, on the pipeline's first rank
experts      rows to their experts and results back, the counts before them, there and back again; again where
             recomputed. Nothing hides them
sp           rows for heads of whole sequences, or keys and values of them, around every attention, there and back;
             again where recomputed; losses; scans more where states of recurrences pass. Nothing hides them
tp           all-reduces in forward and backward, and again where recomputed; what of them is not hidden. Gathers of
             inputs that are kept in parts
inputs       of recomputed blocks on their way to the host behind a forward, and back behind a backward, beyond these
bubble       the schedule's end less that rank's work: waits and hops (timeline.py)
dp           gradients out, parameters in, of experts over those ranks that have the same ones; at stage 3 per unit and
             micro-batch; what backward does not hide. Sums over copies of shards, which the last backward of a step
             hides but for the last IN_FLIGHT units' (in pipelines and exact mode nothing does), and the passes over
             memory in which blocks are decoded
optimizer    bytes of states read and written, by the card's memory; Muon's products, or what it sends if that is slower
offload      records that leave the device, and updates on the host, beyond the next forward; weights that are read for
             gathers and gradients that leave the device, beyond all computation (tier_time.py)
replay       of one micro-batch more in every so many steps: its way through all pipeline stages alone, units gathered
             for it, and all gradients of both read twice for their hashes. It holds no memory beside a step's
fixed        a system's own per step and micro-batch: launching, data, logging
stragglers   waits for another node that is slower than most, as likely as there are nodes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from zero3d.account.traffic import gathered_width
from zero3d.account.transients import cast_bytes, reduction_of, sum_over_copies
from zero3d.activations.policy import Policy
from zero3d.distributed.block_bytes import BITS, BLOCK, CODE_BITS, NARROW, all_get_terms, block_bytes, term_bytes
from zero3d.distributed.choice import REDUCTIONS
from zero3d.distributed.degrees import EXPERT_SHARD
from zero3d.distributed.unit_order import IN_FLIGHT
from zero3d.memory.scratch import update_bucket
from zero3d.sequence.choice import weigh
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import ADAMW, OPTIMIZERS
from zero3d.spec.tiers import HOST
from zero3d.spec.zero import SAME, Zero
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.decided import algorithm_on, policy_of, policy_of_others, usual_unit
from zero3d.tools.plan.footprint import tiles_loss
from zero3d.tools.plan.inputs import in_parts, input_seconds
from zero3d.tools.plan.kernels import IMBALANCE, KERNELS, Kernels, PartWork, Shape, digest, total, works
from zero3d.tools.plan.matrices import operations_of, traffic as matrix_traffic
from zero3d.tools.plan.network import (
    Group,
    Groups,
    exchange_seconds,
    gather_seconds,
    neighbours_seconds,
    reduce_seconds,
    send_seconds,
)
from zero3d.tools.plan.rank_model import chunks_of
from zero3d.tools.plan.sequence import exchanged, kinds_of_scans, mixers_of, scanned_again
from zero3d.tools.plan.spec import PLAIN, ClusterSpec, MeasuredStep, ModelSpec, ParallelPlan, Seconds
from zero3d.tools.plan.states import without_sequences
from zero3d.tools.plan.tier_time import gradient_seconds, read_seconds, update_seconds
from zero3d.tools.plan.timeline import pipeline_seconds

WORKING = ("matrices", "attention", "rest", "recompute", "tower", "experts", "sp", "tp", "host", "inputs")
Collective = Callable[[float, Group, ClusterSpec], float]
CODING = constant("links", "coding")
SLOW, SLOWER = constant("nodes", "slow"), constant("nodes", "slower")
ONCE = 1 / 3  # of a block's forward and backward, which a frozen tower's has the first of
UNCERTAIN = constant("step", "low"), constant("step", "high")  # of mid
MEASURED = ("matrices", "attention", "rest", "recompute", "host", "optimizer", "fixed")  # what a run on few GPUs fixes


class Cut(NamedTuple):
    """Cuts a pipeline into chunks.

    embedding, head  what these count for, in blocks; None: the head for its product over those of a block
    filled           all chunks but the last are as long as the longest; else they are as even as can be
    """

    embedding: float = 0.0
    head: float | None = 0.0
    filled: bool = False


EVENLY = Cut()


@dataclass(frozen=True)
class Pace:
    """The constants of a system's time.

    speed      of its kernels, of the card's rates; 1 unless fitted. By the start of a card's name
    hide_dp    fraction of the data axis' communication that computation hides, if there is as much of it
    slow_tp    seconds of tp's all-reduces, of those that links take: each is waited for by a host that launches it
    hide_tp    fraction of tp's all-reduces that runs beside products
    unit_hops  at stage 3, gathers per unit and pass (1: a unit travels as one; 12: each parameter of its own)
    bucket     gradients that are reduced together, a unit's if that has fewer
    all_sum    gradients are summed on all ranks, though each updates a part of the parameters alone
    block      seconds per block and micro-batch that the host adds: synchronising, checkpointing
    blocking   ranks wait while they pass activations on, so that a hop is part of every forward and backward
    again      of the blocks' forward, what "selective" runs again; None: attention alone
    balanced   by force all experts get equally many rows
    hide_ep    fraction of rows' ways to their experts and back that runs beside products
    forced     by force all experts get equally many rows, a token's being neighbours: its row goes to their node once
    cut        how its pipelines are cut
    update     seconds of an update, of those that the bytes of its states take
    fixed      seconds per step
    as_zero3d  in pipelines, gathered parameters and unreduced gradients stay for the step
               (`blueprint/policy.py`), every tp rank passes whole hidden states on, and recomputation ends before a
               block's last all-reduce
    kernels    what kernels take
    """

    speed: dict[str, float] = field(hash=False)
    hide_dp: float = 0.0
    hide_tp: float = 0.0
    slow_tp: float = 1.0
    unit_hops: float = 1.0
    bucket: float = inf
    all_sum: bool = False
    block: float = 0.0
    blocking: bool = False
    again: float | None = None
    balanced: bool = False
    hide_ep: float = 0.0
    forced: bool = False
    cut: Cut = EVENLY
    update: float = 1.0
    fixed: float = constant("step", "fixed")
    as_zero3d: bool = False
    kernels: Kernels = KERNELS

    def speed_on(self, gpu: str) -> float:
        """Return the speed on a card."""
        return next((speed for name, speed in self.speed.items() if gpu.startswith(name)), 1.0)


def part_indices(model: ModelSpec, ranks: int, virtual: int = 1, cut: Cut = EVENLY) -> list[list[int]]:
    """Return the model's parts per chunk: its blocks as `cut` says; embedding first, head last."""
    blocks = [i for i, part in enumerate(model.parts) if part.kind == "block"]
    first = [i for i, part in enumerate(model.parts) if part.kind in ("embedding", "tower")]
    last = [i for i, part in enumerate(model.parts) if part.kind == "head"]
    count = ranks * virtual
    before, behind = cut.embedding, _head_in_blocks(model) if cut.head is None else cut.head
    total = before + len(blocks) + behind
    total = count * ceil(total / count) if cut.filled else total
    bounds = [min(len(blocks), max(0, int(total * i / count - before))) for i in range(count)] + [len(blocks)]
    if cut == EVENLY and model.patches:  # the first chunk has fewer blocks for its tower
        lengths = (sum(part.kind == "block" for part in chunk) for chunk in chunks_of(model, count))
        bounds = list(accumulate(lengths, initial=0))
    chunks = [blocks[bounds[i] : bounds[i + 1]] for i in range(count)]
    chunks[0] = first + chunks[0]
    chunks[-1] = chunks[-1] + last
    return chunks


def _head_in_blocks(model: ModelSpec) -> float:
    """Return the head's product in those of a block."""
    head, block = model.parts[-1].operations, model.blocks[0].operations
    return head.matrices / block.matrices


class Dealt(NamedTuple):
    """A model's parts dealt out: by chunk, and which chunks are alike.

    chunks  `part_indices`
    alike   of each chunk a number, equal for those that run the same
    unlike  one chunk of each number, and that
    """

    chunks: list[list[int]]
    alike: list[int]
    unlike: dict[int, int]


@lru_cache(maxsize=256)
def dealt(model: ModelSpec, ranks: int, virtual: int, cut: Cut = EVENLY) -> Dealt:
    """Deal out a model's parts."""
    chunks, shapes = part_indices(model, ranks, virtual, cut), digest(model).shapes
    numbers: dict[tuple[int, ...], int] = {}
    alike = [numbers.setdefault(tuple(id(shapes[i]) for i in chunk), len(numbers)) for chunk in chunks]
    return Dealt(chunks, alike, {alike.index(number): number for number in numbers.values()})


@dataclass(frozen=True)
class _Step:
    """A plan on a cluster, as all terms of its step need it."""

    model: ModelSpec
    plan: ParallelPlan
    cluster: ClusterSpec
    pace: Pace
    groups: Groups

    @property
    def tokens(self) -> int:
        """Count the tokens of a micro-batch that a rank computes."""
        return self.plan.tokens(self.model.length)


def step_seconds(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, pace: Pace) -> Seconds:
    """Time a step of `accumulate` micro-batches on each of dp model-parallel groups, low to high."""
    if pace.as_zero3d and cluster.step is not None:
        pace = _measured(pace, cluster.step)
    step = _Step(model, plan, cluster, pace, Groups.of(plan, cluster))
    passes = _passes(model, _computing_key(plan), cluster, pace)
    parts = dict(passes.parts)
    share = _share(model, (plan.pp, plan.virtual, plan.tp, plan.ep), pace.cut)
    parts["dp"] = _data(step, share, passes.end, plan.accumulate * passes.backward)
    parts |= _update(step, share, (passes.forward, passes.forward + passes.backward))
    if plan.replay:
        kind = plan.schedule if plan.virtual > 1 else "gpipe"
        once = pipeline_seconds(kind, *passes.by_chunk, 1, plan.pp, passes.hop)
        parts["replay"] = (once + _besides_replay(step, sum(share), once)) / plan.replay
    parts["fixed"] = pace.fixed
    if waits := straggling(plan, cluster):
        parts["stragglers"] = waits * sum(parts.values())
    mid = sum(parts.values())
    low, high = (each - 1 for each in UNCERTAIN)
    fixed = 0.0 if cluster.spread is None else sum(parts[kind] for kind in MEASURED if kind in parts)
    spread = fixed * (cluster.spread or 0.0)
    return Seconds(mid + low * (mid - fixed) - spread, mid, mid + high * (mid - fixed) + spread, parts)


def straggling(plan: ParallelPlan, cluster: ClusterSpec) -> float:
    """Return what a step waits for the slowest of its nodes, as a share of what it takes beside; 0 on one node."""
    others = ceil(plan.world / cluster.per_node) - 1
    return SLOWER * (1 - (1 - SLOW) ** others)


@lru_cache(maxsize=64)
def _measured(pace: Pace, step: MeasuredStep) -> Pace:
    """Return the pace with what a machine's own steps took in place of its constants."""
    found = asdict(step)
    kernels = replace(pace.kernels, rest_passes=found.pop("rest_passes"), counted=False)
    return replace(pace, kernels=kernels, **found)


class Passes(NamedTuple):
    """Seconds of all forwards and backwards of a step, whatever the data axis does.

    forward, backward  a micro-batch's, of the pipeline rank that works most
    by_chunk           the same of every chunk, with the waits of a system that waits for hops
    hop, end           from one chunk to the next, and until the last backward is over
    parts              what that rank does meanwhile, and its waits
    """

    forward: float
    backward: float
    by_chunk: tuple[list[float], list[float]]
    hop: float
    end: float
    parts: Mapping[str, float]


def _computing_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all whose forwards and backwards take as long: however states are held and updated."""
    zero, offload, mesh = _computing_sections(plan.zero.exact, plan.offload.activations, plan.mesh)
    return plan.having(
        zero=zero, offload=offload, mesh=mesh, optimizer=ADAMW, ema=None, replay=0, asynchronous_saves=False
    )


@lru_cache(maxsize=4096)
def _computing_sections(exact: bool, inputs: str, mesh: Mesh) -> tuple[Zero, Offload, Mesh]:
    return Zero(exact=exact), Offload(activations=inputs), replace(mesh, shard=None)


@lru_cache(maxsize=4096)
def _passes(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, pace: Pace) -> Passes:
    """Time the forwards and backwards of a step. plan: a `_computing_key`."""
    step = _Step(model, plan, cluster, pace, Groups.of(plan, cluster))
    known, speed = digest(model), pace.speed_on(cluster.gpu.name)
    busy = 1.0 if pace.forced or pace.balanced else IMBALANCE
    of_parts = works(model, plan, cluster, speed, pace.kernels, busy)
    cut = dealt(model, plan.pp, plan.virtual, pace.cut)
    timed = {
        parts: _part_terms(step, [(known.shapes[i], of_parts[i]) for i in cut.chunks[chunk]])
        for chunk, parts in cut.unlike.items()
    }
    terms = [timed[parts] for parts in cut.alike]
    forward, backward = [t["forward"] for t in terms], [t["backward"] for t in terms]
    hop = _hop(step) if plan.pp > 1 else 0.0
    waits, hop = (hop, 0.0) if pace.blocking else (0.0, hop)
    passing = [f + waits for f in forward], [b + waits for b in backward]
    end = pipeline_seconds(plan.schedule, *passing, plan.accumulate, plan.pp, hop)
    of_rank = [(sum(forward[rank :: plan.pp]), sum(backward[rank :: plan.pp])) for rank in range(plan.pp)]
    rank = max(range(plan.pp), key=lambda rank: sum(of_rank[rank]))
    parts = {name: plan.accumulate * sum(term[name] for term in terms[rank :: plan.pp]) for name in WORKING}
    if not model.patches:
        del parts["tower"]
    parts["bubble"] = end - sum(parts.values())
    return Passes(*of_rank[rank], passing, hop, end, parts)


class Share(NamedTuple):
    """Parameters of a rank: of what dp cuts, and of experts that are cut over fewer ranks."""

    dense: float
    experts: float


@lru_cache(maxsize=1024)
def _share(model: ModelSpec, degrees: tuple[int, int, int, int], cut: Cut) -> Share:
    """Return the parameters of the rank that has most. degrees: pp, virtual, tp and ep."""
    pp, virtual, tp, ep = degrees
    known, chunks = digest(model), part_indices(model, pp, virtual, cut)

    def of_rank(rank: int) -> Share:
        parts = [i for chunk in chunks[rank::pp] for i in chunk]
        stacked = sum(known.stacked[i] for i in parts) if ep > 1 else 0
        return Share((sum(known.numels[i] for i in parts) - stacked) / tp, stacked / ep)

    return max((of_rank(rank) for rank in range(pp)), key=sum)


def _part_terms(step: _Step, inside: Sequence[tuple[Shape, PartWork]]) -> dict[str, float]:
    """Time one micro-batch through a model chunk."""
    work, seeing = total(w for s, w in inside if s.kind != "tower"), total(w for s, w in inside if s.kind == "tower")
    kinds = [shape.kind for shape, _ in inside]
    policy = Policy.of(step.plan.activations)
    unlike = {id(shape): (shape, w) for shape, w in inside}  # an equal one is the same object, with the same work
    repeats = {key: _again(policy.kind, shape, w, step.pace) for key, (shape, w) in unlike.items()}
    recompute = sum([repeats[id(shape)] for shape, _ in inside if shape.kind == "block"])
    seen_again = sum([repeats[id(s)] for s, _ in inside if s.kind == "tower" and s.operations.input])
    if tiles_loss(step.model, step.plan):  # a tile's logits are made again
        recompute += sum(w.matrices.forward for shape, w in inside if shape.kind == "head")
    seen = step.pace.slow_tp * (1 - step.pace.hide_tp)
    tp = seen * reduce_seconds(2.0 * step.tokens * step.model.hidden, step.groups.tp, step.cluster)
    again = 0.5 if step.pace.as_zero3d else 1.0
    passes = 2 + again if policy.kind in ("full", "every") else 2
    whole_experts = sum(shape.stack is not None for shape, _ in inside) if step.plan.dispatches else 0
    exposed = (2 * kinds.count("block") - whole_experts) * tp
    ends = tp * (kinds.count("embedding") + kinds.count("head"))
    looking = [1.0 if shape.operations.back else ONCE for shape, _ in inside if shape.kind == "tower"][1:-1]
    host = step.pace.block * (kinds.count("block") + sum(looking))
    sent = sum(shape.stack is not None for shape, _ in inside) * _rows(step)
    inputs, whole = ceil(kinds.count("block") / (policy.every or 1)), 2.0 * step.tokens * step.model.hidden
    partial = inputs * gather_seconds(whole, step.groups.tp, step.cluster) if in_parts(step.plan) else 0.0
    blocks = [shape for shape, _ in inside if shape.kind == "block"]
    shared, losses = sum(_mixing_seconds(step, block) for block in blocks), kinds.count("head") * _loss_seconds(step)
    shared_again = shared if policy.kind != "none" else 0.0
    forward = work.forward + seeing.forward + exposed + ends + host + sent + shared + losses
    repeated = sent if policy.kind in ("full", "every") else 0.0
    backward = (
        work.backward
        + seeing.backward
        + seen_again
        + recompute
        + (passes - 1) * exposed
        + ends
        + partial
        + sent
        + repeated
    )
    backward += shared + shared_again
    on_link = inputs * input_seconds(step.model, step.plan, step.cluster)
    late = [max(0.0, on_link - seconds) for seconds in (forward, backward)]  # down, and up again
    forward, backward = forward + late[0], backward + late[1]
    return {
        "forward": forward,
        "backward": backward,
        "matrices": work.matrices.forward + work.matrices.backward,
        "attention": work.attention.forward + work.attention.backward,
        "rest": work.rest.forward + work.rest.backward,
        "recompute": recompute,
        "tower": seeing.forward + seeing.backward + seen_again,
        "experts": 2 * sent + repeated,
        "sp": 2 * shared + shared_again + losses,
        "tp": passes * exposed + 2 * ends + partial,
        "host": host + work.host.forward + work.host.backward,
        "inputs": sum(late),
    }


def _rows(step: _Step) -> float:
    """Return the seconds in which a layer's rows reach their experts and the results come back."""
    plan, group = step.plan, step.groups.ep
    if plan.ep == 1:
        return 0.0
    rows = float(plan.compute.itemsize * step.tokens * step.model.hidden)
    counts = exchange_seconds(8.0 * step.model.experts * plan.ep, group, step.cluster)
    if step.pace.forced:
        reached = ceil(step.model.chosen * plan.ep / step.model.experts)
        return counts + 2 * neighbours_seconds(rows, reached, group, step.cluster)
    busy = 1.0 if step.pace.balanced else IMBALANCE
    return counts + (1 - step.pace.hide_ep) * 2 * exchange_seconds(busy * rows * step.model.chosen, group, step.cluster)


def _mixing_seconds(step: _Step, block: Shape) -> float:
    """Return the seconds in which rows for a block's attention and scans reach an sp group, and what they make returns.

    Halos of convolutions, of a few tokens, are nothing. Where states of recurrences pass, half of the seconds of the
    scans more, forward and backward, is here.
    """
    if step.plan.sp == 1:
        return 0.0
    parts = exchanged(step.model, step.plan, block.attends, block.scans)
    again = scanned_again(step.model, step.plan, block.scans) / _scanning(step.cluster, step.pace.kernels)
    return sum(exchange_seconds(nbytes, step.groups.sp, step.cluster) for nbytes in parts) + again / 2


def _scanning(cluster: ClusterSpec, kernels: Kernels) -> float:
    """Return the operations a second of a device's scans."""
    return kernels.rates_of(cluster.gpu).flash * cluster.gpu.flops


def _loss_seconds(step: _Step) -> float:
    """Return the seconds in which losses of rows reach all ranks of an sp group."""
    return gather_seconds(4.0 * step.plan.micro_batch * step.model.length, step.groups.sp, step.cluster)


def _again(kind: str, shape: Shape, work: PartWork, pace: Pace) -> float:
    """Return the seconds of a block's forward that a policy runs again."""
    if kind == "none":
        return 0.0
    if kind != "selective":
        return work.forward
    if pace.again is not None:
        return pace.again * work.forward
    operations = shape.operations
    projections = operations.again / operations.matrices if operations.matrices else 0.0
    return work.attention.forward + projections * work.matrices.forward


def _hop(step: _Step) -> float:
    """Return the seconds of a micro-batch's activations from one pipeline stage to the next."""
    link = step.cluster.inside if step.groups.hop_inside else step.cluster.across
    share = 1 if step.pace.as_zero3d else step.plan.tp
    return send_seconds(2.0 * step.tokens * step.model.hidden / share, link)


def _data(step: _Step, share: Share, end: float, backward: float) -> float:
    """Return what the data axis adds: communication that the computation does not hide."""
    plan, pace = step.plan, step.pace
    if plan.dp == 1:
        return 0.0
    policy, row = policy_of(plan), policy_of(plan).row
    asked = policy if pace.as_zero3d else policy_of_others(plan)
    release, reduce = asked.release, asked.reduce
    known = digest(step.model)
    trained = known.trainable / known.params
    often = plan.accumulate * (plan.virtual if pace.as_zero3d else 1)  # a chunk's backward reduces all of its rank
    reductions = often if reduce == "every_micro_batch" else 1
    units = max(1.0, len(step.model.blocks) / plan.pp)

    def collective(
        part: float, width: float, seconds_of: Collective = gather_seconds, inside: bool = False, pieces: float = 1.0
    ) -> float:
        """Time a collective of that part of all parameters, in pieces; inside: among neighbours with second shards.

        Of experts that ep shares out nobody keeps any.
        """
        total = 0.0
        groups = step.groups.node if inside else step.groups.shard, step.groups.experts
        for elements, group in zip(share, groups, strict=True):
            if elements and group.size > 1:
                seconds = seconds_of(part * elements * width / units, group, step.cluster)
                hops = (group.size - 1) * step.cluster.across.latency if group.nodes > 1 else 0.0
                total += units * (seconds + (pieces - 1) * hops)
        return total

    wide, seconds_of = _reduction(plan, step.cluster) if pace.as_zero3d else (_reduced_width(plan), gather_seconds)
    buckets = max(1.0, trained * sum(share) / units / pace.bucket)
    reducing = reductions * collective(trained, wide, seconds_of, pieces=buckets)
    if pace.all_sum and row.shards_optimizer:
        reducing *= 2
    copies = _copies_seconds(step, share, reductions if policy.exact else 1) * trained
    if not pace.as_zero3d:  # others sum over copies behind each reduction
        reducing, copies = reducing + copies, 0.0
    elif plan.pp == 1 and not policy.exact:
        last = copies * min(1.0, IN_FLIGHT / units)
        copies = last + _exposed(copies - last, backward / plan.accumulate, pace.hide_dp)
    if row.shards_parameters:
        width = block_bytes(CODE_BITS) / BLOCK if policy.coded else known.width
        uses = (2 - known.still / known.params) * plan.accumulate if release != "every_step" else 1
        gathers = uses * collective(1.0, width, pieces=pace.unit_hops)
        if step.groups.node.size > 1:  # those of trainable units that come first after an update are over all ranks
            gathers = collective(trained, width) + (uses - trained) * collective(1.0, width, inside=True)
        if policy.coded:  # every rank decodes what it gathers
            copies += _coding_seconds(step, uses * sum(share))
        if pace.as_zero3d and policy.from_masters:
            copies += _casting_seconds(step, share, uses)
        first = collective(1.0, width) / units  # finds nothing to hide behind
        others = reducing + gathers - (first if pace.as_zero3d else 0.0)  # other systems were fitted with it added
        return copies + first + _exposed(others, end, pace.hide_dp)
    overlapped = backward / plan.accumulate  # the last micro-batch's; parameters travel beside the next step's forward
    summed = policy.master.itemsize if pace.as_zero3d else wide
    gathers = collective(trained, gathered_width(row, 2, int(summed)))
    return copies + _exposed(reducing, overlapped, pace.hide_dp) + _exposed(gathers, overlapped / 2, pace.hide_dp)


def _copies_seconds(step: _Step, share: Share, times: int) -> float:
    """Return the seconds in which a rank's shards are summed over their copies, so many times in a step."""
    plan, group, policy = step.plan, step.groups.replicate, policy_of(step.plan)
    own = (share.dense + share.experts * plan.ep) / plan.shard
    wide, slow = policy.master.itemsize, policy.slow
    if slow == SAME:
        if group.size == 1:
            return 0.0
        how = sum_over_copies(usual_unit(plan, algorithm_on(plan, step.cluster.on_host)))
        sizes = [own * how.plain.travels, own * wide]
    elif all_get_terms(group.size, BITS[slow]):
        sizes = [group.size * own * term_bytes(BLOCK, slow) / BLOCK]
    else:
        sizes = [own * term_bytes(BLOCK, slow) / BLOCK, own * wide]
    sending = sum(gather_seconds(size, group, step.cluster) for size in sizes)
    decoded = group.size if slow != SAME and all_get_terms(group.size, BITS[slow]) else 1
    coding = _coding_seconds(step, (1 + decoded) * own) if slow not in (SAME, NARROW) else 0.0
    return times * (sending + coding)


def _casting_seconds(step: _Step, share: Share, uses: float) -> float:
    """Return the seconds in which a rank's masters are cast in a step's gathers.

    With second shards that is in the first one alone; experts that ep shares out have none.
    """
    known, gpu = digest(step.model), step.cluster.gpu
    first = 1 if step.groups.node.size > 1 else uses
    cast = first * share.dense + uses * share.experts * step.plan.ep
    own = cast / step.plan.shard * known.trainable / known.params
    bandwidth = step.pace.kernels.rates_of(gpu).memory * gpu.bandwidth
    return cast_bytes(policy_of(step.plan)) * own / bandwidth


def _coding_seconds(step: _Step, elements: float) -> float:
    """Return the seconds in which so many elements are coded or decoded, by the card's memory."""
    gpu = step.cluster.gpu
    return CODING * elements / (step.pace.kernels.rates_of(gpu).memory * gpu.bandwidth)


def _besides_replay(step: _Step, numel: float, once: float) -> float:
    """Return the seconds of a replay beside its computation, which takes `once`: gathers of units, hashes.

    Where units stay gathered for the step they are there already. A hash reads a gradient twice, and both computations
    are hashed; what else is exchanged, a micro-batch's tokens and 16 bytes for a parameter, is nothing.
    """
    plan, pace, gpu = step.plan, step.pace, step.cluster.gpu
    width, known = plan.compute.itemsize, digest(step.model)
    hashes = 4 * width * numel * known.trainable / known.params / (pace.kernels.rates_of(gpu).memory * gpu.bandwidth)
    if not policy_of(plan).gathers or step.groups.shard.size == 1:
        return hashes
    gathered = block_bytes(CODE_BITS) / BLOCK if policy_of(plan).coded else float(width)
    group = step.groups.node if step.groups.node.size > 1 else step.groups.shard
    gathers = 2 * gather_seconds(gathered * numel, group, step.cluster)
    return hashes + _exposed(gathers, once, pace.hide_dp)


def _reduction(plan: ParallelPlan, cluster: ClusterSpec) -> tuple[float, Collective]:
    """Return a gradient's bytes on its way, and what times its collective.

    Passes over memory beside it are left out on both sides: a cast to fp32 (6 bytes), or the sum of terms, which runs
    beside computation (2 bytes and, for each owner, 4).
    """
    reduction = reduction_of(usual_unit(plan, algorithm_on(plan, cluster.on_host)), 1)
    return reduction.travels, exchange_seconds if reduction.terms else gather_seconds


def _reduced_width(plan: ParallelPlan) -> float:
    """Return a gradient's bytes on its way to the reduction in another system, which sums in the dtype asked for."""
    return 2.0 if plan.zero.reduce_dtype != "fp32" else 4.0


def faster_reduction(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with `reduce_scatter` auto, or what is faster than the engine's rule if anything is."""
    elements = model.trainable / plan.tp / max(1, len(model.blocks))
    sections = plan.zero, plan.offload, _degrees_of(plan.mesh)
    choice = _fastest_reduction(elements, *sections, plan.precision, min(2, plan.accumulate), cluster)
    return plan if choice == plan.zero.reduce_scatter else plan.having(zero=_zero_by(plan.zero, choice))


@lru_cache(maxsize=1024)
def _zero_by(zero: Zero, reduce_scatter: str) -> Zero:
    return replace(zero, reduce_scatter=reduce_scatter)


@lru_cache(maxsize=1024)
def _degrees_of(mesh: Mesh) -> Mesh:
    """Return what reductions depend on of a mesh: neither sequences nor a schedule."""
    return replace(without_sequences(mesh), schedule=None)


@lru_cache(maxsize=4096)
def _fastest_reduction(
    elements: float, zero: Zero, offload: Offload, mesh: Mesh, precision: str, accumulate: int, cluster: ClusterSpec
) -> str:
    """Return the choice; the first of those that are as fast. elements: of a block on a rank."""
    plan = PLAIN.having(zero=zero, offload=offload, mesh=mesh, precision=precision, accumulate=accumulate)
    group = Groups.of(plan, cluster).shard

    def seconds(choice: str) -> float:
        width, seconds_of = _reduction(plan.having(zero=_zero_by(zero, choice)), cluster)
        return seconds_of(elements * width, group, cluster)

    return min(REDUCTIONS, key=seconds)


def faster_mixers(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with `sp_mixers` auto, or the way that takes less on these links where a run takes the other."""
    if plan.sp == 1 or not any(scan.passes for part in model.parts for scan in part.scans):
        return plan
    link = cluster.across if Groups.of(plan, cluster).sp.nodes > 1 else cluster.inside
    scans = kinds_of_scans(model, plan.tp)
    weighed = weigh(scans, plan.sp, _scanning(cluster, KERNELS) / link.bandwidth)
    if weighed is None or weighed.kind == mixers_of(model, plan):
        return plan
    return plan.replace(sp_mixers=weighed.kind)


def _exposed(communication: float, computation: float, hide: float) -> float:
    """Return the seconds of communication that are seen: what cannot hide, and what finds nothing to hide behind."""
    return (1 - hide) * communication + max(0.0, hide * communication - computation)


def _update(step: _Step, share: Share, hidden: tuple[float, float]) -> dict[str, float]:
    """Time optimizer and offload.

    hidden  seconds of a micro-batch's forward, and of that with its backward
    """
    plan, cluster, kernels, row = step.plan, step.cluster, step.pace.kernels, policy_of(step.plan).row
    known = digest(step.model)
    owned = (share.dense + share.experts * plan.ep) / plan.shard
    updated = owned if row.shards_optimizer else sum(share)
    updated *= known.trainable / known.params
    if plan.offload.optimizer != "none" and not step.pace.as_zero3d:  # others update on the host, and nothing hides it
        return {
            "optimizer": 30 * updated / (cluster.host_bandwidth / cluster.per_node),
            "offload": (4 * updated + 2 * updated) / cluster.host_link,
        }
    forward, both = hidden
    gathers = 2 * plan.accumulate if policy_of(plan).release != "every_step" else 1
    weights = plan.compute.itemsize * owned
    besides = read_seconds(plan, cluster, weights, gathers) + gradient_seconds(plan, cluster, updated)
    reads = besides - plan.accumulate * both
    moving = update_seconds(plan, cluster, updated) - forward
    offload = {"offload": max(0.0, moving) + max(0.0, reads)} if plan.offload.states else {}
    on_device = updated * (1 - plan.offload.fraction) if plan.offload.executor == HOST else updated
    bandwidth = kernels.rates_of(cluster.gpu).memory * cluster.gpu.bandwidth
    records = plan.offload.states or policy_of(plan).splits or OPTIMIZERS[plan.optimizer].coded
    touched = _touched(plan) + 32 * plan.averages
    buckets = on_device / update_bucket("cuda") if records else 0.0
    own = touched * on_device / bandwidth + (100 + 10 * buckets) * kernels.launch
    return {"optimizer": step.pace.update * own + _matrices(step)} | offload


def _touched(plan: ParallelPlan) -> int:
    """Return the bytes of memory per parameter that an update reads and writes.

    A split master is joined before it (16 bytes, in fp32 scratch) and split after it (36), where a stored one is cast
    (18 in scratch): 34 more. One that gathers cast is not cast here.
    """
    policy = policy_of(plan)
    return OPTIMIZERS[plan.optimizer].touched + 34 * policy.splits - cast_bytes(policy) * policy.from_masters


def _matrices(step: _Step) -> float:
    """Time Muon's matrices: products of the owner that has most, and what travels meanwhile, whichever takes longer."""
    plan, cluster = step.plan, step.cluster
    if not OPTIMIZERS[plan.optimizer].orthogonal:
        return 0.0
    speed = step.pace.kernels.rates_of(cluster.gpu).matrix * step.pace.speed_on(cluster.gpu.name) * cluster.gpu.flops
    degrees, shard, experts = plan.degrees, step.groups.shard, step.groups.experts
    groups = {degrees.group(EXPERT_SHARD): experts, degrees.group("shard"): shard, "tp": step.groups.tp}
    sent = max((matrix_traffic(step.model, plan, stage) for stage in range(plan.pp)), key=lambda by: sum(by.values()))
    moving = sum(exchange_seconds(size, groups[key.split()[1]], cluster) for key, size in sent.items())
    return max(operations_of(step.model, plan) / speed, moving)
