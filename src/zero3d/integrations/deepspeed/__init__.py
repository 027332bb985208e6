"""Stands for `zero3d.ways.deepspeed`, for one release, by the name that it had."""

from typing import TYPE_CHECKING, Any

from zero3d.ways import deepspeed as _deepspeed

if TYPE_CHECKING:
    from zero3d.ways.deepspeed import (
        DeepSpeedEngine as DeepSpeedEngine,
        add_config_arguments as add_config_arguments,
        init_distributed as init_distributed,
        initialize as initialize,
    )


def __getattr__(name: str) -> Any:
    return getattr(_deepspeed, name)
