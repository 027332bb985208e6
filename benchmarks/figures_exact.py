"""Tables of what does not depend on the machine's speed: losses, bytes, traffic, plans, errors of the planner.

Commands print them, and tests run these commands. Losses on the standard library's text depend on Python's version, and
on torch's and the CPU's instructions; that they are equal to each other does not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

from figures_measured import results, table
from recorded import load

from zero3d.spec.tiers import DEVICE
from zero3d.tools.cli.main import main as zero3d
from zero3d.tools.doctor.table import PROBES
from zero3d.train.tables import shown

MB, GB = 1e6, 1e9
STATES = ("parameters", "gradients", "optimizer states")


def block(text: str) -> str:
    """A fenced block."""
    lines = "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
    return f"```\n{lines}\n```"


# --- runs of the demo ---------------------------------------------------------------------------


def demo_memory() -> str:
    """Bytes of rank 0 by consumer, beside the formula's."""
    [run] = results("demo")
    return block("\n".join([memory_head(), *map(memory_line, run["memory"])]))


def offload_places() -> str:
    """Bytes of rank 0 by place and consumer, beside the formula's."""
    [run] = results("offload-places")
    lines = [f"{row['place']:<8}{memory_line(row)}" for row in run["memory"]]
    return block("\n".join([f"{'place':<8}{memory_head()}", *lines]))


def memory_head() -> str:
    """The names of the columns of `memory_line`."""
    return f"{'consumer':<22}{'dtype':<19}{'measured':>11}{'formula':>22}"


def memory_line(row: Mapping[str, Any]) -> str:
    """One consumer's bytes, beside the formula's."""
    formula = "" if row["formula"] is None else f"{row['formula']:,}"
    said = "" if not formula else "at most" if row["at_most"] else "equal" if row["agrees"] else "UNEQUAL"
    name = shown(row["consumer"], row.get("place", DEVICE))
    return f"{name:<22}{row['dtype']:<19}{row['measured']:>11,}   {said:<7}{formula:>12}".rstrip()


def four_stages() -> str:
    """Losses, states and elements moved, by stage."""
    rows = []
    for run in results("four-stages"):
        losses, held = run["losses"], sum(r["measured"] for r in run["memory"] if r["consumer"] in STATES)
        moved = sum(r["measured"]["elements"] for r in run["traffic"] if r["op"] in ("all_gather", "reduce_scatter"))
        rows.append([f"{run['stage']}", *(f"{losses[i - 1]:.9f}" for i in (1, 10, 40)), f"{run['held_out_loss']:.9f}",
                     f"{held / MB:.1f} MB", f"{moved // run['steps']:,}"])  # fmt: skip
    head = ["stage", "loss at step 1", "step 10", "step 40", "held-out", "states per rank", "elements moved per step"]
    return table(head, rows)


MESHES = (
    "1 process",
    "dp 2, stage 3, gradients reduced once a step",
    "pp 2 x dp 2, 1f1b, stage 3",
    "pp 2 x dp 2 x tp 2, 1f1b, stage 3",
)


def meshes() -> str:
    """Losses of the same 20 steps on other meshes."""
    rows = [
        [name, *(f"{run['losses'][i - 1]!r}" for i in (1, 10, 20))]
        for name, run in zip(MESHES, results("meshes"), strict=True)
    ]
    return table(["20 steps in fp32, the same batches", "loss at step 1", "step 10", "step 20"], rows)


def mesh_traffic() -> str:
    """What rank 0 of pp 2 x dp 2 x tp 2 sent, beside the formula."""
    run = results("meshes")[-1]
    lines = [f"{'operation':<24}{'calls':>7}{'elements':>14}{'bytes':>15}{'formula':>24}"]
    for row in run["traffic"]:
        m, f = row["measured"], row["formula"]
        said = "equal" if row["equal"] else "UNEQUAL"
        lines.append(
            f"{row['op']:<24}{m['calls']:>7,}{m['elements']:>14,}{m['bytes']:>15,}   {said:<7}{f['bytes']:>14,}"
        )
    return block("\n".join(lines))


def comparison(name: str) -> str:
    """What `zero3d compare` printed."""
    [printed] = results(name)
    return block(printed)


# --- plans --------------------------------------------------------------------------------------


def theory() -> str:
    """The paper's first table, as the command prints it now."""
    command = "zero3d plan --theory --params 7.5e9 --gpus 64"
    with redirect_stdout(StringIO()) as said:
        zero3d(command.split()[1:])
    lines = said.getvalue().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.split()[:2] == ["stage", "paper"])
    return block("\n".join([command, *(line[3:] for line in lines[begin : begin + 5])]))


