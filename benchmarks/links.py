"""A slow link between two hosts: what each way to train leaves of it. Needs root, Linux and iproute2.

    python benchmarks/links.py --json out.json           two hosts of two ranks, gloo, bf16, one micro-batch a step

Two network namespaces joined by a cable, throttled by tbf to each rate (tests/two_hosts.py), 0 for a cable that is not.
At each rate ranks are started anew, and variants take turns in the same processes:

    flat        stage 3 over all four ranks
    int8        zero.gather_wire=int8
    second      zero.second_shard=2, a host's
    both
    shard       mesh.shard=2: copies on the other host
    shard-FORM  zero.slow_wire=FORM with it: bf16, int8, int4
    fsdp2       torch's fully_shard over all four
    hsdp        fully_shard over a host's two, copies on the other

For each: seconds of a step (the slowest rank's, median over rounds) and its ratio to flat's in the same round, and what
the first host puts on the cable in it, beside the bytes of the ledger that cross; of zero3d also a pass of gathers of
all units, first after an update and again, as a backward has it, and the bytes of the first that cross by formula.
Before the rounds `zero3d calibrate` measures the links, and the planner says from these what a step of each way takes
(tools/plan/links.py), and which it would choose: of those that send numbers as they are (auto), and of all (narrow).
Tables have what today's planner says of recorded links (`planned_again`).

Targets (`TARGETS`), at 200 Mbit/s but the last: 8-bit sums of shards at least 3 times as fast as flat; a pass again of
second shards 10 times; what is chosen takes at most 1.03 of flat at every rate. The exit code is 0 whether they are
met or not, and where two hosts cannot be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from model import HEAD_SIZE, Shape, batch, build_gpt
from ranks import command_line, over_ranks, positive
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from two_hosts import ADDRESSES, CABLE, two_hosts, why_not

import zero3d
from zero3d.tools.cli.worker import leave
from zero3d.tools.plan.calibrate import Sizes, calibrate
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster as catalogued
from zero3d.tools.plan.links import fastest, ways
from zero3d.tools.plan.spec import ClusterSpec, Link, ModelSpec, Operations, ParallelPlan
from zero3d.tools.sim.model_spec import outline

RATES = (100, 200, 1000, 0)  # Mbit/s
HOSTS, LOCAL, CLIP, PORT = 2, 2, 1.0, 29611
SHARD = {"shard": LOCAL}
OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {},
    "int8": {"gather_wire": "int8"},
    "second": {"second_shard": LOCAL},
    "both": {"gather_wire": "int8", "second_shard": LOCAL},
    "shard": SHARD,
    **{f"shard-{form}": SHARD | {"slow_wire": form} for form in ("bf16", "int8", "int4")},
}
WAYS = {  # the planner's names of them
    "flat": "flat",
    "8-bit gathers": "int8",
    "second shard": "second",
    "second shard, 8-bit gathers": "both",
    f"shard {LOCAL}": "shard",
    **{f"shard {LOCAL}, {form} sums": f"shard-{form}" for form in ("bf16", "int8", "int4")},
}
EXACT = ("flat", "second", "shard")  # those that send numbers as they are
TORCH = ("fsdp2", "hsdp")
RATE = 200  # Mbit/s, of the first two targets
RATES_OF_A_RANK = ("flops", "bandwidth", "matrix", "flash")
TARGETS = {"sums": 3.0, "gathers": 10.0, "chosen": 1.03}
SIZES = Sizes(side=512, copied=8 << 20, disk=1 << 20, messages=tuple(1 << power for power in range(14, 21)))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if "RANK" in os.environ:
        measured = measure(arguments)
        if dist.get_rank() == 0:
            arguments.json.write_text(json.dumps(measured))
        leave(0)  # as ranks.py's: FSDP2 keeps groups, whose threads an ending interpreter would abort
    if why_not():
        print(f"skipped: {why_not()}")
        return 0
    result = {
        "torch": torch.__version__,
        "arguments": {**vars(arguments), "model": vars(arguments.model), "json": None},
        "rates": {str(rate): at_rate(rate, arguments) for rate in arguments.rates},
    }
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, ranks=HOSTS * LOCAL)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="Mbit/s; 0: not throttled")
    parser.add_argument("--model", type=Shape.parse, default=Shape(layers=4, d=256, vocab=1024))
    parser.add_argument("--length", type=positive, default=32, help="tokens of the one sequence of a rank")
    return parser.parse_args(argv)


def at_rate(rate: int, arguments: argparse.Namespace) -> Any:
    """What ranks measure on two hosts whose cable has this rate. Raises RuntimeError where one of them fails."""
    model = ",".join(f"{key}={value}" for key, value in vars(arguments.model).items())
    words = ["--rounds", arguments.rounds, "--model", model, "--length", arguments.length, "--json"]
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for host in hosts if rate else ():
            host.slow_down(f"{rate}mbit")
        ranks = []
        for rank in range(HOSTS * LOCAL):
            given = {"RANK": rank, "WORLD_SIZE": HOSTS * LOCAL, "LOCAL_RANK": rank % LOCAL, "LOCAL_WORLD_SIZE": LOCAL}
            given |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": CABLE}
            environment = os.environ | {key: str(value) for key, value in given.items()} | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, *words, f"{folder}/out.json"]
            ranks.append(hosts[rank // LOCAL].start(command, env=environment, stderr=subprocess.PIPE, text=True))
        failed = [said[1][-2000:] for rank in ranks if (said := rank.communicate()) and rank.returncode]
        if failed:
            raise RuntimeError(f"at {rate} Mbit/s: {failed[0]}")
        return json.loads((Path(folder) / "out.json").read_text())


# --- on a rank ------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the planner says, and by variant what its turns took."""
    flat = zero3d.Mesh(device="cpu")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cluster = calibrate(flat, Path(folder), SIZES)
    steps: dict[str, Callable[[int], float]] = {}
    engines: dict[str, zero3d.Engine] = {}
    for name, options in OPTIONS.items():
        mesh = zero3d.Mesh(device="cpu", shard=LOCAL) if "shard" in options else flat
        others = {key: value for key, value in options.items() if key != "shard"}
        engines[name] = zero3d.Engine(
            build_gpt(arguments.model), mesh=mesh, stage=3, precision="bf16", clip_norm=CLIP, **others
        )
        steps[name] = step_of(engines[name], arguments)
    for name in TORCH:
        steps[name] = torch_step(name, arguments)
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "cable": []} for name in steps}
    losses = dict.fromkeys(steps, 0.0)
    for turn in range(1 + arguments.rounds):
        for name, step in steps.items():
            if name in engines:
                engines[name].traffic.reset()
            seconds, sent = timed(lambda step=step, name=name, turn=turn: losses.update({name: step(turn)}))
            if turn:
                found[name]["step"].append(seconds)
                found[name]["cable"].append(sent)
    ledgers = {name: by_ledger(engine) for name, engine in engines.items()}
    for name, engine in engines.items():
        found[name] |= {"first": [], "again": [], "first cable": [], "again cable": []}
        for turn in range(1 + arguments.rounds):
            for unit in engine.units:
                unit.weights.changed()
            for which in ("first", "again"):
                seconds, sent = timed(lambda engine=engine: gather_all(engine))
                if turn:
                    found[name][which].append(seconds)
                    found[name][f"{which} cable"].append(sent)
    flat_steps = found["flat"]["step"]
    variants = {
        name: {key: median(values) for key, values in figures.items()}
        | {"of flat": median(own / other for own, other in zip(figures["step"], flat_steps, strict=True))}
        | {"loss": losses[name]}
        | ({"computed": computed(engines[name]), "ledger": ledgers[name]} if name in engines else {})
        for name, figures in found.items()
    }
    return planned(cluster, arguments) | {"variants": variants}


