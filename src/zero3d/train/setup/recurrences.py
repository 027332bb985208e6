"""Chooses what mesh.sp_mixers=auto becomes in a run, before its engine is built: the same on every machine."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from zero3d.config import Config
from zero3d.distributed.mesh import Mesh
from zero3d.models.bases import decoder_of
from zero3d.models.mixing import mixers
from zero3d.sequence.choice import weigh
from zero3d.sequence.trial import mixing_layers, try_rows
from zero3d.spec.mesh import AUTO


class MixersChoice(NamedTuple):
    """Says how sp divides recurrences, and why in a line; "" where it was asked for, or there is nothing to choose."""

    kind: str
    why: str = ""


def choose_mixers(config: Config, model: nn.Module, mesh: Mesh) -> MixersChoice:
    """Return what mesh.sp_mixers means for a model before it is cut. Raises ConfigError where sp cannot try it."""
    asked, decoder = config.mesh.sp_mixers, decoder_of(model)
    if asked != AUTO or mesh.sp == 1 or decoder is None or not mixers(decoder) or mixing_layers(decoder) is not None:
        return MixersChoice(asked)
    cut = (replace(scan, divided=scan.passes).over(mesh.tp) for scan in try_rows(decoder).scans)  # as tp will
    scans = (scan.of_a_run(config.data.length) for scan in cut)
    weighed = weigh(dict.fromkeys(scans), mesh.sp)
    if weighed is None:
        return MixersChoice(asked)
    return MixersChoice(weighed.kind, f"mesh.sp_mixers=auto: {weighed.kind}: {weighed}")


def with_mixers(config: Config, kind: str) -> Config:
    """Return a configuration in which sp divides recurrences so."""
    return replace(config, mesh=replace(config.mesh, sp_mixers=kind))
