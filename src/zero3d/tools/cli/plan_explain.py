"""`zero3d plan explain CONFIG KEY=VALUE ...`: what one configuration needs and how long its step takes, by terms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, NamedTuple

from zero3d.config import Config, split_words
from zero3d.errors import ConfigError
from zero3d.models.places import check_model_path, is_called
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.offload import AUTO
from zero3d.spec.sections import planned
from zero3d.spec.text import binary, columns
from zero3d.spec.tiers import OPTIMIZER, TIERS, tiers_of
from zero3d.tools.cli.kept_specs import open_spec
from zero3d.tools.cli.plan_options import (
    format_of,
    lora_of,
    margin_of,
    number,
    open_cluster,
    patches_of,
    price_of,
    remembered_of,
    room_of,
)
from zero3d.tools.cli.planned_file import lengths_of
from zero3d.tools.cli.planned_images import evaluated_by, images_of
from zero3d.tools.cli.preflight import check_tp
from zero3d.tools.cli.train import config_source
from zero3d.tools.page import explain_text, plan_json, plan_text
from zero3d.tools.plan import images
from zero3d.tools.plan.emit import plan_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.lengths import Lengths
from zero3d.tools.plan.margin import Ends, Margin, Range, ends, usable
from zero3d.tools.plan.memory import instants
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.rollout import Rollout, split
from zero3d.tools.plan.search import Row, Target, resized, tp_refused
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, Forward, ModelSpec, ParallelPlan
from zero3d.tools.plan.weights import weights_note, with_weights
from zero3d.tools.plan.what_if import WhatIf, faster, what_if
from zero3d.train.setup.left_out import load_filled

OF_A_SEARCH = {  # options of zero3d plan that one given run has no use for -> what to type instead
    "params": "model.path=MODEL",
    "seq": "data.length=TOKENS",
    "tokens_per_batch": "train.batch=SEQUENCES",
    "goal": "",
    "offload": "offload.optimizer=PLACE",
    "optimizer": "optimizer.name=NAME",
    "linear": "model.linear=fp8",
    "compile": "train.compile=true",
    "top": "",
    "emit": "",
    "emit_deepspeed": "",
}
PLACES = ("none", *tiers_of(OPTIMIZER))  # that auto tries in turn
TILES = "zero.gather_budget is left out, and needs less memory than this: zero3d simulate has it"


class Explained(NamedTuple):
    """Holds one plan, and what it must fit into.

    room    bytes of a GPU for it and its margin, which is a share of what is planned
    tokens  of the whole training; price: of a GPU-hour
    target  what other plans must do; priced: what prices them
    lengths of the run's own sequences; unknown: why nobody knows them
    """

    model: ModelSpec
    cluster: ClusterSpec
    row: Row
    room: float
    margin: Margin
    tokens: float | None
    price: float | None
    target: Target
    priced: Evaluate
    lengths: Lengths | None
    unknown: str

    @property
    def limit(self) -> float:
        """Return the bytes of a GPU that may be planned."""
        return usable(self.room, self.margin.share)

    @property
    def fits(self) -> bool:
        """Return whether a GPU and a node have room for the plan with its margin."""
        memory = self.row.estimate.memory
        return memory.device <= self.limit and not memory.lacks(self.cluster)

    @property
    def ends(self) -> Ends | None:
        """Return what would no longer fit; None where the plan itself does not."""
        return ends(self.model, self.cluster, self.row.plan, self.limit, evaluate) if self.fits else None

    def faster(self, knobs: Sequence[WhatIf]) -> list[WhatIf]:
        """Return single changes that are faster and fit, too."""
        return faster(knobs, self.row, partial(self.target.usable, self.model), self.cluster)


def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the terms; return 1 if --assert-fits gives a size and the plan needs more."""
    path, overrides = split_words(list(words))
    if path is None and not overrides:
        raise ConfigError("zero3d plan explain takes the file of a run: zero3d plan explain train.yaml --gpu a100-80")
    rollout = Rollout.of(arguments.rl) if arguments.rl else None
    config = load_filled(config_source(path, overrides)[1], overrides).config
    _refuse_search(arguments)
    asked, price = number(arguments.tokens, "--tokens"), price_of(arguments)
    margin = margin_of(arguments.margin)
    if arguments.quantize:
        config = replace(config, model=replace(config.model, quantize=format_of(arguments.quantize)))
    remembered = remembered_of(config.plan, overrides)
    cluster = open_cluster(arguments, remembered)
    if not is_called(config.model):
        check_model_path(replace(config.model, init="random"))  # a plan needs no weights
        check_tp(config)
    said = arguments.gpus or arguments.nodes or arguments.cluster or remembered.gpus
    plan = plan_of(config, cluster.gpus if said else None)
    lora = lora_of(arguments.lora) if arguments.lora else config.lora
    pictures, why = images_of(config)
    patches = patches_of(arguments) or (None if pictures is None else pictures.patches)
    model = open_spec(
        config.model.path,
        config.data.length,
        chosen=config.model,
        lora=lora,
        packed=bool(config.data.packing),
        freeze=config.freeze,
        forward=Forward(cluster.gpu.name != CPU, config.autocast, patches),
    )
    try:
        check(model, plan, cluster)
    except ConfigError:
        from zero3d.train.setup.text_part import naming_text_part  # with torch

        with naming_text_part(config):
            raise
    cluster = resized(cluster, plan.world)
    lengths, unknown = lengths_of(config)
    priced = cache(evaluated_by(lengths, None if arguments.patches else pictures))
    target = Target(plan.micro_batch * plan.accumulate * plan.rows, room_of(arguments, cluster), margin=margin)
    row = _first_that_fits(_with_places(plan, config), model, cluster, target, priced)
    if plan.zero.weights == AUTO:
        note = weights_note(model, row.plan.replace(weights=AUTO), cluster)
        row = row._replace(estimate=replace(row.estimate, notes=(*row.estimate.notes, note)))
    if config.zero.gather_budget is not None:
        row = row._replace(estimate=replace(row.estimate, notes=(*row.estimate.notes, TILES)))
    parts = None if rollout is None else split(model, row.plan, cluster, row.estimate, rollout)
    tokens = asked or _tokens(config, row.estimate)
    explained = Explained(
        model,
        cluster,
        row,
        target.room,
        target.margin_for(model, row.plan),
        tokens,
        price,
        target,
        priced,
        lengths,
        unknown,
    )
    about = row.estimate, row.plan, pictures
    if arguments.json:
        told = images.as_json(model, *about)
        more = ({} if told is None else {"images": told}) | ({} if parts is None else {"rl": asdict(parts)})
        print(json.dumps(_json(explained) | more, indent=2))
    else:
        for line in plan_text.folded(_lines(explained)):  # as they come: Ctrl-C leaves those that are known
            print(line, flush=True)
        for line in plan_text.folded(images.lines(model, *about, arguments.patches is not None, why)):
            print(line)
        print("\n".join([] if rollout is None or parts is None else explain_text.rollout_lines(rollout, parts)))
    return int(bool(arguments.assert_fits) and row.estimate.memory.device > explained.limit)


