"""How systems spend memory and time, one profile each. zero3d's own memory is memory.py's, its time is here.

    system              bytes per parameter, d data-parallel ranks              fitted, and on which published table
    ------------------  ------------------------------------------------------  ----------------------------------------
    megatron            18; distributed optimizer (stage 1) 6 + 12/d            speed 0.97: megatron2021_table1
    megatron-core       the same; hides most of tp and dp                       hide_tp 0.5: megatron_core_h100
    deepspeed           stages 0-3: 20, 4 + 16/d, 2 + 18/d, 20/d: 16 and an     speed, network, unit_hops:
                        fp32 copy of gradients; + 4 if accumulated in fp32      deepspeed_azure_zero3_a100
    megatron-deepspeed  the same                                                spare, block: bloom176b_prequel
    deepspeed-0.3       16 as in the ZeRO paper; half the network of its        spare 1.0: zero_appendix_configs;
                        successor                                               network: megatron2021_table2
    torchtitan          16/d, bf16 copies of two units; in pipelines whole      spare, speed, selective:
                        weights and gradients                                   torchtitan_measured; hide_dp: IBM's FSDP
    nanotron            18; ZeRO-1 6 + 12/d                                     spare, speed: nanotron_best_configs

`spare` is what the allocator holds beyond live bytes: one constant per system. `speed` is what kernels reach of
kernels.REACHED, whose rows were fitted on galvatron's layer times (A100) and nanotron's runs (H100). Nothing was fitted
on rows outside those tables; `benchmarks/planner_accuracy.py` prints the errors that are left.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from zero3d.errors import ConfigError
from zero3d.plan.spec import ParallelPlan
from zero3d.plan.time import Pace
from zero3d.zero.stages import stage_row


@dataclass(frozen=True)
class Profile:
    """A system.

    weight, gradient, optimizer  bytes per parameter; the stage says which are divided by dp
    shard_weight                 at stage 3, bytes of the weight's shard where it is kept wider than `weight`
    keeps_in_pipelines           at stage 3, whole weights and gradients stay through a pipeline's step
    interior                     of the activations a model says it keeps, the part that this system's kernels keep
    selective                    of a block's interior, what its "selective" keeps; None: all but attention's scores
    spare                        reserved over live bytes
    context                      bytes of CUDA and NCCL that no allocator sees
    buffers                      bytes of communication buckets
    units                        gathered at a time at stage 3
    pace                         of its time
    """

    name: str
    weight: float
    gradient: float
    optimizer: float
    spare: float
    pace: Pace
    context: float = 2e9
    shard_weight: float = 2.0
    interior: float = 1.0
    selective: float | None = None
    buffers: float = 1e9
    units: int = 2
    keeps_in_pipelines: bool = False

    def rates(self, plan: ParallelPlan) -> tuple[float, float, float]:
        """Bytes per parameter on one rank: weight, gradient, optimizer."""
        row = stage_row(plan.stage)
        wide = 4.0 if plan.reduce_dtype == "fp32" and self.gradient < 4 else 0.0  # accumulated beside the 2-byte ones
        return (
            self.shard_weight / plan.dp if row.shards_parameters else self.weight,
            (self.gradient + wide) / (plan.dp if row.shards_gradients else 1),
            self.optimizer / (plan.dp if row.shards_optimizer else 1),
        )


A100_2021 = Pace({"a100": 0.97}, blocking=True)
AZURE = Pace({"a100": 0.9}, hide_dp=0.05, unit_hops=4.5, network=0.9)
DEEPSPEED_2021 = replace(AZURE, hide_dp=0.0, unit_hops=9.0, network=0.44)
PROFILES = {
    "zero3d": Profile("zero3d", 2, 4, 12, 1.06, Pace({}, hide_dp=0.65, own=True)),
    "megatron": Profile("megatron", 2, 4, 12, 1.1, A100_2021),
    "megatron-core": Profile("megatron-core", 2, 4, 12, 1.1, Pace({}, hide_dp=0.9, hide_tp=0.5)),
    "deepspeed": Profile("deepspeed", 2, 2, 16, 1.2, AZURE, context=5e9),
    "megatron-deepspeed": Profile(
        "megatron-deepspeed", 2, 2, 16, 1.2, Pace({}, block=0.0084, blocking=True), context=5e9
    ),
    "deepspeed-0.3": Profile("deepspeed-0.3", 2, 2, 12, 1.0, DEEPSPEED_2021, context=1e9, buffers=0.5e9),
    "torchtitan": Profile(
        "torchtitan",
        2,
        4,
        8,
        1.24,
        Pace({"h100-96": 0.93, "a100": 0.95}, hide_dp=0.65, again=0.5),
        shard_weight=4,
        selective=0.36,
        keeps_in_pipelines=True,
    ),
    "nanotron": Profile("nanotron", 2, 4, 12, 1.15, Pace({"h100": 1.06}), interior=1.2),
}
SYSTEMS = tuple(PROFILES)


def profile(system: str) -> Profile:
    """By name. Raises ConfigError with the nearest."""
    if system in PROFILES:
        return PROFILES[system]
    near = difflib.get_close_matches(system, SYSTEMS, n=1, cutoff=0.3)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"system={system!r} is unknown: pass one of {', '.join(SYSTEMS)}.{hint}")
