"""The training loop: steps, evaluations, checkpoints, and stopping when asked to.

    batch -> engine.train_batch -> record -> (evaluation) -> (give up) -> (checkpoint) -> (stop)

A step is one batch, applied or skipped; too many in a row that are not finite end the run. What a checkpoint holds
of the loop is `LoopState`: with the engine's own states, the run goes on as if it had not been interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from zero3d.config import Config
from zero3d.data.batches import BatchStream, validation_batches
from zero3d.data.sequences import Sequences
from zero3d.engine.engine import Engine
from zero3d.errors import CheckpointError, NonFiniteError
from zero3d.train.flops import peak_flops
from zero3d.train.folder import Folder
from zero3d.train.loop_state import LoopState
from zero3d.train.metrics import Metrics, Record
from zero3d.train.nonfinite import none_applied, skip_limit, too_many_skips
from zero3d.train.plan_check import PlanCheck
from zero3d.train.progress import Progress
from zero3d.train.resume_hints import ANEW, ResumeHints
from zero3d.train.stop import Stopped, StopRequest
from zero3d.train.trace import Tracer
from zero3d.train.traffic import TrainingTraffic
from zero3d.zero.health import check_weights
from zero3d.zero.optimizer import OVERFLOW


class Loop:
    """Trains `engine` on `stream` up to `steps`.

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
        self._hints = ResumeHints(folder, config, engine.everyone.size)
        self._began = self._saved = engine.steps  # applied when this session began, and at its last checkpoint
        self._most, self._last, self._overflows = skip_limit(config.health), 0, 0
        self._validation, self._options = validation, options
        self._flops, self.tokens = flops, 0
        device = engine.mesh.device
        self._name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def resume(self, done: LoopState, checkpoint: Path) -> None:
        """From a checkpoint that was loaded."""
        self.state, self.checkpoint, self.engine.health.in_a_row = done, checkpoint, done.in_a_row

    def run(self, steps: int, metrics: Metrics, progress: Progress) -> None:
        """Steps done + 1 .. steps. Raises Stopped, after a checkpoint, when a signal asks for it; NonFiniteError."""
        self._last = steps
        tracer = Tracer(self.config.profile, self.folder.root, self.engine.everyone.rank)
        with StopRequest() as request, tracer:
            for step in progress.track(self.state.step + 1, steps):
                record = self.step()
                asked = self._finish(record, request)
                last = step == steps
                if self._validation is not None and asked and last and not self.stuck:
                    self.save(record)  # there may be no time for the evaluation
                if self._validation is not None and (last or (not asked and _due(step, self.config.evaluate.every))):
                    record |= self.evaluate()
                    progress.show_held_out(record)
                self.history.append(record)
                metrics.write(record)
                progress.show(record)
                self._compare(progress)
                tracer.step()
                self._check_health(step)
                due = asked or _due(step, self.config.checkpoint.every) or self._best_is_new(record)
                if last or (due and not self.stuck):
                    self.save(record)
                if asked and not last:
                    raise Stopped(asked, self._kept(step))

    # --- one step -----------------------------------------------------------------------------------

    def step(self) -> Record:
        """Train on the next batch; what this rank saw of it."""
        begun = time.monotonic()
        batches = [self.on_device(batch) for batch in next(self.stream)]
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        self.tokens += tokens
        loss = self._train(batches)
        done = self.engine.last_step
        assert done is not None
        self._overflows += done.reason == OVERFLOW
        record = {
            "step": self.state.step + 1,
            "loss": float(loss),
            "grad_norm": float(done.grad_norm),
            "lr": float(done.lr),
            "loss_scale": float(done.loss_scale),
            "applied": bool(done.applied),
            "tokens": tokens,
        }
        return record | {"seconds": time.monotonic() - begun}

    def _train(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """One step. The last one that may be skipped is traced."""
        health = self.engine.health
        try:
            with health.tracing() if health.is_last(self._most) or self._is_last_chance else nullcontext():
                return self.engine.train_batch(batches)
        except NonFiniteError as error:  # of fp16's smallest loss scale
            self._give_up(str(error))
            raise

    @property
    def _is_last_chance(self) -> bool:
        """Whether the next step is the last, and none of this session was applied yet."""
        return self.state.step + 1 == self._last and self.engine.steps == self._began

    def _check_health(self, step: int) -> None:
        """Give up where too many steps in a row were not finite, or a session ends in which none was applied."""
        done, health = self.engine.last_step, self.engine.health
        if done is not None and done.reason == OVERFLOW and health.in_a_row >= self._most:
            self._give_up(too_many_skips(self.config.health, health.in_a_row, step))
        if step == self._last and self._overflows and self.engine.steps == self._began:
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
            way = self._way_on("These steps changed nothing")
        except NonFiniteError as error:
            way = str(error)
        except CheckpointError as error:  # it shall not hide why
            way = f"{error} {self._way_on('These steps changed nothing')}"
        self.engine.health.fail(why, way)

    def _check_weights(self) -> None:
        """Raise NonFiniteError where the weights are spoiled: they are not saved, and what is saved stays."""
        engine = self.engine
        remedy = self._way_on("They are not saved")
        check_weights(engine.units, engine.comm, engine.everyone, NonFiniteError, remedy)

    @property
    def _has_saved(self) -> bool:
        return self.checkpoint != self.folder.checkpoints

    def _way_on(self, what: str) -> str:
        """What to type after giving up."""
        change = "Lower optimizer.lr or look at the data of these steps"
        if self._has_saved:
            goes_on = f"{change}, then go on from it: {self._hints.command(self.checkpoint)}"
            return f"{what}, and {self.checkpoint} is there. {goes_on}"
        nothing = "Nothing is saved" if self.engine.steps else "No step was applied and nothing saved"
        return f"{nothing}. {change}, then {ANEW}."

    def _finish(self, record: Record, request: StopRequest) -> int:
        """Add what all ranks know together; the signal that asks them to stop, or 0."""
        mine = torch.tensor([float(request.asked or 0), float(record["tokens"])], dtype=torch.float64)
        with self.traffic.excluded():
            seen = self.engine.everyone.exchange(mine.to(self.engine.mesh.device)).cpu()
        mesh = self.engine.mesh
        tokens, world = int(seen[:, 1].sum()) // (mesh.pp * mesh.tp), mesh.world  # a replica's ranks see the same
        self.state = replace(
            self.state, step=record["step"], skipped=self.state.skipped + (not record["applied"]),
            in_a_row=self.engine.health.in_a_row, tokens=self.state.tokens + tokens, position=self.stream.state(),
        )  # fmt: skip
        rate = tokens / record["seconds"]
        peak = peak_flops(self._name, self.engine.precision.name)
        record |= {"tokens": self.state.tokens, "tokens_per_s": rate, "skipped": self.state.skipped}
        record |= {"mfu": rate * self._flops / (peak * world)} if peak else {}
        record |= {"memory_bytes": memory_bytes(self.engine), "traffic_bytes": self.traffic.last_step()}
        record["epoch"] = self.state.position["epoch"] + self.state.position["index"] / self.state.position["sequences"]
        return int(seen[:, 0].max())

    def _compare(self, progress: Progress) -> None:
        """Plan against actual, once, where a run has that."""
        if self.plan_check is not None:
            with self.traffic.excluded():
                for line in self.plan_check.lines(self.history):
                    progress.say(line)

    def on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """A batch where the engine computes, with the options every forward gets."""
        moved = {name: tensor.to(self.engine.mesh.device, non_blocking=True) for name, tensor in batch.items()}
        return {**moved, **self._options}

    # --- the held-out part --------------------------------------------------------------------------

    def held_out(self) -> Iterator[dict[str, Any]]:
        """This rank's micro-batches of the held-out part."""
        assert self._validation is not None
        comm, micro = self.engine.comm, self.stream.portions.micro_batch
        limit, exact = self.config.evaluate.batches, self.config.zero.exact
        mine = validation_batches(self._validation, micro, dp=comm.size, rank=comm.rank, limit=limit, together=exact)
        for batch in mine:
            yield self.on_device(batch)

    def evaluate(self) -> Record:
        """Mean loss per target and perplexity."""
        with self.traffic.excluded():
            loss = float(self.engine.evaluate(self.held_out()))
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
        return self.engine.steps == self._saved and self.engine.health.in_a_row > 0

    def _kept(self, step: int) -> str:
        """What there is when a run is asked to stop."""
        if not self.stuck:
            return f"step {step} of {self._last} is saved in {self.checkpoint}"
        kept = f"what was before is in {self.checkpoint}" if self._has_saved else "nothing is saved"
        return f"step {step} of {self._last} and those before it were not finite; {kept}"

    def save(self, record: Record) -> None:
        """A checkpoint of this step; older ones go, but the best. Raises NonFiniteError for spoiled weights.

        Those of a course that was left go once this one has come further than where it began.
        """
        if self._best_is_new(record):
            self.state = replace(self.state, best=(self.engine.steps, record["validation_loss"]))
        with self.traffic.excluded():
            self._check_weights()
            self.checkpoint = self.engine.save(self.folder.checkpoints, asdict(self.state))
        self._saved = self.engine.steps
        if self.engine.everyone.rank == 0 and self.engine.steps > self._began:
            best = None if self.state.best is None else self.state.best[0]
            self.folder.prune(self.engine.steps, self.config.checkpoint.keep, best)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def memory_bytes(engine: Engine) -> int:
    """The most this rank's device has held; on the CPU what the process holds now."""
    device = engine.mesh.device
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.get_device_module(device).max_memory_allocated(device))
