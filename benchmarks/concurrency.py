"""Which tool finds which fault of concurrency: every tool on every planted fault, and on code that had faults.

    python benchmarks/concurrency.py --json OUT            all of it: under a minute of CPU time
    python benchmarks/concurrency.py --faults none         what tools find in a package as it is, such as an older one

A tool is given a fault to plant, and returns what it found, in words; nothing where all is well. To add one, add it to
TOOLS; to add a fault, a context manager (instruments/planted*.py) to FAULTS. tables.py writes the table of
docs/reliability.md from results/concurrency.json and, of the code that had faults, concurrency-before.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from instruments import first_operations, interleavings, planted, planted_between_ranks, rendezvous, unequal
from instruments.races import Model, alone_in, collectives_of, lonely_mesh, modelled
from instruments.rendezvous import Machine

import zero3d

Fault = Callable[[], AbstractContextManager[object]]
Tool = Callable[[Fault], list[str]]

HOLE, PIPELINE, CALLER, STREAMS = "a hole", "a pipeline", "a caller's groups", "streams"  # what a tool watches
SLOWER = 1.001  # times as long, where nothing is superfluous
MACHINES = {
    "": Machine(),
    "one communicator": Machine(together=True),
    "a host that waits": Machine(pauses=True),
    "one hardware queue": Machine(one_queue=True),
    "one launch order": Machine(in_order=True),
}


def runs(fault: Fault) -> dict[str, unequal.Outcome]:
    """Return what ranks on threads did with a fault, by what is watched."""
    with fault():
        found = {HOLE: unequal.run(unequal.Hole(5)), CALLER: unequal.run_beside_callers_groups()}
    return found | {PIPELINE: unequal.run_pipeline(2, 3, "gpipe", fault)}


def threads(fault: Fault) -> list[str]:
    """Train ranks on threads that do not do the same, beside one process."""
    with fault():
        found = {HOLE: unequal.run(unequal.Hole(5)), CALLER: unequal.run_beside_callers_groups()}
    wanted = {HOLE: unequal.expected(unequal.Hole(5)), CALLER: unequal.expected(None, depth=2, world=4, steps=1)}
    return [name for name, ran in found.items() if ran.stuck or not ran.equals(wanted[name])]


def replayed(fault: Fault) -> list[str]:
    """Replay what ranks ask of their groups, on every machine."""
    found = []
    for name, ran in runs(fault).items():
        on = [machine for machine, how in MACHINES.items() if rendezvous.replay(ran.logs, machine=how)]
        if on:
            found.append(name if "" in on else f"{name} ({', '.join(on)})")
    return found


def first_operation(fault: Fault) -> list[str]:
    """Look at what each group begins with."""
    ran = unequal.run_pipeline(3, 4, "1f1b", fault)
    return [PIPELINE] if first_operations.first_operation_faults(ran.logs) else []


def searched(fault: Fault) -> list[str]:
    """Try every order in which three ranks with three blocks can come, with room for two collectives at once."""
    with fault():
        ran = unequal.run(unequal.Hole(1, steps=(1,)), depth=3, world=3)
    if ran.errors:  # the program ended earlier: another tool's
        return []
    step = rendezvous.step_of(ran.logs, 1)
    return [HOLE] if interleavings.explore(step, Machine(eager=True, resident=2)).cycle else []


def model_of(fault: Fault, wire: str = "same", uneven: bool = False) -> Model:
    """Model the streams of one of four ranks, whose weights travel as they are, or coded."""
    with alone_in(4), collectives_of(Model()), fault():
        model, kind = (unequal.Uneven(), unequal.UnevenBlock) if uneven else (unequal.Chain(6), unequal.Block)
        chosen = {"stage": 3, "precision": "bf16", "units": [kind], "gather_wire": wire, "clip_norm": None}
        engine = zero3d.Engine(model, mesh=lonely_mesh(4), optimizer=unequal.sgd, **chosen)
        with modelled(engine) as found:
            for step in range(unequal.STEPS):
                engine.backward(unequal.loss_of(engine, unequal.rows_of(step, 0, 16).bfloat16()))
                engine.step()
    return found


def races(fault: Fault) -> list[str]:
    """Look for two accesses to the same memory, on two streams, in no order."""
    return [STREAMS] if model_of(fault).races else []


def durations(fault: Fault) -> list[str]:
    """Look for waits of compute for what it does not need, and for a step that takes longer."""
    usual = model_of(planted_between_ranks.NONE, uneven=True).timeline
    try:
        waits = model_of(fault, "int8").timeline.superfluous
    except RuntimeError:  # codes that nobody waits for are not decoded, and the step fails
        return []
    slower = model_of(fault, uneven=True).timeline.makespan > SLOWER * usual.makespan
    return ["superfluous waits"] * bool(waits) + ["a slower step"] * slower


TOOLS: dict[str, Tool] = {
    "ranks on threads": threads,
    "replay": replayed,
    "every order": searched,
    "first operations": first_operation,
    "races": races,
    "durations": durations,
}
NONE = "none"
FAULTS: dict[str, Fault] = {
    NONE: planted_between_ranks.NONE,
    **planted_between_ranks.FAULTS,
    "one gather ahead and one reduction in flight, not two": planted.window_of_one,
    "a wait for units that are gathered ahead (C2)": planted.tail_joined,
    "a wait for a side stream is dropped": planted.join_dropped,
    "a side stream's memory is given back at once": planted.given_back_at_once,
    "a bucket is given back while it is added up": planted.bucket_given_back_early,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run tools on faults, and write or print {fault: {tool: what it found}}."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=lambda text: text.split(";"), default=list(FAULTS), metavar="FAULT;...")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.faults if name not in FAULTS]
    if unknown:
        parser.error(f"--faults {unknown[0]!r}: one of {'; '.join(FAULTS)}")
    torch.set_num_threads(1)
    found = {name: {tool: run(FAULTS[name]) for tool, run in TOOLS.items()} for name in arguments.faults}
    text = json.dumps({"found": found}, indent=1)
    print(text) if arguments.json is None else arguments.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
