"""Export: the weights as a folder that `from_pretrained` loads, gathered unit by unit.

    every pipeline stage   gathers its units on its own dp axis; its first rank has whole tensors by their published
                           names (published.py), and writes stage-STAGE-0, -1, ...
    in turn                persistent buffers that no earlier pipeline stage wrote
    rank 0 of all          copies what the model's folder has beside (models/kept.py), gives the files their names,
                           writes index and config

No rank ever holds the model, or more of it than a file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from zero3d.checkpoint.folders import foreign_entry, put_in_place, step_of
from zero3d.checkpoint.hub_names import on_host
from zero3d.checkpoint.model_card import CARD, NO_CARD, Card, write_card
from zero3d.checkpoint.published import Published
from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.writing import removed_on_failure, told, write_json, write_kept, write_tensors
from zero3d.distributed.agreement import agree
from zero3d.errors import CheckpointError
from zero3d.models.bases import model_of
from zero3d.models.kept import Kept
from zero3d.zero.unit import Unit

FILE_BYTES = 4 * 10**9
ELSEWHERE = "export to a new directory, so that nothing is lost"
REPLACING = f"{ELSEWHERE} (engine.export(..., overwrite=True) replaces an earlier export)"


class WholeUnits(Protocol):
    """Has units whole where they are exported from."""

    def receiving(self, units: Sequence[Unit]) -> AbstractContextManager[None]:
        """Have a receive buffer for the largest of these units inside; all ranks of the engine enter it at once."""

    def on_first(self, unit: Unit) -> AbstractContextManager[None]:
        """Have one of them gathered on the first of its ranks inside."""


def export(
    directory: Path,
    engine: EngineState,
    whole: WholeUnits,
    kind: str | None = None,
    overwrite: bool = False,
    card: Card = NO_CARD,
) -> Path:
    """Write weights in compute dtype as safetensors, with the config of a Hugging Face model; return the folder.

    kind       a form of `forms.py`; None means the adapter of a model that has one, and all weights of any other
    overwrite  replace an earlier export, once this one is whole; nothing else is ever replaced
    card       what the caller knows for the model card, beside the engine's

    Gathers one unit at a time; who writes does so into files of at most FILE_BYTES, so that its host memory
    holds one file and never the model. The folder appears whole or not at all.
    """
    model = model_of(engine.modules[0])
    directory, temporary = export_places(directory)
    world, coordinates = engine.world.patient, engine.degrees.place(engine.world.rank)
    published = agree(world, lambda: Published(engine, kind))
    writer = ExportWriter(temporary, coordinates.pp)

    def on(chosen: bool, action: Callable[[], None]) -> None:
        agree(world, action if chosen else lambda: None)

    kept = published.form.kept
    on(world.rank == 0 and kept is not None, lambda: None if kept is None else kept.check())
    on(world.rank == 0, partial(prepare_export, directory, temporary, overwrite, REPLACING))
    with removed_on_failure(temporary, world):
        agree(world, partial(_add_units, writer, engine, published, whole))
        for stage in range(engine.degrees.pp):
            on(coordinates == (stage, 0, 0), partial(_finish_stage, writer, published))
        beside = partial(published.form.finish, dtype=_dtype(model))
        known = card_of(engine, card)
        finish = partial(finish_export, temporary, directory, beside, engine.degrees.pp, overwrite, kept, known)
        on(world.rank == 0, finish)
    return directory


def card_of(engine: EngineState, card: Card = NO_CARD) -> Card:
    """Return a model card with what an engine knows beside its caller."""
    return card.of_engine(engine.about, engine.step, None if engine.base is None else engine.base.folder)


def _add_units(writer: ExportWriter, engine: EngineState, published: Published, whole: WholeUnits) -> None:
    """Gather this pipeline stage's units and write them on its first rank."""
    with whole.receiving(published.units):
        for unit in published.units:
            with whole.on_first(unit):
                add = partial(_add, writer, published, unit)
                agree(engine.tp.patient, partial(agree, engine.dp.patient, add))


def _add(writer: ExportWriter, published: Published, unit: Unit) -> None:
    """Write copies of a gathered unit's tensors, which others only take part in joining."""
    writer.add(on_host(published.collect(unit)))


def export_places(directory: Path) -> tuple[Path, Path]:
    """Return where an export will be, and where it is written. Raises CheckpointError where it cannot be there."""
    if directory.is_symlink() and not directory.exists():
        raise CheckpointError(f"{directory} is a link to {directory.readlink()}, which is not there: give the folder.")
    directory = directory.resolve()
    if not directory.name:
        raise CheckpointError(f"{directory} exists and is not empty: export to a new directory.")
    if step_of(directory) is not None:
        raise CheckpointError(f"{directory} has the name of a checkpoint: export to {directory.with_name('hf')}.")
    return directory, directory.with_name(f".{directory.name}.tmp")


def prepare_export(directory: Path, temporary: Path, overwrite: bool = False, remedy: str = ELSEWHERE) -> None:
    """Make the folder that is written. Raises CheckpointError where something is in the place of the export.

    remedy  what the caller's user can do about that
    """
    _check_place(directory, overwrite, remedy)
    shutil.rmtree(temporary, ignore_errors=True)
    with told(temporary):
        temporary.mkdir(parents=True)


def _check_place(directory: Path, overwrite: bool, remedy: str = ELSEWHERE) -> None:
    """Refuse what is in the place of an export, but for an earlier one that may be replaced. Raises CheckpointError."""
    if not directory.exists():
        return
    if overwrite and (foreign := foreign_entry(directory)):
        raise CheckpointError(f"{foreign} was not exported by zero3d, and nothing else is replaced: move it.")
    if not overwrite and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not empty: {remedy}.")


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


def _finish_stage(writer: ExportWriter, published: Published) -> None:
    """Add the persistent buffers that no earlier pipeline stage has, and finish this stage's files."""
    written = writer.earlier()
    writer.add({name: tensor for name, tensor in published.buffers().items() if name not in written})
    writer.finish()


def _write_kept(kept: Kept, temporary: Path, stage: int) -> None:
    """Write tensors of the model's folder as they are, into files of at most FILE_BYTES, block by block."""
    files: list[dict[str, int]] = [{}]
    for name, tensor in kept.tensors.items():
        if files[-1] and sum(files[-1].values()) + tensor.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = tensor.nbytes
    for number, names in enumerate(files):
        write_kept(temporary / f"stage-{stage}-{number}", kept, list(names))
    write_json(temporary / f"stage-{stage}.json", files)


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


def _dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's floating numbers."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def finish_export(
    temporary: Path,
    directory: Path,
    beside: Callable[[Path], object] | None,
    stages: int,
    overwrite: bool = False,
    kept: Kept | None = None,
    card: Card | None = None,
) -> None:
    """Name the files of all pipeline stages, write what lies beside them, and put the folder in its place.

    kept  is written behind them, as one more stage
    card  of the model; None writes none
    """
    if kept is not None:
        _write_kept(kept, temporary, stages)
    _join(temporary, stages + (kept is not None))
    if beside is not None:
        beside(temporary)
    if card is not None:
        with told(temporary / CARD):
            write_card(temporary, card)
    _check_place(directory, overwrite)
    put_in_place(temporary, directory)
