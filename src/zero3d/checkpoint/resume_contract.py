"""Whether a run that goes on from a checkpoint has the bits of one that was never interrupted, and if not, why.

                  plain                                       exact on both sides
    the same      mesh, precision, dtype on the wire,         tp, pp, micro-batches per step over all ranks,
                  algorithm, torch, kernels, threads;         precision, dtype on the wire, torch, kernels,
                  with several micro-batches a step           threads
                  the moment of reduction
    may differ    stage                                       dp, stage, moment of reduction, algorithm

The batches must be the same ones, in micro-batches of the same size: that is not looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BITWISE = "bitwise"
ALWAYS = {"tp": "matrix products have other shapes", "pp": "other sums are made on one rank",
          "precision": "", "wire": "gradients are rounded otherwise on their way",
          "torch": "its kernels may sum in other orders", "kernels": "they sum in other orders",
          "threads": "sums are cut among them"}  # fmt: skip
PLAIN = {"dp": "other sums over ranks; exact=True would not mind", "algorithm": ""}
EXACT = {"leaves": "micro-batches of a step over all ranks"}
FREE = ("dp", "stage", "reduce")  # named where they differ and change no bit


def promise(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """One line that begins with "bitwise" or "not bitwise". Both: `save.Parts.about`."""
    was, is_ = (facts.get("leaves") is not None for facts in (saved, now))
    if was != is_:
        return f"not bitwise: exact was {was} when it was saved, and is {is_} now"
    looked_at = ALWAYS | (EXACT if was else PLAIN | dict(_moments(saved, now)))
    changed = [_change(name, saved, now, why) for name, why in looked_at.items() if saved.get(name) != now[name]]
    if changed:
        return f"not bitwise: {'; '.join(changed)}"
    moved = [_change(name, saved, now) for name in FREE if saved.get(name) != now[name]]
    told = "".join(f", {each}" for each in moved)
    return f"{BITWISE}: as if it had not been interrupted{told}, in batches and micro-batches of the same size"


def _moments(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """With one micro-batch a step there is one moment of reduction only. Older checkpoints do not say how many."""
    counts = saved.get("accumulate"), now["accumulate"]
    if counts != (1, 1):
        yield "reduce", f"{counts[0] or 'several'} micro-batches a step are summed in another order"


def _change(name: str, saved: Mapping[str, Any], now: Mapping[str, Any], why: str = "") -> str:
    return f"{name} {saved.get(name, 'unknown')} -> {now[name]}{f' ({why})' if why else ''}"
