"""The training loop: steps, evaluations, checkpoints, and stopping when asked to.

    batch -> engine.train_batch -> record -> (evaluation) -> (give up) -> (checkpoint) -> (stop)

A step is one batch, applied or skipped; too many in a row that are not finite end the run. What a checkpoint holds
of the loop is `LoopState`: with the engine's own states, the run goes on as if it had not been interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3d.checkpoint.folders import checkpoints
from zero3d.config import Config
from zero3d.config.sections import NONFINITE, STRAGGLER
from zero3d.data.batches import BatchStream
from zero3d.data.sequences import Samples
from zero3d.engine.engine import Engine
from zero3d.engine.health import check_weights
from zero3d.errors import CheckpointError, CorruptionError, NonFiniteError
from zero3d.memory.arena import device_values, nothing
from zero3d.models.images import CALLS
from zero3d.models.packing import as_row, placed
from zero3d.stores.cache import shown
from zero3d.train.callbacks import Callbacks
from zero3d.train.criterion import Criterion
from zero3d.train.device_memory import memory_bytes, memory_peak, reserved_bytes
from zero3d.train.evaluations import Evaluations
from zero3d.train.event_commands import EventCommands, facts_of
from zero3d.train.flops import peak_flops
from zero3d.train.folder import Folder
from zero3d.train.garbage import collected_between_steps
from zero3d.train.loop_state import RUN, LoopState
from zero3d.train.metrics import Metrics, Record
from zero3d.train.planner import Check
from zero3d.train.profiler import Tracer
from zero3d.train.progress import Progress
from zero3d.train.rank_watch import RankWatch
from zero3d.train.resume_hints import ANEW, ResumeHints, after_corruption, none_applied, skip_limit, too_many_skips
from zero3d.train.saving import Saving
from zero3d.train.spikes import SpikeWatch
from zero3d.train.step_times import fields
from zero3d.train.stop import Stopped, StopRequest
from zero3d.train.traffic import TrainingTraffic
from zero3d.watchdog.heartbeat import TRAINING
from zero3d.zero.optimizer import OVERFLOW, is_not_finite
from zero3d.zero.step_parts import DATA, PARTS, OverRanks

SHARED = 3  # numbers that each rank tells the others in a step


class Loop:
    """Trains `engine` on `stream`, step by step, and evaluates, saves and stops where it is due.

    options     passed to every forward beside the batch
    validation  sequences held out, or None
    flops       useful operations per token, of the whole model
    tokens      that this rank trained on in this session
    saves       steps after which this session has saved a checkpoint
    events      a user's own commands
    after_save  is called when a checkpoint was saved, or its save behind training has begun
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        stream: BatchStream,
        validation: Samples | None,
        folder: Folder,
        options: Mapping[str, Any],
        flops: float,
    ) -> None:
        self.config = config
        self.engine = engine
        self.stream = stream
        self.folder = folder
        self.history: list[Record] = []
        self.state = LoopState()
        self.traffic = TrainingTraffic(engine)
        if not config.train.compile:  # a compiled block would be cut where it counts
            engine.expert_load.watch()
        self.plan_check: Check | None = None
        self.after_save: Callable[[], None] = nothing
        self.events = EventCommands({}, folder.root)
        self._callbacks = Callbacks(config.callbacks or (), engine)
        self.evaluations = Evaluations(config, engine, validation, stream.portions.micro_batch, self.on_device)
        self.criterion = Criterion.of(config.evaluate)
        self.state = self.state.by(self.criterion)
        self.ranks = RankWatch(engine)
        self._say: Callable[[str], None] = no_words
        self.saves: list[int] = []
        self.saving = Saving(config.checkpoint, engine, folder, self._note_saved, self.ranks.saved)
        self._hints = ResumeHints(folder, config, engine.world.size)
        self._steps_at_start = engine.steps  # applied
        self._skip_limit = skip_limit(config.health)
        self._last_step = 0
        self._overflows = 0
        self._options = options
        self._flops, self.tokens = flops, 0
        self._spikes = SpikeWatch()
        self._of_ranks: list[float] = []  # of each in the last step: signal, tokens, whether its save is over
        self.tracer: Tracer | None = None  # of the steps that are traced
        device = engine.mesh.device
        self._device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    def resume(self, state: LoopState, checkpoint: Path | None, from_slots: bool = False) -> None:
        """Continue from a checkpoint that was loaded, or from slots of a later step than the newest checkpoint."""
        self.state, self.engine.health.in_a_row = state.by(self.criterion), state.in_a_row
        self.saving.go_on(checkpoint, self.state.best, from_slots)

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint, or the folder of all where there is none."""
        return self.saving.newest

    @property
    def why_over(self) -> str | None:
        """Why the run ends before its last step, or None."""
        waiting = self.state.waiting
        return self.criterion.why_over(waiting) if waiting and self.criterion.is_over(waiting) else None

    def run(self, steps: int, metrics: Metrics, progress: Progress) -> None:
        """Train up to step `steps`, or until no better evaluation is waited for.

        Raises Stopped, after a checkpoint, when a signal asks for it; NonFiniteError; ConfigError of a user's own code.
        """
        self._last_step = steps = steps if self.why_over is None else self.state.step
        self.ranks.begin(steps, self.config.log.every)
        self._say = progress.say
        if self.config.checkpoint.asynchronous:
            with self.traffic.excluded():
                self.engine.reserve_saves()
        if self.engine.tower_gradients is not None:
            self.engine.tower_gradients.tell = progress.say
        self.tracer = tracer = Tracer(self.config.profile, self.folder.root, self.engine.world.rank)
        heartbeat = self.engine.mesh.heartbeat
        with (
            StopRequest() as request,
            tracer,
            heartbeat.phase("between steps"),  # files, records, traces
            collected_between_steps() as collect_garbage,
        ):
            self._tell("on_start", self.config, self.state.step)
            for step in progress.track(self.state.step + 1, steps):
                with heartbeat.phase(TRAINING):
                    record = self.step(request)
                stop_signal = self._add_totals(record)
                self._note_spike(record, progress)
                self._note_skip(progress)
                self._note_slow_rank(progress)
                last = step == steps
                if self.evaluations.any:
                    if stop_signal and last and not self.stuck:
                        self.save(record)  # there may be no time for the evaluation
                    if last or (not stop_signal and _due(step, self.config.evaluate.every)):
                        self._evaluate(record, progress)
                        last = last or self.why_over is not None
                self.history.append(record)
                metrics.write(record)
                progress.show(record)
                if len(self.history) == 1 and self.engine.compiled is not None:
                    progress.say(self.engine.compiled.counted)
                self._tell("on_step", record)
                self._check_plan(progress)
                tracer.step()
                self._check_health(step)
                if last or stop_signal or all(self._of_ranks[2::SHARED]):
                    self._finish_save(ends=last or stop_signal > 0)
                due = stop_signal or _due(step, self.config.checkpoint.every) or self._best_is_new(record)
                if last or (due and not self.stuck):
                    self.save(record, must=last or stop_signal > 0)
                if record["applied"]:
                    run = self.folder.run_id if self.engine.world.rank == 0 else ""
                    self.engine.note({RUN: run, **asdict(self.state)})
                if stop_signal and not last:
                    self.engine.optimizer.flush()  # this process ends at once
                    raise Stopped(stop_signal, self._kept(step))
                collect_garbage(step)
                if self.why_over is not None:
                    break
            self._tell("on_end", self.history[-1] if self.history else {})

    def _tell(self, event: str, *arguments: Any) -> None:
        """Tell a user's own classes of an event; what they send is no training's."""
        if self.config.callbacks:
            with self.traffic.excluded():
                self._callbacks.tell(event, *arguments)

    # --- one step -----------------------------------------------------------------------------------

    def step(self, request: StopRequest) -> Record:
        """Train on the next batch; return this rank's record of it. The device is read by the step alone."""
        begun, self.engine.mesh.heartbeat.step = time.monotonic(), self.state.step + 1
        with self.engine.clocks.of(DATA):
            batches = [self.on_device(batch) for batch in next(self.stream)]
            if self.engine.blanks is not None and self.stream.pictured is not None:
                batches = [batch | {CALLS: int(has)} for batch, has in zip(batches, self.stream.pictured, strict=True)]
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        self.tokens += tokens
        self._train(batches, lambda: self._share(request, tokens))
        result, figures = self.engine.last_step, self.engine.figures
        assert result is not None
        assert figures is not None
        self._overflows += is_not_finite(result.reason)
        loss, *shared = figures.besides
        border = SHARED * self.engine.world.size
        self._of_ranks, times = shared[:border], shared[border:]
        saved = self.saving.figures()
        record = {
            "step": self.state.step + 1,
            "loss": loss,
            "grad_norm": figures.grad_norm,
            "lr": figures.lr,
            "loss_scale": figures.loss_scale,
            "applied": figures.applied,
            "tokens": tokens,
        }
        return record | {"seconds": time.monotonic() - begun} | self._times(times) | saved

    def _share(self, request: StopRequest, tokens: int) -> Tensor:
        """Return of every rank the signal that asks it to stop or 0, its tokens, if its save is over; on the device.

        If a record shall report the times of a step's parts, also the least, mean and largest of these over ranks, and
        what ranks tell of their own seconds.
        """
        local = [float(request.signal or 0), float(tokens), float(self.engine.save_is_over)]
        tells = self.ranks.due(self.state.step + 1)
        if tells:
            local += self.engine.clocks.window() + self.ranks.tell(len(self.history))
        with self.traffic.excluded():
            told = self.engine.world.exchange(device_values(local, self.engine.mesh.device))
        times, own = told[:, SHARED : SHARED + len(PARTS)], told[:, SHARED + len(PARTS) :]
        over_ranks = [times.amin(0), times.mean(0), times.amax(0), own.flatten()] if tells else []
        return torch.cat([told[:, :SHARED].flatten(), *over_ranks])

    def _times(self, flat: Sequence[float]) -> Record:
        """Return the fields of a record, of the least, mean and largest of each part; none where steps are too few."""
        many = len(PARTS)
        if not any(flat[: many * len(OverRanks._fields)]):
            return {}
        over_ranks = OverRanks(*(flat[place * many : (place + 1) * many] for place in range(len(OverRanks._fields))))
        self.engine.clocks.hear(over_ranks)
        own = flat[many * len(OverRanks._fields) :]
        return fields(over_ranks, self.engine.world.size) | self.ranks.hear(self.state.step + 1, own)

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
                self.ranks.computing(),
            ):
                self.engine.train_batch(batches, besides, wait=self._is_read_next)
        except NonFiniteError as error:  # of fp16's smallest loss scale
            self._give_up(str(error))
            raise
        except CorruptionError as error:
            saved, replay = checkpoints(self.folder.checkpoints), self.engine.replay
            clean = None if replay is None else replay.clean
            error.args = (f"{error} {after_corruption(saved, clean, self._steps_at_start, self._hints)}",)
            raise

    @property
    def _is_last_chance(self) -> bool:
        """Whether the next step is the last, and none of this session was applied yet."""
        return self.state.step + 1 == self._last_step and self.engine.steps == self._steps_at_start

    def _check_health(self, step: int) -> None:
        """Give up where too many steps in a row were not finite, or a session ends in which none was applied."""
        result, health = self.engine.last_step, self.engine.health
        if result is not None and is_not_finite(result.reason) and health.in_a_row >= self._skip_limit:
            self._give_up(too_many_skips(self.config.health, health.in_a_row, step))
        if step == self._last_step and self._overflows and self.engine.steps == self._steps_at_start:
            self._give_up(none_applied(self._overflows, len(self.history), step, self.engine.loss_scale))
        if result is not None and is_not_finite(result.reason) and health.in_a_row == 1:
            self._tell_not_finite("skipped", result.reason)

    def _give_up(self, why: str) -> None:
        """Raise NonFiniteError on all ranks, with the checkpoint to go on from; saved checkpoints stay as they are.

        A run without any checkpoint saves its present state: skipped steps have changed nothing.
        """
        self._tell_not_finite("gives up", why)
        try:
            self._finish_save(ends=True)
            if self.engine.steps and not self.saving.has_any:
                self.save({})
            else:
                self._check_weights()
            remedy = self._remedy("These steps changed nothing")
        except NonFiniteError as error:
            remedy = str(error)
        except CheckpointError as error:  # it shall not hide why
            remedy = f"{error} {self._remedy('These steps changed nothing')}"
        self.engine.health.fail(why, remedy)

    def _tell_not_finite(self, how: str, why: str) -> None:
        """Start the user's command."""
        facts = facts_of(self.state.step, self.history[-1] if self.history else {})
        self.events.fire(NONFINITE, facts | {"how": how, "reason": why})

    def _check_weights(self) -> None:
        """Raise NonFiniteError where the weights are spoiled: they are not saved, and saved checkpoints stay."""
        engine = self.engine
        remedy = self._remedy("They are not saved")
        check_weights(engine.units, engine.world, NonFiniteError, remedy)

    def _remedy(self, fact: str) -> str:
        """Return what to type after giving up."""
        change = "Lower optimizer.lr or look at the data of these steps"
        if self.saving.has_any:
            command = f"{change}, then go on from it: {self._hints.command(self.checkpoint)}"
            return f"{fact}, and {shown(self.checkpoint)} is there. {command}"
        nothing = "Nothing is saved" if self.engine.steps else "No step was applied and nothing saved"
        return f"{nothing}. {change}, then {ANEW}."

    def _add_totals(self, record: Record) -> int:
        """Add all ranks' totals to a record; return the signal that asks them to stop, or 0."""
        mesh, signals = self.engine.mesh, self._of_ranks[0::SHARED]
        # The ranks of a model-parallel group see the same tokens, and so do ranks that share sequences.
        tokens = int(sum(self._of_ranks[1::SHARED])) // (mesh.pp * mesh.tp * mesh.sp)
        self.state = replace(
            self.state,
            step=record["step"],
            skipped=self.state.skipped + (not record["applied"]),
            in_a_row=self.engine.health.in_a_row,
            tokens=self.state.tokens + tokens,
            position=self.stream.state(),
        )
        rate = tokens / record["seconds"]
        peak = peak_flops(self._device_name, self.engine.precision.name)
        record |= {"tokens": self.state.tokens, "tokens_per_s": rate, "skipped": self.state.skipped}
        flops = rate * self._flops / mesh.world
        record |= {"tokens_per_s_per_rank": rate / mesh.world, "tflops_per_rank": flops / 1e12}
        record |= {"mfu": flops / peak} if peak else {}
        record |= {"wait_s": self.ranks.waits, "save_wait_s": self.ranks.take_waited()}
        reserved = reserved_bytes(self.engine)
        record |= {"memory_bytes": memory_bytes(self.engine), "traffic_bytes": self.traffic.last_step()}
        record["peak_memory_bytes"] = memory_peak(self.engine)
        record |= {} if reserved is None else {"reserved_bytes": reserved}
        if not self.history and record["step"] > 1:
            record["resumed_from"] = record["step"] - 1
        record["epoch"] = self.state.position["epoch"] + self.state.position["index"] / self.state.position["sequences"]
        return int(max(signals))

    def _note_spike(self, record: Record, progress: Progress) -> None:
        """Say once of a loss far above the recent ones where in the data it is; the run goes on."""
        if (spike := self._spikes.look(record["loss"])) is None:
            return
        record["usual_loss"] = spike.usual
        batch = self.stream.portions.batch
        epoch, first = divmod(self.stream.taken - batch, self.state.position["sequences"])
        progress.say(
            f"step {record['step']}: loss {spike.loss:.4f} is far above those of the last {spike.steps} steps, whose "
            f"median is {spike.usual:.4f}; its {batch} sequences begin at number {first} of epoch {epoch}"
        )

    def _note_skip(self, progress: Progress) -> None:
        """Print why a step was skipped, once for steps in a row, and not while fp16 looks for its loss scale."""
        result = self.engine.last_step
        if result is not None and is_not_finite(result.reason) and self.engine.health.in_a_row == 1:
            why = "its gradients are not finite" if result.reason == OVERFLOW else result.reason
            progress.say(f"step {self.state.step}: skipped: {why}")

    def _note_saved(self, folder: Path) -> None:
        """Say that a checkpoint is whole, and tell a user's own classes."""
        self.saves.append(self.state.step)
        self._say(f"saved: {shown(folder)}")
        self._tell("on_save", folder)

    def _note_slow_rank(self, progress: Progress) -> None:
        """Say of a rank that is slower than its peers."""
        if (slow := self.ranks.news()) is not None:
            line = slow.line(self.ranks.hosts)
            progress.say(f"step {self.state.step}: {line}")
            facts = {"why": line, "slowest_hostname": self.ranks.hosts[slow.rank], "slowest_part": slow.part}
            self.events.fire(STRAGGLER, {"step": self.state.step, **facts, **slow.fields()})

    def _check_plan(self, progress: Progress) -> None:
        """Print plan against actual, once, where a run has that."""
        if self.plan_check is not None:
            with self.traffic.excluded():
                for line in self.plan_check.lines(self.history):
                    progress.say(line)

    def on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return a batch where the engine computes, a row where attention needs one, with every forward's options."""
        row, device = as_row(batch, self._options), self.engine.mesh.device
        options = placed(self._options, row)
        return {**{name: to_device(tensor, device) for name, tensor in row.items()}, **options}

    # --- the held-out part --------------------------------------------------------------------------

    def _evaluate(self, record: Record, progress: Progress) -> None:
        """Evaluate after a step; note the values in its record, and for how long a better one has been waited for."""
        with self.traffic.excluded():
            found = self.evaluations.at(record["step"], record.keys())
        self.criterion.check(found)
        record |= found
        progress.show_evaluation(record["step"], found)
        self.state = replace(self.state, waiting=self.criterion.wait(self.state.waiting, record))
        self._tell("on_evaluate", record)

    # --- checkpoints --------------------------------------------------------------------------------

    def _best_is_new(self, record: Record) -> bool:
        best = None if self.state.best is None else self.state.best[1]
        return self.config.checkpoint.best and self.criterion.improves(self.criterion.value(record), best)

    @property
    def stuck(self) -> bool:
        """Whether all steps since the last checkpoint were skipped and not finite: another would only replace it."""
        return self.engine.steps == self.saving.steps and self.engine.health.in_a_row > 0

    def _kept(self, step: int) -> str:
        """Return a phrase about the saved state of a run that is asked to stop."""
        if not self.stuck:
            return f"step {step} of {self._last_step} is saved in {self.checkpoint}"
        kept = f"what was before is in {shown(self.checkpoint)}" if self.saving.has_any else "nothing is saved"
        return f"step {step} of {self._last_step} and those before it were not finite; {kept}"

    def save(self, record: Record, must: bool = True) -> None:
        """Save a checkpoint of this step; older ones go, but the best. Raises NonFiniteError for spoiled weights.

        must  it is the last, of the run or before a stop: it is waited for, and a failure is raised
        """
        self._finish_save()
        value = self.criterion.value(record) if self._best_is_new(record) else None
        best = self.saving.best if value is None else (self.engine.steps, value)
        with self.traffic.excluded(), self.ranks.saving():
            self._check_weights()
            self.saving.save(asdict(replace(self.state, best=best)), best, must)
        self.state = replace(self.state, best=self.saving.best)
        self.after_save()

    def _finish_save(self, ends: bool = False) -> None:
        """Wait for a save behind training, and note its outcome. Raises CheckpointError."""
        with self.traffic.excluded(), self.ranks.saving() if self.saving.under_way else nullcontext():
            self.saving.finish(ends)
        self.state = replace(self.state, best=self.saving.best)


def no_words(text: str) -> None:
    """Say nothing."""


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device. Accelerators take it from pinned memory, while the host goes on."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