def plan_72b() -> str:
    """The command, and the beginning of its answer."""
    [run] = load("plan-72b")["runs"]
    return block("\n".join([run["command"], "", *first_plans(run["result"])]))


def plan_72b_first() -> str:
    """The command, and what its answer recommends."""
    [run] = load("plan-72b")["runs"]
    lines = first_plans(run["result"])
    return block("\n".join([run["command"], "", *lines[: lines.index("")], "..."]))


def first_plans(text: str) -> list[str]:
    """What an answer recommends, its first three plans of two lines each, and what was left out first."""
    lines = text.splitlines()
    best = next(i for i, line in enumerate(lines) if line.startswith("Recommended: "))
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["mesh", "ZeRO"])
    left = next(i for i, line in enumerate(lines) if " plans, of which " in line)
    first = lines[best : lines.index("", best)]
    return [*first, "", *(line[3:] for line in lines[head : head + 7]), "...", "", *lines[left : left + 2], "   ..."]


def families() -> str:
    """What each type of transformers supports; a dash where a question does not arise."""
    head, *rows = (line.split() for line in results("families")[0].splitlines())
    return table([f"`{name}`" for name in head], [[f"`{kind}`", *answers] for kind, *answers in rows])


def vision_types() -> str:
    """What became of each type of images and text, as the package carries it."""
    found = load("vision-types")
    rows = [[f"`{row['type']}`", *list(row.values())[1:]] for row in found["runs"][0]["result"]["types"]]
    return table(["`model_type`", "trained", "packed", "`pp`", "`tp`", "processor", "why"], rows)


def vision_counts() -> str:
    """How many types have each verdict, with what, and when."""
    found = load("vision-types")
    result = found["runs"][0]["result"]
    counts = Counter(row["trained"] for row in result["types"])
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{len(result['types'])} types of transformers {result['transformers']}, on {found['date']}: {said}."


def packaged_types() -> str:
    """What the package carries of it, a type a line."""
    found = load("vision-types")
    result = found["runs"][0]["result"]
    lines = ",\n".join(json.dumps(row) for row in result["types"])
    return f'{{"transformers": "{result["transformers"]}", "date": "{found["date"]}", "types": [\n{lines}\n]}}\n'


def plan_llava() -> str:
    """LoRA on one to four cards: memory of a GPU and of the host."""
    rows = []
    for cards, run in zip((1, 2, 4), results("plan-llava"), strict=True):
        memory = run["recommended"]["memory"]
        rows.append([f"{cards}", f"{memory['device'] / GB:.0f} GB", f"{memory['host'] / GB:.0f} GB"])
    return table(["cards", "of a GPU", "of the host"], rows)


# (stage, GPUs): GB of the host and samples/s, of a practice report on LLaVA-1.5-7B with r 128 on A6000s
MEASURED_LLAVA = {(2, 1): (68, 1.043), (2, 2): (126, 2.11), (3, 2): (30, 2.09)}


def plan_llava_job() -> str:
    """The LoRA job of LLaVA-1.5-7B as planned, with a base of 4 bits, too, beside what a report has measured of it."""
    rows = []
    runs = results("plan-llava-job")
    half = len(runs) // 2
    for run, four in zip(runs[:half], runs[half:], strict=True):
        plan, memory = run["plan"], run["memory"]
        size, gpus = plan["micro_batch"], plan["dp"]
        told = MEASURED_LLAVA.get((plan["stage"], gpus))
        planned = [f"{memory[place] / GB:.0f} GB" for place in ("device", "host")]
        planned.append(f"{four['memory']['device'] / GB:.0f} GB")
        planned += [f"{size * gpus / each['seconds']['mid']:.2f}" for each in (run, four)]
        measured = (f"{told[0]} GB", f"{told[1]:g}") if told else ("–", "–")
        rows.append([f"{plan['stage']}", f"{gpus}", f"{size}", *planned, *measured])
    head = ["stage", "GPUs", "batch of a GPU", "a GPU", "the host", "a GPU, nf4", "samples/s", "samples/s, nf4"]
    return table([*head, "report: memory", "report: samples/s"], rows)


