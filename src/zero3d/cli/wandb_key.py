"""Looks for a key of Weights & Biases where wandb would, without importing wandb or opening a file.

Where a key may be (wandb/sdk/lib/wbauth, wandb/sdk/wandb_settings.py):

WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE      the environment
~/.netrc, ~/_netrc, or the file of NETRC      as `wandb login` writes it
settings of the user or of this folder        an api_key, or the mode offline
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from zero3d.errors import ConfigError
from zero3d.train.weights_and_biases import REMEDY

KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
WITHOUT_KEY = ("offline", "dryrun", "disabled")  # of WANDB_MODE


def check_key(project: str) -> None:
    """Refuse a run that nobody is logged in for: a worker cannot ask for the key. Raises ConfigError.

    A file that may hold a key counts as one: wandb reads it later.
    """
    environment = os.environ
    if any(environment.get(name) for name in KEYS) or environment.get("WANDB_MODE") in WITHOUT_KEY:
        return
    if not any(file.exists() for file in _files(environment)):
        raise ConfigError(f"log.wandb={project} needs a key of Weights & Biases, and there is none: {REMEDY}.")


def _files(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files that may hold a key."""
    home = Path("~").expanduser()
    netrc = environment.get("NETRC")
    yield from [Path(netrc).expanduser()] if netrc else [home / ".netrc", home / "_netrc"]
    yield Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb").expanduser() / "settings"
    yield Path(environment.get("WANDB_DIR") or ".") / "wandb" / "settings"
