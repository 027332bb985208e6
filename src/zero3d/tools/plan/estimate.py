"""What a plan needs and how long its step takes: `evaluate(model, cluster, plan, system) -> Estimate`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache

from zero3d.account.transients import logits_bytes
from zero3d.blueprint.layout import padding_warning
from zero3d.distributed.degrees import Degrees
from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.bits import FACTS
from zero3d.spec.mesh import AUTO
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.spec.tiers import TIERS
from zero3d.tools.plan.bounds import memory_at_least, memory_at_most
from zero3d.tools.plan.footprint import tiles_loss
from zero3d.tools.plan.kernels import IMBALANCE, step_operations
from zero3d.tools.plan.memory import memory as engine_memory
from zero3d.tools.plan.profile_memory import profile_memory, traced_memory
from zero3d.tools.plan.profiles import Profile, profile
from zero3d.tools.plan.rank_model import rank_model
from zero3d.tools.plan.search import Bounds, ep_refused, shard_refused
from zero3d.tools.plan.sequence import mixers_of, sp_refused
from zero3d.tools.plan.spec import (
    AS_KERNELS,
    IN_AUTOCAST,
    IN_TORCH,
    ClusterSpec,
    Estimate,
    Memory,
    ModelSpec,
    ParallelPlan,
    Seconds,
)
from zero3d.tools.plan.states import check_rules, with_algorithm
from zero3d.tools.plan.tier_time import chosen_executor, executor_note
from zero3d.tools.plan.time import step_seconds
from zero3d.tools.plan.traffic import busiest_traffic
from zero3d.tools.plan.weights import with_weights

EAGER = "attention keeps its scores: 5 a s bytes per token and block; a flash kernel would not"
TEXT = "text alone was traced: an image adds its tokens to the sequence, and the forward of the tower that reads it"
SEEN = re.compile(r"with (an image|\d+ images) of [\d,]+ patches and [\d,]+ tokens")
BEYOND = re.compile(r"beyond its ([\d,]+) positions")
UNEVEN = (
    f"experts: bytes assume equally many tokens on all experts, seconds {IMBALANCE:g} x the mean on the busiest ep "
    "rank; zero3d compare prints a run's expert load"
)
WITHOUT_AUTOCAST = "activations are those of a forward without autocast, which keeps some of them in fp32"
TILED = "train.tiled_loss=auto computes the next-token loss in tiles here, without {:.1f} GB of logits"
KERNELS = "mixers priced as kernels of fla, mamba_ssm and causal_conv1d, by formula; not compared with a published run"
ONE_DOCUMENT = "mixers priced in torch, with one document in each row: of packed rows they scan each document by itself"
WITHOUT_FP8 = ("cpu", "v100", "t4", "a100", "a10g", "a6000", "rtx-3090")  # cards below what models/fp8.py asks for
ROUNDED = "losses are not bitwise those without {}: {}"
UNPACKED = "planned with one document per sequence: data.packing=true keeps a mask and repeated key-value heads, too"


class Priced(Estimate):
    """An estimate of a plan whose memory may be known: all else is computed when it is first read.

    A search reads the seconds of plans that fit alone, and of those that it shows what they send.
    """

    _of: tuple[ModelSpec, ClusterSpec, ParallelPlan, Profile]

    @classmethod
    def of(
        cls, model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, system: Profile, memory: Memory | None
    ) -> Estimate:
        """Return the estimate of a plan, without its memory as zero3d's. plan: with algorithm and executor chosen."""
        priced = object.__new__(cls)
        tokens = plan.rows * plan.accumulate * plan.micro_batch * model.length
        vars(priced).update(tokens=tokens, flops=step_operations(model, plan), _of=(model, cluster, plan, system))
        if memory is not None:
            vars(priced).update(memory=memory)
        return priced

    @cached_property
    def memory(self) -> Memory:
        """Return the memory of the fullest rank, where it was not known."""
        model, cluster, plan, _ = self._of
        return engine_memory(model, plan, cluster)

    @cached_property
    def seconds(self) -> Seconds:
        """Return the seconds of a step."""
        model, cluster, plan, system = self._of
        return step_seconds(model, plan, cluster, system.pace)

    @cached_property
    def traffic(self) -> Mapping[str, float]:
        """Return what the busiest rank sends."""
        model, _, plan, system = self._of
        return busiest_traffic(model, plan) if system.pace.as_zero3d else {}

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader must know of these figures."""
        model, cluster, plan, system = self._of
        return _notes(model, cluster, plan, self.memory, system.pace.as_zero3d)


def evaluate(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, system: str | Profile = "zero3d") -> Estimate:
    """Estimate the memory of the fullest rank class and the seconds of a step. Raises ConfigError for what cannot be.

    system  zero3d: memory by the engine's own arithmetic (memory.py); or the profile of megatron, megatron-core,
            deepspeed, megatron-deepspeed, deepspeed-0.3, torchtitan, torchtitan-async-tp, nanotron, peft, peft-gptq,
            peft-zero3, fsdp-qlora, litgpt, or one of yours
    """
    chosen = profile(system) if isinstance(system, str) else system
    as_zero3d = chosen.pace.as_zero3d
    if as_zero3d:
        check_rules(plan)
    plan = _resolved(model, cluster, plan, as_zero3d=as_zero3d)
    if as_zero3d:
        memory = engine_memory(model, plan, cluster)
    else:
        memory = (traced_memory if chosen.traced else profile_memory)(model, plan, cluster, chosen)
    return Priced.of(model, cluster, plan, chosen, memory)


def settled(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> ParallelPlan:
    """Return a plan with its algorithm, executor and weights chosen. Raises ConfigError for what cannot be."""
    return _resolved(model, cluster, plan, as_zero3d=True)


def evaluate_later(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> Estimate:
    """Return what `evaluate` does of a plan that fits: its memory is computed when it is first read."""
    return Priced.of(model, cluster, _resolved(model, cluster, plan, as_zero3d=True), profile("zero3d"), None)


@lru_cache(maxsize=64)
def _resolved(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, *, as_zero3d: bool) -> ParallelPlan:
    """Return the plan with its algorithm, executor and weights chosen. Raises ConfigError for what cannot be."""
    if as_zero3d:  # its schedules are torch's: the chunks per rank follow
        virtual = Schedule.of(plan.schedule).chunks_per_rank
        plan = plan if plan.virtual == virtual else plan.replace(virtual=virtual)
    check_degrees(model, cluster, plan)
    if as_zero3d and plan.linear is not None and cluster.gpu.name.startswith(WITHOUT_FP8):
        raise ConfigError(
            f"model.linear={plan.linear} multiplies in fp8, which {cluster.gpu.name} cannot: leave it out, or plan for "
            "a card of compute capability 8.9 or more, such as h100."
        )
    plan = chosen_executor(with_algorithm(plan, cluster), cluster)
    return with_weights(model, plan, cluster) if as_zero3d else plan


def _notes(
    model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, memory: Memory, as_zero3d: bool
) -> tuple[str, ...]:
    notes = [executor_note(plan, cluster)] if as_zero3d and plan.offload.optimizer != "none" else []
    notes += [model.provenance] if model.provenance.startswith("assumed") else []
    notes += [UNEVEN] if plan.ep > 1 else []
    if any(part.operations.eager for part in model.blocks):
        notes.append(EAGER)
    if model.provenance.startswith("traced") and "packed" not in model.provenance:
        notes.append(UNPACKED)
    if plan.autocast and IN_AUTOCAST not in model.provenance:
        notes.append(WITHOUT_AUTOCAST)
    if AS_KERNELS in model.provenance:
        notes.append(KERNELS)
    elif IN_TORCH in model.provenance and "packed" in model.provenance:
        notes.append(ONE_DOCUMENT)
    if plan.sp > 1 and plan.mesh.sp_mixers == AUTO and any(scan.passes for part in model.parts for scan in part.scans):
        notes.append(f"mesh.sp_mixers=auto: recurrences by {mixers_of(model, plan)}")
    if "text alone" in model.provenance:
        notes.append(TEXT)
    if beyond := BEYOND.search(model.provenance):
        notes.append(
            f"the model has {beyond[1]} positions: before it trains, give it a config.json with {model.length:,} or "
            "more max_position_embeddings, and rope_parameters for them"
        )
    if seen := SEEN.search(model.provenance):
        notes.append(f"every sequence was traced {seen[0]}: more or larger ones add to the tower's work")
    if plan.tiled_loss is not True and tiles_loss(model, plan):
        nbytes = logits_bytes(plan.micro_batch * model.length, model.vocab, plan.compute.itemsize)
        notes.append(TILED.format(nbytes / 1e9))
    notes += [ROUNDED.format(what, why) for what, why in _rounded(plan)]
    for name in memory.lacks(cluster):
        held, there = memory.by_tier()[name], cluster.figure(TIERS[name].capacity)
        notes.append(f"{name} memory: {held / 1e9:.0f} GB needed on a node of {there / 1e9:.0f} GB")
    units = [unit for units in rank_model(model, plan, 0).units.values() for unit in units] if as_zero3d else []
    padded = padding_warning([unit.layout for unit in units]) if as_zero3d else None
    return (*notes, padded) if padded else tuple(notes)


def _rounded(plan: ParallelPlan) -> Iterator[tuple[str, str]]:
    """Yield what a plan rounds otherwise than by default, and why that changes bits."""
    if OPTIMIZERS[plan.optimizer].coded:
        yield f"optimizer.name={plan.optimizer}", FACTS["moments"].why
    if plan.linear is not None:
        yield f"model.linear={plan.linear}", "linear layers of blocks multiply in 8 bits; all else is in bf16"
    if plan.zero.reduce_dtype == "bf16":
        yield "zero.reduce_dtype=bf16", FACTS["wire"].why
    if plan.compile:
        yield "train.compile=true", FACTS["compiled"].why


def check_degrees(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> None:
    """Refuse degrees that fit neither cluster nor model."""
    degrees = {
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "micro_batch": plan.micro_batch,
        "accumulate": plan.accumulate,
    }
    small = [name for name, value in degrees.items() if value < 1]
    if small:
        raise ConfigError(f"{small[0]}={degrees[small[0]]}: must be at least 1.")
    parts, mixers = plan.pp * plan.virtual, mixers_of(model, plan) if plan.sp > 1 else ""
    _check_fit(model, cluster.gpus, plan.degrees, parts, plan.mesh.sp_kind == "heads", mixers)


@lru_cache(maxsize=1024)
def _check_fit(model: ModelSpec, gpus: int, degrees: Degrees, parts: int, heads: bool, mixers: str) -> None:
    """Refuse degrees that fit neither so many GPUs nor a model. parts: of a pipeline."""
    pp, dp, tp, ep, sp, _ = degrees
    shard = degrees.size("shard")
    if pp * dp * tp > gpus:
        raise ConfigError(
            f"dp={dp} x tp={tp} x pp={pp} = {dp * tp * pp} ranks do not fit {gpus} GPUs: "
            f"pass dp={max(1, gpus // (tp * pp))}."
        )
    why = ep_refused(model, dp, ep) if ep > 1 else None
    if why is not None:
        raise ConfigError(f"ep={ep} cannot be: {why}.")
    why = sp_refused(model, dp, tp, sp, heads, mixers) if sp > 1 else None
    if why is not None:
        raise ConfigError(f"sp={sp} cannot be: {why}.")
    why = shard_refused(dp, ep, sp, shard)
    if why is not None:
        raise ConfigError(f"shard={shard} cannot be: {why}.")
    if model.heads % tp or model.hidden % tp:
        raise ConfigError(f"tp={tp} does not divide {model.heads} heads and hidden {model.hidden}.")
    if parts > len(model.blocks):
        raise ConfigError(f"pp={pp} x virtual={parts // pp} = {parts} parts for {len(model.blocks)} blocks.")


BOUNDS = Bounds(settled, memory_at_least, memory_at_most, evaluate_later)
