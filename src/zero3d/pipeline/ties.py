"""Parameters that two model chunks hold: a tied embedding and head, first and last in a pipeline.

    ties_and_copies    of a model to be cut: the parameters tied across chunks, and a chunk's copies of them
    names_of_copies    of a rank's chunks: the names of copies, each with its owner's name
    find_ties          of a rank's units: the tied ones, each with the stage to sum gradients with

The first chunk that names a parameter owns it. Copies get the same gradients as their owner (zero/model_group.py
sums them); the norm and checkpoints count the parameter once, by its owner's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from zero3d.models.chain import Chain
from zero3d.pipeline.schedules import Schedule
from zero3d.zero.model_group import Tied
from zero3d.zero.unit import Unit


class Tie(NamedTuple):
    """One parameter that two chunks hold: `chunk` owns it as `name`, `other_chunk` has a copy as `other_name`."""

    name: str
    chunk: int
    other_name: str
    other_chunk: int


def _chunk_of(name: str, chain: Chain, counts: Sequence[int]) -> int:
    if name.startswith(chain.blocks + "."):
        index = int(name[len(chain.blocks) + 1 :].partition(".")[0])
        return next(chunk for chunk in range(len(counts)) if index < sum(counts[: chunk + 1]))
    return 0 if chain.is_before(name) else len(counts) - 1


def ties_and_copies(
    model: nn.Module, chain: Chain, counts: Sequence[int], chunk: int
) -> tuple[list[Tie], dict[nn.Module | Tensor, object]]:
    """Return all ties across chunks, and the copies that `chunk` gets of parameters which another chunk owns."""
    names: dict[nn.Parameter, dict[int, str]] = {}  # of a parameter on each chunk that has it, the owner first
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, {}).setdefault(_chunk_of(name, chain, counts), name)
    ties: list[Tie] = []
    copies: dict[nn.Module | Tensor, object] = {}
    for p, by_chunk in names.items():
        owner, *others = by_chunk
        ties += [Tie(by_chunk[owner], owner, by_chunk[other], other) for other in others]
        if chunk in others:
            copies[p] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    return ties, copies


def names_of_copies(chunks: Mapping[int, nn.Module]) -> dict[str, str]:
    """Return the name of every copy of a tied parameter -> the name of its owner."""
    return {tie.other_name: tie.name for chunk in chunks.values() for tie in getattr(chunk, "tied", ())}


def find_ties(chunks: Mapping[int, nn.Module], units: Sequence[Unit], schedule: Schedule, ranks: int) -> list[Tied]:
    """Return the units of this rank whose parameter another chunk holds, too."""
    ties = {tie for chunk in chunks.values() for tie in getattr(chunk, "tied", ())}
    tied = []
    for tie in sorted(ties):
        ends = [(tie.name, tie.chunk, tie.other_chunk), (tie.other_name, tie.other_chunk, tie.chunk)]
        local = {name: _unit_of(name, units) for name, chunk, _ in ends if chunk in chunks}
        for name, chunk, other in ends:
            if chunk in chunks:
                local_twin = next((unit for key, unit in local.items() if key != name), None)
                tied.append(Tied(local[name], schedule.rank_of(other, ranks), local_twin, copy=name == tie.other_name))
    return tied


def _unit_of(name: str, units: Sequence[Unit]) -> Unit:
    """Return the unit of a tied parameter, which has no other (`models.blocks.find_units`)."""
    unit = next(unit for unit in units if any(slot.name == name for slot in unit.layout.slots))
    assert len(unit.layout.slots) == 1
    return unit
