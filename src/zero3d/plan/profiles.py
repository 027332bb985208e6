"""How other systems spend memory and time, one profile each; and zero3d's own time.

    system      bytes per parameter, d data-parallel ranks                      activations        fitted
    ----------  --------------------------------------------------------------  -----------------  --------------------
    megatron    18; distributed optimizer (stage 1) 6 + 12/d                    kept, or inputs    -
    deepspeed   stage 0: 2+2+16, 1: 4 + 16/d, 2: 2 + 18/d, 3: 20/d              kept, or inputs    spare on bloom176b
                (fp32 copies of gradients at the update; ZeRO-Infinity's 20)
    torchtitan  16/d: fp32 weights, gradients, m, v; bf16 copies of two units   kept, or inputs    spare on torchtitan
    nanotron    18; ZeRO-1 6 + 12/d                                             kept               spare on nanotron

`spare` is what the allocator holds beyond live bytes (fragmentation, temporaries): one constant per system. `speed`
is what kernels reach of kernels.REACHED: one constant per system and card where that row of 1.0 was not fitted on the
system itself. All fits are on the published tables alone; benchmarks/planner_accuracy.py prints what errors they leave.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from zero3d.errors import ConfigError
from zero3d.plan.time import Pace
from zero3d.zero.stages import stage_row


@dataclass(frozen=True)
class Profile:
    """A system.

    weight, gradient, optimizer  bytes per parameter; the stage says which are divided by dp
    shard_weight                 at stage 3, bytes of the weight's shard where it is kept wider than `weight`
    interior                     of the activations a model says it keeps, the part that this system's kernels keep
    spare                        reserved over live bytes
    context                      bytes of CUDA and NCCL that no allocator sees
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
    buffers: float = 1e9
    units: int = 2
    notes: str = field(default="")

    def states(self, stage: int, dp: int, reduce_dtype: str) -> float:
        """Bytes per parameter on one rank."""
        row = stage_row(stage)
        weight = self.shard_weight / dp if row.shards_parameters else self.weight
        wide = 4.0 if reduce_dtype == "fp32" else self.gradient
        gradient = (wide if self.gradient < 4 else self.gradient) / (dp if row.shards_gradients else 1)
        return weight + gradient + self.optimizer / (dp if row.shards_optimizer else 1)


ZERO3D_PACE = Pace({}, hide_dp=0.9, gradient=4.0)
PROFILES = {
    "megatron": Profile("megatron", 2, 4, 12, 1.1, Pace({}, fixed=0.02)),
    "deepspeed": Profile("deepspeed", 2, 2, 16, 1.2, Pace({}), context=5e9),
    "torchtitan": Profile("torchtitan", 2, 4, 8, 1.1, Pace({}, hide_dp=0.9), shard_weight=4),
    "nanotron": Profile("nanotron", 2, 4, 12, 1.1, Pace({})),
}
SYSTEMS = ("zero3d", *PROFILES)


def profile(system: str) -> Profile:
    """By name. Raises ConfigError with the nearest."""
    if system in PROFILES:
        return PROFILES[system]
    near = difflib.get_close_matches(system, SYSTEMS, n=1, cutoff=0.3)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"system={system!r} is unknown: pass one of {', '.join(SYSTEMS)}.{hint}")
