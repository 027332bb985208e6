"""From a configuration to an engine and its data, on this rank."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero3d.activations.recomputation import prepare_blocks
from zero3d.config import Batch, Config, load, resolve_batch, to_dict
from zero3d.data.batches import steps_of
from zero3d.data.dataset import DataSet, needs_tokenizer, open_data
from zero3d.data.tokenizers import Tokenizer, check_length, load_tokenizer
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.models.masking import check_packing
from zero3d.models.open import Opened, open_model
from zero3d.pipeline.schedules import Schedule
from zero3d.precision import LossScaling, Precision, at_least_fp32
from zero3d.setup.optim import adamw, decay_groups, scheduler

IGNORED = -100


@dataclass(frozen=True)
class Inputs:
    """What a run is made of before anything large is allocated."""

    mesh: Mesh
    opened: Opened
    data: DataSet
    batch: Batch
    steps: int


def open_mesh(config: Config) -> Mesh:
    """The mesh that `mesh` asks for. Raises MeshError."""
    mesh = Mesh(config.mesh.dp, config.mesh.tp, config.mesh.pp)
    return mesh


def open_inputs(config: Config, check: Callable[[Mesh], None] = lambda mesh: None) -> Inputs:
    """Check everything that can be checked, read headers, tokenize. Raises the same Zero3dError on all ranks.

    `check` comes first, on every rank. One rank of each machine tokenizes; the others wait for it as long as it takes.
    """
    mesh = open_mesh(config)
    with mesh.waiting_room() as everyone:
        comm = Comm(everyone, Arena(torch.device("cpu")), Ledger())
        agree(comm, lambda: check(mesh))
        batch, opened, tokenizer = agree(comm, lambda: _open(config, mesh))
        vocabulary = of_config(opened.module, "vocab_size")

        def read(verify: bool) -> DataSet:
            return open_data(config.data, tokenizer, vocabulary, chunks_of(config, mesh), verify)

        first = agree(comm, lambda: read(verify=True) if mesh.local_rank == 0 else None)
        data = agree(comm, lambda: first or read(verify=False))
    return Inputs(mesh, opened, data, batch, steps_of_run(config, data, batch))


def _open(config: Config, mesh: Mesh) -> tuple[Batch, Opened, Tokenizer | None]:
    """Everything but the data."""
    batch = resolve_batch(config.train, mesh.dp)
    if mesh.pp > 1:
        Schedule.of(config.mesh.schedule).check(batch.accumulate, mesh.pp)
    _check_packages(config)
    opened = open_model(config.model, config.seed)
    _check_forward(opened.module)
    if config.checkpoint.export and config.checkpoint.verify:
        _check_verify(opened.module)
    _check_chunks(config.data.length, chunks_of(config, mesh))
    check_length(config.data.length, of_config(opened.module, "max_position_embeddings"))
    if config.data.packing:
        check_packing(opened.module, batch.micro_batch)
    folder = None if opened.folder is None else str(opened.folder)
    wanted = needs_tokenizer(config.data) or config.data.tokenizer is not None
    return batch, opened, load_tokenizer(config.data.tokenizer, folder) if wanted else None


def of_config(model: nn.Module, name: str) -> int | None:
    """A number in the configuration of a Hugging Face model, if it has it."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, name, None)


def chunks_of(config: Config, mesh: Mesh) -> int:
    """How many equal chunks a sequence is cut into: one for each tp rank under sequence parallelism."""
    return mesh.tp if config.mesh.sequence_parallel else 1


def _check_chunks(length: int, chunks: int) -> None:
    if length % chunks:
        fits = [str(n) for n in (length - length % chunks, length + -length % chunks) if n]
        raise ConfigError(
            f"mesh.sequence_parallel cuts sequences over mesh.tp={chunks}, and data.length={length} / {chunks} is not "
            f"whole: type data.length={' or '.join(fits)}, or mesh.sequence_parallel=false."
        )


def _check_packages(config: Config) -> None:
    """Refuse now what would fail after hours."""
    wanted = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb is not None}
    for package in (name for name, asked in wanted.items() if asked):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"log.{package} needs {package}: pip install 'zero3d[{package}]'.") from error


