"""Tables of timings, from results/*.json: every run, the targets beside them, and whether they were met.

Ratios are of medians over a run's counted steps. A target that some runs meet and some miss is "missed in 1 of 3".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import checkpoint
import demo_curves
import experts
import generation
import hybrid_sequence
import links
import loading
import loop_overhead
import mesh as mesh_benchmark
import narrow_wires
import optimizers
import pipeline as pipeline_benchmark
import planner_speed
import profile_accuracy
import qlora
import sequence
import stream
import watching
from recorded import load
from report import MEMORY

MIB = 2**20
EXPERTS = {"dp": "plain dp, stage 3", "ep-exact": "ep, sources apart", "ep-fast": "ep, one product",
           "transformers": "transformers' ep over FSDP2", "own forward": "no ep"}  # fmt: skip
NAMES = {"ddp": "DDP", "fsdp2-noreshard": "FSDP2, no reshard", "fsdp2-reshard": "FSDP2, reshard",
         "plain": "no communication at all"}  # fmt: skip
PEERS = {
    "zero3d-3": "fsdp2-reshard",
    "zero3d-cast-3": "fsdp2-reshard",
    "zero3d-2": "fsdp2-noreshard",
}  # of stages, FSDP2's way to do the same


def results(name: str) -> list[Any]:
    """What the runs of a file gave."""
    return [run["result"] for run in load(name)["runs"]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def stamp(name: str) -> str:
    """Where the figures of a file are from, in one line."""
    found = load(name)
    machine = found["machine"]
    where = f"{machine['cores']} {machine['cpu']} cores, torch {found['torch']}, Python {found['python']}"
    return f"(`benchmarks/results/{name}.json`: commit {found['commit']}, {found['date']}, {where}.)"


def called(variant: str) -> str:
    """A variant as a reader knows it."""
    engine, _, stage = variant.rpartition("-")
    ours = {
        "zero3d": "zero3d stage",
        "zero3d-exact": "zero3d exact, stage",
        "zero3d-autocast": "zero3d in autocast, stage",
        "deepspeed": "DeepSpeed stage",
    }
    ours["zero3d-cast"] = "zero3d, cast weights, stage"
    return f"{ours[engine]} {stage}" if engine in ours else NAMES[variant]


def verdict(ratios: Sequence[float], limit: float, at_least: bool = False) -> str:
    """Met, missed, or missed in some of several runs."""
    missed = sum(ratio < limit if at_least else ratio > limit for ratio in ratios)
    return "met" if not missed else "missed" if missed == len(ratios) else f"missed in {missed} of {len(ratios)}"


def times(values: Sequence[float]) -> str:
    """Ratios of all runs."""
    return ", ".join(f"{value:.2f}x" for value in values)


def seconds(values: Sequence[float]) -> str:
    """Medians of all runs."""
    return ", ".join(f"{value:.3f}" for value in values)


# --- engines.py ---------------------------------------------------------------------------------


def targets(name: str) -> str:
    """Every target that a file's runs judge: all ratios of medians, and the verdict."""
    rows = []
    for group in _alike(results(name)):
        for first in group[0]["ratios"]:
            found = [row["ratio"] for run in group for row in run["ratios"] if _judged(row) == _judged(first)]
            what = f"{first['kind']}, {_shape(group[0])}"
            limit = f"{first['limit']:.2f}x", verdict(found, first["limit"])
            rows.append([called(first["ours"]), called(first["peer"]), what, times(found), *limit])
    return table(["", "against", "of what", "every run", "target", ""], rows)


