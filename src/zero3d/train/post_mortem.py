"""The report of a run that is out of memory, in place of a callstack alone.

    device   torch's OutOfMemoryError anywhere in a run, and other errors of a failed allocation
    host     the kernel is about to kill a process (host_memory.py): that process reports why, and ends

The text is the error's message, which launchers print once; once the run has its folder, which it locks after model and
states are made, OUTPUT/out-of-memory.txt has it with the callstack;
out-of-memory.json is the same as data. The parts of a report must not fail on the way to the message, so each may be
missing: an exception there never hides the reported one.
"""

from __future__ import annotations

import ctypes
import json
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self, TypeVar

import psutil
import torch

from zero3d.config import Config
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import MemoryExhaustedError, OutOfBudget, Zero3dError
from zero3d.spec.tiers import DEVICE, HOST
from zero3d.train.callstack import doing, frames_of
from zero3d.train.folder import Folder
from zero3d.train.host_memory import HostWatch, LowMemory, rank_processes
from zero3d.train.live_tensors import largest_tensors
from zero3d.train.loop import Loop
from zero3d.train.memory_report import Advice, Live, MemoryReport, Shortage, as_json, as_text
from zero3d.train.planner import Planned
from zero3d.train.start import Start
from zero3d.watchdog.own_files import write_whole

T = TypeVar("T")
D = TypeVar("D")
SAID = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")  # by errors without a type of their own
ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) ?([KMGT]iB|bytes)")
BINARY = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SLACK = 0.05  # part of a limit that a run should leave free


class _Interruption(BaseException):
    """Stops a run whose process is about to end; its tensors stay alive in the callstack."""


class PostMortem:
    """Watches over one rank's run, and knows as much of it as there is so far.

    planned  on rank 0; on another it is made when it is needed
    """

    planned: Planned | str | None = None
    mesh: Mesh | None = None
    engine: Engine | None = None
    folder: Folder | None = None
    loop: Loop | None = None

    def __init__(self, config: Config, start: Start) -> None:
        self.config, self._end = config, start.end
        self._planner = start.planner
        self._began, self._thread = time.time(), threading.get_ident()
        self._watch: HostWatch | None = None

    def __enter__(self) -> Self:
        if self._end is not None:
            self._watch = HostWatch(self._on_low_memory)
            self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.stop()
            if self._watch.has_alarmed:
                self._watch.join()  # it ends this process
        found = None if error is None else find_exhaustion(error)
        if error is not None and found is not None:
            report = self._report(self._of_device(found), frames_of(found))
            stack = "".join(traceback.format_exception(error))
            raise MemoryExhaustedError(self._tell(report, stack)) from error

    def _on_low_memory(self, low: LowMemory) -> None:
        """Say what the host's memory is full of, briefly at first: the kernel may be faster; then end this process.

        The run is stopped where it is, at its next line of Python, so that it takes no more.
        """
        assert self._end is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Interruption))
        shortage = Shortage(
            HOST, low.room.source, low.room.limit, low.room.left, None, int(SLACK * low.room.limit), falling=low.falling
        )
        self._tell(self._report(shortage, (), short=True))
        error = MemoryExhaustedError(self._tell(self._report(shortage, ())))
        if self.mesh is not None:
            self.mesh.heartbeat.end()
        self._end(error)

    # --- what there is to say -----------------------------------------------------------------------

    def _report(self, shortage: Shortage, frames: Sequence[FrameType], short: bool = False) -> MemoryReport:
        """Put together a report. short: without the parts that take time."""
        engine, mesh = self.engine, self.mesh
        device = torch.device("cpu") if mesh is None or shortage.place == HOST else mesh.device
        return MemoryReport(
            rank=0 if mesh is None else mesh.rank,
            ranks=1 if mesh is None else mesh.world,
            host=socket.gethostname(),
            time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            step=None if self.loop is None else self.loop.state.step + 1,
            doing=_unless_it_fails(lambda: doing(frames, engine), ""),
            shortage=shortage,
            live=_unless_it_fails(lambda: live(engine, shortage), []),
            tensors=[] if short else _unless_it_fails(lambda: largest_tensors(device, engine, frames), []),
            processes=_unless_it_fails(rank_processes, []) if device.type == "cpu" else [],
            advice=Advice(why_none="not yet looked for") if short else self._advice(shortage),
        )

    def _of_device(self, error: BaseException) -> Shortage:
        """Say how much was asked for and how much there was. Reads counters alone."""
        asked, mesh = _asked(str(error)), self.mesh
        if mesh is None or mesh.device.type == "cpu":
            memory = psutil.virtual_memory()
            missing = max((asked or 0) - memory.available, 0)
            return Shortage(HOST, "memory of the host", memory.total, memory.available, asked, missing)
        device, module = mesh.device, torch.get_device_module(mesh.device)
        name = _unless_it_fails(lambda: str(module.get_device_name(device)), device.type)
        counters: tuple[int | None, int | None] = (None, None)
        free, limit = _unless_it_fails(lambda: module.mem_get_info(device), counters)
        allocated = _unless_it_fails(lambda: int(module.memory_allocated(device)), None)
        reserved = _unless_it_fails(lambda: int(module.memory_reserved(device)), None)
        missing = max((asked or 0) - (free or 0), 0)
        return Shortage(DEVICE, f"{device}, {name}", limit, free, asked, missing, allocated, reserved)

    def _advice(self, shortage: Shortage) -> Advice:
        """Ask the planner what to change."""
        if self.mesh is None:
            return Advice(why_none="the run had not begun")
        if self.planned is None:
            self.planned = self._planner.late(self.config, self.mesh)
        if isinstance(self.planned, str):
            return Advice(why_none=self.planned)
        planned, mesh = self.planned, self.mesh
        return _unless_it_fails(
            lambda: planned.advise(shortage, mesh.local_world or mesh.world, self.config, self.folder),
            Advice(why_none="the planner cannot estimate other settings"),
        )

    def _tell(self, report: MemoryReport, stack: str = "") -> str:
        """Write the files, where the run has a folder; return the message."""
        text = as_text(report)
        if self.folder is None:
            return f"{text}\n\n{stack}".rstrip()
        file = self.folder.post_mortem
        try:
            if not (stack and file.is_file() and file.stat().st_mtime >= self._began):  # another rank was first
                write_whole(file.with_suffix(".json"), json.dumps(as_json(report), indent=2) + "\n")
                write_whole(file, f"{text}\n{stack and chr(10)}{stack}")
        except OSError as error:  # the disk may be full, too
            return f"{text}\n{file} cannot be written ({error.strerror})"
        return f"{text}\nall of it: {file}"


