"""`zero3d train` as a user types it: workers of its own, checkpoint, export, and a run that goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - as all parts do: a part's limit is by how long it took to begin

from campaign.account import Account, Place

STEPS, MORE = 20, 30
LAST_LINES = 20


def train(place: Place, account: Account) -> None:
    """Train the demo, save and export; then go on to more steps from its checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "run"
        words = ["--ranks=1", f"output={output}", "evaluate.batches=1", "evaluate.prompt=null"]
        account.ran("shape", f"the demo's Llama, 1 rank, {STEPS} steps, then {MORE}")
        first = command(account, "train", [*words, f"--steps={STEPS}"])
        if first is None:
            return
        account.ran("first run", row(first), wrong(first, STEPS))
        more = command(account, "resume", [*words, f"--steps={MORE}", "--resume=auto", "checkpoint.verify=false"])
        if more is not None:
            account.ran("second run", row(more), wrong(more, MORE))


def command(account: Account, what: str, words: list[str]) -> dict[str, Any] | None:
    """Run the command line; its JSON, or None and the account says why."""
    line = [sys.executable, "-P", "-m", "zero3d.tools.cli.main", "train", *words, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    said = "\n".join(done.stderr.splitlines()[-LAST_LINES:])
    account.ran(what, {"exit_code": done.returncode, "said": said}, f"exit code {done.returncode}")
    return None


def row(found: dict[str, Any]) -> dict[str, Any]:
    """Return what of a run's figures is worth keeping."""
    kept = ("ranks", "steps", "step_seconds", "held_out_loss", "reloaded_loss", "peak_memory", "memory")
    return {key: found[key] for key in kept} | {"losses": [found["losses"][0], found["losses"][-1]]}


def wrong(found: dict[str, Any], steps: int) -> str:
    """Return what is wrong with a run that ended well."""
    if found["steps"] != steps:
        return f"{found['steps']} steps, {steps} were due"
    if not found["losses"][-1] < found["losses"][0]:
        return f"the loss went from {found['losses'][0]} to {found['losses'][-1]}"
    held_out, reloaded = found["held_out_loss"], found["reloaded_loss"]
    if reloaded is not None and abs(held_out - reloaded) > 1e-2 * abs(held_out):
        return f"held-out loss {held_out}, of the exported model {reloaded}"
    uneven = [line["consumer"] for line in found["memory"] if line["agrees"] is False]
    return f"memory is not the formula's: {', '.join(uneven)}" if uneven else ""
