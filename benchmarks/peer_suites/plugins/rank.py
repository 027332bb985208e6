"""One of the ranks that run the same tests: they meet before each, with a new port and folders that they share.

PEER_TESTS    a JSON list of test ids, in order; others are not run
PEER_CONTROL  the port of the store over which ranks meet
PEER_SHARED   a folder for the temporary folders of tests, which are the same on all ranks
PEER_STACK    where a rank writes its stack when it is sent SIGUSR1
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHARED = Path(os.environ["PEER_SHARED"])
BETWEEN = ("tempfile.py", "contextlib.py", "rank.py")  # files between a test and mkdtemp
ACCELERATE = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
THEIRS = ("testing_utils.py", "test_utils/testing.py", "trainer_test_utils.py")
_numbers, _counts = itertools.count(), Counter()
_mkdtemp, _rmtree, _uuid4 = tempfile.mkdtemp, shutil.rmtree, uuid.uuid4
_number = 0
_store: list[Any] = []


def pytest_configure(config: pytest.Config) -> None:
    """Take SIGUSR1, and share folders."""
    stack = os.open(os.environ["PEER_STACK"], os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    SHARED.mkdir(exist_ok=True)
    tempfile.mkdtemp, shutil.rmtree, uuid.uuid4 = mkdtemp, rmtree, uuid4


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that are asked for, in their order."""
    asked = {test: place for place, test in enumerate(json.loads(Path(os.environ["PEER_TESTS"]).read_text()))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in asked])
    items[:] = sorted((item for item in items if item.nodeid in asked), key=lambda item: asked[item.nodeid])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Meet the other ranks; rank 0 says which port is free."""
    global _number
    _number = next(_numbers)
    _counts.clear()
    os.environ["MASTER_PORT"] = _meet(_number)
    os.environ.update(ACCELERATE)  # transformers' tests remove them, and without them a CPU's Trainer is of one rank
    _write({"begun": item.nodeid})
    owner = getattr(item, "cls", None)
    if owner is not None and hasattr(owner, "clear_on_setup"):  # Accelerate's folder of a class
        owner.tmpdir = mkdtemp_of(f"{owner.__qualname__}.tmpdir")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """End the group with the test."""
    result = yield
    _write({"ended": item.nodeid})
    _forget()
    return result


@pytest.fixture
def tmp_path() -> Path:
    """Return a folder that all ranks have."""
    return Path(mkdtemp_of("tmp_path"))


def mkdtemp(suffix: str | None = None, prefix: str | None = None, dir: Any = None) -> str:
    """Return a folder that all ranks have where a test asks for it, and one of this rank's otherwise."""
    caller: Any = sys._getframe(1)
    while caller is not None and caller.f_code.co_filename.endswith(BETWEEN):
        caller = caller.f_back
    file = caller.f_code.co_filename if caller is not None else ""
    if not (Path(file).is_relative_to(Path.cwd()) or file.endswith(THEIRS)):
        return _mkdtemp(suffix, prefix, dir)
    return mkdtemp_of(f"{Path(file).name}.{caller.f_code.co_name}", suffix or "")


def mkdtemp_of(name: str, suffix: str = "") -> str:
    """Return the next folder of a name in this test."""
    _counts[name] += 1
    folder = SHARED / f"{_number}-{name.replace('<', '').replace('>', '')}-{_counts[name]}{suffix}"
    folder.mkdir(exist_ok=True)
    return str(folder)


def uuid4() -> uuid.UUID:
    """Return what is the same on all ranks where a test asks for it, which names a folder so."""
    if not Path(sys._getframe(1).f_code.co_filename).is_relative_to(Path.cwd()):
        return _uuid4()
    _counts["uuid4"] += 1
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{SHARED}/{_number}/{_counts['uuid4']}")


def rmtree(path: Any, ignore_errors: bool = False, *others: Any, **more: Any) -> None:
    """Remove a folder: one that ranks share is left, and what is in it may be gone already."""
    where = Path(str(path))
    if where.parent == SHARED:
        return
    if where.is_relative_to(SHARED):
        _rmtree(path, ignore_errors=True)
    else:
        _rmtree(path, ignore_errors, *others, **more)


def _meet(number: int) -> str:
    if not _store:
        port = int(os.environ["PEER_CONTROL"])
        _store.append(dist.TCPStore("127.0.0.1", port, RANKS, RANK == 0, timedelta(minutes=10)))
    [store] = _store
    if RANK == 0:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            store.set(f"port-{number}", str(one.getsockname()[1]))
    store.set(f"here-{number}-{RANK}", "")
    store.wait([f"here-{number}-{rank}" for rank in range(RANKS)])
    return str(store.get(f"port-{number}").decode())


def _forget() -> None:
    """Leave no group and no state of Accelerate's to the next test."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()


def _write(line: dict[str, str]) -> None:
    with Path(os.environ["PEER_RECORD"]).open("a") as file:
        file.write(json.dumps(line) + "\n")
