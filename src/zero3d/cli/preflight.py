"""What a configuration and a number of ranks show before any rank is started: for verbs that start runs later.

degrees      mesh.dp x mesh.tp x mesh.pp makes the ranks, and mesh.ep divides dp
batch        train.batch = micro_batch x accumulate x dp; enough micro-batches for a pipeline
paths        model, data and tokenizer are there
positions    data.length fits the model
"""

from __future__ import annotations

from importlib.util import find_spec

from zero3d.config import Config, Model, asked_dp, fitting_ranks, resolve_batch
from zero3d.data.files import check_paths as check_data_paths
from zero3d.data.tokenizers import check_length, check_tokenizer
from zero3d.distributed.degrees import Degrees
from zero3d.errors import ConfigError
from zero3d.models.presets import check_model_path
from zero3d.pipeline.schedules import Schedule


def check_world(config: Config, world: int) -> None:
    """Refuse degrees and a batch that `world` ranks cannot form. Raises MeshError and ConfigError.

    Under health.min_ranks those of them count that can form a dp.
    """
    mesh = config.mesh
    degrees = Degrees.resolve(fitting_ranks(config, world), asked_dp(config), mesh.tp, mesh.pp, mesh.ep)
    batch = resolve_batch(config.train, degrees.dp)
    if degrees.pp > 1:
        Schedule.of(config.mesh.schedule).check(batch.accumulate, degrees.pp)


def check_paths(config: Config) -> None:
    """Refuse a model, data or a tokenizer that is not there; looks at names only. Raises ConfigError and DataError."""
    check_model_path(config.model.path)
    check_data_paths(config.data)
    check_tokenizer(config.data.tokenizer)


def check_transformers(model: Model) -> None:
    """Refuse a model that needs a package which is not there. Raises ConfigError."""
    if find_spec("transformers") is None and ":" not in model.path:
        raise ConfigError("zero3d train needs transformers for its model: pip install 'zero3d[hf]'")


def check_positions(config: Config) -> None:
    """Refuse sequences longer than the model's config allows. Raises ConfigError. Imports torch and transformers."""
    from zero3d.models.open import positions

    check_length(config.data.length, positions(config.model))
