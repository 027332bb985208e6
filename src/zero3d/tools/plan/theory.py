"""The ZeRO paper's tables for any model and cluster, and the engine's own figures beside them.

    bytes     fp16 weights 2 Psi + fp16 gradients 2 Psi + optimizer K Psi, K = 12: fp32 master, m, v
    when      gradients come with a backward, and go with the update: nobody has them at rest
    traffic   ring all-reduce 2 Psi (N-1)/N = reduce-scatter + all-gather, Psi (N-1)/N each

Source: Rajbhandari et al., "ZeRO" (2020), sections 3.1 (mixed precision), 5 (figure 1) and 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from zero3d.account.states import StateBytes, engine_bytes, paper_bytes
from zero3d.account.traffic import gathered_width, traffic_elements
from zero3d.blueprint.stages import STAGES, stage_row
from zero3d.spec.zero import CAST, KEPT

HALF, FULL, K = 2, 4, 12  # bytes of fp16 or bf16, of fp32, of the optimizer per parameter: fp32 master, m and v
NAMES = ("baseline", "Pos", "Pos+g", "Pos+g+p")  # the paper's names of stages 0-3
ENGINES: Mapping[str, Mapping[str, Any]] = {  # name of a row -> settings of `engine_bytes`
    "weights kept": {"weights": KEPT},
    "weights cast": {"weights": CAST},
}
EXAMPLES = (("7B", 7 * 10**9), ("1.5B", 15 * 10**8))  # a common size, and the paper's GPT-2 (section 3.1)


class Breakdown(NamedTuple):
    """Bytes of mixed-precision training with Adam on one device, nothing sharded."""

    weights: int
    gradients: int
    master: int
    m: int
    v: int

    @property
    def optimizer(self) -> int:
        return self.master + self.m + self.v

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


class StageTheory(NamedTuple):
    """One row per stage; all figures per rank, traffic per step of one micro-batch.

    paper           bytes by the paper's formula
    engine          bytes this engine holds: bf16, one micro-batch per step, padding apart
    reduce_scatter  elements sent, which are as many received
    all_gather      likewise
    bytes_half      bytes sent if everything travels in 2 bytes, as in the paper
    bytes_engine    bytes this engine sends: reductions in fp32, gathered weights in bf16
    """

    stage: int
    name: str
    paper: StateBytes
    engine: StateBytes
    reduce_scatter: Fraction
    all_gather: Fraction
    bytes_half: Fraction
    bytes_engine: Fraction

    @property
    def elements(self) -> Fraction:
        return self.reduce_scatter + self.all_gather

    @property
    def multiples(self) -> tuple[int, int]:
        """Return reduce-scatters and all-gathers as multiples of Psi (N-1)/N elements."""
        unit = traffic_elements(self.stage, params=2, n=2)  # Psi (N-1)/N = 1
        return int(unit["reduce_scatter"]), int(unit["all_gather"])


def at_stage_3(params: int, gpus: int) -> dict[str, StateBytes]:
    """Return the bytes of a rank at stage 3, by whose count that is: the paper's, and those of an engine."""
    engines = {name: engine_bytes(3, gpus, **settings).times(params) for name, settings in ENGINES.items()}
    return {"paper": paper_bytes(3, params, gpus, K), **engines}


def breakdown(params: int) -> Breakdown:
    """Return (2 + 2 + K) Psi, term by term."""
    return Breakdown(HALF * params, HALF * params, FULL * params, FULL * params, FULL * params)


def stage_theory(stage: int, params: int, gpus: int) -> StageTheory:
    """Compute everything the formulas say about one stage."""
    moved = traffic_elements(stage, params, gpus)
    reduced, gathered = moved["reduce_scatter"], moved["all_gather"]
    return StageTheory(
        stage,
        NAMES[stage],
        paper_bytes(stage, params, gpus, K),
        engine_bytes(stage, gpus).times(params),
        reduced,
        gathered,
        HALF * (reduced + gathered),
        FULL * reduced + gathered_width(stage_row(stage), HALF, FULL) * gathered,
    )


def all_stages(params: int, gpus: int) -> list[StageTheory]:
    """Return the rows of the paper's figure 1, in order of stage."""
    return [stage_theory(row.number, params, gpus) for row in STAGES]
