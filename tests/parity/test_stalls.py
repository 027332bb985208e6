"""Faults of a rank, from the launcher's side: the block names who waits for whom, and nobody is left running.

Workers that beat as training does, without torch (`stalling.py`); in long tests whole runs of `zero3d train`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from training import save_model, save_rows, tree

HERE = Path(__file__).parents[1]
GONE = 15.0  # seconds in which all processes are to be gone after the block


def run(folder, case):
    """Launch two workers and wait; the launcher's exit code, what it said, the block as data."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(HERE), environment.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "stalling.py"), case, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr, json.loads((folder / "watchdog.json").read_text())


CASES = {  # kind, what rank 1 is doing, its state, in its stack
    "waits": ("stopped", "Rank 1 is stopped (SIGSTOP", "stopped", "in fault"),
    "loops": ("stall", "Rank 1 is stuck or slow in the forward of unit 'a', in no collective", "running", "loop_for_ever"),
    "differs": ("stall", "Ranks are in different collectives: rank 0 in all_gather 3 of unit 'b' on axis dp, "
                "rank 1 in reduce_scatter 1 of unit 'b' on axis dp", "waiting", "wait_for_peers"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", ["waits", *(pytest.param(case, marks=pytest.mark.long) for case in ("loops", "differs"))]
)
def test_a_stall_names_rank_unit_collective_and_stack_and_ends_the_run(tmp_path, case):
    kind, cause, state, frame = CASES[case]
    code, said, block = run(tmp_path, case)
    assert code == 1
    assert f"\n{cause}" in said
    assert said.splitlines()[-1] == f"ended by the watchdog: {block['cause']}"
    assert (tmp_path / "watchdog.txt").read_text() in said
    waiting, other = block["ranks"]
    assert (block["version"], block["kind"], block["step"], block["timeout"]) == (1, kind, 2, 1.5)
    assert [waiting[name] for name in ("state", "axis", "op", "unit", "number", "step")] == [
        "waiting", "dp", "all_gather", "b", 3, 2
    ]  # fmt: skip
    assert block["waits"][0] == {"rank": 0, "for": [1], "axis": "dp", "op": "all_gather", "unit": "b"}
    assert (other["rank"], other["state"], other["phase"]) == (1, state, "training")
    assert any("wait_for_peers" in line for line in waiting["stack"])
    assert any(frame in line for line in other["stack"])
    assert block["advice"]
    assert not any(psutil.pid_exists(rank["pid"]) for rank in block["ranks"])
    assert not Path((tmp_path / "watch").read_text()).exists()


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_with_its_last_call_and_the_stacks_of_the_others(tmp_path):
    code, said, block = run(tmp_path, "dies")
    assert code == 1
    assert "\nRank 1 died: killed by SIGKILL.\n" in said
    assert "rank 1 died without an exception: killed by SIGKILL" in said
    assert (block["kind"], [rank["state"] for rank in block["ranks"]]) == ("died", ["waiting", "dead"])
    assert block["ranks"][1]["unit"] == "a"
    assert block["ranks"][1]["stack"] == []
    assert any("wait_for_peers" in line for line in block["ranks"][0]["stack"])


@pytest.mark.parametrize(
    "case", ["fast", *(pytest.param(case, marks=pytest.mark.long) for case in ("orphans", "early"))]
)
def test_after_a_killed_launcher_ranks_say_so_and_end_even_where_one_is_stopped(tmp_path, case):
    code, said, block = run(tmp_path, case)
    assert code == -9
    assert "is gone: it saves, where it trains, and ends" in said
    assert block["kind"] == "launcher"
    assert block["ranks"][0]["unit"] == ("b" if case == "orphans" else "a")
    left = [psutil.Process(rank["pid"]) for rank in block["ranks"] if psutil.pid_exists(rank["pid"])]
    assert psutil.wait_procs(left, timeout=GONE)[1] == []
    assert not Path((tmp_path / "watch").read_text()).exists()


FAULTY = """
import os, signal
import torch, torch.distributed as dist
from transformers import AutoModelForCausalLM

def build():
    model = AutoModelForCausalLM.from_pretrained("model")
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == 7 and os.environ["RANK"] == "1":
            if os.environ["FAULT"] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if os.environ["FAULT"] == "collective":
                dist.broadcast(torch.zeros(3), 0)
            dist.recv(torch.zeros(3), 0)  # which no rank tells of: it counts no messages

    model.model.layers[1].register_forward_pre_hook(hook)
    return model
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run_with(tmp_path, launcher, fault, timeout):
    """What a run says on stderr whose rank 1 has this fault; the monitor gives it so many seconds."""
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    (tmp_path / "faulty.py").write_text(FAULTY)
    made = tree(tmp_path, model={"path": "faulty:build"}, health={"timeout": timeout})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    paths = os.pathsep.join([str(HERE.parent / "src"), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "zero3d.tools.cli.main", "train", "run.yaml"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths, "FAULT": fault}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@pytest.mark.long
def test_a_run_whose_rank_is_in_a_collective_of_the_programs_own_ends_before_its_monitor_would_end_it(tmp_path):
    said = run_with(tmp_path, (), "collective", timeout=300.0)
    assert "rank 1 waits in the program's own torch.distributed.broadcast, which rank 0 has not begun" in said
    assert "rank 0 waits in all_gather of unit " in said


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "fault"), [((), "message"), (TORCHRUN, "stop")], ids=["ours", "torchrun"])
def test_whole_runs_are_ended_by_a_block_in_their_folder(tmp_path, launcher, fault):
    said = run_with(tmp_path, launcher, fault, timeout=8.0)
    block = json.loads((tmp_path / "out" / "watchdog.json").read_text())
    assert (tmp_path / "out" / "watchdog.txt").read_text() in said
    waiting, other = block["ranks"]
    assert (waiting["state"], waiting["axis"], waiting["op"]) == ("waiting", "dp", "all_gather")
    assert waiting["unit"].startswith(("model.", "lm_head"))  # gathers run ahead
    assert block["waits"][0]["for"] == [1]
    assert any("hook" in line for line in other["stack"])
    if fault == "stop":
        assert (block["kind"], other["state"]) == ("stopped", "stopped")
    else:
        assert (block["kind"], other["op"], other["axis"]) == ("stall", "recv", "torch.distributed")
    assert not any(psutil.pid_exists(rank["pid"]) for rank in block["ranks"])
