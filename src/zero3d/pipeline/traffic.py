"""What a rank of a pipeline sends and gathers in a step: formulas over its schedule's action list. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zero3d.account.traffic import Moved
from zero3d.pipeline.actions import Action
from zero3d.zero.tokens import backward_gathers, forward_gathers, left_by


class ChunkUnits(NamedTuple):
    """The units of one model chunk, as `zero.tokens.token_order` takes them."""

    forward: Sequence[str]
    root: str | None = None
    no_backward: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Names of the units, each once."""
        return list(dict.fromkeys([*self.forward, *filter(None, [self.root])]))


def pipeline_gathers(actions: Iterable[Action], chunks: Mapping[int, ChunkUnits], release: str) -> Counter[str]:
    """Return gathers per unit in one rank's step at stage 3, from the actions it ran; nothing recomputed.

    One each where `release` is every_step, else per use:

    action   uses                                                      gathers of a unit in M micro-batches, at most
    -------  --------------------------------------------------------  ---------------------------------------------
    F        every unit                                                M
    B, I     every unit but embeddings, in reverse; I of chunk 0 none  M
    W        every unit: no hook tells which weights are read          M

    So 2M with whole backwards (gpipe, 1f1b, interleaved) and 3M with split ones (zero-bubble, zbv); embeddings M
    and 2M, chunk 0 2M in both: nothing enters it, so torch leaves its whole backward to W.

    Uses merge in one place: what a forward used last, and its root unit, stay gathered until the next F, or the
    end of the next backward, of whatever chunk this rank runs. If that backward is its own chunk's (of any
    micro-batch), it finds them gathered. So the last chunk under 1f1b (F0 B0 F1 B1 ...) gathers its head M times,
    under gpipe (F0 .. F3 B0 .. B3) 2M - 1 times.

    True from the second step of so many micro-batches on: one whose order differs from the step's before it
    may gather up to AHEAD units more, ahead of a use that does not come (zero/gathers.py).
    """
    met: Counter[tuple[int | None, str, int]] = Counter()  # the chunk whose last units are there, the action, its chunk
    there: int | None = None
    for kind, chunk, _ in actions:
        if kind == "I" and chunk == 0:
            continue
        met[there, kind, chunk] += 1
        there = chunk if kind == "F" else None
    gathers: Counter[str] = Counter()
    for (before, kind, chunk), times in met.items():
        held = set() if before is None else left_by(chunks[before].forward, chunks[before].root)
        gathers.update({unit: times * count for unit, count in _of_action(kind, chunks[chunk], held).items()})
    return Counter(dict.fromkeys(gathers, 1)) if release == "every_step" else gathers


def _of_action(kind: str, units: ChunkUnits, there: set[str]) -> Counter[str]:
    """Count the gathers of one action. there: units that the forward before it has left."""
    if kind == "F":  # which lets go of them first
        return forward_gathers(units.forward, units.root)
    if kind == "W":
        return Counter(unit for unit in units.names if unit not in there)
    return backward_gathers(units.forward, units.root, units.no_backward, there)


def pipeline_traffic(
    chunks: Sequence[int], micro_batches: int, cuts: Sequence[Sequence[tuple[int, int]]], facts: int = 0
) -> dict[tuple[str, str], Moved]:
    """Return the hidden states and gradients that a rank sends in one step, by (operation, "part NUMBER").

    chunks  this rank's; between neighbours on one rank nothing is sent
    cuts    tensors of one micro-batch from chunk i to chunk i+1, each as (elements, bytes of each): the hidden state,
            and router logits behind layers with routers if the loss needs them
    facts   integers of 8 bytes that go with them, forward alone
    """
    traffic: dict[tuple[str, str], Moved] = {}
    for chunk in chunks:
        for operation, cut, neighbour in (("send_forward", chunk, chunk + 1), ("send_backward", chunk - 1, chunk - 1)):
            if 0 <= cut < len(cuts) and neighbour not in chunks:
                elements = sum(numel for numel, _ in cuts[cut])
                size = sum(numel * itemsize for numel, itemsize in cuts[cut])
                moved = len(cuts[cut]), elements, size
                if facts and operation == "send_forward":
                    moved = moved[0] + 1, elements + facts, size + 8 * facts
                traffic[operation, f"part {chunk}"] = Moved(*moved).times(micro_batches)
    return traffic
