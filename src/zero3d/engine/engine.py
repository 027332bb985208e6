"""Engine: a plain module trained with ZeRO on a mesh. Its parts are built in assembly.py; each has its own file.

Saving, loading, slots and exports are checkpoints.py's; here are their names and promises.

forward    hooks gather units just before use            (zero/hooks.py, zero/gathers.py)
backward   gradients go to unit buffers and are reduced  (zero/gradients.py, zero/reductions.py)
step       norm, clip, update of shards, refresh         (step.py, zero/optimizer.py)
"""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Generic, NoReturn, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero3d import spec
from zero3d.account.traffic import UnitTraffic
from zero3d.checkpoint.background import SaveFigures
from zero3d.checkpoint.slots import Note
from zero3d.distributed.mesh import Mesh
from zero3d.engine.accounting import MemoryEntry, frozen_entry, notes_memory
from zero3d.engine.assembly import assemble
from zero3d.engine.autocast import given_in
from zero3d.engine.averages import Averages
from zero3d.engine.checkpoints import Checkpoints, open_saves
from zero3d.engine.checks import bind_scheduler, check_step
from zero3d.engine.counts import Counts, refuse_none
from zero3d.engine.execution import Pipelined, evaluating
from zero3d.engine.expert_bias import ExpertBias
from zero3d.engine.features import find, required
from zero3d.engine.generation import Ending, check_names, check_options, generate
from zero3d.engine.health import Health
from zero3d.engine.held_weights import Held, check_room, hold_weights
from zero3d.engine.losses import Loss
from zero3d.engine.options import KEYWORDS, Options, with_keywords
from zero3d.engine.partition import share_random_state
from zero3d.engine.parts import Parts
from zero3d.engine.replay.replay import Replay
from zero3d.engine.report import Report
from zero3d.engine.step import StepFigures
from zero3d.engine.stream_guard import Streaming
from zero3d.engine.streaming import Sender, Sent, WeightStreams
from zero3d.engine.tower_gradients import TowerGradients
from zero3d.engine.traffic_formulas import TrafficFormulas
from zero3d.engine.unshard import Unsharded
from zero3d.errors import ConfigError, Zero3dError
from zero3d.memory.threads import unwaited
from zero3d.models.bases import model_of
from zero3d.models.packing import inner_model
from zero3d.nested import map_tensors
from zero3d.precision import Precision
from zero3d.weights.buckets import Bucket
from zero3d.zero.hooks import KEEP
from zero3d.zero.initial_weights import Source
from zero3d.zero.optimizer import ShardedOptimizer, StepResult
from zero3d.zero.step_parts import BACKWARD, EVALUATION, FORWARD, SAVES

T = TypeVar("T")


class Exposed(Generic[T]):
    """A part of an engine under a name of its own."""

    def __init__(self, of: Callable[[Parts], T]) -> None:
        self._of = of

    @overload
    def __get__(self, engine: None, owner: type[Engine]) -> Self: ...

    @overload
    def __get__(self, engine: Engine, owner: type[Engine]) -> T: ...

    def __get__(self, engine: Engine | None, owner: type[Engine]) -> Self | T:
        return self if engine is None else self._of(engine._parts)


