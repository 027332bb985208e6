"""`zero3d plan --theory`: the ZeRO paper's figures for any model, and this engine's beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from zero3d.account.states import StateBytes
from zero3d.errors import ConfigError, short
from zero3d.spec.text import SUFFIXES, columns, count, size, trim
from zero3d.tools.plan.formulas import (
    TECHNIQUES,
    ZERO_FACTOR,
    checkpoints,
    layer_activations,
    recomputed,
    zero_activations,
)
from zero3d.tools.plan.theory import EXAMPLES, Breakdown, K, StageTheory, all_stages, at_stage_3, breakdown

MOST_PARAMS, MOST_DIGITS = 10**18, 9  # more is a typing error
FORMULAS = (  # the paper's, and this engine's in bf16
    ("(2 + 2 + K) Psi", "(2 + 4 + 12) Psi"),
    ("(2 + 2) Psi + K Psi/N", "(2 + 2) Psi + (4 + 12) Psi/N"),
    ("2 Psi + (2 + K) Psi/N", "2 Psi + (4 + 12) Psi/N"),
    ("(2 + 2 + K) Psi/N", "(2 + 4 + 12) Psi/N"),
)
TRAVELS = ("gradients", "parameters", "parameters", "parameters, forward and backward")


UNITS = {"--gpus": "GPUs", "--hidden": "features", "--batch": "sequences", "--tp": "ranks", "--seq": "tokens"}
TP, SEQ = 8, "1024"  # where nothing is said: ranks of a node, and the length in ZeRO's examples
KEPT = {  # of a layer, by how it is trained: in units of s b h bytes
    "TP baseline": "(10 + 24/t + 5 a s/(h t))",
    "TP+SP": "(34 + 5 a s/h) / t",
    "TP+selective": "(10 + 24/t)",
    "TP+SP+selective": "34 / t",
    "full recompute": "2",
}


class Shape(NamedTuple):
    """A GPT whose activations are counted. batch: sequences of a GPU; seq: their tokens; heads: None if not known."""

    layers: int
    hidden: int
    batch: int
    seq: int
    tp: int
    heads: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, str | None]) -> Shape | None:
        """Read what options say, by their names; None where none asks for activations. Raises ConfigError."""
        needed = {name: given[name] for name in ("layers", "hidden", "batch")}
        missing = [f"--{name}" for name, text in needed.items() if text is None]
        said = [f"--{name}" for name in ("layers", "hidden", "batch", "heads", "tp") if given[name] is not None]
        if not said:
            return None
        if missing:
            raise ConfigError(
                f"{said[0]} asks for activations, which need {' and '.join(missing)}, too: "
                "zero3d plan --theory --layers 48 --hidden 1600 --batch 32 --seq 1024 --heads 25"
            )
        texts = {"seq": SEQ} | {name: text for name, text in given.items() if text is not None}
        numbers = {name: parse_gpus(texts[name], f"--{name}") for name in cls._fields if name in texts}
        return cls(**{**numbers, "tp": _ranks(numbers.get("heads"), numbers.get("tp"))})

    @property
    def params(self) -> int:
        """Count the parameters of the layers: 12 l h^2."""
        return 12 * self.layers * self.hidden**2

    def kept(self, technique: str) -> Fraction | None:
        """Return the bytes that all layers keep on a rank; None where that needs heads and nobody says how many."""
        if self.heads is None and "a s" in KEPT[technique]:
            return None
        shape = self.seq, self.batch, self.hidden, self.heads or 1, self.tp
        return self.layers * layer_activations(technique, *shape)


def _ranks(heads: int | None, asked: int | None) -> int:
    """Return over how many TP ranks a layer is cut: as asked, else as many of a node as heads allow. ConfigError."""
    most = max(ranks for ranks in range(1, TP + 1) if (heads or TP) % ranks == 0)
    if asked is not None and heads is not None and heads % asked:
        raise ConfigError(
            f"--tp {asked} cannot cut --heads {heads}: {heads} / {asked} is not a whole number. Type a --tp that "
            f"divides it, such as {most}."
        )
    return asked or most


def show(given: Mapping[str, str | None], as_object: bool) -> None:
    """Print the tables, or one JSON object. given: options by their names, without a value None. Raises ConfigError."""
    shape = Shape.of(given)
    psi = shape.params if shape and not given["params"] else parse_params(given["params"] or "7.5e9")
    n = parse_gpus(given["gpus"] or "64")
    stages = all_stages(psi, n)
    tree = as_json(psi, n, stages) | ({} if shape is None else {"activations": activations_json(shape)})
    print(json.dumps(tree, indent=2) if as_object else "\n".join([as_text(psi, n, stages), *activations_text(shape)]))


def parse_params(text: str) -> int:
    """Return the parameters that 7.5e9, 7.5B or 1500M is. Raises ConfigError."""
    digits, scale = text.strip(), 1
    if digits[-1:].upper() in SUFFIXES:
        digits, scale = digits[:-1], SUFFIXES[digits[-1].upper()]
    try:
        value = Decimal(digits) * scale
    except ArithmeticError:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 < value <= MOST_PARAMS or value != value.to_integral_value():
        raise ConfigError(f"--params {short(text)!r} is not a number of parameters: type 7.5e9, 7.5B or 1500M.")
    return int(value)


def parse_gpus(text: str, option: str = "--gpus") -> int:
    """Return a positive whole number. Raises ConfigError."""
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) > 0):
        unit = UNITS.get(option, option.removeprefix("--"))
        raise ConfigError(
            f"{option} {short(text)!r} is not a number of {unit}: type a whole number from 1, such as {option} 64."
        )
    return int(text)


# --- json ---------------------------------------------------------------------------------------


def as_json(params: int, gpus: int, stages: Sequence[StageTheory]) -> dict[str, Any]:
    """Return all figures as plain numbers, whole ones as int."""
    return {
        "params": params,
        "gpus": gpus,
        "k": K,
        "stages": {str(row.stage): _stage_json(row, stages[0]) for row in stages},
        "stage_3": {name: _moments_json(states) for name, states in at_stage_3(params, gpus).items()},
        "mixed_precision": _breakdown_json(breakdown(params)),
        "examples": {label: _breakdown_json(breakdown(psi)) for label, psi in EXAMPLES},
    }


def _stage_json(row: StageTheory, baseline: StageTheory) -> dict[str, Any]:
    return {
        "name": row.name,
        "paper_bytes": number(row.paper.total),
        "percent_of_baseline": number(100 * row.paper.total / baseline.paper.total),
        "paper": _states_json(row.paper),
        "engine_bytes": number(row.engine.total),
        "engine": _states_json(row.engine),
        "traffic_elements": number(row.elements),
        "traffic_psi": row.multiples[0] + row.multiples[1],
        "reduce_scatter_elements": number(row.reduce_scatter),
        "all_gather_elements": number(row.all_gather),
        "traffic_bytes": number(row.bytes_half),
        "engine_traffic_bytes": number(row.bytes_engine),
    }


def _states_json(states: StateBytes) -> dict[str, int | float]:
    return {name: number(value) for name, value in states._asdict().items()}


def _moments_json(states: StateBytes) -> dict[str, int | float]:
    return {"at_rest_bytes": number(states.at_rest), "end_of_backward_bytes": number(states.total)}


def _breakdown_json(parts: Breakdown) -> dict[str, int]:
    return {**parts._asdict(), "optimizer": parts.optimizer, "total": parts.total}


def number(value: Fraction | int) -> int | float:
    """Return a number as an int when it is whole."""
    return int(value) if value == int(value) else float(value)


# --- text ---------------------------------------------------------------------------------------


def as_text(params: int, gpus: int, stages: Sequence[StageTheory]) -> str:
    """Return four tables and what they mean."""
    cluster = f"N = {gpus} GPU{'s' if gpus > 1 else ''}"
    head = f"Psi = {count(params)} parameters, {cluster}, K = {K} optimizer bytes per parameter (Adam, mixed precision)"
    tables = (_states(stages), _mixed(params), _traffic(stages, gpus), _moments(params, gpus))
    return "\n".join([head, *(line for table in tables for line in ("", *table))])


def _states(stages: Sequence[StageTheory]) -> Iterator[str]:
    yield "1. Model states per GPU (GB = 10^9 bytes; the paper's figure 1, and what this engine holds in bf16)"
    rows = [("stage", "paper", "", "of stage 0", "engine", "")]
    for row in stages:
        percent = 100 * row.paper.total / stages[0].paper.total
        paper_formula, engine_formula = FORMULAS[row.stage]
        label = f"{row.stage} {row.name}"
        rows.append(
            (
                label,
                size(row.paper.total),
                paper_formula,
                f"{float(percent):.3g} %",
                size(row.engine.total),
                engine_formula,
            )
        )
    yield from columns(rows, "<><>><")
    yield "   The engine sums gradients over ranks in fp32, 4 bytes where the paper counts 2; from stage 1 on only in"
    yield "   shards. Padding and the units gathered for the moment come on top."


def _mixed(params: int) -> Iterator[str]:
    yield f"2. Where {breakdown(1).total} bytes per parameter come from (mixed precision with Adam, nothing sharded)"
    cases = {count(params): breakdown(params)} | {label: breakdown(psi) for label, psi in EXAMPLES}
    per_parameter, rows = breakdown(1), [("", "bytes", *cases)]
    for label, field in (
        ("fp16 weights", "weights"),
        ("fp16 gradients", "gradients"),
        ("fp32 master weights", "master"),
        ("fp32 m (Adam)", "m"),
        ("fp32 v (Adam)", "v"),
        ("together", "total"),
    ):
        rows.append(
            (label, f"{getattr(per_parameter, field)} Psi", *(size(getattr(case, field)) for case in cases.values()))
        )
    yield from columns(rows, "<" + ">" * (1 + len(cases)))
    (large, large_psi), (small, small_psi) = EXAMPLES
    big, gpt2 = breakdown(large_psi), breakdown(small_psi)
    terms = " + ".join(trim(part / 1e9) for part in (big.weights, big.gradients, big.optimizer))
    yield f"   {large}: {terms} = {size(big.total)}."
    yield f"   {small}: {size(gpt2.total)} to train what takes {size(gpt2.weights)} of weights."


def _traffic(stages: Sequence[StageTheory], gpus: int) -> Iterator[str]:
    yield "3. Traffic per GPU and step (one micro-batch, M = 1)"
    yield from columns(
        [
            ("ring reduce-scatter", "N-1 hops of Psi/N elements", "(N-1)/N Psi"),
            ("ring all-gather", "N-1 hops of Psi/N elements", "(N-1)/N Psi"),
            ("ring all-reduce", "a reduce-scatter, then an all-gather", "2(N-1)/N Psi, about 2 Psi"),
        ],
        "<<<",
    )
    rows = [("stage", "reduce-scatter", "all-gather", "together", "", "elements", "in 2 bytes", "engine")]
    baseline = sum(stages[0].multiples)
    for row in stages:
        scattered, gathered = row.multiples
        total = scattered + gathered
        rows.append(
            (
                f"{row.stage} {row.name}",
                f"{scattered} of gradients",
                f"{gathered} of {TRAVELS[row.stage]}",
                f"{total} Psi",
                f"{trim(total / baseline)}x",
                f"{float(row.elements):.4g}",
                size(row.bytes_half),
                size(row.bytes_engine),
            )
        )
    yield from columns(rows, "<<<>>>>>")
    unit = count(float(stages[0].elements) / baseline)
    yield f"   Multiples are of (N-1)/N Psi, which is {unit} elements at N = {gpus}. The engine reduces gradients"
    yield "   in fp32 and gathers parameters in bf16."
    yield "   Optimizer states never travel: each rank updates only the slice whose fp32 master, m and v it holds;"
    yield "   gradients come in, new parameters go out, and K stands in no traffic formula."


def _moments(params: int, gpus: int) -> Iterator[str]:
    yield "4. When that is there: at stage 3, per GPU"
    rows = [("", "at rest", "", "end of the backward", "")]
    for name, states in at_stage_3(params, gpus).items():
        rest, terms = states._replace(gradients=Fraction(0)), partial(_terms, params=params, gpus=gpus)
        rows.append((name, size(rest.total), terms(rest), size(states.total), terms(states)))
    yield from columns(rows, "<><><")
    yield "   Gradients come with a step's backward and go with its update. With several micro-batches a step they"
    yield "   are there from its first backward on, so also beside the logits of the next. 16-bit weights stay"
    yield "   beside their fp32 masters, or are cast from them in each gather (zero.weights)."


def _terms(states: StateBytes, params: int, gpus: int) -> str:
    """Write the bytes of a parameter that N ranks share, term by term."""
    terms = [trim(float(part * gpus / params)) for part in states if part]
    return f"{' + '.join(terms)} Psi/N" if len(terms) == 1 else f"({' + '.join(terms)}) Psi/N"


# --- activations --------------------------------------------------------------------------------


def activations_json(shape: Shape) -> dict[str, Any]:
    """Return the bytes of a GPU's activations, by both counts."""
    layers, h, b, s = shape[:4]
    per_layer, root = recomputed(layers, h, s, b)
    inputs = checkpoints(layers, h, s, b)
    kept = {technique: shape.kept(technique) for technique in TECHNIQUES}
    return {
        **{name: value for name, value in shape._asdict().items() if value is not None},
        "all_bytes": zero_activations(layers, h, s, b),
        "inputs_bytes": inputs,
        "inputs_over_tp_bytes": number(Fraction(inputs, shape.tp)),
        "recomputed_per_layer_bytes": per_layer,
        "recomputed_sqrt_bytes": root,
        "more_compute": 1 / 3,
        "by_technique_bytes": {name: None if value is None else number(value) for name, value in kept.items()},
    }


