"""A dry run of a configuration on a mesh that is not there: one rank of each class, each in a process of its own.

Ranks of one class hold and do the same:

    pp   every pipeline stage is a class of its own: layers differ, and so do the micro-batches in flight
    dp   ranks of a stage differ where the shard of a unit is all padding on some of them, which then hold no
         optimizer states of it. The first has all, and stands also for those that hold more than the last
    tp   all ranks have slices of one size, so one stands for all
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from typing import Any

from zero3d import errors
from zero3d.blueprint.auto import PLACES
from zero3d.config import Config, settle, to_dict
from zero3d.distributed.degrees import Degrees, Place
from zero3d.errors import ConfigError, Zero3dError
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.offload import AUTO
from zero3d.tools.plan.spec import Patches
from zero3d.tools.sim.request import Request
from zero3d.tools.sim.result import RankResult, Simulation, from_json

BACKENDS = ("nccl", "gloo")
AT_ONCE = 2  # processes of about 0.5 GB
LOOK = 0.2  # seconds between two looks at who is done

Watch = Callable[[Sequence[RankResult], int], None]  # the ranks that are done, and how many there are, as far as known


class Interrupted(KeyboardInterrupt):
    """Says that Ctrl-C came. simulation: of the ranks that were done."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation


def simulate(
    config: Config,
    world: int,
    rank: int | None = None,
    backend: str = "nccl",
    whole: bool = False,
    watch: Watch = lambda *_: None,
    nodes: int = 1,
    patches: Patches | None = None,
) -> Simulation:
    """Simulate one step of one rank per class (or of `rank` alone).

    whole   run every micro-batch, though some repeat others (repeats.py)
    watch   told now and then who is done
    nodes   hosts that the ranks are on, evenly
    patches of a sequence's images; None: of one image
    Raises ConfigError and MeshError for what `train` could not run, and for a rank that is not there; Interrupted
    where Ctrl-C comes and a rank is done.
    """
    degrees, batch = settle(config, world)
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is not there: {degrees} has ranks 0 to {world - 1}.")
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown: pass one of {', '.join(BACKENDS)}.")
    if config.offload.optimizer == AUTO:
        raise ConfigError(
            "offload.optimizer=auto depends on the memory of the machine that a run starts on, and a simulation has "
            f"none: pass offload.optimizer={', '.join(PLACES[:-1])} or {PLACES[-1]}. `zero3d plan explain` says which "
            "of them fits a card."
        )
    if nodes < 1 or world % nodes:
        raise ConfigError(f"{world} ranks on {nodes} nodes: pass --nodes as a divisor of the ranks, from 1.")

    def run(number: int) -> RankResult:
        return in_own_process(Request(to_dict(config), number, world, backend, whole, world // nodes, patches))

    results, interrupted = ([run(rank)], False) if rank is not None else _of_all_classes(degrees, run, watch)
    if not results:
        raise KeyboardInterrupt
    schedule = Schedule.of(config.mesh.schedule).name if degrees.pp > 1 else ""
    notes = ["train.compile is left out: what a compiler fuses, it alone knows."] * config.train.compile
    notes += ["model.linear=fp8 is left out: products in fp8 hold scales and copies beside these bytes."] * bool(
        config.model.linear
    )
    if config.zero.weights == AUTO:
        notes.append("zero.weights=auto: kept, as a plan alone chooses cast: pass zero.weights=cast to see it.")
    if degrees.ep > 1:
        notes.append(f"ep {degrees.ep} x edp {degrees.edp}: every expert was sent as many tokens as any other.")
    if said := results[0].images:
        notes.append(f"every sequence was simulated {said}.")
    if interrupted:
        stages = len({result.pp for result in results})
        notes.append(f"stopped: {stages} of {degrees.pp} pipeline stages follow, and perhaps not all of their classes.")
    simulation = Simulation(
        config.model.path,
        config.zero.stage,
        config.precision,
        degrees,
        schedule,
        batch.batch,
        batch.micro_batch,
        batch.accumulate,
        config.data.length,
        backend,
        tuple(results),
        tuple(notes),
    )
    if interrupted:
        raise Interrupted(simulation)
    return simulation


def representatives(degrees: Degrees) -> list[int]:
    """Return the first rank of every pipeline stage."""
    return [degrees.rank(Place(pp, 0, 0)) for pp in range(degrees.pp)]


def _of_all_classes(degrees: Degrees, run: Callable[[int], RankResult], watch: Watch) -> tuple[list[RankResult], bool]:
    """Run the first dp rank of every pipeline stage, and the last one where it is not like it.

    Returns also whether Ctrl-C came before all were done.
    """
    last = degrees.dp - 1
    firsts, interrupted = _done(run, representatives(degrees), watch)
    unlike = [degrees.rank(Place(first.pp, last, 0)) for first in firsts if last not in first.alike]
    others: list[RankResult] = []
    if not interrupted:
        others, interrupted = _done(run, unlike, lambda done, many: watch([*firsts, *done], len(firsts) + many))
    other = {result.pp: result for result in others}
    classes: list[RankResult] = []
    for first in firsts:
        apart = set(other[first.pp].alike) if first.pp in other else set()
        alike = tuple(dp for dp in range(degrees.dp) if dp not in apart)
        classes.append(replace(first, alike=alike, stands_for=len(alike) * degrees.tp))
        classes += [other[first.pp]] if apart else []
    return classes, interrupted


def _done(run: Callable[[int], RankResult], ranks: Sequence[int], watch: Watch) -> tuple[list[RankResult], bool]:
    """Run ranks, a few at a time; return results in their order, and whether Ctrl-C came before all were done."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(run, rank) for rank in ranks]
        try:
            while wait(futures, LOOK, FIRST_EXCEPTION).not_done:
                watch([future.result() for future in futures if future.done()], len(futures))
            results = [future.result() for future in futures]
            watch(results, len(futures))
            return results, False
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            done = [future for future in futures if not future.cancelled() and future.exception() is None]
            return [future.result() for future in done], True
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def in_own_process(request: Request) -> RankResult:
    """Return the answer of `python -m zero3d.tools.sim.rank`. Raises its Zero3dError; RuntimeError if it died."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zero3d.tools.sim.rank"],
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise RuntimeError(f"the process of rank {request.rank} died:\n{done.stderr}") from error
    if "error" in answer:
        kind: type[Zero3dError] = getattr(errors, answer["error"])
        raise kind(answer["text"])
    return from_json(RankResult, answer)
