"""The plugin: Axolotl's trainers are subclasses of transformers' Trainer, into which our seams are put."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from zero3d.errors import ConfigError
from zero3d.integrations.transformers import patch

OTHERS = (  # keys of other ways to shard
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "dp_shard_size",
    "dp_replicate_size",
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_degree",
)


class Zero3dArgs(BaseModel):  # type: ignore[misc]
    """Declares the keys that the plugin adds to a file of Axolotl's, checked by pydantic as its own are.

    zero3d_stage: of ZeRO; zero3d_options: more of `zero3d.Engine`, such as {offload: {optimizer: host}}
    """

    zero3d_stage: int | None = Field(default=None, ge=0, le=3)
    zero3d_options: dict[str, Any] | None = None


class Zero3dPlugin(BasePlugin):  # type: ignore[misc]
    """Has Axolotl train on `zero3d.Engine`."""

    def get_input_args(self) -> str:
        """Return where the keys are that it adds."""
        return f"{__name__}.{Zero3dArgs.__name__}"

    def get_trainer_cls(self, cfg: Any) -> None:
        """Put the seams into transformers' Trainer, and leave the choice of a subclass to Axolotl.

        Raises ConfigError where the file shards in another way, too.
        """
        if asked := [key for key in OTHERS if cfg.get(key) not in (None, [], {}, 1)]:
            raise ConfigError(f"{asked[0]} and zero3d_stage would shard the model twice: leave one of them out.")
        patch(stage=cfg.get("zero3d_stage"), options=cfg.get("zero3d_options"))
