"""What a planner works on, as data: a model, a cluster, a plan, an estimate. No torch; JSON there and back.

    ModelSpec      parts in order, as pipelines cut them:  embedding | tower ... | block | block | ... | head
      Part         units (parameters gathered together), operations and activations per token
        Unit       weights of one unit
          Weight   a logical shape, and the dimension that tp divides
    ClusterSpec    nodes of alike GPUs; links inside and across them
    ParallelPlan   the settings of a run by section, and micro-batches
    Estimate       memory of the fullest rank class, seconds of a step, and what they are made of

Bytes are bytes, times seconds, rates per second. A token's figures are of one forward at `ModelSpec.length`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from zero3d.distributed.degrees import Degrees
from zero3d.errors import ConfigError
from zero3d.optim.matrices import Form
from zero3d.pipeline.balance import BLIND, Tower
from zero3d.pipeline.schedules import DEFAULT
from zero3d.sequence.shares import Halo, Scanned
from zero3d.spec.dtypes import BF16, BY_NAME, Dtype
from zero3d.spec.mesh import Mesh
from zero3d.spec.optimizer import ADAMW
from zero3d.spec.sections import SECTIONS, Spec, by_section, keywords, placed
from zero3d.spec.tiers import HOST, TIERS, Figure
from zero3d.tensor_parallel.traffic import SharedGroups
from zero3d.tools.plan.constants import constant

KINDS = ("embedding", "tower", "block", "head")
IN_AUTOCAST = "in autocast"  # in the provenance of a model that was traced so
AS_KERNELS, IN_TORCH = "mixers as kernels", "mixers in torch"  # in the provenance of a model that has mixers
ORDER = (  # of a plan's JSON, as its readers know it; a key that is not here follows
    *("dp", "tp", "pp", "stage", "micro_batch", "accumulate", "activations", "sequence_parallel", "schedule"),
    *("virtual", "precision", "reduce_dtype", "release", "reduce", "offload", "exact", "reduce_scatter", "master"),
    *("params", "gradients", "fraction", "moments", "executor", "partition_activations", "offload_activations"),
    *("asynchronous_saves", "replay", "ema", "ep", "experts", "optimizer", "sp", "sp_kind", "sp_mixers", "tiled_loss"),
    *("gather_wire", "second_shard", "shard", "slow_wire", "slow_rounding", "compile"),
)


@dataclass(frozen=True)
class Weight:
    """A parameter.

    shape      logical
    group      optimizer parameter group: a unit's slots are packed by it
    cut        the dimension that tp divides, None where every tp rank has the whole
    blocks     equal blocks of that dimension, each of which tp divides (fused matrices)
    itemsize   bytes per element where the model keeps it in another dtype than the run's
    stacked    it is [experts, ...], which ep divides
    form       how it is seen as matrices, where Muon would take it
    matrix     the shape of what it has the groups of, [out, in] or [experts, out, in]: its own shape is of bytes then
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    group: int = 0
    cut: int | None = None
    itemsize: int | None = None
    blocks: int = 1
    stacked: bool = False
    form: Form | None = None
    matrix: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        """Return the hash, computed once."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def unnamed(self) -> Weight:
        """Return one weight for all that differ from this one in names alone."""
        return _one_of_equals(replace(self, name=""))

    @cached_property
    def numel(self) -> int:
        """Count the elements of the whole."""
        return prod(self.shape)

    def local(self, tp: int) -> tuple[int, ...]:
        """Return the shape on one of `tp` ranks."""
        if self.cut is None or tp == 1:
            return self.shape
        return tuple(size // tp if i == self.cut else size for i, size in enumerate(self.shape))

    def experts(self, ep: int) -> tuple[int, ...]:
        """Return the shape on one of `ep` ranks, of what is stacked."""
        return self.shape[0] // ep, *self.shape[1:]


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered, released and reduced together.

    copy_of  name of the unit whose weights these are once more (a tied head): it is there only on another pipeline
             stage than that unit
    """

    name: str
    weights: tuple[Weight, ...]
    copy_of: str | None = None