def _judged(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["kind"], row["ours"], row["peer"]


def _alike(runs: Sequence[Any]) -> list[list[Any]]:
    """Runs by what they measured."""
    groups: dict[str, list[Any]] = {}
    for run in runs:
        groups.setdefault(_shape(run), []).append(run)
    return list(groups.values())


def _shape(run: Mapping[str, Any]) -> str:
    a = run["arguments"]
    return f"{a['ranks']} rank{'s' * (a['ranks'] > 1)}, {a['micro_batch']} x {a['seq']} tokens"


def engine_steps(name: str) -> str:
    """Median seconds of a step by variant, in every run, and memory where it was measured, in brackets over FSDP2's."""
    groups = _alike(results(name))
    with_memory = [run for group in groups for run in group if any("memory" in v for v in run["variants"].values())]
    head = ["", *(f"median step, s: {_shape(group[0])}" for group in groups), *(MEMORY if with_memory else ())]
    rows = []
    for variant in groups[0][0]["variants"]:
        row = [called(variant), *(seconds([run["variants"][variant]["median"] for run in group]) for group in groups)]
        if with_memory:
            measured = with_memory[0]["variants"]
            own, peer = measured[variant]["memory"], measured.get(PEERS.get(variant, ""))
            for key in MEMORY.values():
                of_peer = f" ({own[key] / peer['memory'][key]:.2f}x)" if peer else ""
                row.append(f"{own[key] / MIB:,.0f} MiB{of_peer}")
        rows.append(row)
    return table(head, rows)


def engines_memory() -> str:
    """Memory of stage 3 with cast weights beside FSDP2's, by ranks, micro-batches and what is kept or trained."""
    rows = []
    for run in results("engines-memory"):
        a = run["arguments"]
        how = "recomputation" if a["recompute"] else f"LoRA, rank {a['lora']}" if a["lora"] else "all trained"
        row = [how, f"{a['ranks']}", f"{a['accumulate']}"]
        cast, peer = (run["variants"][name]["memory"] for name in ("zero3d-cast-3", "fsdp2-reshard"))
        judged = {(target["kind"], target["ours"]): target for target in run["ratios"]}
        for kind, key in MEMORY.items():
            kept, ratio = (judged[kind, name]["ratio"] for name in ("zero3d-3", "zero3d-cast-3"))
            limit = judged[kind, "zero3d-cast-3"]["limit"]
            row.append(f"{cast[key] / MIB:,.0f} for {peer[key] / MIB:,.0f} MiB: {ratio:.2f}x (kept {kept:.2f}x)")
            row.append(f"{limit:.2f}x: {verdict([ratio], limit)}")
        rows.append(row)
    return table(["", "ranks", "micro-batches", *(cell for kind in MEMORY for cell in (kind, "target"))], rows)


# --- pipeline.py, mesh.py -----------------------------------------------------------------------


def pipelines() -> str:
    """Steps and memory of pipelines beside FSDP2's in torch's pipelining."""
    limits, rows = pipeline_benchmark.TARGETS, []
    for run in results("pipeline"):
        base, a = median(run["seconds"]["fsdp2"]), run["arguments"]
        for variant in (name for name in run["seconds"] if name != "fsdp2"):
            ratio = median(run["seconds"][variant]) / base
            memory = run["process_bytes"][variant] / run["process_bytes"]["fsdp2"]
            judged = verdict([ratio], limits["time"]), verdict([memory], limits["memory"])
            counted = [called(variant), f"{a['micro_batches']}", run["bubble"]]
            rows.append([*counted, f"{ratio:.2f}x", judged[0], f"{memory:.2f}x", judged[1]])
    head = ["pp 2 x dp 2, 1f1b", "micro-batches", "bubble", "step", f"target {limits['time']:.2f}x",
            "process memory", f"target {limits['memory']:.2f}x"]  # fmt: skip
    return table(head, rows)


def meshes_beside_torch() -> str:
    """Steps of three axes and of tp alone beside torch's own, and collectives of activations."""
    rows = []
    for run in results("mesh"):
        a = run["arguments"]
        peer = next(name for name in run["seconds"] if not name.startswith("zero3d"))
        for variant in (name for name in run["seconds"] if name != peer):
            ratio, limit = median(run["seconds"][variant]) / median(run["seconds"][peer]), mesh_benchmark.TARGETS[peer]
            qkv = "q, k, v in one matrix" if a["qkv"] == "fused" else "q, k, v apart"
            what = f"pp {a['pp']} x dp {a['dp']} x tp {a['tp']}, stage {variant[-1]}, {qkv}"
            sent = f"{run['collectives'][variant]} for {run['collectives'][peer]}"
            rows.append([what, f"{ratio:.2f}x", f"{limit:.2f}x", verdict([ratio], limit), sent])
    return table(["", "step", "target", "", "collectives"], rows)


# --- experts.py ---------------------------------------------------------------------------------


def experts_beside() -> str:
    """Steps of a mixture by ep, beside data parallelism and transformers' own expert parallelism."""
    rows = []
    for run in results("experts"):
        middle = {name: median(times) for name, times in run["seconds"].items()}
        for name, other, limit in experts.RATIOS:
            ratio = middle[name] / middle[other]
            counted = [f"{run['arguments']['ranks']}", EXPERTS[name], EXPERTS[other]]
            rows.append([*counted, f"{ratio:.2f}x", f"{limit:.2f}x", verdict([ratio], limit)])
    return table(["ranks", "a step of", "to one of", "", "target", ""], rows)


def experts_layer() -> str:
    """A layer's forward and backward of ever more experts."""
    rows = []
    for run in results("experts"):
        counts = run["arguments"]["experts"]
        for how, times in run["layers"].items():
            grown = f"{times[-1] / times[0]:.2f}x"
            cells = [f"{1e3 * seconds_:.1f} ms" for seconds_ in times]
            rows.append([f"{run['arguments']['ranks']}", EXPERTS[how], *cells, grown])
    return table(["ranks", "a layer of", *(f"{count} experts" for count in counts), "growth"], rows)


# --- sequence.py --------------------------------------------------------------------------------


def sequences() -> str:
    """Steps and memory of ranks that share sequences, beside one rank and others' ways."""
    [run] = results("sequence")
    return table(["sp 2", "", "target", ""], [
        [what, f"{ratio:.2f}x", f"{limit:.2f}x", verdict([ratio], limit)] for what, ratio, limit in sequence.ratios(run)
    ])  # fmt: skip


def sequence_steps() -> str:
    """Seconds of a step, and what failed; bytes of a rank."""
    [run] = results("sequence")
    rows = []
    for name, found in run["variants"].items():
        memory = run["memory"].get(name)
        held = f"{memory['most'] / MIB:,.0f} MiB" if memory else ""
        if "error" in found:
            rows.append([name, found["error"], "", held])
        else:
            rows.append([name, seconds([median(found["seconds"])]), seconds([median(found["on_core"])]), held])
    return table(["", "median step, s", "on a core, s", "a rank's memory"], rows)


# --- hybrid_packing.py ---------------------------------------------------------------------------


def hybrids() -> str:
    """Packed rows of hybrids beside a row that is taken for one document, padded rows, and rows alone."""
    [run] = results("hybrid-packing")
    rows = []
    for name, found in run["seconds"].items():
        of_leaky, limit = found["packed"] / found["leaky"], run["targets"]["of_leaky"][name]
        of_padded, of_untold = found["packed"] / found["padded"], found["told"] / found["unpacked"]
        cells = [f"{of_leaky:.2f}x ({limit:.1f}x)", f"{of_padded:.2f}x ({run['targets']['of_padded']:.1f}x)"]
        rows.append([f"`{name}`", *cells, f"{found['packed'] / found['alone']:.2f}x", f"{of_untold:.2f}x"])
    head = ["packed, of", "a row as one document", "padded rows", "a row each", "unpacked, of untold"]
    return table(head, rows)


# --- hybrid_sequence.py --------------------------------------------------------------------------


def hybrids_shared() -> str:
    """Mixers whose sequences two ranks share, by each way, beside one process."""
    [run] = results("hybrid-sequence")
    rows = []
    for name, found in run["types"].items():
        for way in ("heads", "prefix"):
            each, sent = hybrid_sequence.ratios(found, way), found["ways"][way]
            cells = [f"{each[what]:.2f}x ({limit:.2f}x)" for what, limit in run["targets"].items()]
            cells.insert(1, f"{each['on_core']:.2f}x")
            equal = "equal" if sent["sent"] == sent["formula"] else f"{sent['formula'] / 1e6:,.2f} MB"
            chosen = ", as auto takes it" if way == found["auto"] else ""
            rows.append([f"`{name}`, {way}{chosen}", *cells, f"{sent['sent'] / 1e6:,.2f} MB", equal])
    head = ["two ranks, of one", "time in mixers", "on a core", "activations", "sent over sp in a step", "by formula"]
    return table(head, rows)


# --- stream.py ------------------------------------------------------------------------------------


def streams() -> str:
    """A stream of weights beside a gather of each parameter, and beside a copy of the bytes."""
    [run] = results("stream")
    return table(["a stream of weights", "", "target", ""], [
        [f"of the {what}", f"{ratio:.2f}x", f"{limit:.2f}x", verdict([ratio], limit)]
        for what, ratio, limit in stream.ratios(run)
    ])  # fmt: skip


def stream_seconds() -> str:
    """Seconds until a receiver has everything, and what rank 0 has meanwhile."""
    [run] = results("stream")
    rows = [
        [name, seconds([median(times)]), f"{run['memory'][name] / MIB:,.0f} MiB" if name in run["memory"] else ""]
        for name, times in run["seconds"].items()
    ]
    return table(["", "median, s", "memory of rank 0"], rows)


# --- generation.py --------------------------------------------------------------------------------

GENERATIONS = {
    "zero3d-2": "zero3d, stage 2",
    "zero3d-3": "zero3d, stage 3, whole weights",
    "zero3d-3-units": "zero3d, stage 3, each layer for each token",
    "deepspeed-3": "DeepSpeed, stage 3, whole weights",
    "deepspeed-3-units": "DeepSpeed, stage 3, `ds3_gather_for_generation=False`",
}


def generations() -> str:
    """Seconds of a generation at stage 3, beside stage 2 and DeepSpeed."""
    [run] = results("generation")
    rows = [
        [
            GENERATIONS[name],
            seconds([median(run["seconds"][name])]),
            f"{ratio:.2f}x",
            f"{run['sent'][name] / 1e6:,.1f} MB" if name in run["sent"] else "",
        ]
        for name, ratio in generation.ratios(run).items()
    ]
    return table(["a generation", "median, s", "of stage 2", "sent by a rank"], rows)


# --- optimizers.py, the demo with each -----------------------------------------------------------


def optimizers_beside() -> str:
    """Steps of Muon and of AdamW with moments in 8 bits, beside AdamW and torch's Muon over FSDP2."""
    rows = []
    [run] = results("optimizers")
    middle = {name: median(times) for name, times in run["seconds"].items()}
    ranks = run["arguments"]["ranks"]
    for stage in optimizers.STAGES:
        own, limit = middle[f"muon-{stage}"], optimizers.bound(middle, stage, ranks)
        arithmetic = f"{optimizers.TARGET:.2f}x of AdamW's step and 1/{ranks} of Newton-Schulz alone"
        rows.append([f"{stage}", "Muon", arithmetic, f"{own / limit:.2f}x", "1.00x", verdict([own / limit], 1.0)])
        beside = own / middle[optimizers.PEER]
        rows.append([f"{stage}", "Muon", "torch's Muon over FSDP2", f"{beside:.2f}x", "1.00x", verdict([beside], 1.0)])
        eight = middle[f"adamw8bit-{stage}"] / middle[f"adamw-{stage}"]
        rows.append([f"{stage}", "AdamW, 8 bits", "AdamW", f"{eight:.2f}x", "", ""])
    return table(["stage", "a step of", "to", "", "target", ""], rows)


def qlora_beside() -> str:
    """A base of 4 bits beside one of bf16, and beside PEFT with bitsandbytes."""
    [run] = results("qlora")
    middle, alone = ({name: median(times) for name, times in run[key].items()} for key in ("seconds", "alone"))
    rows = []
    for name in qlora.FORMATS:
        share, limit = qlora.gathered(run, qlora.OWN, name), qlora.TARGETS[name]
        grown, small = qlora.grown(run, name), qlora.frozen(run, qlora.SMALL, name)
        met = verdict([share], limit + 5e-4)
        rows.append([f"`{name}`", "bytes gathered of its layers", f"{share:.3f}x", f"{limit}x", met])
        met = verdict([grown], qlora.HELD)
        rows.append([f"`{name}`", "what a rank's process grows by", f"{grown:.2f}x", f"{qlora.HELD:.2f}x", met])
        rows.append([f"`{name}`", f"the base of {qlora.SMALL}, with its embedding", f"{small:.2f}x", "", ""])
        rows.append([f"`{name}`", "a step", f"{middle[name] / middle[qlora.BASE]:.2f}x", "", ""])
    beside = alone["nf4"] / alone[qlora.PEER]
    against = "a step on one rank, to one of PEFT on bitsandbytes"
    rows.append(["`nf4`", against, f"{beside:.2f}x", "1.00x", verdict([beside], 1.0)])
    return table(["base", "to one in bf16", "", "target", ""], rows)


def demo_curves_by_step() -> str:
    """Held-out losses of the demo by steps, with each optimizer, when AdamW's last was reached, and bytes of states."""
    [run] = results("demo-curves")
    steps, last = [step for step in run["adamw"]["steps"] if step % 100 == 0], run["adamw"]["losses"][-1]
    rows = []
    for name, found in run.items():
        by_step, first = dict(zip(found["steps"], found["losses"], strict=True)), demo_curves.reached(found, last)
        losses = [f"{by_step[step]:.3f}" for step in steps]
        reached = "not yet" if first is None else f"{first}"
        rows.append([demo_curves.NAMES[name], *losses, reached, f"{found['bytes_per_parameter']:.2f} B"])
    head = ["", *(f"step {step}" for step in steps), "AdamW's last loss at step", "states per parameter"]
    return table(head, rows)


# --- links.py, narrow_wires.py ----------------------------------------------------------------------


LINKS = {
    "flat": "flat, stage 3", "int8": "8-bit gathers", "second": "second shard", "both": "second shard, 8-bit gathers",
    "shard": "shards of a host", **{f"shard-{form}": f"the same, {form} sums" for form in ("bf16", "int8", "int4")},
    "fsdp2": "FSDP2", "hsdp": "FSDP2's HSDP",
}  # fmt: skip


def links_steps() -> str:
    """Seconds of a step of every way at every rate of the link, and bytes on it as measured and by the ledger."""
    [run] = results("links")
    rows = []
    for name, title in LINKS.items():
        found = [at["variants"][name] for at in run["rates"].values()]
        steps = [f"{each['step']:.3f} s ({each['of flat']:.2f}x)" for each in found]
        ledger = f"{found[0]['ledger'] / 1e6:.2f}" if "ledger" in found[0] else ""
        rows.append([title, *steps, f"{median(each['cable'] for each in found) / 1e6:.2f}", ledger])
    head = ["", *(_rate(rate) for rate in run["rates"]), "MB on the cable", "by the ledger"]
    return table(head, rows)


@lru_cache
def replanned() -> Any:
    """What was measured over slow links, with what the planner says now."""
    [run] = results("links")
    return links.planned_again(run)


def links_chosen() -> str:
    """What the planner chooses of the links as they were measured, and what was fastest, at every rate."""
    rows = []
    for rate, at in replanned()["rates"].items():
        ours = {name: figures["step"] for name, figures in at["variants"].items() if name in at["planned"]}
        as_it_is = {name: seconds for name, seconds in ours.items() if name in links.EXACT}
        cells = []
        for chosen, all_ in ((at["chosen"]["auto"], as_it_is), (at["chosen"]["narrow"], ours)):
            fastest = min(all_, key=lambda name, all_=all_: all_[name])
            cells += [f"{LINKS[name]} ({ours[name]:.3f} s)" for name in (chosen, fastest)]
        hsdp = at["variants"]["shard"]["step"] / at["variants"]["hsdp"]["step"]
        rows.append([_rate(rate), *cells, f"{hsdp:.2f}x"])
    head = ["link", "`auto` takes", "fastest that rounds nothing", "`narrow` takes", "fastest", "shards of HSDP"]
    return table(head, rows)


def links_targets() -> str:
    """Every target of the benchmark."""
    rows = [
        [what, f"{ratio:.2f}x", f"{'at least' if least else 'at most'} {limit:g}x", verdict([ratio], limit, least)]
        for what, ratio, limit, least in links.judged(replanned())
    ]
    return table(["", "measured", "target", ""], rows)


def _rate(rate: str) -> str:
    return "not throttled" if rate == "0" else f"{int(rate):,} Mbit/s"


def narrow_wires_losses() -> str:
    """Mean losses of the demo's last steps by wire and seed, and how far they are from those in full."""
    [run] = results("narrow-wires")
    losses = run["losses"]
    rows = []
    for name, found in losses.items():
        off, limit = narrow_wires.furthest(losses, name), narrow_wires.LIMITS.get(name)
        judged = ["-", "-"] if limit is None else [f"{off:.4f}", f"{limit:g}, {verdict([off], limit)}"]
        rows.append([name, *(f"{loss:.4f}" for loss in found), *judged])
    rows.append(
        ["spread of seeds in full", *["-"] * len(narrow_wires.SEEDS), f"{narrow_wires.spread(losses):.4f}", "-"]
    )
    return table(["", *(f"seed {seed}" for seed in narrow_wires.SEEDS), "off by at most", "target"], rows)


# --- loading.py, loop_overhead.py ---------------------------------------------------------------


def loading_speed() -> str:
    """A folder's weights beside a raw read of the same bytes."""
    rows = []
    for run in results("loading"):
        for cache, ways in run["seconds"].items():
            for way, values in ways.items():
                ratio = median(ways["raw"]) / median(values)
                judged = verdict([ratio], loading.TARGET, at_least=True) if (cache, way) == ("cold", "weights") else ""
                speed = run["bytes"] / loading.MB / median(values)
                rows.append([f"{cache} cache", way, f"{speed:,.0f} MB/s", f"{ratio:.2f}x", judged])
    return table(["", "", "speed", "of raw", f"target {loading.TARGET:.2f}x"], rows)


def loading_memory() -> str:
    """What a rank's process grows by while it loads a folder, beside what it keeps and may hold beyond it."""
    rows = []
    for way, found in results("loading-memory")[0]["memory"].items():
        in_mb = [f"{found[key] / loading.MB:,.0f} MB" for key in ("peak", "kept")]
        bound = ["", "", ""]
        if found["block"]:
            beyond = loading.beyond(found)
            bound = [f"{loading.may(found) / loading.MB:,.0f} MB", f"{beyond:.2f}x", verdict([beyond], 1.0)]
        rows.append([f"`{way}`", *in_mb, *bound])
    return table(["", "at most", "kept", "may hold beyond", "held beyond", "target 1.00x"], rows)


def loop_share() -> str:
    """Of the demo's loop, what is outside the engine."""
    [run] = results("loop-overhead")
    share, limit = run["outside"], loop_overhead.TARGET
    cost, most = run["clocks"], loop_overhead.OF_CLOCKS
    return (
        f"Of the demo's loop {100 * share:.1f} % is spent outside the engine "
        f"(target: at most {100 * limit:.0f} %: {verdict([share], limit)}). A step with clocks takes {cost:.3f}x one "
        f"without (target {most:.2f}x: {verdict([cost], most)})."
    )


def watched_steps() -> str:
    """A step of a run that is watched, of one that is not."""
    [run] = results("watching")
    rows = []
    for way in watching.WAYS:
        medians = sorted(median(times) for times in run["times"][way])
        rows.append(
            [way, str(len(medians)), *(f"{1e3 * each:.2f} ms" for each in (median(medians), medians[0], medians[-1]))]
        )
    ratios = (f"{run[name]:.3f}x" for name in ("ratio", "least", "largest"))
    rows = [[*row, ""] for row in rows] + [["on, of off", "", *ratios, verdict([run["ratio"]], run["target"])]]
    rows += [["processor time of it", "", f"{run['cpu']:.3f}x", "", "", ""]]
    return table(["watched", "runs", "median step", "least", "largest", f"target {run['target']:.2f}x"], rows)


# --- offload.py ----------------------------------------------------------------------------------


def offload_targets() -> str:
    """Every target of tiers, and what was reached."""
    rows = []
    for run in results("offload"):
        for part, found in run["parts"].items():
            for target in found["targets"]:
                met = "met" if target["met"] else "missed"
                rows.append([part, target["what"], f"{target['reached']:.2f}x", f"{target['target']:.2f}x", met])
    return table(["part", "what", "reached", "target", ""], rows)


def offload_steps() -> str:
    """A training step with states at every place, and bytes of states by place."""
    [run] = results("offload")
    rows = []
    for way, row in run["parts"]["step"]["rows"].items():
        places = [f"{row[f'{place} GB']:.3f}" if f"{place} GB" in row else "" for place in ("device", "host", "disk")]
        same = "the same" if row["same losses"] else "others"
        rows.append([way, f"{row['median s']:.3f} s", f"{row['of resident']:.2f}x", same, *places])
    return table(["", "step", "of resident", "loss bits", "device GB", "host GB", "disk GB"], rows)


# --- checkpoint.py --------------------------------------------------------------------------------


def checkpoint_speed() -> str:
    """Saves, loads and what training waits for, beside the disk and DCP."""
    rows = []
    for run in results("checkpoint"):
        met = {target["what"].partition(",")[0]: target["met"] for target in run["targets"]}
        for kind, ways in run["seconds"].items():
            whole = run["seconds"]["writing"]["save"] if kind == "stall" else ways["raw"]
            for way, values in ways.items():
                share = median(values) / median(whole) if kind == "stall" else median(whole) / median(values)
                name = "stall" if way == "asynchronous" else way
                judged = ("met" if met[name] else "missed") if name in met else ""
                rows.append([kind, way, f"{median(values):.3f} s", f"{share:.2f}x", judged])
    limits = f"save, load at least {checkpoint.SPEED:.2f}x, stall at most {checkpoint.STALL:.2f}x"
    return table(["", "", "median", "of raw; a stall of a save", limits], rows)


def llava_job() -> str:
    """Stages and ranks of the LLaVA job in small."""
    [run] = results("llava")
    rows = [
        [
            f"{row['stage']}", f"{row['ranks']}", f"{row['micro_batch']} x {row['accumulate']}",
            f"{row['peak'] / MIB:.0f} MiB", f"{row['peak_host'] / MIB:,.0f} MiB", f"{row['samples_per_s']:.0f}",
        ]
        for row in run["rows"]
    ]  # fmt: skip
    return table(["stage", "ranks", "batch of a rank", "device peak", "host peak", "samples/s"], rows)


# --- planner_speed.py ---------------------------------------------------------------------------


def plans_in_seconds() -> str:
    """CPU seconds of commands: where a model is traced, again, and the latter over those of a commit before."""
    [found] = results("planner-speed")
    cases = {case.name: case for case in planner_speed.CASES}
    rows = [
        [
            f"`zero3d {' '.join(cases[row['case']].words)}`", f"{row['first']:.1f} s", f"{row['again']:.2f} s",
            f"{row['target']:g} s: {verdict([row['again']], row['target'])}",
            f"{row['of_base']:.3f}x of {row['base']:.2g} s",
        ]
        for row in found
    ]  # fmt: skip
    return table(["command", "first", "again", "target", "of before"], rows)


# --- profile_accuracy.py ------------------------------------------------------------------------


def plans_by_profile() -> str:
    """Planned steps of a calibrated machine beside what runs took, and how far these runs differ from each other."""
    [found] = results("profile-accuracy")
    rows = [
        [
            row["case"], str(row["ranks"]), str(row["stage"]), f"{1e3 * row['plan']:.0f} ms",
            f"{1e3 * row['measured']:.0f} ms", f"{100 * row['error']:+.1f} %", f"{100 * row['error_by_run']:+.1f} %",
            f"{100 * row['spread']:.1f} %",
        ]
        for row in found
    ]  # fmt: skip
    head = ("blocks x hidden, tokens", "ranks", "stage", "planned", "measured", "error", "by a run's", "between rounds")
    return table(head, rows)


def plans_by_profile_target() -> str:
    """How many plans are within the target, and the farthest."""
    [found] = results("profile-accuracy")
    errors = [abs(row["error"]) for row in found]
    within = sum(error <= profile_accuracy.TARGET for error in errors)
    return (
        f"Target: within {100 * profile_accuracy.TARGET:.0f} %. {within} of {len(errors)} plans are; the farthest is "
        f"{100 * max(errors):.1f} % off, and rounds of one run differ by up to "
        f"{100 * max(row['spread'] for row in found):.1f} %."
    )


MEASURED: dict[str, Callable[[], str]] = {
    "plans-by-profile": plans_by_profile,
    "plans-by-profile-target": plans_by_profile_target,
    "engines-targets": lambda: targets("engines"),
    "engines-steps": lambda: engine_steps("engines"),
    "engines-memory": engines_memory,
    "one-rank-targets": lambda: targets("engines-one-rank"),
    "exact-targets": lambda: targets("engines-exact"),
    "autocast-cost": lambda: engine_steps("engines-autocast"),
    "deepspeed-targets": lambda: targets("deepspeed"),
    "deepspeed-steps": lambda: engine_steps("deepspeed"),
    "pipelines": pipelines,
    "meshes-beside-torch": meshes_beside_torch,
    "experts": experts_beside,
    "experts-layer": experts_layer,
    "sequences": sequences,
    "hybrid-packing": hybrids,
    "hybrid-sequence": hybrids_shared,
    "sequence-steps": sequence_steps,
    "streams": streams,
    "stream-seconds": stream_seconds,
    "generation": generations,
    "links-steps": links_steps,
    "links-chosen": links_chosen,
    "links-targets": links_targets,
    "narrow-wires": narrow_wires_losses,
    "optimizers": optimizers_beside,
    "qlora": qlora_beside,
    "demo-curves": demo_curves_by_step,
    "loading": loading_speed,
    "loading-memory": loading_memory,
    "offload-targets": offload_targets,
    "offload-steps": offload_steps,
    "loop-share": loop_share,
    "watched-steps": watched_steps,
    "checkpoint": checkpoint_speed,
    "llava": llava_job,
    "plans-in-seconds": plans_in_seconds,
}
