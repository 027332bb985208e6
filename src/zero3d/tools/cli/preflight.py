"""What a configuration and a number of ranks show before any rank is started: for verbs that start runs later.

degrees      mesh.dp x mesh.tp x mesh.pp makes the ranks, and what folds dp (mesh.ep, mesh.sp) divides it
batch        train.batch = micro_batch x accumulate x dp; enough micro-batches for a pipeline
paths        model, data, tokenizer and own code are there; data.length fits a model that names its positions
chats        the tokenizer has a template, where data begin with a chat
type         transformers knows the model
tp           mesh.tp divides the heads and the vocabulary of a config.json or a preset (unbuilt_types.py)
attention    transformers knows model.attn, and its kernels are there
positions    data.length fits the model
key          somebody is logged in to Weights & Biases, where log.to asks for it
store        what MLflow needs for a SQLite file, where no server is named
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from zero3d.config import Config, Model, fitting_ranks, settle
from zero3d.config.own_code import check_module
from zero3d.config.sources import Part
from zero3d.data.files import check_paths as check_data_paths, find_sources, function_of, named_formats, parts_of_data
from zero3d.data.records import has_chats
from zero3d.data.tokenizers import check_length, check_template, check_tokenizer
from zero3d.errors import ConfigError, short
from zero3d.models.places import (
    HEADS,
    check_heads,
    check_model_path,
    check_rows,
    config_file,
    config_json,
    folder_of,
    is_called,
    named_positions,
    text_config,
)
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.offload import AUTO
from zero3d.stores.urls import is_url
from zero3d.tensor_parallel.shipped import cuts_attention
from zero3d.tools.cli.unbuilt_types import UnbuiltType
from zero3d.train.setup.attention import check_kernel
from zero3d.train.setup.packages import is_installed

VOCABULARY = "vocab_size"
TABLES, KNOWN = ("configuration_auto.py", "auto_mappings.py"), "llama"  # of model types, and one in any such table
REMEDY = "type `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
SERVER = "MLFLOW_TRACKING_URI"
WITHOUT_KEY = ("offline", "dryrun", "disabled")  # of WANDB_MODE


def check_world(config: Config, world: int) -> None:
    """Refuse degrees and a batch that `world` ranks cannot form. Raises MeshError and ConfigError.

    Under health.min_ranks those of them count that can form a dp.
    """
    degrees, batch = settle(config, fitting_ranks(config, world))
    if degrees.pp > 1:
        Schedule.of(config.mesh.schedule).check(batch.accumulate, degrees.pp)


def check_paths(config: Config) -> None:
    """Refuse a model, data, a tokenizer or own code that is not there; looks at names only.

    Raises ConfigError and DataError.
    """
    check_model_path(config.model)
    check_data_paths(config.data)
    check_length(config.data.length, named_positions(config.model))
    for key, path in own_code(config):
        check_module(key, path)
    has_text = any(format != "npy" for format in named_formats(config.data).values())
    if has_text or config.data.tokenizer is not None:
        check_tokenizer(config.data.tokenizer, folder_of(config.model))


def check_chats(config: Config) -> None:
    """Refuse chats, by the first record of data, whose tokenizer's files have no template. Raises ConfigError."""
    if any(map(_begins_with_chats, parts_of_data(config.data))):
        check_template(config.data.tokenizer, folder_of(config.model))


def _begins_with_chats(part: Part) -> bool:
    """Return whether a part's first local file begins with a chat; ranks look at files in object stores."""
    if function_of(part) or any(map(is_url, part.paths)):
        return False
    return has_chats(find_sources(part.paths[:1], part.format, part.split)[0])


def own_code(config: Config) -> list[tuple[str, str]]:
    """Return the key and the module:name of all code that a run is to import."""
    data = [function for part in parts_of_data(config.data) if (function := function_of(part))]
    return [
        *([("model.path", config.model.path)] if is_called(config.model) else []),
        *([("evaluate.function", config.evaluate.function)] if config.evaluate.function is not None else []),
        *(("callbacks", path) for path in config.callbacks or ()),
        *(("data.train", function) for function in data),
    ]


