"""A finished run as tables for people and as JSON for programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero3d.config import Config, to_dict
from zero3d.config.sections import FULL
from zero3d.engine.report_view import steps_in_words
from zero3d.expert_parallel.traffic import Busiest
from zero3d.spec.tiers import DEVICE
from zero3d.stores.cache import shown as shown_path
from zero3d.train import tables
from zero3d.train.curve import as_text, last_average, smooth
from zero3d.train.metrics import finite, losses
from zero3d.train.progress import held
from zero3d.train.run import Result
from zero3d.train.run_plot import draw_run
from zero3d.train.series import Series
from zero3d.train.step_times import of_history, where_it_went

CURVE = 10  # steps from which a curve is drawn


def show(result: Result, console: Console) -> None:
    """Print everything and write run.png; of a session without a step nothing but where its run's results are."""
    if result.steps:
        show_session(result, console)
    for line in (*summary(result), *verdicts(result)):
        console.print(Text(line), soft_wrap=True)
    if result.steps:
        console.print(Text(write_png(result)), soft_wrap=True)


def show_session(result: Result, console: Console) -> None:
    """Print what this session's steps were: the curve, a sample; memory and traffic to the byte where that is asked."""
    if console.encoding.startswith("utf") and len(result.history) >= CURVE:
        console.print(Text("\nloss (nats per token), running average", style="bold"))
        for line in as_text(smooth(losses(result.history))):
            console.print(line, highlight=False, no_wrap=True)
    if result.sample:
        prompt = result.config.evaluate.prompt
        start = "the first tokens of the data" if prompt is True else repr(prompt)
        console.print(Text(f"\na sample that starts with {start}:", style="bold"))
        console.print(Text("\n".join(f"    {line}" for line in result.sample.splitlines())), soft_wrap=True)
    console.print()
    if result.config.log.report != FULL:
        return
    console.print(memory_table(result))
    console.print()
    if any(row.place != DEVICE for row in result.memory):
        console.print(tables.tiers_table(result.memory))
        console.print()
    console.print(traffic_table(result))
    console.print()


def memory_table(result: Result) -> Table:
    """Return bytes on the device of rank 0 by consumer."""
    config = result.config
    settings = f"stage {config.zero.stage}, {config.precision}"
    return tables.memory_table(result.memory, result.ranks, settings, result.peak_held)


def traffic_table(result: Result) -> Table:
    """Return what rank 0 sent in the whole session, by operation."""
    return tables.traffic_table(result.traffic, result.ranks, steps_of(result))


OF_WEIGHTS = "of the exact weights; this run computes with rounded ones (zero.gather_wire)"
OF_BASE = "on the base in full precision, before it was quantised (model.quantize)"


def summary(result: Result) -> Iterator[str]:
    """Yield where the results are, the losses, how fast it was, and all else that was found."""
    yield f"results: {result.folder.root}"
    held_out, reloaded = result.held_out_loss, result.reloaded_loss
    if result.history:
        course = losses(result.history)
        average, many = last_average(course)
        yield f"loss: {course[-1]:.6f} in the last step, {average:.4f} on the average of the last {many}"
    if math.isfinite(held_out):
        yield f"held-out loss: {held_out:.6f} nats per token, perplexity {math.exp(min(held_out, 700.0)):,.3f}"
    if math.isfinite(result.averaged_loss):
        yield f"held-out loss of averaged weights: {result.averaged_loss:.6f} nats per token"
    if result.steps:
        yield _pace(result)
        yield from where_it_went(of_history(result.steps))
        if result.slowest is not None:
            yield result.slowest
    if result.of_sources:
        yield f"of each source: {', '.join(f'{name} {loss:.6f}' for name, loss in result.of_sources.items())}"
    if result.values:
        yield f"evaluated: {', '.join(f'{name} {value:g}' for name, value in result.values.items())}"
    if busiest := Busiest.of(result.expert_load):
        yield f"expert load: the busiest of {busiest.layer}, the least even layer, has {busiest.ratio:.2f} x the mean"
    for number, folder in enumerate(result.exports):
        averaged, exported = result.config.train.ema is not None, result.exported_loss
        line = f"{folder}{' (averages of the weights, train.ema)' if averaged else ''}"
        checked = result.config.checkpoint.verify and number == 0
        if checked and (math.isfinite(reloaded) or math.isfinite(exported)):
            other = _difference(result.config) if math.isfinite(reloaded) else "NOT the same"
            same = "the same" if math.isclose(exported, reloaded, rel_tol=1e-6) else other
            line += f" loaded with {result.reloaded_by}.from_pretrained: {reloaded:.6f}, {same}"
        yield f"exported: {line}"
    if result.fingerprint and result.history:
        yield f"exact: last loss {float(losses(result.history)[-1]).hex()}, states {result.fingerprint}"
    yield f"checkpoint: {shown_path(result.checkpoint)}    metrics: {result.folder.metrics}"
    if result.trace is not None:
        steps = steps_in_words(result.config.profile.steps)
        yield f"trace of {steps} on all ranks: {result.trace}, for ui.perfetto.dev"


