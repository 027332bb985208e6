"""The language model of a whole one, model.part=text: said where it can do what was asked, and found in checkpoints.

A folder of Qwen3.5 or Llama 4 opens whole. Pipelines, sp and packing ask more of a model with a tower than of its
language model alone, so a refusal of one of them names the other, where that passes the same check.

Before there was model.part such a folder opened as its language model, and a run of then has no word of it: its
checkpoints are known by the names of their parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from zero3d.config import Config
from zero3d.config.sections import TEXT, WHOLE
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.models.chain import find_chain
from zero3d.models.image_trial import check_blank_image
from zero3d.models.open import open_bare
from zero3d.models.packing import check_packing
from zero3d.models.places import is_called
from zero3d.models.trained import as_trained
from zero3d.sequence.group import check_sequence
from zero3d.tensor_parallel.parallelize import parallelize

Check = Callable[[nn.Module], object]


@contextmanager
def naming_text_part(config: Config) -> Iterator[None]:
    """Add model.part=text to a ConfigError that a model gets as a whole, and its language model alone would not."""
    try:
        yield
    except ConfigError as error:
        if remedy := _remedy(config, str(error)):
            raise ConfigError(f"{error} {remedy}") from error
        raise


def _remedy(config: Config, error: str) -> str:
    """Return what to type where the language model alone passes the check that an error is of; else ""."""
    checks = [check for word, check in _checks(config) if word in error]
    text = _text_model(config) if checks else None
    if text is None or not all(_passes(check, text) for check in checks):
        return ""
    return f"For training on text alone type model.part={TEXT}: it opens {type(text).__name__}, which can."


def _checks(config: Config) -> Iterator[tuple[str, Check]]:
    """Yield a word of each refusal that depends on what a model is made of, and the check that it is of."""
    mesh = config.mesh
    tp = mesh.tp or 1
    if (mesh.pp or 1) > 1:
        yield "pp=1", lambda model: find_chain(model, mesh.blocks)
    if (sp := mesh.sp or 1) > 1:
        yield "mesh.sp", lambda model: check_sequence(model, sp, tp, mesh.sp_kind)
    if tp > 1:
        yield "tp", lambda model: parallelize(copy.deepcopy(model).to("meta"), Axis("tp", 0, tp), Ledger())
    if config.data.packing:
        yield "data.packing", check_packing
    yield "blank image", check_blank_image


def _passes(check: Check, model: nn.Module) -> bool:
    try:
        check(model)
    except ConfigError:
        return False
    return True


def _text_model(config: Config) -> nn.Module | None:
    """Return the language model alone of a configuration's whole model, on meta; None where that is no other."""
    if config.model.part != WHOLE or is_called(config.model):
        return None
    bare = replace(config.model, init="random")
    try:
        text, whole = open_bare(replace(bare, part=TEXT)).module, open_bare(bare).module
    except ConfigError:
        return None
    return text if type(text) is not type(whole) else None


def part_of(config: Config, parameters: Collection[str]) -> str:
    """Return the part of a configuration's model that has these parameters: its own, or text of an older run's."""
    text = _text_model(config)
    if text is None:
        return config.model.part
    model = replace(config.model, init="random", part=TEXT)
    names = {name for name, _ in as_trained(open_bare(model), config).module.named_parameters()}
    return TEXT if names == set(parameters) else config.model.part


def older_run(config: Config, parameters: Collection[str]) -> str:
    """Return what to type where a checkpoint is of the language model alone, and the configuration's is whole."""
    if part_of(config, parameters) == config.model.part:
        return ""
    return (
        f"These are of the language model of {config.model.path} alone, as which such a folder used to open: type "
        f"model.part={TEXT} to go on."
    )
