"""CPU seconds and own Python calls of a step's phases on gloo ranks, in turns with another checkout of zero3d.

    python benchmarks/instruments/dispatches.py --seconds [--against FOLDER] [--rounds 30] [--variants stage3,ddp]

The model is that of dispatches.py: blocks so small that their step is what an engine's host does. A checkout has its
ranks, in processes of their own, which sleep while those of another one have their turn.

    seconds  of a rank's process, all its threads: the median over turns of that over ranks and steps; waits take none
    ratio    the median over turns of both checkouts' seconds: what else a machine does slows both
    calls    Python functions of the engine that rank 0 enters: the same in every run but for which rank comes first
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from crews import Crew, crew
from ranks import Start
from torch import Tensor

from instruments.dispatches import BATCH, LENGTH, VOCABULARY, Llama, Step, Trained, build

PHASES = Step._fields
WARM_UP, STEPS_OF_A_TURN = 3, 3
HERE = Path(__file__).resolve().parents[2]


class Rank:
    """One rank of a checkout: its variants, and what their steps take."""

    def __init__(self, device: torch.device, variants: Sequence[str], blocks: int) -> None:
        self._variants: dict[str, Trained] = {}
        for name in variants:
            torch.manual_seed(0)
            self._variants[name] = build(name, dist.get_world_size(), Llama(blocks), peers=True)
        self._ids, self._targets = (torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device) for _ in range(2))

    def source(self) -> str:
        """Return the folder of the engine's source."""
        import zero3d

        return str(Path(zero3d.__file__).parent)

    def warm_up(self) -> None:
        """Take the steps that learn an order and make constants."""
        for name in self._variants:
            for _ in range(WARM_UP):
                self._step(name, lambda _, run: run())

    def seconds(self, name: str) -> list[list[float]]:
        """Return the CPU seconds of each phase of some steps of a variant."""
        steps = []
        for _ in range(STEPS_OF_A_TURN):
            taken: list[float] = []

            def timed(phase: str, run: Callable[[], Any], taken: list[float] = taken) -> Any:
                begun = time.process_time()
                result = run()
                taken.append(time.process_time() - begun)
                return result

            self._step(name, timed)
            steps.append(taken)
        return steps

    def calls(self, name: str) -> list[int]:
        """Return how many functions of the engine each phase of a step enters on the thread that trains."""
        counted = dict.fromkeys(PHASES, 0)
        source = self.source()

        def counts(phase: str, run: Callable[[], Any]) -> Any:
            def count(frame: FrameType, event: str, _: Any) -> None:
                counted[phase] += event == "call" and frame.f_code.co_filename.startswith(source)

            sys.setprofile(count)
            try:
                return run()
            finally:
                sys.setprofile(None)

        self._step(name, counts)
        return list(counted.values())

    def _step(self, name: str, around: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Take one step of a variant, each phase of which is run by `around`; garbage is collected between steps."""
        trained = self._variants[name]
        gc.collect()
        dist.barrier()
        gc.disable()
        try:
            loss: Tensor = around("forward", lambda: trained.forward(self._ids, self._targets))
            around("backward", lambda: trained.backward(loss))
            around("step", trained.step)
        finally:
            gc.enable()


@contextmanager
def ranks_of(checkout: Path, ranks: int, variants: Sequence[str], blocks: int) -> Iterator[Crew]:
    """Yield the ranks of a checkout, which have warmed up. Raises RuntimeError if they import another one."""
    source = checkout.resolve() / "src"
    sys.path.insert(0, str(source))  # a process that is spawned takes over its parent's path
    try:
        with crew(Start(ranks), Rank, variants, blocks) as members:
            sys.path.remove(str(source))
            if {Path(folder) for folder in members.ask("source")} != {source / "zero3d"}:
                raise RuntimeError(f"the ranks do not import zero3d of {source}")
            members.ask("warm_up")
            yield members
    finally:
        if str(source) in sys.path[:1]:
            sys.path.remove(str(source))


def measure(
    variants: Sequence[str], ranks: int = 2, blocks: int = 32, against: Path | None = None, rounds: int = 30
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the median CPU seconds and the calls of each phase and of all, by variant and checkout.

    The other checkout is `against`; `ratio` is the median over turns of this one's seconds over that one's.
    """
    checkouts = {"here": HERE} if against is None else {"here": HERE, "against": against}
    with ExitStack() as stack:
        crews = {
            place: stack.enter_context(ranks_of(folder, ranks, variants, blocks)) for place, folder in checkouts.items()
        }
        turns: dict[str, dict[str, list[list[float]]]] = {name: {place: [] for place in crews} for name in variants}
        for turn in range(rounds):
            for name in variants:
                for place in list(crews)[:: -1 if turn % 2 else 1]:
                    steps = [[*step, sum(step)] for each in crews[place].ask("seconds", name) for step in each]
                    turns[name][place].append(_medians(steps))
        found: dict[str, dict[str, dict[str, list[float]]]] = {}
        for name, places in turns.items():
            calls = {place: crews[place].ask("calls", name)[0] for place in crews}
            found[name] = {
                place: {"seconds": _medians(of_turns), "calls": [*calls[place], sum(calls[place])]}
                for place, of_turns in places.items()
            }
            if against is not None:
                pairs = zip(places["here"], places["against"], strict=True)
                ratios = [[a / b for a, b in zip(here, there, strict=True)] for here, there in pairs]
                found[name]["ratio"] = {"seconds": _medians(ratios)}
        return found


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [median(column) for column in zip(*rows, strict=True)]


def show(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Return the figures as a table."""
    phases = "".join(f"{phase:>16}" for phase in (*PHASES, "all"))
    lines = [f"{'':17}{phases}", f"{'':17}" + "  ms CPU   calls" * 4]
    for name, places in found.items():
        for place, row in places.items():
            if place == "ratio":
                cells = [f"{ratio:8.3f}{'':8}" for ratio in row["seconds"]]
            else:
                pairs = zip(row["seconds"], row["calls"], strict=True)
                cells = [f"{1e3 * seconds:8.2f}{calls:8,}" for seconds, calls in pairs]
            lines.append(f"{name:8} {place:8}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)
