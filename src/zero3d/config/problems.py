"""Finds keys of a configuration that cannot be together, and gives an engine the sections that it takes otherwise.

What sections of zero3d/spec cannot be together is in spec/rules.py, for Engine's keywords and the planner, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero3d.config.deepspeed_schedules import OPTIONS, option_problems
from zero3d.config.kinds import convert, describe_value
from zero3d.config.sections import GAUSSIAN, GIVEN, PROMETHEUS, Config, Log, Lora, Optimizer
from zero3d.config.shrinking import degrees_of, refuse_shrinking
from zero3d.config.sources import DataSource
from zero3d.errors import ConfigError, short
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import HOST_BUDGET, Offload
from zero3d.spec.optimizer import OPTIMIZERS, OptimizerRow
from zero3d.spec.rules import refusals
from zero3d.spec.sections import Spec
from zero3d.spec.sizes import parse_size
from zero3d.stores.urls import is_url

TAKES_APART = "takes singular vectors out of the base, which then is that of no folder: an adapter would fit no base"
OTHER_INITS = {  # PEFT's init_lora_weights -> why there is no lora.init of this name
    "pissa": TAKES_APART,
    "olora": TAKES_APART,
    "corda": "takes directions of the data's activations out of the base, which then is that of no folder",
    "loftq": "makes adapters of what the base loses in 4 bits, so they fit no base but that one, and cannot be merged",
    "eva": "makes adapters of activations, for which the data would be read before the model is sharded",
    "lora_ga": "makes adapters of gradients of the whole base, for which it would be trained before it is sharded",
}
HELD_OUT = ("validation_loss", "perplexity", "ema_validation_loss")  # how names of values of the held-out data begin
FOLDER = "offload"  # of an output folder


def problems_across(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that cannot be as the others are, and why; the key is one that was given."""
    if config.train.steps is not None and config.train.epochs is not None:
        steps, epochs = config.train.steps, config.train.epochs
        text = f"train.steps {steps} and train.epochs {epochs:g} both say how long: leave one out, or set it to null."
        yield "train.epochs", text
    if config.plan.links != GIVEN and config.plan.cluster is None:
        text = (
            f"plan.links={config.plan.links} needs a description of the links: type plan.cluster=FILE, as zero3d "
            "calibrate writes it."
        )
        yield "plan.links", text
    for key, size in (
        ("zero.gather_budget", config.zero.gather_budget),
        ("mesh.sp_mask_budget", config.mesh.sp_mask_budget),
        ("data.cache_limit", config.data.cache_limit),
    ):
        try:
            if size is not None:
                parse_size(size, key)
        except ConfigError as error:
            yield key, str(error)
    if (why := refuse_shrinking(config)) is not None:
        yield "health.min_ranks", why
    yield from adapter_problems(config)
    yield from data_problems(config)
    yield from schedule_problems(config)
    yield from average_problems(config)
    yield from evaluation_problems(config)
    yield from optimizer_problems(config)
    yield from offload_problems(config)
    yield from log_problems(config)
    yield from url_problems(config)
    yield from refusals(spec_of(config))


def adapter_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of section `lora` that this run cannot have, and why."""
    choice, plain = config.lora, Lora()
    if choice.init not in (None, GAUSSIAN):
        named = choice.init.lower().partition("_niter_")[0]  # PEFT's pissa_niter_16
        why = OTHER_INITS.get(named, "is no way to draw adapters that zero3d has")
        yield "lora.init", f"lora.init {short(choice.init)} {why}: type lora.init={GAUSSIAN}, or leave it out."
    if choice.rank is not None:
        return
    for name in ("alpha", "targets", "dropout", "train_also", "rslora", "dora", "init"):
        if getattr(choice, name) != getattr(plain, name):
            text = f"lora.{name} is for adapters, and without lora.rank there are none: type lora.rank=16, too."
            yield f"lora.{name}", text


def data_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of section `data` that this run cannot have, and why."""
    data = config.data
    for source in data.validation if isinstance(data.validation, tuple) else ():
        if isinstance(source, DataSource) and source.weight is not None:
            text = (
                f"data.validation gives {short(source.path)} a weight, but evaluates all of it: leave the weight out."
            )
            yield "data.validation", text
    if data.group_by_length and data.packing:
        text = (
            "data.group_by_length puts sequences of similar length into a batch, and packed ones all have data.length:"
        )
        yield "data.group_by_length", f"{text} type data.packing=false, too."


