"""`initialize` for programs that are written for DeepSpeed: one import changes.

    import deepspeed                      from zero3d.ways import deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds.json", ...)
    loss = engine(**batch).loss; engine.backward(loss); engine.step()

Everything that has no counterpart is refused when it is called. What is used of DeepSpeed's interface is that of 0.19.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zero3d.config import Config, load
from zero3d.distributed.mesh import start_distributed
from zero3d.errors import ConfigError
from zero3d.ways.deepspeed.document import Document, document_of, read_document
from zero3d.ways.deepspeed.engine import DeepSpeedEngine
from zero3d.ways.deepspeed.merge import tree_of
from zero3d.ways.deepspeed.optimizer_kinds import IN_PROGRAMS
from zero3d.ways.deepspeed.optimizers import optimizer_for
from zero3d.ways.deepspeed.translate import Translation, translate

MATTER = ("train.", "optimizer.", "precision", "schedule.")  # keys that nobody else could give where they are "auto"
LAUNCHED = ("dist_init_required", "distributed_port")  # what the launcher's environment says
OF_LAUNCHER = {
    "auto_mpi_discovery": True,
    "distributed_port": 29500,
    "verbose": True,
    "timeout": None,
    "init_method": None,
    "dist_init_required": None,
    "config": None,
    "rank": -1,
    "world_size": -1,
}
IGNORED = ("auto_mpi_discovery", "distributed_port", "verbose", "dist_init_required", "config")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    config: str | Path | Mapping[str, Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Return (engine, optimizer, loader of training_data, scheduler), as deepspeed.initialize does.

    model             a plain module, the same on every rank; it may not be used beside the engine any more
    optimizer         one that is built on its parameters, or a callable; it wins over the JSON's
    model_parameters  what is trained, as parameters or groups, for the optimizer of the JSON (all by default)
    lr_scheduler      an object or a callable; the JSON's wins over it, as there
    config            a path, or the JSON as a mapping, by its old name config_params. "auto" is refused here
    args              may have `deepspeed_config`
    Without trained parameters, or without an optimizer and model_parameters, the engine evaluates only, and its
    optimizer is None. Raises ConfigError, also for options of DeepSpeed's that are not here.
    """
    if model is None:
        raise ConfigError("initialize() needs a model: pass model=MODULE.")
    older = others.pop("config_params", None)
    if asked := [name for name, value in others.items() if value not in (None, False) and name not in LAUNCHED]:
        raise ConfigError(
            f"initialize({asked[0]}=...) is not supported: leave it out; degrees come from the JSON and torchrun."
        )
    given = next((one for one in (config, older, getattr(args, "deepspeed_config", None)) if one is not None), None)
    if given is None:
        raise ConfigError("initialize() needs DeepSpeed's configuration: pass config='ds.json', or a mapping.")
    if isinstance(given, Mapping):
        document = document_of(given, "config", program=True)
    else:
        document = read_document(Path(given), program=True)
    settings = _settings(document, translate(document, IN_PROGRAMS))
    engine = DeepSpeedEngine(
        settings, document, model, _optimizer(settings, document, model, optimizer, model_parameters), given
    )
    if engine.optimizer is not None:
        engine.set_lr_scheduler(lr_scheduler)
    for line in _said(document, engine):
        print(line)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _said(document: Document, engine: DeepSpeedEngine) -> list[str]:
    """Return rank 0's lines about keys that are ignored, and about an engine that trains nothing."""
    lines = [f"{document.name}: ignored, as by DeepSpeed: {', '.join(document.ignored)}"] if document.ignored else []
    if engine.optimizer is None:
        lines.append("initialize() without an optimizer or parameters to train: the engine evaluates only")
    return lines if dist.get_rank() == 0 else []


def init_distributed(dist_backend: str | None = None, *others: Any, **named: Any) -> None:
    """Start torch.distributed by the launcher's environment, or for one rank alone; nothing where it is started.

    dist_backend  None, or the backend that is started: nccl on GPUs, gloo on CPUs
    Raises ConfigError for another backend, and for what a launcher says.
    """
    asked = dict(zip(OF_LAUNCHER, others, strict=False)) | named
    for name, value in asked.items():
        if name not in OF_LAUNCHER:
            raise ConfigError(f"init_distributed({name}=...) is not an option of DeepSpeed's: leave it out.")
        if name not in IGNORED and value != OF_LAUNCHER[name]:
            raise ConfigError(f"init_distributed({name}=...) is not supported: leave it out, and launch with torchrun.")
    start_distributed()
    if dist_backend not in (None, found := dist.get_backend()):
        raise ConfigError(f"init_distributed({dist_backend!r}), and ranks talk by {found} here: leave the name out.")


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="for the program's own use")
    group.add_argument("--deepspeed_config", help="the JSON that initialize(args) reads")
    return parser


def _settings(document: Document, translation: Translation) -> Config:
    """Return the configuration of a JSON alone. Raises ConfigError where "auto" would need a caller."""
    asked = [theirs for ours, theirs in translation.autos.items() if ours.startswith(MATTER)]
    if asked:
        raise ConfigError(
            f"{document.name}: {', '.join(asked)} {'is' if len(asked) == 1 else 'are'} auto, and initialize() has "
            "no file to take values from: give them, or train with zero3d train --deepspeed."
        )
    settings = load(tree_of({ours: value.value for ours, value in translation.values.items()}))
    for key in ("total_num_steps", "warmup_num_steps"):
        if (settings.schedule.options or {}).get(key, 0) is None:
            raise ConfigError(
                f"{document.name}: scheduler.params.{key} is auto, and initialize() has no file to take a value from."
            )
    return settings


def _optimizer(
    settings: Config, document: Document, model: nn.Module, optimizer: Any, parameters: Iterable[Any] | None
) -> Any:
    """Return the caller's optimizer, or the JSON's on these parameters; None of a model that evaluates only.

    That is one without a trained parameter, and one to which nobody gives an optimizer or parameters to train.
    """
    if optimizer is not None:
        return optimizer
    if not any(p.requires_grad for p in model.parameters()):
        return None
    if "optimizer.type" not in document.values:
        if parameters is None or not list(parameters):
            return None
        raise ConfigError(f"{document.name} has no optimizer, and none is given: add one, or pass optimizer=OPTIMIZER.")
    return optimizer_for(settings, document, model, parameters)
