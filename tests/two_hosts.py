"""Two hosts in one machine: namespaces of the kernel, joined by a cable that can be cut or made slow.

    host0 10.77.0.1 ---- cable (veth) ---- host1 10.77.0.2

Each host has processes, a name, /etc/hosts, /dev/shm and a loopback of its own, and the same files. It lives as long as
its first process, which ends with the process that made it: with it the kernel ends all others of that host, and then
takes back its network. So nothing can be left behind, whatever becomes of a test.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest

NAMES = ("host0", "host1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable"
CLONE_NEWNET = 0x40000000  # linux/sched.h
FIRST = """
hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {hosts} /etc/hosts && ip link set lo up && echo up
exec cat
"""  # which ends when its stdin does


class Host:
    """One of the two: `start` a process on it; `cut`, `mend` or `slow_down` its end of the cable; `kill` all of it."""

    def __init__(self, number, hosts):
        self.name, self.address = NAMES[number], ADDRESSES[number]
        spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.unshare = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", FIRST.format(name=self.name, hosts=hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        if (said := self.unshare.stdout.readline()) != b"up\n":
            raise OSError((said + self.unshare.communicate()[0]).decode())
        [first] = psutil.Process(self.unshare.pid).children()
        self.first = first.pid  # of the host, seen from outside

    def start(self, command, **options):
        """A process on this host, in the folder it is given; `options` of subprocess.Popen."""
        enter = ["nsenter", f"--target={self.first}", "--net", "--uts", "--ipc", "--mount", "--pid", "--"]
        folder = str(options.pop("cwd", Path.cwd()))  # nsenter goes to the root of the mounts
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', folder, *map(str, command)]
        return subprocess.Popen([*enter, *inside], **options)

    def processes(self):
        """All processes of this host but the first one, which reaps none: those that have ended do not count."""
        space = f"/proc/{self.first}/ns/pid"
        mine = os.readlink(space) if Path(space).exists() else ""
        found = [p for p in psutil.process_iter() if p.pid != self.first and pid_space(p.pid) == mine]
        return [process for process in found if lives(process)]

    def ended(self, seconds=15.0):
        """Whether no process is left on it after so many seconds at most."""
        end = time.monotonic() + seconds
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        return self.processes() == []

    def cut(self):
        """Let nothing through in its direction, and say so to nobody: what a dead switch does."""
        self.queue("blackhole")

    def slow_down(self, rate):
        """Send at most so much, such as "20mbit"."""
        self.queue("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")

    def queue(self, *kind):
        self.network("tc", "qdisc", "replace", "dev", CABLE, "root", *kind)

    def bytes_sent(self):
        """What it has put on the cable so far."""
        [row] = json.loads(self.network("ip", "-json", "-stats", "link", "show", "dev", CABLE))
        return row["stats64"]["tx"]["bytes"]

    def network(self, *command):
        """Run a command in its network alone; what it prints."""
        enter = ["nsenter", f"--target={self.first}", "--net"]
        return subprocess.run([*enter, *command], check=True, capture_output=True).stdout

    def kill(self):
        """End all its processes at once."""
        if self.unshare.poll() is None:
            os.kill(self.first, signal.SIGKILL)
        self.unshare.wait()


@contextmanager
def network_of(first):
    """Be in the network of the host with this first process, inside: this thread, and those that it starts."""
    with open("/proc/thread-self/ns/net") as before, open(f"/proc/{first}/ns/net") as here:
        enter_network(here)
        try:
            yield
        finally:
            enter_network(before)


def enter_network(space):
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(space.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pid_space(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has ended
        return None


@contextmanager
def two_hosts():
    """The two hosts, joined; all of both is gone at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The second name is what a Service of Kubernetes gives pod 0 or 1 of the Job that `zero3d launch k8s` prints.
        names = [f"{ADDRESSES[i]} {NAMES[i]} zero3d-run-{i}.zero3d-run\n" for i in range(2)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        hosts = []
        for number in range(2):
            hosts.append(Host(number, folder / "hosts"))
            stack.callback(hosts[-1].kill)
        one, other = (str(host.first) for host in hosts)
        ends = ["ip", "link", "add", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", other]
        hosts[0].network(*ends)
        for host in hosts:
            host.network("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
            host.network("ip", "link", "set", CABLE, "up")
        yield hosts


@cache
def why_not():
    """Why this machine cannot have two hosts; nothing where it can."""
    if sys.platform != "linux":
        return "two hosts need Linux's namespaces"
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]:
        return f"two hosts need {', '.join(missing)} (util-linux, iproute2)"
    if os.geteuid() != 0:
        return "two hosts need root"
    try:
        with two_hosts() as hosts:
            for host in hosts:
                host.slow_down("20mbit")
                host.cut()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or b""
        return f"this machine allows no two hosts: {error} {said.decode()}"
    return ""


@pytest.fixture
def hosts():
    """Two hosts for one test; skipped with the reason where there cannot be any."""
    if why_not():
        pytest.skip(why_not())
    with two_hosts() as both:
        yield both
