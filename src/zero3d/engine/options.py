"""The settings of an Engine as one record, and what they mean for a model on a mesh.

A keyword is declared once, with its default and what it means: as a key of a section of `spec`, if files have it, too,
or as a field of `Options`. `Engine.__init__` has a line for it, so that editors know it. `resolve` refuses what cannot
work and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from textwrap import wrap
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from zero3d import spec
from zero3d.activations.compilation import compile_options
from zero3d.blueprint.policy import Policy
from zero3d.blueprint.stages import stage_row
from zero3d.distributed.degrees import Degrees
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
from zero3d.sequence.mixers import settled_kind
from zero3d.sequence.positions import Positions
from zero3d.spec.declaring import keyword_of
from zero3d.spec.mesh import HEADS
from zero3d.spec.optimizer import OptimizerRow
from zero3d.spec.rules import check
from zero3d.spec.sections import SECTIONS, Keywords, Place, Spec, by_section
from zero3d.zero.exact.summands import check_exact
from zero3d.zero.initial_weights import Source
from zero3d.zero.param_groups import OptimizerChoice, choose_optimizer

T = TypeVar("T")


def means(text: str) -> Mapping[str, str]:
    """Return the metadata of a keyword that no section declares: its meaning."""
    return {"keyword": text}


@dataclass(frozen=True)
class Options:
    """All settings of an Engine: whole sections, which files have, too, and what only a program can pass.

    mesh  how axes divide the model; degrees are those of the engine's mesh
    """

    zero: spec.Zero = field(default_factory=spec.Zero)
    precision: str | Precision = field(
        default="bf16", metadata=means('"fp32", "bf16", "fp16", "fp64", or a `zero3d.precision.Precision`')
    )
    autocast: bool = field(
        default=False,
        metadata=means(
            "run the forward in torch's autocast of `precision`, bf16 or fp16: inputs in fp32 stay so, code may make "
            "fp32 tensors inside the model, and its outputs are fp32. Weights and masters are those of training without"
        ),
    )
    optimizer: Callable[..., Optimizer] | Optimizer | None = field(
        default=None,
        metadata=means(
            "None (fused AdamW), a callable (parameters -> torch optimizer), or an optimizer already built on "
            "the model's parameters"
        ),
    )
    scheduler: Any = field(
        default=None, metadata=means("a callable (optimizer -> scheduler) or an object; stepped after applied steps")
    )
    param_groups: Sequence[Mapping[str, Any]] | None = field(
        default=None, metadata=means('[{"match": "*norm*|*.bias", "weight_decay": 0.0}, ...]: first match wins')
    )
    clip_norm: float | None = field(default=1.0, metadata=means("largest global gradient norm, or None"))
    accumulate: int = field(
        default=1, metadata=means("micro-batches per step, unless `backward(last=...)` says otherwise")
    )
    loss: Loss | None = field(
        default=None, metadata=means("(output, batch) -> (sum of losses, weight), for `train_batch`")
    )
    offload: spec.Offload = field(
        default_factory=spec.Offload,
        metadata=means(
            "what leaves the device, and where to: a `zero3d.Offload`, or a mapping of its keys such as "
            '{"optimizer": "host"}; None keeps everything on the device. The bits of training are the same at every '
            'place, but with moments="bf16". `engine.offload` has what "auto" became, `engine.offload_why` lines with '
            "its arithmetic"
        ),
    )
    mesh: spec.Mesh = field(default_factory=spec.Mesh)
    units: Sequence[type[nn.Module] | str] | None = field(
        default=None, metadata=means("module classes or name patterns; None finds the repeated blocks")
    )
    linear: str | None = field(
        default=None,
        metadata=means(
            '"fp8": linear layers of blocks multiply in fp8, by torchao, on cards that do; weights, masters, '
            "sums and checkpoints are those of bf16. `engine.notes` says which do. None: as they are"
        ),
    )
    compile: bool | str | Mapping[str, Any] = field(
        default=False,
        metadata=means(
            "torch.compile each block's own forward: True (inductor), a backend's name, or torch.compile's "
            "options. Kernels that are fused round otherwise; blocks that are compiled already stay so"
        ),
    )
    tiled_loss: bool = field(
        default=False,
        metadata=means(
            "compute the loss of a Hugging Face causal language model tile by tile: logits of the whole "
            "vocabulary are never there, nor in its output, in a forward with labels"
        ),
    )
    replay: int = field(
        default=0,
        metadata=means(
            "K: in every K-th step of `train_batch` a neighbour over dp, or this rank where it has none, "
            "computes one of its micro-batches once more, and CorruptionError names the culprit where a bit of a "
            "gradient differs; on a GPU after `zero3d.make_deterministic()`. 0: never"
        ),
    )
    ema: float | None = field(
        default=None,
        metadata=means(
            "decay of an exponential moving average of the masters, which `averaged()` shows: 4 bytes more "
            "per trainable parameter and rank, over dp at stages 1 to 3. None: there is none"
        ),
    )
    expert_bias_rate: float = field(
        default=0.0,
        metadata=means(
            "by how much a step moves the bias of routers that have one (`expert_parallel.load`); 0: not at all"
        ),
    )
    weights: Source | None = field(
        default=None,
        metadata=means(
            "values of parameters on the meta device (`zero3d.models.open.open_model` gives both): every rank "
            "reads only what it holds"
        ),
    )

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """Return the options that an Engine's keywords are: all of `KEYWORDS`. Raises ConfigError."""
        places = {place: keywords[name] for name, place in KEYWORDS.items()}
        places["offload", ""] = spec.Offload.of(keywords["offload"])
        return cls(**by_section(places.items(), vars(cls())))

    @property
    def gather_budget(self) -> int | None:
        """Return the bytes above which weights are gathered in tiles. Raises ConfigError."""
        return parse_budget(self.zero.gather_budget)

    def settings(self, mesh: Mesh, precision: Precision) -> Spec:
        """Return the record that rules are about; an optimizer, or its builder, is known by its attribute `row`."""
        asked, row = replace(self.mesh, **mesh.degrees._asdict()), getattr(self.optimizer, "row", None)
        return Spec(
            self.zero,
            self.offload,
            asked,
            precision.name,
            self.autocast,
            optimizer=row.name if isinstance(row, OptimizerRow) else None,
            accumulate=self.accumulate,
            ema=self.ema,
            replay=self.replay,
            linear=self.linear,
        )


