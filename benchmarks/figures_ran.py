"""What has run where: features by one GPU, one node and two nodes, from result files alone; what has not run is empty.

results/gpu*.json     calls of gpu_check.py, recorded
results/node*.json    what cluster_check.py wrote on a node with --json, as it is
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from figures_gpu import FILES
from figures_measured import table
from recorded import RESULTS, load

HEAD = ("feature", "one GPU", "one node", "two nodes")


class Feature(NamedTuple):
    """A row. card: a part of gpu_check.py; node: a part of cluster_check.py, and how its cases begin."""

    text: str
    card: str = ""
    node: tuple[str, str] = ("", "")


FEATURES = (
    Feature("stages 0 to 3, with the losses of one process", "parity", ("axes", "stage ")),
    Feature("tensor parallelism", node=("axes", "tp 2")),
    Feature("pipelines", node=("axes", "pp 2")),
    Feature("sequences over ranks", "sequence", ("axes", "sp 2")),
    Feature("experts over ranks", node=("axes", "ep 2")),
    Feature("shards that are repeated", node=("axes", "shard ")),
    Feature("dp, tp and pp together", node=("axes", "dp 2 x tp 2 x pp 2")),
    Feature("mixtures in grouped products", "experts"),
    Feature("Muon, moments of 8 bits", "optimizers"),
    Feature("bases of nf4, int8 and fp8", "bases"),
    Feature("products in fp8", "fp8"),
    Feature("kernels of hybrids, packed", "hybrids"),
    Feature("states off the device, with its bits", "offload.bits"),
    Feature("weights streamed to inference", "weights"),
    Feature("transformers' Trainer, Accelerate", "loops"),
    Feature("`zero3d train`, export, resume", "train"),
    Feature("the largest model of the plan", "largest", ("largest.zero3d", "")),
    Feature("speed beside FSDP2", "turns.8k", ("largest.fsdp2", "")),
    Feature("speed over tp and pp", node=("largest.tp-pp", "")),
    Feature("bytes of communicators", node=("groups", "")),
    Feature("a gradient missing on one rank", node=("holes", "")),
    Feature("a stopped rank is named", node=("hangs", "")),
    Feature("a killed rank loses no bit", node=("kills", "")),
)


def on_cards() -> dict[str, str]:
    """Return what became of each part on one GPU when it ran last: its outcome, the card, date and commit."""
    found = {}
    for name in FILES:
        file = load(name)
        for run in file["runs"]:
            made = {"date": run.get("date", file["date"]), "commit": run.get("commit", file["commit"])}
            for part, result in run["result"]["parts"].items():
                if result["outcome"] in ("passed", "failed"):
                    found[part] = told(result["outcome"], run["result"]["card"], made)
    return found


def on_nodes() -> list[dict[str, Any]]:
    """Return the files of nodes with several GPUs, the oldest first."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("node*.json"))]
    return [file for file in files if file["device"] == "cuda"]


def on_node(files: list[dict[str, Any]], part: str, case: str) -> str:
    """Return what became of a part's cases of this beginning on a node when they ran last; "" where they have not."""
    cell = ""
    for file in files:
        result = file["parts"].get(part, {"ran": {}})
        cases = [name for name in result["ran"] if name.startswith(case)]
        if cases and result["outcome"] in ("passed", "failed", "crashed", "hung"):
            wrong = any(name.startswith(case) for name in result["failed"]) or result["outcome"] in ("crashed", "hung")
            cell = told("failed" if wrong else "passed", f"{file['ranks']} x {file['card']}", result["made"])
    return cell


def told(outcome: str, card: str, made: dict[str, str]) -> str:
    """Return a cell."""
    return f"{outcome}: {card.replace('NVIDIA ', '')}, {made['date']}, `{made['commit']}`"


def ran_where() -> str:
    """Return the table."""
    cards, nodes = on_cards(), on_nodes()
    rows = [
        [feature.text, cards.get(feature.card, ""), on_node(nodes, *feature.node) if feature.node[0] else "", ""]
        for feature in FEATURES
    ]
    return table(HEAD, rows)


RAN: dict[str, Callable[[], str]] = {"ran-where": ran_where}
