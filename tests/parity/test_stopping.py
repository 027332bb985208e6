"""What a signal at the launcher of a bare machine comes to, with workers that stop as the training loop does."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
SAVED = "step 3 is saved in out\n"


def line(stream):
    """The next line of a file descriptor; five minutes of silence fail the test instead of hanging it."""
    text = b""
    while not text.endswith(b"\n"):
        assert select.select([stream], [], [], 300)[0], "nothing was said for five minutes"
        text += os.read(stream, 1) or b" (ended)\n"
    return text.decode().rstrip()


class Launcher:
    """A process that launches two workers as often as it is told, in a process group of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.environment["TMPDIR"] = str(folder)
        self.environment["PYTHONPATH"] = os.pathsep.join([str(HERE), self.environment.get("PYTHONPATH", "")])
        for fifo in ("events", "go-0", "go-1"):
            os.mkfifo(folder / fifo)
        self.events = os.open(folder / "events", os.O_RDWR)  # for writing, too: it never ends
        self.process = subprocess.Popen(
            [sys.executable, HERE / "stopping.py", folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment, start_new_session=True,
        )  # fmt: skip
        assert line(self.process.stdout.fileno()) == "up"

    def start(self, case):
        self.process.stdin.write(f"{case}\n".encode())
        self.process.stdin.flush()

    def both(self, event):
        """Wait until both workers have said it."""
        assert sorted(line(self.events) for _ in range(2)) == [f"{event} 0", f"{event} 1"]

    def release(self):
        """Let both workers finish saving; the signals each has got."""
        for rank in range(2):
            (self.folder / f"go-{rank}").write_text("")
        self.both("saved")
        return [(self.folder / f"signals-{rank}").read_text() for rank in range(2)]

    def end(self):
        """Its exit code and what it and worker 0 said."""
        return int(line(self.process.stdout.fileno())), (self.folder / "stderr").read_text()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("stopping"))
    yield launcher
    launcher.process.kill()
    launcher.process.wait()


def test_sigterm_gives_each_worker_one_sigterm_and_time_to_save(launcher):
    launcher.start("trains")
    launcher.both("ready")
    os.kill(launcher.process.pid, signal.SIGTERM)
    launcher.both("asked")
    os.kill(launcher.process.pid, signal.SIGTERM)  # as timeout(1) does: no reason to lose the checkpoint
    assert launcher.release() == ["[15]", "[15]"]
    resume = f"zero3d trains {launcher.folder} --resume auto"
    assert launcher.end() == (143, f"{SAVED}stopped by SIGTERM; resume with: {resume}\n")


@pytest.mark.long
def test_ctrl_c_in_the_terminal_does_the_same(launcher):
    launcher.start("trains")
    launcher.both("ready")
    os.killpg(launcher.process.pid, signal.SIGINT)
    launcher.both("asked")
    assert launcher.release() == ["[15]", "[15]"]
    code, message = launcher.end()
    assert code == 130
    assert message.startswith(f"{SAVED}stopped by SIGINT; resume with: ")


def test_a_second_ctrl_c_kills_workers_that_are_still_saving(launcher):
    launcher.start("trains")
    launcher.both("ready")
    os.killpg(launcher.process.pid, signal.SIGTERM)
    launcher.both("asked")
    os.killpg(launcher.process.pid, signal.SIGINT)
    assert launcher.end() == (130, "killed by a second Ctrl-C; what was saved before is still there\n")


def test_workers_that_do_not_train_yet_are_ended_by_the_first_signal(launcher):
    launcher.start("loads")
    launcher.both("ready")
    os.kill(launcher.process.pid, signal.SIGTERM)
    assert launcher.end() == (143, "stopped by SIGTERM outside of training; what was saved before is still there\n")


@pytest.mark.long
def test_a_workers_exception_ends_the_others_and_is_told_once(launcher):
    launcher.start("fails")
    launcher.both("ready")
    (launcher.folder / "go-1").write_text("")
    assert launcher.end() == (2, "DataError: no such file\n")


def test_an_exception_of_all_workers_is_told_once_and_nobody_is_called_dead(launcher):
    launcher.start("fails together")
    launcher.both("ready")
    (launcher.folder / "go-0").write_text("")  # who tells nothing ends first
    (launcher.folder / "go-1").write_text("")
    assert launcher.end() == (2, "DataError: no such file\n")


def test_a_worker_that_is_killed_ends_the_others_and_is_named_with_its_last_words(launcher):
    launcher.start("dies")
    launcher.both("ready")
    (launcher.folder / "go-1").write_text("")
    code, message = launcher.end()
    assert code == 1
    assert message.startswith("zero3d watchdog: a rank died ===")
    assert "\nrank 1 died without an exception: killed by SIGKILL: " in message
    assert "somebody killed it, for it was not large (the largest worker had " in message
    assert message.endswith("`dmesg` tells)\nsome last words\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_workers_whose_launcher_was_killed_save_and_stop(launcher):
    launcher.start("trains")
    launcher.both("ready")
    launcher.process.kill()  # nobody is there for another start: keep this the last to need it
    launcher.both("asked")
    # Linux signals when a thread of the parent ends that has the child: once more where another one had inherited it.
    assert [set(json.loads(signals)) for signals in launcher.release()] == [{signal.SIGTERM}] * 2


@pytest.mark.long
def test_under_torchrun_each_worker_gets_one_sigterm_and_time_to_save(launcher):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "stopping"]
    with (launcher.folder / "torchrun").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *torchrun, "trains", launcher.folder],
            env=launcher.environment, stdout=output, stderr=output,
        )  # fmt: skip
    launcher.both("ready")
    process.terminate()
    launcher.both("asked")
    assert launcher.release() == ["[15]", "[15]"]
    assert process.wait(timeout=300) == 1  # torchrun's own code for a signal
    message = (launcher.folder / "torchrun").read_text()
    assert message.count("stopped by SIGTERM: step 3 is saved in out; --resume auto continues\n") == 1


@pytest.mark.long
def test_two_tasks_of_srun_form_one_world(tmp_path):
    script = """
from zero3d.tools.cli.rank_environment import join_environment
assert join_environment()
import torch, zero3d
mesh = zero3d.Mesh(dp=2)
total = torch.tensor(10 ** mesh.rank)
torch.distributed.all_reduce(total)
print(mesh.rank, int(total))
"""
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", script], text=True, stdout=subprocess.PIPE,
            env=os.environ | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [task.communicate(timeout=600)[0] for task in tasks] == ["0 11\n", "1 11\n"]
