"""How far the planner is from published numbers: `python benchmarks/planner_accuracy.py --tables DIR [--json]`.

    DIR/*.csv -> planner_tables*.py -> points -> per set and kind: rows, mean, p90, worst error, and
        fits   OOM recall (of runs that ran out, those predicted to) and false alarms (of those that ran)
        time   per group of one model's configurations: Kendall's tau, and regret: how much slower than the best
               run the one is that the planner would have chosen

Any subset of files and rows will do. Rows with duplicate_of or exclude=1 are left out, unreadable ones counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from planner_tables import READERS, Point
from planner_tables_other import OTHER

SMALLEST_GROUP = 3  # configurations of one model, for a ranking to mean something


def read(folder: Path) -> tuple[list[Point], dict[str, int], list[str]]:
    """Points of all tables, rows skipped by set, and files without a reader."""
    points: list[Point] = []
    skipped: dict[str, int] = {}
    unknown = []
    for path in sorted(folder.glob("*.csv")):
        reader = {**READERS, **OTHER}.get(path.stem)
        if reader is None:
            unknown.append(path.name)
            continue
        for row in csv.DictReader(path.open(newline="")):
            if row.get("duplicate_of") or row.get("exclude", "") == "1":
                continue
            try:
                points += reader(row)
            except (LookupError, ValueError, TypeError):
                skipped[path.stem] = skipped.get(path.stem, 0) + 1
    return points, skipped, unknown


def errors(points: Sequence[Point]) -> dict[str, Any]:
    """Mean, 90th percentile and worst relative error, and whose it is."""
    listed = sorted((abs(p.predicted / p.actual - 1), p) for p in points)
    values = [value for value, _ in listed]
    worst = listed[-1][1]
    return {
        "rows": len(values),
        "mean": sum(values) / len(values),
        "p90": values[min(len(values) - 1, int(0.9 * len(values)))],
        "worst": values[-1],
        "bias": sum(p.predicted / p.actual - 1 for p in points) / len(points),
        "worst_row": worst.id,
        "worst_predicted": worst.predicted,
        "worst_actual": worst.actual,
    }


def labels(points: Sequence[Point]) -> dict[str, Any]:
    """Recall of runs that ran out of memory, and false alarms among those that did not."""
    out = [p for p in points if p.actual == 0]
    ran = [p for p in points if p.actual == 1]
    return {
        "rows": len(points),
        "out_of_memory": len(out),
        "recall": sum(p.predicted == 0 for p in out) / len(out) if out else None,
        "false_alarms": sum(p.predicted == 0 for p in ran) / len(ran) if ran else None,
        "missed": [p.id for p in out if p.predicted == 1],
        "alarmed": [p.id for p in ran if p.predicted == 0],
    }


def ranking(points: Sequence[Point]) -> dict[str, Any] | None:
    """Kendall's tau over pairs within groups (repeats apart), and the mean and worst regret of the groups."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.group:
            groups[point.group].append(point)
    kept = [group for group in groups.values() if len(group) >= SMALLEST_GROUP]
    if not kept:
        return None
    pairs = [pair for group in kept for pair in combinations(group, 2)]
    pairs = [(a, b) for a, b in pairs if a.actual != b.actual and a.predicted != b.predicted]
    agree = sum(_sign(a.predicted - b.predicted) * _sign(a.actual - b.actual) for a, b in pairs)
    regrets = [min(g, key=lambda p: p.predicted).actual / min(p.actual for p in g) - 1 for g in kept]
    return {
        "groups": len(kept),
        "tau": agree / len(pairs),
        "regret": sum(regrets) / len(regrets),
        "worst_regret": max(regrets),
    }


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def score(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One entry per set and kind."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        found[point.set, point.kind].append(point)
    scores = []
    for (name, kind), inside in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        entry: dict[str, Any] = {"set": name, "kind": kind}
        entry |= labels(inside) if kind == "fits" else errors(inside)
        if kind == "time" and (ranked := ranking(inside)):
            entry |= ranked
        scores.append(entry)
    return scores


def as_text(scores: Sequence[dict[str, Any]], skipped: dict[str, int], unknown: Sequence[str]) -> str:
    """The tables, and what was left out."""
    lines = [f"{'set':28} {'kind':8} {'rows':>4} {'mean':>6} {'p90':>6} {'worst':>6} {'bias':>7}  worst row"]
    for s in scores:
        if s["kind"] == "fits":
            recall, alarms = (f"{100 * s[k]:.0f} %" if s[k] is not None else "-" for k in ("recall", "false_alarms"))
            missed = f"; missed {', '.join(s['missed'])}" if s["missed"] else ""
            lines.append(
                f"{s['set']:28} {'fits':8} {s['rows']:4}  OOM recall {recall} of {s['out_of_memory']}, false alarms "
                f"{alarms}{missed}"
            )
            continue
        values = " ".join(f"{100 * s[k]:5.1f}%" for k in ("mean", "p90", "worst"))
        lines.append(
            f"{s['set']:28} {s['kind']:8} {s['rows']:4} {values} {100 * s['bias']:+6.1f}%  {s['worst_row']} "
            f"({s['worst_predicted']:.4g} for {s['worst_actual']:.4g})"
        )
        if "tau" in s:
            lines.append(
                f"{'':28} ranking  {s['groups']} models: Kendall tau {s['tau']:.2f}, regret {100 * s['regret']:.1f} % "
                f"mean, {100 * s['worst_regret']:.1f} % worst"
            )
    lines += [
        f"skipped in {name}: {count} rows (columns missing, or nothing to compare)" for name, count in skipped.items()
    ]
    lines += [f"no reader: {name}" for name in unknown]
    return "\n".join(lines)


def main() -> int:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, required=True, help="folder of CSV files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", action="store_true", help="print every row's prediction, too")
    arguments = parser.parse_args()
    points, skipped, unknown = read(arguments.tables)
    scores = score(points)
    if arguments.json:
        print(json.dumps({"scores": scores, "skipped": skipped, "unknown": unknown}, indent=2))
        return 0
    if arguments.rows:
        for p in points:
            off = 100 * (p.predicted / p.actual - 1) if p.actual else 0.0
            print(f"{p.set:22} {p.kind:8} {p.id:34} {p.predicted:10.4g} {p.actual:10.4g} {off:+7.1f}%")
    print(as_text(scores, skipped, unknown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
