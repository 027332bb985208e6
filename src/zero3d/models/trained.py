"""The model of a run as it is trained: opened, with adapters, frozen and quantised as the configuration says."""

from __future__ import annotations

from zero3d.config import Config
from zero3d.models.adapters import add_adapters
from zero3d.models.freezing import freeze
from zero3d.models.open import Opened, open_model
from zero3d.models.quantised import quantise
from zero3d.precision import Precision


def open_trained(config: Config) -> Opened:
    """Build the module of a run on this rank without its weights, trainable where it shall be. Raises ConfigError."""
    return as_trained(open_model(config.model, config.seed), config)


def as_trained(opened: Opened, config: Config) -> Opened:
    """Put adapters beside an opened model, freeze and quantise what the configuration says. Raises ConfigError."""
    if config.lora.rank is not None:
        opened = add_adapters(opened, config.lora, config.seed)
    if config.freeze:
        freeze(opened.module, config.freeze)
    return quantise(opened, config.model.quantize, Precision.of(config.precision).dtype)
