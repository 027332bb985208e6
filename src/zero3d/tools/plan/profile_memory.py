"""Memory of a system's fullest rank, from a model's closed form and a profile's bytes per parameter.

    rank class   the pipeline ranks: first (most micro-batches in flight), ..., last (logits)
    states       its parameters / tp x bytes per parameter
    activations  its blocks x micro-batches in flight x what a policy keeps, and one block's interior where recomputed
    logits       of the last rank; a gathered unit or two at stage 3; buffers
    reserved     spare x the sum; device: and CUDA's context, and NCCL's communicators

In flight under 1F1B: min(m, p - rank); interleaved as many layers more as Korthikanti's 1 + (p - 1)/(p v) says.

Of systems that train adapters on a model of transformers, `traced_memory`: the engine's own arithmetic on a trace, and
what such a system has beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zero3d.activations.policy import recompute_arithmetic
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.formulas import interleave_factor
from zero3d.tools.plan.inputs import on_host
from zero3d.tools.plan.kernels import digest
from zero3d.tools.plan.memory import instants, memory as engine_memory
from zero3d.tools.plan.profiles import Profile
from zero3d.tools.plan.spec import ClusterSpec, Memory, ModelSpec, ParallelPlan, Part
from zero3d.tools.plan.time import part_indices


def profile_memory(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, system: Profile) -> Memory:
    """Compute the bytes of the fullest pipeline rank."""
    cut = part_indices(model, plan.pp, plan.virtual, system.pace.cut)
    ranks = [[i for part in cut[rank :: plan.pp] for i in part] for rank in range(plan.pp)]
    classes = {rank: _rank_bytes(model, plan, system, inside, rank) for rank, inside in enumerate(ranks)}
    fullest = max(classes, key=lambda rank: sum(classes[rank].values()))
    parts = classes[fullest]
    allocated = sum(parts.values())
    reserved = system.spare * allocated
    host = _host(model, plan, cluster, system)
    return Memory(
        parts["states"],
        allocated,
        reserved,
        reserved + system.context + _communicators(plan) * system.communicator,
        host,
        parts,
        f"pipeline rank {fullest} of {plan.pp}",
    )


def traced_memory(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, system: Profile) -> Memory:
    """Compute the bytes of a system whose model is traced: the engine's, and what this system has beside them."""
    plan, tokens = plan.replace(tiled_loss=False), plan.tokens(model.length)
    found, more = engine_memory(model, plan, cluster), system.loss_more * tokens * model.vocab
    peaks = [
        (parts | ({"loss": more} if "loss" in name and more else {}), name) for name, parts in instants(model, plan)
    ]
    parts, instant = max(peaks, key=lambda peak: sum(peak[0].values()))
    if system.packed_input and plan.activations == "none":
        parts["inputs"] = system.packed_input * tokens * _packed_inputs(model)
    if policy_of(plan).gathers and plan.dp > 1:
        parts["gathered"] = max(system.live, parts.get("gathered", 0.0))
    most, outside = sum(parts.values()), system.context + _communicators(plan) * system.communicator
    reserved = min(system.spare * most, max(cluster.gpu.memory - outside, system.tight * most))
    device = reserved + outside
    return replace(found, allocated=most, reserved=reserved, device=device, instant=instant, parts=parts)


def _packed_inputs(model: ModelSpec) -> int:
    """Return a token's elements in the inputs of all layers in few bits."""
    weights = (weight for part in model.parts for unit in part.units for weight in unit.weights)
    return sum(weight.matrix[-1] for weight in weights if weight.matrix is not None)


def _communicators(plan: ParallelPlan) -> int:
    """Count a rank's communicators: of all ranks, of each axis, and of tp and pp together, where there are several."""
    sizes = plan.world, plan.dp, plan.tp, plan.pp
    return sum(size > 1 for size in sizes) + (plan.tp > 1 and plan.pp > 1)


