"""A whole run: open, train, evaluate, save, export, and say what was measured."""

from __future__ import annotations

import gc
import math
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero3d.checkpoint.folders import tidied_path
from zero3d.config import Batch, Config, resolve_batch, to_yaml
from zero3d.data.batches import BatchStream, validation_batches
from zero3d.data.dataset import DataSet
from zero3d.data.tokenizers import Tokenizer, load_tokenizer
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import broadcast_ints
from zero3d.engine.engine import Engine
from zero3d.errors import CheckpointError, ConfigError, NonFiniteError
from zero3d.models.blocks import find_blocks
from zero3d.models.foreign_code import no_foreign_code
from zero3d.models.masking import forward_options
from zero3d.setup.build import Inputs, build_engine, of_config, open_inputs, steps_of_run, with_output
from zero3d.setup.optim import rate, set_again, settings
from zero3d.train.flops import flops_per_token
from zero3d.train.folder import AUTO, Folder, first_free, numbered
from zero3d.train.lock import FolderLock
from zero3d.train.loop import Loop, memory_bytes
from zero3d.train.loop_state import LoopState, check_loop_state
from zero3d.train.measure import Activations, MemoryRow, memory_rows
from zero3d.train.metrics import Metrics, Record, losses
from zero3d.train.plan_check import CHECKED_STEP, PlanCheck, plan_run
from zero3d.train.progress import Progress
from zero3d.train.resume_hints import ResumeHints, older_hint
from zero3d.train.start import Start, check_start
from zero3d.train.traffic import SessionCounts, TrafficRow, traffic_rows
from zero3d.zero.health import check_weights

SAMPLE_LENGTH, TEMPERATURE, TOP_K = 240, 0.7, 40


