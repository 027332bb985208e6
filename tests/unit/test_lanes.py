"""What lanes enqueue on an accelerator's streams: nothing before compute is there, and compute never too early."""

import pytest
import torch

from zero3d.zero.streams import Lane


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self._log.append(f"on {self.name}")

    def __exit__(self, *_):
        self._log.append(f"off {self.name}")


@pytest.fixture
def streams(monkeypatch):
    """(a lane whose streams are noted, what they did)"""
    log = []
    monkeypatch.setattr(torch, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: Stream("compute", log))
    return Lane("gather", torch.device("meta")), log


def test_what_is_issued_waits_for_compute_and_compute_for_what_is_joined(streams):
    lane, log = streams
    with lane.issue("block"):
        log.append("gather")
    lane.join("block")
    assert log == ["side waits for compute", "on side", "gather", "off side", "compute waits for side"]


def test_on_the_cpu_there_is_no_stream(monkeypatch):
    monkeypatch.setattr(torch, "Stream", None)
    lane, done = Lane("gather", torch.device("cpu")), []
    with lane.issue("block"):
        done.append("gather")
    lane.join("block")
    assert done == ["gather"]
