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
from zero3d.spec.declaring import KEYWORDS, Write, as_keyword, check_choices, in_file
from zero3d.spec.formats import NF4_DOUBLE
from zero3d.spec.mesh import FAST, SPLIT_BACKWARDS
from zero3d.spec.offload import AUTO
from zero3d.spec.sections import SECTIONS, Spec
from zero3d.spec.tiers import HOST, TIERS
from zero3d.spec.zero import NODE, SAME

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
        f"{{offload.{name}}} is of optimizer states off the device, and offload.optimizer is none: type "
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
            f"{{{key}}} is about parameters that are gathered for each use, which is stage 3, and this is "
            f"{{zero.stage}}: type {{zero.stage=3}}, or {without}.",
        ),
        Rule(
            key,
            lambda s: asked(s) and s.zero.stage == 3 and s.zero.release == "every_step",
            f"{{{key}}} is about gathers after the first one of a step, and {{zero.release}} leaves one alone, into "
            f"the storage that has this rank's weights: type {{zero.release=every_use}}, or {without}.",
        ),
    )


def _is_number_or_node(asked: object) -> bool:
    return asked in (None, NODE) or (isinstance(asked, int) and not isinstance(asked, bool) and asked > 1)


RULES = (
    Rule(
        "zero.master",
        lambda s: s.zero.master == "split" and s.precision != "bf16",
        "{zero.master} keeps masters as bf16 weights and 16-bit remainders, and {precision} has no such weights: type "
        "{precision=bf16}, or {zero.master=fp32}.",
    ),
    Rule(
        "zero.reduce",
        lambda s: s.zero.reduce == "every_micro_batch" and s.zero.stage < 2,
        "{zero.reduce} keeps only a gradient shard, which is stage 2; {zero.stage} holds whole gradients: type "
        "{zero.stage=2}, or {zero.reduce=every_step}.",
    ),
    Rule(
        "zero.reduce_dtype",
        lambda s: s.precision != "fp64" and s.zero.reduce_dtype not in ("fp32", s.precision),
        "{zero.reduce_dtype} cannot carry gradients of {precision} exactly: type {zero.reduce_dtype=fp32}.",
    ),
    Rule(
        "zero.reduce_dtype",
        lambda s: s.zero.exact and s.precision not in ("fp32", "fp64") and s.zero.reduce_dtype != "fp32",
        "{zero.exact} adds gradients up in fp32, and {zero.reduce_dtype} asks for less: leave it out. Gradients of one "
        "micro-batch travel in the compute dtype all the same.",
    ),
    Rule(
        "zero.reduce",
        lambda s: s.zero.exact and s.pp > 1 and s.zero.reduce == "every_micro_batch",
        "{zero.exact} in a pipeline ({mesh.pp}) sums a rank's micro-batches before those of others: leave "
        "{zero.reduce} out.",
    ),
    Rule(
        "zero.gather_budget",
        lambda s: s.zero.gather_budget is not None and s.zero.stage == 3 and s.zero.release == "every_step",
        "{zero.gather_budget} gathers a few tiles at a time, and {zero.release} keeps all that were gathered until the "
        "step ends: leave one of them out.",
    ),
    Rule(
        "zero.gather_budget",
        lambda s: (
            s.zero.gather_budget is not None and s.zero.stage == 3 and s.pp > 1 and s.mesh.schedule in SPLIT_BACKWARDS
        ),
        "{zero.gather_budget} with {mesh.schedule}, whose weight phase needs all weights of a model chunk gathered: "
        "type {mesh.schedule=1f1b} or {mesh.schedule=interleaved}, or leave {zero.gather_budget} out.",
    ),
    *_of_stage_3("zero.gather_wire", lambda s: s.zero.gather_wire != "same", "{zero.gather_wire=same}"),
    *_of_stage_3("zero.second_shard", lambda s: s.zero.second_shard is not None, "{zero.second_shard=null}"),
    Rule(
        "zero.second_shard",
        lambda s: not _is_number_or_node(s.zero.second_shard),
        "{zero.second_shard} is no number of ranks that keep a second shard together: type 2 or more, "
        "{zero.second_shard=node} for those of a host, or {zero.second_shard=null}.",
    ),
    Rule(
        "zero.slow_wire",
        lambda s: s.zero.slow_wire != SAME and s.mesh.shard is None,
        "{zero.slow_wire} is how sums travel between copies of shards, and states are cut over all of dp, without "
        "copies: type {mesh.shard=8}, or as many ranks as a host has, or {zero.slow_wire=same}.",
    ),
    Rule(
        "zero.slow_wire",
        lambda s: s.zero.slow_wire != SAME and s.zero.exact,
        "{zero.slow_wire} rounds sums of some ranks, which are others at every dp, and {zero.exact} wants the same "
        "bits: type {zero.slow_wire=same}.",
    ),
    Rule(
        "zero.slow_rounding",
        lambda s: s.zero.slow_rounding != "nearest" and not s.zero.sums_in_blocks,
        "{zero.slow_rounding} is of codes, and {zero.slow_wire} has none: type {zero.slow_wire=int8} or "
        "{zero.slow_wire=int4}, or {zero.slow_rounding=nearest}.",
    ),
    Rule(
        "mesh.experts",
        lambda s: s.mesh.experts == FAST and s.zero.exact,
        "{mesh.experts} adds up what the tokens of several ranks give in one product, whose bits depend on ep, and "
        "{zero.exact} wants the same ones at any: type {mesh.experts=exact}.",
    ),
    Rule(
        "mesh.schedule",
        lambda s: s.ep > 1 and s.pp > 1 and s.mesh.schedule in SPLIT_BACKWARDS,
        "{mesh.ep} in a pipeline whose schedule takes gradients of weights apart from those of inputs "
        "({mesh.schedule}) is not built: type {mesh.schedule=1f1b} or {mesh.schedule=interleaved}.",
    ),
    Rule(
        "mesh.sequence_parallel",
        lambda s: s.ep > 1 and s.mesh.sequence_parallel,
        "{mesh.ep} sends whole tokens, and {mesh.sequence_parallel} leaves a rank parts of a sequence: type "
        "{mesh.sequence_parallel=false}, or {mesh.ep=1}.",
    ),
    Rule(
        "mesh.sequence_parallel",
        lambda s: s.sp > 1 and s.mesh.sequence_parallel,
        "{mesh.sp} cuts activations along the sequence everywhere, and {mesh.sequence_parallel} between blocks over tp "
        "once more: type {mesh.sequence_parallel=false}.",
    ),
    Rule(
        "train.accumulate",
        lambda s: (
            s.zero.exact
            and s.sp > 1
            and s.accumulate > 1
            and (s.zero.reduce == "every_step" or s.zero.stage < 2 or s.pp > 1)
        ),
        "{zero.exact} with {mesh.sp} and {train.accumulate}: where gradients are reduced once a step, as below "
        "{zero.stage=2} and in pipelines, a rank's micro-batches are summed before the other parts of their sequences, "
        "which makes other bits than a reduction of each: type {zero.reduce=every_micro_batch} with {zero.stage=2} or "
        "3 and without a pipeline, or {train.accumulate=1}.",
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
        "{health.replay} has a neighbour compute a rank's micro-batch once more, and with {mesh.ep} that one has other "
        "experts: leave {health.replay} out.",
    ),
    Rule(
        "train.ema",
        lambda s: s.ema is not None and s.offload.states,
        "{train.ema} keeps averages beside states on the device, and with {offload.optimizer} and {offload.params} "
        "states leave it: type {offload.optimizer=none} {offload.params=none}, or {train.ema=null}.",
    ),
    Rule(
        "offload.optimizer",
        lambda s: s.coded and s.offload.states,
        "{optimizer.name} keeps moments of 8 bits on the device, and with {offload.optimizer} and {offload.params} "
        "states leave it: type {offload.optimizer=none} {offload.params=none}, or AdamW with {offload.moments=bf16}.",
    ),
    Rule(
        "precision",
        lambda s: s.coded and s.precision == "fp64",
        "{optimizer.name} updates fp32 masters, and {precision} has none: type {precision=bf16}, or use AdamW.",
    ),
    Rule(
        "model.linear",
        lambda s: s.linear is not None and s.precision != "bf16",
        "{model.linear} rounds bf16 factors of a product, and {precision} has others: type {precision=bf16}, or "
        "{model.linear=null}.",
    ),
    Rule(
        "model.linear",
        lambda s: s.linear is not None and s.tp > 1,
        "{model.linear} with {mesh.tp}, whose ranks would scale their own parts of a matrix, is not built: type "
        "{mesh.tp=1}, or {model.linear=null}.",
    ),
    Rule(
        "model.linear",
        lambda s: s.linear is not None and s.zero.gather_budget is not None,
        "{model.linear} multiplies by whole matrices, and {zero.gather_budget} gathers a few rows of them at a time: "
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
        "{model.quantize} has scales of scales over the whole of a matrix, which {mesh.tp} would cut: type "
        "{model.quantize=nf4}, or {mesh.tp=1}.",
    ),
    Rule(
        "offload.params",
        lambda s: s.offload.params != "none" and s.zero.stage != 3,
        "{offload.params} with {zero.stage}, which keeps all weights gathered on the device: type {zero.stage=3}, or "
        "{offload.params=none}.",
    ),
    Rule(
        "offload.gradients",
        lambda s: s.offload.gradients_leave and s.zero.stage in (0, 1),
        "{offload.gradients} with {zero.stage}, whose gradients are summed on the device once a step: type "
        "{zero.stage=2} or 3, or {offload.gradients=device}.",
    ),
    _in_files("optimizer"),
    _in_files("params"),
    _of_states_that_stay("moments", "bf16"),
    _of_states_that_stay("executor", HOST),
    Rule(
        "offload.gradients",
        lambda s: s.offload.gradients_leave and s.offload.optimizer == "none",
        "{offload.gradients} brings gradients to where states are updated, and offload.optimizer is none: type "
        "{offload.optimizer=host}, or {offload.gradients=device}.",
    ),
    Rule(
        "offload.moments",
        lambda s: s.offload.optimizer == AUTO and s.offload.moments == "bf16",
        "{offload.moments} with {offload.optimizer}: the training would depend on whether states fit the device, where "
        "moments are fp32: type {offload.optimizer=host}, or {offload.moments=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and not s.offload.gradients_leave,
        "{offload.gradient_dtype} is of gradients that wait off the device, and the training would depend on whether "
        "they do: type {offload.gradients=host}, or {offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and s.zero.exact,
        "{offload.gradient_dtype} rounds sums that {zero.exact} keeps to the bit: type {offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and s.precision == "fp64",
        "{offload.gradient_dtype} keeps 8 of the 53 binary digits of gradients in fp64: type "
        "{offload.gradient_dtype=fp32}, which keeps them all.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and (max(s.tp, s.pp) > 1 or s.shard < s.dp),
        "{offload.gradient_dtype} with tp or pp above 1 or mesh.shard below dp, which add gradients up once more when "
        "they are on the host: type {offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.gradient_dtype",
        lambda s: s.offload.gradient_dtype == "bf16" and s.orthogonal,
        "{offload.gradient_dtype} with {optimizer.name}, whose momentum takes the place of gradients: type "
        "{offload.gradient_dtype=fp32}.",
    ),
    Rule(
        "offload.fraction",
        lambda s: s.offload.optimizer == AUTO and s.offload.fraction != 1,
        "{offload.fraction} with {offload.optimizer}, which finds the fraction itself: leave it out, or type "
        "{offload.optimizer=host}.",
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
    return attrgetter(KEYWORDS.get(key, key))(spec) if told is None else told


def as_markdown() -> str:
    """Return all rules as a table, with settings by their keys in a file."""
    rows = [f"| `{rule.key}` | {SETTING.sub(lambda found: f'`{found[0][1:-1]}`', rule.text)} |" for rule in RULES]
    return "\n".join(["| key | what is refused, and what to type |", "|---|---|", *rows]) + "\n"
