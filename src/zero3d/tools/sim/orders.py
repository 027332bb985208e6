"""The actions of every pipeline stage in a step, in order: gpipe and 1f1b by rule, the others as torch plans them.

    gpipe   all forwards, then all backwards
    1f1b    p - 1 - s forwards on stage s of p, then a forward and a backward in turn, then the backwards left

torch 2.13's own plan of 1f1b (not its execution) has the last stage begin with micro-batch 1.
"""

from __future__ import annotations

from zero3d.engine.engine import Engine
from zero3d.tools.sim.result import PipelineAction


def orders(engine: Engine, schedule: str, micro_batches: int) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of every pipeline stage; none without a pipeline. The engine has made a step."""
    stages = engine.mesh.pp
    if engine.pipeline is None:
        return ()
    if schedule in ("gpipe", "1f1b"):
        ahead = [micro_batches if schedule == "gpipe" else stages - 1 - stage for stage in range(stages)]
        return tuple(one_chunk(stage, ahead[stage], micro_batches) for stage in range(stages))
    plan = engine.pipeline.planned_order(micro_batches)
    return tuple(tuple(PipelineAction(*action) for action in plan[stage]) for stage in range(stages))


def one_chunk(stage: int, ahead: int, micro_batches: int) -> tuple[PipelineAction, ...]:
    """Return the actions of a stage of one model chunk that runs `ahead` forwards before it alternates."""
    forwards = [PipelineAction("F", stage, number) for number in range(micro_batches)]
    backwards = [PipelineAction("B", stage, number) for number in range(micro_batches)]
    row, rest = forwards[:ahead], forwards[ahead:]
    for forward, backward in zip(rest, backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(rest) :])
