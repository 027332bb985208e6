"""`zero3d plan train.yaml`: plans for the model, the data and the batch of a run's own file, and that file with a plan.

    of the file     model, lora, freeze, data.length, data.packing, train.batch, train.steps (how long), optimizer.name
    of the plan     mesh, zero, offload, activations, train.micro_batch, train.accumulate; train.tiled_loss if it says
    written, too    plan.gpus, plan.gpu: what it is planned for
    stays           everything else: data, output, learning rates, ...

What a command says (--seq, --lora, --tokens-per-batch, ...) is taken in place of the file's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.config import Config, Lora
from zero3d.config.read import read_tree
from zero3d.errors import ConfigError
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.zero import Zero
from zero3d.tools.cli.kept_specs import open_spec
from zero3d.tools.plan.lengths import Lengths
from zero3d.tools.plan.spec import Forward, ModelSpec, Patches
from zero3d.train.setup.left_out import load_filled

ENDINGS = (".yaml", ".yml")
PLANNED = {"mesh": Mesh, "zero": Zero, "offload": Offload}  # sections whose keys a plan has
FOR = "plan"  # the section of what it was planned for
REPLACED = ("batch", "micro_batch", "accumulate", "compile")  # of train, whatever a plan says
NARROW = (("model", "quantize"), ("model", "linear"), ("optimizer", "name"))  # keys that a plan may say
PORTIONS = (*REPLACED, "tiled_loss")  # of train that a plan may say


def lengths_of(config: Config) -> tuple[Lengths | None, str]:
    """Return the lengths of a sample of a run's data; None where it packs them, or nobody knows, and why."""
    if config.data.packing:
        return None, ""
    from zero3d.tools.sim import file_lengths  # with torch

    return file_lengths.lengths_of(config)


class RunFile(NamedTuple):
    """A run's file: as it is written, and as it is read."""

    tree: Mapping[str, Any]
    config: Config

    @classmethod
    def of(cls, words: str | None) -> RunFile | None:
        """Read a MODEL that is the file of a run; None for any other. Raises ConfigError."""
        if words is None or not words.endswith(ENDINGS) or not Path(words).is_file():
            return None
        return cls(read_tree(Path(words)), load_filled(words).config)

    def check(self, precision: str) -> None:
        """Refuse a file of another precision than that in which plans are searched. Raises ConfigError."""
        if self.config.precision not in (precision, "bf16"):
            raise ConfigError(
                f"plans are searched in {precision}, and the file's precision is {self.config.precision}: zero3d plan "
                "explain prices it."
            )

    def model(
        self,
        length: int | None,
        lora: Lora | None,
        on_card: bool = False,
        quantize: str | None = None,
        patches: Patches | None = None,
    ) -> ModelSpec:
        """Trace the model, without tiles of a loss that the file keeps whole. Raises ConfigError.

        length, lora, quantize  instead of the file's
        on_card       mixers call kernels, as on a card
        patches       of a sequence
        """
        config = self.config
        model = open_spec(
            config.model.path,
            length or config.data.length,
            chosen=config.model if quantize is None else replace(config.model, quantize=quantize),
            lora=lora or config.lora,
            packed=bool(config.data.packing),
            freeze=config.freeze,
            forward=Forward(on_card, config.autocast, patches),
        )
        return replace(model, tiles=model.tiles and config.train.tiled_loss is not False)

    def lengths(self, model: ModelSpec) -> tuple[Lengths | None, str]:
        """Return the lengths of a sample of its data, cut at the model's; None where they decide nothing, and why."""
        return lengths_of(replace(self.config, data=replace(self.config.data, length=model.length)))

    def tokens(self, model: ModelSpec, lengths: Lengths | None = None) -> float | None:
        """Return the tokens of the whole training, where the file says how many steps and sequences it has."""
        train, each = self.config.train, model.length if lengths is None else lengths.mean
        return None if train.steps is None or train.batch is None else train.steps * train.batch * float(each)

    @property
    def compiles(self) -> bool | None:
        """Return what it says of train.compile, None where it says nothing."""
        return (self.tree.get("train") or {}).get("compile")

    def with_plan(self, planned: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file with a plan's settings in the place of its own. planned: `emit.train_config`."""
        tree = {key: value for key, value in self.tree.items() if key not in PLANNED}
        for name, section in PLANNED.items():
            known = {key.name for key in fields(section)}
            own = {key: value for key, value in (self.tree.get(name) or {}).items() if key not in known}
            if merged := {**own, **planned.get(name, {})}:
                tree[name] = merged
        train = {key: value for key, value in (self.tree.get("train") or {}).items() if key not in REPLACED}
        tree["train"] = {**train, **{key: value for key, value in planned["train"].items() if key in PORTIONS}}
        for where, key in NARROW:
            if key in planned.get(where, {}):
                tree[where] = {**(self.tree.get(where) or {}), key: planned[where][key]}
        tree["data"] = {**(self.tree.get("data") or {}), "length": planned["data"]["length"]}
        if "packing" in planned["data"]:
            tree["data"]["packing"] = planned["data"]["packing"]
        if planned["precision"] != self.config.precision:  # of a card without bf16
            tree["precision"] = planned["precision"]
        tree[FOR] = {**(self.tree.get(FOR) or {}), **planned[FOR]}
        return {**tree, "activations": planned["activations"], "output": self.tree.get("output") or planned["output"]}
