"""Engine: a plain module trained with ZeRO on a mesh. Wiring only; each part lives in its own file.

forward    hooks gather units just before use            (zero/hooks.py, zero/gathers.py)
backward   gradients go to unit buffers and are reduced  (zero/gradients.py, zero/reductions.py)
step       norm, clip, update of shards, refresh         (zero/optimizer.py)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero3d.checkpoint import restore, save as checkpoint
from zero3d.checkpoint.export import export
from zero3d.distributed.axis import forget_note
from zero3d.distributed.collectives import Comm, broadcast_ints
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.mesh import Mesh
from zero3d.engine.generation import Ending, check_options, generate, last_only, next_logits
from zero3d.engine.guards import guard, guard_rest, is_guarded
from zero3d.errors import ConfigError
from zero3d.memory.arena import STATES, TRANSIENT, Arena
from zero3d.models.blocks import UnitSpec, partition_all
from zero3d.models.experts import compute_in_fp64
from zero3d.models.masking import forward_options
from zero3d.pipeline.runner import Around, Pipeline, find_ties, names_of_copies, take_parts
from zero3d.pipeline.schedules import Schedule, pipeline_policies
from zero3d.precision import DTYPES, NAMES, LossScale, Precision, at_least_fp32
from zero3d.rng import share_torch_rng
from zero3d.tensor_parallel.parallelize import parallelize, warn_across_hosts
from zero3d.zero.accumulation import Accumulation, Driven
from zero3d.zero.exact.gradients import ExactGradients
from zero3d.zero.exact.optimizer import ExactOptimizer
from zero3d.zero.exact.summands import Summands, check_exact
from zero3d.zero.fingerprint import fingerprint
from zero3d.zero.gathers import STEP, Gathers
from zero3d.zero.health import Health, check_weights
from zero3d.zero.hooks import KEEP, Hooks
from zero3d.zero.initial_weights import Source, from_module, from_source, hollow
from zero3d.zero.layout import UnitLayout
from zero3d.zero.model_group import ModelGroup, TensorCuts
from zero3d.zero.optimizer import APPLIED, NOT_DUE, OVERFLOW, ShardedOptimizer, StepResult
from zero3d.zero.param_groups import OptimizerChoice, choose_optimizer
from zero3d.zero.policy import Policy, Setting
from zero3d.zero.reductions import Closes, Reductions
from zero3d.zero.stages import NO_BYTES, StateBytes, engine_bytes, frozen_bytes, resolve_policies, stage_row
from zero3d.zero.streams import Lane
from zero3d.zero.traffic import UnitTraffic
from zero3d.zero.unit import Unit

FULL_PARAMS, EXPORT, WHOLE = "full_params", "export", "whole"


class MemoryEntry(NamedTuple):
    """Bytes of one category at one place on this rank.

    planned   by formula (`stages.engine_bytes`, padding from the layouts); None for transient ones
    measured  held by the arena now
    peak      most held at any instant
    """

    category: str
    place: str
    planned: int | None
    measured: int
    peak: int


class Engine:
    """Train `model` with ZeRO stage `stage` over the dp axis of `mesh`.

    model         plain nn.Module or Hugging Face model; its parameters become views of unit storages. In a pipeline
                  this rank's layers of it become `engine.module`, and itself may not be used any more
    precision     "fp32", "bf16", "fp16", "fp64", or a `zero3d.precision.Precision`
    reduce_dtype  in which gradients are reduced: "fp32", or as narrow as the compute dtype; they
                  travel in a narrower one where nothing is rounded by that
    optimizer     None (fused AdamW), a callable (parameters -> torch optimizer), or an optimizer
                  already built on the model's parameters
    scheduler     a callable (optimizer -> scheduler) or an object; stepped after applied steps
    param_groups  [{"match": "*norm*|*.bias", "weight_decay": 0.0}, ...]: first match wins
    clip_norm     largest global gradient norm, or None
    accumulate    micro-batches per step, unless `backward(last=...)` says otherwise
    loss          (output, batch) -> (sum of losses, weight), for `train_batch`
    units         module classes or name patterns; None finds the repeated blocks
    release       "auto" | "every_use" | "every_step": gathered parameters at stage 3
    reduce        "auto" | "every_micro_batch" | "every_step": when gradients are reduced; stages that reduce at the
                  same moments give the same bits ("auto": stages 0, 1 every step, 2, 3 every micro-batch)
    schedule      of a pipeline (mesh.pp > 1): gpipe, 1f1b (None), interleaved, zero-bubble or zbv; for train_batch
    exact         the same bits at every dp (a power of two), stage and `reduce`, of one global list of micro-batches,
                  numbered as `exact.Summands` says
    blocks        name of the list of blocks that a pipeline cuts, such as "model.layers"; None finds it
    tp_plan       {pattern: style} over the model's own tensor-parallel plan (mesh.tp > 1; `tensor_parallel.plan`)
    sequence_parallel  cut activations between blocks over tp, too, along the sequence
    weights       values of parameters on the meta device (`zero3d.models.open.open_model` gives both): every
                  rank reads only what it holds

    Every rank must build it with the same arguments; rank 0's weights and buffers win, and of the ranks that
    share layers over tp the first one's random state: seed them alike afterwards, too. Over tp `engine.module`
    has this rank's slices of the parameters that are cut, in `full_params()`, too. Costs one
    broadcast of the model (none with `weights`), below stage 3 also an all-gather. Raises
    ConfigError, MeshError. A parameter without a gradient counts as one with gradient zero (weight
    decay and momentum apply), as under data-parallel PyTorch. Writes through `p.data` outside
    `full_params()` are not seen.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int = 3,
        mesh: Mesh | None = None,
        precision: str | Precision = "bf16",
        reduce_dtype: str = "fp32",
        optimizer: Callable[..., Optimizer] | Optimizer | None = None,
        scheduler: Any = None,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        clip_norm: float | None = 1.0,
        accumulate: int = 1,
        loss: Callable[[Any, Any], tuple[Tensor, float | Tensor]] | None = None,
        units: Sequence[type[nn.Module] | str] | None = None,
        release: str = "auto",
        reduce: str = "auto",
        exact: bool = False,
        weights: Source | None = None,
        schedule: str | None = None,
        blocks: str | None = None,
        tp_plan: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        row = stage_row(stage)
        self.precision = Precision.of(precision)
        self.mesh = mesh if mesh is not None else Mesh()
        release, reduce = resolve_policies(row, *pipeline_policies(self.mesh.pp, release, reduce))
        _check(model, clip_norm, accumulate, weights)
        if self.precision.name == "fp64":
            compute_in_fp64(model)
        choice = choose_optimizer(model, optimizer, param_groups)
        self._order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        order = Schedule.asked(self.mesh.pp, schedule, blocks)
        self.parts = take_parts(model, self.mesh.axis("pp"), order, blocks)
        self._copies = names_of_copies(self.parts)
        self.whole = checkpoint.Whole.of(model, self._copies)
        self._order |= {name: self._order[owner] for name, owner in self._copies.items()}
        self.arena, self.traffic = Arena(self.mesh.device), Ledger()
        self.tp = Comm(self.mesh.axis("tp"), self.arena, self.traffic)
        self._cut_over_tp(tp_plan, sequence_parallel, local_logits=loss is None)
        for root in (model, *self.parts.values()) if weights is not None else ():
            hollow(root)
        specs, uses = partition_all(self.parts.values(), units, self.precision.dtype)
        self.stage, self.module = stage, model if self.mesh.pp == 1 else nn.ModuleList(self.parts.values())
        self._accumulate, self._loss = accumulate, loss
        self._takes, self._options, self._last = _names_taken(model), forward_options(model), last_only(model)
        wide = torch.float64 if self.precision.name == "fp64" else torch.float32
        counted = max(2, accumulate) if exact and self.mesh.pp > 1 else accumulate
        self.policy = Policy(row, release, reduce, counted, wide, _wire(reduce_dtype, self.precision))
        self.comm = Comm(self.mesh.data, self.arena, self.traffic, check_every_gather=self.mesh.debug)
        self.everyone = Comm(self.mesh.everyone, self.arena, self.traffic)
        self.summands = self._number_summands() if exact else None
        self._unit_of: dict[nn.Parameter, Unit] = {}
        guard(self.module, self._unit_of, lambda unit: FULL_PARAMS in unit.users)  # a failure below must not go unseen
        if self.mesh.pp > 1:
            guard_rest(model, set(self.module.parameters()))
        self._move_buffers()
        self.units = [self._build_unit(spec, choice, weights) for spec in specs]
        self._wire_up(uses, choice, clip_norm, order)
        check_weights(self.units, self.comm, self.everyone, ConfigError, "Train from weights that are finite.")
        self.scheduler = _bind(scheduler, self.optimizer.torch)
        self._steps = 0
        self.last_step: StepResult | None = None
        self.resumed = ""
        if self.pipeline is not None:
            with torch.no_grad(), self._evaluating(keep_full=False):
                self.pipeline.learn()
        self.traffic.reset()  # it counts training; construction broadcast the model once
        self.arena.reset_peaks()

    # --- construction ---------------------------------------------------------------------------

    def _number_summands(self) -> Summands:
        """Refuse what cannot be exact; rank 0's seed on all ranks."""
        per_step, pp = self.policy.reduce == "every_step", self.mesh.pp
        check_exact(self.comm.size, per_step, pp, (self.policy.wire, self.policy.master))
        seed = broadcast_ints(self.everyone, [torch.initial_seed() % (1 << 52)])[0]
        return Summands(self.comm, per_step, self._accumulate, seed)

    def _cut_over_tp(self, plan: Mapping[str, str] | None, sequence_parallel: bool, local_logits: bool) -> None:
        """Replace parameters by this tp rank's slices of them."""
        axis, cut = self.mesh.axis("tp"), []
        if axis.size > 1:
            cut = [
                parallelize(part, axis, self.traffic, plan, sequence=sequence_parallel, local_logits=local_logits)
                for part in self.parts.values()
            ]
        self._draw_alike()
        self._cuts = {name: each for found in cut for name, each in found.cuts.items()}
        self._partial = frozenset(name for found in cut for name in found.partial)
        self.passages = [passage for found in cut for passage in found.passages]
        if self.mesh.rank == 0:
            warn_across_hosts(self.mesh.degrees, self.mesh.local_world, self.passages, self.precision.dtype.itemsize)

    def _draw_alike(self) -> None:
        """tp ranks go on from tp rank 0's random state: what they hold alike must be dropped out and sampled alike."""
        if self.tp.size > 1:
            share_torch_rng(self.mesh.device, lambda state: self.tp.broadcast(state, "-"))

    def _build_unit(self, spec: UnitSpec, choice: OptimizerChoice, source: Source | None) -> Unit:
        owner = {name: self._copies.get(name, name) for name in spec.params}
        groups = {name: choice.group_of.get(owner[name], 0) for name in spec.params}
        parameters = [(name, tuple(p.shape), groups[name]) for name, p in spec.params.items()]
        layout = UnitLayout(parameters, self.comm.size)
        exact = None if self.summands is None else partial(ExactGradients, self.summands)
        setting = Setting(self.policy, self.comm, self.arena, exact)
        wide = self.policy.master if spec.dtype.is_floating_point else spec.dtype
        if source is None:
            fill = from_module(layout, spec.params, self.comm, wide)
        else:
            fill = from_source(lambda name, box: source(owner[name], box), layout, self.comm, wide, self._cuts)
        return Unit(spec.name, spec.params, layout, spec.dtype, setting, fill, spec.deferred)

    def _wire_up(
        self, uses: Mapping[nn.Module, Sequence[str]], choice: OptimizerChoice, clip_norm: float | None,
        schedule: Schedule,
    ) -> None:  # fmt: skip
        by_name = {unit.name: unit for unit in self.units}
        device = self.mesh.device
        across = self.mesh.axis("pp")
        ties = find_ties(self.parts, self.units, schedule, across.size)
        whole, along = (Comm(axis, self.arena, self.traffic) for axis in (self.mesh.model_parallel, across))
        self.model_group = ModelGroup(whole, along, TensorCuts(self.tp, self._cuts.keys(), self._partial), ties)
        given = self.units, self._order, choice.build, choice.groups, self.comm, self.arena, clip_norm, self.model_group
        summands, alone = self.summands, across.size == 1
        self.optimizer = ShardedOptimizer(*given) if summands is None else ExactOptimizer(summands, *given)
        self.gathers = Gathers(Lane("gather", device), self.policy.release == "every_step", across.size > 1)
        closes = Closes.NOTHING if summands is None else Closes.BACKWARD if alone else Closes.CHUNK
        self.reductions = Reductions(self.units, Lane("reduce", device), closes)
        self.loss_scale = LossScale(self.precision)
        self.health = Health(self.everyone, self.reductions, self.loss_scale, self.parts)
        every = self.policy.reduce == "every_micro_batch"
        draw = summands.draw if summands is not None and alone else None
        self.accumulation = Accumulation(self._accumulate, every, self.precision.scales_loss, draw)
        users = {module: [by_name[name] for name in names] for module, names in uses.items()}
        cast = self.precision.dtype
        self.hooks = [
            Hooks(root, {module: needed for module, needed in users.items() if module in set(root.modules())},
                  self.gathers, self.reductions, self.accumulation, lambda t: t.to(cast))
            for root in self.parts.values()
        ]  # fmt: skip
        self.pipeline = None
        if not alone:
            begin = (lambda *_: None) if summands is None else summands.draw
            around = Around(self.accumulation, self.reductions.sweep, begin, self._close, self._whole, self.arena)
            loss = self._sum_and_weight
            self.pipeline = Pipeline(self.parts, schedule, across, self.traffic, around, loss, self._takes)
        forget_note(self.mesh.everyone)
        self._unit_of |= {p: unit for unit in self.units for p in unit.weights.params}

    def _move_buffers(self) -> None:
        """Buffers keep their dtype; rank 0's values win."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer = buffer.to(self.mesh.device).contiguous()
                    self.comm.broadcast(buffer, "-")

    # --- training -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call. Under pp > 1 there is no such thing (ConfigError)."""
        self._refuse_pipeline("engine(...)")
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, last: bool | None = None) -> None:
        """Back-propagate a micro-batch's mean loss over `weight` targets (None counts 1).

        The step divides by the sum of weights over micro-batches and dp ranks, so accumulation
        equals the big batch, padding included. `last` overrides `accumulate`. An exception on the
        way forgets the step so far.
        """
        self._refuse_pipeline("engine.backward")
        if loss.numel() != 1:
            raise ConfigError(
                f"engine.backward needs one number, and the loss has shape {tuple(loss.shape)}: pass loss.mean(), or "
                "call out.backward(gradient=...) yourself."
            )
        weight = 1.0 if weight is None else weight
        if isinstance(weight, Tensor) or weight != 1.0:
            loss = at_least_fp32(loss) * weight
        self._backward_sum(loss, weight, last)

    @contextmanager
    def _whole(self, part: nn.Module) -> Iterator[None]:
        """The units of a part stay gathered inside; at stage 3 that costs (N-1)/N Psi where they are not."""
        own = set(part.parameters())
        units = [unit for unit in self.units if own & set(unit.weights.params)]
        for unit in units:
            self.gathers.acquire(unit, WHOLE)
        try:
            yield
        finally:  # and what hooks took for calls (tuples): no gradient reaches an end of every module here
            self.gathers.drop(lambda token: token == WHOLE or isinstance(token, tuple))

    def _close(self, part: nn.Module) -> None:
        """A micro-batch's gradients of a part are complete."""
        if self.summands is not None:
            own = set(part.parameters())
            mine = (unit for unit in self.units if unit.grads is not None)
            self.reductions.close([unit for unit in mine if own & set(unit.weights.params)])

    def _refuse_pipeline(self, what: str) -> None:
        if self.pipeline is not None:
            raise ConfigError(
                f"{what} needs the whole model, and with pp={self.mesh.pp} this rank has a part of it: call "
                "engine.train_batch(micro_batches), engine.evaluate(micro_batches) or engine.generate(input_ids)."
            )

    def _backward_sum(self, total: Tensor, weight: float | Tensor, last: bool | None) -> None:
        """Back-propagate a sum of losses over `weight` targets."""
        if self.loss_scale.value != 1.0:
            total = at_least_fp32(total) * self.loss_scale.value
        weight = weight.detach().double().reshape(()) if isinstance(weight, Tensor) else float(weight)
        try:
            with self.accumulation.driving(Driven(weight, last)):
                total.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        for hooks in self.hooks:
            hooks.abandon()
        if self.summands is not None:
            self.summands.begin()

    def step(self) -> StepResult:
        """Apply the step if the boundary is reached, else change nothing.

        Moves what `traffic.step_traffic` says. Skips on all ranks when the gradient norm is not finite anywhere or
        no micro-batch had a target: the result's `reason`, and `engine.health` counts. Raises OrderError when
        ranks ran different units, NonFiniteError when fp16 overflows at its smallest loss scale.
        """
        lr = float(self.optimizer.torch.param_groups[0]["lr"])
        if any(FULL_PARAMS in unit.users for unit in self.units):
            raise ConfigError("step() inside full_params() would be undone on leaving it: leave the block first.")
        if not self.accumulation.reached:
            if self.accumulation.count == 0 and self.reductions.pending:
                raise ConfigError(
                    "there are gradients, but no backward went through the model's own forward (only through "
                    "submodules), so no micro-batch was counted: call the model, or engine.backward(loss, last=True)."
                )
            nan = torch.full((), float("nan"), dtype=self.policy.master, device=self.mesh.device)
            return self._result(NOT_DUE, nan, lr)
        weight = self._end_summands()
        self.reductions.catch_up()
        if not self.reductions.adopted and self.comm.size > 1:
            self.reductions.adopt(broadcast_ints(self.comm, self.reductions.observed()))
        try:
            outcome = self.optimizer.step(weight, self.loss_scale.value)
        finally:
            self.reductions.reset()
            self.accumulation.reset()
            if self.summands is not None:
                self.summands.begin()
            self.gathers.drop(lambda token: True)  # whatever is still gathered holds the weights of before
        self.health.count(outcome.reason)
        self.loss_scale.update(outcome.reason == OVERFLOW)
        if outcome.reason == APPLIED:
            self._steps += 1
            if self.scheduler is not None:
                self.scheduler.step()
        return self._result(outcome.reason, outcome.norm, lr)

    def _end_summands(self) -> float | Tensor:
        """The weight of this rank's micro-batches; in exact mode [M], that of each."""
        if self.summands is None:
            return self.accumulation.weight
        try:
            self.summands.end(self.accumulation.count)
        except ConfigError:
            self._abandon()
            raise
        each = [torch.as_tensor(weight, dtype=torch.float64) for weight in self.accumulation.weights]
        return torch.stack([weight.to(self.mesh.device) for weight in each])

    def _result(self, reason: str, norm: Tensor, lr: float) -> StepResult:
        scale = torch.tensor(self.loss_scale.value, device=norm.device)
        rate = torch.tensor(lr, dtype=torch.float64, device=norm.device)
        return StepResult(torch.tensor(reason == APPLIED, device=norm.device), norm, scale, rate, reason)

    def _together(self) -> AbstractContextManager[None]:
        """Around what the ranks of a pipeline do together: where one fails, none goes on."""
        return nullcontext() if self.pipeline is None else self.pipeline.faults.telling()

    def train_batch(self, micro_batches: Iterable[Any]) -> Tensor:
        """One step over a list of micro-batches; the global mean loss, on every rank.

        A mapping's entries that the model's forward does not take are left for the loss. Back-propagates
        the sum that `loss(output, batch) -> (sum, weight)` returns; without one output.loss times the
        number of shifted labels that are not -100; of a model that returns one number, that as the mean
        loss of weight 1. The step is applied at the end of the list, whatever `accumulate` says.
        Batches are on the mesh's device: nothing of them is moved, here and in `evaluate`.
        After a failure on some rank of a pipeline every further call raises Zero3dError.
        """
        micro_batches, seen = list(micro_batches), []
        if self.summands is not None:
            self.summands.begin(len(micro_batches))
            self.summands.see(micro_batches[:1])
        with self._together():
            try:
                if self.pipeline is not None:
                    seen = self.pipeline.run(micro_batches, self.loss_scale.value)
                else:
                    for i, batch in enumerate(micro_batches):
                        total, weight = self._sum_and_weight(self._forward(batch), batch)
                        seen.append((total.detach(), weight))
                        self._backward_sum(total, weight, last=i == len(micro_batches) - 1)
            except BaseException:
                self._abandon()
                raise
            self.last_step = self.step()
            return self._global_mean(seen, len(micro_batches))

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Any]) -> Tensor:
        """The global mean loss without update, in eval mode; ranks run equally many micro-batches.

        In exact mode rank r's k-th is number k x dp + r of the list, however gradients are reduced.
        """
        number = count()
        counted = (batch for batch, _ in zip(micro_batches, number, strict=False))
        with self._together(), self._evaluating(keep_full=False):
            if self.pipeline is not None:
                seen = self.pipeline.evaluate(counted)
            else:
                seen = [self._sum_and_weight(self._forward(batch), batch) for batch in counted]
            return self._global_mean(seen, next(number), per_step=False)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int = 20, keep_full: bool = True, **options: Any) -> Tensor:
        """Continue `input_ids` [batch, length] greedily, or by sampling (do_sample, temperature, top_k).

        keep_full  keep units gathered until training goes on, so that ranks may generate different
                   lengths; False gathers per use, and ranks must then stay in lockstep
        Sequences end at the end-of-sequence token that the model's generation_config names, and are padded.
        A model's own generate (Hugging Face) takes its other options, too; a pipeline has these three.
        """
        pipeline, ids = self.pipeline, input_ids.to(self.mesh.device)
        alone = keep_full or self.comm.size == 1
        with self._together(), self._evaluating(keep_full):
            self._draw_alike()  # tokens that differed would end sequences at other times, and no rank would come back
            own = getattr(self.module, "generate", None)
            if pipeline is None and own is not None:
                synced = {} if alone else {"synced_gpus": True}
                out: Tensor = own(ids, max_new_tokens=max_new_tokens, **{"do_sample": False} | options | synced)
                return out
            check_options(options, None if pipeline is None else pipeline.vocabulary)
            ending = Ending.of(next(iter(self.parts.values())), early=alone)
            return generate(self._next_logits, self.model_group.sum, ids, max_new_tokens, ending, **options)

    def _next_logits(self, ids: Tensor) -> Tensor | None:
        last = self._last
        output = self.module(ids, **last) if self.pipeline is None else self.pipeline.output({"input_ids": ids} | last)
        return None if output is None else next_logits(output)

    @contextmanager
    def _evaluating(self, keep_full: bool) -> Iterator[None]:
        """Eval mode; every module's own mode comes back on exit."""
        before, modes = self.hooks[0].keep_full, {module: module.training for module in self.module.modules()}
        for hooks in self.hooks:
            hooks.keep_full = keep_full
        self.module.eval()
        try:
            yield
        finally:
            if not keep_full:
                self.gathers.drop(lambda token: token == STEP)
            for hooks in self.hooks:
                hooks.keep_full = before
            for module, training in modes.items():
                module.training = training

    def _forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            taken = {name: value for name, value in batch.items() if self._takes is None or name in self._takes}
            return self(**self._options | taken)
        return self(*batch) if isinstance(batch, (list, tuple)) else self(batch)

    def _sum_and_weight(self, output: Any, batch: Any) -> tuple[Tensor, float | Tensor]:
        if self._loss is not None:
            return self._loss(output, batch)
        if isinstance(output, Tensor) and output.dim() == 0:
            return at_least_fp32(output), 1.0
        loss = getattr(output, "loss", None)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if loss is None or labels is None:
            raise ConfigError(
                "train_batch and evaluate need a loss: pass Engine(loss=lambda output, batch: (sum, weight)), or "
                "batches with 'labels' for a model whose output has .loss, or a model that returns its mean loss."
            )
        weight = (labels[..., 1:] != -100).sum()
        total = at_least_fp32(loss) * weight
        return torch.where(weight > 0, total, 0.0), weight  # a mean over no target is NaN, its sum is nothing

    def _global_mean(
        self, seen: Sequence[tuple[Tensor, float | Tensor]], micro_batches: int, per_step: bool | None = None
    ) -> Tensor:
        if self.summands is not None:
            everywhere = self.model_group.sum(self.summands.sum_of(seen, micro_batches, per_step))
            return everywhere[0] / everywhere[1]
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for total, weight in seen:
            sums[0] += total.detach().double()
            sums[1] += weight
        everywhere = self.model_group.sum(self.comm.exchange(sums).sum(0))
        return everywhere[0] / everywhere[1]

    # --- whole parameters -----------------------------------------------------------------------

    @contextmanager
    def full_params(self, modules: nn.Module | Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Inside, the parameters of `modules` (None: all) are whole; writes are kept on exit.

        All ranks enter and leave together and write the same values (where they differ, the
        owner of each slice wins). Entering and leaving without writes changes no bit. At stage 3
        gathers the units: (N-1)/N Psi elements. What is written into a tied parameter reaches its copy
        on another pipeline stage; where both are written, the full model's name wins.
        """
        chosen = [modules] if isinstance(modules, nn.Module) else modules
        wanted = None if chosen is None else {p for module in chosen for p in module.parameters()}
        always = self.model_group.tied  # a write on another pipeline stage may reach them
        opened = [u for u in self.units if wanted is None or u in always or any(p in wanted for p in u.weights.params)]
        nested = [u for u in opened if FULL_PARAMS in u.users]
        opened = [u for u in opened if u not in nested]
        for unit in opened:
            self.gathers.acquire(unit, FULL_PARAMS)
            unit.users.add(FULL_PARAMS)
        try:
            yield
        finally:
            self._keep_writes(opened)
            for unit in opened:
                self.gathers.release(unit, FULL_PARAMS)
                unit.users.discard(FULL_PARAMS)

    @torch.no_grad()
    def _keep_writes(self, units: Sequence[Unit]) -> None:
        written = torch.tensor([float(unit.weights.absorb()) for unit in units], dtype=torch.float64)
        anywhere = self.comm.exchange(written.to(self.mesh.device)).amax(0).tolist()
        written_units = [unit for unit, flag in zip(units, anywhere, strict=True) if flag]
        for unit in written_units:
            unit.weights.share()
        self.model_group.share_ties(written_units)

    def release(self) -> None:
        """Give back units that stayed gathered without grad."""
        self.gathers.drop(lambda token: token == KEEP)

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, directory: str | Path, loop: Mapping[str, Any] | None = None) -> Path:
        """Write `directory/step-N` atomically: masters, optimizer states, frozen weights, buffers, RNG.

        `loop` is what the training loop wants back from `load`: plain values, those of rank 0.
        """
        return checkpoint.save(Path(directory), self._parts(loop))

    def load(self, directory: str | Path) -> Any:
        """Continue from a checkpoint (or the newest in a directory of them), on any mesh, at any stage.

        Returns what was saved as `loop`; `resumed` says whether the run goes on bitwise, and if not, why.
        All of it is checked first: a CheckpointError leaves everything as it was, gradients of this step included.
        """
        if any(FULL_PARAMS in unit.users for unit in self.units):
            raise ConfigError("load() inside full_params() would be undone on leaving it: leave the block first.")
        parts = self._parts()
        checked = restore.check(Path(directory), parts)
        self.gathers.drop(lambda token: True)
        self.reductions.reset()
        self.accumulation.reset()
        self._steps, loop, self.resumed = restore.load(checked, parts)
        self.health.in_a_row = 0
        return loop

    def fingerprint(self) -> str:
        """One hash of all masters and optimizer states, the same at any dp that divides 64; all ranks call it."""
        return fingerprint(self.optimizer, self.comm, self.model_group)

    def export(self, directory: str | Path) -> Path:
        """Write the weights as a Hugging Face folder, gathered unit by unit."""
        return export(Path(directory), self._parts(), self._gathered)

    @contextmanager
    def _gathered(self, unit: Unit) -> Iterator[None]:
        self.gathers.acquire(unit, EXPORT)
        try:
            yield
        finally:
            self.gathers.release(unit, EXPORT)

    def _parts(self, loop: Mapping[str, Any] | None = None) -> checkpoint.Parts:
        if self.pipeline is not None:
            self.pipeline.faults.check()
        return checkpoint.Parts(
            list(self.parts.values()), self.whole, self.units, self.optimizer, self.comm, self.tp,
            self.everyone, self.mesh.degrees, self.loss_scale, self.scheduler, self._steps,
            self._about(), loop, {self._copies.get(name, name): cut for name, cut in self._cuts.items()}, self.summands,
        )  # fmt: skip

    def _about(self) -> dict[str, Any]:
        """What the bits of a run depend on, beside its data and settings."""
        device = self.mesh.device
        cpu = device.type == "cpu"
        return {
            "stage": self.stage, "reduce": self.policy.reduce, "accumulate": self.accumulation.usual,
            **self.mesh.degrees._asdict(),
            "precision": self.precision.name, "wire": str(self.policy.wire).removeprefix("torch."),
            "algorithm": self.comm.algorithm, "torch": torch.__version__,
            "kernels": torch.backends.cpu.get_cpu_capability() if cpu
            else torch.get_device_module(device).get_device_name(),
            "threads": torch.get_num_threads() if cpu else 1,
            "leaves": None if self.summands is None else self.summands.per_batch,
        }  # fmt: skip

    # --- accounting -----------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Applied steps so far."""
        return self._steps

    def _planned(self, elements: Callable[[UnitLayout], int]) -> StateBytes:
        """Bytes per rank by formula for so many elements of each unit."""
        total = NO_BYTES
        for unit in self.units:
            if unit.grads is None:
                each = frozen_bytes(self.stage, self.comm.size, unit.dtype.itemsize, self.policy.release)
            else:
                each = engine_bytes(
                    self.stage, self.comm.size, NAMES[unit.dtype], self.policy.release, self.policy.reduce,
                    unit.grads.micro_batches, self.optimizer.state_bytes(unit), self.summands is not None,
                )  # fmt: skip
            total = total + each.times(elements(unit.layout))
        return total

    @property
    def planned_bytes(self) -> StateBytes:
        """Model states per rank by formula, padding apart."""
        return self._planned(lambda layout: layout.numel)

    @property
    def traffic_units(self) -> list[UnitTraffic]:
        """The units as `traffic.step_traffic` wants them; its result equals what `traffic` gains in a step."""
        reduced = self.policy.master.itemsize
        return [
            UnitTraffic(u.name, u.layout.total, u.dtype.itemsize, reduced, u.gradients.travels.itemsize, True)
            if u.grads is not None
            else UnitTraffic(u.name, u.layout.total, u.dtype.itemsize, 0, 0, False)
            for u in self.units
        ]

    @property
    def memory(self) -> list[MemoryEntry]:
        """Bytes by category and place on this rank, planned and measured."""
        planned = dict(zip(("parameters", "gradients", "optimizer"), self.planned_bytes, strict=True))
        planned["padding"] = self._planned(lambda layout: layout.padding).total
        return [
            MemoryEntry(
                category,
                self.arena.place,
                ceil(planned[category]) if category in STATES else None,
                ceil(self.arena.live(category)),
                ceil(self.arena.peak(category)),
            )
            for category in (*STATES, *TRANSIENT)
        ]


def _check(model: nn.Module, clip_norm: float | None, accumulate: int, weights: Source | None) -> None:
    """Refuse what cannot be trained, before anything is allocated."""
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r}: pass the number of micro-batches per step, at least 1.")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise ConfigError(f"clip_norm={clip_norm!r}: pass a positive norm, or None for no clipping.")
    if "_orig_mod" in dict(model.named_children()):
        raise ConfigError(
            "Engine(torch.compile(model)): its graph would hold the engine's hooks. Pass the model itself, and compile "
            "its blocks before: zero3d.activations.compile_blocks(model), or train.compile: true in a file."
        )
    parameters = dict(model.named_parameters())
    if is_guarded(model) or any(isinstance(p, DTensor) for p in parameters.values()):
        raise ConfigError(
            f"this {type(model).__name__} is already sharded (by another Engine, one that failed, FSDP or "
            "DTensor): build a plain model and pass it to one Engine."
        )
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError(
            f"none of the {len(parameters)} parameters of {type(model).__name__} requires a gradient: "
            "unfreeze what is to be trained with p.requires_grad_(True)."
        )
    odd = [name for name, p in parameters.items() if p.dtype.is_complex]
    if odd:
        raise ConfigError(f"{len(odd)} parameters are complex, first {odd[0]!r}: store them as pairs of real numbers.")
    on_meta = [name for name, p in parameters.items() if p.is_meta]
    if on_meta and weights is None:
        raise ConfigError(
            f"{len(on_meta)} parameters have no data (meta device), first {on_meta[0]!r}: load weights first, or pass "
            "weights= with their values (zero3d.models.open.open_model gives both)."
        )


def _wire(reduce_dtype: str, precision: Precision) -> torch.dtype:
    """The dtype gradients travel in; fp64 runs always use fp64."""
    if reduce_dtype not in DTYPES:
        raise ConfigError(f"reduce_dtype={reduce_dtype!r} is unknown: pass one of {', '.join(DTYPES)}.")
    if precision.name == "fp64":
        return torch.float64
    wire = DTYPES[reduce_dtype]
    if wire != precision.dtype and wire != torch.float32:
        raise ConfigError(
            f"reduce_dtype={reduce_dtype!r} cannot carry {precision.name} gradients exactly: "
            f"pass 'fp32' or {precision.name!r}."
        )
    return wire


def _names_taken(model: nn.Module) -> frozenset[str] | None:
    """Keywords that forward() takes; None when it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _bind(scheduler: Any, optimizer: Optimizer) -> Any:
    """A scheduler on the engine's optimizer: built by a callable, or checked to be bound to it."""
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric that step() does not have: leave scheduler out and call it."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "the scheduler is bound to another optimizer than the engine's: pass scheduler=lambda optimizer: ..., or "
            "the optimizer it was built on as optimizer=."
        )
    return scheduler