def evaluation_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of section `evaluate` that this run cannot have, and why."""
    choice = config.evaluate
    if choice.function is None and not choice.best.startswith(HELD_OUT):
        text = f"evaluate.best={choice.best} would be a value of evaluate.function, which is not set: type"
        yield "evaluate.best", f"{text} evaluate.function=module:function, or evaluate.best={HELD_OUT[0]}."
    if choice.patience is None:
        return
    if choice.every == 0:
        text = f"evaluate.patience={choice.patience} counts evaluations, and with evaluate.every=0 there is only one:"
        yield "evaluate.patience", f"{text} type evaluate.every=STEPS, too."
    if choice.best.startswith(HELD_OUT) and not config.data.validation:
        text = f"evaluate.patience={choice.patience} waits for a better {choice.best}, and nothing is held out: type"
        yield "evaluate.patience", f"{text} data.validation=0.05, or evaluate.best=NAME of evaluate.function."


def average_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield why averages of weights cannot be evaluated."""
    best = config.evaluate.best
    if config.train.ema is None and best.startswith("ema_"):
        yield "evaluate.best", f"evaluate.best={best} is a value of averaged weights: type train.ema=0.999, too."


def schedule_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of the learning rate's schedule that cannot be, and why."""
    choice = config.schedule
    if choice.name in OPTIONS:
        key = "schedule.name" if choice.options is None else "schedule.options"
        yield from ((key, f"schedule.options: {why}") for why in option_problems(choice.name, choice.options or {}))
    elif choice.options is not None:
        text = (
            f"schedule.options are for DeepSpeed's schedules, and schedule.name is {choice.name}: type schedule.name="
        )
        yield "schedule.options", f"{text}{' or '.join(OPTIONS)}, or leave them out."
    if choice.name == "inverse_sqrt" and choice.warmup == 0:
        text = "schedule.name=inverse_sqrt falls as sqrt(warm-up / step), and schedule.warmup is 0:"
        yield "schedule.name", f"{text} type schedule.warmup=0.01, or a number of steps."
    shares = choice.warmup < 1 and choice.decay < 1
    if choice.name == "wsd" and shares and choice.warmup + choice.decay > 1:
        text = f"schedule.warmup {choice.warmup:g} + schedule.decay {choice.decay:g} of all steps are more than 1:"
        yield "schedule.decay", f"{text} type schedule.decay={1 - choice.warmup:g} or less."


def optimizer_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of the optimizer that cannot be, and why."""
    choice = config.optimizer
    for group in choice.groups or ():
        asked = OPTIMIZERS.get(str(group.get("name")))
        if asked is not None and choice.name in OPTIMIZERS and asked.name not in OPTIMIZERS[choice.name].group_names:
            text = f"optimizer.groups asks for {asked.title} for {str(group['match'])!r}, and optimizer.name is"
            yield "optimizer.groups", f"{text} {choice.name}: type optimizer.name={asked.name}, or leave it out."
            break
    for row in OPTIMIZERS.values():
        key = f"optimizer.{row.name}"
        for name, value in _own_options(choice, row).items():
            if name not in row.options:
                yield key, f"{key} has no {name!r}: it takes {', '.join(row.options)}."
                continue
            kind, fits, wants = row.options[name]
            try:
                fine = fits(convert(value, (kind,)))
            except ValueError:
                fine = False
            if not fine:
                yield key, f"{key}: {name} takes {wants}; found {describe_value(value)}."


def offload_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of section `offload` that this run cannot have, and why."""
    section = config.offload
    if section.host_budget is not None:
        try:
            parse_size(section.host_budget, HOST_BUDGET)
        except ConfigError as error:
            yield HOST_BUDGET, str(error)


