"""The training loop: steps, evaluations, checkpoints, and stopping when asked to.

    batch -> engine.train_batch -> record -> (evaluation) -> (give up) -> (checkpoint) -> (stop)

A step is one batch, applied or skipped; too many in a row that are not finite end the run. What a checkpoint holds
of the loop is `LoopState`: with the engine's own states, the run goes on as if it had not been interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3d.config import Config
from zero3d.data.batches import BatchStream, validation_batches
from zero3d.data.sequences import Sequences
from zero3d.engine.engine import Engine
from zero3d.errors import CheckpointError, NonFiniteError
from zero3d.memory.arena import device_values
from zero3d.train.device_memory import memory_bytes, reserved_bytes
from zero3d.train.flops import peak_flops
from zero3d.train.folder import Folder
from zero3d.train.loop_state import RUN, LoopState
from zero3d.train.metrics import Metrics, Record
from zero3d.train.nonfinite import none_applied, skip_limit, too_many_skips
from zero3d.train.plan_check import PlanCheck
from zero3d.train.profiler import Tracer
from zero3d.train.progress import Progress
from zero3d.train.resume_hints import ANEW, ResumeHints
from zero3d.train.stop import Stopped, StopRequest
from zero3d.train.traffic import TrainingTraffic
from zero3d.watchdog.heartbeat import TRAINING
from zero3d.zero.health import check_weights
from zero3d.zero.optimizer import OVERFLOW

NEVER = -1  # no number of applied steps


class Loop:
    """Trains `engine` on `stream`, step by step, and evaluates, saves and stops where it is due.

    options     passed to every forward beside the batch
    validation  sequences held out, or None
    flops       useful operations per token, of the whole model
    tokens      that this rank trained on in this session
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        stream: BatchStream,
        validation: Sequences | None,
        folder: Folder,
        options: Mapping[str, Any],
        flops: float,
    ) -> None:
        self.config, self.engine, self.stream, self.folder = config, engine, stream, folder
        self.history: list[Record] = []
        self.state = LoopState()
        self.traffic = TrainingTraffic(engine)
        self.plan_check: PlanCheck | None = None
        self.checkpoint = folder.checkpoints
        self._hints = ResumeHints(folder, config, engine.world.size)
        self._steps_at_start = self._steps_at_save = engine.steps  # applied at the session's start, its last checkpoint
        self._skip_limit, self._last_step, self._overflows = skip_limit(config.health), 0, 0
        self._validation, self._options = validation, options
        self._flops, self.tokens = flops, 0
        self._of_ranks: list[float] = []  # signal and tokens of each in the last step
        device = engine.mesh.device
        self._device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def resume(self, state: LoopState, checkpoint: Path | None, from_slots: bool = False) -> None:
        """Continue from a checkpoint that was loaded, or from slots of a later step than the newest checkpoint."""
        self.state, self.engine.health.in_a_row = state, state.in_a_row
        self.checkpoint = checkpoint or self.checkpoint
        if from_slots:
            self._steps_at_save = NEVER

    def run(self, steps: int, metrics: Metrics, progress: Progress) -> None:
        """Train up to step `steps`. Raises Stopped, after a checkpoint, when a signal asks for it; NonFiniteError."""
        self._last_step = steps
        tracer = Tracer(self.config.profile, self.folder.root, self.engine.world.rank)
        with StopRequest() as request, tracer, self.engine.mesh.heartbeat.phase(TRAINING):
            for step in progress.track(self.state.step + 1, steps):
                record = self.step(request)
                stop_signal = self._add_totals(record)
                last = step == steps
                if self._validation is not None:
                    if stop_signal and last and not self.stuck:
                        self.save(record)  # there may be no time for the evaluation
                    if last or (not stop_signal and _due(step, self.config.evaluate.every)):
                        record |= self.evaluate()
                        progress.show_held_out(record)
                self.history.append(record)
                metrics.write(record)
                progress.show(record)
                self._check_plan(progress)
                tracer.step()
                self._check_health(step)
                due = stop_signal or _due(step, self.config.checkpoint.every) or self._best_is_new(record)
                if last or (due and not self.stuck):
                    self.save(record)
                if record["applied"]:
                    run = self.folder.run_id if self.engine.world.rank == 0 else ""
                    self.engine.note({RUN: run, **asdict(self.state)})
                if stop_signal and not last:
                    self.engine.optimizer.settle()  # this process ends at once
                    raise Stopped(stop_signal, self._kept(step))

    # --- one step -----------------------------------------------------------------------------------

    def step(self, request: StopRequest) -> Record:
        """Train on the next batch; return what this rank saw of it: of the device nothing but what the step reads."""
        begun, self.engine.mesh.heartbeat.step = time.monotonic(), self.state.step + 1
        batches = [self.on_device(batch) for batch in next(self.stream)]
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        self.tokens += tokens
        self._train(batches, lambda: self._share(request, tokens))
        result, figures = self.engine.last_step, self.engine.figures
        assert result is not None
        assert figures is not None
        self._overflows += result.reason == OVERFLOW
        loss, *self._of_ranks = figures.besides
        record = {
            "step": self.state.step + 1,
            "loss": loss,
            "grad_norm": figures.grad_norm,
            "lr": figures.lr,
            "loss_scale": figures.loss_scale,
            "applied": figures.applied,
            "tokens": tokens,
        }
        return record | {"seconds": time.monotonic() - begun}

    def _share(self, request: StopRequest, tokens: int) -> Tensor:
        """Return of every rank the signal that asks it to stop, or 0, and its tokens of this step; on the device."""
        local = device_values([float(request.signal or 0), float(tokens)], self.engine.mesh.device)
        with self.traffic.excluded():
            return self.engine.world.exchange(local).flatten()

    @property
    def _is_read_next(self) -> bool:
        """Whether new weights are read right after the step under way, whose time is then to hold the wait for them."""
        step = self.state.step + 1
        every = (self.config.evaluate.every, self.config.checkpoint.every)
        return step == self._last_step or any(_due(step, each) for each in every)

    def _train(self, batches: Sequence[Mapping[str, Any]], besides: Callable[[], Tensor]) -> None:
        """Train one step. The last one that may be skipped is traced."""
        health = self.engine.health
        compiles = self.config.train.compile and not self.history  # in the session's first step
        try:
            with (
                self.engine.mesh.heartbeat.phase("compile" if compiles else TRAINING),
                health.tracing() if health.is_last(self._skip_limit) or self._is_last_chance else nullcontext(),
            ):
                self.engine.train_batch(batches, besides, wait=self._is_read_next)
        except NonFiniteError as error:  # of fp16's smallest loss scale
            self._give_up(str(error))
            raise

    @property
    def _is_last_chance(self) -> bool:
        """Whether the next step is the last, and none of this session was applied yet."""
        return self.state.step + 1 == self._last_step and self.engine.steps == self._steps_at_start

    def _check_health(self, step: int) -> None:
        """Give up where too many steps in a row were not finite, or a session ends in which none was applied."""
        result, health = self.engine.last_step, self.engine.health
        if result is not None and result.reason == OVERFLOW and health.in_a_row >= self._skip_limit:
            self._give_up(too_many_skips(self.config.health, health.in_a_row, step))
        if step == self._last_step and self._overflows and self.engine.steps == self._steps_at_start:
            self._give_up(none_applied(self._overflows, len(self.history), step, self.engine.loss_scale))

    def _give_up(self, why: str) -> None:
        """Raise NonFiniteError on all ranks, which says where to go on from; what is saved stays as it is.

        What there is of a run that has saved nothing is saved: skipped steps have changed nothing.
        """
        try:
            if self.engine.steps and not self._has_saved:
                self.save({})
            else:
                self._check_weights()
            remedy = self._remedy("These steps changed nothing")
        except NonFiniteError as error:
            remedy = str(error)
        except CheckpointError as error:  # it shall not hide why
            remedy = f"{error} {self._remedy('These steps changed nothing')}"
        self.engine.health.fail(why, remedy)

    def _check_weights(self) -> None:
        """Raise NonFiniteError where the weights are spoiled: they are not saved, and what is saved stays."""
        engine = self.engine
        remedy = self._remedy("They are not saved")
        check_weights(engine.units, engine.dp, engine.world, NonFiniteError, remedy)

    @property
    def _has_saved(self) -> bool:
        return self.checkpoint != self.folder.checkpoints

    def _remedy(self, fact: str) -> str:
        """Return what to type after giving up."""
        change = "Lower optimizer.lr or look at the data of these steps"
        if self._has_saved:
            command = f"{change}, then go on from it: {self._hints.command(self.checkpoint)}"
            return f"{fact}, and {self.checkpoint} is there. {command}"
        nothing = "Nothing is saved" if self.engine.steps else "No step was applied and nothing saved"
        return f"{nothing}. {change}, then {ANEW}."

    def _add_totals(self, record: Record) -> int:
        """Add what all ranks know together; return the signal that asks them to stop, or 0."""
        mesh, signals = self.engine.mesh, self._of_ranks[0::2]
        # The ranks of a model-parallel group see the same tokens.
        tokens = int(sum(self._of_ranks[1::2])) // (mesh.pp * mesh.tp)
        self.state = replace(
            self.state, step=record["step"], skipped=self.state.skipped + (not record["applied"]),
            in_a_row=self.engine.health.in_a_row, tokens=self.state.tokens + tokens, position=self.stream.state(),
        )  # fmt: skip
        rate = tokens / record["seconds"]
        peak = peak_flops(self._device_name, self.engine.precision.name)
        record |= {"tokens": self.state.tokens, "tokens_per_s": rate, "skipped": self.state.skipped}
        record |= {"mfu": rate * self._flops / (peak * mesh.world)} if peak else {}
        reserved = reserved_bytes(self.engine)
        record |= {"memory_bytes": memory_bytes(self.engine), "traffic_bytes": self.traffic.last_step()}
        record |= {} if reserved is None else {"reserved_bytes": reserved}
        record["epoch"] = self.state.position["epoch"] + self.state.position["index"] / self.state.position["sequences"]
        return int(max(signals))

    def _check_plan(self, progress: Progress) -> None:
        """Print plan against actual, once, where a run has that."""
        if self.plan_check is not None:
            with self.traffic.excluded():
                for line in self.plan_check.lines(self.history):
                    progress.say(line)

    def on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return a batch where the engine computes, with the options every forward gets."""
        return {**{name: to_device(tensor, self.engine.mesh.device) for name, tensor in batch.items()}, **self._options}

    # --- the held-out part --------------------------------------------------------------------------

    def held_out_batches(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's micro-batches of the held-out part."""
        assert self._validation is not None
        dp, micro = self.engine.dp, self.stream.portions.micro_batch
        limit, exact = self.config.evaluate.batches, self.config.zero.exact
        batches = validation_batches(self._validation, micro, dp=dp.size, rank=dp.rank, limit=limit, together=exact)
        for batch in batches:
            yield self.on_device(batch)

    def evaluate(self) -> Record:
        """Return the mean loss per held-out target and its perplexity."""
        with self.traffic.excluded():
            mean = self.engine.evaluate(self.held_out_batches())
            loss = self.engine.world.read(mean.view(1), [0.0])[0]
        return {"validation_loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    # --- checkpoints --------------------------------------------------------------------------------

    def _best_is_new(self, record: Record) -> bool:
        loss = record.get("validation_loss", math.nan)
        if not self.config.checkpoint.best or not math.isfinite(loss):
            return False
        return self.state.best is None or loss < self.state.best[1]

    @property
    def stuck(self) -> bool:
        """Whether all steps since the last checkpoint were skipped and not finite: another would only replace it."""
        return self.engine.steps == self._steps_at_save and self.engine.health.in_a_row > 0

    def _kept(self, step: int) -> str:
        """Return what there is when a run is asked to stop."""
        if not self.stuck:
            return f"step {step} of {self._last_step} is saved in {self.checkpoint}"
        kept = f"what was before is in {self.checkpoint}" if self._has_saved else "nothing is saved"
        return f"step {step} of {self._last_step} and those before it were not finite; {kept}"

    def save(self, record: Record) -> None:
        """Save a checkpoint of this step; older ones go, but the best. Raises NonFiniteError for spoiled weights.

        Those of a course that was left go once this one has come further than where it began.
        """
        if self._best_is_new(record):
            self.state = replace(self.state, best=(self.engine.steps, record["validation_loss"]))
        with self.traffic.excluded():
            self._check_weights()
            self.checkpoint = self.engine.save(self.folder.checkpoints, asdict(self.state))
        self._steps_at_save = self.engine.steps
        if self.engine.world.rank == 0 and self.engine.steps > self._steps_at_start:
            best = None if self.state.best is None else self.state.best[0]
            self.folder.prune(self.engine.steps, self.config.checkpoint.keep, best)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device. Accelerators take it from pinned memory, while the host goes on."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
