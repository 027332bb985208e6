"""Which links the devices of a node use: peer access, unless a sum over all of them fails with it and not without."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch  # noqa: F401 - as all parts do: a part's limit is by how long it took to begin
from campaign.account import Account, Place

from zero3d.tools.doctor.devices import outcome_of

P2P = "NCCL_P2P_DISABLE"  # what is found for it is the environment of all later parts
CPU_PROBES = ["--only", "allreduce"]
SECONDS, CPU_SECONDS = 60.0, 20.0  # for a sum over all devices


def links(place: Place, account: Account) -> None:
    """Sum over all devices with peer access and without it, decide about it, and let the doctor look at the rest."""
    backend, seconds = ("gloo", CPU_SECONDS) if place.on_cpu else ("nccl", SECONDS)
    # What is slow for the first time, such as devices that wake up, must not look like peer access that hangs.
    ways = {"no peer access": True, "peer access": False}
    found = {name: outcome_of(backend, place.ranks, seconds, disable) for name, disable in ways.items()}
    for name, outcome in found.items():
        account.ran(f"sum with {name}", outcome.as_dict())
    disable = decide(found["peer access"].fault, found["no peer access"].fault)
    account.ran(P2P, disable, "" if disable is not None else found["no peer access"].text)
    account.ran("doctor", *examined(CPU_PROBES if place.on_cpu else []))


def decide(with_peers: str, without: str) -> str | None:
    """Return the variable's value for later parts: "" to leave it alone; None where sums fail in both ways."""
    if not with_peers:
        return ""
    return None if without else "1"


def examined(words: list[str]) -> tuple[dict[str, Any], str]:
    """Return the doctor's verdict on each probe, and what is broken. words: of its command line."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zero3d.tools.cli.main", "doctor", "--json", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    findings = json.loads(done.stdout.splitlines()[-1])["findings"]
    broken = [f"{each['name']}: {each['text']}" for each in findings if each["verdict"] == "broken"]
    return {each["name"]: f"{each['verdict']}: {each['text']}" for each in findings}, "; ".join(broken)
