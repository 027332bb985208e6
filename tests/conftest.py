"""One queue of files for all workers, two fork servers for all of them, single-threaded kernels.

Files are handed out whole, the longest first (`durations.py`), so that workers end together; pytest-xdist does that.
"""

import gc
import os
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cpus

cpus.begin(os.environ)  # before torch asks what it may use
import torch  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup make test &` begins with both ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if hasattr(os, "SCHED_BATCH"):  # Linux. For this process and all that it starts, fork servers and ranks among them
    # A woken thread does not preempt the one that woke it. By default gloo's threads, woken by messages, spin on the lock
    # of a connection whose holder they have preempted: a fifth of all CPU time (docs/decisions/0032).
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
gc.disable()  # until all is imported
torch.set_num_threads(1)  # summation order depends on the thread count

FOLDER = pytest.StashKey[str]()  # of the fork servers' sockets


def pytest_addoption(parser):
    parser.addoption("--part", metavar="COMMIT", help="the part of the tests that this hash chooses (tests/part.py)")
    parser.addoption("--room", metavar="PACKAGE", help="the tests of a package of zero3d (tests/rooms.py)")
    parser.addoption("--costs", metavar="FILE", help="write what each test took (tests/costs.py)")


def pytest_configure(config):
    if refusal := cpus.refusal(cpu := os.environ.get(cpus.VARIABLE, "")):
        raise pytest.UsageError(refusal)
    if (commit := config.getoption("part")) is not None:
        if not commit:
            raise pytest.UsageError("--part= names no commit: outside of git pass one, make test-part PART=NAME")
        config.option.markexpr = "long or not long" if cpu else "long"
    from rooms import packages

    if (package := config.getoption("room")) and package not in (known := packages()):
        raise pytest.UsageError(f"ROOM={package}: zero3d has no package of this name, but {', '.join(known)}")
    if (path := config.getoption("costs")) is not None:
        from costs import Recorder

        config.pluginmanager.register(Recorder(path))
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist are given the folder by the process that has them
        from pool import ForkServers

        folder = tempfile.TemporaryDirectory()
        os.environ["ZERO3D_CACHE"] = f"{folder.name}/cache"  # of all processes of this run, empty as it begins
        servers = ForkServers(folder.name)
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(servers.close)
        config.stash[FOLDER] = folder.name
    else:
        config.stash[FOLDER] = config.workerinput["fork_servers"]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node):
    node.workerinput["fork_servers"] = node.config.stash[FOLDER]


def pytest_sessionstart(session):
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        reporter.write_line(cpus.header(os.environ.get(cpus.VARIABLE, "")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leave the cases of the part or room that is asked for; put the files that take longest first."""
    from durations import seconds_of
    from part import ROOMS, part_of
    from rooms import files_of

    everything = list(items)
    took = {item.nodeid: seconds_of(item.nodeid, "long" in item.keywords) for item in items}
    if (commit := config.getoption("part")) is not None:
        if os.environ.get(cpus.VARIABLE):  # as on another CPU: of the rooms that are about what a CPU computes
            short = dict.fromkeys((item.path for item in items), 0.0)
            for item in items:
                short[item.path] += 0.0 if "long" in item.keywords else took[item.nodeid]
            rooms = {path for package in ROOMS for path in files_of(short, package)}
            items[:] = [item for item in items if item.path in rooms]
        chosen = part_of({item.nodeid: took[item.nodeid] for item in items}, commit)
        items[:] = [item for item in items if item.nodeid in chosen]
    seconds = defaultdict(float)
    for item in items:
        seconds[item.path] += took[item.nodeid]
    if package := config.getoption("room"):
        seconds = {path: seconds[path] for path in files_of(seconds, package)}
        items[:] = [item for item in items if item.path in seconds]
    items.sort(key=lambda item: (-seconds[item.path], item.path))  # cases of a file stay in their order
    kept = set(items)
    config.hook.pytest_deselected(items=[item for item in everything if item not in kept])


def pytest_collection_finish():
    from fork_server import collect_rarely

    collect_rarely()


@pytest.fixture(scope="session")
def pool(pytestconfig):
    from pool import RankPool

    with RankPool(pytestconfig.stash[FOLDER]) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks(pool):
    """`ranks(world, case, *args)` runs case(*args) on that many gloo ranks and returns their results."""
    return pool.run


@pytest.fixture(scope="session")
def alone(pool):
    """`alone(case, *args)` runs case(*args) in a new process and returns its result; a crash fails the test."""
    return pool.alone


@pytest.fixture
def zero3d_in_fork(pool, tmp_path_factory):
    """`zero3d_in_fork(folder, *words, **environment)` runs `zero3d WORDS` there, without its start (commands.py)."""
    from commands import Done, run_in_fork

    def run(folder, *words, **environment):
        output = tmp_path_factory.mktemp("command")
        variables = {**os.environ, **environment}
        code = pool.alone(run_in_fork, [str(word) for word in words], folder, variables, output)
        return Done(code, *((output / name).read_text(errors="replace") for name in ("stdout", "stderr")))

    return run


@pytest.fixture
def benchmark_in_fork(pool, tmp_path):
    """`benchmark_in_fork(script, *words)` runs a script of benchmarks/ and returns its JSON (commands.py)."""
    from commands import run_benchmark

    return lambda script, *words: pool.alone(run_benchmark, script, words, tmp_path / "out.json")


@pytest.fixture
def poison():
    """Released parameters are filled with NaN: an early release shows as a NaN, not by chance."""
    from blueprints import poisoned

    with poisoned():
        yield
