"""How far the planner is from published numbers: `python benchmarks/planner_accuracy.py --tables DIR [--json]`.

    DIR/*.csv, published/*.csv -> planner_tables*.py -> points -> per set and kind: rows, mean, p90, worst error, and
        fits   OOM recall (of runs that ran out, those refused or marked), false alarms (of those that ran, those
               refused), and the share of these that is marked: planned to fit without the margin of their kind of run
        time   per group of one model's configurations: Kendall's tau of pairs that differ by more than repeats do,
               and regret: how much slower than the best run the one is that the planner would have chosen

First stand the errors of constants that saw no row of the set (planner_left_out.py), which are what to expect of a
source that nobody has fitted; then those of the planner's own. Any subset of files and rows will do. Rows with
duplicate_of or exclude=1 are left out, unreadable ones counted, those that say too little of their run listed.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from planner_constants import Planner
from planner_left_out import accounts, fitted_on, without
from planner_ranges import apart_of, margins_of, narrowed, pairs_of, repeats_of, spread_of
from planner_tables import READERS, Point, Row, Unknown, with_settings
from planner_tables_adapters import ADAPTERS
from planner_tables_other import OTHER
from planner_tables_recent import RECENT

from zero3d.tools.plan.constants import Key
from zero3d.tools.plan.margin import margin_of_kind

SMALLEST_GROUP = 3  # configurations of one model, for a ranking to mean something
PUBLISHED = Path(__file__).parent / "published"


class Tables:
    """Points of the rows of folders' files.

    unknown  files without a reader; skipped: by file, how many rows none could read
    untold   by row, what its source does not tell of its run
    """

    def __init__(self, *folders: Path) -> None:
        readers = {**READERS, **OTHER, **RECENT, **ADAPTERS}
        files = sorted(path for folder in folders for path in folder.glob("*.csv"))
        self.unknown = [path.name for path in files if path.stem not in readers]
        self.readers = {path.stem: readers[path.stem] for path in files if path.stem in readers}
        self.rows = {path.stem: list(_rows(path)) for path in files if path.stem in readers}
        self.skipped: dict[str, int] = {}
        self.untold: dict[str, str] = {}
        planner = Planner()
        by_file = {stem: self._of_file(stem, planner, self.skipped) for stem in self.rows}
        self.cards = sorted(planner.cards)
        self.points = [point for points in by_file.values() for point in points]
        self._files: dict[str, set[str]] = defaultdict(set)
        for stem, points in by_file.items():
            for point in points:
                self._files[point.set].add(stem)

    def predict(self, planner: Planner, sets: Iterable[str]) -> list[Point]:
        """Return the points of some sets, those of them that are here."""
        wanted = set(sets)
        stems = {stem for name in wanted if name in self._files for stem in self._files[name]}
        return [p for stem in sorted(stems) for p in self._of_file(stem, planner, {}) if p.set in wanted]

    def _of_file(self, stem: str, planner: Planner, skipped: dict[str, int]) -> list[Point]:
        points: list[Point] = []
        for row in self.rows[stem]:
            try:
                points += [with_settings(row, point) for point in self.readers[stem](row, planner)]
            except Unknown as reason:
                self.untold[row["id"]] = str(reason)
            except (LookupError, ValueError, TypeError):
                skipped[stem] = skipped.get(stem, 0) + 1
        return points

    def counts(self) -> dict[str, int]:
        """Count the rows: read, skipped and unknown."""
        skipped, untold = sum(self.skipped.values()), len(self.untold)
        return {"read": sum(map(len, self.rows.values())) - skipped - untold, "skipped": skipped, "unknown": untold}


def _rows(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        yield from (r for r in csv.DictReader(file) if not r.get("duplicate_of") and r.get("exclude", "") != "1")


def errors(points: Sequence[Point]) -> dict[str, Any]:
    """Return mean, 90th percentile and worst relative error, and whose it is."""
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
    """Return the recall of runs that ran out of memory, false alarms among those that did not, and those marked.

    A plan above its card is refused. One that fits without the margin of its kind of run is marked: a run out of memory
    that was marked is found, and one that ran is no false alarm.
    """
    out, ran = ([p for p in points if p.actual == actual] for actual in (0, 1))
    refused = {p.id for p in points if p.predicted > 1}
    marked = {p.id for p in points if p.predicted * (1 + margin_of_kind(p.run).share) > 1} - refused
    found: dict[str, Any] = {"rows": len(points), "out_of_memory": len(out)}
    found["recall"] = sum(p.id in refused | marked for p in out) / len(out) if out else None
    found["false_alarms"] = sum(p.id in refused for p in ran) / len(ran) if ran else None
    found["marked"] = sum(p.id in marked for p in ran) / len(ran) if ran else None
    found["missed"] = [p.id for p in out if p.id not in refused | marked]
    found["alarmed"] = [p.id for p in ran if p.id in refused]
    return found


def ranking(points: Sequence[Point]) -> dict[str, Any] | None:
    """Return the mean of the groups' Kendall's tau, and their mean and worst regret.

    tau counts the pairs whose seconds differ by more than those of one configuration that ran several times do
    (repeats), plain_tau all pairs; None where no pair of any group differs. A pair of equal predictions adds nothing to
    the sum, and counts in the number of pairs.
    """
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.group:
            groups[point.group].append(point)
    kept = [group for group in groups.values() if len(group) >= SMALLEST_GROUP]
    if not kept:
        return None
    repeats = max(repeats_of(group) for group in groups.values())
    regrets = [min(g, key=lambda p: p.predicted).actual / min(p.actual for p in g) - 1 for g in kept]
    return {
        "groups": len(kept),
        "tau": _mean_tau(kept, repeats),
        "pairs": sum(len(pairs_of(group, repeats)) for group in kept),
        "repeats": repeats,
        "plain_tau": _mean_tau(kept, 0.0),
        "all_pairs": sum(len(pairs_of(group, 0.0)) for group in kept),
        "regret": sum(regrets) / len(regrets),
        "worst_regret": max(regrets),
    }


def _mean_tau(groups: Iterable[Sequence[Point]], least: float) -> float | None:
    """Return the mean of the groups' Kendall's tau over these pairs; None where no group has any."""
    listed = [pairs for group in groups if (pairs := pairs_of(group, least))]
    taus = [sum(_sign(b.predicted - a.predicted) for a, b in pairs) / len(pairs) for pairs in listed]
    return sum(taus) / len(taus) if taus else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def score(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Score the points: one entry per set and kind."""
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        groups[point.set, point.kind].append(point)
    scores = []
    for (name, kind), inside in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        entry: dict[str, Any] = {"set": name, "kind": kind, "run": inside[0].run}
        entry |= labels(inside) if kind == "fits" else errors(inside)
        if kind == "time" and (ranked := ranking(inside)):
            entry |= ranked
        scores.append(entry)
    return scores