@dataclass(frozen=True)
class Instant:
    """Bytes alive at one instant beyond what was kept.

    cut, whole  bytes per token that tp divides, and that are on every tp rank
    gradients   bytes of parameters' gradients that autograd holds, and of decoded matrices; tp divides them
    """

    cut: float
    whole: float
    gradients: float = 0.0


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one token's forward, and activations in bytes of a 2-byte run.

    matrices   operations of matrix products with weights; tp divides them
    scores     operations of attention's scores and values; tp divides them
    kept_cut   bytes kept for the backward that tp divides (attention's and the MLP's inside)
    kept_whole bytes kept that lie on every tp rank; sequence parallelism divides those of blocks
    attention  of kept_cut, what recomputing attention alone frees
    eager      attention keeps its scores, as a flash kernel would not
    again      of matrices, those that recomputing attention alone repeats
    input      bytes of the part's input, all that is kept where the whole part is recomputed
    transient  bytes alive at the peak of its backward beyond the kept ones; tp divides them
    instants   those that may be the fullest of its backward, where they are known better than by `transient`
    rerun      of a block's forward, where all of it runs again in its backward, those that may be the fullest
    over_tp    what holds where tp > 1, if that is not this divided
    fused      what holds at tp 1 and sp 1, where one kernel does all of a mixer behind in_proj (mixers.py)
    moved      bytes that kernels of mixers read and write in a forward (mixers.py); tp divides them
    launches   kernels of a forward, and of a backward, where each is launched by itself; 0: not counted
    passed     bytes that those of them read and write which are no products; 0: not counted
    back       of a tower: operations of its backward over those of its forward, 0 where it is frozen; else None
    trained    of a tower: bytes that its forward would keep were it trained, which go through memory anyhow
    """

    matrices: float
    scores: float = 0.0
    kept_cut: float = 0.0
    kept_whole: float = 0.0
    attention: float = 0.0
    eager: bool = False
    again: float = 0.0
    input: float = 0.0
    transient: float = 0.0
    instants: tuple[Instant, ...] = ()
    rerun: tuple[Instant, ...] = ()
    over_tp: Operations | None = None
    fused: Operations | None = None
    moved: float = 0.0
    launches: tuple[float, float] = (0.0, 0.0)
    passed: tuple[float, float] = (0.0, 0.0)
    back: float | None = None
    trained: float = 0.0


@dataclass(frozen=True)
class Part:
    """An embedding, a block, the head with the last norm, or a part of a vision tower, whole on every tp and sp rank.

    active      parameters that a token meets, all if None
    attends     a block has attention; it may have convolutions and scans beside it, or in its place, of one sequence in
                a 2-byte run
    dispatched  operations and activations where tokens are sent to experts; None of a part without any
    single      a block of one module, attention, a mixer or an MLP: tp ranks meet once in it, not twice
    groups      what tp ranks may share of its Mamba2 mixer
    """

    kind: str
    units: tuple[Unit, ...]
    operations: Operations
    active: int | None = None
    dispatched: Operations | None = None
    attends: bool = True
    convolutions: tuple[Halo, ...] = ()
    scans: tuple[Scanned, ...] = ()
    single: bool = False
    groups: SharedGroups | None = None

    def __hash__(self) -> int:
        """Return the hash, computed once."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.units, self.operations, self.active, self.dispatched, self.mixes, self.meets))

    @property
    def mixes(self) -> tuple[bool, tuple[Halo, ...], tuple[Scanned, ...]]:
        """Return what mixes the tokens of a sequence."""
        return self.attends, self.convolutions, self.scans

    @property
    def meets(self) -> tuple[bool, SharedGroups | None]:
        """Return what tp ranks send in it beside what they do in attention and an MLP."""
        return self.single, self.groups

    @property
    def still(self) -> bool:
        """Return whether it has no backward: a frozen tower."""
        return self.operations.back == 0

    @property
    def recomputes(self) -> bool:
        """Return whether it may be recomputed: a block, or one of a tower that is trained."""
        return self.kind == "block" or (self.kind == "tower" and self.operations.input > 0)

    @cached_property
    def likeness(self) -> int:
        """Return a number that parts share which differ in names alone: blocks; of others each has its own."""
        if self.kind != "block":
            return self._hash
        outer = self.units[0].name.partition("/")[0] if self.units else ""
        units = [
            (unit.name.removeprefix(outer), unit.copy_of, *(weight.unnamed for weight in unit.weights))
            for unit in self.units
        ]
        return hash((tuple(units), self.operations, self.active, self.dispatched, self.mixes, self.meets))

    @cached_property
    def numel(self) -> int:
        """Count the parameters, copies left out."""
        return sum(weight.numel for unit in self.units if unit.copy_of is None for weight in unit.weights)

    @cached_property
    def stacked(self) -> int:
        """Count the parameters of experts that ep shares out."""
        return sum(weight.numel for unit in self.units for weight in unit.weights if weight.stacked)


