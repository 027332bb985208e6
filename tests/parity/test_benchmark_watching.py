"""benchmarks/watching.py runs both ways in turns, compares their medians, and its scraper is one that asks."""

import socket
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import watching


def test_rounds_are_compared_one_by_one():
    times = {"on": [[1.0, 2.0, 3.0], [4.0], [6.0]], "off": [[2.0], [2.0], [2.0]]}
    found = watching.compared(times, {"on": [[1.0], [3.0], [9.0]], "off": [[1.0], [2.0], [1.0]]})
    assert found["cpu"] == 1.5
    assert (found["least"], found["ratio"], found["largest"]) == (1.0, 2.0, 3.0)


def test_the_scraper_asks_for_the_metrics():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        with watching.scraper(listening.getsockname()[1]):
            asking, _ = listening.accept()
            with asking:
                asking.settimeout(60)
                assert asking.recv(4) == b"GET "


@pytest.mark.long
def test_both_ways_are_timed_in_every_round(benchmark_in_fork):
    result = benchmark_in_fork("watching", "--rounds", "1", "--steps", "8", "--ranks", "1")
    assert {way: [len(run) for run in runs] for way, runs in result["times"].items()} == {"on": [2], "off": [2]}
    assert 0 < result["least"] == result["ratio"]
