"""The plugin: Axolotl's trainers are subclasses of transformers' Trainer, into which our seams are put.

`load_in_4bit: true` and `load_in_8bit: true` need nothing here: Axolotl loads layers of bitsandbytes, which an engine
takes over. What else a file may say of a base in few bits is checked before that base is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from zero3d.errors import ConfigError
from zero3d.ways.huggingface.transformers import patch

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
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")  # which Axolotl turns on where none is in a file


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

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        """Leave Axolotl's kernels for adapters off, beside a base in few bits, where a file as it was read has none.

        They keep the matrix that they multiply by until backward: all of a base would be decoded at once.
        """
        if _in_few_bits(cfg):
            cfg.update({key: False for key in KERNELS if cfg.get(key) is None})

    def pre_model_load(self, cfg: Mapping[str, Any]) -> None:
        """Refuse a base in few bits that an engine cannot take over. Raises ConfigError."""
        kind = (cfg.get("bnb_config_kwargs") or {}).get("bnb_4bit_quant_type", "nf4")
        if kind != "nf4":
            raise ConfigError(f"bnb_4bit_quant_type: {kind} is not taken, nf4 is: leave it out of bnb_config_kwargs.")
        if cfg.get("nf4_backend") == "torchao":
            raise ConfigError(
                "nf4_backend: torchao loads torchao's tensors, and an engine takes over layers of bitsandbytes: leave "
                "nf4_backend out."
            )
        if cfg.get("quantize_moe_experts"):
            raise ConfigError(
                "quantize_moe_experts packs experts as Axolotl's own parametrizations, which an engine cannot shard: "
                "leave it out, or run zero3d train with model.quantize=nf4, which packs experts, too."
            )
        if cfg.get("gptq"):
            raise ConfigError(
                "gptq: true loads weights that no library here decodes: give the full-precision folder as base_model, "
                "with load_in_4bit: true."
            )
        if _in_few_bits(cfg) and (asked := [key for key in KERNELS if cfg.get(key)]):
            raise ConfigError(
                f"{asked[0]}: true keeps every decoded matrix until backward, so that the base is in 16 bits again: "
                f"leave {', '.join(asked)} out, or load_in_4bit and load_in_8bit."
            )

    def get_trainer_cls(self, cfg: Any) -> None:
        """Put the seams into transformers' Trainer, and leave the choice of a subclass to Axolotl.

        Raises ConfigError where the file shards in another way, too.
        """
        if asked := [key for key in OTHERS if cfg.get(key) not in (None, [], {}, 1)]:
            raise ConfigError(f"{asked[0]} and zero3d_stage would shard the model twice: leave one of them out.")
        patch(stage=cfg.get("zero3d_stage"), options=cfg.get("zero3d_options"))


def _in_few_bits(cfg: Mapping[str, Any]) -> bool:
    return bool(cfg.get("load_in_4bit") or cfg.get("load_in_8bit"))
