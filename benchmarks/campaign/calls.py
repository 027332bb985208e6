"""One call of a campaign: its parts, one after the other, while the call lasts.

A part that fails, hangs or crashes is reported and the next one runs. What the end of the call cuts short is not run,
and a call with --resume runs it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from campaign import missing
from campaign.account import Place
from campaign.process import Result, run_part
from campaign.record import Record

LEAST_S = 5.0  # a part is not begun with less


class Part(NamedTuple):
    """A row of the campaign.

    work       MODULE:FUNCTION, called with the place and the account
    limit_s    on the card, from the start of its process, without its share of --minutes
    planned_s  what it should take there
    why        the arithmetic of that
    timed      it measures for its share of --minutes
    needs      modules beside `campaign.NEEDS`, without which it is skipped
    on_host    it needs no card, and sees none
    """

    name: str
    work: str
    limit_s: float
    planned_s: float
    why: str
    timed: bool = False
    on_host: bool = False
    needs: tuple[str, ...] = ()


class Call(NamedTuple):
    """When a call began (`time.monotonic`), how many seconds of a quiet machine it lasts, and whether it goes on."""

    begun: float
    lasts_s: float
    resume: bool


def run_all(
    wanted: Sequence[Part],
    places: Mapping[str, Place],
    record: Record,
    call: Call,
    told: Callable[[str, Result], None] = lambda name, result: None,
) -> int:
    """Run parts until the call is over or stopped, and print the table; 0 where all hold, 1 where some do not.

    told  is given every part's result, also those of an earlier call
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        _run_parts(wanted, places, record, call, told)
    except KeyboardInterrupt:
        print("stopped; --resume runs what is left", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
        print(record.table(), record.goals(), sep="\n\n", flush=True)
    return 0 if record.holds(part.name for part in wanted) else 1


def _run_parts(
    wanted: Sequence[Part], places: Mapping[str, Place], record: Record, call: Call, told: Callable[[str, Result], None]
) -> None:
    slow = 1.0  # so many times slower than a quiet machine
    for part in wanted:
        if call.resume and record.finished(part.name):
            told(part.name, record.parts[part.name])
            continue
        if absent := missing(part.needs):
            why = f"needs {', '.join(absent)}: pip install {' '.join(absent)}"
            record.put(part.name, {"outcome": "skipped", "ran": {}, "skipped": {"all of it": why}, "failed": {}})
            continue
        left = call.lasts_s - (time.monotonic() - call.begun) / slow  # seconds of a quiet machine
        if left < LEAST_S:
            record.put(part.name, not_run("the call's time was up: --resume runs it"))
            continue
        whole = places[part.name]
        place = replace(whole, limit_s=min(whole.limit_s, left))
        result = run_part(part.work, place, lambda result, name=part.name: record.put(name, result))  # type: ignore[misc]
        slow = max(slow, result["slow"])
        if result["outcome"] == "hung" and place.limit_s < whole.limit_s:
            result |= {"outcome": "not run", "why": "the call's time was up while it ran: --resume runs it"}
            record.put(part.name, result)
        told(part.name, result)
        report(part, place, result)


def not_run(why: str) -> Result:
    """Return the result of a part that was not begun."""
    return {"outcome": "not run", "why": why, "ran": {}, "skipped": {}, "failed": {}}


def report(part: Part, place: Place, result: Result) -> None:
    """Print one part's result."""
    planned = part.planned_s + place.seconds
    print(f"{result['outcome']}  {part.name}  ({result['seconds']:.1f} s, {planned:g} planned on a card)")
    for what, found in result["ran"].items():
        print(f"    {what}: {found}")
    for what, why in result["skipped"].items():
        print(f"    skipped {what}: {why}")
    for line in result.get("said", []):
        print(f"    | {line}")
    sys.stdout.flush()


def machine(device: str) -> dict[str, Any]:
    """Return what figures depend on."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": device}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {
            "card": card.name,
            "card_bytes": card.total_memory,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found | {"cpus": os.cpu_count()}