def _keywords() -> Iterator[tuple[str, Place, Field[Any]]]:
    """Yield each keyword of an Engine, its place in `Options`, and its declaration."""
    for each in fields(Options):
        if each.metadata:
            yield each.name, (each.name, ""), each
        else:
            for key in fields(SECTIONS[each.name]):
                if key.name not in Degrees._fields:
                    yield keyword_of(each.name, key.name), (each.name, key.name), key


KEYWORDS: Keywords = MappingProxyType({name: place for name, place, _ in _keywords()})


def with_keywords(engine: type[T]) -> type[T]:
    """Put what every keyword means into a class's docstring, in the place of its line {keywords}."""
    lines: list[str] = []
    for name, _, declared in _keywords():
        said = declared.metadata
        choices = " | ".join(f'"{choice}"' for choice in said.get("choices", ()))
        text = re.sub(r"\bzero\.(?=\w)", "", said["keyword"] or said["text"])  # as files write keys
        entry = f"{name:12}  {choices}: {text}" if choices else f"{name:12}  {text}"
        lines += wrap(entry, 120, initial_indent=" " * 4, subsequent_indent=" " * 18, break_on_hyphens=False)
    if engine.__doc__ is not None:  # as it is under python -OO
        engine.__doc__ = engine.__doc__.replace("    {keywords}", "\n".join(lines))
    return engine


def parts_activations(asked: spec.Mesh) -> bool:
    """Return whether inputs of recomputed blocks are kept in parts: under sequence parallelism they are cut already."""
    return asked.partition_activations and not asked.sequence_parallel


@dataclass(frozen=True)
class Resolved:
    """Options, and what they mean for one model on one mesh.

    groups  the groups of parameters with like options, and the builder of the optimizer over this rank's pieces
    matrices  parameters with orthogonalised momentum (Muon), by name
    positions  of sequences that come without them, with sp
    mixers  how sp divides recurrences
    """

    options: Options
    mesh: Mesh
    precision: Precision
    groups: OptimizerChoice
    schedule: Schedule
    matrices: Mapping[str, Form]
    positions: Positions
    mixers: str

    @property
    def spec(self) -> Spec:
        """Return what rules and the blueprint are about."""
        return self.options.settings(self.mesh, self.precision)


def resolve(model: nn.Module, mesh: Mesh | None, options: Options) -> Resolved:
    """Check all options. Raises ConfigError, MeshError; makes a mesh where there is none."""
    zero = options.zero
    row = stage_row(zero.stage)
    precision = Precision.of(options.precision)
    mesh = mesh if mesh is not None else Mesh()
    check(options.settings(mesh, precision))
    schedule = Schedule.requested(mesh.pp, options.mesh.schedule, options.mesh.blocks)
    parse_budget(zero.gather_budget)
    check_step(options.accumulate, options.clip_norm)
    Policy.of(options.settings(mesh, precision))  # refuses what a stage cannot do
    compile_options(options.compile)
    check_model(model, options.weights)
    check_linear(options.linear, model, mesh.device)
    check_adapters(model, row.shards_parameters, mesh.pp)
    if row.shards_parameters and mesh.dp > 1:
        check_blank_image(model)
    if options.tiled_loss:
        check_tiled_loss(model, options.loss)
    offloads, asked = options.offload.activations_leave, options.mesh
    check_activations(model, mesh, asked.partition_activations, offloads, asked.sequence_parallel)
    check_experts(model, mesh, zero.exact)
    positions, mixers = Positions(), HEADS
    if mesh.sp > 1:
        positions = check_sequence(model, mesh.sp, mesh.tp, asked.sp_kind, asked.sp_mixers)
        mixers = settled_kind(model, asked.sp_mixers)
    optimizer, param_groups = options.optimizer, options.param_groups
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
    return Resolved(options, mesh, precision, groups, schedule, matrices, positions, mixers)
