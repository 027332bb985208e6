"""The figures of each run of a comparison beside those of the first. Pure, on the JSON of runs. No torch.

memory       bytes of one rank by category: measured, by formula, and whether they agree
places       the same of model states wherever they are: on the device, the host, a disk (in two slots there)
traffic      bytes that one rank sends per step, by operation: the same three
speed        sequences per rank and step, seconds per step, samples per second, beside the peaks of device and host
loss         last loss, held-out loss, and their differences to the first run; `same_bits` is about every step,
             `moment` of reduction about why they may differ
experts      of mixtures: tokens of the busiest expert beside the mean, in the layer where they are the least even
exact        of runs with zero.exact: a fingerprint of masters and optimizer states beside the last loss in all digits
recompute    of runs that differ in `activations`: activations/policy.py's arithmetic beside the measured step

A result is what `zero3d train --json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from zero3d.activations.policy import Arithmetic, best_segment, recompute_arithmetic
from zero3d.blueprint.policy import Policy
from zero3d.expert_parallel.traffic import Busiest
from zero3d.spec.mesh import Mesh
from zero3d.spec.sections import Spec
from zero3d.spec.tiers import DEVICE, TIERS
from zero3d.spec.zero import Zero
from zero3d.train.variants import Variant

CATEGORIES = ("parameters", "gradients", "optimizer states", "padding", "temporary", "activations")
STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer states": "optimizer", "padding": "padding"}
PLACES, TOGETHER = (DEVICE, *TIERS), "together"
ONCE = ("broadcast",)  # sent at the first step only
ACTIVATIONS = "activations"
REDUCTION = ("zero.stage", "zero.reduce", "zero.release")  # what sets the moment of reduction
Result = Mapping[str, Any]


class Figure(NamedTuple):
    """Holds bytes. formula: None where there is none; at_most: it is an upper bound; agrees: the verdict."""

    measured: float
    formula: float | None
    at_most: bool
    agrees: bool | None


@dataclass(frozen=True)
class Recompute:
    """Holds a policy's arithmetic; predicted and measured are steps in those of `against`, the first run beside it.

    extra      of the step without recomputation; None: a third of attention's share, which is not known
    predicted  None where either extra is not known
    """

    layers: int
    kept_inputs: int
    interiors: int
    attentions: int
    extra: float | None
    against: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Row:
    """Holds the figures of one run. Differences are to the first run; None where a loss is missing or not finite.

    moment  when gradients are reduced: every_step or every_micro_batch; "" in exact mode, where it changes no bit
    apart   the losses differ from the first run's, which has the other moment and the same other axes
    """

    label: str
    values: tuple[str, ...]
    ranks: int
    memory: Mapping[str, Figure]
    places: Mapping[str, Mapping[str, Figure]]
    peak: int
    peak_host: int
    traffic: Mapping[str, Figure]
    micro_batch: int
    accumulate: int
    step_seconds: float
    samples_per_s: float
    loss: float | None
    loss_difference: float | None
    held_out_loss: float | None
    held_out_difference: float | None
    same_bits: bool
    moment: str
    apart: bool
    fingerprint: str | None
    busiest: Busiest | None
    recompute: Recompute | None

    @property
    def sent(self) -> float:
        """Bytes sent per step, measured."""
        return sum(figure.measured for figure in self.traffic.values())

    @property
    def agrees(self) -> bool:
        """Whether no formula is contradicted."""
        by_place = [figure for figures in self.places.values() for figure in figures.values()]
        return all(figure.agrees is not False for figure in (*self.memory.values(), *by_place, *self.traffic.values()))


def rows(variants: Sequence[Variant], results: Sequence[Result]) -> list[Row]:
    """Return one row per run, in their order."""
    recomputes = recompute_rows(variants, results)
    alike = [variant.values_except(*REDUCTION) == variants[0].values_except(*REDUCTION) for variant in variants]
    columns = zip(variants, results, recomputes, alike, strict=True)
    return [_row(*column, results[0]) for column in columns]


def _row(variant: Variant, result: Result, recompute: Recompute | None, alike: bool, first: Result) -> Row:
    """Return the figures of a run. alike: to the first run, but for what sets the moment of reduction."""
    batch, losses = result["batch"], result["losses"]
    last, first_last = losses[-1], first["losses"][-1]
    held_out, first_held_out = result["held_out_loss"], first["held_out_loss"]
    same = None not in losses and losses == first["losses"] and held_out == first_held_out
    reduced = moment(result)
    apart = alike and not same and reduced != moment(first)
    return Row(
        variant.label,
        variant.values,
        result["ranks"],
        memory(result),
        places(result),
        result["peak_memory"],
        result["peak_host"],
        traffic(result),
        batch["micro_batch"],
        batch["accumulate"],
        result["step_seconds"],
        result["samples_per_s"],
        last,
        _minus(last, first_last),
        held_out,
        _minus(held_out, first_held_out),
        same,
        reduced,
        apart,
        result.get("fingerprint"),
        Busiest.of(result.get("expert_load", {})),
        recompute,
    )


def moment(result: Result) -> str:
    """Return when a run reduces its gradients; with one micro-batch per step that is one moment at every stage."""
    zero, pp = result["config"]["zero"], result["config"]["mesh"]["pp"] or 1
    if zero["exact"]:
        return ""
    settings = Zero(zero["stage"], release=zero["release"], reduce=zero["reduce"])
    reduce = Policy.of(Spec(settings, mesh=Mesh(pp=pp))).reduce
    return reduce if result["batch"]["accumulate"] > 1 else "every_step"


def _minus(value: float | None, first: float | None) -> float | None:
    return None if value is None or first is None else value - first


# --- memory and traffic -------------------------------------------------------------------------


def memory(result: Result) -> dict[str, Figure]:
    """Return a run's bytes on the device by category; temporary is the sum of the most each kind of buffer held."""
    figures: dict[str, Figure] = {}
    for category in CATEGORIES:
        rows_here = [row for row in result["memory"] if place_of(row) == PLACES[0]]
        entries = [row for row in rows_here if row["consumer"].partition(":")[0] == category]
        formulas = [row["formula"] for row in entries]
        figures[category] = Figure(
            sum(row["measured"] for row in entries),
            None if None in formulas else sum(formulas),
            any(row["at_most"] for row in entries),
            _all([row["agrees"] for row in entries]),
        )
    return figures


