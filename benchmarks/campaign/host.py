"""What a step asks of the host: operations that wait for the device."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from campaign.account import Account, Place
from campaign.loopback import Loopback
from campaign.training import MIDDLE, STAGES, engine_of, own_batch, run_of

WARM_UP = 2  # steps: orders are recorded, states are made
READER = "arena.py"  # the file of `host_value`, the one place that reads the device
SOURCES = str(Path(sys.modules["zero3d"].__file__ or "").parent)


def syncs(place: Place, account: Account) -> None:
    """Warn of every operation that synchronises in the third step, by line; one read at the boundary may."""
    if place.on_cpu:
        account.skipped("warnings by line", "a CPU has nothing to wait for; part `step` counts them on a stand-in")
        return
    run = run_of(place, account, MIDDLE._replace(precision="bf16"))
    mesh = Loopback(place.device)
    for stage in STAGES:
        engine = engine_of(mesh, run, stage)
        for step in range(WARM_UP):
            engine.backward(engine(*own_batch(mesh.device, run, step)))
            engine.step()
        tokens = own_batch(mesh.device, run, WARM_UP)
        torch.cuda.synchronize(mesh.device)
        with waits() as forward:
            loss = engine(*tokens)
        with waits() as backward:
            engine.backward(loss)
        with waits() as boundary:
            engine.step()
        found = {"forward": forward, "backward": backward, "step": boundary}
        account.ran(f"stage {stage}", {phase: dict(lines) for phase, lines in found.items()}, unwanted(found))


def unwanted(found: dict[str, Counter[str]]) -> str:
    """Return which waits should not be: all but one read of the device at the boundary."""
    lines = [f"{phase}: {line}" for phase in ("forward", "backward") for line in found[phase]]
    lines += [f"step: {line}" for line in found["step"] if READER not in line]
    lines += [f"step: {count} reads" for line, count in found["step"].items() if READER in line and count > 1]
    return "; ".join(lines)


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count, inside, warnings of operations that synchronise by the line of zero3d, or else of torch, that called."""
    lines: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            lines[caller()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")


def caller() -> str:
    """Return the innermost line of zero3d on the stack; without one, that which called torch."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    ours = [frame for frame in frames if frame.filename.startswith(SOURCES)]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
