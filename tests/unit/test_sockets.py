"""What listens for ranks: on this machine alone, where they are of one machine."""

import ast
import os
import socket
import sys
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from zero3d.distributed.mesh import start_distributed
from zero3d.tools.cli.workers import environment, host_store

SRC = Path(__file__).parents[2] / "src" / "zero3d"
OPEN = ("TCPStore", "create_server", ".listen")


def other_addresses():
    """This machine's addresses but the one that the store is bound to."""
    given = chain.from_iterable(psutil.net_if_addrs().values())
    found = [each.address for each in given if each.family == socket.AF_INET]
    return [each for each in [*found, *(["127.0.0.2"] if sys.platform == "linux" else [])] if each != "127.0.0.1"]


def test_the_launchers_store_answers_on_loopback_and_is_refused_from_any_other_address():
    store = host_store(socket.create_server(("127.0.0.1", 0)))
    TCPStore("127.0.0.1", store.port, is_master=False).set("asked", "answered")
    assert store.get("asked") == b"answered"
    for address in other_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=30)


def test_no_other_code_of_ours_opens_a_store_that_listens():
    opened = [
        f"{path.name}:{ast.unparse(node.func)}"
        for path in sorted(SRC.rglob("*.py"))
        if any(word.removeprefix(".") in path.read_text() for word in OPEN)  # most files need no parsing
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(OPEN)
        and "is_master=False" not in map(ast.unparse, node.keywords)  # a client
    ]
    assert sorted(opened) == [
        "group.py:TCPStore",  # of streams to other jobs, at the address that their user names
        "local.py:made.listen",  # of streamed weights: a socket with a path, which has no address
        "network.py:socket.create_server", "network.py:socket.create_server", "together.py:socket.create_server",
        "workers.py:TCPStore", "workers.py:socket.create_server",
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the interface's name is Linux's")
def test_a_process_alone_has_gloo_listen_on_loopback(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    seen = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)

    class Begun(Exception):
        """The world would begin here; the test's own process keeps what world it has."""

    def begin(*_, **__):
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        raise Begun

    monkeypatch.setattr(dist, "init_process_group", begin)
    with pytest.raises(Begun):
        start_distributed()
    assert seen == ["lo"]
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="the interface's name is Linux's")
def test_workers_of_this_machine_listen_on_loopback_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert [environment(2, 1, tmp_path)[f"{library}_SOCKET_IFNAME"] for library in ("GLOO", "NCCL")] == ["lo", "lo"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert environment(2, 1, tmp_path)["NCCL_SOCKET_IFNAME"] == "ib0"
