"""Shared fixtures: one pool of ranks for the whole session, single-threaded kernels."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup make test &` begins with both ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
torch.set_num_threads(1)  # summation order depends on the thread count


def pytest_addoption(parser):
    parser.addoption(
        "--part", metavar="COMMIT", help="the part of the long tests that this hash chooses (tests/part.py)"
    )


def pytest_configure(config):
    if (commit := config.getoption("part")) is not None:
        if not commit:
            raise pytest.UsageError("--part= names no commit: outside of git pass one, make test-part PART=NAME")
        config.option.markexpr = "long"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    from part import part_of

    if (commit := config.getoption("part")) is not None:
        chosen = part_of([item.nodeid for item in items], commit)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


@pytest.fixture(scope="session")
def pool():
    from pool import RankPool

    with RankPool() as pool:
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
def poison(monkeypatch):
    """Released parameters are filled with NaN: an early release shows as a NaN, not by chance."""
    import zero3d.engine.options

    monkeypatch.setattr(zero3d.engine.options, "Policy", partial(zero3d.engine.options.Policy, poison=True))
