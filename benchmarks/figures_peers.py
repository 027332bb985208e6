"""Tables of peers' own test suites, from results/peer-suites.json: counts, and what does not apply by reason."""

from __future__ import annotations

from collections.abc import Callable

from figures_measured import results, table

WHOSE = {
    "fsdp2": "FSDP2's contracts", "transformers": "transformers' Trainer", "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed's schedules", "trl": "TRL",
}  # fmt: skip


def suites() -> str:
    """Counts of each suite."""
    rows = [
        [
            WHOSE[run["suite"]],
            run["library"].replace("==", " "),
            str(run["pass"] + run["fail"] + run["not run"]),
            str(run["pass"]),
            str(run["fail"] + run["not run"] + run["unlisted"]),
            str(run["not applicable"]),
        ]
        for run in results("peer-suites")
    ]
    return table(["suite", "with", "applicable", "pass", "fail", "not applicable"], rows)


def reasons() -> str:
    """Why tests are not applicable, and how many."""
    rows = [
        [WHOSE[run["suite"]], "; ".join(f"{reason} ({count})" for reason, count in run["reasons"].items())]
        for run in results("peer-suites")
    ]
    return table(["suite", "not applicable, and how many"], rows)


PEERS: dict[str, Callable[[], str]] = {"peer-suites": suites, "peer-suites-reasons": reasons}