def left_out(tables: Tables) -> tuple[list[Point], dict[str, dict[Key, float]]]:
    """Return the points of each set that constants saw, predicted without it, and the constants' values then."""
    sets = sorted({point.set for point in tables.points if fitted_on(point.set)})
    values = {name: without(name, tables.predict) for name in sets}
    return [point for name in sets for point in tables.predict(Planner(values[name]), {name})], values


def beside(scores: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the scores with those of the set left out under "left_out"; None where nothing was fitted on it."""
    without = {(s["set"], s["kind"]): s for s in others}
    return [{**s, "left_out": without.get((s["set"], s["kind"]))} for s in scores]


def means(scores: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, of memory and of time, the mean over sources of their mean errors, and which source has the largest.

    Sets with "no gate" in their name are left out. kind -> {"left_out": ..., "fitted": ...}, None without any.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind in ("memory", "time"):
        gated = [s for s in scores if s["kind"] == kind and "no gate" not in s["set"]]
        columns = {"left_out": [s["left_out"] for s in gated if s["left_out"]], "fitted": gated}
        found[kind] = {column: _mean(each) for column, each in columns.items()}
    return found


def _mean(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not scores:
        return None
    worst = max(scores, key=lambda s: s["mean"])
    mean = sum(s["mean"] for s in scores) / len(scores)
    return {"sources": len(scores), "mean": mean, "worst": worst["mean"], "worst_source": worst["set"]}


def as_text(
    scores: Sequence[dict[str, Any]],
    skipped: Mapping[str, int],
    unknown: Sequence[str],
    untold: Mapping[str, str] | None = None,
    counts: Mapping[str, int] | None = None,
) -> str:
    """Write the tables, and what was left out.

    untold, counts  of rows; None of a recording that has none
    """
    head = f"{'':28} {'':8} {'':4} {'its set left out':^20} {'fitted':^20}"
    names = " ".join(f"{name:>6}" for name in ("mean", "p90", "worst"))
    lines = [head.rstrip(), f"{'set':28} {'kind':8} {'rows':>4} {names} {names} {'bias':>7}  worst row"]
    for s in scores:
        lines += _lines(s)
    lines += [
        f"{kind}, {title}: {100 * found['mean']:.1f} % mean of {found['sources']} sources, largest "
        f"{100 * found['worst']:.1f} % ({found['worst_source']})"
        for column, title in (("left_out", "its set left out"), ("fitted", "fitted"))
        for kind, columns in means(scores).items()
        if (found := columns[column])
    ]
    ranked = [s for s in scores if s.get("tau") is not None]
    if groups := sum(s["groups"] for s in ranked):
        tau = sum(s["groups"] * s["tau"] for s in ranked) / groups
        lines.append(f"ranking, fitted: Kendall tau {tau:.2f}, mean of {groups} models")
    if counts is not None:
        lines.append("rows: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    lines += [
        f"skipped in {name}: {count} rows (columns missing, or nothing to compare)" for name, count in skipped.items()
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in (untold or {}).items():
        reasons.setdefault(reason, []).append(name)
    lines += [f"unknown: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += [f"no reader: {name}" for name in unknown]
    return "\n".join(lines)


def _lines(s: Mapping[str, Any]) -> list[str]:
    begin = f"{s['set']:28} {s['kind']:8} {s['rows']:4}"
    if s["kind"] == "fits":
        missed = f"; missed {', '.join(s['missed'])}" if s["missed"] else ""
        without = f"left out: {labels_text(s['left_out'])}; fitted: " if s["left_out"] else ""
        return [f"{begin}  {without}{labels_text(s)}{missed}"]
    other = s["left_out"]
    values = " ".join(f"{100 * s[k]:5.1f}%" for k in ("mean", "p90", "worst"))
    without = " ".join(f"{100 * other[k]:5.1f}%" if other else f"{'-':>6}" for k in ("mean", "p90", "worst"))
    row = f"{s['worst_row']} ({s['worst_predicted']:.4g} for {s['worst_actual']:.4g})"
    lines = [f"{begin} {without} {values} {100 * s['bias']:+6.1f}%  {row}"]
    return [*lines, f"{'':28} ranking  {ranking_text(s)}"] if "tau" in s else lines


def labels_text(s: Mapping[str, Any]) -> str:
    """Write the table of runs that did and did not fit."""
    names = "recall", "false_alarms", "marked"
    recall, alarms, marked = (f"{100 * s[k]:.0f} %" if s[k] is not None else "-" for k in names)
    return f"OOM recall {recall} of {s['out_of_memory']}, false alarms {alarms}, marked {marked}"


def ranking_text(s: Mapping[str, Any]) -> str:
    """Write the table of configurations of one model."""
    regret = f"regret {100 * s['regret']:.1f} % mean, {100 * s['worst_regret']:.1f} % worst"
    tau, plain = ("-" if s[k] is None else f"{s[k]:.2f}" for k in ("tau", "plain_tau"))
    beyond = f" beyond repeats' {100 * s['repeats']:.1f} %" if s["repeats"] else ""
    every = f" ({plain} of all {s['all_pairs']})" if s["repeats"] else ""
    return f"{s['groups']} models: Kendall tau {tau} of {s['pairs']} pairs{beyond}{every}, {regret}"


def main() -> int:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, required=True, help="folder of CSV files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", action="store_true", help="print every row's prediction, too")
    parser.add_argument("--fitted-only", action="store_true", help="leave out the errors without a set's own rows")
    arguments = parser.parse_args()
    tables = Tables(arguments.tables, PUBLISHED)
    others, values = ([], {}) if arguments.fitted_only else left_out(tables)
    scores = beside(score(tables.points), score(others))
    seen = {(point.set, point.id) for point in others}
    blind = [*others, *(point for point in tables.points if (point.set, point.id) not in seen)]
    if arguments.json:
        constants = accounts(tables.predict, values)
        told = {"skipped": tables.skipped, "unknown": tables.unknown, "untold": tables.untold, "rows": tables.counts()}
        found = {"margins": margins_of(blind), "apart": apart_of(tables.points), "cards": tables.cards}
        found |= {"narrowed": narrowed(blind), "spread": spread_of(narrowed(blind))}
        found["runs"] = sorted({p.run for p in tables.points if "no gate" not in p.set and p.kind != "formula"})
        result = {"scores": scores, "means": means(scores), **found, "constants": constants, **told}
        print(json.dumps(result, indent=1))
        return 0
    if arguments.rows:
        for p in tables.points:
            off = 100 * (p.predicted / p.actual - 1) if p.actual else 0.0
            print(f"{p.set:22} {p.kind:8} {p.id:34} {p.predicted:10.4g} {p.actual:10.4g} {off:+7.1f}%")
    print(as_text(scores, tables.skipped, tables.unknown, tables.untold, tables.counts()))
    for run, margin in margins_of(blind).items():
        print(
            f"{run}: nine in ten of {margin['rows']} memories are at most {100 * margin['share']:.1f} % above planned"
        )
    if (apart := apart_of(tables.points)) is not None:
        print(f"19 of 20 pairs whose planned seconds differ by {100 * apart:.1f} % or more are ranked as they ran")
    told = "{set:24} {rows} corrected by smaller runs: mean {before:.1%} -> {after:.1%}"
    for pairs in narrowed(blind):
        print(told.format(**pairs))
    if (spread := spread_of(narrowed(blind))) is not None:
        print(f"half of the sets have nine in ten corrected plans within {100 * spread:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
