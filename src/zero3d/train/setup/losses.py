"""The loss of models that return logits and none of their own; and whether a model's own is computed in tiles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from zero3d.account.transients import LOGITS_BUDGET, logits_bytes
from zero3d.config import Config, resolve_batch
from zero3d.distributed.mesh import Mesh
from zero3d.engine.tiling import check_tiled_loss
from zero3d.errors import ConfigError
from zero3d.models.bases import config_number
from zero3d.precision import DTYPES, at_least_fp32
from zero3d.spec.sizes import decimal

IGNORED = -100  # the label of a position that is no target


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of losses and the number of targets, of logits [batch, length, vocabulary] or what has .logits."""
    logits, labels = getattr(output, "logits", output)[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(
        at_least_fp32(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()


def own_loss(model: nn.Module) -> Callable[..., Any] | None:
    """Return a function of a model's loss from its output; None where the model computes its loss itself."""
    return None if "labels" in inspect.signature(model.forward).parameters else next_token_loss


def tiles_refused(model: nn.Module) -> str | None:
    """Return why a model's loss cannot be computed in tiles; None where it can."""
    try:
        check_tiled_loss(model, own_loss(model))
    except ConfigError as error:
        return str(error)
    return None


class LossChoice(NamedTuple):
    """Whether a model's loss is computed in tiles, and why in a line; "" where logits are small or it was asked for."""

    tiled: bool
    why: str = ""


def choose_loss(config: Config, model: nn.Module, mesh: Mesh) -> LossChoice:
    """Say what train.tiled_loss means for a model before it is cut: the same on every machine, for the bits differ."""
    asked, words = config.train.tiled_loss, config_number(model, "vocab_size")
    if isinstance(asked, bool) or words is None:
        return LossChoice(asked is True)
    tokens = resolve_batch(config.train, mesh.dp).micro_batch * config.data.length
    nbytes = logits_bytes(tokens, words, DTYPES[config.precision].itemsize) // mesh.tp
    if nbytes <= LOGITS_BUDGET:
        return LossChoice(False)
    told = f"{tokens:,} tokens x {words:,} logits take {decimal(nbytes)}, more than {decimal(LOGITS_BUDGET)}"
    if mesh.tp > 1:
        return LossChoice(
            False,
            f"train.tiled_loss=auto: not in tiles: {told}, but mesh.tp is {mesh.tp}: type train.tiled_loss=true for "
            "tiles",
        )
    if (why := tiles_refused(model)) is not None:
        return LossChoice(False, f"train.tiled_loss=auto: not in tiles: {told}, but {why}")
    return LossChoice(True, f"train.tiled_loss=auto: in tiles: {told}; equal to a whole loss up to rounding")
