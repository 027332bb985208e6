"""A torch optimizer over this rank's pieces of masters, and its states in flat buffers or records.

pieces     1-D tensors of parameters' parts, in model order; each is a key of the optimizer's `state`
states     by name: a view of its unit's flat buffer, which lives as long as the engine, or what stands for a record
spans      where in a unit a state is, if not all groups have it (blueprint/state_spans.py)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.blueprint.layout import ALIGN as BLOCK
from zero3d.blueprint.state_spans import Span, span_of
from zero3d.distributed.collectives import same_memory
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.spec.optimizer import MOMENTS
from zero3d.zero.masters import absent
from zero3d.zero.unit import Unit
from zero3d.zero.updates import DeferredUpdates, MasterPiece


class OptimizerStates:
    """Owns the torch optimizer over this rank's pieces and the flat buffers of its states.

    updates  of units whose states are in records, all trainable ones or none
    build    groups of pieces -> torch optimizer
    built    options of its groups as they were then, whatever schedules and checkpoints have made of them since
    numbers  names of the values that it kept of every parameter then, such as Adam's step, beside tensors of its
             elements
    added    names of the options that a checkpoint has added to each group
    """

    updates: DeferredUpdates | None = None

    def __init__(
        self,
        units: Sequence[Unit],
        order: dict[str, int],
        build: Callable[[list[list[Tensor]]], Optimizer],
        groups: int,
        arena: Arena,
    ) -> None:
        self._units = [unit for unit in units if unit.grads is not None]
        self._arena = arena
        self.pieces = sorted(self._own(self._units, order), key=lambda piece: piece.order)
        self._adopted: list[tuple[dict[str, Any], dict[str, Any]]] = []  # live states, and what was in flat buffers
        self._flat: dict[tuple[str, str], Tensor] = {}
        self._spans: dict[tuple[str, str], Span | None] = {}  # known once: finding one looks at all pieces of a unit
        self.torch = build([[p.master for p in self.pieces if p.group == g] for g in range(groups)])
        self.built: Sequence[Mapping[str, Any]] = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self.torch.param_groups
        ]
        self.added: Sequence[set[str]] = [set() for _ in self.torch.param_groups]
        self._state_names = [state_names(self.torch, group) for group in self.torch.param_groups]
        self._known = {key for names in self._state_names for key in names or ()}
        self._coded: Collection[str] = getattr(self.torch, "coded", ())  # states that it stores in a form of its own
        self._check_blocks()
        self._in_groups = _count_in_groups(self.torch)
        self._store_first()
        self._prefill(self.pieces)
        first = self.torch.state.get(self.pieces[0].master, {}) if self.pieces else {}
        self.numbers = {name for name, value in first.items() if isinstance(value, Tensor) and value.dim() == 0}

    def check_groups(self) -> None:
        """Raise ConfigError where the torch optimizer's groups have other parameters than they were given."""
        if _count_in_groups(self.torch) != self._in_groups:
            raise ConfigError(
                f"the optimizer's groups have {_count_in_groups(self.torch)} parameters, and the engine gave them "
                f"{self._in_groups}, which are pieces of the model's (add_param_group after the Engine was built?): "
                "the others would not be trained. Give the groups to the optimizer before, and freeze and unfreeze "
                "parameters with engine.freeze(pattern) and engine.unfreeze(pattern)."
            )

    def extend(
        self, new: Sequence[Unit], units: Sequence[Unit], order: dict[str, int], group_of: Callable[[str], int]
    ) -> None:
        """Update units that were frozen, too, with states of zeros. group_of: a parameter's group by name."""
        self._units = [unit for unit in units if unit.grads is not None]
        pieces = [replace(owned, group=group_of(owned.name)) for owned in self._own(new, order)]
        self.pieces = sorted([*self.pieces, *pieces], key=lambda piece: piece.order)
        for number, group in enumerate(self.torch.param_groups):
            group["params"] += [owned.master for owned in pieces if owned.group == number]
        self._in_groups = _count_in_groups(self.torch)
        self._check_blocks()
        self._prefill(pieces)
        self._adopted = []

    @property
    def units(self) -> Sequence[Unit]:
        """The trainable ones."""
        return self._units

    def _own(self, units: Sequence[Unit], order: dict[str, int]) -> Iterator[MasterPiece]:
        for unit in units:
            for place, piece in enumerate(unit.weights.update_pieces(unit.comm.rank)):
                slot = unit.layout.slots[piece.slot]
                about = unit, slot.name, slot.shape, order[slot.name], slot.group
                for part, master in unit.weights.masters.parts(piece):
                    yield MasterPiece(*about, part, place, part.start - piece.start, master)

    def _check_blocks(self) -> None:
        """Refuse shards that cut the blocks of coded states, since the layout did not know of these."""
        sizes = [unit.weights.elements for unit in self._units] if self._coded else []
        if any(size % BLOCK for size in sizes):
            raise ConfigError(
                f"{type(self.torch).__name__} keeps states in blocks of {BLOCK} elements, and a shard of "
                f"{next(size for size in sizes if size % BLOCK):,} ends inside one: pass zero3d.optim.adamw8bit(...) "
                "itself as optimizer."
            )

    def _prefill(self, pieces: Sequence[MasterPiece]) -> None:
        """Make the states that are known (`state_names`) at the start: memory does not grow at the first step."""
        wide = torch.get_default_dtype() == torch.float64
        for owned in pieces:
            group, names = self.torch.param_groups[owned.group], self._state_names[owned.group]
            if names is None:
                continue
            fused = group.get("fused", False)
            dtype = torch.float64 if wide and not fused else torch.float32
            device = owned.master.device if fused else "cpu"
            self.torch.state[owned.master] = {"step": torch.zeros((), dtype=dtype, device=device)}
            for key in names:
                self.put_state(owned, key)

    def _store_first(self) -> None:
        """Put the states that an optimizer makes when it is built into records, where their pieces are in some."""
        of_bucket: dict[int, list[MasterPiece]] = {}
        for owned in self.pieces:
            if owned.records is not None and any(map(_is_flat, self.torch.state.get(owned.master, {}).values())):
                of_bucket.setdefault(owned.bucket.record, []).append(owned)
        for pieces in of_bucket.values():
            assert pieces[0].records is not None
            with pieces[0].records.opened(pieces[0].bucket) as fields:
                for owned in pieces:
                    states, start = self.torch.state[owned.master], owned.piece.offset - owned.bucket.start
                    for key in [key for key, value in states.items() if _is_flat(value)]:
                        fields[key][start : start + owned.master.numel()].copy_(states[key])
                        states[key] = absent(states[key])

    def put_state(self, owned: MasterPiece, key: str) -> None:
        """Give the torch optimizer the piece's view of a state, or what stands for one in a record."""
        state: Any = absent(owned.master)
        if key in self._coded:
            codes = self._part(owned, key, torch.uint8), self._part(owned, f"{key} scales", torch.float32, BLOCK)
            state = self.torch.stored(key, *codes, owned.master.numel())  # type: ignore[attr-defined]
        elif owned.records is None:
            state = self._part(owned, key, owned.master.dtype)
        self.torch.state[owned.master][key] = state

    def overwrite(self, owned: MasterPiece, key: str, values: Tensor) -> None:
        """Have the torch optimizer go on with a state's values: `state_view`, after others wrote into it."""
        self.put_state(owned, key)
        if key in self._coded:
            self.torch.state[owned.master][key].write(values)

    def state_view(self, owned: MasterPiece, key: str, dtype: torch.dtype) -> Tensor:
        """Return the piece's view of a state: in its unit's flat buffer, which is made on first use, or in its record.

        A record may be written while it is open (`in_batches`), else only read. A state that is stored in another form
        is returned as a copy: `overwrite` takes the copy back.
        """
        if key in self._coded:
            return cast(Tensor, self.torch.state[owned.master][key].read())
        if owned.records is not None:
            start = owned.piece.offset - owned.bucket.start
            return owned.records.view(owned.bucket, key)[start : start + owned.master.numel()]
        return self._part(owned, key, dtype)

    def _part(self, owned: MasterPiece, key: str, dtype: torch.dtype, block: int = 1) -> Tensor:
        """Return the piece's part of a flat buffer, which has one value for `block` elements."""
        span = self.span(owned.unit, key)
        assert span is not None
        if (owned.unit.name, key) not in self._flat:
            elements = (span.stop - span.start) // block
            self._flat[owned.unit.name, key] = self._arena.allocate(
                "optimizer", elements, Fraction(span.used) / block, dtype
            )
        start, whole = (owned.piece.offset - span.start) // block, BLOCK if dtype == torch.uint8 else 1
        count = -(-owned.master.numel() // (block * whole)) * whole
        return self._flat[owned.unit.name, key][start : start + count]

    def span(self, unit: Unit, key: str) -> Span | None:
        """Return the span of a state among a unit's elements that this rank updates; None where they have none."""
        if (unit.name, key) not in self._spans:
            self._spans[unit.name, key] = self._find_span(unit, key)
        return self._spans[unit.name, key]

    def _find_span(self, unit: Unit, key: str) -> Span | None:
        pieces, elements = unit.weights.update_pieces(unit.comm.rank), unit.weights.elements

        def has(slot: int) -> bool:
            names = self._state_names[unit.layout.slots[slot].group]
            return names is None or key in names or key not in self._known

        return span_of(pieces, has, elements, unit.weights.used)

    def flat_state(self, unit: Unit, key: str) -> Tensor | None:
        """Return a unit's flat buffer of a state, or None where this rank has none of it."""
        return self._flat.get((unit.name, key))

    def flat_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield all flat buffers, each behind the names of its unit and of what it has."""
        for (unit, key), flat in self._flat.items():
            yield unit, key, flat

    def states_of(self, owned: MasterPiece) -> dict[str, Any]:
        """Return a piece's optimizer states by name, tensors of its elements as they are stored, to be read."""
        states = dict(self.torch.state.get(owned.master, {}))
        states |= {key: states[key].read().cpu() for key in states.keys() & self._coded}
        if owned.records is not None:
            states |= {
                key: self.state_view(owned, key, value.dtype) for key, value in states.items() if _is_flat(value)
            }
        return states

    def in_batches(self) -> Iterator[Sequence[MasterPiece]]:
        """Yield all pieces, some at a time, whose masters and states may be written until the next are yielded."""
        if self.updates is None:
            yield self.pieces
            return
        for unit, buckets in self.updates.buckets.items():
            with unit.weights.place.opened(True):
                for each in buckets:
                    with each.buckets.opened(each.bucket):
                        yield each.pieces

    def adopt(self) -> None:
        """Move states that an optimizer made at its first step into flat buffers."""
        for owned in self.pieces:
            state = self.torch.state[owned.master]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    self._check_shape(owned, key, value)
                    view = self.state_view(owned, key, value.dtype)
                    if not same_memory(value, view):
                        state[key] = view.copy_(value)
        self._adopted = [(state, dict(state)) for state in self.torch.state.values()]

    def _check_shape(self, owned: MasterPiece, key: str, value: Tensor) -> None:
        if value.shape != owned.master.shape:
            raise ConfigError(
                f"{type(self.torch).__name__} keeps {key} {list(value.shape)} for a piece {list(owned.master.shape)} "
                f"of {owned.name}: checkpoints would lose what is no element's own. Use AdamW, SGD or another that "
                "treats every element by itself, or zero3d.optim.muon() or adamw8bit()."
            )

    def adopt_new(self) -> None:
        """Do so where the optimizer has made or replaced one since."""
        if not self._adopted or any(_differs(*states) for states in self._adopted):
            self.adopt()


def _count_in_groups(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def state_names(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the states as long as a piece that an optimizer has for a group; None where only its first step says."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return None if any(each["amsgrad"] for each in optimizer.param_groups) else MOMENTS
    names: tuple[str, ...] | None = getattr(optimizer, "state_names", lambda group: None)(group)
    return names


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _differs(state: dict[str, Any], known: dict[str, Any]) -> bool:
    """Say whether an optimizer has made or replaced a state since `known`."""
    return len(state) != len(known) or any(state.get(key) is not value for key, value in known.items())
