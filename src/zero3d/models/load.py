"""The weights of a Hugging Face folder by slices: a `Source` over its safetensors.

Names go through Hugging Face's own tables of renamed and fused parameters (mixture-of-experts
layers, old names). What a box costs to read, on a rank that holds nothing else of the model:

    a plain parameter                               that box
    experts stacked into one parameter              those experts, once for boxes that follow one another
    anything else that a table converts             the whole parameter
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.kept import Kept, find_heads
from zero3d.models.parts import key_in_text
from zero3d.models.quantised_folders import QuantisedFiles, Stored, open_files
from zero3d.shards.boxes import Box, slices, whole

SHOWN = 3
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them; narrower ones need scales beside them
Rows = tuple[int, int | None]


@dataclass
class Recipe:
    """How parameters are made from a file's tensors: `converter` is None for a plain one.

    target   the parameter, or the first one of several that the converter makes
    sources  (pattern of the converter, key in the files), in the order the converter wants
    """

    target: str
    converter: Any = None
    sources: list[tuple[str, str]] = field(default_factory=list)


class _AsBuilt:
    """A model with the shapes in which it was built, for converters that go by them: ranks have cut its parameters."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class FileWeights:
    """Reads parameters of `model` (as `build` gives it) from a folder's safetensors.

    Checks names and shapes at once, reading headers only; persistent buffers are filled in. Raises
    ConfigError with the differences. `unused` are the files' tensors that the model has no place for; of these `kept`
    has the heads that exports carry on (kept.py), None where there are none.

    text   the model is the language model in the folder's (model.part=text)
    """

    def __init__(self, folder: Path, model: nn.Module, text: bool = False) -> None:
        self._files, self._model = open_files(folder), model
        self._latest: tuple[Recipe | None, Rows, dict[str, Tensor]]  # recipe, rows, and what they were converted to
        self.close()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        self._recipes, unused = self._match(self._shapes)
        heads = find_heads(unused, {key for each in self._recipes.values() for _, key in each.sources}, model)
        self.kept = self._kept(heads, text) if heads else None
        self.unused = [key for key in unused if key not in heads]
        self._alias = _aliases(model)
        self._check_shapes(self._shapes)
        self._check_dtypes()
        self._fill_buffers()

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the parameter."""
        name = next(alias for alias in self._alias.get(name, [name]) if alias in self._recipes)
        recipe = self._recipes[name]
        if recipe.converter is None:
            return self._files.box(recipe.sources[0][1], box)
        rows: Rows = (0, None)
        if _keeps_rows(recipe.converter, self._shapes[name], len(recipe.sources)):
            rows, box = box[0], ((0, box[0][1] - box[0][0]), *box[1:])
        if self._latest[0] is not recipe or self._latest[1] != rows:
            self._latest = (None, rows, {})  # frees what was converted before
            self._latest = (recipe, rows, self._convert(recipe, *rows))
        return self._latest[2][name][slices(box)]

    @property
    def folder(self) -> Path | None:
        """The folder that it reads."""
        return self._files.folder

    def files(self) -> list[Path]:
        """Return the files that hold its tensors."""
        return self._files.paths()

    @property
    def has_groups(self) -> bool:
        """Return whether the folder stores some matrices in 8 or 4 bits."""
        return isinstance(self._files, QuantisedFiles)

    def stored(self, name: str) -> Stored | None:
        """Return the groups that the files have in the place of a matrix; None where they have its values."""
        recipe = next((self._recipes[alias] for alias in self._alias.get(name, [name]) if alias in self._recipes), None)
        return self._files.stored(recipe.sources[0][1]) if recipe is not None and recipe.converter is None else None

    def holds(self, name: str) -> bool:
        """Say whether the files have values of a parameter."""
        return any(alias in self._recipes for alias in self._alias.get(name, [name]))

    def close(self) -> None:
        """Let go of the open file and of what was converted last."""
        self._files.close()
        self._latest = (None, (0, None), {})

    # --- reading ------------------------------------------------------------------------------------

    def _convert(self, recipe: Recipe, first: int = 0, last: int | None = None) -> dict[str, Tensor]:
        """Return the converter's results; with `first` and `last` only from those tensors of each pattern."""
        chosen = [pair for group in _by_pattern(recipe.sources).values() for pair in group[first:last]]
        return self._run(recipe, [(pattern, key, self._files.tensor(key)) for pattern, key in chosen])

    def _run(self, recipe: Recipe, tensors: Sequence[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
        converter = copy.deepcopy(recipe.converter)
        for pattern, key, tensor in tensors:
            converter.add_tensor(recipe.target, key, pattern, tensor)
        model, config = _AsBuilt(self._model, self._shapes), getattr(self._model, "config", None)
        results = converter.convert(recipe.target, model=model, config=config)
        return {target: value[0] if isinstance(value, list) else value for target, value in results.items()}

    def _kept(self, keys: Sequence[str], text: bool) -> Kept:
        """Return where heads are, by the names that they have beside what is exported."""
        return Kept(self._files.folder, {key_in_text(key) if text else key: self._files.as_stored(key) for key in keys})

    # --- names and shapes ---------------------------------------------------------------------------

    def _match(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Recipe], list[str]]:
        """Return recipes by the model's names, and the keys that the model has no place for."""
        recipes: dict[str, Recipe] = {}
        unused = []
        rename = _renaming(self._model, shapes)
        for key in sorted(self._files.names(), key=_natural):
            target, converter, pattern = rename(key)
            if target in shapes:
                recipe = recipes.setdefault(target, Recipe(target, converter))
                recipe.sources.append((pattern, key))
            else:
                unused.append(key)
        for recipe in list(recipes.values()):
            if recipe.converter is not None:
                on_meta = [
                    (pattern, key, torch.empty(self._files.shape(key), device="meta"))
                    for pattern, key in recipe.sources
                ]
                recipes |= dict.fromkeys(self._run(recipe, on_meta), recipe)
        return recipes, unused

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in shapes if not self.holds(name)]
        wrong = [
            f"{name}: file {stored}, model {shape}"
            for name, shape in shapes.items()
            if (stored := self._stored_shape(name)) is not None and stored != shape
        ]
        if missing or wrong:
            faults = wrong + [f"{name} is in no file" for name in missing]
            more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
            raise ConfigError(
                f"{self._files.folder} holds other weights than its config.json describes ({len(self._files.names())} "
                f"tensors, {len(shapes)} expected): {'; '.join(faults[:SHOWN])}{more}. Use the config.json they were "
                "saved with, or model.init=random for new weights."
            )

    def _check_dtypes(self) -> None:
        """Refuse integers and quantised values, which mean nothing as weights. Raises ConfigError."""
        dtypes = {name: t.dtype for name, t in self._model.state_dict(keep_vars=True).items()}
        keys = {
            key: None
            for name, recipe in self._recipes.items()
            if dtypes[name].is_floating_point
            for _, key in recipe.sources
        }
        wrong = [f"{key} is {kind}" for key in keys if (kind := self._files.dtype(key)) not in FLOATS]
        if wrong:
            more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ConfigError(
                f"{self._files.folder} holds integers or quantised values where its model has weights: "
                f"{', '.join(wrong[:SHOWN])}{more} of {len(keys)} tensors; only {', '.join(FLOATS)} can be read. Save "
                "the model dequantised (transformers' model.dequantize(), then save_pretrained), or use "
                "model.init=random for new weights."
            )

    def _stored_shape(self, name: str) -> tuple[int, ...] | None:
        recipe = self._recipes.get(name)
        if recipe is None:
            return None
        if recipe.converter is None:
            return self._files.shape(recipe.sources[0][1])
        on_meta = [
            (pattern, key, torch.empty(self._files.shape(key), device="meta")) for pattern, key in recipe.sources
        ]
        return tuple(self._run(recipe, on_meta)[name].shape)

    def _fill_buffers(self) -> None:
        for name, buffer in self._model.named_buffers():
            if name in self._recipes:
                buffer.copy_(self(name, whole(tuple(buffer.shape))))