def planned(cluster: ClusterSpec, arguments: argparse.Namespace) -> dict[str, Any]:
    """The links as they were measured, the planner's seconds of a step by variant, and what it would choose."""
    plan = ParallelPlan(dp=HOSTS * LOCAL, stage=3, precision="bf16")
    found = ways(spec_of(arguments.model, arguments.length), plan, cluster, evaluate)
    chosen = {
        name: WAYS[fastest(found, cluster, cluster.gpu.memory, narrow).name]
        for name, narrow in (("auto", False), ("narrow", True))
    }
    links = {
        name: {"bandwidth": link.bandwidth, "latency": link.latency}
        for name, link in (("inside", cluster.inside), ("across", cluster.across))
    }
    rates = {name: getattr(cluster.gpu, name) for name in RATES_OF_A_RANK}
    seconds = {WAYS[way.name]: way.estimate.seconds.mid for way in found}
    return {"links": links, "rank": rates, "planned": seconds, "chosen": chosen}


def planned_again(result: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded result with what the planner says now of its links.

    Rates of a rank are those that were recorded, else an equal share of the catalogue's machine: all ranks are on one.
    """
    given, hosts = result["arguments"], catalogued("cpu", HOSTS * LOCAL, HOSTS)
    arguments = argparse.Namespace(model=Shape(**given["model"]), length=given["length"])
    share = {name: getattr(hosts.gpu, name) / hosts.gpus for name in ("flops", "bandwidth")}
    rates = {}
    for rate, found in result["rates"].items():
        links = {name: Link(link["bandwidth"], link["latency"], 0.0) for name, link in found["links"].items()}
        rank = dataclasses.replace(hosts.gpu, **found.get("rank", share))
        rates[rate] = found | planned(dataclasses.replace(hosts, gpu=rank, **links), arguments)
    return result | {"rates": rates}


@lru_cache
def spec_of(model: Shape, length: int) -> ModelSpec:
    """The model as the planner takes it: parameters as they are, operations of products with weights alone."""
    spec = outline(build_gpt(model), length)
    parts = tuple(
        dataclasses.replace(part, operations=Operations(2.0 * part.numel if part.kind != "embedding" else 0.0))
        for part in spec.parts
    )
    heads = model.d // HEAD_SIZE
    return dataclasses.replace(spec, parts=parts, heads=heads, kv_heads=heads)


def step_of(engine: zero3d.Engine, arguments: argparse.Namespace) -> Callable[[int], float]:
    """A step of an engine on this rank's batch."""

    def step(number: int) -> float:
        loss = engine(*data(arguments, number))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def torch_step(name: str, arguments: argparse.Namespace) -> Callable[[int], float]:
    """A step of FSDP2, block by block as zero3d has them."""
    model = build_gpt(arguments.model)
    shape = (HOSTS, LOCAL) if name == "hsdp" else (HOSTS * LOCAL,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model.embedding, *model.blocks, model.head, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(number: int) -> float:
        loss = model(*data(arguments, number))
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def data(arguments: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 100 * step + dist.get_rank()
    return batch(seed, 1, arguments.length, arguments.model.vocab, torch.device("cpu"))


def gather_all(engine: zero3d.Engine) -> None:
    """Gather and release every unit, as a pass through the model does."""
    for unit in engine.units:
        unit.weights.gather()
        unit.weights.release()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the slowest rank, and the bytes that the first host has sent meanwhile."""
    before = sent_by_host()
    dist.barrier()
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    dist.barrier()
    sent = sent_by_host() - before
    [slowest] = over_ranks([seconds], dist.ReduceOp.MAX, torch.device("cpu"))
    return slowest, float(sent)


def sent_by_host() -> int:
    """Return what this rank's host has put on the cable so far; 0 where another rank asks."""
    if dist.get_rank():
        return 0
    said = subprocess.run(["ip", "-json", "-stats", "link", "show", "dev", CABLE], check=True, capture_output=True)
    [row] = json.loads(said.stdout)
    return int(row["stats64"]["tx"]["bytes"])


def by_ledger(engine: zero3d.Engine) -> float:
    """Return the bytes of a step's ledger that a host sends to the other: of each axis those between them."""
    ranks = HOSTS * LOCAL
    away = {"replicate": 1.0} | dict.fromkeys(("dp", "world"), (ranks - LOCAL) / (ranks - 1))
    return sum(LOCAL * entry.bytes * away.get(entry.axis, 0.0) for entry in engine.traffic)


def computed(engine: zero3d.Engine) -> int:
    """Return the bytes of a pass of gathers over all ranks that a host sends: each shard to all ranks of the other.

    0 where states are cut inside of a host.
    """
    if engine.mesh.shard < engine.mesh.dp:
        return 0
    travels = (elements * width for unit in engine.traffic_units for elements, width in [unit.as_gathered])
    return sum(nbytes // (HOSTS * LOCAL) * LOCAL * (HOSTS - 1) * LOCAL for nbytes in travels)


# --- as text ----------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"{'Mbit/s':>7}  {'variant':<11}{'step s':>9}{'of flat':>9}{'planned':>9}{'MB':>8}{'ledger':>8}"
        f"{'first s':>10}{'again s':>10}{'x flat':>8}{'loss':>10}"
    ]
    for rate, found in result["rates"].items():
        variants = found["variants"]
        for name, figures in variants.items():
            gathers = f"{figures['first']:>10.4f}{figures['again']:>10.4f}" if "first" in figures else 20 * " "
            times = f"{variants['flat']['again'] / figures['again']:>8.1f}" if "again" in figures else 8 * " "
            planned = f"{found['planned'][name]:>9.3f}" if name in found["planned"] else 9 * " "
            ledger = f"{figures['ledger'] / 1e6:>8.2f}" if "ledger" in figures else 8 * " "
            row = f"{called(rate):>7}  {name:<11}{figures['step']:>9.3f}{figures['of flat']:>9.2f}{planned}"
            lines.append(f"{row}{figures['cable'] / 1e6:>8.2f}{ledger}{gathers}{times}{figures['loss']:>10.4f}")
        lines.append(
            f"{called(rate):>7}  chosen: {found['chosen']['auto']}; if it may round: {found['chosen']['narrow']}"
        )
    return "\n".join(
        [*lines, *(f"{what}: {found:.2f}x (target {limit:g}x)" for what, found, limit, _ in judged(result))]
    )


def judged(result: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Every target whose two sides were measured: what it is of, the ratio, the limit, and whether that is a least."""
    rows = []
    if str(RATE) in result["rates"]:
        at = result["rates"][str(RATE)]["variants"]
        rows.append(
            (
                f"flat's step of that with 8-bit sums, {RATE} Mbit/s",
                1 / at["shard-int8"]["of flat"],
                TARGETS["sums"],
                True,
            )
        )
        again = at["flat"]["again"] / at["second"]["again"]
        rows.append((f"flat's gathers of those from second shards, {RATE} Mbit/s", again, TARGETS["gathers"], True))
    for rate, found in result["rates"].items():
        for name in ("auto", "narrow"):
            ratio = found["variants"][found["chosen"][name]]["of flat"]
            rows.append(
                (f"{name} ({found['chosen'][name]}) of flat, {called(rate)} Mbit/s", ratio, TARGETS["chosen"], False)
            )
    return rows


def called(rate: str) -> str:
    """A rate as a reader knows it."""
    return "all" if rate == "0" else f"{int(rate):,}"


if __name__ == "__main__":
    sys.exit(main())
