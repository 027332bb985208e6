"""A rank that is slower than its peers: what two ranks tell each other, in which part it is slow, what a run says."""

import json
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from heard import Heard
from training import save_model, save_rows, start, tree

from zero3d.train.stragglers import KINDS, Slow

SLOW = 1  # the rank
WHERE = {  # what is slow, for each kind of a rank's own seconds
    "compute": "zero3d.engine.execution.Direct.forward",
    "data": "zero3d.data.batches.BatchStream.__next__",
    "save": "zero3d.checkpoint.save.write_tensors",
    "host": "zero3d.train.progress.Progress.show",
}
STEPS = 24


def made(folder, **sections):
    if not (folder / "model").exists():
        save_model(folder / "model")
        save_rows(folder / "rows.npy")
    settings = {
        "zero": {"stage": 2},
        "train": {"steps": STEPS, "batch": 4, "accumulate": 2},
        "checkpoint": {"every": 3, "export": False},
    }
    return tree(folder, **settings | sections)


def slowed(name, passes, base, more):
    """A function that takes `base` seconds on all ranks, and `more` on the slow one."""
    from pkgutil import resolve_name

    original = resolve_name(name)

    def slow(*args, **options):
        import torch.distributed as dist

        passes(base + more * (dist.get_rank() == SLOW))
        return original(*args, **options)

    return mock.patch(name, slow)


def trained(tree, kind, of_a_clock, base, more):
    """One rank's part of a run with a slow rank; the lines that it says. of_a_clock: only our clock goes on."""
    from contextlib import ExitStack

    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    lines, now = [], SimpleNamespace(seconds=0.0)

    class Noted(Progress):
        def say(self, line):
            lines.append(line)

    def passes(seconds):
        now.seconds += seconds
        of_a_clock or time.sleep(seconds)

    with ExitStack() as stack:
        if of_a_clock:

            def read():
                return now.seconds

            clock = SimpleNamespace(perf_counter=read, thread_time=read, monotonic=read)
            for module in (
                "zero.clocks",
                "watchdog.heartbeat",
                "train.rank_watch",
                "checkpoint.save",
                "checkpoint.background",
            ):
                stack.enter_context(mock.patch(f"zero3d.{module}.time", clock))
        if kind != "compute":
            stack.enter_context(slowed(WHERE["compute"], passes, base, 0.0))
        stack.enter_context(slowed(WHERE[kind], passes, base if kind == "compute" else 0.0, more))
        result = run(load(tree), start("test", planned=False), Noted(Console(quiet=True)))
    return lines, result


def said(tree, kind, of_a_clock=True, base=1.0, more=1.0):
    lines, _ = trained(tree, kind, of_a_clock, base, more)
    return [line for line in lines if "slowest rank" in line]


def records_of(tree):
    return [json.loads(line) for line in (Path(tree["output"]) / "metrics.jsonl").read_text().splitlines()]


def check(tree, kind, lines, host=None):
    """The slow rank and its part are in the lines of rank 0 alone, in records, in report.json."""
    (line, *_), others = lines
    assert others == []
    where = re.escape(host or socket.gethostname())
    what = "saves" if kind == "save" else "steps"
    assert re.fullmatch(
        rf"step \d+: slowest rank {SLOW} \({where}\): \+\d+ % over the median in \d+ of \d+ {what}: {kind}( \(its thread .*\))?",
        line,
    )
    told = [record for record in records_of(tree) if "slowest_rank" in record]
    found = Slow.of_fields(told[-1])
    assert (found.rank, found.part) == (SLOW, kind)
    report = json.loads((Path(tree["output"]) / "report.json").read_text())
    assert report["hosts"] == [socket.gethostname()] * 2
    assert f"slowest rank {SLOW}" in report["slowest"]
    assert f" {what}: {kind}" in report["slowest"]
    return found


@pytest.mark.parametrize(
    "kind", ["data", "save", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("compute", "host"))]
)
def test_a_rank_that_is_slow_in_a_part_is_named_with_it(ranks, tmp_path, kind):
    heard = Heard(tmp_path)
    facts = ("EVENT", "SLOWEST_RANK", "SLOWEST_PART", "SLOWEST_HOSTNAME")
    tree = made(tmp_path, log={"on": heard.on("straggler", facts=facts)})
    found = check(tree, kind, ranks(2, said, tree, kind))
    assert heard.lines(1) == [f"straggler {SLOW} {kind} {socket.gethostname()}"]
    heard.close()
    per_step = {"save": 1 / 3, "compute": 2.0}.get(kind, 1.0)  # saves are of every third step; two micro-batches
    assert found.seconds[kind] == pytest.approx(per_step, rel=0.2)
    if kind != "save":
        assert found.over == pytest.approx(per_step / 2)  # of the two seconds that a step computes everywhere
        assert (found.times, found.of) == (21, 21)  # not the first, the one under way, the one before it


@pytest.mark.long
def test_ranks_that_are_alike_are_not_told_of(ranks, tmp_path):
    tree = made(tmp_path)
    assert ranks(2, said, tree, "host", True, 1.0, 0.02) == [[], []]  # 1 % of a step
    assert not [record for record in records_of(tree) if "slowest_rank" in record]
    assert json.loads((Path(tree["output"]) / "report.json").read_text())["slowest"] is None


@pytest.mark.long
@pytest.mark.parametrize(("kind", "stage"), [*zip(KINDS, (0, 3, 0, 3), strict=True)])
def test_real_ranks_with_a_sleep_of_half_a_step_in_a_part(ranks, tmp_path, kind, stage):
    tree = made(
        tmp_path, zero={"stage": stage}, train={"steps": 60, "batch": 4}, checkpoint={"every": 1, "export": False}
    )
    check(tree, kind, ranks(2, said, tree, kind, False, 0.08, 0.04))