@dataclass(frozen=True)
class Result:
    """What a run found out, as seen by rank 0. Bytes and traffic are those of rank 0, in this session.

    fingerprint  of exact mode: of all masters and optimizer states at the end
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
    held_out_loss: float
    reloaded_loss: float
    sample: str
    folder: Folder
    checkpoint: Path
    fingerprint: str = ""

    @property
    def steps(self) -> Sequence[Record]:
        """Records of this session."""
        return self.history[len(self.history) - self.session :]


def run(config: Config, start: Start, progress: Progress, lock: FolderLock | None = None) -> Result:
    """Train as `config` says; the result of rank 0 is the one to print.

    `lock` stays on the output folder after the end, too. Raises Zero3dError (bad input) before anything is written,
    and Stopped after a checkpoint.
    """
    with FolderLock() if lock is None else nullcontext(lock) as held_lock:
        return _run(config, start, progress, held_lock)


def _run(config: Config, start: Start, progress: Progress, lock: FolderLock) -> Result:
    inputs = open_inputs(config, lambda mesh: begin(config, start, lock, mesh.rank))
    options, layers = forward_options(inputs.opened.module), len(find_blocks(inputs.opened.module))
    notes, data = inputs.opened.notes, inputs.data
    flops = flops_per_token(inputs.opened.module, config.data.length)  # before parameters are cut
    planned = plan_run(config, inputs.opened.module, inputs.mesh, inputs.steps)
    engine = build_engine(config, inputs.opened, inputs.mesh, inputs.batch.accumulate, inputs.steps)
    stream = _stream(config, inputs, engine)
    found = find_checkpoint(config, start, engine)
    saved, steps = restore(config, start, inputs, engine, stream, found)
    folder = open_folder(config, start, engine, found, lock)
    found = None if found is None else tidied_path(found)
    config = with_output(config, folder.root)
    said = (planned if isinstance(planned, str) else None, lock.note)
    notes = (*notes, *data.notes, *(line for line in said if line is not None))
    for line in (*introduction(config, inputs, steps, engine, folder), *notes):
        progress.say(line)
    loop = Loop(config, engine, stream, data.validation, folder, options, flops)
    if inputs.steps >= CHECKED_STEP:
        loop.plan_check = PlanCheck(config, engine, None if isinstance(planned, str) else planned)
    if saved is not None:
        loop.resume(LoopState.of(saved), found or loop.checkpoint)
        progress.say(f"going on from {found}, after step {loop.state.step}")
        progress.say(engine.resumed)
    earlier = folder.keep_metrics(loop.state.step) if engine.everyone.rank == 0 else []
    activations = Activations(engine)
    with Metrics(folder, config, engine.everyone.rank, loop.state.step + 1) as metrics:
        loop.run(steps, metrics, progress)
    loop.stream.close()
    m, first = inputs.batch.accumulate, engine.everyone.rank == 0
    applied = sum(record["applied"] for record in loop.history)
    memory = memory_rows(engine, engine.memory, activations.bytes, m)
    traffic = traffic_rows(engine, loop.traffic, SessionCounts(applied, len(loop.history) - applied, m, loop.tokens))
    peak = int(engine.everyone.exchange(torch.tensor([float(memory_peak(engine))], dtype=torch.float64)).max())
    history = [*earlier, *loop.history]
    held_out = losses(history, "validation_loss")[-1] if history else math.nan
    fingerprint = engine.fingerprint() if config.zero.exact else ""
    if config.checkpoint.export:
        _export(engine, folder, data.tokenizer or _own_tokenizer(inputs.opened.folder), progress)
    sample = _sample(config, engine, data.tokenizer, progress)
    reloaded = verify(config, engine, folder.export, data) if verifies(config, data) and first else math.nan
    return Result(
        config, engine.everyone.size, count_params(engine), layers, inputs.batch, history, len(loop.history),
        sum(record["seconds"] for record in loop.history), memory, traffic, peak, held_out, reloaded, sample, folder,
        loop.checkpoint, fingerprint,
    )  # fmt: skip


# --- beginning ----------------------------------------------------------------------------------


def begin(config: Config, start: Start, lock: FolderLock, rank: int) -> None:
    """Refuse what cannot be; rank 0 holds an output folder that is there. Raises ConfigError, CheckpointError."""
    check_start(config, start, alone=rank == 0)
    if rank == 0 and config.output is not None and Path(config.output).is_dir():
        lock.acquire(Path(config.output))


def find_checkpoint(config: Config, start: Start, engine: Engine) -> Path | None:
    """The checkpoint to go on from. Raises CheckpointError."""
    folder = Folder(Path(config.output or "."))
    return agree(engine.everyone, lambda: folder.resume_from(start.resume))


def load(config: Config, start: Start, engine: Engine, found: Path) -> Mapping[str, Any] | None:
    """What the loop had saved in a checkpoint. Raises CheckpointError; `auto` is told from where it can go on."""
    try:
        saved: Mapping[str, Any] | None = engine.load(found)
    except CheckpointError as refused:
        tells = start.resume == AUTO and engine.everyone.rank == 0
        way = ResumeHints(Folder(Path(config.output or ".")), config, engine.everyone.size)
        agree(engine.everyone, partial(way.point_to_older, found, refused) if tells else lambda: None)
        raise
    return saved


def restore(
    config: Config, start: Start, inputs: Inputs, engine: Engine, stream: BatchStream, found: Path | None
) -> tuple[Mapping[str, Any] | None, int]:
    """Load a checkpoint into engine and stream: what the loop had saved, and the steps of the whole run.

    Settings of the optimizer and of the schedule stay those of `config`. Raises what the parts do, ConfigError, and
    NonFiniteError.
    """
    if found is None:
        return None, inputs.steps
    wanted = settings(engine.optimizer.torch)
    saved = check_loop_state(found, load(config, start, engine, found), engine.steps)
    remedy = f"{found} holds them. {older_hint(found)}"
    check_weights(engine.units, engine.comm, engine.everyone, NonFiniteError, remedy)
    stream.restore(saved["position"])
    steps, done = steps_of_run(config, inputs.data, inputs.batch, saved["step"], stream.taken), saved["step"]
    if steps < done:
        key = "train.epochs" if config.train.steps is None else "train.steps"
        raise ConfigError(
            f"{key} asks for {steps:,} steps, and {found} has done {done:,}: give a larger {key}, or start a new run "
            "with output=FOLDER."
        )
    set_again(engine.optimizer.torch, engine.scheduler, wanted, rate(config.schedule, steps))
    return saved, steps


def open_folder(config: Config, start: Start, engine: Engine, found: Path | None, lock: FolderLock) -> Folder:
    """Claim the output folder on rank 0 and write config.yaml into it."""
    first = engine.everyone.rank == 0
    folder = Folder(Path(config.output)) if config.output is not None else _first_free(start, engine)
    agree(engine.everyone, lambda: folder.claim(lock, start.resume, start.overwrite, found) if first else None)
    text = to_yaml(with_output(config, folder.root))
    agree(engine.everyone, lambda: folder.write_config(text) if first else None)
    return folder


def _first_free(start: Start, engine: Engine) -> Folder:
    """The first free folder of the run's name, which rank 0 has made."""
    stem = f"zero3d-{start.name}"
    number = agree(engine.everyone, lambda: first_free(stem) if engine.everyone.rank == 0 else 0)
    folder = Folder(numbered(stem, broadcast_ints(engine.everyone, [number])[0]))
    start.chosen(folder.root)
    return folder


def introduction(config: Config, inputs: Inputs, steps: int, engine: Engine, folder: Folder) -> list[str]:
    """What is about to happen, in lines."""
    ranks = engine.everyone.size
    kind = type(inputs.opened.module).__name__
    parts = [f"stage {config.zero.stage}", config.precision, f"{ranks} rank{'s' if ranks > 1 else ''} on "
             f"{engine.mesh.device.type}"]  # fmt: skip
    parts += [f"activations {config.activations}"] if config.activations != "none" else []
    return [
        *([engine.mesh.degrees.table()] if engine.mesh.pp * engine.mesh.tp > 1 else []),
        f"zero3d train: {', '.join(parts)}; {kind} with {count_params(engine):,} parameters",
        f"{inputs.batch.equation}; {steps:,} steps; writing to {folder.root}",
        _vocabulary(inputs),
    ]


