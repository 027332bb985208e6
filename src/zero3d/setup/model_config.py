"""Numbers of a Hugging Face model's configuration."""

from __future__ import annotations

from typing import Any

from torch import nn


def config_number(model: nn.Module, name: str) -> int | None:
    """Return a number of the text model's configuration, or None where the model has none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, name, None)
