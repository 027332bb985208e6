"""Results of all parts: one JSON file that is valid at any moment, and a table.

torch, cuda, device, card, cpus    where they were found; a run that resumes must have the same
step_dispatches, step_syncs        what one optimizer step costs the host (`host.step`)
parts                              by name: outcome, seconds, limit_s, ran, skipped, failed, why, said
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from campaign.account import write_json
from campaign.process import Result

HEADLINES = ("step_dispatches", "step_syncs")
STEPS = "tokens a step"  # how figures of steps end
OFFLOAD_GOAL, LOSS_GOAL = 0.92, 5e-3
COMPARED = ("host", "device", "gradients", "params")  # not what is recomputed, or read from a disk of any speed
HOLD = ("passed", "skipped")
FINAL = (*HOLD, "failed")  # outcomes that are not tried again


class Record:
    """Owns the results of a campaign and their file, if it has one."""

    def __init__(self, path: Path | None, machine: dict[str, Any], resume: bool) -> None:
        """Begin anew, or go on from the file. Raises ValueError if that is no campaign of this machine."""
        self._path, self._machine = path, machine
        self.parts: dict[str, Result] = {}
        if resume and path is not None and path.exists():
            self.parts = read(path, machine)
        self._save()

    def put(self, name: str, result: Result) -> None:
        """Set a part's result, so far or in the end."""
        self.parts[name] = result
        self._save()

    def finished(self, name: str) -> bool:
        """Return whether a part has ended by itself."""
        return name in self.parts and self.parts[name]["outcome"] in FINAL

    def holds(self, names: Iterable[str]) -> bool:
        """Return whether all these parts ended, and none found anything wrong."""
        return all(name in self.parts and self.parts[name]["outcome"] in HOLD for name in names)

    def _save(self) -> None:
        if self._path is None:
            return
        headlines: dict[str, int | None] = dict.fromkeys(HEADLINES)
        for result in self.parts.values():
            headlines |= result.get("headlines", {})
        write_json(self._path, {**self._machine, **headlines, "parts": self.parts})

    def goals(self) -> str:
        """Return a line for every figure that has a goal; empty without any."""
        found = [(what, goal) for result in self.parts.values() for what, goal in result.get("goals", {}).items()]
        found += across(self.parts)
        if not found:
            return ""
        width = max(len(what) for what, _ in found)
        heading = f"{'goal':{width}}  {'due':>6}  {'found':>6}"
        rows = [
            f"{what:{width}}  {g['due']:6g}  {g['found']:6.3f}{'' if g['met'] else '  missed'}" for what, g in found
        ]
        return "\n".join([heading, *rows])

    def table(self) -> str:
        """Return a line for every part, and one for whatever is wrong with it."""
        rows = [("part", "outcome", "seconds", "limit", "ran", "skipped")]
        notes: dict[int, list[str]] = {}
        for name, result in self.parts.items():
            seconds, limit = (f"{result[key]:.0f}" if key in result else "" for key in ("seconds", "limit_s"))
            rows.append((name, result["outcome"], seconds, limit, str(len(result["ran"])), str(len(result["skipped"]))))
            wrong = [f"{what}: {why}" for what, why in result["failed"].items()]
            notes[len(rows) - 1] = [result["why"], *wrong] if "why" in result else wrong
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = []
        for index, row in enumerate(rows):
            left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines += ["  ".join([*left, *right]), *(f"    {note}" for note in notes.get(index, []))]
        return "\n".join(lines)


def across(parts: Mapping[str, Result]) -> list[tuple[str, dict[str, Any]]]:
    """Return goals of figures from several parts: speed and losses of every way to offload beside `resident`."""
    found: list[tuple[str, dict[str, Any]]] = []
    resident = parts.get("offload.resident", {}).get("ran", {})
    for name, result in parts.items():
        if not name.startswith("offload.") or name == "offload.resident":
            continue
        both = {what: (row, result["ran"][what]) for what, row in resident.items() if what in result["ran"]}
        steps = {what: pair for what, pair in both.items() if what.endswith(STEPS)}
        apart = [
            abs(a / b - 1) for one, other in steps.values() for a, b in zip(other["losses"], one["losses"], strict=True)
        ]
        if apart:
            goal = {"due": LOSS_GOAL, "found": max(apart), "met": max(apart) <= LOSS_GOAL}
            found.append((f"{name}: losses / resident, apart", goal))
        for what, (one, other) in steps.items():
            if name.partition(".")[2] in COMPARED and one["micro_batches"] > 1:  # else there is little to hide behind
                ratio = other["tokens_per_s"] / one["tokens_per_s"]
                goal = {"due": OFFLOAD_GOAL, "found": ratio, "met": ratio >= OFFLOAD_GOAL}
                found.append((f"{name}, {what}: tokens/s / resident", goal))
    return found


def read(path: Path, machine: dict[str, Any]) -> dict[str, Result]:
    """Return the parts of an earlier call on the same machine. Raises ValueError."""
    try:
        earlier = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--resume: {path} is not JSON ({error}): give the file of an earlier call") from error
    if not isinstance(earlier, dict) or not isinstance(earlier.get("parts"), dict):
        raise ValueError(f"--resume: {path} has no parts: give the file of an earlier call")
    for key, value in machine.items():
        if earlier.get(key) != value:
            raise ValueError(
                f"--resume: {key} is {value!r} here and {earlier.get(key)!r} in {path}: parts of two machines make no "
                "campaign; leave --resume out, or give another file"
            )
    return {name: result for name, result in earlier["parts"].items() if result["outcome"] != "running"}
