"""What is taken of another trainer's checkpoint, and how it becomes one of ours.

The checkpoint that is written is that of one rank: it resumes on any number, at any stage. It has no place in the data,
and no options of the optimizer: a run that goes on from it has those of its own file, and begins its data anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3d.checkpoint.frozen_base import DIGITS
from zero3d.checkpoint.manifest import BUFFER, CODES, FLOATING, FROZEN, MASTER, STREAM, key_of
from zero3d.checkpoint.resume_contract import IMPORTED
from zero3d.checkpoint.save import Captured, Facts, Target, prepare, write_all
from zero3d.distributed.axis import Axis
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.errors import CheckpointError, short
from zero3d.memory.arena import Arena
from zero3d.precision import LossScale, Precision, dtype_name
from zero3d.rng import rng_state

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER = "AdamW"
ADAMS = ("Adam", "AdamW")
ONLY_ADAM = "only states of Adam and AdamW can be taken; --weights-only leaves them."
LONGEST = 1000  # characters of a parameter's name
MOST_DIMS = 64  # of a tensor, in torch
STEPS = 1 << 53  # whole numbers up to here survive any JSON reader


@contextmanager
def laid_out(folder: Path, writer: str) -> Iterator[None]:
    """Say of files that hold other things, or in another order, than their writer's do that they cannot be taken."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or short(str(error))}.") from error
    except Exception as error:  # of values that may have any type, anything may come
        raise CheckpointError(
            f"{folder} is not laid out as {writer} lays it out ({type(error).__name__}: {short(str(error))}): save it "
            "once more with that version, or export the weights there and start from them."
        ) from error


def check_name(name: object, where: str) -> str:
    """Return the name of a parameter. Raises CheckpointError for what no module has for one."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST:
        raise CheckpointError(f"{where} has a tensor by the name {short(ascii(name))}, which no module has.")
    return name


@dataclass
class Foreign:
    """A checkpoint of another trainer's, by names of parameters.

    source   what wrote it
    step     steps that were applied
    masters  of what is trained, fp32 and in the parameter's shape
    moments  of those Adam's two, fp32; for all of them, or for none
    frozen   weights that are not trained
    buffers  of the model, persistent ones
    kept     shapes of frozen weights that it has not: the model that loads it has them already
    kind     class of the torch optimizer
    groups   options of its groups; none: those of the engine that loads it stay
    numbers  what it kept of every parameter beside moments; Adam's step is `step`
    """

    source: str
    step: int = 0
    masters: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kind: str = OPTIMIZER
    groups: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise CheckpointError where it has no weights, moments of a part of them, or what no weight can be."""
        if not self.masters:
            raise CheckpointError(f"{self.source} has no weights that are trained.")
        if not 0 <= self.step < STEPS:
            raise CheckpointError(f"{self.source} has applied {short(self.step)} steps, which no run has.")
        for what, tensors, dtypes in (
            ("trained weight", self.masters, FLOATING),
            ("frozen weight", self.frozen, CODES),
            ("buffer", self.buffers, CODES),
            *(("moment", moments, FLOATING) for moments in self.moments.values()),
        ):
            for name, values in tensors.items():
                check_name(name, self.source)
                if dtype_name(values.dtype) not in dtypes:
                    raise CheckpointError(f"{self.source}: the {what} {name} is {values.dtype}, which none has.")
        wanted = MOMENTS if self.kind in ADAMS else next(iter(self.moments.values()), {})
        states = {name: set(self.moments.get(name, ())) for name in self.masters if self.moments}
        lacking = [name for name in states if not states[name].issuperset(wanted)]
        if lacking:
            raise CheckpointError(
                f"{self.source} has no {' and '.join(wanted)} of {len(lacking)} of {len(self.masters)} parameters, "
                f"first {lacking[0]!r}: {ONLY_ADAM}"
            )
        for name, moments in self.moments.items():
            for state, values in moments.items():
                if name not in self.masters or values.shape != self.masters[name].shape:
                    of = tuple(self.masters[name].shape) if name in self.masters else "nothing"
                    raise CheckpointError(
                        f"{self.source}: {state} of {name} is {tuple(values.shape)}, its weight {of}."
                    )


def write(foreign: Foreign, directory: Path) -> Path:
    """Write directory/step-N, a checkpoint of ours; return it. Holds 12 bytes per parameter. Raises CheckpointError."""
    foreign.check()
    world = Comm(Axis("world", 0, 1), Arena(torch.device("cpu")), Ledger())
    target = Target.of(directory, foreign.step)
    if target.final.exists():
        raise CheckpointError(f"{target.final} is there already: import into another folder.")
    prepare(target, world)
    return write_all(target, world, lambda: _captured(foreign), lambda: _facts(foreign)).folder


def _captured(foreign: Foreign) -> Captured:
    states, rows, parameters = {}, [], {}
    kinds: Mapping[str, Mapping[str, Mapping[str, Tensor]]] = {
        "trained": {
            name: {MASTER: values.float(), **{key: m.float() for key, m in foreign.moments.get(name, {}).items()}}
            for name, values in foreign.masters.items()
        },
        "frozen": {name: {FROZEN: values} for name, values in foreign.frozen.items()},
    }
    for kind, named in kinds.items():
        for name, kept in named.items():
            shape = list(next(iter(kept.values())).shape)
            dtype = "float32" if kind == "trained" else dtype_name(kept[FROZEN].dtype)
            parameters[name] = {"shape": shape, "trainable": kind == "trained", "dtype": dtype}
            for state, values in kept.items():
                box = tuple((0, size) for size in shape)
                key = key_of(name, state, box)
                states[key] = values
                rows.append({"name": name, "state": state, "box": box, "dtype": dtype_name(values.dtype), "key": key})
    for name, kept_shape in foreign.kept.items():
        parameters[name] = {"shape": list(kept_shape), "trainable": False, "dtype": "float32", "base": True}
    streams, python_rng = rng_state(torch.device("cpu"))
    own = {f"{BUFFER}{name}": values for name, values in foreign.buffers.items()}
    own |= {f"{STREAM}{name}": values for name, values in streams.items()}
    part = {
        "parameters": parameters,
        "tensors": rows,
        "own": {key: {"shape": list(values.shape), "dtype": dtype_name(values.dtype)} for key, values in own.items()},
        "scalars": foreign.numbers | ({"step": float(foreign.step)} if _counts(foreign) else {}),
        "python_rng": python_rng,
    }
    return Captured(0, states, own, part)


def _facts(foreign: Foreign) -> Facts:
    loop = {"position": None, "step": foreign.step, "skipped": 0, "tokens": 0, "best": None}
    run = {
        "step": foreign.step,
        "about": {IMPORTED: foreign.source},
        "exact": None,
        "optimizer": {"class": foreign.kind, "groups": foreign.groups},
        "scheduler": None,
        "loss_scale": LossScale(Precision.of("fp32")).state(),
        "loop": loop,
    }
    return Facts(run, {"pp": 1, "dp": 1, "tp": 1}, {"folder": "", "digest": "0" * DIGITS} if foreign.kept else None)


def _counts(foreign: Foreign) -> bool:
    """Return whether the optimizer counts steps for every parameter, as Adam does."""
    return bool(foreign.moments) if foreign.kind in ADAMS else "step" in foreign.numbers
