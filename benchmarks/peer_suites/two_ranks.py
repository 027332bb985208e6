"""Runs a peer's tests on two ranks, where stage 3 cuts parameters.

    rank 0   pytest: a   b   c (waits)      both meet before each test; one that hangs, or that one rank alone ends,
    rank 1   pytest: a   b   c (fails)      ends both processes, and two new ones go on with the tests after it

A test passed where it passed on both ranks. `plugins.rank` has what happens inside a rank. Tests come in the order of
their ids' hashes, so that those that a budget leaves time for are drawn, and not chosen.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from verdicts import outcomes_of

RANKS = 2
POLL, GRACE = 0.1, 30.0  # seconds: between two looks at the ranks; for the other rank, after one has failed
START = 240.0  # seconds in which a pair of ranks has collected its tests
FRAMES = 2  # of a rank that hangs, in its line


@dataclass
class Pair:
    """Two ranks that run tests, and what they have written.

    begun  by rank, the tests that it has begun
    ended  by rank, outcome and last lines of those that have ended
    """

    ranks: list[subprocess.Popen[bytes]]
    records: list[Path]
    stacks: list[Path]
    begun: list[list[str]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    ended: list[dict[str, tuple[str, str]]] = field(default_factory=lambda: [{} for _ in range(RANKS)])

    def look(self) -> None:
        """Read the records anew."""
        for rank, path in enumerate(self.records):
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found = [json.loads(line) for line in lines]
            self.begun[rank] = [one["begun"] for one in found if "begun" in one]
            done = {one["ended"] for one in found if "ended" in one}
            every = outcomes_of("".join(line for line, one in zip(lines, found, strict=True) if "outcome" in one))
            self.ended[rank] = {test: every.get(test, ("skipped", "")) for test in done} | {
                test: how
                for test, how in every.items()
                if test not in self.begun[rank]  # files that fail to import
            }

    def stop(self) -> None:
        """End both ranks."""
        for one in self.ranks:
            if one.poll() is None:
                one.kill()
            one.wait()

    def where(self) -> str:
        """Return in which lines the ranks are, innermost first."""
        for one in self.ranks:
            if one.poll() is None:
                one.send_signal(signal.SIGUSR1)
        time.sleep(1)  # they write their stacks
        said = []
        for rank, path in enumerate(self.stacks):
            text = path.read_text() if path.exists() else ""
            main = text.rpartition("Current thread")[2] or text.rpartition("most recent call first")[2]
            lines = [line.strip().removeprefix("File ") for line in main.splitlines() if line.startswith("  File")]
            said.append(f"rank {rank}: {' < '.join(lines[:FRAMES]) or 'ended'}")
        return "; ".join(said)


def in_order(tests: Iterable[str]) -> list[str]:
    """Return tests in the order of their ids' hashes, in which they are drawn."""
    return sorted(tests, key=lambda test: hashlib.sha256(test.encode()).hexdigest())


def run(
    tests: Sequence[str],
    checkout: Path,
    words: Sequence[str],
    environment: Mapping[str, str],
    budget: float,
    seconds: float,
) -> dict[str, tuple[str, str]]:
    """Return what became of each test that there was time for.

    tests    pytest's ids, in order
    words    of pytest's command line
    budget   seconds for all tests; those that are not over then are left out
    seconds  for one test, which has failed then
    """
    found: dict[str, tuple[str, str]] = {}
    until = time.monotonic() + budget
    left = list(tests)
    while left and time.monotonic() < until:
        with TemporaryDirectory(prefix="zero3d-ranks-") as folder:
            pair = _start(left, checkout, words, environment, Path(folder))
            try:
                found |= _watch(pair, left, until, seconds)
            finally:
                pair.stop()
        before, left = len(left), [test for test in left if test not in found]
        if len(left) == before and time.monotonic() < until:
            return found | dict.fromkeys(left, ("absent", "two ranks do not collect it"))
    return found