def log_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of a tracker's port that would do nothing, and what to type."""
    choice = config.log
    if choice.port is not None and PROMETHEUS not in choice.trackers:
        text = f"log.port={choice.port} answers Prometheus, which log.to does not name: type log.to={PROMETHEUS}, too."
        yield "log.port", text
    if choice.host != Log().host and choice.port is None:
        yield "log.host", f"log.host={short(choice.host)} is listened on at log.port: type log.port=9400, too."


def url_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that has a URL of an object store and takes none, or the other way round, and what to type."""
    paths = {
        "output": (config.output, "a run keeps logs and locks in it: type output=FOLDER checkpoint.to={url}"),
        "model.path": (config.model.path, "weights are read in place: copy the folder to this host, and name that"),
        "data.tokenizer": (config.data.tokenizer, "copy the folder to this host, and name that"),
        "data.images": (config.data.images, "images are read in place: copy them to this host, and name that folder"),
        "data.cache": (config.data.cache, "tokens are mapped into memory: name a folder of this host"),
        "offload.directory": (
            config.offload.directory,
            "states are read and written in place: name a folder on a disk",
        ),
        "plan.cluster": (config.plan.cluster, "copy the file to this host, and name that"),
    }
    for name, (value, remedy) in paths.items():
        if value is not None and is_url(value):
            yield name, f"{name}={short(value)} is in an object store; {remedy.format(url=short(value))}."
    to = config.checkpoint.to
    if to is not None and not is_url(to):
        text = f"checkpoint.to={short(to)} is no URL of an object store: type one such as checkpoint.to=s3://bucket/run"
        yield "checkpoint.to", f"{text}; output=FOLDER names a folder of this host."


def spec_of(config: Config) -> Spec:
    """Return what rules are about. A run gets a folder later; what only an axis has counts where there is one."""
    mesh = config.mesh
    for axis, degree in degrees_of(mesh).items():
        if (degree or 1) == 1:
            mesh = replace(mesh, **Mesh().options(axis))
    offload = replace(config.offload, directory=config.offload.directory or FOLDER)
    return Spec(
        zero=config.zero,
        offload=offload,
        mesh=mesh,
        precision=config.precision,
        autocast=config.autocast,
        activations=config.activations,
        optimizer=config.optimizer.name,
        accumulate=config.train.accumulate or 1,
        ema=config.train.ema,
        replay=config.health.replay,
        linear=config.model.linear,
        quantize=config.model.quantize,
    )


# --- as an engine takes them ---------------------------------------------------------------------


def optimizer_arguments(choice: Optimizer) -> dict[str, Any]:
    """Return what a checked section gives the function that its optimizer's row names; options of its own key win."""
    row = OPTIMIZERS[choice.name]
    own = {name: convert(value, (row.options[name].kind,)) for name, value in _own_options(choice, row).items()}
    return {name: getattr(choice, key) for name, key in row.takes.items()} | own


def _own_options(choice: Optimizer, row: OptimizerRow) -> Mapping[str, Any]:
    """Return what is given under an optimizer's own key; nothing where it has none."""
    return (getattr(choice, row.name) or {}) if row.options else {}


def offload_of(config: Config) -> Offload:
    """Return the section; its folder is OUTPUT/offload where it names none and the output has a name.

    Raises ConfigError.
    """
    asked = config.offload
    if asked.directory is None and config.output is not None:
        asked = replace(asked, directory=str(Path(config.output) / FOLDER))
    return Offload.of(asked)
