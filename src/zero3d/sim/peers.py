"""What the other ranks of a replica would tell this one, which is alone.

Ranks of a replica tell each other in a first step which norms they have, and exchange as many numbers as the one with
the most ever after. How many that are follows from the units of every pipeline stage: a norm for each trainable
parameter of which the shard has a part, copies of tied ones apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from zero3d.config import Config
from zero3d.distributed.mesh import Mesh
from zero3d.pipeline.schedules import Schedule
from zero3d.plan.held import rank_of
from zero3d.plan.spec import ModelSpec, ParallelPlan, Weight
from zero3d.sim.patches import replaced
from zero3d.sim.trace import outline
from zero3d.zero import model_group

ABSENT = -1.0


def norms_of_replica(config: Config, mesh: Mesh, model: nn.Module) -> list[list[float]]:
    """What each rank of the replica tells. The model is whole, on the meta device.

    A parameter's slices are those of the model's own tp plan.
    """
    if mesh.pp == 1:
        return []
    spec = outline(model, config.data.length, blocks=config.mesh.blocks)
    rows = [_norms(spec, config, mesh, model, stage) for stage in range(mesh.pp)]
    return [list(row) for row in rows for _ in range(mesh.tp)]


@contextmanager
def told(rows: list[list[float]], me: int) -> Iterator[None]:
    """Inside, `ModelGroup` hears these rows from its ranks; what rank `me` says of itself is true in any case."""

    def heard(values: Tensor, assumed: list[float]) -> list[float]:
        return _answers(rows, me, assumed) if rows else assumed

    with replaced(model_group, "host_value", heard):
        yield


def _answers(rows: list[list[float]], me: int, assumed: list[float]) -> list[float]:
    """To the question how many norms each rank has, then to that which they are. assumed: as if all were like me."""
    if len(assumed) == 1:
        rows[me] = rows[me][: int(assumed[0])] + [ABSENT] * (int(assumed[0]) - len(rows[me]))
        return [float(len(row)) for row in rows]
    longest = len(assumed) // len(rows)
    rows[me] = assumed[:longest]
    return [value for row in rows for value in row + [ABSENT] * (longest - len(row))]


def _norms(spec: ModelSpec, config: Config, mesh: Mesh, model: nn.Module, stage: int) -> list[float]:
    """What a rank of a pipeline stage tells: `ModelGroup._arrange`."""
    schedule = Schedule.of(config.mesh.schedule).name
    plan = ParallelPlan(mesh.dp, mesh.tp, mesh.pp, schedule=schedule, accumulate=mesh.pp, precision=config.precision)
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    weights = {w.name: w for part in spec.parts for unit in part.units if unit.copy_of is None for w in unit.weights}
    found = []
    for units in rank_of(spec, plan, stage).units.values():
        for unit in units:
            layout = unit.layout
            for piece in layout.pieces(mesh.place.dp) if unit.trainable else ():
                name = layout.slots[piece.slot].name
                cuts = layout.grid_cells(piece.offset, piece.stop - piece.start) if config.zero.exact else [(0, 0, 0)]
                if name in places:
                    own = _told(weights[name], places, mesh.tp)
                    found += [2.0 * model_group.STRIDE * segment + own for segment, _, _ in cuts]
    return sorted(found)


def _told(weight: Weight, places: dict[str, int], tp: int) -> float:
    """Its place in the model, twice, and whether tp cuts it."""
    return 2.0 * places[weight.name] + (tp > 1 and weight.cut is not None)
