"""Updates that are due where a rank leaves: its peers get their weights. And what ranks do with states between steps."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from buckets import buckets_of
from models import batch, bits
from tiers import PLACES, RESIDENT, Case, engine_of, is_possible, step

CASE = Case(2, 1)


def due(engine):
    return [unit.name for unit in engine.optimizer.updates._queue]


def dropped(folder):
    """Engines that are dropped with updates due, by the garbage collector on one rank, and one that is not."""
    with buckets_of(1024):
        for number, place in enumerate(("host", "disk", "host, device updates")):
            engine = engine_of(CASE, {**PLACES[place], "directory": folder})
            step(engine, CASE, 0)
            assert due(engine)
            if dist.get_rank() == number % 2:
                engine.user = engine
                del engine
                gc.collect()
            else:
                del engine
        engine = engine_of(CASE, PLACES["host"])
        for number in range(2):
            step(engine, CASE, number)
        return bits(engine.module.parameters())


@pytest.mark.long
def test_a_dropped_engine_makes_its_updates_for_its_peers(ranks, tmp_path):
    assert len(set(ranks(2, dropped, str(tmp_path)))) == 1


LAST = """
import sys
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist, zero3d
from ranks.test_updates_due import CASE, PLACES, bits, due, engine_of, step
torch.set_num_threads(1)
zero3d.Mesh()
engine = engine_of(CASE, {{**PLACES[{place!r}], "directory": {folder!r}}})
step(engine, CASE, 0)
assert due(engine)
if dist.get_rank():
    with open({out!r}, "w") as out:
        out.write(bits(engine.module.parameters()))
"""


@pytest.mark.long
@pytest.mark.parametrize("place", ["host", "disk", "host, device updates"])
def test_a_rank_that_ends_with_updates_due_leaves_its_peers_their_weights(ranks, tmp_path, place):
    script, out = tmp_path / "last.py", tmp_path / "out"
    tests = str(Path(__file__).parents[1])
    script.write_text(LAST.format(tests=tests, out=str(out), place=place, folder=str(tmp_path / "tier")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert out.read_text() == ranks(2, weights_after_one_step)[1]


def weights_after_one_step():
    engine = engine_of(CASE, {})
    step(engine, CASE, 0)
    return bits(engine.module.parameters())


# --- between steps --------------------------------------------------------------------------------


def scaled(engine):
    with engine.full_params(), torch.no_grad():
        for p in engine.module.parameters():
            p.view(-1)[::3].mul_(1.5)
    return engine.fingerprint()


def between(case, places, folder):
    """At each place: parameters written twice, a checkpoint loaded twice, at once and after a step, and steps from there.

    The checkpoint is that of the place before.
    """
    found = {}
    for number, place in enumerate(places):
        with buckets_of(1024):
            engine = engine_of(case, {**PLACES[place], "directory": f"{folder}/tier"})
            record = found[place] = []
            for n in range(2):
                step(engine, case, n)
            record += [scaled(engine), scaled(engine)]
            step(engine, case, 2)
            saved = engine.save(f"{folder}/{number}")
            record.append(engine.fingerprint())
            for n in (None, 3):
                if n is not None:
                    step(engine, case, n)
                engine.load(f"{folder}/{max(0, number - 1)}")
                engine.load(saved)
                record.append(engine.fingerprint())
            record.append(scaled(engine))
            for n in (3, 5):
                step(engine, case, n)
            record += [engine.fingerprint(), float(engine.evaluate([{"ids": batch(0), "factor": torch.tensor(1.0)}]))]
            del engine
    return found


def check_between(ranks, folder, case, places):
    for found in ranks(case.dp, between, case, [RESIDENT, *places], str(folder)):
        for place, record in found.items():
            assert record == found[RESIDENT], (case, place)
        assert len(set(found[RESIDENT])) > 3  # fp16 skips steps


@pytest.mark.parametrize(("case", "places"), [
    (Case(2, 3, master="split", frozen=True), ["all on disk"]),
    pytest.param(Case(2, 3, master="split", frozen=True), ["all on host"], marks=pytest.mark.long),
    pytest.param(Case(2, 2), ["part on host", "disk"], marks=pytest.mark.long),
])  # fmt: skip
def test_states_are_written_and_loaded_between_steps(ranks, tmp_path, case, places):
    check_between(ranks, tmp_path, case, places)


CASES = [Case(2, 0, master="split"), Case(1, 1), Case(2, 3, precision="fp32", optimizer="momentum"),
         Case(2, 3, precision="fp16", optimizer="Adagrad", frozen=True)]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_states_are_written_and_loaded_between_steps_at_every_place(ranks, tmp_path, case):
    places = [place for place in PLACES if place != RESIDENT and is_possible(case, place)]
    check_between(ranks, tmp_path, case, places)


@pytest.mark.long
def test_states_of_four_ranks_are_written_and_loaded_between_steps(ranks, tmp_path):
    places = ["all on disk", "host, device updates", "part of states on host, weights on disk", "gradients on host"]
    check_between(ranks, tmp_path, Case(4, 3), places)
