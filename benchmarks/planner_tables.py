"""Readers of published tables: a row of a CSV -> points, each a prediction beside what was published.

A reader raises KeyError or ValueError for a row it cannot use (a column missing, a word it does not know): skipped. It
raises Unknown for a run whose settings or card are not known: listed with the reason.
Shapes and clusters that a table leaves to its source stand here, beside the reader that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from planner_constants import Planner

import zero3d.tools.plan.formulas as formulas
from zero3d.account.states import paper_bytes
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan
from zero3d.tools.plan.time import Cut

Row = dict[str, str]
GIB, MIB = 2**30, 2**20


class Unknown(Exception):
    """Raised for a row that says too little of its run to be predicted; its text is the reason."""


class Point(NamedTuple):
    """kind: formula, memory, time or fits (planned: share of the card; actual 1: ran, 0: out of memory).

    group     of one model's configurations
    settings  what was run; points of equal settings repeat each other
    run       the kind of run, one of margin.KINDS
    gpus      how many, 0 where a row does not say
    model     what was trained, as its row names it, or by its size
    """

    set: str
    id: str
    kind: str
    predicted: float
    actual: float
    group: str = ""
    unit: str = ""
    settings: tuple[str, ...] = ()
    run: str = "full"
    gpus: int = 0
    model: str = ""


MEASURED = {"mem_gb_nvidia_smi", "oom", "sec_per_iter", "tflops_per_gpu", "tps_per_gpu", "days_300b_tokens",
            "days_eq4_check", "mem_gib_max_reserved_over_ranks", "fwd_ms", "bwd_ms", "combined_ms", "overhead_pct",
            "iter_s_full_recompute", "iter_s_seqpar_selective", "thr_gain_pct", "mfu_paper", "hfu_paper",
            "mfu_calc_present", "mfu_calc_full"}  # fmt: skip
ORIGIN = {"id", "date_mmdd_2022", "section", "source", "status", "duplicate_of", "exclude"}


def with_settings(row: Row, point: Point) -> Point:
    """Give a point its row's cells that are neither measured nor of its origin, and which of the row's runs it is.

    A column that neither set names is taken for a setting: then fewer points repeat each other, never more.
    """
    cells = (value for name, value in row.items() if name not in MEASURED | ORIGIN)
    gpus = int(float(row.get("gpus") or 0))
    model = " ".join(row.get(name) or "" for name in ("model", "params_b", "hidden", "layers")).strip()
    return point._replace(settings=(point.id.removeprefix(row["id"]).strip(), *cells), gpus=gpus, model=model)


def number(row: Row, name: str) -> float:
    """Read a cell. KeyError where the column is missing, ValueError where it is empty."""
    return float(row[name])


def whole(row: Row, name: str) -> int:
    """Read a cell that is a whole number."""
    value = float(row[name])
    if value != int(value):
        raise ValueError(name)
    return int(value)


def machines(gpu: str, gpus: int, across: float, per_node: int = 8) -> ClusterSpec:
    """Return a cluster with `across` bytes per second and GPU between nodes."""
    nodes = max(1, -(-gpus // per_node))
    spec = cluster(gpu, nodes * (gpus // nodes), nodes)
    return replace(spec, across=replace(spec.across, bandwidth=across))


def fastest(planner: Planner, model: ModelSpec, spec: ClusterSpec, plans: list[ParallelPlan], system: str) -> Estimate:
    """Return the best of plans that fit, where a table does not say which was run; of all if none fits."""
    estimates = [planner.evaluate(model, spec, plan, system) for plan in plans]
    fitting = [e for e in estimates if e.memory.device <= spec.gpu.memory] or estimates
    return min(fitting, key=lambda estimate: estimate.seconds.mid)


def filled(estimate: Estimate, gib: float) -> float:
    """Return the share of a card of so many GiB that a run is said to take."""
    return estimate.memory.device / (gib * GIB)


# --- formulas -----------------------------------------------------------------------------------

STAGES = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
KORTHIKANTI = {"22B": (48, 6144, 64, 8, 1, 1, 4), "175B": (96, 12288, 96, 8, 8, 3, 1),
               "530B": (105, 20480, 128, 8, 35, 3, 1), "1T": (128, 25600, 160, 8, 64, 1, 1)}  # fmt: skip


def zero_table1(row: Row, planner: Planner) -> Iterator[Point]:
    params = int(number(row, "params_b") * 10**9)
    nbytes = paper_bytes(STAGES[row["stage"]], params, whole(row, "dp")).total
    yield Point("zero_table1", row["id"], "formula", float(nbytes) / 1e9, number(row, "paper_gb"), unit="GB")


def zero_infinity(row: Row, planner: Planner) -> Iterator[Point]:
    memory = formulas.infinity_memory(whole(row, "layers"), whole(row, "hidden"), whole(row, "heads"))
    units = {"model_states_tb": 2**40, "act_tb": 2**40, "act_ckpt_tb": 2**40, "mswm_gb": GIB, "awm_gb": GIB}
    for (column, unit), value in zip(units.items(), memory, strict=True):
        yield Point("zero_infinity_fig2a", f"{row['id']} {column}", "formula", value / unit, number(row, column))


def korthikanti_fig1(row: Row, planner: Planner) -> Iterator[Point]:
    layers, h, a, t, p, v, b = KORTHIKANTI[row["model"]]
    predictions = {
        "par_opt_gib_fig": formulas.megatron_states(layers, h, t, p),
        "act_none_gib_fig": formulas.model_activations(
            formulas.layer_activations("TP baseline", 2048, b, h, a, t), layers, p, v
        ),
        "act_seqsel_gib_fig": formulas.model_activations(
            formulas.layer_activations("TP+SP+selective", 2048, b, h, a, t), layers, p, v
        ),
    }
    for column, value in predictions.items():
        yield Point("korthikanti_fig1", f"{row['id']} {column}", "formula", float(value) / GIB, number(row, column))


def korthikanti_fig7(row: Row, planner: Planner) -> Iterator[Point]:
    _, h, a, t, _, _, b = KORTHIKANTI[row["model"]]
    share = formulas.layer_activations(row["technique"], 2048, b, h, a, t)
    base = formulas.layer_activations("TP baseline", 2048, b, h, a, t)
    yield Point("korthikanti_fig7", row["id"], "formula", float(100 * share / base), number(row, "pct_of_tp_baseline"))


# --- Megatron -----------------------------------------------------------------------------------

MEGATRON_MICRO = {"1.7": (16, 1), "3.6": (16, 1), "7.5": (16, 1), "18.4": (8, 1), "39.1": (4, 1), "76.1": (2, 3),
                  "145.6": (2, 2), "310.1": (1, 2), "529.6": (1, 3), "1008.0": (1, 1)}  # fmt: skip
# micro-batch and parts per rank by parameters: NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh


def pipelined(dp: int, tp: int, pp: int, virtual: int, micro_batch: int, batch: int, **rest: object) -> ParallelPlan:
    """Return a Megatron plan of `batch` sequences per step."""
    accumulate = batch / (dp * micro_batch)
    if accumulate != int(accumulate) or accumulate < 1:
        raise ValueError("batch")
    schedule = "interleaved" if virtual > 1 else "1f1b"
    batches = {"micro_batch": micro_batch, "accumulate": int(accumulate)}
    plan = ParallelPlan(dp=dp, tp=tp, pp=pp, stage=0, **batches, schedule=schedule, virtual=virtual)
    return plan.replace(**rest)


def gpt_of(row: Row, flash: bool = False, vocab: int | None = None) -> ModelSpec:
    return gpt(whole(row, "layers"), whole(row, "hidden"), whole(row, "heads"), vocab or whole(row, "vocab"),
               whole(row, "seq"), flash=flash)  # fmt: skip


def megatron_table1(row: Row, planner: Planner) -> Iterator[Point]:
    model, gpus, batch = gpt_of(row), whole(row, "gpus"), whole(row, "gbs")
    size = min(MEGATRON_MICRO, key=lambda name: abs(float(name) - number(row, "params_b")))
    micro, virtual = MEGATRON_MICRO[size]
    plan = pipelined(whole(row, "dp"), whole(row, "tp"), whole(row, "pp"), virtual, micro, batch, activations="full",
                     reduce_dtype="fp16")  # fmt: skip
    estimate = planner.evaluate(model, machines("a100-80", gpus, 25e9), plan, "megatron")
    flops = formulas.step_flops(batch, 2048, whole(row, "layers"), model.hidden, model.vocab, recompute=True)
    actual = flops / gpus / number(row, "tflops_per_gpu") / 1e12
    yield Point("megatron2021_table1", row["id"], "time", estimate.seconds.mid, actual, unit="s")


def megatron_table2(row: Row, planner: Planner) -> Iterator[Point]:
    gpus, batch, micro = whole(row, "gpus"), whole(row, "gbs"), whole(row, "mbs")
    layers, hidden, heads = (96, 12288, 96) if number(row, "params_b") < 300 else (105, 20480, 128)
    model = gpt(layers, hidden, heads, 51200, 2048, flash=False)
    spec = machines("a100-80", gpus, 25e9)
    if row["scheme"] == "ZeRO-3":
        plan = ParallelPlan(
            dp=gpus, micro_batch=micro, accumulate=batch // gpus // micro, activations="full", reduce_dtype="fp16"
        )
        estimate = planner.evaluate(model, spec, plan, "deepspeed-0.3")
    else:
        pp = whole(row, "mp") // 8
        plan = pipelined(gpus // (8 * pp), 8, pp, 1, micro, batch, activations="full", reduce_dtype="fp16")
        plans = [plan, *(plan.replace(virtual=v, schedule="interleaved") for v in (2, 3) if layers % (pp * v) == 0)]
        estimate = fastest(planner, model, spec, plans, "megatron")
    flops = formulas.step_flops(batch, 2048, layers, hidden, 51200, recompute=True)
    actual = flops / gpus / number(row, "tflops_per_gpu") / 1e12
    yield Point("megatron2021_table2", row["id"], "time", estimate.seconds.mid, actual, f"{row['scheme']}{hidden}", "s")


def korthikanti_table5(row: Row, planner: Planner) -> Iterator[Point]:
    model, gpus = gpt_of(row), whole(row, "gpus")
    tp, pp, virtual = whole(row, "tp"), whole(row, "pp"), whole(row, "vpp")
    plan = pipelined(gpus // (tp * pp), tp, pp, virtual, whole(row, "mbs"), whole(row, "gbs"))
    for column, kept, parallel in (
        ("iter_s_full_recompute", "full", False),
        ("iter_s_seqpar_selective", "selective", True),
    ):
        run = plan.replace(activations=kept, sequence_parallel=parallel)
        estimate = planner.evaluate(model, machines("a100-80", gpus, 25e9), run, "megatron")
        actual = number(row, column)
        yield Point(
            "korthikanti_table5", f"{row['id']} {kept}", "time", estimate.seconds.mid, actual, row["model"], "s"
        )


LAYER_RUNS = {"1": ("none", False), "2": ("none", True), "3": ("full", False), "4": ("selective", False),
              "5": ("selective", True)}  # fmt: skip


def korthikanti_table4(row: Row, planner: Planner) -> Iterator[Point]:
    kept, parallel = LAYER_RUNS[row["id"].rsplit("-", 1)[1]]
    base = ParallelPlan(tp=8, stage=0, micro_batch=4, activations=kept, sequence_parallel=parallel)
    times = [
        planner.evaluate(
            gpt(n, 6144, 64, 51200, 2048, flash=False), machines("a100-80", 8, 25e9), base, "megatron"
        ).seconds
        for n in (24, 48)
    ]
    layer = sum((times[1].parts[k] - times[0].parts[k]) / 24 for k in times[0].parts if k not in ("optimizer", "fixed"))
    yield Point("korthikanti_table4", row["id"], "time", 1e3 * layer, number(row, "combined_ms"), "22B layer", "ms")


def megatron_core(row: Row, planner: Planner) -> Iterator[Point]:
    model, gpus, batch = gpt_of(row, flash=True), whole(row, "gpus"), whole(row, "gbs")
    dp, tp, pp = whole(row, "dp"), whole(row, "tp"), whole(row, "pp")
    plans = []
    for micro in (1, 2, 4):
        for virtual in [
            v for v in (1, 2, 3, 4, 6) if v == 1 or (pp > 1 and model.blocks and len(model.blocks) % (pp * v) == 0)
        ]:
            if batch % (dp * micro) == 0:
                plans.append(pipelined(dp, tp, pp, virtual, micro, batch, stage=1, sequence_parallel=tp > 1,
                                       reduce_dtype="fp32"))  # fmt: skip
    estimate = fastest(planner, model, machines("h100", gpus, 50e9), plans, "megatron-core")
    flops = formulas.step_flops(batch, model.length, len(model.blocks), model.hidden, model.vocab, recompute=False)
    actual = flops / gpus / number(row, "tflops_per_gpu") / 1e12
    yield Point("megatron_core_h100", row["id"], "time", estimate.seconds.mid, actual, unit="s")


# --- BLOOM, DeepSpeed ---------------------------------------------------------------------------


def jean_zay(gpus: int) -> ClusterSpec:
    """8 A100 per node, 4 NVLinks of 25 GB/s between two of them, four 100 Gb/s ports (BLOOM's model card)."""
    spec = machines("a100-80", gpus, 6.25e9)
    return replace(spec, inside=replace(spec.inside, bandwidth=100e9))


def bloom(row: Row, planner: Planner) -> Iterator[Point]:
    """Megatron-DeepSpeed, 2048 sequences a step where a row does not say.

    Runs that accumulated in fp32 counted embedding and head as a block each where pipelines were cut. The nodes' NUMA
    settings were improved on 25 February: the chronicle says not to compare the days before with those since.
    """
    batch = whole(row, "gbs") if row["gbs"] else 2048
    model = gpt(whole(row, "layers"), whole(row, "hidden"), whole(row, "heads"), 250880, 2048, flash=False)
    dp, tp, pp, micro = (whole(row, name) for name in ("dp", "tp", "pp", "mbs"))
    wide = "fp32 grad accumulation" in row.get("note", "")
    plan = ParallelPlan(dp=dp, tp=tp, pp=pp, stage=1, micro_batch=micro, accumulate=batch // dp // micro,
                        activations="full", reduce_dtype="fp32" if wide else "fp16")  # fmt: skip
    system = planner.systems["megatron-deepspeed"]
    if wide:
        system = replace(system, pace=replace(system.pace, cut=Cut(1, 1, filled=True)))
    estimate = planner.evaluate(model, jean_zay(whole(row, "gpus")), plan, system)
    device = estimate.memory.device / GIB
    improved = "improved" if row["date_mmdd_2022"] >= "02-25" else ""
    group = " ".join([improved, *(row[name] for name in ("hidden", "layers", "heads", "gpus", "gbs"))])
    if row.get("exclude") != "mem":
        if row["mem_gb_nvidia_smi"]:
            actual = number(row, "mem_gb_nvidia_smi")
            yield Point("bloom176b_prequel", row["id"], "memory", device, actual, group, "GiB")
        ran = float(row["oom"] != "1")
        yield Point("bloom176b_prequel", row["id"], "fits", filled(estimate, 80), ran, group)
    if row["sec_per_iter"]:
        actual = number(row, "sec_per_iter")
        yield Point("bloom176b_prequel", row["id"], "time", estimate.seconds.mid, actual, group, "s")


def azure(row: Row, planner: Planner) -> Iterator[Point]:
    gpus, s, micro = whole(row, "gpus"), whole(row, "seq"), whole(row, "mbs")
    model = gpt(whole(row, "layers"), whole(row, "hidden"), whole(row, "heads"), 51200, s, flash=False)
    plan = ParallelPlan(dp=gpus, micro_batch=micro, activations="full", reduce_dtype="fp16")
    estimate = planner.evaluate(model, machines("a100-80", gpus, 25e9), plan, "deepspeed")
    flops = formulas.step_flops(micro, s, len(model.blocks), model.hidden, model.vocab, recompute=True)
    actual = flops / number(row, "tflops_per_gpu") / 1e12
    yield Point("deepspeed_azure", row["id"], "time", estimate.seconds.mid, actual, unit="s")


READERS: dict[str, Callable[[Row, Planner], Iterator[Point]]] = {
    "zero_table1_model_states": zero_table1,
    "zero_infinity_fig2a_memory": zero_infinity,
    "korthikanti2022_fig1_memory": korthikanti_fig1,
    "korthikanti2022_fig7_act_pct": korthikanti_fig7,
    "megatron2021_table1_weak_scaling": megatron_table1,
    "megatron2021_table2_zero3_vs_ptdp": megatron_table2,
    "korthikanti2022_table4_layer_ms": korthikanti_table4,
    "korthikanti2022_table5_iter_time": korthikanti_table5,
    "megatron_core_h100": megatron_core,
    "bloom176b_prequel_a100_80g": bloom,
    "deepspeed_azure_zero3_a100": azure,
}
