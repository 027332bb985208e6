"""What `zero3d plan explain` says of one plan: memory, instants, seconds by terms, what would be faster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from zero3d.spec.text import GIB, columns, size
from zero3d.tools.page.plan_text import figure, mfu, places_lines, seconds_text
from zero3d.tools.plan.rollout import Rollout, Split
from zero3d.tools.plan.search import Row
from zero3d.tools.plan.spec import ClusterSpec, Memory


def terms(parts: Mapping[str, float], total: float, scale: float, unit: str) -> Iterator[str]:
    """Yield lines of a breakdown with shares, the largest first; what is below 0.05 % is left out."""
    rows = [
        (name, f"{figure(value / scale)} {unit}", f"{100 * value / total:.1f} %")
        for name, value in sorted(parts.items(), key=lambda item: -abs(item[1]))
        if abs(value) > 5e-4 * total
    ]
    yield from columns(rows, "<>>")


def memory_lines(memory: Memory) -> Iterator[str]:
    """Yield lines: the four meanings of memory, and what is there at the peak."""
    yield f"Memory of the fullest GPU: {memory.device / GIB:.2f} GiB as a device monitor shows it"
    yield from columns(
        [
            ("model states", f"{memory.states / GIB:.2f} GiB"),
            ("most allocated", f"{memory.allocated / GIB:.2f} GiB"),
            ("reserved for it", f"{memory.reserved / GIB:.2f} GiB"),
            ("of the fullest host", f"{memory.host / 1e9:.2f} GB"),
            *((f"of its {name}", f"{held / 1e9:.2f} GB") for name, held in memory.tiers.items() if held),
        ],
        "<>",
    )
    for line in places_lines(memory):
        yield f"{line[0].upper()}{line[1:]}"
    yield f"At the peak, {memory.instant}:"
    yield from terms(memory.parts, memory.allocated, GIB, "GiB")


LEAST = 5e-4  # of all that is alive at the peak: less at every instant is no column
HELD = {  # what is alive at an instant, by what it is for
    "states": ("parameters", "optimizer", "ring"),
    "gradients": ("gradients",),
    "activations": ("activations", "temporary", "passed", "batch"),
    "buffers": ("gathered", "bucket", "wire"),
    "padding": ("padding",),
}


PLACE = re.compile(r"(?:\w+\.)*(\w+\.\d+)(?:/\S+)?")  # of a block: model.layers.17/frozen-bf16


def shown_instants(instants: Sequence[tuple[str, Mapping[str, float]]]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield instants; of the blocks between the first and the last whose backward it is, only one that is the peak."""
    of_blocks = [
        at for at, (name, _) in enumerate(instants) if name.startswith("backward of") and "the embedding" not in name
    ]
    peak = max(range(len(instants)), key=lambda at: sum(instants[at][1].values()))
    yield from (each for at, each in enumerate(instants) if at == peak or at not in of_blocks[1:-1])


def instant_lines(instants: Sequence[tuple[str, Mapping[str, float]]]) -> Iterator[str]:
    """Yield a table of what is alive at each instant of a step."""
    shown = [
        (name, [sum(parts.values()), *(sum(parts.get(each, 0.0) for each in of) for of in HELD.values())])
        for name, parts in shown_instants(instants)
    ]
    most = [max(column) for column in zip(*(held for _, held in shown), strict=True)]
    kept = [i for i, nbytes in enumerate(most) if i == 0 or nbytes > LEAST * most[0]]
    head = ["all", *HELD]
    rows = [(PLACE.sub(r"\1", name), *(f"{held[i] / GIB:.3g}" for i in kept)) for name, held in shown]
    yield "Alive at each instant of a step, in GiB:"
    yield from columns([("", *(head[i] for i in kept)), *rows], "<" + ">" * len(kept))


def time_lines(row: Row, cluster: ClusterSpec) -> Iterator[str]:
    """Yield lines: a step's seconds, what they go into, and what a rank sends."""
    estimate, world = row.estimate, row.plan.world
    seconds = estimate.seconds
    rate = estimate.tokens / seconds.mid
    yield (
        f"A step of {estimate.tokens:,} tokens: {seconds_text(seconds)} s, {rate:,.0f} tokens/s "
        f"({rate / world:,.0f} per GPU), {estimate.flops / seconds.mid / world / 1e12:.1f} useful TFLOP/s per GPU, "
        f"MFU {100 * mfu(row, cluster):.0f} %"
    )
    yield from terms(seconds.parts, seconds.mid, 1.0, "s")
    yield "Sent by the busiest rank in a step:"
    yield from columns(
        [(name, size(int(value))) for name, value in estimate.traffic.items()] or [("nothing", "")], "<>"
    )


def rollout_lines(rollout: Rollout, split: Split) -> Iterator[str]:
    """Yield lines: what a step of reinforcement learning is split into, and a stream of weights by link."""
    stream = split.streaming
    slowest = max(stream.seconds.values())
    yield ""
    yield (
        f"A step of reinforcement learning: {rollout.prompts:,} prompts x {rollout.samples:,} completions of "
        f"{rollout.new:,} tokens"
    )
    gpus = "one GPU" if split.sampler == 1 else f"{split.sampler} GPUs"
    yield from columns(
        [
            ("sampling, at least", f"{split.sampling:.3g} s", f"a copy of the model on {gpus}"),
            ("streaming", f"{slowest:.3g} s", f"{size(int(stream.nbytes))}, over the slowest link"),
            ("training", f"{split.training:.3g} s", f"{split.steps:,} steps"),
        ],
        "<><",
    )
    yield "A stream of all weights:"
    yield from columns([(name, f"{seconds:.3g} s") for name, seconds in stream.seconds.items()], "<>")
