"""The weights of a checkpoint as a folder that `from_pretrained` loads, in one process without an engine.

    masters, range by range --to_compute--> a block's weights --form (forms.py)--> files of at most FILE_BYTES
    what was left out: the base's folder  --^

The same bits and names as `export.py` writes on the ranks of an engine of that step. Of the model only its structure is
needed, on meta: what transformers calls its weights, which buffers belong to them, its config.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.checkpoint.export import ExportWriter, export_places, finish_export, prepare_export
from zero3d.checkpoint.fields import quote_name
from zero3d.checkpoint.forms import form_of
from zero3d.checkpoint.frozen_base import FolderSource, check_base
from zero3d.checkpoint.hub_names import Exported
from zero3d.checkpoint.integrity import verify
from zero3d.checkpoint.manifest import BUFFER, FROZEN
from zero3d.checkpoint.model_card import NO_CARD, Card
from zero3d.checkpoint.published import refuse_nan, refuse_nonfinite
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.distributed.degrees import Place
from zero3d.errors import CheckpointError, OutOfBudget
from zero3d.models.blocks import find_blocks
from zero3d.models.kept import Kept
from zero3d.models.packing import inner_model
from zero3d.precision import to_compute
from zero3d.shards.boxes import whole

LISTED = 3


def export_stored(
    stored: StoredStates,
    directory: Path,
    model: nn.Module | None,
    kind: str | None = None,
    base: FolderSource | None = None,
    kept: Kept | None = None,
    card: Card = NO_CARD,
) -> Path:
    """Write weights in compute dtype, and the config of a Hugging Face model; return the folder.

    model  its structure, with buffers; None writes weights and all buffers under the names that they have in it, and no
           config
    kind   as `export.export` has it
    base   has the frozen weights that the checkpoint left out
    kept   tensors of the model's folder that a full export carries on
    card   what the caller knows for the model card, beside the checkpoint's

    The checkpoint is verified first, every byte of it. Host memory holds a file and a block, never the model. The
    folder appears whole or not at all. Raises CheckpointError, OutOfBudget, NonFiniteError.
    """
    if model is not None:
        check_model(stored, model)
    order = _order(stored, model)
    trainable = frozenset(name for name in order if stored.parameters[name].trainable)
    shapes = {name: each.shape for name, each in stored.parameters.items()}
    folder = None if base is None else base.folder
    modules = [] if model is None else [model]
    form = form_of(kind, Exported(model, modules, order, trainable, shapes, folder, matrices=base, kept=kept))
    values = _values(stored, [name for name in order if form.wants(name)], base)
    directory, temporary = export_places(directory)
    _check_room(stored, directory, values, 0 if form.kept is None else form.kept.nbytes)
    prepare_export(directory, temporary)
    try:
        verify(stored.folder)
        writer = ExportWriter(temporary, 0)
        for names in _groups(stored, model):
            named = {name: values[name]() for name in names if name in values}
            refuse_nonfinite(named)
            writer.add(form.feed(named))
        buffers = form.buffers(_buffers(stored, model))
        refuse_nan(buffers)
        writer.add(buffers)
        writer.finish()
        dtypes = (getattr(torch, stored.parameters[name].dtype) for name in order)
        dtype = next((each for each in dtypes if each.is_floating_point), torch.float32)
        card = card.of_engine(stored.manifest.value("about") or {}, stored.manifest.step, folder)
        finish_export(temporary, directory, partial(form.finish, dtype=dtype), 1, kept=form.kept, card=card)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return directory


def _values(stored: StoredStates, names: Sequence[str], base: FolderSource | None) -> dict[str, Callable[[], Tensor]]:
    """Return what reads each parameter: from the checkpoint, or from the base. Raises CheckpointError."""
    values: dict[str, Callable[[], Tensor]] = {name: partial(weight, stored, name) for name in names}
    left_out = [name for name in names if stored.parameters[name].in_base]
    if not left_out:
        return values
    check_base(stored.manifest, base)
    assert base is not None
    if lost := [name for name in left_out if not base.holds(name)]:
        raise CheckpointError(
            f"{stored.folder} leaves out {quote_name(lost[0])}, and the model of its base's folder has no such "
            "weight: give the config of the model that was trained: --config PATH."
        )
    return values | {name: partial(_of_base, stored, base, name) for name in left_out}


def _of_base(stored: StoredStates, base: FolderSource, name: str) -> Tensor:
    """Return a frozen weight of the base's folder as the forward has it."""
    spec = stored.parameters[name]
    values = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    to_compute(base(name, whole(spec.shape)).to(wide), values.dtype, out=values)
    return values


