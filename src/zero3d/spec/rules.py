"""Settings that cannot be together: each such refusal once, for files, engines and plans. No torch.

A rule has the key that a refusal names, when it is broken, and why, with what to type instead. In its text a setting in
braces is written as the caller types it:

                         in a file                  as a keyword of an Engine
    {zero.master}        zero.master=split          master='split'             what was asked for
    {zero.master=fp32}   zero.master=fp32           master='fp32'              what to type

What follows from a model, or from the number of ranks, is checked where those are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from zero3d.errors import ConfigError
from zero3d.spec.declaring import KEYWORDS, Write, as_keyword, check_choices, in_file, whole_numbers
from zero3d.spec.dtypes import BY_NAME, master_of
from zero3d.spec.formats import NF4_DOUBLE
from zero3d.spec.mesh import FAST, SPLIT_BACKWARDS
from zero3d.spec.offload import AUTO
from zero3d.spec.optimizer import ON_HOST, UPDATED_ON_HOST
from zero3d.spec.sections import SECTIONS, Spec
from zero3d.spec.tiers import HOST, TIERS
from zero3d.spec.zero import CAST, NODE, SAME, Zero

COMMUNICATORS = whole_numbers(Zero, "communicators")
SETTING = re.compile(r"\{([\w.]+)(?:=([^}]*))?\}")


class Rule(NamedTuple):
    """A combination that is refused."""

    key: str
    broken: Callable[[Spec], bool]
    text: str


def _in_files(name: str) -> Rule:
    folders = tuple(row.name for row in TIERS.values() if row.folder)
    return Rule(
        f"offload.{name}",
        lambda s: getattr(s.offload, name) in folders and s.offload.directory is None,
        f"{{offload.{name}}} needs a folder: type {{offload.directory=FOLDER}} on a local disk.",
    )


def _of_states_that_stay(name: str, value: str) -> Rule:
    return Rule(
        f"offload.{name}",
        lambda s: getattr(s.offload, name) == value and s.offload.optimizer == "none",
        f"{{offload.{name}}} is for optimizer states off the device, and offload.optimizer is none: type "
        f"{{offload.optimizer=host}}, or leave offload.{name} out.",
    )


def _of_recomputed_blocks(key: str, asked: Callable[[Spec], bool]) -> Rule:
    return Rule(
        key,
        lambda s: s.activations == "none" and asked(s),
        f"{key} is about the inputs of recomputed blocks, and none is recomputed: type activations=full, or leave it "
        "out.",
    )


def _of_stage_3(key: str, asked: Callable[[Spec], bool], without: str) -> tuple[Rule, Rule]:
    """Return what is refused of a setting that is about gathers of parameters, of which each use makes one."""
    return (
        Rule(
            key,
            lambda s: asked(s) and s.zero.stage != 3,
            f"{{{key}}} is for parameters that are gathered for each use, as at stage 3, and this is {{zero.stage}}: "
            f"type {{zero.stage=3}}, or {without}.",
        ),
        Rule(
            key,
            lambda s: asked(s) and s.zero.stage == 3 and s.zero.release == "every_step",
            f"{{{key}}} is for gathers after the first one of a step, and with {{zero.release}} there is no other: "
            f"type {{zero.release=every_use}}, or {without}.",
        ),
    )


def _of_gradients_in_turn(
    asked: Callable[[Spec], bool], keeps: str, without: str, what: str = "keeps them on the device until the last one"
) -> Rule:
    """Return what is refused of gradients that leave as soon as a micro-batch has made them."""
    return Rule(
        "offload.gradients",
        lambda s: s.offload.gradients_leave and asked(s),
        "{offload.gradients} takes gradients that are reduced after every micro-batch, and "
        f"{keeps} {what}: type {without}, or {{offload.gradients=device}}.",
    )


def _updates_on_host(spec: Spec) -> bool:
    return spec.offload.executor == HOST and spec.offload.optimizer != "none"


def _is_number_or_node(asked: object) -> bool:
    return asked in (None, NODE) or (isinstance(asked, int) and not isinstance(asked, bool) and asked > 1)


RULES = (
    Rule(
        "zero.master",
        lambda s: s.zero.master == "split" and s.precision != "bf16",
        "{zero.master} stores masters as bf16 weights plus 16-bit remainders, and {precision} has no bf16 weights: "
        "type {precision=bf16}, or {zero.master=fp32}.",
    ),
    *_of_stage_3("zero.weights", lambda s: s.zero.weights == CAST, "{zero.weights=kept}"),
    Rule(
        "zero.weights",
        lambda s: s.zero.weights == CAST and master_of(s.precision) == BY_NAME.get(s.precision),
        "{zero.weights} makes weights of wider masters, and with {precision} masters are the weights: type "
        "{precision=bf16}, or {zero.weights=kept}.",
    ),
    Rule(
        "zero.weights",
        lambda s: s.zero.weights == CAST and s.zero.master == "split",
        "{zero.weights} makes weights of whole masters, and with {zero.master} weights are one half of them: type "
        "{zero.master=fp32}, which takes as much memory then, or {zero.weights=kept}.",
    ),
    Rule(
        "zero.weights",
        lambda s: s.zero.weights == CAST and s.offload.states,
        "{zero.weights} makes weights of masters on the device, and with {offload.optimizer} and {offload.params} "
        "states leave it: type {zero.weights=kept}, or {offload.optimizer=none} {offload.params=none}.",
    ),
    Rule(
        "zero.reduce",
        lambda s: s.zero.reduce == "every_micro_batch" and s.zero.stage < 2,
        "{zero.reduce} keeps only a shard of the gradients, as stages 2 and 3 do; {zero.stage} keeps whole gradients: "
        "type {zero.stage=2}, or {zero.reduce=every_step}.",
    ),
    Rule(
        "zero.reduce_dtype",
        lambda s: s.precision != "fp64" and s.zero.reduce_dtype not in ("fp32", s.precision),
        "{zero.reduce_dtype} cannot carry gradients of {precision} exactly: type {zero.reduce_dtype=fp32}.",
    ),
    Rule(
        "zero.reduce_dtype",
        lambda s: s.zero.exact and s.precision not in ("fp32", "fp64") and s.zero.reduce_dtype != "fp32",
        "{zero.exact} sums gradients in fp32, and {zero.reduce_dtype} asks for fewer bits: leave {zero.reduce_dtype} "
        "out. Gradients of a single micro-batch are sent in the compute dtype anyway.",
    ),
    Rule(
        "zero.reduce",
        lambda s: s.zero.exact and s.pp > 1 and s.zero.reduce == "every_micro_batch",
        "{zero.exact} in a pipeline ({mesh.pp}) first sums each rank's own micro-batches, and {zero.reduce} would "
        "reduce after each one: leave {zero.reduce} out.",
    ),
    Rule(
        "zero.gather_budget",
        lambda s: s.zero.gather_budget is not None and s.zero.stage == 3 and s.zero.release == "every_step",
        "{zero.gather_budget} gathers a few tiles at a time, and {zero.release} keeps everything gathered until the "
        "step ends: leave one of them out.",
    ),
    Rule(
        "zero.gather_budget",
        lambda s: (
            s.zero.gather_budget is not None and s.zero.stage == 3 and s.pp > 1 and s.mesh.schedule in SPLIT_BACKWARDS
        ),
        "{zero.gather_budget} does not work with {mesh.schedule}, which needs all weights of a model chunk at once for "
        "its weight phase: type {mesh.schedule=1f1b} or {mesh.schedule=interleaved}, or leave {zero.gather_budget} "
        "out.",
    ),
    *_of_stage_3("zero.gather_wire", lambda s: s.zero.gather_wire != "same", "{zero.gather_wire=same}"),
    *_of_stage_3("zero.second_shard", lambda s: s.zero.second_shard is not None, "{zero.second_shard=null}"),
    Rule(
        "zero.second_shard",
        lambda s: not _is_number_or_node(s.zero.second_shard),
        "{zero.second_shard} is not a group size: type 2 or more ranks, {zero.second_shard=node} for the ranks of a "
        "host, or {zero.second_shard=null}.",
    ),
    Rule(
        "zero.communicators",
        lambda s: s.zero.communicators is not None and s.zero.communicators not in COMMUNICATORS,
        "{zero.communicators} is not a number of process groups of an axis: type "
        f"{' or '.join(f'{{zero.communicators={number}}}' for number in COMMUNICATORS)}, "
        "or {zero.communicators=null} for what the machine needs.",
    ),
    Rule(
        "zero.slow_wire",
        lambda s: s.zero.slow_wire != SAME and s.mesh.shard is None,
        "{zero.slow_wire} says how sums travel between copies of shards, and without mesh.shard there are no copies: "
        "type {mesh.shard=8}, or the number of ranks of a host, or {zero.slow_wire=same}.",
    ),
    Rule(
        "zero.slow_wire",
        lambda s: s.zero.slow_wire != SAME and s.zero.exact,
        "{zero.slow_wire} rounds partial sums, which differ from one dp to another, and {zero.exact} needs the same "
        "bits at any dp: type {zero.slow_wire=same}.",
    ),
    Rule(
        "zero.slow_rounding",
        lambda s: s.zero.slow_rounding != "nearest" and not s.zero.sums_in_blocks,
        "{zero.slow_rounding} is for sums sent as int8 or int4, and this is {zero.slow_wire}: type "
        "{zero.slow_wire=int8} or {zero.slow_wire=int4}, or {zero.slow_rounding=nearest}.",
    ),
    Rule(
        "mesh.experts",
        lambda s: s.mesh.experts == FAST and s.zero.exact,
        "{mesh.experts} computes the tokens of several ranks in one product, whose bits depend on ep, and {zero.exact} "
        "needs the same bits at any ep: type {mesh.experts=exact}.",
    ),
    Rule(
        "mesh.schedule",
        lambda s: s.ep > 1 and s.pp > 1 and s.mesh.schedule in SPLIT_BACKWARDS,
        "{mesh.ep} does not work yet with {mesh.schedule}, which computes gradients of weights apart from those of "
        "inputs: type {mesh.schedule=1f1b} or {mesh.schedule=interleaved}.",
    ),
    Rule(
        "mesh.sequence_parallel",
        lambda s: s.ep > 1 and s.mesh.sequence_parallel,
        "{mesh.ep} does not work yet with {mesh.sequence_parallel}, which gives each tp rank a part of the tokens: "
        "type {mesh.sequence_parallel=false}, or {mesh.ep=1}.",
    ),
    Rule(
        "mesh.sequence_parallel",
        lambda s: s.sp > 1 and s.mesh.sequence_parallel,
        "{mesh.sp} already cuts activations along the sequence, and {mesh.sequence_parallel} would cut them once more "
        "over tp: type {mesh.sequence_parallel=false}.",
    ),
    Rule(
        "train.accumulate",
        lambda s: (
            s.zero.exact
            and s.sp > 1
            and s.accumulate > 1
            and (s.zero.reduce == "every_step" or s.zero.stage < 2 or s.pp > 1)
        ),
        "{zero.exact} with {mesh.sp} and {train.accumulate} needs a reduction of gradients after every micro-batch. "
        "With one a step, as below {zero.stage=2} and in pipelines, a rank adds up its own micro-batches before the "
        "other parts of their sequences, and the bits differ: type {zero.reduce=every_micro_batch} with {zero.stage=2} "
        "or 3 and without a pipeline, or {train.accumulate=1}.",
    ),
    Rule(
        "mesh.partition_activations",
        lambda s: s.mesh.partition_activations and s.tp == 1,
        "{mesh.partition_activations} cuts the inputs of recomputed blocks over tp, and tp is 1: type {mesh.tp=2} or "
        "more, {offload.activations=host} to keep them on the host, or leave it out.",
    ),
    _of_recomputed_blocks("offload.activations", lambda s: s.offload.activations != "none"),
    _of_recomputed_blocks("mesh.partition_activations", lambda s: s.mesh.partition_activations),
    Rule(
        "health.replay",
        lambda s: s.replay > 0 and s.ep > 1,
        "{health.replay} has a neighbour compute a rank's micro-batch again, and with {mesh.ep} the neighbour holds "
        "other experts: leave {health.replay} out.",
    ),
    Rule(
        "train.ema",
        lambda s: s.ema is not None and s.offload.states,
        "{train.ema} keeps averages on the device, and with {offload.optimizer} and {offload.params} states leave it: "
        "type {offload.optimizer=none} {offload.params=none}, or {train.ema=null}.",
    ),
    Rule(
        "offload.optimizer",
        lambda s: s.coded and s.offload.states,
        "{optimizer.name} keeps 8-bit moments on the device, and with {offload.optimizer} and {offload.params} states "
        "leave it: type {offload.optimizer=none} {offload.params=none}, or AdamW with {offload.moments=bf16}.",
    ),
    Rule(
        "precision",
        lambda s: s.coded and s.precision == "fp64",
        "{optimizer.name} updates fp32 masters, and {precision} has none: type {precision=bf16}, or use AdamW.",
    ),
    Rule(
        "model.linear",
        lambda s: s.linear is not None and s.precision != "bf16",
        "{model.linear} converts bf16 matrices to fp8, and {precision} has no bf16 matrices: type {precision=bf16}, or "
        "{model.linear=null}.",
    ),
    Rule(
        "model.linear",
        lambda s: s.linear is not None and s.tp > 1,
        "{model.linear} does not work with {mesh.tp} yet: each rank would scale its part of a matrix by itself. Type "
        "{mesh.tp=1}, or {model.linear=null}.",
    ),
    Rule(
        "model.linear",
        lambda s: s.linear is not None and s.zero.gather_budget is not None,
        "{model.linear} needs whole matrices, and {zero.gather_budget} gathers a few rows of them at a time: "
        "type {zero.gather_budget=null}, or {model.linear=null}.",
    ),
    Rule(
        "model.quantize",
        lambda s: s.quantize is not None and s.linear is not None,
        "{model.quantize} decodes frozen matrices into the compute dtype, and {model.linear} multiplies in fp8: type "
        "{model.linear=null}, or {model.quantize=null}.",
    ),
    Rule(
        "model.quantize",
        lambda s: s.quantize == NF4_DOUBLE.name and s.tp > 1,
        "{model.quantize} scales its scales over a whole matrix, which {mesh.tp} would cut: type {model.quantize=nf4}, "
        "or {mesh.tp=1}.",
    ),
    Rule(
        "offload.params",
        lambda s: s.offload.params != "none" and s.zero.stage != 3,
        "{offload.params} needs stage 3, and {zero.stage} keeps all weights gathered on the device: type "
        "{zero.stage=3}, or {offload.params=none}.",
    ),
    Rule(
        "offload.params",
        lambda s: s.offload.params != "none" and s.zero.stage == 3 and s.zero.release == "every_step",
        "{offload.params} is for weights that are released after every use, and {zero.release} keeps all of them "
        "gathered on the device: type {zero.release=every_use}, or {offload.params=none}.",
    ),
    Rule(
        "offload.gradients",
        lambda s: s.offload.gradients_leave and s.zero.stage in (0, 1),
        "{offload.gradients} needs stage 2 or 3, and {zero.stage} sums gradients on the device once a step: type "
        "{zero.stage=2} or 3, or {offload.gradients=device}.",
    ),
    _of_gradients_in_turn(
        lambda s: s.zero.exact, "{zero.exact}", "{zero.exact=false}", "keeps their sums on the device, in a tree"
    ),
    _of_gradients_in_turn(
        lambda s: s.zero.stage in (2, 3) and s.zero.reduce == "every_step",
        "{zero.reduce}",
        "{zero.reduce=every_micro_batch}",
    ),
    _of_gradients_in_turn(
        lambda s: s.zero.stage in (2, 3) and s.zero.reduce == "auto" and s.pp > 1 and not s.zero.exact,
        "{zero.reduce} in a pipeline ({mesh.pp})",
        "{zero.reduce=every_micro_batch}",
    ),
    _in_files("optimizer"),
    _in_files("params"),
    _of_states_that_stay("moments", "bf16"),
    _of_states_that_stay("executor", HOST),
    Rule(
        "offload.executor",
        lambda s: _updates_on_host(s) and s.row is not None and not s.row.on_host,
        "{offload.executor} updates states of "
        f"{ON_HOST} alone, and the optimizer is "
        "{optimizer.name}: type {offload.executor=device}, or leave it out.",
    ),
    Rule(
        "offload.executor",
        lambda s: _updates_on_host(s) and master_of(s.precision) != UPDATED_ON_HOST,
        "{offload.executor} updates fp32 states, and those of {precision} are wider: type {offload.executor=device}, "
        "or leave it out.",
    ),
    Rule(
        "offload.gradients",
        lambda s: s.offload.gradients_leave and s.offload.optimizer == "none",
        "{offload.gradients} moves gradients to where states are updated, and offload.optimizer is none: type "
        "{offload.optimizer=host}, or {offload.gradients=device}.",
    ),
    Rule(
        "offload.moments",
        lambda s: s.offload.optimizer == AUTO and s.offload.moments == "bf16",
        "{offload.moments} does not work with {offload.optimizer}: states that fit stay on the device with fp32 "
        "moments, so losses would depend on free memory. Type {offload.optimizer=host}, or {offload.moments=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.optimizer == AUTO and s.offload.gradients_leave and s.offload.gradient_dtype == "bf16",
        "{offload.gradient_dtype} does not work with {offload.optimizer}: where states fit, gradients stay on the "
        "device in fp32, so losses would depend on free memory. Type {offload.optimizer=host}, or "
        "{offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and not s.offload.gradients_leave,
        "{offload.gradient_dtype} is for gradients on the host, and {offload.gradients} may keep them on the device: "
        "type {offload.gradients=host}, or {offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and s.precision == "fp64",
        "{offload.gradient_dtype} keeps 8 of the 53 significant bits of fp64 gradients: type "
        "{offload.gradient_dtype=fp32}, which keeps them all.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and (max(s.tp, s.pp) > 1 or s.shard < s.dp),
        "{offload.gradient_dtype} does not work with tp or pp above 1 or mesh.shard below dp, which add to gradients "
        "once more when they are on the host: type {offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and s.orthogonal,
        "{offload.gradient_dtype} does not work with {optimizer.name}, whose momentum takes the place of gradients: "
        "type {offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.fraction",
        lambda s: s.offload.optimizer == AUTO and s.offload.fraction != 1,
        "{offload.fraction} does not work with {offload.optimizer}, which chooses the fraction itself: leave "
        "{offload.fraction} out, or type {offload.optimizer=host}.",
    ),
    Rule(
        "autocast",
        lambda s: s.autocast and s.precision not in ("bf16", "fp16"),
        "{autocast} computes matrix products in 16 bits, and {precision} is to compute all in more: type "
        "{precision=bf16}, or {autocast=false}.",
    ),
)


def refusals(spec: Spec, write: Write = in_file) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of every rule that is broken; `write` is how the caller types settings."""
    for rule in RULES:
        if rule.broken(spec):
            yield rule.key, SETTING.sub(lambda found: write(found[1], _value(spec, found[1], found[2])), rule.text)


def check(spec: Spec, write: Write = as_keyword) -> None:
    """Raise ConfigError for a choice that is none, and else with the first rule that is broken."""
    for section in SECTIONS:
        check_choices(section, getattr(spec, section), write)
    for _, why in refusals(spec, write):
        raise ConfigError(why)


def _value(spec: Spec, key: str, told: str | None) -> Any:
    if told is not None:
        return told
    return attrgetter(key if key.partition(".")[0] in SECTIONS else KEYWORDS.get(key, key))(spec)


def as_markdown() -> str:
    """Return all rules as a table, with settings by their keys in a file."""
    rows = [f"| `{rule.key}` | {SETTING.sub(lambda found: f'`{found[0][1:-1]}`', rule.text)} |" for rule in RULES]
    return "\n".join(["| key | what is refused, and what to type |", "|---|---|", *rows]) + "\n"
