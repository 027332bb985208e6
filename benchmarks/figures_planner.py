"""Tables of the planner: its errors on published runs, by set and by kind of run, and every constant of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from figures_measured import results, table
from planner_accuracy import labels_text, ranking_text
from planner_constants import JUDGING

from zero3d.tools.plan.constants import CONSTANTS, Constant, Key
from zero3d.tools.plan.hardware import CATALOGUE
from zero3d.tools.plan.judged import CARDS, HYBRIDS, IMAGES, JUDGED, WORDS
from zero3d.tools.plan.margin import KINDS
from zero3d.tools.plan.profiles import PROFILES

GB = 1e9


def accuracy() -> str:
    """Errors by set: of the constants as fitted, and of those that saw none of the set's rows."""
    [run] = results("planner-accuracy")
    rows = [
        [s["set"], s["kind"], f"{s['rows']}", *_errors(s), *_errors(s["left_out"]), _told(s)] for s in run["scores"]
    ]
    head = ["set", "what", "rows", "mean", "p90", "worst", "left out: mean", "p90", "worst", "labels, ranking"]
    return table(head, rows)


NEWER = {"kempnerforge_h200": "H200", "megatron-core_2026_fp8": "FP8"}  # sets that stand for a card, or a precision
RUNS = {"full": "all trained", "lora": "LoRA", "qlora": "QLoRA", "offload": "off the device"}
DOUBT = "(doubt)"


def by_kind() -> str:
    """Errors by kind of run, over rows, predicted without the row's set; rows with a doubt apart."""
    [run] = results("planner-accuracy")
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for s in run["scores"]:
        if s["kind"] in LIMITS and SHOWN_ONLY not in s["set"]:
            blind = {**s, **(s["left_out"] or {})}
            kinds[RUNS[s["run"]], s["kind"]].append(blind)
            if s["set"] in NEWER:
                kinds[NEWER[s["set"]], s["kind"]].append(blind)
    shares = {RUNS[name]: margin for name, margin in run["margins"].items()}
    rows = []
    for (name, kind), sets in sorted(kinds.items(), key=lambda item: (item[0][1], item[0][0])):
        sure, doubted = ([s for s in sets if (DOUBT in s["set"]) == doubt] for doubt in (False, True))
        margin = f"{100 * shares[name]['share']:.1f} %" if kind == "memory" and name in shares else ""
        rows.append([name, kind, *_over(sure), *_over(doubted), margin])
    head = [
        "kind of run",
        "what",
        "rows",
        "mean",
        "worst",
        "rows with a doubt",
        "mean",
        "worst",
        "9 of 10 at most above",
    ]
    return table(head, rows)


