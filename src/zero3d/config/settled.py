"""What a configuration comes to on so many ranks: its degrees and its batch, and what rules refuse of these."""

from __future__ import annotations

from dataclasses import replace

from zero3d.config.batch import Batch, resolve_batch
from zero3d.config.problems import spec_of
from zero3d.config.sections import Config
from zero3d.config.shrinking import asked_degrees
from zero3d.distributed.degrees import Degrees
from zero3d.spec.declaring import in_file
from zero3d.spec.rules import check


def settle(config: Config, world: int) -> tuple[Degrees, Batch]:
    """Return the degrees and the batch of a run on `world` ranks. Raises MeshError, ConfigError."""
    degrees = Degrees.resolve(world, **asked_degrees(config))
    batch = resolve_batch(config.train, degrees.dp, degrees.sp)
    known = replace(config, mesh=replace(config.mesh, **degrees._asdict()))
    check(replace(spec_of(known), accumulate=batch.accumulate), in_file)
    return degrees, batch
