"""The loss of models that return logits and none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from zero3d.precision import at_least_fp32

IGNORED = -100  # the label of a position that is no target


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of losses and the number of targets, of logits [batch, length, vocabulary] or what has .logits."""
    logits, labels = getattr(output, "logits", output)[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(
        at_least_fp32(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (labels != IGNORED).sum()
