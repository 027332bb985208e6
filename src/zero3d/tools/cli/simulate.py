"""`zero3d simulate CONFIG [KEY=VALUE ...]`: a step of the real engine on ranks that are not there."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zero3d.config import Config, split_words
from zero3d.errors import ConfigError
from zero3d.spec.text import binary, columns, count, size
from zero3d.tools.cli.plan_options import patches_of, remembered_of
from zero3d.tools.cli.planned_images import images_of
from zero3d.tools.cli.preflight import check_tp, check_transformers
from zero3d.tools.cli.progress import STOPPED, ProgressLine, say, time_left
from zero3d.tools.cli.train import check_ranks, config_source, quiet_libraries
from zero3d.tools.cli.worker import quiet_environment
from zero3d.tools.cli.workers import ranks_here
from zero3d.tools.page import plan_text
from zero3d.tools.plan.emit import plan_of
from zero3d.tools.plan.hardware import base_of, cluster, read_file
from zero3d.tools.plan.memory import COMMUNICATOR, CONTEXT, RESERVED, communicators
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.spec import ClusterSpec
from zero3d.train.setup.left_out import load_filled

if TYPE_CHECKING:
    from zero3d.tools.sim.result import Instant, RankResult, Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG KEY=VALUE", help="a YAML file (default: the demo), overrides"
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: plan.gpus, else as many as zero3d train would start here)"
    )
    parser.add_argument(
        "--nodes", type=int, help="machines, with equally many ranks on each (default: plan.nodes, else as cards come)"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="compare the peak with this card's memory: h100 (default: plan.gpu, else none)"
    )
    parser.add_argument(
        "--patches", metavar="N", help="patches of a sequence's images (default: as zero3d plan explain)"
    )
    parser.add_argument("--rank", type=int, help="simulate only this rank (default: one of every class)")
    parser.add_argument("--backend", help="whose collectives: nccl (default), or gloo as on CPU ranks (--gpu cpu)")
    parser.add_argument(
        "--every-micro-batch",
        action="store_true",
        help="also run micro-batches that repeat others: slower, the same bytes",
    )
    parser.add_argument("--trace", metavar="FILE", help="write memory and actions over time for Perfetto")
    parser.add_argument("--html", metavar="FILE", help="write the result as an HTML page with charts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, then print."""
    quiet_environment()
    file, overrides = split_words(arguments.words)
    config = load_filled(config_source(file, overrides)[1], overrides).config
    patches = patches_of(arguments)
    check_ranks(arguments.ranks)
    check_transformers(config.model)
    check_tp(config)
    quiet_libraries()
    from zero3d.tools.page.simulation_page import simulation_page
    from zero3d.tools.sim.chrome import chrome_trace
    from zero3d.tools.sim.result import to_json
    from zero3d.tools.sim.simulate import Interrupted, simulate

    config = replace(config, plan=remembered_of(config.plan, overrides))
    if patches is None and (pictures := images_of(config)[0]) is not None:
        patches = pictures.patches
    world = arguments.ranks or config.plan.gpus or ranks_here(config.mesh)
    cards = cards_of(config, world, arguments.gpu, arguments.nodes)
    nodes = arguments.nodes or (1 if cards is None else cards.hosts)
    backend = arguments.backend or ("gloo" if cards is not None and cards.gpu.name == CPU else "nccl")
    say(f"simulating a step of {world} ranks: one of each class, each in a process of its own")
    given = arguments.rank, backend, arguments.every_micro_batch
    code = 0
    with ProgressLine() as line:
        try:
            simulation = simulate(config, world, *given, partial(show_done, line, [], world), nodes, patches)
        except Interrupted as interrupted:
            simulation, code = interrupted.simulation, STOPPED
    if arguments.trace is not None:
        write("--trace", arguments.trace, json.dumps(chrome_trace(simulation)))
    if arguments.html is not None:
        write("--html", arguments.html, simulation_page(simulation))
    room = None if cards is None else Room.of(simulation, config, cards)
    if arguments.json:
        print(json.dumps(to_json(simulation) | ({} if room is None else {"card": room._asdict()})))
    else:
        print("\n".join(as_text(simulation, room)))
    return code


