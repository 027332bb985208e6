"""The optimizer of a JSON for a program, on its parameters or groups of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.train.setup.optimizer import optimizer_of
from zero3d.ways.deepspeed.document import Document
from zero3d.ways.deepspeed.lion import Lion
from zero3d.ways.deepspeed.optimizer_kinds import ADAM, OPTIONS

Build = Callable[[Any], torch.optim.Optimizer]
CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
}


def optimizer_for(
    settings: Config, document: Document, model: nn.Module, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | Build:
    """Return what `Engine(optimizer=...)` takes: a builder for all that is trained, or an optimizer on these groups.

    Raises ConfigError.
    """
    kind = str(document.values["optimizer.type"]).lower()
    build = optimizer_of(settings.optimizer) if kind == "muon" else _build(kind, settings, document)
    given = None if parameters is None else list(parameters)
    if given is None or _are_all(given, model):
        return build
    if kind in ("muon", "adagrad"):
        raise ConfigError(
            f"model_parameters are groups, and {kind} takes all that is trained as one: leave them out and freeze "
            "others with requires_grad_(False), or pass an optimizer=."
        )
    return build(given)


def _build(kind: str, settings: Config, document: Document) -> Build:
    values = document.values
    if kind in ADAM:
        if kind == "adam" and values.get("optimizer.params.adam_w_mode") is False:
            choice = settings.optimizer
            return partial(
                torch.optim.Adam,
                lr=choice.lr,
                betas=choice.betas,
                eps=choice.eps,
                weight_decay=choice.weight_decay,
                fused=True,
            )
        return optimizer_of(settings.optimizer)
    given = {name: values.get(f"optimizer.params.{name}") for name in OPTIONS[kind]}
    options = {name: value for name, value in given.items() if value is not None} | {"lr": settings.optimizer.lr}

    def build(params: Any) -> torch.optim.Optimizer:
        try:
            return CLASSES[kind](params, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{document.name}: optimizer.params do not suit {kind}: {error}.") from error

    return build


def _are_all(given: list[Any], model: nn.Module) -> bool:
    """Return whether `given` is a plain list of all trainable parameters, not a list of groups."""
    if not all(isinstance(each, nn.Parameter) for each in given):
        return False
    trained = {p for p in model.parameters() if p.requires_grad}
    return {p for p in given if p.requires_grad} == trained
