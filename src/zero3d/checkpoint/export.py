"""Export: the weights as a folder that `from_pretrained` loads, gathered unit by unit.

    every pipeline stage   gathers its units on its own dp axis; rank 0 of that has the tp ranks' slices joined,
                           parameter by parameter (one in tiles once they are all there, on the host), and as
                           tp rank 0 writes stage-STAGE-0, -1, ...
    in turn                persistent buffers that no earlier pipeline stage wrote
    rank 0 of all          gives the files their names, writes index and config

No rank ever holds the model, or more of it than a file. A tied parameter's copy is left out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from zero3d.checkpoint.forms import Form, form_of
from zero3d.checkpoint.hub_names import Exported
from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.writing import removed_on_failure, told, write_json, write_tensors
from zero3d.distributed.agreement import agree
from zero3d.errors import CheckpointError, NonFiniteError
from zero3d.models.bases import model_of
from zero3d.offload.commit_file import sync
from zero3d.precision import is_finite
from zero3d.shards.cuts import Tile
from zero3d.zero.unit import Unit

FILE_BYTES = 4 * 10**9
_OpenTiles = dict[str, tuple[list[Tensor], int]]  # parameter -> its slices so far, elements that each still lacks
Gathered = Callable[[Unit], AbstractContextManager[None]]  # has a unit gathered while it is entered


def export(directory: Path, engine: EngineState, gathered: Gathered, kind: str | None = None) -> Path:
    """Write weights in compute dtype as safetensors, with the config of a Hugging Face model; return the folder.

    kind  a form of `forms.py`; None means the adapter of a model that has one, and all weights of any other

    Gathers one unit at a time; who writes does so into files of at most FILE_BYTES, so that its host memory
    holds one file and never the model. The folder appears whole or not at all.
    """
    model = model_of(engine.modules[0])
    directory, temporary = export_places(directory)
    world, coordinates = engine.world.patient, engine.degrees.place(engine.world.rank)
    form = agree(world, lambda: form_of(kind, _exported(engine, model)))
    writer = ExportWriter(temporary, coordinates.pp)

    def on(chosen: bool, action: Callable[[], None]) -> None:
        agree(world, action if chosen else lambda: None)

    on(world.rank == 0, partial(prepare_export, directory, temporary))
    with removed_on_failure(temporary, world):
        agree(world, partial(_add_units, writer, engine, form, gathered))
        for stage in range(engine.degrees.pp):
            on(coordinates == (stage, 0, 0), partial(_finish_stage, writer, engine, form))
        on(world.rank == 0, partial(_finish, temporary, directory, model, form, engine.degrees.pp))
    return directory


def _exported(engine: EngineState, model: nn.Module) -> Exported:
    """Return what a form is told of an engine's model."""
    full = engine.full_model
    names = [full.owner(slot.name) for unit in engine.owned_units for slot in unit.layout.slots]
    base, matrices = (None, None) if engine.base is None else (engine.base.folder, engine.base.source)
    return Exported(model, engine.modules, names, full.trainable, full.shapes, base, full.copies, matrices)


def _add_units(writer: ExportWriter, engine: EngineState, form: Form, gathered: Gathered) -> None:
    """Gather this pipeline stage's units, of which each has its own number, as far as the form needs them."""
    open_ones: _OpenTiles = {}
    for unit in engine.owned_units:
        if not any(form.wants(engine.full_model.owner(slot.name)) for slot in unit.layout.slots):
            continue
        with gathered(unit):
            takes_part = engine.dp.rank < _parts_on_dp(engine, unit)
            add = partial(_add, writer, engine, form, unit, open_ones) if takes_part else lambda: None
            agree(engine.tp.patient, partial(agree, engine.dp.patient, add))


def _parts_on_dp(engine: EngineState, unit: Unit) -> int:
    """Return how many neighbours on dp have parts of a unit's parameters: of experts as many as there are on ep."""
    cut = engine.cut(unit.layout.slots[0].name)
    return engine.folds[cut.axis].size if cut is not None and cut.axis in engine.folds else 1


def _add(writer: ExportWriter, engine: EngineState, form: Form, unit: Unit, open_ones: _OpenTiles) -> None:
    """Write a gathered unit on rank 0 of tp and dp; others only take part in joining it. A tile waits for the others.

    Of experts, which every tp rank has, tp rank 0 and its peers on ep do so.
    """
    named = {}
    for slot, p in zip(unit.layout.slots, unit.weights.params, strict=True):
        slices = _whole(engine.full_model.tiles.get(slot.name), _slices(engine, slot.name, p.detach()), open_ones)
        if slices:
            cut, name = engine.cut(slot.name), engine.full_model.owner(slot.name)
            named[name] = slices[0] if cut is None or len(slices) == 1 else cut.join(slices)
    if engine.tp.rank == 0 and engine.dp.rank == 0:
        refuse_nonfinite(named)
        writer.add(form.take(named))


def refuse_nonfinite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are NaN or infinite. Raises NonFiniteError."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    bad = [name for name, tensor in floating.items() if not is_finite(tensor)]
    if bad:
        more = f" and {len(bad) - 1} more beside it" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"nothing was exported: {bad[0]}{more} has values that are NaN or infinite. Go back to an earlier "
            "checkpoint, whose weights are finite."
        )


def refuse_nan(buffers: Mapping[str, Tensor]) -> None:
    """Refuse buffers such as running statistics of a forward that was not finite; infinities may be a mask's."""
    bad = [name for name, buffer in buffers.items() if buffer.is_floating_point() and bool(buffer.isnan().any())]
    if bad:
        raise NonFiniteError(
            f"nothing was exported: buffer {bad[0]} has values that are NaN. Go back to an earlier checkpoint, whose "
            "buffers are finite."
        )


