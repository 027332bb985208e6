"""A reader of runs published since (published/*.csv): mixtures over ep, sequences over several ranks, adapters.

A row whose source does not tell what was run, or whose card no catalogue has, gives the reason in its column
`unknown`: it is listed, and not guessed.

    model            blocks  hidden  attention                           MLP, or experts: all, chosen, width, shared
    ---------------  ------  ------  ----------------------------------  -------------------------------------------
    Llama, Qwen2.5   32-126  3.6-16k grouped keys                        11-53k
    Qwen3-30B-A3B    48      2,048   32/4 heads of 128                   128, 8, 768, 0
    DeepSeek-V3      61      7,168   128 heads, latent (1,536 and 512)   3 blocks of 18,432; 256, 8, 2,048, 1
    Kimi-K2          61      7,168   64 heads, latent (1,536 and 512)    1 block of 18,432; 384, 8, 2,048, 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from planner_constants import Planner
from planner_tables import GIB, Point, Row, Unknown, machines, number, whole
from planner_tables_adapters import Shape, traced

from zero3d.tools.plan.shapes import fused, llama
from zero3d.tools.plan.spec import ModelSpec, Operations, ParallelPlan, Part, Unit, Weight

DENSE = {"Llama-3.1-8B": (32, 4096, 32, 8, 14336, 128256), "Llama-3.1-70B": (80, 8192, 64, 8, 28672, 128256),
         "Llama-3.1-405B": (126, 16384, 128, 8, 53248, 128256), "Qwen2.5-7B": (28, 3584, 28, 4, 18944, 152064),
         "Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064)}  # fmt: skip


class Mixture(NamedTuple):
    """The shape of a mixture of experts.

    attention  matrices [out, in] of a block's attention; scored: widths of queries and of values, over all heads
    dense      blocks without experts, of width `wide`; shared: experts that every token meets
    """

    blocks: int
    hidden: int
    heads: int
    attention: tuple[tuple[int, int], ...]
    scored: int
    experts: int
    chosen: int
    width: int
    vocab: int
    shared: int = 0
    dense: int = 0
    wide: int = 0


def latent(hidden: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Return the matrices of DeepSeek-V3's latent attention: heads of 128 + 64 for queries, of 128 for values."""
    return (1536, hidden), (heads * 192, 1536), (576, hidden), (heads * 256, 512), (hidden, heads * 128)


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(48, 2048, 32, ((4096, 2048), (512, 2048), (512, 2048), (2048, 4096)), 2 * 4096,
                             128, 8, 768, 151936),
    "DeepSeek-V3": Mixture(61, 7168, 128, latent(7168, 128), 128 * (192 + 128), 256, 8, 2048, 129280, 1, 3, 18432),
    "Kimi-K2": Mixture(61, 7168, 64, latent(7168, 64), 64 * (192 + 128), 384, 8, 2048, 163840, 1, 1, 18432),
}  # fmt: skip


def mixture(shape: Mixture, length: int) -> ModelSpec:
    """Make a mixture of experts with fused norms and attention, its head a matrix of its own."""
    hidden = shape.hidden
    plain = llama(2, hidden, shape.heads, shape.heads, 1, shape.vocab, length)
    blocks = tuple(_block(shape, f"layers.{i}", length, i < shape.dense) for i in range(shape.blocks))
    parts = (plain.parts[0], *blocks, plain.parts[-1])
    return replace(plain, name=f"a mixture of {shape.blocks} x {hidden}", parts=parts, experts=shape.experts,
                   chosen=shape.chosen)  # fmt: skip


def _block(shape: Mixture, name: str, length: int, dense: bool) -> Part:
    """Make a block: attention, and an MLP or a router, experts and shared experts."""
    hidden = shape.hidden
    met = shape.wide if dense else shape.width * (shape.chosen + shape.shared)  # width that a token meets
    whole = shape.wide if dense else shape.width * shape.shared
    shapes = [*shape.attention, *(((2 * whole, hidden), (hidden, whole)) if whole else ())]
    weights = [Weight(f"{name}.{i}", matrix, cut=0) for i, matrix in enumerate(shapes)]
    if not dense:
        weights += [Weight(f"{name}.router", (shape.experts, hidden)),
                    Weight(f"{name}.up", (shape.experts, 2 * shape.width, hidden), stacked=True),
                    Weight(f"{name}.down", (shape.experts, hidden, shape.width), stacked=True)]  # fmt: skip
    attention = sum(out * width for out, width in shape.attention)
    copies = 0 if dense else 4 * hidden * shape.chosen  # a row for each expert that a token meets, there and back
    operations = Operations(
        matrices=2.0 * (attention + 3 * hidden * met + (0 if dense else shape.experts * hidden)),
        scores=2.0 * length * shape.scored,
        kept_cut=8 * met + 2 * sum(out for out, _ in shape.attention) + copies,
        kept_whole=8 * hidden,
        input=2 * hidden,
    )
    unit = Unit(name, (*weights, Weight(f"{name}.norm", (2 * hidden,))))
    return Part("block", (unit,), operations, dispatched=None if dense else operations)


