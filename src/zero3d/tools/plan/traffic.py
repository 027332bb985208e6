"""Bytes that a rank sends in a step, by operation and axis: the sum that the ledger's formulas give. No torch.

ep   expert_parallel/traffic.py of as many tokens for every expert as for any other; only a router knows how many
sp   sequence/shares.py of every block's attention and of the losses, of the first rank of a group
dp   account/traffic.py of the rank's units, of experts over edp, padding included; where states are cut over a part
     of dp, over shard and eshard, and sums over replicate; at stage 3 gathers are counted in the order of tokens, as
     the engine takes them, rough only where a pipeline that releases every use recomputes blocks; that what backwards
     of weights leave is reduced once more, where a schedule with such reduces every micro-batch, is left out
     Muon's matrices go to their owners and back, over tp, too (matrices.py)
pp   pipeline/traffic.py: whole hidden states on every tp rank
tp   tensor_parallel/traffic.py of the regions of a model whose blocks have attention and one MLP, as Llama's and GPT's:

     part               forward                    backward                   sequence parallelism
     -----------------  -------------------------  -------------------------  --------------------------------------
     embedding          all-reduce                                            the same
     block, 2 x         all-reduce                 all-reduce                 all-gather and reduce-scatter, both ways
     a chunk's blocks                                                         all-gather forward and backward
     input in parts                             all-gather                    -
     head               2 fp32 numbers per token   all-reduce                 the same

     Recomputation repeats forwards, but for the last one of blocks that run again together. What the tp ranks hold
     alike between slices of sequences has partial gradients, which they exchange once a step.

The few numbers on which ranks agree in a step (weights, norms, orders) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from zero3d.account.traffic import Levels, Moved, UnitTraffic, node_traffic, step_traffic, traffic_of
from zero3d.activations.policy import Policy
from zero3d.distributed.degrees import EXPERT_SHARD
from zero3d.distributed.unit_order import ROOT
from zero3d.expert_parallel.traffic import Passed, even_rows, expert_traffic
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.traffic import ChunkUnits, pipeline_gathers, pipeline_traffic
from zero3d.spec.mesh import Mesh
from zero3d.tensor_parallel.traffic import Region, group_regions, loss_region, partial_traffic, tensor_traffic
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.in_flight import actions_of_rank
from zero3d.tools.plan.inputs import in_parts
from zero3d.tools.plan.matrices import traffic as matrix_traffic
from zero3d.tools.plan.rank_model import chunks_of_rank, rank_model
from zero3d.tools.plan.sequence import traffic as sequence_traffic
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan, Part
from zero3d.tools.plan.states import states_key
from zero3d.zero.tokens import backward_gathers, forward_gathers, left_by


def busiest_traffic(model: ModelSpec, plan: ParallelPlan) -> dict[str, float]:
    """Return the bytes of a step, by "operation axis", of a rank of the pipeline stage that sends the most.

    Of dp ranks the first, whose shards have the vectors.
    """
    by_stage = [rank_traffic(model, plan, stage) for stage in range(plan.pp)]
    return max(by_stage, key=lambda traffic: sum(traffic.values()))


def rank_traffic(model: ModelSpec, plan: ParallelPlan, stage: int) -> dict[str, float]:
    """Return the bytes of a step of a rank of one pipeline stage."""
    key = states_key(plan)
    traffic = dict(_data_traffic(model, key, stage, plan.accumulate, Policy.of(plan.activations).every or 1))
    tokens = plan.tokens(model.length)
    width = plan.compute.itemsize
    if plan.tp > 1:
        key = replace(key, activations=plan.activations, mesh=plan.mesh)
        regions, partial = _regions(model, key, stage), _partial_gradients(model, key, stage)
        moved = tensor_traffic(regions, plan.accumulate * tokens, plan.accumulate, plan.tp, width)
        for (operation, _), volume in moved.items():
            traffic[f"{operation} tp"] = traffic.get(f"{operation} tp", 0.0) + volume.bytes
        if partial:
            traffic["exchange tp"] = float(partial_traffic(partial, plan.tp, policy_of(plan).master.itemsize).bytes)
    if plan.ep > 1:
        for operation, moved_rows in _expert_traffic(model, plan, stage).items():
            traffic[f"{operation} ep"] = float(moved_rows.bytes)
    if plan.sp > 1:
        traffic |= {key: float(moved.bytes) for key, moved in sequence_traffic(model, plan, stage).items()}
    for operation, nbytes in matrix_traffic(model, plan, stage).items():
        traffic[operation] = traffic.get(operation, 0.0) + nbytes
    if plan.pp > 1:
        schedule = Schedule.of(plan.schedule)
        cuts = [[(tokens * model.hidden, width)]] * (plan.pp * schedule.chunks_per_rank - 1)
        sent = pipeline_traffic(schedule.chunks_of(stage, plan.pp), plan.accumulate, cuts)
        traffic["send pp"] = float(sum(volume.bytes for volume in sent.values()))
    return traffic


# --- the data axis ------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _data_traffic(model: ModelSpec, plan: ParallelPlan, stage: int, micro_batches: int, every: int) -> dict[str, float]:
    """Return the bytes of the data axis. plan: of `states_key`; every: blocks that are recomputed together."""
    if plan.dp == 1:
        return {}
    rank = rank_model(model, plan, stage)
    policy = policy_of(plan)
    per_use = policy.gathers
    alike = ParallelPlan(mesh=Mesh(1, 1, plan.pp, 1, schedule=plan.schedule), accumulate=plan.pp)
    gathers = _gathers(model, alike, stage, micro_batches, every) if per_use else None
    reductions = micro_batches * len(rank.chunks)  # a chunk's backward reduces all units of its rank
    rows: list[UnitTraffic] = []
    calls = {}
    for number, unit in ((number, unit) for number, units in rank.units.items() for unit in units):
        name, of = str(len(rows)), unit.plan(plan)
        ranks = of.cut.size if unit.kind.experts else None
        rows.append(traffic_of(name, of, unit.layout.total, ranks))
        calls[name] = 1 if gathers is None else gathers[_name(number, unit.owner)]
    totals: Counter[str] = Counter()
    levels, axis_of = Levels(plan.shard, plan.replicate), plan.degrees.group
    moved = step_traffic(policy.row.number, rows, levels, calls, reductions, policy.reduce, policy.exact)
    shared = {row.name for row in rows if row.ranks is not None and plan.ep > 1}
    for (operation, name), volume in moved.items():
        if operation != "exchange":
            inside = EXPERT_SHARD if name in shared else "shard"
            totals[f"{operation} {axis_of('replicate' if operation == 'all_reduce' else inside)}"] += volume.bytes
    for (operation, _), volume in node_traffic(rows, calls).items() if gathers is not None else ():
        totals[f"{operation} node"] += volume.bytes
    return {key: float(value) for key, value in totals.items()}


def _name(chunk: int, owner: str) -> str:
    return f"{chunk} {owner}"


@lru_cache(maxsize=4096)
def _gathers(model: ModelSpec, plan: ParallelPlan, stage: int, micro_batches: int, every: int) -> Counter[str]:
    """Count gathers in a step that releases every use, by chunk and owner of units. plan: its pipeline alone.

    Between forward and backward of a block there is a recomputation, where more than one block runs again, but for
    the block whose backward follows at once.
    """
    chunks = chunks_of_rank(model, plan, stage)
    used = {number: _order_of_use(number, parts) for number, parts in chunks.items()}
    if plan.pp > 1:
        units = {n: ChunkUnits([*first, *rest], _name(n, ROOT), frozenset(first)) for n, (first, rest) in used.items()}
        gathers = pipeline_gathers(actions_of_rank(plan.schedule, plan.pp, micro_batches, stage), units, "every_use")
    else:
        (first, rest), root = used[0], _name(0, ROOT)
        forward = [*first, *rest]
        once = forward_gathers(forward, root) + backward_gathers(rest, root, (), left_by(forward, root))
        gathers = Counter({unit: micro_batches * count for unit, count in once.items()})
    for number, parts in chunks.items():
        blocks = [_owners(part)[0] for part in parts if part.kind == "block" and part.units]
        for i, owner in enumerate(blocks):
            gathers[_name(number, owner)] += micro_batches * (i % every != every - 1 and i + 1 < len(blocks))
    return gathers


def _order_of_use(chunk: int, parts: Sequence[Part]) -> tuple[list[str], list[str]]:
    """Return the owners of units in a forward's order: those whose backward needs none of them, and the rest.

    That are embeddings, whose backward needs indices only, a tower's among them, and a frozen tower has no backward.

    The root is left out. A tied head uses the embedding's unit, where that is in this chunk.
    """
    here = frozenset(unit.name for part in parts for unit in part.units if unit.copy_of is None)
    owners = [(part, _name(chunk, owner)) for part in parts for owner in _owners(part, here) if owner != ROOT]
    once = [part.kind == "embedding" or part.still or owner in _tables(chunk, part) for part, owner in owners]
    return [o for (_, o), first in zip(owners, once, strict=True) if first], [
        o for (_, o), first in zip(owners, once, strict=True) if not first
    ]


def _tables(chunk: int, part: Part) -> set[str]:
    """Return the owners of a tower's units that are tables to look places up in: of two dimensions, and no matrix."""
    if part.kind != "tower":
        return set()
    tables = (u for u in part.units if all(len(w.shape) == 2 and w.form is None and w.trainable for w in u.weights))
    return {_name(chunk, unit.name.partition("/")[0]) for unit in tables}


