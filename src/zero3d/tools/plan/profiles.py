"""How systems spend memory and time, one profile each. zero3d's own memory is memory.py's, its time is here.

    system               bytes per parameter, d data-parallel ranks
    -------------------  -----------------------------------------------------------------------------------------
    megatron             18; distributed optimizer (stage 1) 6 + 12/d
    megatron-core        the same; hides most of tp and dp, and of experts' rows; all experts get as many by force
    deepspeed            stages 0-3: 20, 4 + 16/d, 2 + 18/d, 20/d: 16 and an fp32 copy of gradients; + 4 if
                         accumulated in fp32
    megatron-deepspeed   the same
    deepspeed-0.3        16 as in the ZeRO paper; gathers every parameter by itself
    torchtitan           16/d, bf16 copies of two units; in pipelines whole weights and gradients
    torchtitan-async-tp  the same; tp's all-reduces run beside products
    automodel            the same; a token's experts are neighbours by force (benchmarks)
    kempnerforge         8/d, all in bf16, and whole gradients in fp32 while several micro-batches are summed;
                         every tp rank has all logits
    nanotron             18; ZeRO-1 6 + 12/d
    peft                 the engine's arithmetic, on a trace: Trainer with PEFT, of adapters on a frozen base
    peft-gptq            the same on a base in GPTQ's 4 bits, in fp16 without autocast
    peft-zero3           the same over DeepSpeed's stage 3, which keeps gathered weights for their next use
    fsdp-qlora           the same over FSDP, whose loss copies its logits
    litgpt               the same; layers in 4 bits keep their inputs

What a system does by design stands in DESIGNS; numbers that were fitted, and on which rows, in constants.py.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from zero3d.blueprint.stages import stage_row
from zero3d.errors import ConfigError
from zero3d.tools.plan.constants import VALUES, Values, constant, of_system
from zero3d.tools.plan.kernels import Kernels
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.time import Cut, Pace


@dataclass(frozen=True)
class Profile:
    """A system.

    weight, gradient, optimizer  bytes per parameter; the stage says which are divided by dp (or shard)
    shard_weight                 at stage 3, bytes of the weight's shard where it is kept wider than `weight`
    keeps_in_pipelines           at stage 3, whole weights and gradients stay through a pipeline's step
    loss_over_tp                 bytes per logit of a loss over tp, beyond those that any loss has
    every_other                  "selective" keeps a block's input, outputs of every second product, and attention's;
                                 else all but attention's scores
    whole_logits                 every tp rank has the logits of all tokens of the vocabulary
    sums_whole                   bytes per parameter of gradients that are summed whole over a step's micro-batches
    spare                        reserved over live bytes
    context, communicator        bytes that no allocator sees: of CUDA, and of NCCL for each communicator
    buffers                      bytes of communication buckets
    units                        gathered at a time at stage 3
    for_hopper                   on a Hopper card its attention is cuDNN's
    pace                         of its time
    tight                        the least reserved over live bytes: a full device lets go of what is not live
    traced                       its activations and states are what the engine's arithmetic makes of a trace
    loss_more                    bytes per logit beside those of a loss that takes them in fp32, without a copy
    packed_input                 bytes per element that a layer in few bits keeps of its input, if nothing is recomputed
    decoded                      bytes moved for each weight that is decoded; 0: as zero3d does
    live                         at stage 3, bytes of gathered weights that are kept for their next use
    """

    name: str
    weight: float
    gradient: float
    optimizer: float
    pace: Pace
    spare: float = constant("other systems", "spare")
    context: float = constant("other systems", "context")
    communicator: float = constant("other systems", "communicator")
    shard_weight: float = 2.0
    loss_over_tp: float = 0.0
    every_other: bool = False
    buffers: float = constant("other systems", "buffers")
    units: int = 2
    for_hopper: bool = False
    keeps_in_pipelines: bool = False
    sums_whole: float = 0.0
    whole_logits: bool = False
    tight: float = 1.0
    traced: bool = False
    loss_more: float = 0.0
    packed_input: float = 0.0
    live: float = 0.0
    decoded: float = 0.0

    def rates(self, plan: ParallelPlan) -> tuple[float, float, float]:
        """Return the bytes per parameter on one rank: weight, gradient, optimizer."""
        row = stage_row(plan.zero.stage)
        accumulated = plan.zero.reduce_dtype == "fp32" and self.gradient < 4  # beside the 2-byte ones
        wide = 4.0 if accumulated else 0.0
        return (
            self.shard_weight / plan.shard if row.shards_parameters else self.weight,
            (self.gradient + wide) / (plan.shard if row.shards_gradients else 1),
            self.optimizer / (plan.shard if row.shards_optimizer else 1),
        )


PLAIN, WAITS = Pace({}), Pace({}, blocking=True)
DESIGNS = (
    Profile("zero3d", 2, 4, 12, Pace({}, as_zero3d=True)),
    Profile("megatron", 2, 4, 12, WAITS),
    Profile("megatron-core", 2, 4, 12, Pace({}, balanced=True), for_hopper=True),
    Profile("deepspeed", 2, 2, 16, PLAIN),
    Profile("megatron-deepspeed", 2, 2, 16, replace(WAITS, cut=Cut(filled=True))),
    Profile("deepspeed-0.3", 2, 2, 12, PLAIN),
    Profile("torchtitan", 2, 4, 8, PLAIN, shard_weight=4, keeps_in_pipelines=True, every_other=True),
    Profile("torchtitan-async-tp", 2, 4, 8, PLAIN, shard_weight=4, keeps_in_pipelines=True, every_other=True),
    Profile("automodel", 2, 4, 8, Pace({}, forced=True), shard_weight=4, keeps_in_pipelines=True, for_hopper=True),
    Profile("kempnerforge", 2, 2, 4, PLAIN, whole_logits=True),
    Profile("nanotron", 2, 4, 12, Pace({}, all_sum=True, cut=Cut(head=None))),
    Profile("peft", 2, 4, 12, PLAIN, traced=True),
    Profile("peft-gptq", 2, 4, 12, PLAIN, traced=True),
    Profile("peft-zero3", 2, 4, 12, PLAIN, traced=True),
    Profile("fsdp-qlora", 2, 4, 12, PLAIN, traced=True),
    Profile("litgpt", 2, 4, 12, PLAIN, traced=True),
)
SPEED = "speed "


def profiles(values: Values = VALUES) -> dict[str, Profile]:
    """Make the profiles of all systems from these constants."""
    shared, kernels = of_system("other systems", values), Kernels.of(values)
    for_hopper = kernels.for_hopper()
    return {
        design.name: _fitted(
            design, shared, of_system(design.name, values), for_hopper if design.for_hopper else kernels
        )
        for design in DESIGNS
    }


def _fitted(design: Profile, shared: dict[str, Any], values: dict[str, Any], kernels: Kernels) -> Profile:
    """Put a system's constants into its design's fields of their names; "speed a100" is one entry of speed."""
    values = {**shared, **values}
    if "decoded" in values:
        kernels = replace(kernels, decoded=values["decoded"], decoded_nf4=values["decoded"])
    speed = {name.removeprefix(SPEED): number for name, number in values.items() if name.startswith(SPEED)}
    pace, bytes_ = (
        {field.name: values[field.name] for field in fields(part) if field.name in values}
        for part in (design.pace, design)
    )
    return replace(design, pace=replace(design.pace, speed=speed, kernels=kernels, **pace), **bytes_)


PROFILES = profiles()
SYSTEMS = tuple(PROFILES)


def profile(system: str) -> Profile:
    """Look up a profile by name. Raises ConfigError with the nearest."""
    if system in PROFILES:
        return PROFILES[system]
    near = difflib.get_close_matches(system, SYSTEMS, n=1, cutoff=0.3)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"system={system!r} is unknown: pass one of {', '.join(SYSTEMS)}.{hint}")