def _over(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the number of rows of some sets, their mean error and the worst."""
    count = sum(s["rows"] for s in sets)
    if not count:
        return ["0", "", ""]
    mean = sum(s["rows"] * s["mean"] for s in sets) / count
    return [f"{count}", f"{100 * mean:.1f} %", f"{100 * max(s['worst'] for s in sets):.1f} %"]


def not_compared() -> str:
    """The sentence that says of what no published run was compared with a plan."""
    cards = ", ".join(sorted(set(CATALOGUE) - set(CARDS) - {"cpu"}))
    kinds = ", ".join([*(WORDS[kind] for kind in KINDS if kind not in JUDGED), HYBRIDS, IMAGES])
    return f"No published run was compared of these cards: {cards}; and none with {kinds}. A plan's first lines say so."


def narrowing() -> str:
    """Errors of seconds before and after a smaller run of the same system has corrected the plan."""
    [run] = results("planner-accuracy")
    rows = [
        [s["set"], f"{s['rows']}", *(f"{100 * value:.1f} %" for value in (s["before"], s["after"], s["errors"][-1]))]
        for s in run["narrowed"]
    ]
    nine = f"Half of these sets have nine in ten of their corrected plans within {100 * run['spread']:.1f} %."
    return table(["set", "runs on more GPUs", "as planned: mean", "corrected: mean", "worst"], rows) + "\n\n" + nine


def _errors(s: Mapping[str, Any] | None) -> list[str]:
    if s is None or s["kind"] == "fits":
        return ["", "", ""]
    return [f"{100 * s[name]:.1f} %" for name in ("mean", "p90", "worst")]


def _told(s: Mapping[str, Any]) -> str:
    if s["kind"] == "fits":
        other = f"; left out: {labels_text(s['left_out'])}" if s["left_out"] else ""
        return labels_text(s) + other
    return ranking_text(s) if "tau" in s else ""


LIMITS = {"memory": {"mean": 0.12, "p90": 0.20}, "time": {"mean": 0.10, "worst": 0.25}}
SHOWN_ONLY = "(no gate)"  # sets with that in their name judge nothing


def missed() -> str:
    """The sentences that name every target that a set misses, fitted and left out."""
    [run] = results("planner-accuracy")
    told = [s for s in run["scores"] if s["kind"] in LIMITS and SHOWN_ONLY not in s["set"]]
    fitted = [miss for s in told for miss in _misses(s, s)]
    without = [miss for s in told if s["left_out"] for miss in _misses(s, s["left_out"])]
    saw = sum(s["left_out"] is not None for s in told)
    return (
        f"Targets: mean error {100 * LIMITS['memory']['mean']:.0f} % and p90 {100 * LIMITS['memory']['p90']:.0f} % of "
        f"memory, mean {100 * LIMITS['time']['mean']:.0f} % and worst {100 * LIMITS['time']['worst']:.0f} % of time. "
        f"Missed by fitted constants: {'; '.join(fitted)}. Missed with the set left out, of the {saw} on which "
        f"something was fitted: {'; '.join(without)}."
    )


def _misses(s: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    over = [f"{name} {100 * found[name]:.1f} %" for name, limit in LIMITS[s["kind"]].items() if found[name] > limit]
    return [f"{s['set']} {s['kind']} ({', '.join(over)})"] if over else []


def _accounts() -> dict[Key, Mapping[str, Any]]:
    [run] = results("planner-accuracy")
    return {(entry["system"], entry["name"]): entry for entry in run["constants"]}


def constants() -> str:
    """Every constant that `zero3d plan` and `plan.evaluate` use."""
    return table(CONSTANT_HEAD, [_row(each, _accounts()) for each in CONSTANTS])


def judging() -> str:
    """Constants that serve to judge tables alone."""
    return table(CONSTANT_HEAD, [_row(each, _accounts()) for each in JUDGING])


CONSTANT_HEAD = ["system", "constant", "value", "", "fitted on (rows that it changes)", "without them"]


def _row(each: Constant, accounts: Mapping[Key, Mapping[str, Any]]) -> list[str]:
    begin = [each.system, each.name, _short(each.value), each.unit]
    if each.lender:
        return [*begin, f"{each.lender}'s", ""]
    if not each.fitted_on:
        return [*begin, f"no row: {each.source}", ""]
    account = accounts.get(each.key)
    if account is None:  # fitted since the recording
        return [*begin, ", ".join(f"{rows.set} {rows.kind}" for rows in each.fitted_on), ""]
    sets = list(account["without"])
    rows = ", ".join(
        f"{rows['set']} {rows['kind']}{': ' + rows['which'] if rows['which'] else ''} ({rows['count']})"
        for rows in account["rows"]
    )
    if len(sets) == 1:
        return [*begin, rows, f"{_short(each.default or 0.0)}, a system's without rows"]
    return [*begin, rows, "; ".join(f"{account['without'][name]:.3g} without {name}" for name in sets)]


def _short(value: float) -> str:
    return f"{value / GB:g}e9" if value >= GB / 10 else f"{value:.3g}"


def counts() -> str:
    """The sentence that counts systems and constants."""
    own = [each for each in CONSTANTS if each.fitted_on and not each.lender]
    sets = {rows.set for each in own for rows in each.fitted_on}
    alone = sum(len({rows.set for rows in each.fitted_on}) == 1 for each in own)
    return (
        f"{len(PROFILES) - 1} systems beside zero3d share {len(own)} fitted constants, which saw {len(sets)} sets; "
        f"{alone} of them have rows in one set alone. zero3d has none of its own: what it hides of communication is "
        f"torchtitan's. Judging tables takes {sum(bool(each.fitted_on) for each in JUDGING)} more."
    )


PLANNER = {
    "planner-accuracy": accuracy,
    "planner-missed": missed,
    "planner-by-kind": by_kind,
    "planner-not-compared": not_compared,
    "planner-narrowed": narrowing,
    "planner-counts": counts,
    "planner-constants": constants,
    "judging-constants": judging,
}
