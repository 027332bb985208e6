"""Whether a run that goes on from a checkpoint has the bits of one that was never interrupted, and if not, why.

                  plain                                       exact on both sides
    the same      mesh, stage, moment of reduction,           tp, pp, micro-batches per step over all ranks,
                  precision, algorithm, torch, kernels,       precision, torch, kernels, threads
                  threads
    may differ    -                                           dp, stage, moment of reduction, algorithm

The batches must be the same ones, in micro-batches of the same size: that is not looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BITWISE = "bitwise"
ALWAYS = {"tp": "matrix products have other shapes", "pp": "other sums are made on one rank",
          "precision": "", "torch": "its kernels may sum in other orders", "kernels": "they sum in other orders",
          "threads": "sums are cut among them"}  # fmt: skip
PLAIN = {"dp": "other sums over ranks; exact=True would not mind", "stage": "", "reduce": "", "algorithm": ""}
EXACT = {"leaves": "micro-batches of a step over all ranks"}


def promise(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """One line that begins with "bitwise" or "not bitwise". Both: `checkpoint.Parts.about`."""
    was, is_ = (facts.get("leaves") is not None for facts in (saved, now))
    if was != is_:
        return f"not bitwise: exact was {was} when it was saved, and is {is_} now"
    looked_at = ALWAYS | (EXACT if was else PLAIN)
    changed = [
        f"{name} {saved.get(name, 'unknown')} -> {now[name]}{f' ({why})' if why else ''}"
        for name, why in looked_at.items()
        if saved.get(name) != now[name]
    ]
    if changed:
        return f"not bitwise: {'; '.join(changed)}"
    moved = f", dp {saved['dp']} -> {now['dp']}" if saved["dp"] != now["dp"] else ""
    return f"{BITWISE}: as if it had not been interrupted{moved}, in batches and micro-batches of the same size"