def weight(stored: StoredStates, name: str) -> Tensor:
    """Return a parameter as the forward has it: its master or average in compute dtype, or the frozen weight itself."""
    spec = stored.parameters[name]
    values = torch.empty(prod(spec.shape), dtype=getattr(torch, spec.dtype))
    state = stored.trained if spec.trainable else FROZEN
    for start, part in stored.chunks(name, state) if values.numel() else ():
        to_compute(part, values.dtype, out=values[start : start + part.numel()])
    return values.view(spec.shape)


def check_model(stored: StoredStates, model: nn.Module) -> None:
    """Refuse the structure of another model. Raises CheckpointError."""
    saved = {name: parameter.shape for name, parameter in stored.parameters.items()}
    built = {name: tuple(p.shape) for name, p in model.named_parameters()}
    wrong = [name for name in {**saved, **built} if saved.get(name) != built.get(name)]
    if wrong:
        listed = "; ".join(
            f"{quote_name(name)}: checkpoint {saved.get(name, 'none')}, model {built.get(name, 'none')}"
            for name in wrong[:LISTED]
        )
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise CheckpointError(
            f"{stored.folder} is a checkpoint of another model than the config's, {type(model).__name__} "
            f"({len(saved)} parameters, the config's model {len(built)}): {listed}{more}. Give the config of the model "
            "that was trained: --config PATH."
        )


def _check_room(stored: StoredStates, directory: Path, names: Iterable[str], beside: int) -> None:
    """Refuse a disk with less room than the weights take. Raises OutOfBudget."""
    written = [stored.parameters[name] for name in names]
    needed = beside + sum(prod(each.shape) * getattr(torch, each.dtype).itemsize for each in written)
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OutOfBudget(
            f"the weights of {stored.folder} take {needed:,} bytes, and the disk of {existing} has {free:,} free: make "
            f"room for {needed - free:,} more, or export to another disk."
        )


def _order(stored: StoredStates, model: nn.Module | None) -> Sequence[str]:
    """Return the names of all parameters, in the model's order where it is known."""
    return list(stored.parameters) if model is None else [name for name, _ in model.named_parameters()]


def _groups(stored: StoredStates, model: Any | None) -> Iterator[list[str]]:
    """Yield the names of parameters that are named together, since conversions may join them.

    Those of a block, the embeddings and the head each alone, and all others; one by one where nothing is converted.
    """
    order = _order(stored, model)
    if model is None or not hasattr(inner_model(model), "save_pretrained"):
        yield from ([name] for name in order)
        return
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    of_ends = {id(p) for end in ends if end is not None for p in end.parameters()}
    alone = {name for name, p in model.named_parameters() if id(p) in of_ends}
    blocks = list(find_blocks(model))
    groups: dict[str, list[str]] = {}
    for name in order:
        block = next((each for each in blocks if name.startswith(f"{each}.")), "")
        groups.setdefault(name if name in alone else block, []).append(name)
    yield from groups.values()


def _buffers(stored: StoredStates, model: nn.Module | None) -> dict[str, Tensor]:
    """Return the buffers that belong to the weights, those of each pipeline stage that no earlier one has."""
    persistent = None if model is None else model.state_dict().keys()
    found: dict[str, Tensor] = {}
    for stage in range(stored.manifest.mesh.pp):
        rank = stored.manifest.mesh.rank(Place(stage, 0, 0))
        names = [name for name in stored.own[rank].buffers if persistent is None or name in persistent]
        found |= {name: stored.own_tensor(rank, f"{BUFFER}{name}") for name in names if name not in found}
    return found