def _vocabulary(inputs: Inputs) -> str:
    """What text becomes tokens by, and how many the model knows."""
    tokenizer, rows = inputs.data.tokenizer, of_config(inputs.opened.module, "vocab_size")
    by = "no tokenizer, the data are token ids" if tokenizer is None else f"{tokenizer.name}, {tokenizer.size:,} tokens"
    return f"tokenizer: {by}; the model's vocabulary: {'unknown' if rows is None else f'{rows:,}'}"


def _stream(config: Config, inputs: Inputs, engine: Engine) -> BatchStream:
    return BatchStream(
        inputs.data.train, inputs.batch, rank=engine.comm.rank, seed=config.seed, shuffle=config.data.shuffle,
        workers=config.data.workers, dealt=config.zero.exact and engine.policy.reduce == "every_micro_batch",
    )  # fmt: skip


def count_params(engine: Engine) -> int:
    """Psi, of all pipeline stages and tp ranks."""
    return sum(map(math.prod, engine.whole.shapes.values()))


# --- the end ------------------------------------------------------------------------------------


def memory_peak(engine: Engine) -> int:
    """The most memory this rank ever had: of its device, or on the CPU of its process."""
    if engine.mesh.device.type != "cpu":
        return memory_bytes(engine)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _sample(config: Config, engine: Engine, tokenizer: Tokenizer | None, progress: Progress) -> str:
    """`generate`, whose failure is told in one line: everything else of the run is there by then."""
    prompt = config.evaluate.prompt
    if prompt is None or tokenizer is None:
        return ""
    try:
        return generate(engine, prompt, tokenizer)
    except Exception as error:  # noqa: BLE001 (told; no model's own failure ends a run that is done)
        said = str(error).splitlines() or [""]
        progress.say(f"no sample for evaluate.prompt: {type(error).__name__}: {said[0]}")
        return ""


def generate(engine: Engine, prompt: str, tokenizer: Tokenizer) -> str:
    """A sampled continuation of the prompt, the same on all ranks, as long as the model has positions.

    Raises ConfigError where it has none left.
    """
    torch.manual_seed(0)
    ids = torch.tensor(tokenizer.encode([prompt]))
    positions = of_config(next(iter(engine.parts.values())), "max_position_embeddings")
    room = SAMPLE_LENGTH if positions is None else min(SAMPLE_LENGTH, positions - ids.shape[1])
    if room < 1:
        raise ConfigError(f"evaluate.prompt has {ids.shape[1]} tokens and the model {positions} positions: shorten it.")
    made = engine.generate(ids, room, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K)
    return tokenizer.decode(made[0].tolist())


def _own_tokenizer(folder: Path | None) -> Tokenizer | None:
    """That of the model's folder, which data of token ids did not need; None where it has none."""
    try:
        return None if folder is None else load_tokenizer(None, str(folder))
    except ConfigError:
        return None


def _export(engine: Engine, folder: Folder, tokenizer: Tokenizer | None, progress: Progress) -> None:
    """Write the Hugging Face folder beside the one of an earlier session, then in its place."""
    first = engine.everyone.rank == 0
    agree(engine.everyone, lambda: shutil.rmtree(folder.fresh_export, ignore_errors=True) if first else None)
    engine.export(folder.fresh_export)

    def complete() -> None:
        if note := _save_tokenizer(tokenizer, folder.fresh_export):
            progress.say(note)
        folder.publish()

    agree(engine.everyone, complete if first else lambda: None)


def _save_tokenizer(tokenizer: Tokenizer | None, export: Path) -> str | None:
    """Beside the weights; what is to be said of it."""
    if tokenizer is None:
        return "the export has no tokenizer: the data are token ids, and the model's folder has none"
    try:
        return tokenizer.save(export)
    except ImportError as error:
        return f"the export has no tokenizer: {error.name} is missing: pip install 'zero3d[hf]'"


def verifies(config: Config, data: DataSet) -> bool:
    """Whether the export is loaded again and evaluated."""
    return config.checkpoint.export and config.checkpoint.verify and bool(data.validation)


def verify(config: Config, engine: Engine, export: Path, data: DataSet) -> float:
    """The held-out loss of the exported model as anybody would load it, on rank 0 alone."""
    from transformers import AutoModelForCausalLM

    gc.collect()
    device, ranks = engine.mesh.device, engine.comm.size
    with no_foreign_code():
        model = AutoModelForCausalLM.from_pretrained(
            export, dtype="auto", local_files_only=True, trust_remote_code=False
        )
    model = model.to(device).eval()
    assert data.validation is not None
    total, targets = 0.0, 0
    rows = resolve_batch(config.train, ranks).micro_batch * (1 if config.zero.exact else ranks)
    for batch in validation_batches(data.validation, rows, limit=config.evaluate.batches):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        count = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            loss = float(model(**batch, **forward_options(model)).loss)
        total, targets = total + (loss * count if count else 0.0), targets + count
    return total / targets
