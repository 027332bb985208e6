"""An adapter in PEFT's folder, from which training goes on.

adapter_config.json           -> the section lora that describes it
adapter_model.safetensors     -> its matrices, by the names of the model's parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zero3d.config import Lora
from zero3d.errors import ConfigError, short

ADAPTER = "default"  # PEFT's name of the one adapter; those of its files leave it out
BEFORE = "base_model.model."  # the model's own names in its files
OTHERS = ("modules_to_save", "rank_pattern", "alpha_pattern")  # of PEFT's config, for which section lora has no key


class SavedAdapter(NamedTuple):
    """Holds an adapter that was saved: its kind, and whole matrices by PEFT's names."""

    choice: Lora
    matrices: Mapping[str, Tensor]

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the values of a parameter of the model. Raises ConfigError where there are none of this shape."""
        there = BEFORE + ".".join(part for part in name.split(".") if part != ADAPTER)
        there = there.removesuffix(".weight") if "magnitude_vector" in there else there
        values = self.matrices.get(there)
        if values is None or tuple(values.shape) != shape:
            found = "is not in it" if values is None else f"has the shape {tuple(values.shape)} in it"
            raise ConfigError(f"the adapter is another model's: {there} {found}, and needs {shape} here.")
        return values


def read_adapter(folder: str | Path) -> SavedAdapter:
    """Read a folder of PEFT's, or of an export. Raises ConfigError where the section lora cannot describe it."""
    from peft import PeftConfig
    from safetensors.torch import load_file

    place = short(str(folder))
    if not (Path(folder) / "adapter_config.json").is_file():  # PEFT would look for it on a hub
        raise ConfigError(f"{place} is not an adapter's folder: it has no adapter_config.json.")
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        matrices = load_file(Path(folder) / "adapter_model.safetensors")
    except Exception as error:  # whatever PEFT and safetensors say of odd files
        raise ConfigError(f"{place} cannot be read as an adapter: {short(str(error))}") from error
    if getattr(config.peft_type, "value", config.peft_type) != "LORA" or isinstance(config.target_modules, str):
        raise ConfigError(f"{place} is not a LoRA whose target_modules are a list of names.")
    other = next((name for name in OTHERS if getattr(config, name)), "bias" if config.bias != "none" else None)
    if other is not None:
        raise ConfigError(f"{place} has {other}={getattr(config, other)!r}, for which section lora has no key.")
    targets = (*sorted(config.target_modules), *(config.target_parameters or ()))
    options = {"dropout": config.lora_dropout, "rslora": config.use_rslora, "dora": config.use_dora}
    return SavedAdapter(Lora(config.r, config.lora_alpha, targets, **options), matrices)
