"""An adapter in PEFT's folder, from which training goes on.

adapter_config.json           -> the section lora that describes it
adapter_model.safetensors     -> its matrices, by the names of the model's parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zero3d.config import Lora
from zero3d.errors import ConfigError, short
from zero3d.models.foreign_code import no_foreign_code

ADAPTER = "default"  # PEFT's name of the one adapter; those of its files leave it out
BEFORE = "base_model.model."  # the model's own names in its files
OTHERS = (  # of PEFT's config, for which section lora has no key
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "lora_bias",
    "alora_invocation_tokens",
)
STARTS = (True, False, "gaussian")  # as init_lora_weights: those that leave the base's weights as they are
MERGE = "Train it on with PEFT, or put it into its base with model.merge_and_unload() and adapt what that gives."


class SavedAdapter(NamedTuple):
    """Holds an adapter that was saved: its kind, and whole matrices by PEFT's names."""

    choice: Lora
    matrices: Mapping[str, Tensor]

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the values of a parameter of the model. Raises ConfigError where there are none of this shape."""
        there = _saved_name(name)
        values = self.matrices.get(there)
        if values is None or tuple(values.shape) != shape:
            found = "is not in it" if values is None else f"has the shape {tuple(values.shape)} in it"
            raise ConfigError(f"the adapter is another model's: {there} {found}, and needs {shape} here.")
        return values

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse an adapter with tensors that are no parameter of the model. Raises ConfigError.

        names  of all parameters: beside an embedding's adapter PEFT saves the embedding itself
        """
        left = sorted(self.matrices.keys() - set(map(_saved_name, names)))
        if left:
            raise ConfigError(
                f"the adapter is another model's: {left[0]} is in it, one of {len(left)} tensors that no parameter "
                f"here takes. {MERGE}"
            )


def _saved_name(name: str) -> str:
    """Return what PEFT's files call a parameter of the model."""
    there = BEFORE + ".".join(part for part in name.split(".") if part != ADAPTER)
    return there.removesuffix(".weight") if "magnitude_vector" in there else there


def read_adapter(folder: str | Path) -> SavedAdapter:
    """Read a folder of PEFT's, or of an export. Raises ConfigError where the section lora cannot describe it."""
    from peft import PeftConfig
    from safetensors.torch import load_file

    place = short(str(folder))
    if not (Path(folder) / "adapter_config.json").is_file():  # PEFT would look for it on a hub
        raise ConfigError(f"{place} is not an adapter's folder: it has no adapter_config.json.")
    try:
        with no_foreign_code():
            config: Any = PeftConfig.from_pretrained(str(folder))
        matrices = load_file(Path(folder) / "adapter_model.safetensors")
    except Exception as error:  # whatever PEFT and safetensors say of odd files
        raise ConfigError(f"{place} cannot be read as an adapter: {short(str(error))}") from error
    if getattr(config.peft_type, "value", config.peft_type) != "LORA" or isinstance(config.target_modules, str):
        raise ConfigError(f"{place} is not a LoRA whose target_modules are a list of names.")
    other = next((name for name in OTHERS if getattr(config, name)), "bias" if config.bias != "none" else None)
    if other is not None:
        raise ConfigError(f"{place} has {other}={getattr(config, other)!r}, for which section lora has no key. {MERGE}")
    if config.init_lora_weights not in STARTS:
        raise ConfigError(
            f"{place} has init_lora_weights={config.init_lora_weights!r}, which may have changed the base's weights: "
            "save it with model.save_pretrained(FOLDER, path_initial_model_for_weight_conversion=START), where PEFT "
            "has that for its kind, or put it into its base with model.merge_and_unload()."
        )
    targets = (*sorted(config.target_modules), *(config.target_parameters or ()))
    options = {"dropout": config.lora_dropout, "rslora": config.use_rslora, "dora": config.use_dora}
    return SavedAdapter(Lora(config.r, config.lora_alpha, targets, **options), matrices)
