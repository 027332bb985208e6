"""A run from start to end: open, resume, train, export, sample, and say what was measured."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from zero3d.checkpoint.copies import copy_export
from zero3d.checkpoint.folders import tidied_path
from zero3d.checkpoint.hub_names import has_adapters
from zero3d.config import Batch, Config, offload_of, to_yaml
from zero3d.data.batches import BatchStream, Grouping
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.determinism import refusals_named
from zero3d.distributed.ledger import Ledger
from zero3d.engine.engine import Engine
from zero3d.memory.arena import Arena
from zero3d.models.bases import config_number
from zero3d.models.blocks import find_blocks
from zero3d.models.kept import Kept
from zero3d.models.packing import forward_options, row_options
from zero3d.models.places import has_base
from zero3d.precision import slow_products
from zero3d.spec.bits import GIVEN
from zero3d.stores.cache import shown
from zero3d.train.callbacks import open_callbacks
from zero3d.train.criterion import HELD_OUT, OF_AVERAGES
from zero3d.train.device_memory import fullest, host_peak, memory_peak
from zero3d.train.event_commands import EventCommands
from zero3d.train.export_places import ExportPlace, export_places
from zero3d.train.exported_folder import Reloaded, export_model, keep_heads, model_tokenizer, verifies, verify
from zero3d.train.flops import flops_per_token
from zero3d.train.folder import Folder, first_free, numbered
from zero3d.train.lock import FolderLock
from zero3d.train.loop import Loop
from zero3d.train.loop_state import LoopState
from zero3d.train.measure import Activations
from zero3d.train.metrics import Metrics, Record, losses
from zero3d.train.offload import as_measured, choice_of, choose, described, drop_leftovers, may_use_folder
from zero3d.train.own_values import open_function
from zero3d.train.planner import Planned
from zero3d.train.post_mortem import PostMortem
from zero3d.train.profiler import merged
from zero3d.train.progress import Progress
from zero3d.train.resume import choose_slots, find_checkpoint, restore
from zero3d.train.resume_settings import batches_of, describe, settings_of, with_groups, with_saved
from zero3d.train.run_card import run_card
from zero3d.train.sample import sample
from zero3d.train.session_report import SessionReport
from zero3d.train.setup.build import build_engine, with_output
from zero3d.train.setup.inputs import Inputs, open_inputs
from zero3d.train.setup.losses import choose_loss
from zero3d.train.setup.recurrences import choose_mixers, with_mixers
from zero3d.train.setup.text_part import naming_text_part
from zero3d.train.start import Start, check_start
from zero3d.train.tables import MemoryRow, TrafficRow
from zero3d.train.weights import choose_weights


@dataclass(frozen=True)
class Result:
    """Holds what a run found out, as seen by rank 0. Bytes and traffic are those of rank 0, in this session.

    expert_load    tokens of each expert in this session, by layer of rank 0's pipeline stage
    fingerprint    of exact mode: of all masters and optimizer states at the end
    peak_held      by the engine's states and buffers on the device together, at the instant at which these are most
    peak_reserved  by the allocator of the fullest accelerator; None on the CPU
    peak_host      by the ranks of the fullest host, each at its own peak
    averaged_loss  held-out loss of averages of the weights; the averages are exported. NaN without train.ema
    exports        folders that were written; reloaded_by: the class that has loaded the first of them
    values         of evaluate.function, at the last evaluation
    ended_early    why the run ended before its last step, or None
    saves          steps after which this session has saved a checkpoint
    trace          the file of all ranks' traced steps; None where none was traced
    slowest        the last rank that was slower than its peers, in words; None where none was
    """

    config: Config
    ranks: int
    params: int
    layers: int
    batch: Batch
    history: Sequence[Record]
    session: int
    seconds: float
    memory: Sequence[MemoryRow]
    traffic: Sequence[TrafficRow]
    peak_memory: int
    peak_held: int
    peak_host: int
    held_out_loss: float
    reloaded_loss: float
    sample: str
    folder: Folder
    checkpoint: Path
    exports: Sequence[Path] = ()
    reloaded_by: str = ""
    fingerprint: str = ""
    expert_load: Mapping[str, Sequence[int]] = field(default_factory=dict)
    peak_reserved: int | None = None
    averaged_loss: float = math.nan
    values: Mapping[str, float] = field(default_factory=dict)
    ended_early: str | None = None
    slowest: str | None = None
    trace: Path | None = None
    saves: Sequence[int] = ()

    @property
    def exported_loss(self) -> float:
        """Held-out loss of what is exported."""
        return self.held_out_loss if self.config.train.ema is None else self.averaged_loss

    @property
    def of_sources(self) -> Mapping[str, float]:
        """The held-out loss of each source of a mixture, by its name."""
        last = self.history[-1] if self.history else {}
        return {name.removeprefix(f"{HELD_OUT}/"): last[name] for name in last if name.startswith(f"{HELD_OUT}/")}

    @property
    def steps(self) -> Sequence[Record]:
        """Records of this session."""
        return self.history[len(self.history) - self.session :]


def run(config: Config, start: Start, progress: Progress, lock: FolderLock | None = None) -> Result:
    """Train as `config` says; the result of rank 0 is the one to print.

    `lock` stays on the output folder after the end, too. Raises Zero3dError (bad input) before anything is written,
    and Stopped after a checkpoint.
    """
    with (
        FolderLock() if lock is None else nullcontext(lock) as held_lock,
        PostMortem(config, start) as post_mortem,
        refusals_named(),
    ):
        return _run(config, start, progress, held_lock, post_mortem)


def _run(config: Config, start: Start, progress: Progress, lock: FolderLock, post_mortem: PostMortem) -> Result:
    inputs = open_inputs(config, lambda mesh: begin(config, start, lock, mesh.rank), progress.say)
    post_mortem.mesh = inputs.mesh
    module = inputs.opened.module
    options, layers = forward_options(module), len(find_blocks(module))
    if inputs.packing:
        options |= row_options(module, config.data.length)
    flops = flops_per_token(module, config.data.length)  # before parameters are cut
    with inputs.mesh.waiting_room() as axis:
        everyone = Comm(axis, Arena(torch.device("cpu")), Ledger())
        checkpoint = find_checkpoint(config, start, everyone)
        config = agree(everyone, partial(with_saved, config, start.settings, checkpoint))
        config, groups = agree(everyone, partial(with_groups, config, module, checkpoint))
        plan = start.planner.plan(config, module, inputs.mesh, inputs.steps)
        built, chosen = choose(config, inputs.mesh, everyone, checkpoint, plan)
        built, of_weights = choose_weights(built, inputs.mesh, everyone, plan)
        chosen += of_weights
        fresh = _first_free(start, everyone) if config.output is None and may_use_folder(built) else None
    if fresh is not None:
        config, built = with_output(config, fresh.root), with_output(built, fresh.root)
    plan = plan.again(built, inputs.mesh) if chosen and isinstance(plan, Planned) else plan
    loss = choose_loss(built, module, inputs.mesh)
    built = replace(built, train=replace(built.train, tiled_loss=loss.tiled))
    post_mortem.planned, post_mortem.config = plan, built
    with removed_on_failure(fresh, inputs.mesh.rank):
        with naming_text_part(config):
            shared = choose_mixers(built, module, inputs.mesh)
            post_mortem.config = built = with_mixers(built, shared.kind)
            engine = build_engine(built, inputs.opened, inputs.mesh, inputs.batch.accumulate, inputs.steps)
        post_mortem.engine = engine
        if (measured := as_measured(built, engine)) != built:
            plan = plan.again(measured, inputs.mesh) if isinstance(plan, Planned) else plan
            post_mortem.planned, post_mortem.config = plan, measured
        stream = _stream(config, inputs, engine)
        from_slots = choose_slots(config, start, engine, checkpoint)
        with inputs.mesh.heartbeat.phase("load"):
            saved, steps = restore(config, start, inputs, engine, stream, checkpoint, from_slots)
        folder = open_folder(config, start, engine, checkpoint, lock)
        with inputs.mesh.heartbeat.phase("load"):
            kept: Kept | None = getattr(inputs.opened.weights, "kept", None)
            keep_heads(kept, _places(config, inputs, folder), folder.kept, engine.world.patient)
    config, post_mortem.folder = with_output(config, folder.root), folder
    inputs.mesh.heartbeat.tell(output=str(folder.root.resolve()))
    if inputs.mesh.local_rank == 0:
        drop_leftovers(folder, engine, ended=False)
    notes = (
        *inputs.opened.notes,
        loss.why or None,
        shared.why or None,
        groups,
        *inputs.data.notes,
        plan if isinstance(plan, str) else None,
        lock.note,
    )
    for line in (*introduction(config, inputs, steps, engine, folder), *chosen, *engine.offload_why, *notes):
        if line is not None:
            progress.say(line)
    post_mortem.loop = loop = Loop(config, engine, stream, inputs.data.validation, folder, options, flops)
    loop.events = EventCommands(config.log.on, folder.root, engine.world.rank, progress.say)
    loop.plan_check = start.planner.check(config, engine, plan, inputs.steps)
    if saved is not None:
        loop.resume(LoopState.of(saved), None if checkpoint is None else tidied_path(checkpoint), from_slots)
        newer = f"newer than {loop.checkpoint.name if checkpoint else 'no checkpoint'}"
        source = f"the slots in {offload_of(config).directory}, {newer}" if from_slots else shown(loop.checkpoint)
        progress.say(f"going on from {source}, after step {loop.state.step}")
        offers = start.settings == GIVEN and not from_slots
        progress.say(describe(config, offers, engine, saved, batches_of(inputs.batch, steps, inputs.data.rule)))
        if (before := saved.get("chosen_by", loop.state.chosen_by)) != loop.state.chosen_by:
            progress.say(f"the best so far was the {before}; from here on it is the {loop.state.chosen_by}")
    chosen_places, sizes = choice_of(config, engine), batches_of(inputs.batch, steps, inputs.data.rule)
    loop.state = replace(loop.state, offload=chosen_places, settings=settings_of(config), batches=sizes)
    earlier = folder.keep_metrics(loop.state.step) if engine.world.rank == 0 else []
    activations = Activations(engine)
    any_left = loop.state.step < steps and loop.why_over is None
    if not any_left and loop.why_over is None:
        progress.say(f"all {steps:,} steps are done: there is nothing left to train")
    session = SessionReport(loop, activations, inputs.batch.accumulate, steps)
    with session.written():
        with Metrics(folder, config, engine.world.rank, loop.state.step + 1, any_left, progress.say) as metrics:
            loop.run(steps, metrics, progress)
        loop.stream.close()
        if loop.why_over is not None:
            progress.say(f"ended early, after step {loop.state.step} of {steps}: {loop.why_over}")
        with inputs.mesh.heartbeat.phase("finish"):
            return _finish(config, inputs, loop, [*earlier, *loop.history], session, layers, progress)


def _places(config: Config, inputs: Inputs, folder: Folder) -> Sequence[ExportPlace]:
    """Return where the run exports to."""
    adapted, based = has_adapters(inputs.opened.module), has_base(config.model)
    return export_places(folder.root, config.checkpoint.export, adapted, based)


def _finish(
    config: Config,
    inputs: Inputs,
    loop: Loop,
    history: Sequence[Record],
    session: SessionReport,
    layers: int,
    progress: Progress,
) -> Result:
    """Measure, export, sample and verify after the last step. All ranks take part; rank 0 verifies."""
    engine, folder, tokenizer = loop.engine, loop.folder, inputs.data.tokenizer
    session.measure()
    peak, reserved = fullest(engine, memory_peak(engine))
    trace = merged(loop.tracer, folder.root, engine.world.patient, loop.ranks.hosts) if loop.tracer else None
    fingerprint = engine.fingerprint() if engine.policy.exact else ""
    expert_load = engine.expert_load.over_dp()
    base = inputs.opened.folder
    exports = _places(config, inputs, folder)
    last = history[-1] if history else {}
    card = run_card(config, base, loop.state.tokens, last, averages=config.train.ema is not None)
    with nullcontext() if engine.averages is None else engine.averaged():
        for place in exports:
            with inputs.mesh.heartbeat.phase("export"):
                if note := export_model(engine, place, tokenizer or model_tokenizer(base), base, card):
                    progress.say(note)
                if config.checkpoint.to is not None:
                    copied = f"{config.checkpoint.to.rstrip('/')}/{place.name}"
                    copy = partial(copy_export, place.path, copied) if engine.world.rank == 0 else lambda: None
                    agree(engine.world.patient, copy)
        session.sample = text = sample(config, engine, inputs.data, progress)
    if engine.offload.uses_folder:
        agree(engine.world, lambda: None)  # nobody reads it any more
        if inputs.mesh.local_rank == 0:
            drop_leftovers(folder, engine, ended=True)
    reloaded = Reloaded()
    if verifies(config, inputs.data) and engine.world.rank == 0:
        reloaded = verify(config, engine, exports[0], base, inputs.data)
    return Result(
        config=config,
        ranks=engine.world.size,
        params=count_params(engine),
        layers=layers,
        batch=inputs.batch,
        history=history,
        session=len(loop.history),
        seconds=sum(record["seconds"] for record in loop.history),
        memory=session.memory,
        traffic=session.traffic,
        peak_memory=peak,
        peak_held=session.peak_held,
        peak_reserved=reserved,
        peak_host=host_peak(engine),
        held_out_loss=losses(history, HELD_OUT)[-1] if history else math.nan,
        averaged_loss=losses(history, OF_AVERAGES)[-1] if history else math.nan,
        reloaded_loss=reloaded.loss,
        reloaded_by=reloaded.by,
        sample=text,
        folder=folder,
        exports=[place.path for place in exports],
        checkpoint=loop.checkpoint,
        fingerprint=fingerprint,
        expert_load=expert_load,
        values=loop.evaluations.values,
        ended_early=loop.why_over,
        slowest=loop.ranks.line,
        trace=trace,
        saves=tuple(loop.saves),
    )


# --- the beginning ------------------------------------------------------------------------------


def begin(config: Config, start: Start, lock: FolderLock, rank: int) -> None:
    """Refuse a run that cannot be; rank 0 locks an output folder that is there. Raises ConfigError, CheckpointError."""
    check_start(config, start, alone=rank == 0)
    if config.evaluate.function is not None:
        open_function(config.evaluate.function)
    open_callbacks(config.callbacks or ())
    if rank == 0 and config.output is not None and Path(config.output).is_dir():
        lock.acquire(Path(config.output))


def open_folder(config: Config, start: Start, engine: Engine, checkpoint: Path | None, lock: FolderLock) -> Folder:
    """Claim the output folder on rank 0 and write config.yaml into it."""
    first = engine.world.rank == 0
    if config.output is None:
        config = with_output(config, _first_free(start, engine.world).root)
    folder, everyone = Folder.of(config), engine.world.patient
    agree(everyone, lambda: folder.claim(lock, start.resume, start.overwrite, checkpoint) if first else None)
    text = to_yaml(config)
    agree(everyone, lambda: folder.write_config(text) if first else None)
    return folder


@contextmanager
def removed_on_failure(folder: Folder | None, rank: int) -> Iterator[None]:
    """Remove a folder that was made for this run, if it cannot begin."""
    try:
        yield
    except BaseException:
        if folder is not None and rank == 0:
            shutil.rmtree(folder.root, ignore_errors=True)
        raise


def _first_free(start: Start, everyone: Comm) -> Folder:
    """Return the first free folder of the run's name, which rank 0 has made."""
    stem = f"zero3d-{start.name}"
    number = agree(everyone, lambda: first_free(stem) if everyone.rank == 0 else 0)
    folder = Folder(numbered(stem, int(everyone.exchange(torch.tensor([number]))[0])))
    start.report_output(folder.root)
    return folder