def _start(
    tests: Sequence[str], checkout: Path, words: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Pair:
    listed = folder / "tests.json"
    listed.write_text(json.dumps(list(tests)))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    pair = Pair([], [folder / f"record-{rank}" for rank in range(RANKS)], [folder / f"stack-{r}" for r in range(RANKS)])
    control = _free_port()
    for rank in range(RANKS):
        pair.records[rank].touch()
        own = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(control), "ACCELERATE_USE_CPU": "true",
            "PEER_CONTROL": str(control), "PEER_TESTS": str(listed), "PEER_SHARED": str(folder / "shared"),
            "PEER_RECORD": str(pair.records[rank]), "PEER_STACK": str(pair.stacks[rank]),
        }  # fmt: skip
        log = (folder / f"log-{rank}").open("wb")
        command = [sys.executable, "-m", "pytest", *files, "-p", "plugins.rank", *words]
        pair.ranks.append(
            subprocess.Popen(command, cwd=checkout, env={**environment, **own}, stdout=log, stderr=subprocess.STDOUT)
        )
        log.close()
    return pair


def _watch(pair: Pair, tests: Sequence[str], until: float, seconds: float) -> dict[str, tuple[str, str]]:
    """Return the tests that both ranks are through with, and the one that ended them."""
    since, through, alone = time.monotonic(), 0, 0.0
    while time.monotonic() < until:
        pair.look()
        over = [test for test in tests if all(test in ended for ended in pair.ended)]
        gone = [one.poll() is not None for one in pair.ranks]
        failed = [test for test in tests if test not in over and any(test in ended for ended in pair.ended)]
        if len(over) > through:
            through, since, alone = len(over), time.monotonic(), 0.0
        if all(gone):
            return _judged(pair, over, failed, "the ranks ended before the test")
        if not alone and (any(gone) or any(_is_bad(ended, failed) for ended in pair.ended)):
            alone = time.monotonic()
        if alone and time.monotonic() - alone > GRACE:
            return _judged(pair, over, failed, f"one rank has ended the test ({pair.where()})")
        if time.monotonic() - since > (seconds if any(pair.begun) else START):
            return _judged(pair, over, failed, f"hangs: over {seconds:.0f} s ({pair.where()})")
        time.sleep(POLL)
    pair.look()
    return _judged(pair, [test for test in tests if all(test in ended for ended in pair.ended)], [], "")


def _is_bad(ended: Mapping[str, tuple[str, str]], tests: Sequence[str]) -> bool:
    return any(ended.get(test, ("",))[0] == "failed" for test in tests)


def _judged(pair: Pair, over: Sequence[str], failed: Sequence[str], why: str) -> dict[str, tuple[str, str]]:
    """Return the outcomes of tests that are over, and of the one that ended the ranks.

    failed  tests that one rank alone has ended
    why     what became of the ranks; "" where there was no more time
    """
    found = {test: _both([ended[test] for ended in pair.ended]) for test in over}
    begun = [test for tests in pair.begun for test in tests if test not in found]
    for test in list(dict.fromkeys([*failed, *begun]))[:1] if why else []:
        said = _both([ended.get(test, ("passed", "")) for ended in pair.ended])[1]
        found[test] = "failed", "\n".join(filter(None, [why, said]))
    return found


def _both(outcomes: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return one outcome of what a test's ranks say."""
    if any(how == "failed" for how, _ in outcomes):
        said = dict.fromkeys(why for how, why in outcomes if how == "failed")
        return "failed", "\n".join(said)
    skipped = [why for how, why in outcomes if how != "passed"]
    return ("skipped", skipped[0]) if skipped else ("passed", "")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment_of(environment: Mapping[str, str], stage: int | None) -> dict[str, str]:
    """Return an environment for ranks: one thread each, and stage 3 unless another is asked for."""
    return {
        **environment,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PEER_STAGE": str(3 if stage is None else stage),
    }