def _owners(part: Part, here: Collection[str] = ()) -> list[str]:
    """Return the owners of a part's units, each once; of copies that of the unit copied, if it is one of `here`."""
    names = (unit.copy_of if unit.copy_of is not None and unit.copy_of in here else unit.name for unit in part.units)
    return list(dict.fromkeys(name.partition("/")[0] for name in names))


# --- the ep axis --------------------------------------------------------------------------------


def _expert_traffic(model: ModelSpec, plan: ParallelPlan, stage: int) -> dict[str, Moved]:
    """Return what a rank's expert layers send: counts, and rows with results, there and back."""
    blocks = [p for parts in rank_model(model, plan, stage).chunks.values() for p in parts if p.stacked]
    rows = plan.tokens(model.length) * model.chosen
    own = sum(even_rows(rows, model.experts)[: model.experts // plan.ep])
    away = rows - own + (plan.ep - 1) * own  # rows of this rank, and results of others'
    again = Policy.of(plan.activations).every is not None
    passed = Passed(1 + again, away * (1 + again), 2, away).times(plan.accumulate * len(blocks))
    return expert_traffic(passed, model.latent or model.hidden, plan.compute.itemsize, model.experts, plan.ep)


# --- the tp axis --------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _regions(model: ModelSpec, plan: ParallelPlan, stage: int) -> list[Region]:
    """Return where a rank's activations pass between tp ranks; alike regions as one of their widths together."""
    chunks = rank_model(model, plan, stage).chunks.values()
    every = Policy.of(plan.activations).every
    widths: Counter[Region] = Counter()
    fixed: Counter[Region] = Counter()
    for region in (region for parts in chunks for region in _regions_of(parts, model.hidden, plan, every)):
        alike = region._replace(width=0, fixed=0)
        widths[alike] += region.width
        fixed[alike] += region.fixed
    return [alike._replace(width=width, fixed=fixed[alike]) for alike, width in widths.items()]


def _regions_of(parts: Sequence[Part], hidden: int, plan: ParallelPlan, every: int | None) -> Iterator[Region]:
    """Yield the regions of a model chunk. every: blocks that are recomputed together, if any are."""
    sliced = plan.mesh.sequence_parallel
    enter = ("all_gather", "reduce_scatter") if sliced else ("", "all_reduce")
    leave = enter[::-1] if sliced else ("all_reduce", "")
    cut = [part for part in parts if any(weight.cut is not None for unit in part.units for weight in unit.weights)]
    blocks = [part for part in cut if part.kind == "block"]
    for i in range(len(blocks)):
        if in_parts(plan) and i % (every or 1) == 0:
            yield Region("", "", "all_gather", hidden)
        ends = every is not None and ((i + 1) % every == 0 or i + 1 == len(blocks))
        for last in _modules(blocks[i], plan):
            yield Region("", *enter, hidden, again=every is not None)
            yield Region("", *leave, hidden, again=every is not None and not (last and ends))
        if (groups := blocks[i].groups) is not None:
            again = every is not None or plan.activations == "selective"
            yield from (region._replace(again=again) for region in group_regions("", groups, plan.tp))
    if blocks and sliced:
        yield Region("", "", "all_gather", hidden)
        yield Region("", "all_gather", "", hidden)
    for part in cut:
        if part.kind == "embedding":
            yield Region("", "all_reduce", "", hidden)
        elif part.kind == "head":
            yield Region("", "", "all_reduce", hidden)
            yield loss_region("", plan.tp)


def _modules(block: Part, plan: ParallelPlan) -> tuple[bool, ...]:
    """Return, for each module of a block that tp cuts, whether it is the last of two or the only one."""
    if block.single:
        return (True,)
    return (False, True) if _cut_mlp(block, plan) else (False,)  # attention, MLP


def _cut_mlp(block: Part, plan: ParallelPlan) -> bool:
    """Say whether tp cuts more of a block than attention: not where experts are whole and no other MLP is beside them.

    Those beside them, which all tokens meet, have a region of their own.
    """
    if not (plan.dispatches and block.stacked):
        return True
    cut = (w.name for unit in block.units for w in unit.weights if w.cut is not None and not w.stacked)
    return any("attn" not in name and "attention" not in name for name in cut)


@lru_cache(maxsize=4096)
def _partial_gradients(model: ModelSpec, plan: ParallelPlan, stage: int) -> int:
    """Count the elements of partial gradients that the first dp rank has: of blocks' uncut weights, between slices."""
    if not plan.mesh.sequence_parallel:
        return 0
    rank = rank_model(model, plan, stage)
    blocks = (part for parts in rank.chunks.values() for part in parts if part.kind == "block")
    partial = {w.name for part in blocks for unit in part.units for w in unit.weights if w.cut is None and w.trainable}
    return sum(
        piece.stop - piece.start
        for units in rank.units.values()
        for unit in units
        for piece in unit.layout.pieces(0)
        if unit.names[piece.slot] in partial
    )