def introduction(config: Config, inputs: Inputs, steps: int, engine: Engine, folder: Folder) -> list[str]:
    """Say in lines what is about to happen."""
    ranks = engine.world.size
    kind = type(inputs.opened.module).__name__
    devices = f"{ranks} rank{'s' if ranks > 1 else ''} on {engine.mesh.device.type}"
    settings = [f"stage {config.zero.stage}", config.precision, devices]
    settings += [f"activations {config.activations}"] if config.activations != "none" else []
    settings += ["inputs of blocks in parts over tp"] if config.mesh.partition_activations else []
    settings += [] if engine.sequence is None else [engine.sequence.describe(engine.mesh.tp)]
    mesh = engine.mesh
    settings += [f"states over {mesh.shard} of dp {mesh.dp}"] if mesh.shard < mesh.dp else []
    settings += ["masters in halves"] if engine.policy.splits else []
    settings += [f"gathered in tiles of {config.zero.gather_budget}"] if config.zero.gather_budget else []
    settings += [f"averages of weights {config.train.ema:g}"] if config.train.ema is not None else []
    settings += ["loss in tiles"] if config.train.tiled_loss is True else []
    return [
        *([engine.mesh.degrees.table()] if engine.mesh.pp * engine.mesh.tp > 1 else []),
        f"zero3d train: {', '.join(settings)}; {kind} with {parameters(engine)}",
        f"{inputs.batch.equation}; {steps:,} step{'' if steps == 1 else 's'}; writing to {folder.root}",
        _vocabulary(inputs),
        *filter(None, [slow_products(config.precision, engine.mesh.device), described(engine)]),
        *getattr(engine.optimizer.torch, "table", ()),
        *engine.notes,
    ]


