"""Ranks of a restarted attempt find each other in a store that the dead attempt has written to."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch._C._distributed_c10d import HashStore
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from training import field, metrics, save_model, save_rows, train, tree

from zero3d.distributed import rendezvous
from zero3d.distributed.mesh import start_distributed
from zero3d.errors import Zero3dError

HERE = Path(__file__).parents[1]


def attempts(port, counts):
    """Join once per attempt through the agent's store at `port`, and leave; sums, and whether the dead left a word.

    counts  restart count of each attempt, by rank: each node's agent has its own
    """
    rank, found = dist.get_rank(), []
    dist.destroy_process_group()
    given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    for number, count in enumerate(counts):
        given["TORCHELASTIC_RESTART_COUNT"] = str(count[rank])
        with mock.patch.dict(os.environ, given), mock.patch.object(rendezvous, "LOOK", 0.05):
            start_distributed()
        store, total = _get_default_store(), torch.tensor(10**rank * (number + 1))
        left = store.check(["a word"])  # so would addresses be
        dist.all_reduce(total)
        store.set("a word", "of this attempt")
        found.append((int(total), left))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("counts", [[(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 0)]], ids=["one node", "two nodes"])
def test_every_attempt_forms_a_world_whatever_the_dead_one_has_left(ranks, counts):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks(2, attempts, store.port, counts) == [[(11, False), (22, False), (33, False)][: len(counts)]] * 2


def test_a_rank_that_never_comes_is_an_error_of_ours():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    for rank in (0, 1):
        with pytest.raises(Zero3dError, match=f"rank {rank} of 2 waited 0 s at the start"):
            rendezvous.attempt(store, rank, 2, patience=0.1)


DYING = """
import os, signal
from transformers import AutoModelForCausalLM

def build():
    model = AutoModelForCausalLM.from_pretrained("model")
    calls = []

    def die(*_):
        calls.append(1)
        if len(calls) == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[1].register_forward_pre_hook(die)
    return model
"""


@pytest.mark.long
def test_torchrun_restarts_a_run_whose_rank_was_killed_and_it_ends_with_the_same_bits(ranks, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    (tmp_path / "dying.py").write_text(DYING)
    whole = ranks(2, train, tree(tmp_path, "whole"), timeout=300.0)[0]
    made = tree(tmp_path, model={"path": "dying:build"}, checkpoint={"every": 1, "export": False})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(tmp_path)])}
    done = subprocess.run(
        [*torchrun, "-m", "zero3d.tools.cli.main", "train", "run.yaml", "--resume", "auto"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("out/checkpoints/step-3, after step 3") == 1
    records = [each for each in metrics(made) if "loss" in each]
    assert field(records, "step") == [1, 2, 3, 4, 5]
    assert field(records, "loss") == field(whole, "loss")


FALLING = """
import json, os, signal
from pathlib import Path
from transformers import AutoModelForCausalLM

def build():
    model = AutoModelForCausalLM.from_pretrained("model")
    left, calls = json.loads(Path("falls.json").read_text()), []

    def fall(*_):
        calls.append(1)
        if left and [int(os.environ["RANK"]), len(calls)] == left[0][:2]:
            Path("out/lost-slots").write_text(left[0][2])
            Path("falls.json").write_text(json.dumps(left[1:]))
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.layers[1].register_forward_pre_hook(fall)
    return model
"""


# A fall: the rank that is killed, in which of its attempt's micro-batches, and the slots that are lost from then on.
@pytest.mark.parametrize(
    ("dp", "exact", "batch", "falls", "restarts"),
    [
        (2, True, 4, [(1, 5, "1")], [("1 rank, dp 1", 2)]),
        pytest.param(
            4, True, 8, [(1, 7, "0"), (0, 6, "")], [("2 ranks, dp 2", 3), ("4 ranks, dp 4", 4)], marks=pytest.mark.long,
        ),
        pytest.param(
            4, False, 12, [(3, 4, "3"), (2, 5, "3 2"), (1, 7, "")],
            [("3 ranks, dp 3", 1), ("2 ranks, dp 2", 2), ("4 ranks, dp 4", 3)], marks=pytest.mark.long,
        ),
    ],
    ids=["two ranks", "exact", "plain"],
)  # fmt: skip
def test_killed_ranks_start_again_on_the_slots_that_are_there(
    ranks, zero3d_in_fork, tmp_path, dp, exact, batch, falls, restarts
):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    (tmp_path / "falling.py").write_text(FALLING)
    (tmp_path / "falls.json").write_text(json.dumps(falls))
    sections = {"zero": {"exact": exact}, "train": {"steps": 5, "batch": batch, "micro_batch": 1, "accumulate": None}}
    whole = ranks(dp, train, tree(tmp_path, "whole", **sections), timeout=300.0)[0]
    sections |= {"model": {"path": "falling:build"}, "checkpoint": {"every": 1, "export": False}}
    made = tree(tmp_path, **sections, mesh={"dp": dp}, health={"min_ranks": dp // 2})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    done = zero3d_in_fork(tmp_path, "train", "run.yaml", "--max-restarts", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    for number, (what, step) in enumerate(restarts, start=1):
        assert f"restart {number} of 3: {what}, from {made['output']}/checkpoints/step-{step}\n" in done.stderr
    records = metrics(made)
    assert field(records, "step") == [1, 2, 3, 4, 5]
    assert done.stdout.count("\nbitwise: as if it had not been interrupted, dp ") == (len(restarts) if exact else 0)
    assert done.stdout.count("\nnot bitwise: dp ") == (0 if exact else len(restarts))
    if exact:
        assert field(records, "loss") == field(whole, "loss")
        assert field(records, "grad_norm") == field(whole, "grad_norm")
    else:  # that states are bitwise the same at each dp: tests/parity/test_checkpoint.py
        assert field(records, "loss") == pytest.approx(field(whole, "loss"), rel=1e-6, abs=0)


@pytest.mark.long
def test_under_torchrun_a_rank_that_dp_does_not_take_waits_through_a_restart(ranks, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    (tmp_path / "dying.py").write_text(DYING)
    sections = {"zero": {"exact": True}, "train": {"steps": 5, "batch": 4, "micro_batch": 1, "accumulate": None}}
    whole = ranks(4, train, tree(tmp_path, "whole", **sections), timeout=300.0)[0]
    sections |= {"model": {"path": "dying:build"}, "checkpoint": {"every": 1, "export": False}}
    made = tree(tmp_path, **sections, health={"min_ranks": 1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(tmp_path)])}
    done = subprocess.run(
        [*torchrun, "-m", "zero3d.tools.cli.main", "train", "run.yaml", "--resume", "auto"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = "rank 2 of 3 is spare: 2 fit train.batch (health.min_ranks); it waits for the others to end\n"
    assert done.stderr.count(said) == 2, "in both attempts"
    assert field(metrics(made), "loss") == field(whole, "loss")