@with_keywords
class Engine:
    """Train `model` with ZeRO stage `stage` over the dp axis of `mesh`.

    model         plain nn.Module or Hugging Face model; its parameters become views of unit storages. In a pipeline
                  this rank's layers of it become `engine.module`, and itself may not be used any more
    mesh          the ranks, by axis: a `zero3d.Mesh`; None makes one whose ranks are all data-parallel
    {keywords}

    Every rank must build it with the same arguments; rank 0's weights and buffers win, and of the ranks that
    share layers over tp the first one's random state: seed them alike afterwards, too. Over tp `engine.module`
    has this rank's slices of the parameters that are cut, in `full_params()`, too. Costs one
    broadcast of the model (none with `weights`), below stage 3 also an all-gather. Raises
    ConfigError, MeshError. A parameter without a gradient counts as one with gradient zero (weight
    decay and momentum apply), as under data-parallel PyTorch. Writes through `p.data` outside
    `full_params()` are not seen.
    """

    # what was asked for, and what it became
    stage = Exposed(lambda parts: parts.policy.row.number)
    mesh = Exposed(lambda parts: parts.mesh)
    precision = Exposed(lambda parts: parts.precision)
    policy = Exposed(lambda parts: parts.policy)
    blueprint = Exposed(lambda parts: parts.blueprint_now)
    offload = Exposed(lambda parts: parts.offload.offload)
    offload_why = Exposed(lambda parts: parts.offload.why)
    notes = Exposed(lambda parts: parts.all_notes)
    compiled = Exposed(lambda parts: parts.compiled)
    # axes, and what counts on them
    arena = Exposed(lambda parts: parts.axes.arena)
    traffic = Exposed(lambda parts: parts.axes.ledger)
    tp = Exposed(lambda parts: parts.axes.tp)
    dp = Exposed(lambda parts: parts.axes.dp)
    world = Exposed(lambda parts: parts.axes.world)
    second_shard_ranks = Exposed(lambda parts: 1 if parts.axes.node is None else parts.axes.node.size)
    model_group = Exposed(lambda parts: parts.model_group)
    # this rank's share of the model
    module = Exposed(lambda parts: parts.partition.module)
    chunks = Exposed(lambda parts: parts.partition.chunks)
    experts = Exposed(lambda parts: parts.partition.experts)
    full_model = Exposed(lambda parts: parts.partition.full_model)
    regions = Exposed(lambda parts: parts.partition.regions)
    sequence = Exposed(lambda parts: parts.sequence)
    kept_inputs = Exposed(lambda parts: parts.kept_inputs)
    pipeline = Exposed(lambda parts: parts.pipeline)
    targets = Exposed(lambda parts: parts.targets)
    # what works in every step
    units = Exposed(lambda parts: parts.units)
    gathers = Exposed(lambda parts: parts.gathers)
    reductions = Exposed(lambda parts: parts.reductions)
    accumulation = Exposed(lambda parts: parts.accumulation)
    summands = Exposed(lambda parts: parts.order.summands)
    optimizer = Exposed(lambda parts: parts.optimizer)
    loss_scale = Exposed(lambda parts: parts.loss_scale)
    clocks = Exposed(lambda parts: parts.clocks)
    # features
    features = Exposed(lambda parts: parts.features)
    averages = Exposed(lambda parts: find(parts.features, Averages))
    replay = Exposed(lambda parts: find(parts.features, Replay))
    health = Exposed(lambda parts: required(parts.features, Health))
    tower_gradients = Exposed(lambda parts: find(parts.features, TowerGradients))
    blanks = Exposed(lambda parts: parts.blanks)
    expert_load = Exposed(lambda parts: required(parts.features, ExpertBias).load)

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int = 3,
        mesh: Mesh | None = None,
        precision: str | Precision = "bf16",
        autocast: bool = False,
        reduce_dtype: str = "fp32",
        optimizer: Callable[..., Optimizer] | Optimizer | None = None,
        scheduler: Any = None,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        clip_norm: float | None = 1.0,
        accumulate: int = 1,
        loss: Loss | None = None,
        units: Sequence[type[nn.Module] | str] | None = None,
        linear: str | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        release: str = "auto",
        reduce: str = "auto",
        reduce_scatter: str = "auto",
        master: str = "fp32",
        offload: spec.Offload | Mapping[str, Any] | None = None,
        exact: bool = False,
        weights: Source | None = None,
        schedule: str | None = None,
        blocks: str | None = None,
        tp_plan: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
        ep_plan: Mapping[str, str] | None = None,
        experts: str = "exact",
        sp_kind: str = "auto",
        sp_mixers: str = "auto",
        sp_mask_budget: int | str = "4GB",
        partition_activations: bool = False,
        gather_budget: int | str | None = None,
        weight_shards: str = "kept",
        gather_wire: str = "same",
        second_shard: int | str | None = None,
        slow_wire: str = "same",
        slow_rounding: str = "nearest",
        communicators: int | None = None,
        tiled_loss: bool = False,
        replay: int = 0,
        ema: float | None = None,
        expert_bias_rate: float = 0.0,
    ) -> None:
        given = locals()
        options = Options.of({name: given[name] for name in KEYWORDS})
        self._open(assemble(model, mesh, options), mesh is None)

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh, options: Options) -> Self:
        """Build an engine of settings that are a record already, such as a file's. Raises what `Engine(...)` does."""
        engine = cls.__new__(cls)
        engine._open(assemble(model, mesh, options), False)
        return engine

    def _open(self, parts: Parts, opened: bool) -> None:
        """Begin with parts that are built. opened: the engine has made its mesh."""
        self._parts = parts
        saves = open_saves(parts)
        self._unsharded = Unsharded(parts, saves)
        self.checkpoints = Checkpoints(parts, self._unsharded, saves)
        self._streams = WeightStreams(parts, self._unsharded)
        self._counts = Counts(parts.mesh)
        self.traffic_formulas = TrafficFormulas(parts)
        self.last_step: StepResult | None = None
        self._last, self._opened = _flush_in_the_end(self, parts.optimizer), opened

    def close(self) -> None:
        """End training, and give the model back as a plain one, with all memory, threads and files of the engine.

        Parameters are whole on every rank, in their original dtype. Trained ones have their masters' values, frozen
        ones their original values or later writes. A parameter resized after `unshard()` keeps its new shape. The torch
        optimizer holds these parameters, with empty state: call `save` first if training may go on. Gradients of a step
        that is not applied are forgotten. Over tp, pp and ep no rank has a whole model, and its model refuses to be
        used: `export` first. A mesh that the engine has made is closed, too. Takes the whole model in that dtype on
        every rank, and moves (N-1)/N Psi elements of masters. All ranks call it; afterwards every use of the engine but
        this one raises ConfigError. Raises OutOfBudget, and changes nothing, where some rank has no room for the whole
        model; ConfigError inside full_params() and averaged(); and the error of a save with `wait=False`.
        """
        self._refuse("close()")
        self._unsharded.shut_for_close()
        self.saved()
        self._parts.stepper.abandon()
        with torch.no_grad():
            self.release()
        self.optimizer.wait()
        self._parts.close(self._unsharded.resized)
        mesh = self.mesh if self._opened else None
        if self._last is not None:
            self._last.detach()
        vars(self).clear()
        self.__class__ = _Closed
        for _ in range(2):  # an engine is part of cycles, and torch lets go of some objects only while the first runs
            gc.collect()
        if mesh is not None:
            mesh.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled, with what to use instead."""
        raise ConfigError(
            "an Engine cannot be copied or pickled: it has process groups, hooks of its model and this rank's shards. "
            "engine.save(directory) keeps everything, engine.export(directory) the weights, Engine(ema=...) their "
            "averages; engine.close() gives a model back that can be copied."
        )

    @property
    def has_whole_model(self) -> bool:
        """True where the model is cut over dp alone, so that `close()` can give it back."""
        return self._parts.has_whole_model

    def put(self, name: str, value: Any, everywhere: bool = False) -> None:
        """Set an attribute, such as a method, on the model or on each of its modules; `close()` removes it."""
        self._parts.changes.put(name, value, everywhere)

    @property
    def closed(self) -> bool:
        """True once `close()` has ended."""
        return False

    # --- training -------------------------------------------------------------------------------

    @notes_memory
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Under pp > 1 there is no such thing (ConfigError)."""
        if not torch.is_grad_enabled():  # else the step looks, before it updates anything
            self._parts.registry.check()
        with self.clocks.of(FORWARD if torch.is_grad_enabled() else EVALUATION):
            return self._parts.execution.call(*args, **kwargs)

    @notes_memory
    def backward(self, loss: Tensor, weight: float | Tensor | None = None, last: bool | None = None) -> None:
        """Back-propagate a micro-batch's mean loss over `weight` targets (None counts 1).

        The step divides by the sum of weights over micro-batches and dp ranks, so accumulation
        equals the big batch, padding included. `last` overrides `accumulate`. An exception on the
        way forgets the step so far.
        """
        with self.clocks.of(BACKWARD):
            self._parts.execution.backward(loss, weight, last)

    @notes_memory
    def backward_sum(
        self,
        total: Tensor,
        weight: float | Tensor = 1.0,
        last: bool | None = None,
        run: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Back-propagate a sum of losses over `weight` targets, where `backward` takes their mean.

        The step's gradient is that of all sums divided by all weights. With weight 1 for the last micro-batch of every
        rank and 0 for those before, sums are added up on a rank and averaged over ranks: DistributedDataParallel's.
        `run` is called with the sum, in fp16 times the loss scale, in the place of its `backward()`.
        """
        with self.clocks.of(BACKWARD):
            self._parts.execution.backward_sum(total, weight, last, run)

    def zero_grad(self) -> None:
        """Forget the gradients and micro-batches of this step so far. All ranks call it, or none.

        A step whose `grad_norm()` was not finite counts as skipped then: in fp16 the loss scale falls.
        """
        self._parts.stepper.leave_out()

    @notes_memory
    def grad_norm(self) -> Tensor:
        """Return the norm of the gradients of the step that is due, before clipping, as `step()` would return it.

        It is computed here, and the step that follows takes it: the same bits, and nothing is sent or read twice. All
        ranks call it. A loop may leave the step out, by `zero_grad()`; another backward before either is an error. NaN
        where no step is due. It is on the device, and to read it waits. Raises ConfigError.
        """
        self._unsharded.refuse_open("grad_norm()")
        self._refuse("grad_norm()")
        self._parts.registry.check()
        self._parts.freezing.check()
        self.mesh.heartbeat.work(b"the gradient norm")
        return self._parts.stepper.norm()

    @notes_memory
    def step(self) -> StepResult:
        """Apply the step if the boundary is reached, else change nothing.

        Moves what `traffic.step_traffic` says. Skips on all ranks when the gradient norm is not finite anywhere or
        no micro-batch had a target: the result's `reason`, and `engine.health` counts. Raises OrderError when
        ranks ran different units, NonFiniteError when fp16 overflows at its smallest loss scale.
        """
        self._check_update()
        return self._parts.stepper.step()

    def _check_update(self) -> None:
        """Refuse an update where the caller has whole parameters open, or has changed the model behind the engine."""
        self._unsharded.refuse_open("step()")
        self._unsharded.resized = {}  # of a close() that failed: training has gone on
        if self.accumulation.reached and self.checkpoints.copies:
            with self.clocks.of(SAVES):
                self.checkpoints.await_copy()
        self._refuse("step()")
        self._parts.registry.check()
        self._parts.freezing.check()
        self.mesh.heartbeat.work(b"the optimizer's update")

    @notes_memory
    def train_batch(
        self, micro_batches: Iterable[Any], besides: Callable[[], Tensor] | None = None, wait: bool = True
    ) -> Tensor:
        """One step over a list of micro-batches; the global mean loss, on every rank.

        A mapping's entries that the model's forward does not take are left for the loss. Back-propagates the sum that
        `loss(output, batch) -> (sum, weight)` returns; without `loss`, output.loss times the number of its targets. By
        the model's code these are shifted labels that are not -100 of a causal language model; labels that are not -100
        of a masked one, of tokens that are classified and of an encoder-decoder; else examples. If a model returns one
        number, that number is the mean loss, of weight 1. `num_items_in_batch` is left out of a mapping, for the loss
        is that mean.

        The step is applied at the end of the list, whatever `accumulate` says; ConfigError after micro-batches of
        another one. The step reads the device once. `figures` has the loss and all else of that read as plain numbers,
        also the result of `besides`, [k] float64 on the device, which is called after the last backward.

        Batches are on the mesh's device: nothing of them is moved, here and in `evaluate`. It returns with new weights
        in place. With `wait=False` stages 1 and 2 return while new weights are on their way: a forward, `state_dict()`,
        this engine's methods and torch's operations on a parameter wait for them. Objects that share a parameter's
        memory since before (its `data`, an array, a graph), and reads in C++, do not wait: call
        `engine.optimizer.wait()` first, as before `os._exit`. Where states leave the device, their update is on its way
        instead, and all ranks must read a parameter together.
        After a failure on some rank of a pipeline every further call raises Zero3dError.
        """
        self._unsharded.refuse_open("train_batch()")
        batches = list(micro_batches)
        self._parts.execution.check()
        self._refuse_window("train_batch()")
        self._counts.check(batches)
        refuse_none(len(batches), "train_batch")
        mean, self.last_step = self._parts.stepper.train_batch(batches, self._check_update, besides, wait)
        return mean

    @notes_memory
    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Any]) -> Tensor:
        """Return the global mean loss without update, in eval mode.

        Ranks run equally many micro-batches; on CPUs a ConfigError on all of them says so where they do not. At stage 3
        they use the same units: OrderError, on accelerators a loss of NaN and the error in the next step.
        In exact mode rank r's k-th is number k x dp + r of the list, however gradients are reduced.
        """
        number, execution = count(), self._parts.execution
        execution.check()
        with self.mesh.heartbeat.phase("evaluate"), execution.together(), self._evaluating(keep_full=False):
            counted = (batch for batch, _ in zip(self._counts.checked(micro_batches), number, strict=False))
            sums = execution.evaluate(counted)
            refuse_none(run := next(number), "evaluate")
            mean = self._parts.stepper.mean(sums, run, trained=False)
            return self.optimizer.in_order(mean) if self.stage == 3 else mean

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int = 20, keep_full: bool = True, **options: Any) -> Tensor:
        """Continue `input_ids` [batch, length] greedily, or by sampling (do_sample, temperature, top_k).

        keep_full  keep units gathered until training goes on, so that ranks may generate different
                   lengths; False gathers per use, and ranks must then stay in lockstep, as with ep in any case.
                   At stage 3 OutOfBudget is raised where some rank has no room for all units
        Sequences end at the end-of-sequence token that the model's generation_config names, and are padded.
        A model's own generate (Hugging Face) takes its other options, too, such as attention_mask, repetition_penalty
        or pixel_values of images, and follows its generation_config but for `max_new_tokens` and `do_sample`, which are
        the call's; in a pipeline as well, where nothing is cached, and what needs a cache or another model is refused
        by name. Any other model has these three.
        """
        ids = input_ids.to(self.mesh.device)
        cast = given_in(self._parts.options.autocast, self._parts.precision.dtype)
        options = map_tensors(options, lambda t: t.to(self.mesh.device))
        options = map_tensors(options, lambda t: cast(t) if t.is_floating_point() else t)  # by hooks it is too late
        self._parts.execution.check()
        if keep_full and self.stage == 3:
            check_room(self._parts)
        alone = (keep_full or self.dp.size == 1) and self.mesh.ep == 1  # experts of others need their tokens
        execution = self._parts.execution
        with (
            self.mesh.heartbeat.phase("generate"),
            execution.together(),
            self._evaluating(keep_full),
            nullcontext() if self.sequence is None else self.sequence.whole(),
        ):
            share_random_state(self.tp)  # tokens that differed would end sequences at other times: no rank would return
            of_model = getattr(self.module, "generate", None)
            if of_model is not None:
                synced = {} if alone else {"synced_gpus": True}
                with nullcontext() if self.blanks is None else self.blanks.generating(options):
                    of_call = {"do_sample": False} | options | synced
                    out: Tensor = of_model(ids, max_new_tokens=max_new_tokens, **of_call)
                return out
            chunk = next(iter(self.chunks.values()))
            model: Any = inner_model(model_of(chunk))
            if isinstance(execution, Pipelined) and hasattr(model, "generate"):
                synced = {} if alone else {"synced_gpus": True}
                return execution.generate(model, ids, max_new_tokens, options | synced)
            check_names(options)
            check_options(options, execution.vocabulary)
            ending = Ending.of(chunk, early=alone)
            return generate(execution.next_logits, self.model_group.sum, ids, max_new_tokens, ending, **options)

    @torch.no_grad()
    def hold_weights(self, whole: bool | None = None) -> Held:
        """Prepare a generation by the model's own `generate`, which is called next; all ranks call it.

        whole  gather all units until training goes on, so that ranks may generate different lengths; None: if every
               rank has room for them. Else forwards without grad gather each unit by use, and ranks stay in lockstep
        Returns what holds on all ranks, with the numbers. Moves (N-1)/N Psi elements where units are to be gathered.
        """
        self._parts.registry.check()
        return hold_weights(self._parts, whole)

    @contextmanager
    def _evaluating(self, keep_full: bool) -> Iterator[None]:
        self._parts.registry.check()
        self.optimizer.flush()
        hooks = self._parts.hooks
        with self.clocks.of(EVALUATION), evaluating(self.module, hooks, self.gathers, keep_full):
            yield

    # --- whole parameters -----------------------------------------------------------------------

    @contextmanager
    def full_params(self, modules: nn.Module | Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Inside, the parameters of `modules` (None: all) are whole; writes are kept on exit.

        `requires_grad_` inside freezes and unfreezes parameters, as `freeze` and `unfreeze` do.
        All ranks enter and leave together and write the same values (where they differ, the
        owner of each slice wins). Entering and leaving without writes changes no bit. At stage 3
        gathers the units: (N-1)/N Psi elements. A write into a tied parameter reaches its copy on another pipeline
        stage; where both are written, the full model's name wins. With master="split" a copy of this rank's weights is
        held inside, where they are not gathered from a shard. A view kept beyond the block is NaN where stage 3
        releases its memory, and keeps that memory allocated: keep a clone().
        """
        units = self._unsharded.open(modules)
        try:
            yield
            self._parts.registry.check()
            self._parts.freezing.adopt_unfrozen()
        finally:
            self._parts.whole_parameters.shut(units)

    def unshard(self, masters: bool = False) -> None:
        """Make all parameters whole until `reshard()`, as inside a `full_params()` block.

        masters  when training in bf16 or fp16, show parameters that came in fp32 in fp32 again, with their masters'
                 values, as torch's autocast leaves a model. The forward then runs in autocast; back-propagate its
                 results before `reshard()`. Frozen parameters have their original values unless written since; tiles
                 (`gather_budget`) stay as they are. Takes 4 bytes more of a parameter, and moves (N-1)/N Psi masters
        `step`, `train_batch` and `freeze` want `reshard()` first; `save`, `load`, `export`, `averaged` see to it. All
        ranks call it. Raises OutOfBudget, and changes nothing, where some rank has no room for them; with `masters`
        ConfigError inside full_params(), and over tp, pp and ep.
        """
        self._unsharded.unshard(masters)

    def reshard(self) -> None:
        """End what `unshard()` began, if it did. What was written into parameters is kept. All ranks call it.

        Raises LayoutError, after that, where one was given another shape: it has its old one again.
        """
        self._unsharded.reshard()

    def freeze(self, pattern: str) -> None:
        """Freeze the parameters that a pattern of names matches ("model.layers.0.*|*norm*"), between steps.

        The optimizer leaves them and their states alone until `unfreeze`. All ranks call it. Raises ConfigError.
        """
        self._refuse_window("freeze()")
        self._parts.registry.check()
        self._parts.freezing.set(self.module, pattern, trained=False)

    def unfreeze(self, pattern: str) -> None:
        """Train the parameters that a pattern of names matches, from the next forward on; all ranks call it.

        Parameters that were frozen when the engine was built get masters, gradients and states of zeros, with all of
        their unit, as if trained from the start. A ConfigError says where this is not supported, and the way around.
        """
        self._refuse_window("unfreeze()")
        self._parts.registry.check()
        self.optimizer.flush()
        self._parts.freezing.set(self.module, pattern, trained=True)

    def _refuse_window(self, call: str) -> None:
        required(self.features, Streaming).refuse(call)
        if self.accumulation.count:
            raise ConfigError(
                f"{call} after {self.accumulation.count} micro-batches of a step that is not applied yet: call it "
                "after the step() that applies it, or forget them with engine.zero_grad()."
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, weights are the averages that `ema` keeps, to evaluate, generate and export; then their own again.

        All ranks enter and leave together. Steps, saves and loads belong outside. Raises ConfigError without `ema`.
        """
        if self.averages is None:
            raise ConfigError("there are no averages of the weights: build the engine with ema=0.999 (train.ema).")
        self._refuse("averaged()")
        self._parts.registry.check()
        with self._unsharded.resharded():
            self._unsharded.refuse_open("averaged()")
            self.checkpoints.await_copy()
            self.release()
            with self.averages.shown():
                yield
                self.gathers.drop(lambda token: token == KEEP)

    def _refuse(self, call: str) -> None:
        """Raise ConfigError where a feature cannot have this method called now."""
        for feature in self.features:
            feature.refuse(call)

    def whole_state_dict(self, trained_only: bool = False) -> dict[str, Tensor]:
        """Return a copy of the weights as `module.state_dict()` names them, in rank 0's host memory; {} on the others.

        All ranks call it; units are gathered one by one. trained_only: without frozen weights and buffers.
        Raises ConfigError over tp, pp or ep, and where layers are in tiles.
        """
        self._parts.registry.check()
        self.optimizer.flush()
        if self.mesh.degrees.cuts_model or self.full_model.tiles:
            raise ConfigError("whole_state_dict() needs a model that is cut over dp alone: engine.export() writes any.")
        with self.mesh.heartbeat.phase("whole_state_dict"):
            return self._parts.whole_parameters.copied(self.module, trained_only)

    def release(self) -> None:
        """Give back units that stayed gathered without grad; updates of the last step that are due are made."""
        self.optimizer.flush()
        self.gathers.drop(lambda token: token == KEEP)

    # --- checkpoints ----------------------------------------------------------------------------

    def save(
        self, directory: str | Path, loop: Mapping[str, Any] | None = None, wait: bool = True, to: str | None = None
    ) -> Path:
        """Write `directory/step-N` atomically: masters, optimizer states, frozen weights, buffers, RNG.

        `loop` is returned by `load` to the training loop: plain values, rank 0's. `wait=False` returns at
        once, with the folder that will be there: a thread copies the states into the host's memory, for which the next
        update waits, then writes. `saved()` says what came of it; the next save, a load and the process' end wait, too.
        `to` is a URL of an object store, such as s3://bucket/run, that gets a copy: every rank uploads its own files.
        """
        with self.clocks.of(SAVES):
            return self.checkpoints.save(directory, loop, wait, to)

    def saved(self) -> Path | None:
        """Wait for a save with `wait=False` and return its folder; None where there is none, or it was told before.

        All ranks call it. Raises that save's error, on all of them; so does the next `save`, if nobody asked.
        """
        with self.clocks.of(SAVES):
            return self.checkpoints.saved()

    @property
    def save_is_over(self) -> bool:
        """Whether `saved()` has something to tell and need not wait for this rank; others may be late."""
        return self.checkpoints.save_is_over

    @property
    def save_figures(self) -> SaveFigures:
        """Seconds that the last save has kept training waiting so far, and bytes of tensors that this rank writes."""
        return self.checkpoints.save_figures

    def reserve_saves(self) -> None:
        """Take the memory of saves with `wait=False` now rather than at the first of them. Raises OutOfBudget."""
        self.checkpoints.reserve_saves()

    def load(self, directory: str | Path, settings: str = "saved") -> Any:
        """Continue from a checkpoint (or the newest in a directory of them, or below a URL), on any mesh, at any stage.

        settings  "saved": options of the optimizer's groups (lr, betas, weight decay, ...) and the schedule's state are
                  the checkpoint's, as torch's load_state_dict has it. "given": the options of this engine stay, and its
                  schedule is placed as if it had run from the first step; for an engine that has not trained yet.
                  Keywords such as clip_norm are always this engine's

        Returns the saved `loop`. `resumed` says whether the run goes on bitwise and if not, why, and which of this
        engine's values were replaced by the checkpoint's. All of it is checked first: a CheckpointError leaves
        everything as it was, gradients of this step included. Raises ConfigError where "given" cannot be, and leaves
        everything as it was, too.
        """
        return self.checkpoints.load(directory, settings)

    @property
    def resumed(self) -> str:
        """Whether the run goes on bitwise since the last load, and if not, why; empty before one."""
        return self.checkpoints.resumed

    @property
    def slots(self) -> Note | None:
        """The step that an earlier process has left in the slots of `offload.directory` of all ranks, or None.

        `slots.step` applied steps, and `slots.loop`, which `note` was given for it. `load_slots` goes on from there;
        training from elsewhere writes over it.
        """
        return self.checkpoints.slots

    def load_slots(self) -> Any:
        """Continue from `slots`, before anything is trained; return what was given to `note`, as `load` does."""
        return self.checkpoints.load_slots()

    def note(self, loop: Mapping[str, Any] | None = None) -> None:
        """Note that a step is complete, so that a restart can go on from the slots that its update writes.

        Does nothing unless all trained states are on a disk, and the optimizer is Adam or AdamW. To be called on
        every rank after `step()` or `train_batch()`, its evaluation and its checkpoint; `loop` is for `load_slots`.
        """
        self.checkpoints.note(loop)

    def fingerprint(self) -> str:
        """One hash of all masters and optimizer states, however ranks share them out; all ranks call it."""
        return self.checkpoints.fingerprint()

    def export(
        self, directory: str | Path, kind: str | None = None, to: str | None = None, overwrite: bool = False
    ) -> Path:
        """Write the weights as a Hugging Face folder, gathered unit by unit.

        kind       "whole"; of a model with adapters of PEFT "adapter" (None), for `PeftModel.from_pretrained`,
                   "merged", or "base", the model without them
        to         a URL of an object store, such as s3://bucket/hf, that rank 0 copies the folder to, in the place of
                   an export that is there
        overwrite  replace an export that is at `directory`, once this one is whole; any other folder is refused

        README.md beside them is a model card; one that somebody has changed is in the way, as other files are.
        Raises CheckpointError, ConfigError (of URLs), NonFiniteError.
        """
        with self.clocks.of(SAVES):
            return self.checkpoints.export(directory, kind, to, overwrite)

    # --- to whoever serves ----------------------------------------------------------------------

    def stream_weights(
        self, dtype: str | None = None, bucket_bytes: int | str = "256MB", adapters: str = "merged"
    ) -> Iterator[Bucket]:
        """Yield the weights in buckets, unit by unit; all ranks iterate together, and rank 0's buckets have tensors.

        dtype         of parameters of floating numbers: "fp32", "bf16", ...; None: training's. Buffers keep theirs
        bucket_bytes  of each of two buckets; a larger tensor goes in parts
        adapters      of a model that has some: "merged" into its weights, "alone", or "none": the model without them

        A bucket's `parts` have the names and bits that `export` writes, and a checksum, the XXH3 of a tensor, with its
        last part. Their tensors may be used until the next but one bucket is asked for. Rank 0 holds the largest unit
        and two buckets. A rank that leaves the loop ends the stream on all with StreamError. Raises ConfigError between
        backward and step, and while another stream is under way; NonFiniteError.
        """
        self._refuse_window("stream_weights()")
        return self._streams.stream(dtype, bucket_bytes, adapters)

    def send_weights(
        self,
        sender: Sender | None,
        dtype: str | None = None,
        bucket_bytes: int | str = "256MB",
        adapters: str = "merged",
        changed_only: bool = False,
    ) -> Sent:
        """Stream the weights to the receivers of rank 0's `sender` (`zero3d.weights`); other ranks give None.

        changed_only  leave out tensors that these receivers have since the last stream, by their checksums

        A bucket is made once receivers have acknowledged the one before last; returns when they have all of it. Where
        one of them dies, or acknowledges nothing for the sender's `timeout`, all ranks raise one StreamError that names
        it, and training may go on. Else as `stream_weights`.
        """
        self._refuse_window("send_weights()")
        self._parts.registry.check()
        return self._streams.send(sender, dtype, bucket_bytes, adapters, changed_only)

    # --- accounting -----------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        """What is stepped after every applied step, or None. May be replaced between steps. Raises ConfigError."""
        return self._parts.stepper.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._parts.stepper.scheduler = bind_scheduler(scheduler, self.optimizer.torch)

    @property
    def clip_norm(self) -> float | None:
        """Largest global gradient norm, or None. May be replaced between steps. Raises ConfigError."""
        return self.optimizer.clip_norm

    @clip_norm.setter
    def clip_norm(self, clip_norm: float | None) -> None:
        check_step(1, clip_norm)
        self.optimizer.clip_norm = clip_norm

    @property
    def steps(self) -> int:
        """Applied steps so far."""
        return self._parts.stepper.count

    @property
    def figures(self) -> StepFigures | None:
        """The last step that was due in plain numbers, read together; of train_batch `besides` begins with the loss."""
        return self._parts.stepper.figures

    @property
    def traffic_units(self) -> list[UnitTraffic]:
        """The units as `traffic.step_traffic` wants them; its result equals what `traffic` gains in a step."""
        return self._parts.accounts.traffic_units

    def report(self) -> Report:
        """Return what this rank's engine holds and has sent, time by part, settings in force, and versions.

        It prints as tables in a terminal and in a notebook; `as_json()` gives plain values. May be called on one rank
        alone, at any time between steps: nothing is sent, and nothing waits for the device.
        """
        return Report.of(self._parts, self.traffic_formulas, self.memory, self.clocks.rows())

    @property
    def memory(self) -> list[MemoryEntry]:
        """Bytes by category and place on this rank, planned and measured."""
        held = frozen_entry(self._parts.originals.nbytes) + self.checkpoints.memory + self._streams.memory
        return self._parts.accounts.memory + held


class _Closed(Engine):
    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError("this engine is closed: build a new Engine to train its model further.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ConfigError, as every other use does."""
        self.__getattr__("__call__")

    def close(self) -> None:
        """Do nothing."""

    @property
    def closed(self) -> bool:
        """True."""
        return True


def _flush_in_the_end(engine: Engine, optimizer: ShardedOptimizer) -> weakref.finalize[Any, Engine] | None:
    """Make due updates when an engine is collected, or its process ends; return the finalizer for the former."""
    if optimizer.updates is None:
        return None
    last = weakref.finalize(engine, _flush_last, lambda: optimizer)
    last.atexit = False
    atexit.register(_flush_at_exit, weakref.ref(optimizer))  # before the mesh ends
    return last


def _flush_at_exit(found: Callable[[], ShardedOptimizer | None]) -> None:
    """Make updates that are due when a process ends, unless by an error: peers may wait elsewhere then."""
    if getattr(sys, "last_value", None) is None:
        _flush_last(found)


def _flush_last(found: Callable[[], ShardedOptimizer | None]) -> None:
    """Make due updates when an engine is collected: its model may stay, and peers wait for this rank's messages."""
    if (optimizer := found()) is not None:
        unwaited(partial(_flush, optimizer))


def _flush(optimizer: ShardedOptimizer) -> None:
    with suppress(Zero3dError, RuntimeError):
        optimizer.flush()
