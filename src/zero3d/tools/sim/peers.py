"""The norms of the absent ranks of a model-parallel group, computed from the model alone.

In their first step the ranks of a group ask each other how many norms of gradients each has, then which ones
(`zero/model_group.py`), and exchange as many numbers as the rank with the most ever after. A dry run has one rank of
the group. What the others would answer follows from the units of every pipeline stage: a norm for each trainable
parameter of which the rank's shard has a piece, copies of tied parameters left out.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zero3d.blueprint.layout import CANONICAL
from zero3d.config import Config
from zero3d.distributed.mesh import Mesh
from zero3d.spec.sections import planned
from zero3d.spec.zero import Zero
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.rank_model import rank_model
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan
from zero3d.tools.sim.model_spec import outline
from zero3d.zero.model_group import NONE, NormKey, Peers


class AbsentPeers(Peers):
    """Answers for ranks that are not there; what is sent to them is counted as if they were.

    rows  keys of the norms of every rank of the group, by its place in it; `me` is this rank's place
    """

    def __init__(self, peers: Peers, rows: list[list[int]], me: int) -> None:
        super().__init__(peers.comm)
        self._rows, self._me = [list(row) for row in rows], me

    def norm_counts(self, count: int) -> list[int]:
        """Return how many norms every rank has; of this one `count` is true, whatever was computed."""
        super().norm_counts(count)
        return [count if rank == self._me else len(row) for rank, row in enumerate(self._rows)]

    def norm_keys(self, keys: list[int]) -> list[int]:
        """Return the rows of all ranks, filled up to the longest; this rank's is the one it passes."""
        super().norm_keys(keys)
        rows = [keys if rank == self._me else row for rank, row in enumerate(self._rows)]
        return [value for row in rows for value in row + [NONE] * (len(keys) - len(row))]


def norms_of_group(config: Config, mesh: Mesh, model: nn.Module) -> list[list[int]]:
    """Return the keys of the norms of every rank of this rank's model-parallel group; none without a pipeline.

    The model is whole, on the meta device. A parameter's slices are those of the model's own tp plan.
    """
    if mesh.pp == 1:
        return []
    spec = outline(model, config.data.length, blocks=config.mesh.blocks)
    rows = [_norms_of_stage(spec, config, mesh, model, stage) for stage in range(mesh.pp)]
    return [list(row) for row in rows for _ in range(mesh.tp)]


def _norms_of_stage(spec: ModelSpec, config: Config, mesh: Mesh, model: nn.Module, stage: int) -> list[int]:
    """Return the keys of the norms of a pipeline stage's ranks, ascending, as `ModelGroup._arrange` makes them."""
    plan = ParallelPlan(
        zero=Zero(exact=config.zero.exact),
        mesh=replace(planned(config.mesh), **mesh.degrees._asdict()),
        accumulate=mesh.pp,
        precision=config.precision,
    )
    exact = policy_of(plan).exact
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    weights = {w.name: w for part in spec.parts for unit in part.units if unit.copy_of is None for w in unit.weights}
    keys = []
    for units in rank_model(spec, plan, stage).units.values():
        for unit in units:
            layout = unit.layout
            first = CANONICAL // mesh.shard if unit.kind.experts else 0  # cells of experts come later
            for piece in layout.pieces(layout.rank_of(mesh.place.dp)) if unit.trainable else ():
                name = unit.names[piece.slot]
                cells = layout.grid_cells(piece.offset, piece.stop - piece.start) if exact else [(0, 0, 0)]
                if name in places:
                    cut = mesh.tp > 1 and weights[name].cut is not None and not unit.kind.experts
                    keys += [NormKey(first * exact + cell, places[name], cut) for cell, _, _ in cells]
    return [key.to_int() for key in sorted(keys)]