def plan_qwen3_vl() -> str:
    """A LoRA job of Qwen3-VL-8B as planned, in bf16 and with a base of 4 bits, one image of a megapixel a sequence."""
    runs = results("plan-qwen3-vl")
    [prepared] = results("images-prepared")
    seconds = prepared["decoding"] + prepared["processing"]  # of an image, on one core
    rows = []
    for run in runs:
        plan, memory = run["plan"], run["memory"]
        gpus = plan["dp"]
        samples = plan["micro_batch"] * gpus / run["seconds"]["mid"]
        planned = [f"{memory[place] / GB:.0f} GB" for place in ("device", "host")]
        share = f"{run['images']['tower_share']:.0%}".replace("%", " %")
        kind = plan["quantize"] or "bf16"
        cores = f"{samples / gpus * seconds:.2f}"
        rows.append([f"{plan['stage']}", f"{gpus}", kind, *planned, f"{samples:.2f}", share, cores])
    head = ["stage", "GPUs", "base", "a GPU", "the host", "samples/s", "the tower's share", "cores a GPU"]
    return table(head, rows)


def tower_share() -> str:
    """The tower's seconds over those of all else in a small Qwen3-VL, measured on one core, and as planned."""
    [run] = results("tower-share")
    rows = [
        [
            name,
            *(f"{run[name][key]:.2f}" for key in ("ratio", "planned_ratio")),
            f"{run[name]['off']:+.0%}".replace("%", " %"),
        ]
        for name in ("frozen", "trained")
    ]
    return table(["tower", "measured", "planned", "off"], rows)


def states_72b() -> str:
    """Model states by pipeline stage of examples/72b_128gpu.yaml."""
    [stages] = results("states-72b")
    names = {0: "0: embedding, 10 blocks", 1: "1: 11 blocks", 2: "2 to 6: 10 blocks", 7: "7: 9 blocks, norm, head"}
    rows = [
        [name, *(f"{value:,}" for value in stages[i]), f"{sum(stages[i]) / GB:.1f} GB"] for i, name in names.items()
    ]
    head = ["pipeline stage", "parameters (bf16)", "gradients (fp32)", "optimizer (fp32, over dp 2)", "in all"]
    return table(head, rows)


# --- instruments --------------------------------------------------------------------------------

PHASES = ("forward", "backward", "step")
VARIANTS = {"plain": "plain PyTorch", "fsdp2": "FSDP2, root not resharded"} | {
    f"stage{n}": f"zero3d stage {n}" for n in range(4)
}
WAITS = {
    "forward and backward": ("forward", "backward"), "`step()`, not due": ("off_the_boundary",), "`step()`": ("step",),
    "`train_batch`": ("train_batch",), "`evaluate`": ("evaluate",),
}  # fmt: skip


def launches() -> str:
    """Dispatches of a step by phase, before and now."""
    rows = []
    for before, now in zip(results("launches-before")[:2], results("launches")[:2], strict=True):
        for variant, name in VARIANTS.items():
            counts = [[sum(run["dispatches"][variant][phase].values()) for phase in PHASES] for run in (before, now)]
            pairs = zip(*([*each, sum(each)] for each in counts), strict=True)
            rows.append([f"dp {now['dp']}", name, *(_changed(*pair) for pair in pairs)])
    return table(["", "", *PHASES, "all"], rows)


def _changed(before: int, now: int) -> str:
    return f"{now:,}" if before == now else f"{before:,} → {now:,}"


def waits() -> str:
    """How often a step's phases make the host wait, before and now, and where transformers does."""
    rows = []
    for name, phases in WAITS.items():
        found = [
            [wait for phase in phases for wait in results(file)[2][phase]["waits"]]
            for file in ("launches-before", "launches")
        ]
        ours = [sum(n for _, line, n in each if "transformers/" not in line) for each in found]
        others = sum(n for _, line, n in found[1] if "transformers/" in line)
        rows.append([name, _changed(*ours), str(others)])
    return table(["", "in zero3d", "in transformers"], rows)


# --- the doctor ---------------------------------------------------------------------------------


def doctor() -> str:
    """The doctor's probes."""
    rows = [(f"`{each.name}`", each.symptom, each.looks_at, each.remedy) for each in PROBES]
    return table(("probe", "symptom", "what is examined", "what helps"), rows)


EXACT: dict[str, Callable[[], str]] = {
    "demo-memory": demo_memory,
    "four-stages": four_stages,
    "meshes": meshes,
    "mesh-traffic": mesh_traffic,
    "compare-stages": partial(comparison, "compare-stages"),
    "compare-offload": partial(comparison, "compare-offload"),
    "offload-places": offload_places,
    "theory": theory,
    "families": families,
    "vision-types": vision_types,
    "vision-counts": vision_counts,
    "plan-72b": plan_72b,
    "plan-72b-first": plan_72b_first,
    "plan-llava": plan_llava,
    "plan-llava-job": plan_llava_job,
    "plan-qwen3-vl": plan_qwen3_vl,
    "tower-share": tower_share,
    "states-72b": states_72b,
    "doctor": doctor,
    "launches": launches,
    "waits": waits,
}