def _slices(engine: EngineState, name: str, local: Tensor) -> Sequence[Tensor]:
    """Return a parameter's slices: on rank 0 of its axis all of a cut one, in host memory; else this rank's.

    For a cut one every rank of the axis holds the whole for a moment, and receives (N-1)/N of it.
    """
    cut = engine.cut(name)
    if cut is None:
        return [local]
    axis = engine.folds.get(cut.axis, engine.tp)
    slices = local.new_empty(axis.size, *local.shape)
    axis.all_gather(slices.view(-1), local.reshape(-1), name).wait()
    return slices.cpu().unbind() if axis.rank == 0 else [local]


def _whole(tile: Tile | None, slices: Sequence[Tensor], open_ones: _OpenTiles) -> Sequence[Tensor]:
    """Put slices of a tile to those of its parameter's other tiles, on the host; return them once they are whole."""
    if tile is None:
        return slices
    if tile.owner not in open_ones:
        open_ones[tile.owner] = [torch.empty(tile.shape, dtype=t.dtype) for t in slices], prod(tile.shape)
    whole, missing = open_ones.pop(tile.owner)
    for target, values in zip(whole, slices, strict=True):
        target.view(-1)[tile.start : tile.start + values.numel()].copy_(values.reshape(-1))
    if missing == slices[0].numel():
        return whole
    open_ones[tile.owner] = whole, missing - slices[0].numel()
    return []


def export_places(directory: Path) -> tuple[Path, Path]:
    """Return where an export will be, and where it is written. Raises CheckpointError where it cannot be there."""
    if directory.is_symlink() and not directory.exists():
        raise CheckpointError(f"{directory} is a link to {directory.readlink()}, which is not there: give the folder.")
    directory = directory.resolve()
    if not directory.name:
        raise CheckpointError(f"{directory} exists and is not empty: export to a new directory.")
    return directory, directory.with_name(f".{directory.name}.tmp")


def prepare_export(directory: Path, temporary: Path) -> None:
    """Make the folder that is written. Raises CheckpointError where something is in the place of the export."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not empty: export to a new directory, so that nothing is lost."
        )
    shutil.rmtree(temporary, ignore_errors=True)
    with told(temporary):
        temporary.mkdir(parents=True)


class ExportWriter:
    """Collects one pipeline stage's tensors into files and remembers which file holds what."""

    def __init__(self, directory: Path, stage: int) -> None:
        self._directory, self._stage = directory, stage
        self._open: dict[str, Tensor] = {}
        self._files: list[dict[str, int]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors; write a file once it would grow beyond FILE_BYTES."""
        for name, tensor in tensors.items():
            if self._open and sum(map(_nbytes, self._open.values())) + _nbytes(tensor) > FILE_BYTES:
                self._flush()
            self._open[name] = tensor

    def _flush(self) -> None:
        path = self._directory / f"stage-{self._stage}-{len(self._files)}"
        write_tensors(path, self._open, format="pt", writer="zero3d")  # a run replaces only what says so
        self._files.append({name: _nbytes(tensor) for name, tensor in self._open.items()})
        self._open = {}

    def earlier(self) -> set[str]:
        """Return the names that earlier pipeline stages have written."""
        listed = [self._directory / f"stage-{stage}.json" for stage in range(self._stage)]
        return {name for path in listed for file in json.loads(path.read_text()) for name in file}

    def finish(self) -> None:
        """Write the last file, and what each of them holds for whoever joins them."""
        self._flush()
        write_json(self._directory / f"stage-{self._stage}.json", self._files)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _finish_stage(writer: ExportWriter, engine: EngineState, form: Form) -> None:
    """Add the persistent buffers that no earlier pipeline stage has, and finish this stage's files."""
    names = engine.persistent_buffers
    buffers = form.buffers({name: same[0] for name, same in engine.buffers.items() if name in names})
    refuse_nan(buffers)
    written = writer.earlier()
    writer.add({name: tensor for name, tensor in buffers.items() if name not in written})
    writer.finish()


def _join(temporary: Path, stages: int) -> None:
    """Give the files their final names and write the index if there are several."""
    files: list[tuple[Path, dict[str, int]]] = []
    for stage in range(stages):
        listed = temporary / f"stage-{stage}.json"
        files += [(temporary / f"stage-{stage}-{i}", file) for i, file in enumerate(json.loads(listed.read_text()))]
        listed.unlink()
    count = len(files)
    weight_map: dict[str, str] = {}
    for i, (path, file) in enumerate(files):
        name = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        path.rename(temporary / name)
        weight_map |= dict.fromkeys(file, name)
    if count > 1:
        total = sum(size for _, file in files for size in file.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(temporary / "model.safetensors.index.json", index)


def _finish(temporary: Path, directory: Path, module: nn.Module, form: Form, stages: int) -> None:
    floating = (p.dtype for p in module.parameters() if p.is_floating_point())
    finish_export(temporary, directory, form, next(floating, torch.float32), stages)


def finish_export(temporary: Path, directory: Path, form: Form, dtype: torch.dtype, stages: int) -> None:
    """Name the files of all pipeline stages, write what lies beside them, and put the folder in its place.

    dtype  of the weights, for the config
    """
    _join(temporary, stages)
    form.finish(temporary, dtype)
    if directory.exists():
        directory.rmdir()
    temporary.rename(directory)
    sync(directory.parent)
