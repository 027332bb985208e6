"""The methods of transformers.Trainer that are ours: each is given the one that it replaces, and the trainer.

What is not here stays Hugging Face's: data, loss, token weights, callbacks, logs, metrics, rotation of checkpoints.
A checkpoint-N has what a plain Trainer's has, but that optimizer.pt and scheduler.pt are the folder zero3d, which loads
at any number of ranks and stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import transformers.trainer
from accelerate import ParallelismConfig
from transformers import Trainer

from zero3d.checkpoint.json_values import from_json, to_json
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, OutOfBudget
from zero3d.integrations.accelerate.accelerator import Accelerator, load_engine, save_engine, states_in
from zero3d.integrations.accelerate.keywords import check_keywords
from zero3d.integrations.deepspeed.engine_options import engine_options
from zero3d.integrations.deepspeed.report import lines
from zero3d.integrations.transformers.arguments import json_of, sequence_ranks
from zero3d.setup.optimizer import optimizer_of
from zero3d.setup.schedule import scheduler

SCHEDULE = "lr_scheduler"  # where its state is in what the engine's checkpoint keeps for loops


@dataclass(frozen=True)
class Choice:
    """How a trainer shards. stage: of ZeRO; options: more of `zero3d.Engine`. Raises ConfigError."""

    stage: int | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", check_keywords(self.stage, self.options, "Trainer"))


class TrainersAccelerator(Accelerator):
    """An Accelerator of a Trainer, which calls `free_memory` before every training and goes on with its engine."""

    def free_memory(self, *objects: Any) -> Any:
        """Let go of all that was prepared but the engine."""
        self.engine = None
        return accelerate.Accelerator.free_memory(self, *objects)

    def _build(self, model: Any, optimizer: Any) -> Engine:
        """Build an engine in the place of the last one, whose model the Trainer has replaced (`model_init`)."""
        if self._built is not None and self._built[0].has_whole_model:
            with suppress(OutOfBudget):
                self.close_engine()
        return super()._build(model, optimizer)


def engine_of(trainer: Trainer) -> Engine | None:
    """Return the engine that trains the trainer's model; None before there is one."""
    engine = trainer.accelerator.engine
    return engine if engine is not None and not engine.closed and engine.module is trainer.model else None


def create_accelerator_and_postprocess(original: Callable[[], None], trainer: Trainer) -> None:
    """Have the trainer make an Accelerator of ours. Raises ConfigError."""
    args, choice = trainer.args, trainer.zero3d
    args._n_gpu = min(args.n_gpu, 1)  # a process has one device: no DataParallel
    json = trainer.zero3d_json = json_of(args)
    options = {"stage": 3} if json is None else engine_options(json.settings)
    if json is not None and choice.stage not in (None, options["stage"]):
        raise ConfigError(
            f"{json.made.document.name} has stage {options['stage']}, and stage={choice.stage} is given: leave one out."
        )
    stage = options.pop("stage")
    if choice.stage is not None:
        stage = choice.stage
    options |= choice.options or {}
    build = partial(TrainersAccelerator, stage=stage, options=options)
    if json is not None and args.parallelism_config is None and (sp := sequence_ranks(args, json.made.document)) > 1:
        build = partial(build, parallelism_config=ParallelismConfig(sp_size=sp))
    with _replaced(transformers.trainer, "Accelerator", build):
        original()
    if args.label_smoothing_factor:
        _refuse_shared(trainer, f"label_smoothing_factor={args.label_smoothing_factor:g}")
    if json is not None and args.process_index == 0:
        print("\n".join(lines(json.made)))


def _refuse_shared(trainer: Trainer, name: str) -> None:
    """Raise ConfigError for a loss of logits where ranks share sequences."""
    mesh: Any = (trainer.zero3d.options or {}).get("mesh")
    if (trainer.accelerator.alike if mesh is None else mesh.sp) > 1:
        raise ConfigError(
            f"{name} takes a loss of whole sequences' logits, and ranks that share sequences have some rows of them "
            "each: leave it out, or share no sequences (sp_size=1)."
        )


def _move_model_to_device(original: Callable[..., None], trainer: Trainer, *given: Any) -> None:
    """Leave the model where it is: the engine moves a shard of it, and evaluation without training the whole."""


def create_optimizer(original: Callable[..., Any], trainer: Trainer, model: Any = None) -> Any:
    """Return the JSON's optimizer, on all parameters alike as there, or the trainer's. Raises ConfigError."""
    if trainer.compute_loss_func is not None:
        _refuse_shared(trainer, "compute_loss_func")
    json = trainer.zero3d_json
    if trainer.optimizer is not None or json is None or not json.has("optimizer.type"):
        return original(model)
    trained = [p for p in (trainer.model if model is None else model).parameters() if p.requires_grad]
    trainer.optimizer = optimizer_of(json.settings.optimizer)(trained)
    return trainer.optimizer


def create_scheduler(
    original: Callable[..., Any], trainer: Trainer, num_training_steps: int, optimizer: Any = None
) -> Any:
    """Return the JSON's schedule, or the trainer's."""
    json = trainer.zero3d_json
    if trainer.lr_scheduler is not None or json is None or not json.has("scheduler.type"):
        return original(num_training_steps, optimizer)
    choice = replace(json.settings.schedule, warmup=trainer.args.get_warmup_steps(num_training_steps))
    build = scheduler(choice, num_training_steps, trainer.args.learning_rate)
    trainer.lr_scheduler, trainer._created_lr_scheduler = build(optimizer or trainer.optimizer), True
    return trainer.lr_scheduler