def _rank_bytes(
    model: ModelSpec, plan: ParallelPlan, system: Profile, inside: list[int], rank: int
) -> Mapping[str, float]:
    known = digest(model)
    parts = [model.parts[i] for i in inside]
    numel = sum(known.numels[i] for i in inside) / plan.tp
    if plan.pp > 1 and rank == plan.pp - 1:  # a tied head has the embedding's weight once more
        copies = {unit.copy_of for part in parts for unit in part.units if unit.copy_of}
        numel += sum(w.numel for p in model.parts for u in p.units if u.name in copies for w in u.weights) / plan.tp
    trainable = numel * known.trainable / known.params
    weight, gradient, optimizer = system.rates(plan)
    states = numel * weight + trainable * (gradient + (optimizer if plan.offload.optimizer == "none" else 0.0))
    if plan.accumulate > 1 and plan.dp > 1:
        states += trainable * system.sums_whole
    blocks = [part for part in parts if part.kind == "block"]
    tokens = plan.micro_batch * model.length
    flight = float(min(plan.accumulate, plan.pp - rank) if plan.schedule != "gpipe" else plan.accumulate)
    if plan.virtual > 1:
        flight = min(float(plan.accumulate), flight * float(interleave_factor(plan.pp, plan.virtual)))
    gathered = system.units * 2.0 * max(known.numels) / plan.tp if plan.zero.stage == 3 else 0.0
    if plan.zero.stage == 3 and plan.pp > 1 and system.keeps_in_pipelines:
        gathered = numel * system.weight + trainable * system.gradient
    nbytes = {"states": states, "gathered": gathered, "buffers": system.buffers}
    if blocks:
        nbytes["activations"] = tokens * _kept(blocks[0], len(blocks), flight, plan, system)
        nbytes["transient"] = tokens * blocks[0].operations.transient / plan.tp
    heads = [part.operations for part in parts if part.kind == "head"]
    if heads:
        beyond = system.loss_over_tp * model.vocab if plan.tp > 1 else 0.0
        parts_of = 1 if system.whole_logits else plan.tp
        nbytes["logits"] = tokens * sum((head.kept_cut + head.transient + beyond) / parts_of for head in heads)
        nbytes["transient"] = 0.0
    return nbytes


def _kept(block: Part, blocks: int, flight: float, plan: ParallelPlan, system: Profile) -> float:
    """Return the bytes per token of a rank's blocks: those in flight, and one that is recomputed now."""
    operations = block.operations
    whole = operations.kept_whole / (plan.tp if plan.mesh.sequence_parallel else 1)
    attention = operations.attention / plan.tp
    interior = (operations.kept_cut - operations.attention) / plan.tp + whole
    ledger = recompute_arithmetic(blocks, plan.activations)
    entry = 0.0 if on_host(plan) else operations.input / (plan.tp if plan.mesh.sequence_parallel else 1)
    if plan.activations == "none":
        return flight * blocks * (interior + attention)
    if plan.activations == "selective":
        kept = entry + _products(block, plan.tp) if system.every_other else interior
        return flight * blocks * kept + attention
    return flight * ledger.kept_inputs * entry + ledger.interiors * (interior + attention)


def _products(block: Part, tp: int) -> float:
    """Return the bytes per token of attention's output and of every second product's, in 16 bits: 2 h, and 2 r / 2."""
    outputs = sum(weight.shape[0] for unit in block.units for weight in unit.weights if len(weight.shape) == 2)
    return (block.operations.input + outputs) / tp


def _host(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec, system: Profile) -> float:
    """Return a node's bytes: what each rank loads before it is cut (2 per parameter), offloaded states."""
    ranks = min(plan.world, cluster.per_node)
    known = digest(model)
    offloaded = (
        0.0 if plan.offload.optimizer == "none" else system.rates(plan)[2] * known.trainable / (plan.tp * plan.pp)
    )
    return ranks * (2.0 * known.params + offloaded)