def place_of(row: Mapping[str, Any]) -> str:
    """Return the place of a row of a run's memory; results of before there were any are of the device."""
    return str(row.get("place", PLACES[0]))


def places(result: Result) -> dict[str, dict[str, Figure]]:
    """Return a run's bytes of model states by place and category; "together" is their sum, padding among it."""
    figures: dict[str, dict[str, Figure]] = {}
    for row in result["memory"]:
        if row["consumer"] in STATES:
            figure = Figure(row["measured"], row["formula"], row["at_most"], row["agrees"])
            figures.setdefault(place_of(row), {})[STATES[row["consumer"]]] = figure
    for here in figures.values():
        parts = list(here.values())
        formulas = [figure.formula or 0 for figure in parts]
        here[TOGETHER] = Figure(sum(f.measured for f in parts), sum(formulas), False, _all([f.agrees for f in parts]))
    return figures


def traffic(result: Result) -> dict[str, Figure]:
    """Return a run's bytes by operation, per step; what is sent at the first step only is left out."""
    return {
        row["op"]: Figure(
            row["measured"]["bytes"] / result["steps"], row["formula"]["bytes"] / result["steps"], False, row["equal"]
        )
        for row in result["traffic"]
        if row["op"] not in ONCE
    }


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    return None if None in verdicts else all(verdicts)


# --- recomputation ------------------------------------------------------------------------------


def recompute_rows(variants: Sequence[Variant], results: Sequence[Result]) -> list[Recompute | None]:
    """Return the arithmetic of each run, against the first run with the same values on the other axes."""
    if not any(axis.key == ACTIVATIONS for axis in variants[0].axes):
        return [None] * len(variants)
    arithmetics = [recompute_arithmetic(result["layers"], result["config"][ACTIVATIONS]) for result in results]
    firsts: dict[tuple[str, ...], int] = {}
    for i, variant in enumerate(variants):
        firsts.setdefault(variant.values_except(ACTIVATIONS), i)
    recomputes: list[Recompute | None] = []
    for variant, result, arithmetic in zip(variants, results, arithmetics, strict=True):
        first = firsts[variant.values_except(ACTIVATIONS)]
        measured = result["step_seconds"] / results[first]["step_seconds"]
        extra = None if arithmetic.extra_forward is None else float(arithmetic.extra_forward)
        recomputes.append(
            Recompute(
                result["layers"],
                arithmetic.kept_inputs,
                arithmetic.interiors,
                arithmetic.attentions,
                extra,
                variants[first].label,
                _predicted(arithmetic, arithmetics[first]),
                measured,
            )
        )
    return recomputes


def _predicted(arithmetic: Arithmetic, first: Arithmetic) -> float | None:
    if arithmetic.extra_forward is None or first.extra_forward is None:
        return None
    return float((1 + arithmetic.extra_forward) / (1 + first.extra_forward))


def square_root(layers: int) -> str:
    """Say in one line which K keeps the fewest tensors."""
    every = best_segment(layers)
    kept = -(-layers // every)
    interiors = f"{every} interior{'s' if every > 1 else ''}"
    return (
        f"square root: of {layers} blocks, every:{every} keeps {kept} inputs + {interiors} = {kept + every}, the "
        "fewest where an interior weighs what an input does; the more it weighs, the smaller the best K"
    )


# --- for programs -------------------------------------------------------------------------------


def as_json(variants: Sequence[Variant], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one object per run: its overrides, its figures, and its own JSON."""
    if not variants:
        return []
    return [
        {"variant": variant.label, "overrides": variant.words, "figures": _row_json(row), "result": result}
        for variant, row, result in zip(variants, rows(variants, results), results, strict=True)
    ]


def _row_json(row: Row) -> dict[str, Any]:
    figures = asdict(row)
    for name in ("memory", "traffic"):
        figures[name] = {key: figure._asdict() for key, figure in figures[name].items()}
    figures["places"] = {
        place: {key: figure._asdict() for key, figure in here.items()} for place, here in row.places.items()
    }
    return {key: value for key, value in figures.items() if key not in ("label", "values")} | {"sent": row.sent}