def _refuse_search(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that explain would not heed."""
    for name, word in OF_A_SEARCH.items():
        if getattr(arguments, name) != arguments.parser.get_default(name):
            instead = f": type {word}" if word else ", and one plan is explained: leave it out"
            raise ConfigError(f"--{name.replace('_', '-')} is an option of a search{instead}.")


def _with_places(plan: ParallelPlan, config: Config) -> list[ParallelPlan]:
    """Return the plan with states at each place that its file leaves open."""
    asked = planned(config.offload)
    if asked.optimizer != AUTO:
        return [plan]
    return [plan.replace(offload=replace(asked, optimizer=place).settled) for place in PLACES]


def _first_that_fits(
    plans: Sequence[ParallelPlan], model: ModelSpec, cluster: ClusterSpec, target: Target, priced: Evaluate
) -> Row:
    """Return the first plan that a GPU and a host have room for with its margin, else the last."""
    rows = [Row(with_weights(model, plan, cluster), priced(model, cluster, plan)) for plan in plans]
    for row in rows:
        memory = row.estimate.memory
        if memory.device <= target.usable(model, row.plan) and not memory.lacks(cluster):
            return row
    return rows[-1]


def check(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> None:
    """Raise ConfigError for degrees that do not divide the model."""
    why = tp_refused(model, plan.tp, max(cluster.per_node, plan.tp))
    if why is not None:
        raise ConfigError(f"mesh.tp={plan.tp} cannot be: {why}. Pass another mesh.tp.")
    if plan.pp > 1:
        Schedule.of(plan.schedule).check_blocks(len(model.blocks), plan.pp, model.name)


def _tokens(config: Config, estimate: Estimate) -> float | None:
    """Return the tokens of the whole training, where the file says how many steps it has."""
    return None if config.train.steps is None else float(config.train.steps * estimate.tokens)


def _json(explained: Explained) -> dict[str, Any]:
    """Return what the lines say as plain values."""
    model, cluster, row, _, margin, tokens, price = explained[:7]
    knobs = what_if(row, model, cluster, explained.priced)
    return {
        **plan_json.row_json(row),
        **plan_json.plan_json(model, cluster, row, explained.limit, margin, explained.ends),
        "fits": explained.fits,
        "lengths": plan_json.lengths_json(explained.lengths),
        "instants": [
            {"instant": name, **{category: size for category, size in parts.items() if size}}
            for name, parts in explain_text.shown_instants(instants(model, row.plan))
        ],
        "what_if": plan_json.knobs_json(knobs),
        "faster": plan_json.knobs_json(explained.faster(knobs)) if explained.fits else [],
        "cost": plan_json.cost_json(row.estimate, cluster, tokens, price),
    }


def _lines(explained: Explained) -> Iterator[str]:
    model, cluster, row = explained[:3]
    plan, estimate = row.plan, row.estimate
    yield from plan_text.heading(model, cluster, plan.micro_batch * plan.accumulate * plan.rows)
    yield plan_text.short(plan)
    yield from plan_text.without_bf16(plan, cluster)
    yield from plan_text.judged_lines(model, cluster, plan)
    yield from plan_text.lengths_lines(explained.lengths, explained.unknown, plan)
    yield ""
    yield from explain_text.memory_lines(estimate.memory)
    yield _verdict(explained)
    yield ""
    yield from explain_text.instant_lines(instants(model, plan))
    yield ""
    yield from explain_text.time_lines(row, cluster)
    yield from plan_text.cost_lines(estimate, cluster, explained.tokens, explained.price)
    yield ""
    yield "What if, one setting changed (memory, time of a step, what moves the peak):"
    knobs = what_if(row, model, cluster, explained.priced)
    yield from columns(plan_text.knob_rows(knobs[: plan_text.KNOBS], row, explained.limit, cluster), "<>><<")
    if explained.fits:
        yield plan_text.faster_line(explained.faster(knobs))
    for note in estimate.notes:
        yield f"Note: {note}"


def _verdict(explained: Explained) -> str:
    cluster, memory, room = explained.cluster, explained.row.estimate.memory, binary(explained.room)
    if lacks := memory.lacks(cluster):
        name, more = next(iter(lacks.items()))
        there = cluster.figure(TIERS[name].capacity)
        return f"Does not fit a {name} of {there / 1e9:.1f} GB: {more / 1e9:.1f} GB too much."
    planned = plan_text.around(memory.device, explained.margin.share)
    left = explained.room - Range.of(memory.device, explained.margin.share).high
    margin = f"a margin of {100 * explained.margin.share:.3g} %, {explained.margin.origin}"
    if memory.device > explained.room:
        over = memory.device - explained.room
        return f"Does not fit {room}: {planned} GiB, {binary(over)} too much, and {binary(-left)} with {margin}."
    if left < 0:
        return f"{plan_text.LACKING} Fits {room}, and lacks {binary(-left)} of {margin}: {planned} GiB."
    end = plan_text.would_end(explained.ends, explained.row.plan)
    return f"Fits {room} with {margin}: {planned} GiB, {binary(left)} left{end}."