def adapted(model: ModelSpec, rank: int) -> ModelSpec:
    """Freeze a model, and put adapters of this rank beside every matrix of its blocks."""
    return replace(model, parts=tuple(_adapted(part, rank) for part in model.parts))


def _adapted(part: Part, rank: int) -> Part:
    units = []
    for unit in part.units:
        frozen = [replace(weight, trainable=False) for weight in unit.weights]
        beside = [weight for weight in frozen if len(weight.shape) == 2] if part.kind == "block" else []
        down = [Weight(f"{w.name}.lora_a", (rank, w.shape[1])) for w in beside]
        up = [Weight(f"{w.name}.lora_b", (w.shape[0], rank), cut=w.cut) for w in beside]
        units.append(replace(unit, weights=(*frozen, *down, *up)))
    return replace(part, units=tuple(units))


def model_of(row: Row) -> ModelSpec:
    """Return a row's model. Raises Unknown for one without a closed form."""
    name, length = row["model"], whole(row, "seq")
    if name in MIXTURES:
        return mixture(MIXTURES[name], length)
    if name not in DENSE:
        raise Unknown(f"{name} has no closed form")
    model = fused(llama(*DENSE[name], length))
    return adapted(model, whole(row, "lora_rank")) if row["lora_rank"] else model


def published(row: Row, planner: Planner) -> Iterator[Point]:
    """Predict the seconds of a step of a row whose settings are known."""
    if row["unknown"]:
        raise Unknown(row["unknown"])
    model, gpus, batch, micro = model_of(row), whole(row, "gpus"), whole(row, "gbs"), whole(row, "mbs")
    tp, pp, cp, ep, virtual = (whole(row, name) for name in ("tp", "pp", "cp", "ep", "vp"))
    if cp > 1 and row["precision"] == "fp8":
        raise Unknown("sequences over several ranks are not priced in 8 bits")
    dp = gpus // (tp * pp)
    sharded = row["system"] == "automodel"
    plan = ParallelPlan(dp=dp, tp=tp, pp=pp, ep=ep, sp=cp, stage=3 if sharded else 1, micro_batch=micro,
                        accumulate=_accumulate(batch, dp // cp, micro), activations=row["recompute"], experts="fast",
                        sequence_parallel=tp > 1 and not row["lora_rank"], virtual=virtual,
                        schedule="interleaved" if virtual > 1 else "1f1b", precision=row["precision"])  # fmt: skip
    estimate = planner.evaluate(model, machines(row["gpu"], gpus, 50e9), plan, row["system"])
    actual = batch * model.length / gpus / number(row, "tokens_per_s_per_gpu")
    run = "lora" if row["lora_rank"] else "full"
    kind = "_lora" if row["lora_rank"] else "_fp8" if row["precision"] == "fp8" else ""
    yield Point(f"{row['system']}_2026{kind}", row["id"], "time", estimate.seconds.mid, actual, unit="s", run=run)


def _accumulate(batch: int, rows: int, micro: int) -> int:
    if batch % (rows * micro):
        raise ValueError("batch")
    return batch // (rows * micro)


FORGE = {"7B": (32, 4096, 32, 8, 14336, 128256), "13B": (40, 5120, 40, 8, 17920, 128256),
         "70B": (80, 8192, 64, 8, 28672, 128256)}  # fmt: skip


def kempnerforge(row: Row, planner: Planner) -> Iterator[Point]:
    """Predict seconds and allocated bytes on H200s, four to a node."""
    gpus, per_node = whole(row, "gpus"), whole(row, "per_node")
    tp, pp, dp, micro = (whole(row, name) for name in ("tp", "pp", "dp", "micro"))
    shape, length = FORGE[row["model"]], whole(row, "seq")
    compiled = row["compile"] == "yes"
    model = fused(llama(*shape, length)) if compiled else traced(Shape(*shape), length, None, (), None)
    plan = ParallelPlan(dp=dp, tp=tp, pp=pp, micro_batch=micro, accumulate=whole(row, "accumulate"),
                        activations=row["recompute"], sequence_parallel=tp > 1, precision=row["precision"],
                        reduce_dtype="bf16", compile=compiled)  # fmt: skip
    spec = machines(row["gpu"], gpus, 50e9, per_node)
    estimate = planner.evaluate(model, spec, plan, "kempnerforge")
    yield Point("kempnerforge_h200", row["id"], "time", estimate.seconds.mid, number(row, "step_s"), unit="s")
    if row["max_allocated_gib"]:
        actual = number(row, "max_allocated_gib")
        yield Point("kempnerforge_h200", row["id"], "memory", estimate.memory.allocated / GIB, actual, unit="GiB")


RECENT: dict[str, Callable[[Row, Planner], Iterator[Point]]] = {
    "runs_2026": published,
    "megatron_bridge_2026": published,
    "kempnerforge_h200": kempnerforge,
}