def save_model(
    original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Gather the weights on all ranks, of PEFT's models what is trained; the writer has them in `_save`."""
    engine = engine_of(trainer)
    whole = None if engine is None else engine.whole_state_dict(trained_only=hasattr(trainer.model, "peft_config"))
    trainer.zero3d_weights = whole
    try:
        original(output_dir, _internal_call)
    finally:
        trainer.zero3d_weights = None


def _save(
    original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, state_dict: Any = None
) -> None:
    """Write weights as `from_pretrained` reads them, in the dtype of computation."""
    original(output_dir, getattr(trainer, "zero3d_weights", None) if state_dict is None else state_dict)


def _save_optimizer_and_scheduler(original: Callable[..., None], trainer: Trainer, output_dir: str) -> None:
    """Write masters, states and the schedule as a checkpoint of ours."""
    engine = engine_of(trainer)
    if engine is None:
        return original(output_dir)
    save_engine(engine, Path(output_dir), {SCHEDULE: to_json(trainer.lr_scheduler.state_dict())})


def _load_from_checkpoint(original: Callable[..., None], trainer: Trainer, folder: str, model: Any = None) -> None:
    """Load weights of a checkpoint without states; with states they come with these."""
    if states_in(Path(folder)) is None:
        with _writable(trainer):
            original(folder, model)


def _load_optimizer_and_scheduler(original: Callable[..., None], trainer: Trainer, folder: str | None) -> None:
    """Go on from the states of a checkpoint."""
    engine = engine_of(trainer)
    if folder is None or engine is None or states_in(Path(folder)) is None:
        return original(folder)
    schedule = (load_engine(engine, Path(folder)) or {}).get(SCHEDULE)
    if schedule is not None:
        trainer.lr_scheduler.load_state_dict(from_json(schedule, trainer.lr_scheduler.state_dict()))


def _load_best_model(original: Callable[[], None], trainer: Trainer) -> None:
    """Go back to the best checkpoint: with its states where it has some."""
    engine, folder = engine_of(trainer), Path(trainer.state.best_model_checkpoint)
    if engine is not None and states_in(folder) is not None:
        load_engine(engine, folder)
        return
    with _writable(trainer):
        original()


def _finalize_training(original: Callable[..., Any], trainer: Trainer, *given: Any, **options: Any) -> Any:
    """Make the model whole where it fits, before anybody is told that training is over.

    The best checkpoint is loaded first, with its masters. The engine stays, to train on with what it has learnt.
    """
    args, engine = trainer.args, engine_of(trainer)
    if engine is None:
        return original(*given, **options)
    if args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    try:
        _unshard(engine)
    except OutOfBudget as error:
        if args.process_index == 0:
            warnings.warn(
                f"after training the model stays sharded: {error} (`engine` is trainer.accelerator.engine.)",
                stacklevel=2,
            )
    vars(trainer)["_load_best_model"] = lambda: None  # it is there
    try:
        return original(*given, **options)
    finally:
        del vars(trainer)["_load_best_model"]


def _unshard(engine: Engine) -> None:
    """Make the model whole: as autocast leaves one, with fp32 weights, or where that does not fit as it computes."""
    try:
        engine.unshard(masters=True)
    except OutOfBudget:
        engine.unshard()


def get_total_train_batch_size(original: Callable[..., int], trainer: Trainer, *given: Any) -> int:
    """Return the sequences of a step, of which ranks that share them have the same."""
    alike: int = trainer.accelerator.alike
    return original(*given) // alike


def _track_num_input_tokens(original: Callable[..., None], trainer: Trainer, inputs: Any) -> None:
    """Count the tokens of a batch, which ranks that share sequences have been handed alike, once."""
    state = trainer.state
    before = state.num_input_tokens_seen
    original(inputs)
    state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // trainer.accelerator.alike


def evaluation_loop(original: Callable[..., Any], trainer: Trainer, *given: Any, **options: Any) -> Any:
    """Evaluate. An engine's weights have the dtype of computation: full_eval flags would cast them for good."""
    args = trainer.args
    if engine_of(trainer) is None:
        return original(*given, **options)
    with _replaced(args, "bf16_full_eval", False), _replaced(args, "fp16_full_eval", False):
        return original(*given, **options)


def prediction_step(
    original: Callable[..., Any],
    trainer: Trainer,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    *given: Any,
    **options: Any,
) -> Any:
    """Evaluate a batch. Raises ConfigError for logits of an engine whose ranks have some rows of them each."""
    engine = engine_of(trainer)
    if engine is not None and engine.mesh.sp > 1 and not prediction_loss_only:
        raise ConfigError(
            "predictions are logits of whole sequences, and ranks that share sequences have some rows of them each: "
            "evaluate the loss alone (prediction_loss_only=True, no compute_metrics), or the exported model."
        )
    return original(model, inputs, prediction_loss_only, *given, **options)


SEAMS: Mapping[str, Callable[..., Any]] = {
    seam.__name__: seam
    for seam in (
        create_accelerator_and_postprocess,
        _move_model_to_device,
        create_optimizer,
        create_scheduler,
        save_model,
        _save,
        _save_optimizer_and_scheduler,
        _load_from_checkpoint,
        _load_optimizer_and_scheduler,
        _load_best_model,
        _finalize_training,
        evaluation_loop,
        get_total_train_batch_size,
        _track_num_input_tokens,
        prediction_step,
    )
}


def _writable(trainer: Trainer) -> Any:
    """Return a context inside which the model's parameters are whole, and what is written into them stays."""
    engine = engine_of(trainer)
    return nullcontext() if engine is None else engine.full_params()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
