"""How a key of a section is declared: default, meaning and what is allowed, written once."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a field: its default, what it means, and what is allowed.

    least, most     closed bounds
    above, below    open bounds
    choices         the allowed words; K in "every:K" stands for a whole number from 1
    """
    metadata = {"text": text, "choices": choices, "least": least, "most": most, "above": above, "below": below}
    return field(default=default, metadata=metadata)