def _check_forward(model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise ConfigError(
            f"{type(model).__name__}.forward takes ({', '.join(parameters)}), and a batch is passed by name: call its "
            "first argument input_ids, and if it wants them add position_ids and labels."
        )


def _check_verify(model: nn.Module) -> None:
    """Refuse what transformers could not load by its config.json after the training."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(getattr(model, "config", None)) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"checkpoint.verify loads the export with AutoModelForCausalLM, which does not know {type(model).__name__} "
            "by its config: type checkpoint.verify=false."
        )


def steps_of_run(config: Config, data: DataSet, batch: Batch, done: int = 0, taken: int = 0) -> int:
    """train.steps, or those of train.epochs (1 where neither is given).

    done    steps so far, which took the first `taken` sequences, perhaps in other batches
    """
    if config.train.steps is not None:
        return config.train.steps
    return done + steps_of(config.train.epochs or 1.0, len(data.train), batch.batch, taken)


# --- the engine ---------------------------------------------------------------------------------


def build_engine(config: Config, opened: Opened, mesh: Mesh, accumulate: int, steps: int) -> Engine:
    """The engine of a configuration, for a run of `steps` steps. Consumes `opened`."""
    model = opened.module
    torch.manual_seed(config.seed * 1_000_003 + mesh.rank // mesh.tp)  # dropout differs but between tp ranks
    prepare_blocks(model, config.activations, compile="inductor" if config.train.compile else None)
    return Engine(
        model,
        stage=config.zero.stage,
        mesh=mesh,
        **_of_mesh(config, mesh),
        precision=precision_of(config),
        reduce_dtype=config.zero.reduce_dtype,
        optimizer=adamw(config.optimizer),
        scheduler=scheduler(config.schedule, steps),
        param_groups=decay_groups(model, config.optimizer),
        clip_norm=config.optimizer.clip_norm,
        accumulate=accumulate,
        loss=None if "labels" in inspect.signature(model.forward).parameters else next_token_loss,
        release=config.zero.release,
        reduce=config.zero.reduce,
        exact=config.zero.exact,
        weights=opened.weights,
    )


def _of_mesh(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What `mesh` says of pipelines and of tp; a file that says it may also be run without such an axis."""
    asked = config.mesh
    given: dict[str, Any] = {}
    for axis, degree, what, options in (
        ("pp", mesh.pp, "pipeline", {"schedule": asked.schedule, "blocks": asked.blocks}),
        ("tp", mesh.tp, "tensor-parallel axis",
         {"tp_plan": asked.tp_plan, "sequence_parallel": asked.sequence_parallel}),
    ):  # fmt: skip
        unused = [f"mesh.{key}={value}" for key, value in options.items() if value]
        if degree > 1:
            given |= options
        elif unused and mesh.rank == 0:
            warnings.warn(
                f"{', '.join(unused)} without effect: mesh.{axis} is 1, so there is no {what}; pass mesh.{axis}=2 or "
                "more for one.",
                stacklevel=3,
            )
    return given


def precision_of(config: Config) -> Precision:
    """With the loss scaling that fp16 uses."""
    scale = config.loss_scale
    return Precision(config.precision, LossScaling(scale.initial, scale.window, scale.hysteresis, scale.minimum))


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """For modules that return logits [batch, length, vocabulary] (or something with .logits): sum and targets."""
    logits, labels = getattr(output, "logits", output)[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(
        at_least_fp32(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()


def from_config(source: str | Path | Mapping[str, Any], **overrides: Any) -> Engine:
    """The engine that `zero3d train` would build for this file (or mapping), with `section={"key": ...}` replaced.

    Reads the data only where the number of steps, which the learning rate needs, follows from epochs.
    Raises ConfigError, DataError, MeshError.
    """
    tree = to_dict(load(source))
    for name, value in overrides.items():
        tree[name] = {**tree[name], **value} if isinstance(value, Mapping) and name in tree else value
    said = overrides.get("train", {})
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if said.get(one) is not None and other not in said:
            tree["train"][other] = None  # the override displaces what the file says in the other way
    config = load(tree)
    if config.train.steps is None:
        inputs = open_inputs(config)
        return build_engine(config, inputs.opened, inputs.mesh, inputs.batch.accumulate, inputs.steps)
    mesh = open_mesh(config)
    accumulate = resolve_batch(config.train, mesh.dp).accumulate
    return build_engine(config, open_model(config.model, config.seed), mesh, accumulate, config.train.steps)


def with_output(config: Config, output: Path) -> Config:
    """The configuration as it is written into its folder."""
    return replace(config, output=str(output))
