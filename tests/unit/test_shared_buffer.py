"""Memory that ranks of a host write into: found by process, file and mark, and by nothing else."""

import os

import pytest
import torch

from zero3d.distributed.shared_buffer import NAME, NOWHERE, SharedBuffer, attach

CPU = torch.device("cpu")


@pytest.fixture
def buffer():
    buffer = SharedBuffer(1000, CPU)
    yield buffer
    buffer.close()


def test_whoever_attaches_writes_into_the_same_bytes_until_long_after_the_file_is_closed(buffer):
    there = attach(buffer.address, 1000)
    buffer.close()
    there.copy_(torch.arange(1000) % 251)
    assert buffer.memory.tolist() == [number % 251 for number in range(1000)]


def test_memory_is_not_found_once_it_is_closed_nor_by_another_mark(buffer):
    process, number, mark = buffer.address
    assert attach((process, number, mark + 1), 1000) is None
    assert attach((process, number + 1000, mark), 1000) is None
    buffer.close()
    assert attach((process, number, mark), 1000) is None
    assert buffer.address is NOWHERE


def test_what_another_process_has_under_the_same_numbers_is_not_opened(tmp_path):
    with (tmp_path / NAME).open("w+b") as file:
        file.truncate(10_000)
        assert attach((os.getpid(), file.fileno(), 0), 1000) is None
    file = os.memfd_create(NAME)  # of a buffer that is too small to be this one
    assert attach((os.getpid(), file, 0), 1000) is None
    os.close(file)
    assert attach(NOWHERE, 1000) is None


def test_a_system_without_memory_files_has_memory_that_nobody_finds(monkeypatch):
    def refuse(name):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    buffer = SharedBuffer(1000, CPU)
    assert buffer.memory.numel() == 1000
    assert buffer.address is NOWHERE
    buffer.close()
