"""Calls of a user's own code during a run: its errors are named, and its random draws change no training.

An error, SystemExit and KeyboardInterrupt included, ends the run at once on the rank where it is raised, in one line;
the other ranks may be in a collective of that code and lose their peer. Errors of zero3d's own, and of memory that has
run out, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero3d.config.own_code import in_one_line
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, Zero3dError
from zero3d.rng import rng_state, set_rng_state
from zero3d.train.stop import PressedAgain


@contextmanager
def own_call(name: str, engine: Engine, phase: str) -> Iterator[None]:
    """Call, inside, the function that the configuration names as `name`; random states are restored afterwards.

    phase  announced to the watchdog

    Raises ConfigError with the name and the place.
    """
    tensors, plain = rng_state(engine.mesh.device)
    with engine.mesh.heartbeat.phase(phase), torch.no_grad():
        try:
            yield
        except (Zero3dError, torch.OutOfMemoryError, PressedAgain):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise ConfigError(f"{name} raised {in_one_line(error)}") from error
    set_rng_state(tensors, plain, engine.mesh.device)
