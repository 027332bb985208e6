"""`zero3d VERB` without its start: in a fork of a process that has imported, and so are the ranks that it starts.

The fixture `zero3d_in_fork` runs a command line so. What a start adds, the interpreter, imports and `python -m`, is tested once
a verb by a command of its own (tests/unit/test_verbs.py). `benchmark_in_fork` runs a script of benchmarks/ so.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from zero3d.tools.cli import workers


class Done(NamedTuple):
    """A command that has ended, in the words of subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


class Fork:
    """A child of this process in the words of subprocess.Popen."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        return self._wait(os.WNOHANG)

    def wait(self):
        return self._wait(0)

    def _wait(self, options):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def start_fork(words, module=workers.MAIN, environment=None, stdout=None, stderr=None):
    """In the place of `workers.start_process`: the module's `main(words)` in a fork of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of an earlier attempt's store a thread may be left, which a rank does not use
        pid = os.fork()
    if pid:
        return Fork(pid)
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # not those of the launcher
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        code = run_here(words, module, environment, stdout, stderr)
    finally:
        os._exit(code)


def run_here(words, module=workers.MAIN, environment=None, stdout=None, stderr=None):
    """Be that command; return its exit code."""
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for stream, file in ((sys.stdout, stdout), (sys.stderr, stderr)):
        stream.flush()
        if file is not None:
            os.dup2(file.fileno(), stream.fileno())
    workers.start_process = start_fork
    try:
        code = import_module(module).main(list(words))
    except SystemExit as end:
        code = end.code or 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def run_in_fork(words, folder, environment, output):
    """The case of a process of the pool: the exit code, what was printed in files of `output`."""
    os.chdir(folder)
    with open(output / "stdout", "wb") as stdout, open(output / "stderr", "wb") as stderr:
        return run_here(words, environment=environment, stdout=stdout, stderr=stderr)


def run_benchmark(script, words, file):
    """The case of a process of the pool: a script of benchmarks/, whose ranks are forks, too; what it writes as JSON."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import ranks

    start = ranks.start_processes
    ranks.start_processes = lambda *given, **options: start(*given, **options | {"start_method": "fork"})
    with redirect_stdout(StringIO()):
        assert import_module(script).main([*words, "--json", str(file)]) == 0
    return json.loads(Path(file).read_text())
