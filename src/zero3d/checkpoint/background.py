"""Saves behind training: a copy while the next forward and backward run, then files, checksums and the commit.

    the call          main thread  waits for the last save, makes the temporary folder, copies what is small: buffers,
                                   random states, options, schedule, loss scale, what the loop says
    the copy          thread       what is large, masters, moments, frozen weights, into the host's copy (host_copy.py)
    the next update   main thread  waits for the copy, as does who else may write weights; nobody waits for the disk
    files, commit     thread       what `save` does, from the copy: the same bytes; the copy in a store, too

Nothing but an update, a load, or a user inside `full_params` changes what is copied, and each of them waits for the
copy. States in records are read as they lie after the update that was due: those on the host in place, those on a disk
from the slot of this step, which the next update leaves alone.

The threads of all ranks agree among themselves, through the store (`StoreExchange`): a collective from a thread would
come between training's own, on every rank in another place. So all threads end alike, with a checkpoint or with one
error, at moments that differ: the main threads take note of it (`finish`) when they are together. A process that is
killed leaves what a killed `save` leaves, a folder that has no checkpoint's name; one that ends waits for its thread
and says on stderr what nobody has heard of.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.checkpoint.folders import MANIFEST
from zero3d.checkpoint.host_copy import HostCopy, copy_bytes, fill
from zero3d.checkpoint.save import Captured, Facts, Saved, Target, capture, prepare, save, write_all
from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.writing import json_text, removed_on_failure
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.memory.budget import HostBudget
from zero3d.zero.streams import ThreadStream, wait_for_device


class SaveFigures(NamedTuple):
    """Holds what a save cost.

    seconds  in which training waited for it
    nbytes   of tensors that this rank writes
    own      of those seconds, what this rank needed for files of its own, and did not wait for others
    """

    seconds: float
    nbytes: int
    own: float


class Saves:
    """Owns how an engine saves: the host's copy, the save under way, and what the last one cost.

    threads  makes what the ranks' threads agree over; all ranks call it together
    planned  bytes of the host's copy by formula, 0 while there is none
    """

    def __init__(self, device: torch.device, budget: Callable[[], HostBudget], threads: Callable[[], Comm]) -> None:
        self._device, self._open = device, threads
        self._threads: Comm | None = None
        self._copy, self._side = HostCopy(device, budget), ThreadStream(device)
        self._under_way: _UnderWay | None = None
        self._figures = SaveFigures(0.0, 0, 0.0)
        self.planned = 0

    @property
    def held(self) -> int:
        """Bytes of the host's copy."""
        return self._copy.nbytes

    @property
    def figures(self) -> SaveFigures:
        """What the last save has cost so far."""
        figures = self._figures
        return figures._replace(own=min(figures.own, figures.seconds))

    @property
    def over(self) -> bool:
        """Whether there is a save behind training whose end nobody has taken note of, and it has ended here."""
        return self._under_way is not None and not self._under_way.is_alive()

    # --- saving ---------------------------------------------------------------------------------

    def now(self, directory: Path, engine: Callable[[], EngineState], to: str | None = None) -> Path:
        """Save while the caller waits; a copy goes to the URL `to`. Raises CheckpointError, of the save before, too."""
        begun = time.monotonic()
        self.finish()
        saved = save(directory, engine(), to)
        self._figures = SaveFigures(time.monotonic() - begun, saved.nbytes, saved.seconds)
        return saved.folder

    def reserve(self, engine: EngineState) -> None:
        """Take the memory of the copy before anything is saved. Raises OutOfBudget."""
        budget = self._copy.measure()
        agree(engine.world, lambda: self._places(capture(engine), engine, budget))

    def begin(self, directory: Path, engine: Callable[[], EngineState], to: str | None = None) -> Path:
        """Begin to save behind training, with a copy below the URL `to`, and return the folder that will be there.

        Raises CheckpointError, of the save before, too, and OutOfBudget.
        """
        begun = time.monotonic()
        self.finish()
        state = engine()
        world, target = state.world.patient, Target.of(directory, state.step, to)
        budget = self._copy.measure()
        self._threads = self._threads or self._open()
        prepare(target, world)
        with removed_on_failure(target.temporary, world):
            self._under_way = agree(world, lambda: self._captured(state, target, budget))
        atexit.register(self._under_way.tell_unheard)
        self._under_way.start()
        self._figures = self._figures._replace(seconds=time.monotonic() - begun, own=0.0)
        return target.final

    def _captured(self, engine: EngineState, target: Target, budget: HostBudget | None) -> _UnderWay:
        """Copy what is small, and find places for what is large."""
        captured = capture(engine)
        run = Facts.of(engine) if engine.world.rank == 0 else Facts({}, {})
        facts = run._replace(run=json.loads(json_text(target.temporary / MANIFEST, run.run)))
        own = {key: torch.empty_like(values, device="cpu").copy_(values) for key, values in captured.own.items()}
        captured = captured._replace(own=own)
        places = self._places(captured, engine, budget)
        self._figures = self._figures._replace(nbytes=captured.nbytes)
        self._side.follow()
        assert self._threads is not None
        return _UnderWay(target, captured, places, facts, self._threads, self._side, self._device)

    def _places(self, captured: Captured, engine: EngineState, budget: HostBudget | None) -> dict[str, Tensor]:
        """Return places in the host's copy, whose memory is taken where it is not there."""
        places = self._copy.reserve(captured.states, budget)
        self.planned = copy_bytes(engine)
        return places

    # --- waiting --------------------------------------------------------------------------------

    @property
    def copies(self) -> bool:
        """Whether the save under way may still read states: nobody has waited for its copy yet."""
        return self._under_way is not None and not self._under_way.released

    def await_copy(self) -> None:
        """Wait until what is to be saved may be changed; the device waits for itself."""
        if self._under_way is not None and self.copies:
            begun = time.monotonic()
            self._under_way.release()
            self._waited(begun)

    def _waited(self, begun: float) -> None:
        """Count what training has waited since a moment."""
        self._figures = self._figures._replace(seconds=self._figures.seconds + time.monotonic() - begun)

    def wait(self) -> None:
        """Wait for the save under way, whatever comes of it."""
        if self._under_way is not None:
            self._under_way.join()

    def finish(self) -> Path | None:
        """Wait for the save under way and take note of it: its folder, None where there is none. Raises what it did."""
        begun = time.monotonic()
        self.wait()
        ended, self._under_way = self._under_way, None
        if ended is None:
            return None
        self._waited(begun)
        if ended.saved is not None:
            self._figures = self._figures._replace(own=ended.saved.seconds)
        atexit.unregister(ended.tell_unheard)
        if ended.failure is not None:
            raise ended.failure
        return ended.target.final


