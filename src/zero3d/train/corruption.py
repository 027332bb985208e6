"""What to do after an alarm of health.replay: which checkpoints are beyond doubt, and what to type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zero3d.train.resume_hints import ANEW, ResumeHints

REPLACE = "Take that machine out of the run (zero3d doctor looks at it)"


def after_corruption(saved: Mapping[int, Path], clean: int | None, began: int, hints: ResumeHints) -> str:
    """Say where to go on from.

    saved  checkpoints by their applied steps
    clean  applied steps before the last replay in which nothing differed, in this session; None without one
    began  applied steps when this session began: what came before it is not doubted
    """
    sure = began if clean is None else clean
    good = [step for step in saved if step <= sure]
    doubtful = [saved[step].name for step in saved if step > sure]
    known = f"The last clean replay was in step {sure + 1}" if clean is not None else "No replay was clean before"
    doubt = f"; what was saved since may hold the fault: {', '.join(doubtful)}" if doubtful else ""
    if not good:
        nothing = "no checkpoint is as old as that" if saved else "nothing is saved"
        return f"{known}{doubt}; {nothing}. {REPLACE}, then {ANEW}."
    newest = saved[max(good)]
    return f"{known}{doubt}; {newest.name} is older. {REPLACE}, then go on from there: {hints.command(newest)}"
