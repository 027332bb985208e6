"""Kinds of PEFT's adapters that an engine cannot train, and what it changes of one that it can.

    kind                  what it does                                                  trained
    CPT                   its forward writes new values into its weights                no
    XLORA                 weighs adapters of other folders, which an export lacks       no
    ADALORA               its loss looks at all matrices at once, after their layers    below stage 3
    prompts (all kinds)   tokens are put before the model's own                         outside of pipelines
    LoRA of tied layers   two parameters share their memory (ensure_weight_tying)       no

All others are trained as any module is, since an engine looks at parameters and at who uses them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero3d.errors import ConfigError

NEVER = {
    "CPT": "its forward overwrites its weights, which belong to the engine",
    "XLORA": "it combines adapters of other folders, which an export would lack",
}
GATHERED = {"ADALORA": "its loss reads all of its matrices after their layers have run, when stage 3 has released them"}


def check_adapters(model: nn.Module, gathers: bool, pp: int) -> None:
    """Refuse adapters that would not be trained, or wrongly. Raises ConfigError.

    gathers  weights are there only while their module runs (stage 3)
    """
    configs: Any = getattr(model, "peft_config", None) or {}
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in NEVER:
            raise ConfigError(f"PEFT's {kind} is not supported: {NEVER[kind]}. Use another kind, such as LORA.")
        if gathers and kind in GATHERED:
            raise ConfigError(f"PEFT's {kind} is not supported at stage 3: {GATHERED[kind]}. Pass stage=2.")
        if pp > 1 and config.is_prompt_learning:
            raise ConfigError(
                f"PEFT's {kind} prepends virtual tokens, which pipeline stages cannot pass on: pass pp=1, or use an "
                "adapter of weights, such as LORA."
            )
    if configs:
        _refuse_shared_memory(model)


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse parameters that are two and share their memory: an engine gives each its own. Raises ConfigError."""
    seen: dict[int, str] = {}
    for name, p in model.named_parameters():
        if p.is_meta or not p.numel() or not p.requires_grad:
            continue
        other = seen.setdefault(p.data_ptr(), name)
        if other != name:
            raise ConfigError(
                f"{name} is a view of {other}, another parameter, and an engine would train the two separately: leave "
                "ensure_weight_tying out of PEFT's configuration, or take one of the tied layers out of its targets."
            )
