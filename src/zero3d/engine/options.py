"""The keywords of an Engine as records, and what they mean for a model on a mesh.

A new keyword is a field of one of the records, or a key of a section in spec/ where files have it, too; `Engine` has it
in its signature and docstring, and puts it there. `resolve` refuses what cannot work and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zero3d import spec
from zero3d.activations.compilation import compile_options
from zero3d.blueprint.policy import Policy
from zero3d.blueprint.stages import stage_row
from zero3d.distributed.determinism import warn_of_exact
from zero3d.distributed.mesh import Mesh
from zero3d.engine.checks import check_activations, check_experts, check_model, check_step
from zero3d.engine.losses import Loss
from zero3d.engine.optimizer_kinds import check_builder, check_kind, checked
from zero3d.engine.tiling import check_tiled_loss, parse_budget
from zero3d.models.fp8 import check_linear
from zero3d.models.image_trial import check_blank_image
from zero3d.models.peft_kinds import check_adapters
from zero3d.offload.states import check_moments
from zero3d.optim.find import find_matrices, groups_of
from zero3d.optim.matrices import Form
from zero3d.optim.muon_optimizer import MuonRule
from zero3d.pipeline.schedules import Schedule
from zero3d.precision import Precision
from zero3d.sequence.group import check_sequence
from zero3d.sequence.positions import Positions
from zero3d.spec.optimizer import OptimizerRow
from zero3d.spec.rules import check
from zero3d.spec.sections import Spec
from zero3d.zero.exact.summands import check_exact
from zero3d.zero.initial_weights import Source
from zero3d.zero.param_groups import OptimizerChoice, choose_optimizer


@dataclass(frozen=True)
class ModelOptions:
    """Holds how the model computes, where its weights come from, its units, what is compiled and in fp8."""

    precision: str | Precision
    weights: Source | None
    units: Sequence[type[nn.Module] | str] | None
    compile: bool | str | Mapping[str, Any] = False
    linear: str | None = None


def parts_activations(asked: spec.Mesh) -> bool:
    """Return whether inputs of recomputed blocks are kept in parts: under sequence parallelism they are cut already."""
    return asked.partition_activations and not asked.sequence_parallel


@dataclass(frozen=True)
class OptimizerOptions:
    """What updates the parameters, and the learning rate."""

    optimizer: Callable[..., Optimizer] | Optimizer | None
    scheduler: Any
    param_groups: Sequence[Mapping[str, Any]] | None
    clip_norm: float | None
    ema: float | None = None
    expert_bias_rate: float = 0.0


@dataclass(frozen=True)
class StepOptions:
    """What a step is made of."""

    accumulate: int
    loss: Loss | None
    tiled_loss: bool
    replay: int


@dataclass(frozen=True)
class Options:
    """All keywords of an Engine: as sections of `spec` where a file has them, too. Degrees are those of its mesh."""

    model: ModelOptions
    zero: spec.Zero
    offload: spec.Offload
    mesh: spec.Mesh
    optimizer: OptimizerOptions
    step: StepOptions

    @property
    def gather_budget(self) -> int | None:
        """Return the bytes above which weights are gathered in tiles. Raises ConfigError."""
        return parse_budget(self.zero.gather_budget)

    def settings(self, mesh: Mesh, precision: Precision) -> Spec:
        """Return what rules are about; an optimizer, or what builds it, is known by its attribute `row`."""
        asked, row = replace(self.mesh, **mesh.degrees._asdict()), getattr(self.optimizer.optimizer, "row", None)
        return Spec(
            self.zero,
            self.offload,
            asked,
            precision.name,
            optimizer=row.name if isinstance(row, OptimizerRow) else None,
            accumulate=self.step.accumulate,
            ema=self.optimizer.ema,
            replay=self.step.replay,
            linear=self.model.linear,
        )


@dataclass(frozen=True)
class Resolved:
    """What options mean for one model on one mesh.

    groups  which parameters the optimizer treats alike, and how it is built over this rank's pieces
    matrices  those whose momentum is made orthogonal (Muon), by name
    positions  of sequences that come without them, with sp
    """

    mesh: Mesh
    precision: Precision
    policy: Policy
    groups: OptimizerChoice
    schedule: Schedule
    matrices: Mapping[str, Form]
    positions: Positions


def resolve(model: nn.Module, mesh: Mesh | None, options: Options) -> Resolved:
    """Check all options. Raises ConfigError, MeshError; makes a mesh where there is none."""
    zero, step = options.zero, options.step
    row = stage_row(zero.stage)
    precision = Precision.of(options.model.precision)
    mesh = mesh if mesh is not None else Mesh()
    check(options.settings(mesh, precision))
    schedule = Schedule.requested(mesh.pp, options.mesh.schedule, options.mesh.blocks)
    parse_budget(zero.gather_budget)
    check_step(step.accumulate, options.optimizer.clip_norm)
    policy = Policy.of(options.settings(mesh, precision))
    compile_options(options.model.compile)
    check_model(model, options.model.weights)
    check_linear(options.model.linear, model, mesh.device)
    check_adapters(model, row.shards_parameters, mesh.pp)
    if row.shards_parameters and mesh.dp > 1:
        check_blank_image(model)
    if step.tiled_loss:
        check_tiled_loss(model, step.loss)
    offloads, asked = options.offload.activations_leave, options.mesh
    check_activations(model, mesh, asked.partition_activations, offloads, asked.sequence_parallel)
    check_experts(model, mesh, zero.exact)
    positions = Positions()
    if mesh.sp > 1:
        positions = check_sequence(model, mesh.sp, mesh.tp, options.mesh.sp_kind)
    optimizer, param_groups = options.optimizer.optimizer, options.optimizer.param_groups
    matrices: dict[str, Form] = {}
    if isinstance(optimizer, MuonRule):
        matrices = find_matrices(model, optimizer.match, optimizer.split, param_groups)
        param_groups = groups_of(model, matrices, param_groups)
    if isinstance(optimizer, Optimizer):
        check_moments(options.offload.moments, check_kind(optimizer))
    check_builder(optimizer)
    groups = checked(choose_optimizer(model, optimizer, param_groups))
    if zero.exact:
        check_exact(mesh.dp)
        if mesh.rank == 0:
            warn_of_exact(mesh.device)
    return Resolved(mesh, precision, policy, groups, schedule, matrices, positions)
