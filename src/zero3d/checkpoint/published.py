"""An engine's weights as they are published: whole tensors under Hugging Face's names, unit by unit.

    a unit gathered over dp  -->  slices joined over tp and ep, parameter by parameter, on the first rank of the
                                  pipeline stage (one in tiles once they are all there, on the host)
                             -->  named by a form (forms.py): a model's own names, adapters merged, or alone

An export writes them (export.py), and a stream sends them: both have the same bits. No rank ever holds the model. A
tied parameter's copy is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from zero3d.checkpoint.forms import form_of
from zero3d.checkpoint.hub_names import Exported
from zero3d.checkpoint.state import EngineState
from zero3d.errors import NonFiniteError
from zero3d.models.bases import model_of
from zero3d.precision import are_finite
from zero3d.shards.cuts import Tile
from zero3d.zero.unit import Unit

_OpenTiles = dict[str, tuple[list[Tensor], int]]  # parameter -> its slices so far, elements that each still lacks


class Published:
    """Owns what waits for others of a pipeline stage's tensors until they can be named.

    kind   a form of `forms.py`; None means the adapter of a model that has one, and all weights of any other
    units  of this stage, as far as the form needs them

    Raises CheckpointError where the model cannot have this form.
    """

    def __init__(self, engine: EngineState, kind: str | None) -> None:
        full = engine.full_model
        names = [full.owner(slot.name) for unit in engine.owned_units for slot in unit.layout.slots]
        base, matrices = (None, None) if engine.base is None else (engine.base.folder, engine.base.source)
        model = model_of(engine.modules[0])
        exported = Exported(
            model, engine.modules, names, full.trainable, full.shapes, base, full.copies, matrices, engine.kept
        )
        self.form = form_of(kind, exported)
        self._engine = engine
        self._open_ones: _OpenTiles = {}
        self.units = [
            unit
            for unit in engine.owned_units
            if any(self.form.wants(full.owner(slot.name)) for slot in unit.layout.slots)
        ]

    def collect(self, unit: Unit) -> dict[str, Tensor]:
        """Return what a gathered unit makes ready, by name, on the stage's first rank; {} on others, which help.

        Tensors may share the unit's memory: they are to be used while it is gathered. Of experts, which every tp rank
        has, tp rank 0 and its peers on ep take part. Raises NonFiniteError.
        """
        engine = self._engine
        if engine.dp.rank >= _parts_on_dp(engine, unit):
            return {}
        named = {}
        for slot, p in zip(unit.layout.slots, unit.weights.params, strict=True):
            tile = engine.full_model.tiles.get(slot.name)
            slices = _whole(tile, _slices(engine, slot.name, p.detach()), self._open_ones)
            if slices:
                cut, name = engine.cut(slot.name), engine.full_model.owner(slot.name)
                named[name] = slices[0] if cut is None or len(slices) == 1 else cut.join(slices)
        if engine.tp.rank or engine.dp.rank:
            return {}
        refuse_nonfinite(named)
        return self.form.feed(named)

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers, and what has waited until the end. Raises NonFiniteError."""
        names = self._engine.persistent_buffers
        buffers = self.form.buffers({name: same[0] for name, same in self._engine.buffers.items() if name in names})
        refuse_nan(buffers)
        return buffers


def _parts_on_dp(engine: EngineState, unit: Unit) -> int:
    """Return how many neighbours on dp have parts of a unit's parameters: of experts as many as there are on ep."""
    cut = engine.cut(unit.layout.slots[0].name)
    return engine.folds[cut.axis].size if cut is not None and cut.axis in engine.folds else 1


def refuse_nonfinite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are NaN or infinite. Raises NonFiniteError."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    bad = [name for name, finite in zip(floating, are_finite([*floating.values()]), strict=True) if not finite]
    if bad:
        more = f" and {len(bad) - 1} more beside it" if len(bad) > 1 else ""
        raise NonFiniteError(
            f"{bad[0]}{more} has values that are NaN or infinite: such weights are neither exported nor streamed. Go "
            "back to an earlier checkpoint, whose weights are finite."
        )


def refuse_nan(buffers: Mapping[str, Tensor]) -> None:
    """Refuse buffers such as running statistics of a forward that was not finite; infinities may be a mask's."""
    bad = [name for name, buffer in buffers.items() if buffer.is_floating_point() and bool(buffer.isnan().any())]
    if bad:
        raise NonFiniteError(
            f"buffer {bad[0]} has values that are NaN: such buffers are neither exported nor streamed. Go back to an "
            "earlier checkpoint, whose buffers are finite."
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
