"""Runs of `zero3d train` on the ranks of a test: a saved model, rows of token ids, a configuration as a tree."""

import json
import re
import signal
import sys
import tempfile
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy
from models import VOCAB, hf

from zero3d.zero.step_parts import PARTS

ROWS, LENGTH = 14, 16
MOVING = (
    "seconds", "tokens_per_s", "tokens_per_s_per_rank", "tflops_per_rank", "wait_s", "memory_bytes", "peak_memory_bytes",
    "reserved_bytes", "save_seconds", "save_bytes", "save_wait_s", "resumed_from",
)  # fmt: skip
TIMES = re.compile(rf"({'|'.join(PARTS)})_s(_least|_largest)?")

SAVED = {}  # by arguments of `save_model`: files


def save_model(folder, name="llama", vocab=VOCAB, **changes):
    """A tiny model as `save_pretrained` leaves it; `changes` are of its config."""
    key = str((name, vocab, changes))
    if key not in SAVED:
        model = hf(name, inner=96, vocab=vocab)
        for setting, value in changes.items():
            setattr(model.config, setting, value)
        with tempfile.TemporaryDirectory() as made:
            model.save_pretrained(made)
            SAVED[key] = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file, content in SAVED[key].items():
        (Path(folder) / file).write_bytes(content)
    return folder


def save_rows(path, rows=ROWS, length=LENGTH, seed=0):
    """Token ids [rows, length]: what a sequence is, and in which order, needs no code of zero3d."""
    numpy.save(path, numpy.random.default_rng(seed).integers(3, VOCAB, (rows, length), dtype=numpy.int64))
    return path


def tree(folder, output="out", saved="model", **sections):
    """A configuration: fp32, five steps of four rows in their order, all of it below `folder`."""
    made = {
        "output": str(Path(folder) / output),
        "precision": "fp32",
        "model": {"path": str(Path(folder) / saved)},
        "data": {"train": str(Path(folder) / "rows.npy"), "length": LENGTH, "shuffle": False},
        "train": {"steps": 5, "batch": 4, "accumulate": 2},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup": 2},
        "checkpoint": {"export": False},
        "evaluate": {"prompt": None},
    }
    made["data"]["cache"] = str(Path(folder) / "cache")
    for name, value in sections.items():
        made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
    return made


TRACED = {}  # what plans are made of, by all that it depends on


def start(*given, planned=True, **options):
    """How a run begins, with the planner that `zero3d train` gives it or with none."""
    from zero3d.tools.advice.planner import RunPlanner
    from zero3d.train.start import Start

    return Start(*given, **options, **({"planner": RunPlanner()} if planned else {}))


def traced_once():
    """Let runs of this process trace a model once, inside: tracing takes half the time of a short run."""
    from zero3d.tools.sim.model_spec import trace

    def settings_of(module):
        return {k: v for k, v in vars(module).items() if isinstance(v, (str, bool, int, float)) and k != "name_or_path"}

    def known(model, length, name, packed, kernels=(), autocast=None):
        config = getattr(model, "config", None)
        described = {**config.to_dict(), "attention": config._attn_implementation} if config is not None else {}
        described.pop("_name_or_path", None)
        modules = [(place, type(module), settings_of(module)) for place, module in model.named_modules()]
        parameters = [(place, p.shape, p.dtype, p.requires_grad) for place, p in model.named_parameters()]
        key = str((described, modules, parameters, length, packed, autocast))
        if key not in TRACED:
            TRACED[key] = trace(model, length, name, packed, autocast=autocast)
        return replace(TRACED[key], name=name)

    return mock.patch("zero3d.tools.advice.planned_run.trace", known)


def train(made, resume=None, stop_in=None, overwrite=False, planned=True):
    """One rank's part of a whole run; its records. `stop_in`: the step in which this rank gets a SIGTERM."""
    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run
    from zero3d.train.stop import Stopped

    class Interrupted(Progress):
        def track(self, first, last):
            for step in super().track(first, last):
                if step == stop_in:
                    signal.raise_signal(signal.SIGTERM)
                yield step

    try:
        with traced_once():
            result = run(
                load(made), start("test", resume, overwrite, planned=planned), Interrupted(Console(quiet=True))
            )
    except Stopped as stop:
        return str(stop)
    return [dict(record) for record in result.history]


def told(made, **patched):
    """The losses of one rank's part of a run, and the lines that it says. patched: names of zero3d's -> values."""
    from contextlib import ExitStack

    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    lines = []

    class Noted(Progress):
        def say(self, line):
            lines.append(line)

    with ExitStack() as stack:
        stack.enter_context(traced_once())
        for name, value in patched.items():
            stack.enter_context(mock.patch(name.replace("__", "."), value))
        result = run(load(made), start("test"), Noted(Console(quiet=True)))
    return [record["loss"] for record in result.history], lines


def run_in(folder, words, resume=None):
    """One rank's part of `zero3d train WORDS` in `folder`; what --json prints. Its launcher is what is left out."""
    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.report import as_json
    from zero3d.train.run import run

    file, *overrides = words
    path = list(sys.path)
    try:
        with chdir(folder), traced_once():
            return as_json(
                run(load(Path(file), overrides), start(Path(file).stem, resume), Progress(Console(quiet=True)))
            )
    finally:
        sys.path[:] = path  # a module of one's own is looked for in the current folder


def field(records, name):
    """One field of all records."""
    return [record[name] for record in records]


def metrics(made):
    """metrics.jsonl, line by line."""
    return [json.loads(line) for line in (Path(made["output"]) / "metrics.jsonl").read_text().splitlines()]


def steady(record, *besides):
    """A record without what is no part of the training, times and memory, and without what is named besides."""
    left_out = (*MOVING, *besides)
    return {name: value for name, value in record.items() if name not in left_out and not TIMES.fullmatch(name)}


def contents(folder):
    """Every file below it with its bytes."""
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def refused(ranks, made, *start):
    """The error of a start that must change no file of its output folder."""
    before = contents(made["output"])
    errors = [error for _, error in ranks(2, train, made, *start, check=False)]
    assert all(errors)
    assert contents(made["output"]) == before
    assert "\n" not in errors[0]
    return errors[0]