def find_exhaustion(error: BaseException) -> BaseException | None:
    """Return the error of exhausted memory among an error and its causes; None for an error told by another rank."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Zero3dError) and (seen.from_rank is not None or isinstance(seen, MemoryExhaustedError)):
            return None
        said = isinstance(seen, RuntimeError) and any(words in str(seen) for words in SAID)
        plain = isinstance(seen, MemoryError) and not isinstance(seen, OutOfBudget)
        if isinstance(seen, torch.OutOfMemoryError) or plain or (said and not isinstance(seen, Zero3dError)):
            return seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def live(engine: Engine | None, shortage: Shortage) -> list[Live]:
    """Return the arena's account, and what else is allocated: on a device by tensors, on a CPU by the process."""
    if engine is None:
        return []
    rows = [Live(entry.place, entry.category, entry.now) for entry in engine.memory]
    on_cpu = engine.mesh.device.type == "cpu"
    whole = int(psutil.Process().memory_info().rss) if on_cpu else shortage.allocated
    if whole is not None:
        held = sum(row.nbytes for row in rows if row.place == DEVICE or (on_cpu and row.place == HOST))
        label = "activations, Python, libraries, all else" if on_cpu else "activations and all else"
        rows.append(Live(DEVICE, label, max(whole - held, 0)))
    return rows


def _asked(text: str) -> int | None:
    found = ASKED.search(text)
    return None if found is None else int(float(found[1]) * BINARY[found[2]])


def _unless_it_fails(action: Callable[[], T], otherwise: D) -> T | D:
    """Return what a part of a report says; without memory anything may fail, and the rest is still of use."""
    with suppress(Exception):
        return action()
    return otherwise
