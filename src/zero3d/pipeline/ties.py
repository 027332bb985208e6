"""Parameters that two model chunks hold: a tied embedding and head whose pipeline stages differ.

Each chunk has a copy under its own name. Their gradients are summed across pipeline stages (zero/model_group.py);
checkpoints, the norm and the planner count the parameter once, by its owner's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.chain import Chain
from zero3d.pipeline.schedules import Schedule
from zero3d.zero.model_group import Tied
from zero3d.zero.unit import Unit


class Tie(NamedTuple):
    """One parameter that two chunks hold, each a copy under its own name; `name` is the full model's.

    Their gradients have to be summed, and the parameter counted once in the norm and in checkpoints.
    """

    name: str
    chunk: int
    other_name: str
    other_chunk: int


def _chunk_of(name: str, chain: Chain, counts: Sequence[int]) -> int:
    """The chunk that a parameter of this name is on."""
    if name.startswith(chain.blocks + "."):
        index = int(name[len(chain.blocks) + 1 :].partition(".")[0])
        return next(chunk for chunk in range(len(counts)) if index < sum(counts[: chunk + 1]))
    return 0 if any(name.startswith(room + ".") for room in chain.before) else len(counts) - 1


def ties_and_copies(
    model: nn.Module, chain: Chain, counts: Sequence[int], chunk: int
) -> tuple[list[Tie], dict[nn.Module | Tensor, object]]:
    """Ties across chunks, and the copies that `chunk` gets of parameters which another chunk owns."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, {}).setdefault(_chunk_of(name, chain, counts), name)
    ties: list[Tie] = []
    own: dict[nn.Module | Tensor, object] = {}
    for p, places in names.items():
        owner, *others = places
        ties += [Tie(places[owner], owner, places[other], other) for other in others]
        if chunk in others:
            own[p] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    return ties, own


def names_of_copies(chunks: Mapping[int, nn.Module]) -> dict[str, str]:
    """Copies of tied parameters: the name of each on its chunk -> the name of its owner."""
    return {tie.other_name: tie.name for chunk in chunks.values() for tie in getattr(chunk, "tied", ())}


def find_ties(chunks: Mapping[int, nn.Module], units: Sequence[Unit], schedule: Schedule, ranks: int) -> list[Tied]:
    """The parameters of this rank that another pipeline stage holds, too. Raises ConfigError."""
    ties = {tie for chunk in chunks.values() for tie in getattr(chunk, "tied", ())}
    found = []
    for tie in sorted(ties):
        ends = [(tie.name, tie.chunk, tie.other_chunk), (tie.other_name, tie.other_chunk, tie.chunk)]
        here = {name: _unit_of(name, units) for name, chunk, _ in ends if chunk in chunks}
        for name, chunk, other in ends:
            if chunk in chunks:
                there = next((unit for key, unit in here.items() if key != name), None)
                found.append(Tied(here[name], schedule.rank_of(other, ranks), there, copy=name == tie.other_name))
    return found


def _unit_of(name: str, units: Sequence[Unit]) -> Unit:
    unit = next(unit for unit in units if any(slot.name == name for slot in unit.layout.slots))
    if len(unit.layout.slots) > 1:
        raise ConfigError(
            f"{name} is tied across pipeline stages and shares unit {unit.name!r} with {len(unit.layout.slots) - 1} "
            "other parameters: give it a module of its own, untie it, or pass pp=1."
        )
    return unit
