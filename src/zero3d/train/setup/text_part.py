"""The language model of a whole one, model.part=text: said where it can do what was asked, and found in checkpoints.

A folder of Qwen3.5 or Llama 4 opens whole. Pipelines, sp and packing ask more of a model with a tower than of its
language model alone, so a refusal of one of them names the other, where that passes the same check.

Before there was model.part such a folder opened as its language model, and a run of that time does not note it: its
checkpoints are known by the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from zero3d.config import Config
from zero3d.config.sections import TEXT, WHOLE
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.errors import ConfigError
from zero3d.models.copies import on_meta
from zero3d.models.image_trial import check_blank_image
from zero3d.models.open import open_bare
from zero3d.models.packing import check_packing
from zero3d.models.places import is_called
from zero3d.models.trained import as_trained
from zero3d.pipeline.split import chain_of
from zero3d.sequence.group import check_sequence
from zero3d.tensor_parallel.parallelize import parallelize

Check = Callable[[nn.Module], object]


@contextmanager
def naming_text_part(config: Config) -> Iterator[None]:
    """Add model.part=text to a ConfigError that the whole model gets, and its language model alone would not."""
    try:
        yield
    except ConfigError as error:
        if remedy := _remedy(config, str(error)):
            raise ConfigError(f"{error} {remedy}") from error
        raise


def _remedy(config: Config, error: str) -> str:
    """Return the setting to type if the language model alone passes the failed check of `error`; else ""."""
    both = _text_and_whole(config)
    if both is None:
        return ""
    text, whole = both
    failed = [check for check in _checks(config) if (words := _refusal(check, whole)) and words in error]
    if not failed or any(_refusal(check, text) for check in failed):
        return ""
    return f"For training on text alone type model.part={TEXT}: it opens {type(text).__name__}, which can."


def _checks(config: Config) -> Iterator[Check]:
    """Yield the checks that a configuration asks for and that depend on the model's parts."""
    mesh = config.mesh
    tp = mesh.tp or 1
    if (mesh.pp or 1) > 1:
        yield lambda model: chain_of(model, mesh.blocks)
    if (sp := mesh.sp or 1) > 1:
        yield lambda model: check_sequence(model, sp, tp, mesh.sp_kind, mesh.sp_mixers)
    if tp > 1:
        yield lambda model: parallelize(on_meta(model), Axis("tp", 0, tp), Ledger())
    if config.data.packing:
        yield check_packing
    yield check_blank_image


def _refusal(check: Check, model: nn.Module) -> str:
    """Return a check's error for a model; "" if the model passes."""
    try:
        check(model)
    except ConfigError as error:
        return str(error)
    return ""


def _text_and_whole(config: Config) -> tuple[nn.Module, nn.Module] | None:
    """Return a configuration's language model alone and its whole model, on meta; None where they are no two."""
    if config.model.part != WHOLE or is_called(config.model):
        return None
    bare = replace(config.model, init="random")
    try:
        text, whole = open_bare(replace(bare, part=TEXT)).module, open_bare(bare).module
    except ConfigError:
        return None
    return (text, whole) if type(text) is not type(whole) else None


def part_of(config: Config, parameters: Collection[str]) -> str:
    """Return the part of a configuration's model that has these parameters: its own, or text of an older run's."""
    if _text_and_whole(config) is None:
        return config.model.part
    model = replace(config.model, init="random", part=TEXT)
    try:
        names = {name for name, _ in as_trained(open_bare(model), config).module.named_parameters()}
    except ConfigError:  # something is asked of a tower or a projector, which the language model alone has not
        return config.model.part
    return TEXT if names == set(parameters) else config.model.part


def older_run(config: Config, parameters: Collection[str]) -> str:
    """Return the setting to type if a checkpoint has the language model alone, and the configuration the whole one."""
    if part_of(config, parameters) == config.model.part:
        return ""
    return (
        f"These are of the language model of {config.model.path} alone, as which such a folder used to open: type "
        f"model.part={TEXT} to go on."
    )