def cards_of(config: Config, world: int, gpu: str | None, nodes: int | None) -> ClusterSpec | None:
    """Return the cards that a simulation is of: of --gpu, else of the file's section `plan`; None where nobody says."""
    planned = config.plan
    file = None if gpu else planned.cluster
    name = gpu or planned.gpu or (base_of(read_file(file)) if file else None)
    if name is None:
        return None
    return cluster(name, world, nodes or (planned.nodes if world == planned.gpus else None), file)


class Room(NamedTuple):
    """Bytes of a card, and those that a device monitor would show of the fullest rank on it.

    alive     in the simulation; all others are beside these
    reserved  by the allocator; context: of CUDA and libraries; communicators: of NCCL
    """

    gpu: str
    memory: float
    alive: int
    reserved: float
    context: float
    communicators: float

    @classmethod
    def of(cls, simulation: Simulation, config: Config, cards: ClusterSpec) -> Room:
        """Compare the fullest of the simulated ranks with its card."""
        alive = max(rank.peak.nbytes for rank in simulation.ranks)
        usual = COMMUNICATOR if cards.communicator is None else cards.communicator
        on_device = cards.gpu.name != CPU
        held = communicators(plan_of(config, cards.gpus), cards.on_host, usual) if on_device else 0.0
        context = CONTEXT if on_device else 0.0
        return cls(cards.gpu.name, cards.gpu.memory, alive, (RESERVED - 1) * alive, context, held)

    @property
    def shown(self) -> float:
        """Return the bytes that a device monitor would show."""
        return self.alive + self.reserved + self.context + self.communicators

    def __str__(self) -> str:
        left = self.memory - self.shown
        verdict = f"{binary(left)} left" if left >= 0 else f"{binary(-left)} too much"
        return (
            f"On {self.gpu}: {binary(self.shown)} of {binary(self.memory)}, {verdict}: {binary(self.alive)} alive, "
            f"{binary(self.reserved)} that the allocator holds beside, {binary(self.context)} of the context, "
            f"{binary(self.communicators)} of communicators"
        )


def show_done(line: ProgressLine, said: list[int], world: int, done: Sequence[RankResult], many: int) -> None:
    """Write who is done: on a terminal in one line, elsewhere each rank in one of its own.

    said  ranks of which that is written
    """
    if line.on_terminal:
        fullest = max((rank.peak.nbytes for rank in done), default=0)
        peak = f"; the fullest so far: {size(fullest)}" if done else ""
        line.show(f"{len(done)} of {many} ranks simulated, {time_left(len(done), many, line.seconds)}{peak}")
        return
    for rank in done:
        if rank.rank not in said:
            said.append(rank.rank)
            print(f"rank {rank.rank} of {world}: {rank.seconds:.1f} s", file=sys.stderr, flush=True)