def _pace(result: Result) -> str:
    """Return how long the session took, how fast its steps were, and what the fullest rank held."""
    steady = result.steps[1:] or result.steps  # the first step also allocates
    rate = statistics.median(record["tokens_per_s"] for record in steady)
    used = [record["mfu"] for record in steady if record.get("mfu")]
    mfu = f", MFU {statistics.median(used):.1%}" if used else ""
    most = held(result.peak_memory, result.peak_reserved)
    each = f" ({rate / result.ranks:,.0f} a rank)" if result.ranks > 1 else ""
    return (
        f"trained {steps_of(result)} in {result.seconds:.1f} s, median step {rate:,.0f} tokens/s{each}"
        f"{mfu}; fullest rank at its peak: {most}"
    )


def verdicts(result: Result) -> Iterator[str]:
    """Yield memory and traffic of this session in a line each: whether they are those of the formulas."""
    if not result.steps:
        return
    yield from tables.memory_verdict(result.memory, result.peak_held)
    yield tables.traffic_verdict(result.traffic, len(result.steps))
    if result.config.log.report != FULL:
        yield f"to the byte: zero3d report {result.folder.root}, or log.report={FULL} in a run"


def steps_of(result: Result) -> str:
    """Count this session's steps in words."""
    return steps_in_words(len(result.steps))


def _difference(config: Config) -> str:
    """Return the explanation of an export's loss that differs from the run's."""
    if config.model.quantize is not None:
        return OF_BASE
    return OF_WEIGHTS if config.zero.gather_wire != "same" else "NOT the same"


def write_png(result: Result) -> str:
    """Draw run.png; return the line that says so, or names the package to install."""
    config = result.config
    title = f"{config.model.path}: stage {config.zero.stage}, {config.precision}, {result.ranks} ranks"
    try:
        draw_run(Series.of(result.history, result.saves), title, result.folder.curves)
    except ImportError:
        return "no run.png: matplotlib is missing, type pip install 'zero3d[plot]'"
    except OSError as error:
        return f"no run.png: {result.folder.curves} cannot be written ({error.strerror})"
    return f"curves: {result.folder.curves}"


def as_json(result: Result) -> dict[str, Any]:
    """Return one object with all figures; what is not finite is null."""
    folder, config, steps = result.folder, result.config, result.steps
    steady = steps[1:] or steps  # the first step also allocates
    seconds = statistics.median(record["seconds"] for record in steady) if steady else None
    curves = folder.curves
    return {
        "stage": config.zero.stage,
        "precision": config.precision,
        "ranks": result.ranks,
        "params": result.params,
        "layers": result.layers,
        "batch": vars(result.batch),
        "steps": len(result.history),
        "seconds": result.seconds,
        "step_seconds": seconds,
        "samples_per_s": result.batch.batch / seconds if seconds else None,
        "losses": [finite(loss) for loss in losses(result.history)],
        "held_out_loss": finite(result.held_out_loss),
        "averaged_loss": finite(result.averaged_loss),
        "held_out_losses": {name: finite(loss) for name, loss in result.of_sources.items()},
        "values": {name: finite(value) for name, value in result.values.items()},
        "ended_early": result.ended_early,
        "fingerprint": result.fingerprint or None,
        "expert_load": result.expert_load,
        "reloaded_loss": finite(result.reloaded_loss),
        "skipped": result.history[-1]["skipped"] if result.history else 0,
        "sample": result.sample,
        "peak_memory": result.peak_memory,
        "peak_held": result.peak_held,
        "peak_reserved": result.peak_reserved,
        "peak_host": result.peak_host,
        "memory": [row.as_json() for row in result.memory],
        "traffic": [row.as_json() for row in result.traffic],
        "config": to_dict(config),
        "paths": {
            "folder": str(folder.root.resolve()),
            "checkpoint": shown_path(result.checkpoint.resolve()),
            "export": str(result.exports[0].resolve()) if result.exports else None,
            "exports": [str(path.resolve()) for path in result.exports],
            "metrics": str(folder.metrics.resolve()),
            "trace": None if result.trace is None else str(result.trace.resolve()),
            "loss_curve": str(curves.resolve()) if curves.exists() else None,
        },
    }