def _vocabulary(inputs: Inputs) -> str:
    """Say what text becomes tokens by, and how many the model knows."""
    tokenizer, rows = inputs.data.tokenizer, config_number(inputs.opened.module, "vocab_size")
    by = "no tokenizer, the data are token ids" if tokenizer is None else f"{tokenizer.name}, {tokenizer.size:,} tokens"
    return f"tokenizer: {by}; the model's vocabulary: {'unknown' if rows is None else f'{rows:,}'}"


def _stream(config: Config, inputs: Inputs, engine: Engine) -> BatchStream:
    tokenizer = inputs.data.tokenizer
    pad = 0 if tokenizer is None else tokenizer.pad
    return BatchStream(
        inputs.data.train,
        inputs.batch,
        rank=engine.mesh.row,
        seed=config.seed,
        shuffle=config.data.shuffle,
        workers=config.data.workers,
        dealt=engine.policy.exact and engine.policy.often,
        grouped=Grouping(
            config.data.group_by_length,
            config.data.group_by_modality,
            alike=pad if engine.mesh.pp > 1 else None,  # a pipeline's schedule is made for one shape
        ),
    )


def parameters(engine: Engine) -> str:
    """Say how many parameters the model has, and where some are frozen how many are trained."""
    total, full = count_params(engine), engine.full_model
    trained = sum(math.prod(full.shapes[name]) for name in full.trainable)
    some = "" if trained == total else f", of which {trained:,} are trained ({trained / total:.2%})"
    return f"{total:,} parameters{some}"


def count_params(engine: Engine) -> int:
    """Return Psi, of all pipeline stages and tp ranks."""
    return sum(map(math.prod, engine.full_model.shapes.values()))