def write(option: str, file: str, text: str) -> None:
    """Write a file that an option names. Raises ConfigError."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: cannot be written ({error.strerror}).") from error


def as_text(simulation: Simulation, room: Room | None = None) -> Iterator[str]:
    """Yield tables, in lines as wide as those of a plan. room: of the card."""
    return plan_text.folded(_lines(simulation, room))


def _lines(simulation: Simulation, room: Room | None) -> Iterator[str]:
    """Yield tables: ranks, states, the peaks, traffic, FLOPs, the pipeline."""
    from zero3d.tools.sim.gantt import gantt

    yield (
        f"{simulation.model}, stage {simulation.stage}, {simulation.precision}: {simulation.degrees} = "
        f"{simulation.degrees.world} ranks with {simulation.backend}, none of which is started"
    )
    yield (
        f"a step: batch {simulation.batch} = micro_batch {simulation.micro_batch} x accumulate "
        f"{simulation.accumulate} x dp {simulation.degrees.dp}, sequences of {simulation.length:,} tokens"
    )
    yield from simulation.notes
    yield from ("", "1. What each class of ranks holds (states: the arena's account, which equals the formula)")
    yield from columns([*_ranks(simulation)], "<>>>>>>>")
    if any(rank.away for rank in simulation.ranks):
        yield "   off the device: records in whole blocks, on a disk in two slots"
        yield from columns([*_away(simulation)], "<<>>>>>")
    for rank in simulation.ranks:
        yield from ("", *_peak(rank))
    if room is not None:
        yield f"   {room}"
    yield from ("", "3. What a rank sends in a step, and receives")
    traffic = [*_traffic(simulation)]
    yield from columns(traffic, "<<<>>>") if len(traffic) > 1 else ["   nothing"]
    yield from ("", "4. Multiplications and additions in matrix products and attention, per rank and step")
    yield from columns([*_flops(simulation)], "<>>>>")
    if (chart := gantt(simulation)) is not None:
        yield from (
            "",
            f"5. The pipeline: {simulation.schedule}, idle {float(chart.bubble):.1%} of the work (in {chart.unit})",
        )


def _ranks(simulation: Simulation) -> Iterator[tuple[str, ...]]:
    yield "rank (stands for)", "elements", "parameters", "gradients", "optimizer", "padding", "by formula", "peak alive"
    for rank in simulation.ranks:
        bytes_of = {state.category: state.held for state in rank.states}
        equal = "equal" if all(state.held == state.formula for state in rank.states) else "DIFFERS"
        name = f"{rank.rank}: pp {rank.pp} dp {rank.dp} ({rank.stands_for})"
        yield name, count(rank.elements), *map(size, bytes_of.values()), equal, size(rank.peak.nbytes)


def _away(simulation: Simulation) -> Iterator[tuple[str, ...]]:
    categories = ("parameters", "gradients", "optimizer", "padding")
    yield "rank", "place", *categories, "by formula"
    for rank in simulation.ranks:
        for place in dict.fromkeys(state.place for state in rank.away):
            here = {state.category: state for state in rank.away if state.place == place}
            equal = "equal" if all(state.held == state.formula for state in here.values()) else "DIFFERS"
            cells = (size(here[name].held) if name in here else "0" for name in categories)
            yield str(rank.rank), place, *cells, equal


def _peak(rank: RankResult) -> Iterator[str]:
    peak = rank.peak
    yield f"2. The peak of rank {rank.rank}: {peak.nbytes:,} bytes, {_where(peak.at)}"
    parts = sorted(((n, category) for category, n in peak.categories.items() if n), reverse=True)
    yield "   " + ", ".join(f"{category} {size(nbytes)}" for nbytes, category in parts)
    rows = [("largest tensors", "", "", "made")]
    rows += [
        (size(tensor.nbytes), tensor.category, f"{tensor.dtype} {list(tensor.shape)}", _where(tensor.made))
        for tensor in peak.largest
    ]
    yield from columns(rows, "<<<<")


def _where(at: Instant) -> str:
    micro_batch = f" of micro-batch {at.micro_batch}" if at.micro_batch >= 0 else ""
    return (
        f"{at.phase}{micro_batch}{' in ' if at.phase else 'for '}{at.module}"
        if at.module
        else f"{at.phase}{micro_batch}"
    )


def _traffic(simulation: Simulation) -> Iterator[tuple[str, ...]]:
    yield "rank", "axis", "operation", "calls", "elements", "bytes"
    for rank in simulation.ranks:
        rows: dict[tuple[str, str], list[int]] = {}
        for entry in rank.traffic:
            row = rows.setdefault((entry.axis, entry.op), [0, 0, 0])
            row[:] = row[0] + entry.calls, row[1] + entry.elements, row[2] + entry.nbytes
        for (axis, op), (calls, elements, nbytes) in sorted(rows.items()):
            yield str(rank.rank), axis, op, f"{calls:,}", count(elements), size(nbytes)


def _flops(simulation: Simulation) -> Iterator[tuple[str, ...]]:
    yield "rank", "forward", "backward", "recomputed", "together"
    for rank in simulation.ranks:
        parts = [rank.flops(phase) for phase in ("forward", "backward", "recomputed")]
        yield str(rank.rank), *(f"{flops:.4g}" for flops in (*parts, sum(parts)))
