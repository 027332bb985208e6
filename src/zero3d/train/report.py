"""A finished run as tables for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero3d.train.curve import as_png, as_text, smooth
from zero3d.train.demo import PROMPT, Result


def show(result: Result, console: Console) -> None:
    """Print everything and write loss.png."""
    if console.encoding.startswith("utf"):
        console.print(Text("\nloss (nats per byte), running average", style="bold"))
        for line in as_text(smooth([record.loss for record in result.history])):
            console.print(line, highlight=False, no_wrap=True)
    console.print(f"\na sample that starts with {PROMPT!r}:", style="bold", highlight=False)
    console.print(Text("\n".join(f"    {line}" for line in result.sample.splitlines())), soft_wrap=True)
    console.print()
    console.print(memory_table(result))
    console.print()
    console.print(traffic_table(result))
    console.print()
    for line in summary(result):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(write_png(result)), soft_wrap=True)


def memory_table(result: Result) -> Table:
    """Bytes on rank 0 by consumer."""
    recipe = result.recipe
    title = f"memory of rank 0 of {result.ranks}, stage {recipe.stage}, {recipe.precision}, in bytes"
    table = _table(title, ("consumer", "dtype"), ("measured",))
    for row in result.memory:
        formula = "" if row.formula is None else f"{row.formula:,}"
        table.add_row(row.consumer, row.dtype, f"{row.measured:,}", _verdict(row.agrees, row.at_most), formula)
    table.caption = "temporary: most held at an instant. activations: saved in one forward."
    return table


def traffic_table(result: Result) -> Table:
    """What rank 0 sent in the whole run, by operation."""
    title = f"traffic of rank 0 of {result.ranks} in {len(result.history)} steps"
    table = _table(title, ("operation",), ("calls", "elements", "bytes"))
    for row in result.traffic:
        figures = (f"{figure:,}" for figure in row.measured)
        table.add_row(row.op, *figures, _verdict(row.equal, at_most=False), f"{row.formula.bytes:,}")
    table.caption = "the verdict is on calls, elements and bytes of every unit" if result.traffic else "one rank: none"
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Columns of text and of figures, then the verdict and the formula's figure."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", title_style="bold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("formula", justify="right", no_wrap=True)
    return table


def _verdict(agrees: bool | None, at_most: bool) -> Text:
    if agrees is None:
        return Text("")
    if agrees:
        return Text("at most" if at_most else "equal", style="green")
    return Text("ABOVE" if at_most else "UNEQUAL", style="bold red")


def summary(result: Result) -> Iterator[str]:
    """The losses and where everything is."""
    yield f"trained {len(result.history)} steps in {result.seconds:.1f} s"
    held_out, reloaded = result.held_out_loss, result.reloaded_loss
    yield f"held-out loss: {held_out:.6f} nats per byte ({held_out / math.log(2):.3f} bits; a guess costs 8)"
    same = "the same" if math.isclose(held_out, reloaded, rel_tol=1e-6) else "NOT the same"
    yield f"{result.export} loaded with AutoModelForCausalLM.from_pretrained: {reloaded:.6f}, {same}"
    yield f"checkpoint: {result.checkpoint}    metrics: {result.folder / 'metrics.jsonl'}"


def write_png(result: Result) -> str:
    """Draw loss.png; the line that says so, or what to install."""
    path, recipe = result.folder / "loss.png", result.recipe
    title = (
        f"stage {recipe.stage}, {recipe.precision}, dp {result.ranks}: a byte-level Llama on Python's standard library"
    )
    try:
        as_png([record.loss for record in result.history], result.held_out_loss, title, path)
    except ImportError:
        return "no loss.png: matplotlib is missing, type pip install 'zero3d[plot]'"
    return f"loss curve: {path}"


def as_json(result: Result) -> dict[str, Any]:
    """One object with all figures; what is not finite is null."""
    curve = result.folder / "loss.png"
    return {
        "stage": result.recipe.stage,
        "precision": result.recipe.precision,
        "ranks": result.ranks,
        "params": result.params,
        "steps": len(result.history),
        "seconds": result.seconds,
        "losses": [_finite(record.loss) for record in result.history],
        "held_out_loss": _finite(result.held_out_loss),
        "reloaded_loss": _finite(result.reloaded_loss),
        "sample": result.sample,
        "memory": [row._asdict() for row in result.memory],
        "traffic": [
            {"op": row.op, "formula": row.formula._asdict(), "measured": row.measured._asdict(), "equal": row.equal}
            for row in result.traffic
        ],
        "paths": {
            "folder": str(result.folder.resolve()),
            "checkpoint": str(result.checkpoint.resolve()),
            "export": str(result.export.resolve()),
            "metrics": str((result.folder / "metrics.jsonl").resolve()),
            "loss_curve": str(curve.resolve()) if curve.exists() else None,
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
