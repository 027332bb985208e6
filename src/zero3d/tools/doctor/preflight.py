"""Names the findings for which `zero3d doctor --preflight` stops a batch job before it trains.

Only findings that say by themselves that the run would fail or hang. A probe that has not answered in its time may
have been kept waiting by a busy machine, and so may a host that has not told what it found: these are shown, and stop
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero3d.tools.doctor.finding import BROKEN, UNANSWERED, Finding

EXAMINED = ("gpus", "pinned", "p2p", "nccl", "nics", "hcas", "shm", "limits", "space")  # probes of each host
BETWEEN = ("ranks", "alike", "between", "all-reduce between", "links between")  # rows of all hosts together


def stops(findings: Mapping[str, Finding]) -> list[str]:
    """Return the names of those that stop a job."""
    return [
        name
        for name, finding in findings.items()
        if finding.verdict == BROKEN
        and name.partition(" @ ")[0] in (*EXAMINED, *BETWEEN)
        and not finding.figures.get(UNANSWERED)
    ]
