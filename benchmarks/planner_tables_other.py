"""More readers of published tables (planner_tables.py): fits and misfits, other throughputs, V100s, single cards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from planner_constants import Planner
from planner_tables import GIB, MIB, Point, Row, fastest, filled, machines, number, pipelined, whole

from zero3d.account.states import paper_bytes
from zero3d.tools.plan.kernels import digest, part_work
from zero3d.tools.plan.margin import kind_of
from zero3d.tools.plan.shapes import fused, gpt, llama, of_params
from zero3d.tools.plan.spec import ParallelPlan

# --- ZeRO's own runs on V100 --------------------------------------------------------------------


def zero_appendix(row: Row, planner: Planner) -> Iterator[Point]:
    """All of them ran. ZeRO-100B cuts kept inputs over tp, which is what sequence parallelism does to them.

    Its configuration C5 keeps them on the host (P_a+cpu).
    """
    tp, gpus = whole(row, "mp"), whole(row, "gpus")
    zero = row["system"] == "ZeRO"
    model = gpt(whole(row, "layers"), whole(row, "hidden"), whole(row, "heads"), 50304, 1024, flash=False)
    plan = ParallelPlan(dp=gpus // tp, tp=tp, stage=2 if zero else 0, micro_batch=whole(row, "batch_per_mp_group"),
                        activations="full", sequence_parallel=zero, reduce_dtype="fp16",
                        offload_activations="host" if row["figure"].endswith("C5") else "none")  # fmt: skip
    estimate = planner.evaluate(model, machines("v100-32", gpus, 6.25e9, 16), plan, "deepspeed-0.3")
    ran = {"fits": 1.0, "oom": 0.0, "out": 0.0}[row["label"].lower().split()[0]]
    run = kind_of(model, plan)
    yield Point("zero_appendix", row["id"], "fits", filled(estimate, 32), ran, run=run)


def zero_table2(row: Row, planner: Planner) -> Iterator[Point]:
    """Largest models by theory: 32 GB x mp / bytes per parameter."""
    columns = {"theory_baseline": 0, "theory_Pos": 1, "theory_Pos+g": 2, "theory_Pos+g+p": 3}
    for column, stage in columns.items():
        if row.get(column):
            per_parameter = float(paper_bytes(stage, 1, whole(row, "dp")).total)
            size = float(row[column][:-1]) * {"B": 1, "T": 1000}[row[column][-1]]
            predicted = 32 * whole(row, "mp") / per_parameter
            yield Point("zero_table2", f"{row['id']} {column}", "formula", predicted, size, unit="B")


def bigscience(row: Row, planner: Planner) -> Iterator[Point]:
    """+-40 % of network noise: printed, never a gate. 4 V100 per node; shapes are guessed from the sizes."""
    guess = of_params(int(number(row, "params_b") * 10**9), whole(row, "seq"))
    model = gpt(len(guess.blocks), guess.hidden, guess.heads, guess.vocab, guess.length, flash=False)
    dp, tp, pp, gas, micro = (whole(row, name) for name in ("dp", "tp", "pp", "gas", "mbs"))
    stage = (
        3
        if re.search("zero3|z3", row["framework"])
        else 2
        if "z2" in row["framework"]
        else int("z1" in row["framework"])
    )
    offload = "host" if "off" in row["framework"] else "none"
    plan = ParallelPlan(
        dp=dp,
        tp=tp,
        pp=pp,
        stage=stage,
        micro_batch=micro,
        accumulate=gas,
        activations="full",
        offload=offload,
        reduce_dtype="fp16",
    )
    spec = machines("v100-32", whole(row, "gpus"), 6.25e9, 4)
    estimate = planner.evaluate(
        model, spec, plan, "deepspeed" if stage > 1 else "megatron-deepspeed" if stage else "megatron"
    )
    if row["iter_s"]:
        yield Point(
            "bigscience_v100 (no gate)", row["id"], "time", estimate.seconds.mid, number(row, "iter_s"), unit="s"
        )
    if row["mem_gb"]:
        actual = number(row, "mem_gb")
        run = kind_of(model, plan)
        memory = estimate.memory.device / GIB
        yield Point("bigscience_v100 (no gate)", row["id"], "memory", memory, actual, unit="GiB", run=run)


# --- throughputs --------------------------------------------------------------------------------

LLAMA2 = {"7B": (32, 4096, 32, 32, 11008, 32000), "13B": (40, 5120, 40, 40, 13824, 32000),
          "34B": (48, 8192, 64, 8, 22016, 32000), "70B": (80, 8192, 64, 8, 28672, 32000)}  # fmt: skip
NETWORK = {"400Gbps": 6.25e9, "800Gbps": 12.5e9}  # of a node of 8


def throughput(row: Row, planner: Planner) -> Iterator[Point]:
    """FSDP on Llama 2 (IBM) and GPT-175B, 530B in Megatron (MegaScale's baseline, MT-NLG)."""
    gpus, length = whole(row, "gpus"), whole(row, "seq")
    if row["id"].startswith("IBM-FSDP"):
        model = fused(llama(*LLAMA2[row["model"].rsplit("-", 1)[1]], length))
        micro = int(re.findall(r"lbs (\d+)", row["batch"])[0])
        kept = re.findall(r"AC (none|selective|full)", row["batch"])[0]
        gpu = "h100" if "H100" in row["hw"] else "a100-80"
        spec = machines(gpu, gpus, NETWORK[row["hw"].split()[-1]])
        estimate = planner.evaluate(
            model, spec, ParallelPlan(dp=gpus, micro_batch=micro, activations=kept), "torchtitan"
        )
        actual = micro * length / number(row, "tokens_per_s_per_gpu")
        yield Point("ibm_fsdp", row["id"], "time", estimate.seconds.mid, actual, unit="s")
        return
    batch, seconds = re.findall(r"GBS (\d+);.*iter ([\d.]+)s", row["batch"])[0]
    if row["id"].startswith("MS-175B"):
        model, kept, virtual = gpt(96, 12288, 128, 64000, length, flash=True), "none", 6
    elif row["id"].startswith("MTNLG"):
        model, kept, virtual = gpt(105, 20480, 128, 51200, length, flash=False), "full", 1
    else:
        raise ValueError("id")
    plan = pipelined(whole(row, "dp"), whole(row, "tp"), whole(row, "pp"), 1, 1, int(batch), activations=kept,
                     reduce_dtype="fp32" if virtual > 1 else "fp16")  # fmt: skip
    plans = [plan, *([plan.replace(schedule="interleaved", virtual=virtual)] if virtual > 1 else [])]
    name, system = ("megascale_megatron", "megatron") if virtual > 1 else ("mt_nlg", "megatron-deepspeed")
    estimate = fastest(planner, model, machines("a100-80", gpus, 25e9), plans, system)
    yield Point(name, row["id"], "time", estimate.seconds.mid, float(seconds), unit="s")


# --- nanotron, torchtitan, galvatron ------------------------------------------------------------

NANOTRON = {1.34: (16, 2048, 32, 32, 8192, True), 3.57: (28, 3072, 24, 24, 8192, True),
            8.86: (32, 4096, 32, 32, 14336, False), 80.0: (80, 8192, 64, 64, 28672, False),
            469.0: (126, 16384, 128, 128, 53248, False)}  # fmt: skip
LLAMA = {"8B": (32, 4096, 32, 8, 14336, 128256), "70B": (80, 8192, 64, 8, 28672, 128256),
         "405B": (126, 16384, 128, 8, 53248, 128256)}  # fmt: skip


def nanotron(row: Row, planner: Planner) -> Iterator[Point]:
    size = min(NANOTRON, key=lambda known: abs(known / number(row, "params_b") - 1))
    layers, h, a, kv, ffn, tied = NANOTRON[size]
    model = fused(llama(layers, h, a, kv, ffn, 131072, 4096, tied))
    dp, tp, pp, micro, gas = (whole(row, name) for name in ("dp", "tp", "pp", "mbs", "gas"))
    plan = ParallelPlan(
        dp=dp, tp=tp, pp=pp, stage=whole(row, "zero_stage"), micro_batch=micro, accumulate=gas, sequence_parallel=tp > 1
    )
    across = planner.value("nanotron", "across above 256") if whole(row, "gpus") > 256 else 50e9
    estimate = planner.evaluate(model, machines("h100", whole(row, "gpus"), across), plan, "nanotron")
    useful = estimate.flops / (plan.world * 989e12)
    yield Point("nanotron", row["id"], "memory", estimate.memory.reserved / GIB, number(row, "mem_gb"), unit="GiB")
    yield Point("nanotron", row["id"], "time", estimate.seconds.mid, useful / (number(row, "mfu_pct") / 100), unit="s")


def torchtitan(row: Row, planner: Planner) -> Iterator[Point]:
    """Tables 2, 4, 5 and 6 of the source ran in Float8, as their captions there say; row-wise scaling gained nothing.

    Those of table 6 are of AsyncTP, too.
    """
    if re.search(r"CP [2-9]", row["config"]):
        raise ValueError("config")
    narrow = re.search("(?i)fp8-tensor|float8", row["config"]) or re.match(r"TT-T[2456]-", row["id"])
    name = row["model"].rsplit("-", 1)[1]
    gpus, local = whole(row, "gpus"), whole(row, "local_batch")
    model = llama(*LLAMA[name], whole(row, "seq"))
    model = model if row["config"] == "FSDP" else fused(model)  # all others were compiled
    tp, pp = (8 if "TP" in row["parallelism"] or "TP" in row["config"] or row["parallelism"] == "2D" else 1), 1
    if "PP" in row["parallelism"]:
        pp = 8
    dp = gpus // (tp * pp)
    virtual = 2 if "Interleaved" in row["config"] else 1
    kept = {"full": "full", "selective-op": "selective", "selective-layer": "selective"}[row["ac"]]
    plans = [
        ParallelPlan(dp=dp, tp=tp, pp=pp, micro_batch=micro, accumulate=local // micro, activations=kept,
                     sequence_parallel=tp > 1, schedule="interleaved" if virtual > 1 else "1f1b", virtual=virtual,
                     precision="fp8" if narrow else "bf16")
        for micro in ((local,) if pp == 1 else (1, 2, 4))  # not told of pipelines
    ]  # fmt: skip
    a100 = "A100" in row["hw"]
    spec = machines("a100-80" if a100 else "h100-96", gpus, 25e9 if a100 else 50e9)
    beside = "syncTP" in row["config"] or row["id"].startswith("TT-T6-")
    system = "torchtitan-async-tp" if beside else "torchtitan"
    estimate = fastest(planner, model, spec, plans, system)
    tokens = local * model.length / (tp * pp)
    group = f"{name} {gpus} {row['hw'][:8]}"
    yield Point("torchtitan", row["id"], "time", estimate.seconds.mid, tokens / number(row, "tps_per_gpu"), group, "s")
    if row["mem_gib_max_reserved_over_ranks"]:
        actual = number(row, "mem_gib_max_reserved_over_ranks")
        yield Point("torchtitan", row["id"], "memory", estimate.memory.reserved / GIB, actual, group, "GiB")


def galvatron_time(row: Row, planner: Planner) -> Iterator[Point]:
    match = re.match(r"(?:layertype_0|layernum\[(\d+)\])_bsz(\d+)_seq(\d+)", row["key"])
    if not match:
        raise ValueError("key")
    layers, batch, length = int(match[1] or 1), int(match[2]), int(match[3])
    model = fused(llama(layers, 4096, 32, 32, 11008, 32000, length))
    spec, plan = machines("a100-80", 8, 25e9), ParallelPlan(micro_batch=batch)
    works = [part_work(shape, model, plan, spec, kernels=planner.kernels).forward for shape in digest(model).shapes]
    seconds = sum(works) if match[1] else works[1] / batch
    yield Point("galvatron_forward", row["id"], "time", 1e3 * seconds, number(row, "ms"), unit="ms")


# --- memory -------------------------------------------------------------------------------------


def galvatron_states(row: Row, planner: Planner) -> Iterator[Point]:
    """bf16 Llama 2 7B of one or two blocks, ZeRO-3 over dp: all that is allocated behind a backward.

    That is model states, and inputs that sequence parallelism gathered: Megatron's layers leave them in a buffer of
    their own (tensor_parallel/layers.py, get_global_memory_buffer).
    """
    model = fused(llama(whole(row, "layers"), 4096, 32, 32, 11008, 32000, whole(row, "seq")))
    plan = ParallelPlan(**{name: whole(row, name) for name in ("dp", "tp", "pp")}, accumulate=2)
    estimate = planner.evaluate(model, machines("a100-80", 8, 25e9), plan, "torchtitan")
    tokens = whole(row, "global_bsz") // plan.dp * model.length
    gathered = planner.value("galvatron", "gathered") * tokens * model.hidden if plan.tp > 1 else 0.0
    allocated, actual = estimate.memory.states + gathered, number(row, "model_states_mib")
    yield Point("galvatron_states", row["id"], "memory", allocated / MIB, actual, unit="MiB")


OTHER: dict[str, Callable[[Row, Planner], Iterator[Point]]] = {
    "galvatron_llama2_7b_layer_fwd_ms": galvatron_time,
    "torchtitan_measured": torchtitan,
    "nanotron_best_configs": nanotron,
    "zero_appendix_configs": zero_appendix,
    "zero_table2_max_model": zero_table2,
    "bigscience_v100_gpt2": bigscience,
    "throughput_other": throughput,
    "galvatron_llama2_7b_layer_memory": galvatron_states,
}