def activations_text(shape: Shape | None) -> Iterator[str]:
    """Yield two tables: ZeRO's count and what recomputation leaves of it, and a layer counted tensor by tensor."""
    if shape is None:
        return
    layers, h, b, s, tp, heads = shape
    per_layer, root = recomputed(layers, h, s, b)
    every, best = round(layers**0.5), max(1, round((layers / ZERO_FACTOR) ** 0.5))
    interior, inputs = zero_activations(1, h, s, b), checkpoints(layers, h, s, b)
    yield ""
    yield f"5. Activations of a GPU: l = {layers} layers of h = {h:,}, b = {b} sequences of s = {s:,} tokens, 16 bits"
    yield from columns(
        [
            ("all", size(zero_activations(layers, h, s, b)), f"{ZERO_FACTOR} b s h l x 2 bytes"),
            ("inputs of the layers alone", size(inputs), "b s h l x 2 bytes"),
            ("recomputed by layer", size(per_layer), "all inputs, the inside of one layer"),
            (
                f"recomputed by sqrt(l) = {every} layers",
                size(root),
                f"{-(-layers // every)} inputs, the inside of {every} layers",
            ),
            (
                f"recomputed by sqrt(l/{ZERO_FACTOR}) = {best} layers",
                size(checkpoints(layers, h, s, b, best) + best * interior),
                f"{-(-layers // best)} inputs, the inside of {best}: the fewest",
            ),
            (f"inputs cut over t = {tp} TP ranks", size(Fraction(inputs, tp)), "b s h l x 2 bytes / t; 0 on the host"),
        ],
        "<><",
    )
    yield "   Recomputation is one more forward: a third of a step's compute."
    yield ""
    a = "a heads" if heads is None else f"a = {heads} heads"
    yield f"6. Counted by tensor (Korthikanti et al., table 2): {layers} layers with {a} on one of t = {tp} TP ranks"
    rows = []
    for technique in TECHNIQUES:
        kept = shape.kept(technique)
        rows.append((technique, "needs --heads" if kept is None else size(kept), f"s b h l x {KEPT[technique]}"))
    yield from columns(rows, "<><")
    yield "   SP cuts what TP leaves whole, selective recomputes the scores, as flash attention does. Other layers keep"
    yield "   other tensors: zero3d plan MODEL traces a model's own."
