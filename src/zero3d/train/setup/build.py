"""The engine of a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zero3d import spec
from zero3d.activations import prepare_blocks
from zero3d.config import Config, given_keys, load, offload_of, resolve_batch, to_dict, zero_of
from zero3d.distributed.degrees import FOLDS
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.engine.options import Options
from zero3d.models.open import Opened
from zero3d.models.trained import open_trained
from zero3d.precision import LossScaling, Precision
from zero3d.train.setup.attention import check_kernel, with_attention
from zero3d.train.setup.inputs import open_inputs, open_mesh
from zero3d.train.setup.left_out import fill_in
from zero3d.train.setup.losses import choose_loss, own_loss
from zero3d.train.setup.optimizer import optimizer_of, parameter_groups
from zero3d.train.setup.recurrences import choose_mixers, with_mixers
from zero3d.train.setup.schedule import scheduler
from zero3d.train.setup.text_part import naming_text_part


def build_engine(config: Config, opened: Opened, mesh: Mesh, accumulate: int, steps: int) -> Engine:
    """Build the engine of a configuration, for a run of `steps` steps. Consumes `opened`."""
    model = opened.module
    config = with_mixers(config, choose_mixers(config, model, mesh).kind)
    torch.manual_seed(config.seed * 1_000_003 + mesh.rank // mesh.tp)  # dropout differs but between tp ranks
    prepare_blocks(model, config.activations, compile="inductor" if config.train.compile else None)
    options = Options(
        zero=fitting_zero(config, mesh),
        offload=offload_of(config),
        mesh=used_axes(config, mesh),
        precision=precision_of(config),
        autocast=config.autocast,
        optimizer=optimizer_of(config.optimizer),
        scheduler=scheduler(config.schedule, steps, config.optimizer.lr),
        param_groups=parameter_groups(model, config.optimizer),
        clip_norm=config.optimizer.clip_norm,
        accumulate=accumulate,
        loss=own_loss(model),
        linear=config.model.linear,
        weights=opened.weights,
        tiled_loss=choose_loss(config, model, mesh).tiled,
        replay=config.health.replay,
        ema=config.train.ema,
        expert_bias_rate=config.train.expert_bias_rate,
    )
    return Engine.of(model, mesh, options)


def fitting_zero(config: Config, mesh: Mesh) -> spec.Zero:
    """Return section `zero`; what became of a second shard when dp shrank is said in a line."""
    asked, zero = config.zero.second_shard, zero_of(config, mesh.degrees)
    if zero.second_shard != asked and mesh.rank == 0:
        axis = mesh.degrees.group("shard")
        warnings.warn(
            f"zero.second_shard={asked} does not divide the {mesh.degrees.size('shard')} ranks of {axis} that "
            f"health.min_ranks goes on with: it is {zero.second_shard or 'left out'}.",
            stacklevel=3,
        )
    return zero


def used_axes(config: Config, mesh: Mesh) -> spec.Mesh:
    """Return section `mesh` without the settings of axes that the mesh does not have, which a file may have, too."""
    section, default = config.mesh, spec.Mesh()
    names = {"pp": "pipeline", "tp": "tensor-parallel axis", **{fold.name: fold.what for fold in FOLDS}}
    for axis, what in names.items():
        if mesh.degrees.size(axis) > 1:
            continue
        of_axis, usual = config.mesh.options(axis), default.options(axis)
        unused = [f"mesh.{key}={value}" for key, value in of_axis.items() if value != usual[key]]
        section = replace(section, **usual)
        if unused and mesh.rank == 0:
            warnings.warn(
                f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect: mesh.{axis} is 1, so there is "
                f"no {what}; pass mesh.{axis}=2 or more for one.",
                stacklevel=3,
            )
    return replace(section, **mesh.degrees._asdict())


def precision_of(config: Config) -> Precision:
    """Return the precision, with the loss scaling that fp16 uses."""
    scale = config.loss_scale
    return Precision(config.precision, LossScaling(scale.initial, scale.window, scale.hysteresis, scale.minimum))


def from_config(source: str | Path | Mapping[str, Any], **overrides: Any) -> Engine:
    """Build the engine of `zero3d train` for this file (or mapping), with `section={"key": ...}` replaced.

    Reads the data only where the number of steps, which the learning rate needs, follows from epochs.
    Raises ConfigError, DataError, MeshError.
    """
    tree = to_dict(load(source))
    given = {*given_keys(source), *given_keys(overrides)}
    for name, value in overrides.items():
        tree[name] = {**tree[name], **value} if isinstance(value, Mapping) and name in tree else value
    train = overrides.get("train", {})
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if train.get(one) is not None and other not in train:
            tree["train"][other] = None  # the override displaces the file's length, which may be in the other unit
    config, lines = fill_in(load(tree), given)
    if config.train.steps is None:
        inputs = open_inputs(config)
        _say(lines, inputs.mesh)
        with naming_text_part(config):
            return build_engine(config, inputs.opened, inputs.mesh, inputs.batch.accumulate, inputs.steps)
    mesh = open_mesh(config)
    _say(lines, mesh)
    batch = resolve_batch(config.train, mesh.dp, mesh.sp)
    check_kernel(config.model.attn)
    opened = with_attention(config, open_trained(config), mesh.device)
    with naming_text_part(config):
        return build_engine(config, opened, mesh, batch.accumulate, config.train.steps)


def with_output(config: Config, output: Path) -> Config:
    """Return the configuration as it is written into its folder."""
    return replace(config, output=str(output))


def _say(lines: Sequence[str], mesh: Mesh) -> None:
    """Print on rank 0 what the model has decided."""
    for line in lines if mesh.rank == 0 else ():
        print(line)