def _renaming(model: nn.Module, shapes: Mapping[str, Any]) -> Any:
    """Return a function: key -> (name in the model, converter or None, its pattern), by Hugging Face's tables."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")

    def rename(key: str) -> tuple[str, Any, str]:
        """Also a whole model's key, by its place in the text model, where that is what is built (model.part=text)."""
        found = [rename_source_key(name, renamings, converters, prefix, shapes) for name in (key, key_in_text(key))]
        target, pattern = next((pair for pair in found if pair[0] in shapes), found[0])
        if target not in shapes and key in shapes:
            target, pattern = key, None
        return target, None if pattern is None else by_pattern[pattern], pattern or key

    return rename


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of every tied parameter, under each of them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def _by_pattern(sources: Sequence[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for pattern, key in sources:
        groups.setdefault(pattern, []).append((pattern, key))
    return groups


def _keeps_rows(converter: Any, shape: tuple[int, ...], sources: int) -> bool:
    """Return whether row i of the result is made of the i-th tensors: experts stacked, then joined inside."""
    first, *rest = converter.operations
    return (
        type(first).__name__ == "MergeModulelist"
        and first.dim == 0
        and all(type(op).__name__ == "Concatenate" and op.dim > 0 for op in rest)
        and sources == shape[0] * len(converter.source_patterns)
    )


def _natural(key: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
