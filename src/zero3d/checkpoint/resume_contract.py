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


def resume_guarantee(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Return one line that begins with "bitwise" or "not bitwise". Both arguments: `state.EngineState.about`."""
    was, is_ = (about.get("leaves") is not None for about in (saved, live))
    if was != is_:
        return f"not bitwise: exact was {was} when it was saved, and is {is_} now"
    compared = ALWAYS | (EXACT if was else PLAIN | dict(_moments(saved, live)))
    changed = [_change(name, saved, live, why) for name, why in compared.items() if saved.get(name) != live[name]]
    if changed:
        return f"not bitwise: {'; '.join(changed)}"
    moved = [_change(name, saved, live) for name in FREE if saved.get(name) != live[name]]
    changes = "".join(f", {change}" for change in moved)
    return f"{BITWISE}: as if it had not been interrupted{changes}, in batches and micro-batches of the same size"


def _moments(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the moment of reduction and why it matters: with one micro-batch a step there is one moment only.

    Older checkpoints do not say how many there were.
    """
    counts = saved.get("accumulate"), live["accumulate"]
    if counts != (1, 1):
        yield "reduce", f"{counts[0] or 'several'} micro-batches a step are summed in another order"


def _change(name: str, saved: Mapping[str, Any], live: Mapping[str, Any], why: str = "") -> str:
    return f"{name} {saved.get(name, 'unknown')} -> {live[name]}{f' ({why})' if why else ''}"