class _UnderWay(Thread):
    """Owns one save: copies, writes and commits. A process waits for it at its end.

    released  whether the caller's stream waits for the copy, or need not
    saved     what came of it
    failure   what it raised; on all ranks alike
    """

    def __init__(
        self,
        target: Target,
        captured: Captured,
        places: Mapping[str, Tensor],
        facts: Facts,
        threads: Comm,
        side: ThreadStream,
        device: torch.device,
    ) -> None:
        super().__init__(name=f"save of {target.final.name}", daemon=False)
        self.target, self.released = target, False
        self.saved: Saved | None = None
        self.failure: BaseException | None = None
        self._captured = captured
        self._places = places
        self._facts = facts
        self._threads = threads
        self._side = side
        self._device = device
        self._copied = Event()
        self._done = torch.Event(device) if device.type != "cpu" else None

    def run(self) -> None:
        try:
            self.saved = write_all(self.target, self._threads, self._copy, lambda: self._facts)
        except BaseException as error:  # noqa: BLE001 (raised where it is taken note of)
            self.failure = error
        finally:
            self._copied.set()
            self._captured, self._places = self._captured._replace(states={}), {}  # nothing keeps states alive

    def _copy(self) -> Captured:
        """Copy the states, and return what is to be written."""
        try:
            if self._device.type != "cpu":
                torch.accelerator.set_device_index(self._device)
            with self._side.entered():
                fill(self._places, self._captured.states)
                if self._done is not None:
                    self._done.record()
        finally:
            self._copied.set()
        with self._side.entered():
            wait_for_device(self._device)
        return self._captured._replace(states=self._places)

    def tell_unheard(self) -> None:
        """Say at the end of the process, which has waited for it, that a save failed of which nobody took note."""
        if self.failure is not None and self._threads.rank == 0:
            with suppress(OSError):
                print(f"the checkpoint {self.target.final} was not written: {self.failure}", file=sys.stderr)

    def release(self) -> None:
        """Have what comes next on the caller's stream come after the copy."""
        self._copied.wait()
        if self._done is not None:
            self._done.wait()
        self.released = True
