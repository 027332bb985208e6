"""deepspeed.ops.adam for programs: both classes are torch's AdamW or Adam, which an engine updates where states are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zero3d.errors import ConfigError

FUSED = ("lr", "bias_correction", "betas", "eps", "adam_w_mode", "weight_decay", "amsgrad", "set_grad_none")
ON_CPU = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adamw_mode", "fp32_optimizer_states")
TAKEN = ("lr", "betas", "eps", "weight_decay")  # by torch's


def FusedAdam(params: Iterable[Any], *given: Any, **named: Any) -> Optimizer:
    """Return torch's fused AdamW, or Adam with adam_w_mode=False, by the arguments of DeepSpeed's (FUSED).

    Raises ConfigError for what torch's has not.
    """
    return _adam("FusedAdam", params, FUSED, given, named)


def DeepSpeedCPUAdam(model_params: Iterable[Any], *given: Any, **named: Any) -> Optimizer:
    """Return the same (ON_CPU), for states that the JSON offloads: the engine updates them on the host by itself."""
    return _adam("DeepSpeedCPUAdam", model_params, ON_CPU, given, named)


def _adam(
    name: str, params: Iterable[Any], known: Sequence[str], given: Sequence[Any], named: Mapping[str, Any]
) -> Optimizer:
    options = dict(zip(known, given, strict=False)) | dict(named)
    unknown = [option for option in options if option not in known]
    for option, neutral in (("bias_correction", True), ("amsgrad", False), ("fp32_optimizer_states", True)):
        if options.get(option, neutral) != neutral:
            unknown.append(option)
    if unknown or len(given) > len(known):
        what = f"{unknown[0]}={options[unknown[0]]}" if unknown else f"{len(given)} arguments"
        raise ConfigError(f"{name} with {what} is not supported: leave it out.")
    decoupled = options.get("adam_w_mode", options.get("adamw_mode", True))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, fused=True, **{"weight_decay": 0.0} | {key: options[key] for key in TAKEN if key in options})
