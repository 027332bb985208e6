"""Weights & Biases: the run that records go to, and its refusals in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zero3d.config import Config, to_dict
from zero3d.errors import ConfigError, Zero3dError
from zero3d.train.folder import Folder

REMEDY = "type `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"


class Wandb:
    """Logs to a Weights & Biases run; offline where WANDB_MODE says so. A run that is resumed goes on in its own."""

    def __init__(self, folder: Folder, project: str, config: Config) -> None:
        import wandb

        with _refusals_told(project):
            self._run = wandb.init(
                project=project,
                dir=str(folder.root),
                config=to_dict(config),
                resume="allow",
                id=folder.run_id or None,
                name=folder.root.resolve().name,
            )

    def write(self, record: Mapping[str, Any]) -> None:
        """Log a record under its step."""
        self._run.log({k: v for k, v in record.items() if v is not None}, step=record["step"])

    def close(self) -> None:
        """Finish the run: wandb sends what is left."""
        self._run.finish()


@contextmanager
def _refusals_told(project: str) -> Iterator[None]:
    """Say in one line what wandb refuses: a missing or wrong key is bad input, a server out of reach is a fault."""
    from wandb.errors import AuthenticationError, Error, UsageError

    try:
        yield
    except Error as error:
        kind = ConfigError if isinstance(error, (AuthenticationError, UsageError)) else Zero3dError
        why = " ".join(str(error).split()).removesuffix(".")
        raise kind(f"log.wandb={project}: wandb.init raised {type(error).__name__} ({why}): {REMEDY}.") from error
