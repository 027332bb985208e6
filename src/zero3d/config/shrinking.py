"""Fits a run to the ranks that are left, where health.min_ranks allows it: train.batch stays, accumulation grows.

batch 12, micro_batch 1             dp of 1, 2, ... 8 ranks
zero.exact                          1 2 2 4 4 4 4 4       the largest power of two that divides batch / micro_batch
without                             1 2 3 4 4 6 6 6       the largest number that does

zero.second_shard=4 is 3 at dp 6: the largest number of neighbours up to it that divides dp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zero3d.config.sections import Config
from zero3d.distributed.degrees import Degrees, least_dp
from zero3d.errors import MeshError
from zero3d.spec.mesh import Mesh
from zero3d.spec.zero import Zero

EXACT_DP = 64  # the largest dp of zero.exact


def fitting_dp(
    available: int, batch: int, micro_batch: int, exact: bool, tp: int = 1, pp: int = 1, multiple_of: int = 1
) -> int:
    """Return the largest dp that `available` ranks can form; 0 where they cannot hold the model once (tp x pp).

    multiple_of  what folds dp divides it: `least_dp`
    """
    groups, parts = available // (tp * pp), batch // micro_batch
    fitting = (dp for dp in range(min(groups, parts), 0, -1) if parts % dp == 0 and dp % multiple_of == 0)
    return next((dp for dp in fitting if not exact or (dp <= EXACT_DP and dp & (dp - 1) == 0)), 0)


def fitting_ranks(config: Config, available: int) -> int:
    """Return how many of `available` ranks train: all, or under health.min_ranks those that can form a dp.

    mesh.dp is then the largest. Raises MeshError where fewer than health.min_ranks would be left.
    """
    least, train, mesh = config.health.min_ranks, config.train, config.mesh
    if least is None:
        return available
    assert train.batch is not None, "`load` has checked it"
    assert train.micro_batch is not None, "`load` has checked it"
    tp, pp = mesh.tp or 1, mesh.pp or 1
    most = available if mesh.dp is None else min(available, mesh.dp * tp * pp)
    dp = fitting_dp(most, train.batch, train.micro_batch, config.zero.exact, tp, pp, least_dp(degrees_of(mesh)))
    if dp * tp * pp < max(1, least):
        group = f"x tp {tp} x pp {pp} " if tp * pp > 1 else ""
        fewer = f"or type health.min_ranks={dp * tp * pp}" if dp else f"tp {tp} x pp {pp} = {tp * pp} make one dp"
        raise MeshError(
            f"{available} rank{'s are' if available != 1 else ' is'} there, which can form dp {dp} {group}= "
            f"{dp * tp * pp} ranks, and health.min_ranks={least} asks for more: start more (or bring "
            f"lost ones back), {fewer}."
        )
    return dp * tp * pp


def asked_dp(config: Config) -> int | None:
    """Return the dp that ranks must form: mesh.dp; None under health.min_ranks, where it follows from the ranks."""
    return config.mesh.dp if config.health.min_ranks is None else None


def asked_degrees(config: Config) -> dict[str, Any]:
    """Return the degrees that ranks must form, as keywords of `Degrees.resolve` and of a Mesh."""
    return degrees_of(config.mesh) | {"dp": asked_dp(config)}


def zero_of(config: Config, degrees: Degrees) -> Zero:
    """Return section `zero` for these degrees: under health.min_ranks the number of zero.second_shard shrinks with dp.

    It is then the largest up to what was asked that divides the ranks over which states are cut; None for 1.
    """
    asked, ranks = config.zero.second_shard, degrees.size("shard")
    if config.health.min_ranks is None or not isinstance(asked, int) or asked >= ranks or ranks % asked == 0:
        return config.zero
    fits = next(number for number in range(asked, 0, -1) if ranks % number == 0)
    return replace(config.zero, second_shard=None if fits == 1 else fits)


def degrees_of(mesh: Mesh) -> dict[str, Any]:
    """Return the degrees that section `mesh` gives, by name; None for those that it leaves out."""
    return {axis: getattr(mesh, axis) for axis in Degrees._fields}


def refuse_shrinking(config: Config) -> str | None:
    """Say what is missing for dp to shrink, where health.min_ranks asks for it."""
    train = config.train
    if config.health.min_ranks is None:
        return None
    if train.batch is None or train.micro_batch is None or train.accumulate is not None:
        return (
            "health.min_ranks lets dp shrink while train.batch stays, and train.accumulate grows: give train.batch and "
            "train.micro_batch, and leave train.accumulate out."
        )
    if train.batch % train.micro_batch:
        return (
            f"health.min_ranks lets dp shrink, in the end to 1, and train.batch {train.batch} / train.micro_batch "
            f"{train.micro_batch} = {train.batch / train.micro_batch:.4g} is not a whole number: type "
            f"train.batch={-(-train.batch // train.micro_batch) * train.micro_batch}."
        )
    return None