def check_model_type(config: Config) -> None:
    """Refuse a config.json whose model_type transformers does not know. Raises ConfigError.

    The table of types takes torch to be imported, so its source is searched. Own code may register types of its own:
    then ranks say it.
    """
    path, package = config.model.path, find_spec("transformers")
    if not os.path.exists(path) or own_code(config) or package is None or package.origin is None:
        return
    file, auto = config_file(Path(path)), Path(package.origin).parent / "models" / "auto"
    kind = config_json(file).get("model_type")
    tables = "".join(table.read_text(encoding="utf-8") for name in TABLES if (table := auto / name).is_file())
    if isinstance(kind, str) and f'"{KNOWN}"' in tables and f'"{kind}"' not in tables:
        raise ConfigError(
            f"{file}: the installed transformers does not know the model_type {short(kind)!r}: upgrade it (pip install "
            "-U transformers), or correct the entry."
        )


def check_tp(config: Config) -> None:
    """Refuse a mesh.tp that cuts a head in two, or a vocabulary unevenly, where a type's plan cuts attention.

    Embedding and head are cut, too, where attention is. What is not known of a type, a plan of one's own and own code
    are left to the ranks. Raises ConfigError.
    """
    tp = config.mesh.tp
    if tp is None or config.mesh.tp_plan is not None or is_called(config.model):
        return
    known = UnbuiltType.of(text_config(config.model))
    if cuts_attention({name: style.partition(":")[0] for name, style in known.plan.items()}):
        for key in HEADS:
            if (heads := known.number(key)) is not None:
                check_heads(key, heads, tp)
        if (rows := known.number(VOCABULARY)) is not None:
            check_rows(f"{VOCABULARY}={rows}", rows, tp)


def check_attention(config: Config) -> None:
    """Refuse a model.attn that transformers does not know, or whose kernels are not installed. Raises ConfigError.

    Its source is searched, as for the type. A kernel of a repository, or one of own code, is left to the ranks.
    """
    attn, package = config.model.attn, find_spec("transformers")
    if attn in (None, AUTO) or not attn.isidentifier() or own_code(config) or package is None or package.origin is None:
        return
    source = (Path(package.origin).parent / "modeling_utils.py").read_text(encoding="utf-8")
    if '"sdpa"' in source and f'"{attn}"' not in source:
        raise ConfigError(
            f"model.attn={short(attn)}: the installed transformers does not know it: type eager, sdpa, "
            "flash_attention_2 or flex_attention."
        )
    check_kernel(attn)


def check_transformers(model: Model) -> None:
    """Refuse a model that needs a package which is not there. Raises ConfigError."""
    if find_spec("transformers") is None and ":" not in model.path:
        raise ConfigError("zero3d train needs transformers for its model: pip install 'zero3d[hf]'")


def check_positions(config: Config) -> None:
    """Refuse sequences longer than the model's config allows. Raises ConfigError. Imports torch and transformers."""
    from zero3d.models.open import positions

    check_length(config.data.length, positions(config.model))


def check_key(asked: str) -> None:
    """Refuse a run that nobody is logged in for: a worker cannot ask for the key. Raises ConfigError.

    asked  what asks for Weights & Biases

    It is looked for where wandb would (wandb/sdk/lib/wbauth, wandb/sdk/wandb_settings.py), without importing wandb:

        WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE      the environment
        ~/.netrc, ~/_netrc, or the file of NETRC      as `wandb login` writes it
        settings of the user or of this folder        an api_key, or the mode offline

    A file that may hold a key counts as one: wandb reads it later.
    """
    environment = os.environ
    if any(environment.get(name) for name in KEYS) or environment.get("WANDB_MODE") in WITHOUT_KEY:
        return
    if not any(file.exists() for file in _files_of_keys(environment)):
        raise ConfigError(f"{asked} needs a key of Weights & Biases, and there is none: {REMEDY}.")


def check_store(asked: str) -> None:
    """Refuse a run of mlflow-skinny alone that names no server: it cannot write a SQLite file. Raises ConfigError."""
    if not os.environ.get(SERVER) and not is_installed("alembic"):
        raise ConfigError(f"{asked} without {SERVER} needs alembic: pip install 'zero3d[mlflow]'.")


def _files_of_keys(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files that may hold a key."""
    home = Path("~").expanduser()
    netrc = environment.get("NETRC")
    yield from [Path(netrc).expanduser()] if netrc else [home / ".netrc", home / "_netrc"]
    yield Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb").expanduser() / "settings"
    yield Path(environment.get("WANDB_DIR") or ".") / "wandb" / "settings"
