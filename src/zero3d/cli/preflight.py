"""What a configuration and a number of ranks show before any rank is started: for verbs that start runs later.

degrees      mesh.dp x mesh.tp x mesh.pp makes the ranks
batch        train.batch = micro_batch x accumulate x dp
positions    data.length fits the model
"""

from __future__ import annotations

from importlib.util import find_spec

from zero3d.config import Config, Model, resolve_batch
from zero3d.degrees import Degrees
from zero3d.errors import ConfigError


def check_world(config: Config, world: int) -> None:
    """Refuse degrees and a batch that `world` ranks cannot form. Raises MeshError and ConfigError."""
    degrees = Degrees.resolve(world, config.mesh.dp, config.mesh.tp, config.mesh.pp)
    resolve_batch(config.train, degrees.dp)


def check_transformers(model: Model) -> None:
    """Refuse a model that needs a package which is not there. Raises ConfigError."""
    if find_spec("transformers") is None and ":" not in model.path:
        raise ConfigError("zero3d train needs transformers for its model: pip install 'zero3d[hf]'")


def check_positions(config: Config) -> None:
    """Refuse sequences longer than the model's config allows. Raises ConfigError. Imports torch and transformers."""
    from zero3d.data.tokenizers import check_length
    from zero3d.hf.open import positions

    check_length(config.data.length, positions(config.model))