@lru_cache(maxsize=4096)
def _one_of_equals(weight: Weight) -> Weight:
    return weight


@dataclass(frozen=True)
class ModelSpec:
    """A model at one sequence length.

    heads   of queries
    experts of a layer, 0 for a dense model; chosen: those that a token meets
    latent  width of the rows that experts take, 0 where it is the hidden one
    routers layers whose experts a loss balances (output_router_logits), 0 where none does
    chain   pipelines can cut it
    mixing  kinds of layers that mix the tokens of a sequence in a way that sp cannot cut
    tiles   its loss can be computed in tiles (train.tiled_loss)
    tower   what turns images into tokens, which the cut of a pipeline counts
    patches of a sequence's images, 0 where text alone was traced; pixels: bytes of these images in a batch
    seeing  bytes for each token at the fullest instant of the tower's forward, beyond what was there before it
    """

    name: str
    parts: tuple[Part, ...]
    length: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    experts: int = 0
    chosen: int = 0
    latent: int = 0
    routers: int = 0
    provenance: str = "closed form"
    chain: bool = True
    mixing: str | None = None
    tiles: bool = True
    tower: Tower = BLIND
    patches: int = 0
    pixels: int = 0
    seeing: float = 0.0

    def __hash__(self) -> int:
        """Return the hash, computed once: plans by the thousand are priced for one model."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.parts, self.length))

    @cached_property
    def params(self) -> int:
        """Count all parameters (Psi), tied ones once."""
        return sum(part.numel for part in self.parts)

    @cached_property
    def weights(self) -> int:
        """Count all parameters, and in the place of bytes the weights that they have been packed from."""
        packed = (w for part in self.parts for unit in part.units for w in unit.weights if w.matrix is not None)
        return self.params + sum(prod(weight.matrix or ()) - weight.numel for weight in packed)

    @cached_property
    def trainable(self) -> int:
        """Count the parameters that get gradients."""
        return sum(
            weight.numel
            for part in self.parts
            for unit in part.units
            if unit.copy_of is None
            for weight in unit.weights
            if weight.trainable
        )

    @cached_property
    def stacked(self) -> int:
        """Count the parameters of experts that ep can share out."""
        return sum(part.stacked for part in self.parts)

    @cached_property
    def blocks(self) -> tuple[Part, ...]:
        """Return the repeated parts."""
        return tuple(part for part in self.parts if part.kind == "block")


class Patches(NamedTuple):
    """The patches of a sequence: what a vision tower works on.

    images  among which these are divided
    asked   by an option, and not read in files
    tiles   they are tiles or whole images of one size, and each has several patches
    """

    number: int
    images: int = 1
    asked: bool = False
    tiles: bool = False


class Forward(NamedTuple):
    """Says how a model's forward runs where it is traced.

    on_card   as on a card: mixers call kernels
    autocast  in autocast
    patches   of the images of a sequence; None: of one image
    """

    on_card: bool = False
    autocast: bool = False
    patches: Patches | None = None


# --- cluster ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One device.

    memory     bytes
    flops      dense bf16 (fp16 where there is no bf16) peak per second
    bandwidth  of its memory, bytes per second
    matrix     what products of large matrices reach of the peak, where that was measured
    flash      what attention reaches of it, where that was measured; then `bandwidth` was measured, too
    half       smallest side of a product at which it reaches half of `matrix`; 0: at any
    power      watts that the device takes at most, None where nobody knows
    bf16       it multiplies in bf16
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    matrix: float | None = None
    flash: float | None = None
    half: float = 0.0
    power: float | None = None
    bf16: bool = True

    @property
    def precision(self) -> str:
        """Return in which of 16 bits it is planned."""
        return "bf16" if self.bf16 else "fp16"


@dataclass(frozen=True)
class Link:
    """A link, as one GPU can use it one way: latency + bytes / bandwidth, half of the bandwidth at `half` bytes.

    partners  GPUs to each of which it has a link of its own, all of them together `bandwidth`; 0: any has all of it
    """

    bandwidth: float
    latency: float = 5e-6
    half: float = 1e6
    partners: int = 0

    def to(self, others: int) -> float:
        """Return the bandwidth to so many GPUs at a time."""
        return self.bandwidth * min(others, self.partners) / self.partners if self.partners else self.bandwidth


@dataclass(frozen=True)
class MeasuredStep:
    """Holds what steps of zero3d took on a machine, in place of the constants that plans have where nobody measured.

    fixed        seconds per step: launching, data, logging
    block        seconds per block and micro-batch that the host adds, however small the block is
    rest_passes  over what is kept for the backward: norms, activations, the loss
    update       seconds of an update, of those that the bytes of its states take
    hide_dp      share of the data axis' communication that computation hides
    """

    fixed: float = constant("step", "fixed")
    block: float = 0.0
    rest_passes: float = constant("kernels", "rest_passes")
    update: float = 1.0
    hide_dp: float = constant("zero3d", "hide_dp")


@dataclass(frozen=True)
class ClusterSpec:
    """Nodes of alike GPUs.

    per_node        GPUs that `inside` joins; per_host: of them those of a machine, where a node is several
    inside, across  links between GPUs of a node, and of two nodes
    host_memory     bytes of a node
    host_link       GPU to host memory, bytes per second and GPU
    host_bandwidth  of a node's memory, bytes per second, read and written, over all its GPUs' processes
    disk            bytes per second and node, read and written in turns
    step            what steps were measured to take beside; None: the planner's constants
    communicator    bytes of one of NCCL's communicators; None: the planner's constant
    spread          share by which a rank's own work may take less or more than planned, where steps were measured here;
                    None: the planner's constants, as of communication, waits and bubbles in any case
    provenance      field name -> measured | datasheet | user
    """

    gpu: Gpu
    nodes: int
    per_node: int
    inside: Link
    across: Link
    host_memory: float
    host_link: float = 20e9
    disk: float = 2e9
    host_bandwidth: float = 100e9
    step: MeasuredStep | None = None
    communicator: float | None = None
    spread: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict, hash=False)
    per_host: int | None = None

    def __hash__(self) -> int:
        """Return the hash, computed once: a cluster is in the key of many caches."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.gpu, self.nodes, self.per_node, self.inside, self.across))

    def figure(self, said: Figure) -> float:
        """Return what a tier's row says of bytes or bytes per second: a field of this cluster, or the figure itself."""
        return float(getattr(self, said)) if isinstance(said, str) else said

    @property
    def gpus(self) -> int:
        """Count all GPUs."""
        return self.nodes * self.per_node

    @property
    def on_host(self) -> int:
        """Count the GPUs of a machine, which a launcher calls a node."""
        return min(self.per_node, self.per_host or self.per_node)

    @property
    def hosts(self) -> int:
        """Count the machines."""
        return self.nodes * -(-self.per_node // self.on_host)

    def sized(self, nodes: int, per_node: int) -> ClusterSpec:
        """Return so many nodes of so many of these GPUs: a node of more or fewer machines has their hosts' figures."""
        of = self.per_host or max(per_node, self.per_node)
        times = -(-per_node // of) / -(-self.per_node // of)
        hosts = {name: times * getattr(self, name) for name in ("host_memory", "host_bandwidth", "disk")}
        return replace(self, nodes=nodes, per_node=per_node, **hosts)


# --- plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, init=False)
class ParallelPlan(Spec):
    """Describes a way to train a model: all settings of a run, and what only a planner has.

    Ranks = dp x tp x pp; sequences per step = micro_batch x accumulate x rows, and rows = dp / sp. What keys of
    sections mean is said where they are declared (`zero3d.spec`), and any of them is written by itself:

        ParallelPlan(dp=8, stage=3, offload="host")       `PLAN_KEYWORDS`
        plan.zero.stage, plan.offload.optimizer           where they are
        plan.replace(stage=2, offload="none")             another plan

    zero, offload, mesh  the sections, each whole; of `offload`, "auto" is no place
    autocast       the forward runs in autocast, as the model was traced then
    activations    none, full, every:K, selective
    optimizer      the name of its row (spec/optimizer.py)
    ema            decay of an average of the weights that is kept beside the moments (train.ema); None: none is
    replay         every so many steps one micro-batch is computed twice (health.replay); 0: never
    linear         fp8 where linear layers of blocks multiply in it (model.linear); None: they do not
    quantize       the format of frozen linear layers (model.quantize), whose bytes a model says; None: none
    micro_batch, accumulate  sequences of a forward; forwards of a step
    virtual        model chunks per rank of a pipeline
    tiled_loss     the loss is computed tile by tile, without logits of the whole vocabulary (train.tiled_loss); auto:
                   as `footprint.tiles_loss` says
    compile        blocks are compiled, so that what is between products runs in few kernels (train.compile)
    asynchronous_saves  checkpoints on the way are written behind training, from a copy on the host (saves.py)
    """

    mesh: Mesh = field(default_factory=lambda: Mesh(1, 1, 1, 1, 1, schedule=DEFAULT))
    activations: str = "none"
    optimizer: str = ADAMW
    micro_batch: int = 1
    accumulate: int = 1
    virtual: int = 1
    tiled_loss: bool | str = False
    compile: bool = False
    asynchronous_saves: bool = False

    def __init__(self, **settings: Any) -> None:
        """Make a plan of sections, keys of sections, and other fields. Raises ConfigError for what it does not have."""
        plain = _defaults()
        if settings.keys() >= plain.keys() and not all(isinstance(settings[name], SECTIONS[name]) for name in SECTIONS):
            raise ConfigError(
                "dataclasses.replace(plan, ...) takes whole sections: plan.replace(...) changes single keys."
            )
        made = {**plain, **by_section(placed(settings, PLAN_KEYWORDS), plain)}
        unknown = [key for key in (*Degrees._fields, "schedule") if getattr(made["mesh"], key) is None]
        if unknown:
            made["mesh"] = replace(made["mesh"], **{key: getattr(plain["mesh"], key) for key in unknown})
        vars(self).update(made)

    def __hash__(self) -> int:
        """Return the hash of what plans of a search differ in, computed once: a plan is the key of many caches."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        sizes = self.micro_batch, self.accumulate, self.activations
        return hash((self.zero, self.offload, self.mesh, *sizes))

    def replace(self, **settings: Any) -> ParallelPlan:
        """Return a plan with other settings: keywords, or from a mapping keys as in a file. Raises ConfigError."""
        made = object.__new__(ParallelPlan)
        now = {**vars(self)}
        now.pop("_hash", None)  # of this plan
        vars(made).update(now | by_section(placed(settings, PLAN_KEYWORDS), now))
        return made

    def having(self, **whole: Any) -> ParallelPlan:
        """Return a plan with other fields, sections whole: `replace` without looking up whose keys these are."""
        made = object.__new__(ParallelPlan)
        now = vars(made)
        now.update(vars(self))
        now.pop("_hash", None)
        now.update(whole)
        return made

    def sized(self, micro_batch: int, accumulate: int) -> ParallelPlan:
        """Return the plan with other micro-batches."""
        return self.having(micro_batch=micro_batch, accumulate=accumulate)

    @property
    def schedule(self) -> str:
        """Return the order of a pipeline's forwards and backwards."""
        return self.mesh.schedule or DEFAULT

    @property
    def compute(self) -> Dtype:
        """Return the dtype of weights that are cast, and of activations: others' plans in fp8 have these in bf16."""
        return BY_NAME.get(self.precision, BF16)

    @property
    def averages(self) -> int:
        """Count the averages of each weight that are kept: none or one."""
        return int(self.ema is not None)

    @property
    def world(self) -> int:
        """Count the ranks."""
        return self.dp * self.tp * self.pp

    @property
    def degrees(self) -> Degrees:
        """Return the degrees of its axes."""
        shard = None if self.shard == self.dp else self.shard
        return Degrees(self.pp, self.dp, self.tp, self.ep, self.sp, shard)

    @property
    def replicate(self) -> int:
        """Count the copies of each shard of states."""
        return self.dp // self.shard

    @property
    def rows(self) -> int:
        """Count the ranks of dp that have other sequences than each other."""
        return self.dp // self.sp

    def tokens(self, length: int) -> int:
        """Count the tokens of a micro-batch that a rank computes: of each sequence its part, the longest one."""
        return self.micro_batch * -(-length // self.sp)

    @property
    def dispatches(self) -> bool:
        """Say whether tokens are sent to experts, in units of their own: in exact mode at any ep."""
        return self.ep > 1 or self.zero.exact

    def as_dict(self) -> dict[str, Any]:
        """Return all settings by keyword, for JSON."""
        return {
            name: getattr(getattr(self, field), key) if key else getattr(self, field)
            for name, (field, key) in PLAN_KEYWORDS.items()
        }


PLAN_KEYWORDS = dict(sorted(keywords(ParallelPlan).items(), key=lambda item: [*ORDER, item[0]].index(item[0])))


@cache
def _defaults() -> Mapping[str, Any]:
    """Return the fields of a plan that says nothing."""
    made = ((each, each.default_factory) for each in fields(ParallelPlan))
    return {each.name: each.default if make is MISSING else make() for each, make in made}


PLAIN = ParallelPlan()  # of which others are made


# --- estimate -----------------------------------------------------------------------------------


APART = tuple(row.name for row in TIERS.values() if not row.on_host)  # tiers with memory of their own


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank.

    states     parameters, gradients, optimizer, as `account.states.unit_bytes` counts
    allocated  the most live bytes at any instant (torch's max allocated)
    reserved   what the allocator took from the device for it (max reserved)
    device     what a device monitor shows: reserved and the contexts of CUDA and NCCL
    host       of the fullest node's memory
    parts      bytes by category at the instant of the peak; they add up to `allocated`
    instant    when that is, and on which rank class
    tiers      of the fullest node's other tiers, by name: those that take no memory of the host
    away       bytes of states that a rank has off the device: by place, then by category
    on_host    what `host` is made of, for each process
    """

    states: float
    allocated: float
    reserved: float
    device: float
    host: float
    parts: Mapping[str, float] = field(default_factory=dict)
    instant: str = ""
    tiers: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(APART, 0.0))
    away: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    on_host: Mapping[str, float] = field(default_factory=dict)

    def by_tier(self) -> dict[str, float]:
        """Return the bytes of the fullest node by tier, with all else that the host's memory has in its own."""
        return {HOST: self.host, **self.tiers}

    def lacks(self, cluster: ClusterSpec) -> dict[str, float]:
        """Return by how many bytes the fullest node's tiers are too small, those that are."""
        over = {name: held - cluster.figure(TIERS[name].capacity) for name, held in self.by_tier().items()}
        return {name: more for name, more in over.items() if more > 0}


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step, from the lucky to the unlucky; parts add up to mid."""

    low: float
    mid: float
    high: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """The memory a plan needs and the time of a step.

    traffic  bytes that the busiest rank sends per step, by operation and axis: of zero3d, empty for other systems
    tokens   of a step, over all ranks
    flops    useful operations of a step, over all ranks (no recomputation)
    notes    what a reader must know of these figures
    """

    memory: Memory
    seconds: Seconds
    traffic: Mapping[str, float]
    tokens: int
    flops: float
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; bytes of each tier under its name."""
        tree = asdict(self)
        tree["memory"] |= tree["memory"].pop("tiers")
        return tree


Evaluate = Callable[[ModelSpec, ClusterSpec, ParallelPlan], Estimate]
