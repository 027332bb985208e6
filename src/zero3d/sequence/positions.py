"""The positions that a decoder takes where it is given none, for a rank whose rows do not begin the sequence.

    rows       0 1 2 3 ..                         nearly all decoders
    attended   -1 -1 0 1 ..  behind padding       OPT counts what the mask lets it see
    tokens     1 1 2 3 ..    behind padding       RoBERTa counts tokens that are not padding, from its padding index on

Which of these rules a decoder follows is told by a trial (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """What positions may be made of: token ids [B, S], if there are any, and the mask [B, S], if there is one."""

    ids: Tensor | None
    mask: Tensor | None
    length: int
    device: torch.device


def rows(row: Row, padding: int) -> Tensor:
    """Count all of a sequence, [1, S]."""
    return torch.arange(row.length, device=row.device)[None]


def attended(row: Row, padding: int) -> Tensor:
    """Count what the mask does not hide, from 0; the rest is at -1."""
    if row.mask is None or row.mask.dim() != 2:
        return rows(row, padding)
    shown = row.mask.long()
    return shown.cumsum(1) * shown - 1


def tokens(row: Row, padding: int) -> Tensor:
    """Count ids that are not padding, from one behind the padding index, at which the rest is."""
    if row.ids is None:
        return rows(row, padding) + padding + 1
    shown = (row.ids != padding).long()
    return shown.cumsum(1) * shown + padding


Rule = Callable[[Row, int], Tensor]
RULES: tuple[Rule, ...] = (rows, attended, tokens)


class Positions(NamedTuple):
    """Makes the positions of whole sequences as a decoder does. padding: the id of its padding token."""

    rule: Rule = rows
    padding: int = 0

    def of(self, ids: Tensor | None, mask: Any, length: int, device: torch.device) -> Tensor:
        """Return [1 or B, S]."""
        return self.rule(Row(ids, mask if isinstance(mask, Tensor) else None, length, device), self.padding)
