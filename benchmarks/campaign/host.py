"""What a step costs the host: what it hands to the device, and where it waits for it.

syncs  on a card: torch's warnings of operations that synchronise, by line
step   anywhere: dispatches and waits of one `step()`, on a stand-in accelerator whose kernels are the CPU's
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from campaign.account import Account, Place
from campaign.loopback import Loopback
from campaign.training import MIDDLE, STAGES, engine_of, own_batch, run_of

WARM_UP = 2  # steps: orders are recorded, states are made
MOST_DISPATCHES, MOST_WAITS = 40, 1  # of a step, collectives among them
WAITED = "called a synchronizing"  # in torch's warning of an operation
READER = "arena.py"  # the file of `Arena.on_host`, the one place that waits for the device
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


def step(place: Place, account: Account) -> None:
    """Count the third `step()` of a 32-block Llama at stage 3, in bf16 and with clipping, as one of 8 alike ranks."""
    from instruments import accelerator, groups, host_traffic
    from instruments.dispatches import Dispatches
    from instruments.step_syncs import Options, engine_of as engine_on

    options = Options(layers=32, dp=8, stage=3)
    account.ran("shape", f"Llama of {options.layers} blocks, hidden {options.hidden}, vocabulary {options.vocab}")
    device = accelerator.register()
    with groups.alike(options.dp, device=accelerator.NAME), host_traffic.counted() as traffic:
        engine = engine_on(options, device)
        tokens = torch.randint(0, options.vocab, (2, 16)).to(device)
        for number in range(WARM_UP + 1):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            traffic.clear()
            engine.traffic.reset()
            dispatches = Dispatches()
            with dispatches if number == WARM_UP else nullcontext():
                engine.step()
    collectives = sum(entry.calls for entry in engine.traffic)
    total, waits = dispatches.total + collectives, sum(traffic.waits.values())
    account.ran("dispatches", dict(dispatches.by_name.most_common()), over("dispatches", total, MOST_DISPATCHES))
    account.ran("collectives", collectives)
    lines = {f"{what}, {line}": count for (what, line), count in traffic.waits.most_common()}
    account.ran("waits", lines, over("waits", waits, MOST_WAITS))
    account.headline("step_dispatches", total)
    account.headline("step_syncs", waits)


def over(what: str, found: int, most: int) -> str:
    """Return what is wrong with a count that has a budget."""
    return f"{found} {what} in a step, at most {most} are allowed" if found > most else ""


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count, inside, warnings of operations that synchronise by the line of zero3d, or else of torch, that called."""
    lines: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if WAITED in str(message):
            lines[caller()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")  # warns of itself, too: it may miss synchronizing operations
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")


def caller() -> str:
    """Return the innermost line of zero3d on the stack; without one, that which called torch."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename not in (__file__, warnings.__file__)]
    ours = [frame for frame in frames if frame.filename.startswith(SOURCES)]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
