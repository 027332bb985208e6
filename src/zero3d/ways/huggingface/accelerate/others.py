"""Folders that a Trainer or an Accelerate loop has written without zero3d, from which an engine goes on.

    checkpoint-3/global_step3, latest                   DeepSpeed's, of ZeRO stages 1 to 3
    checkpoint-3/pytorch_model_fsdp_0, optimizer_0      FSDP's, in shards: torch.distributed.checkpoint's
    checkpoint-3/optimizer.pt                           torch's own, also FSDP's whole ones (optimizer.bin)

Rank 0 writes what is in it as a checkpoint of ours beside it, all ranks load their parts of that, and it is removed.
What cannot be read is a CheckpointError: nothing goes on from weights alone that had moments.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero3d.distributed.agreement import agree
from zero3d.engine.engine import Engine
from zero3d.errors import CheckpointError
from zero3d.models.names import persistent_buffers
from zero3d.ways.checkpoints import dcp, deepspeed, plain
from zero3d.ways.checkpoints.foreign import ADAMS, Foreign, laid_out, write

ON_THE_WAY = ".zero3d-import"  # a folder in the one that is read, while it is
PIECES = ("rank*-of-*-optimizer.pt", "optimizer.pt_*", "*_optim_states.pt", "global_step*", "optimizer_*", "zero3d*")


class Order(NamedTuple):
    """Names of the parameters in each group of an optimizer, as they were before an engine took them."""

    groups: Sequence[Sequence[str]]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Order:
        """Return those of an optimizer of a plain model."""
        names = {p: name for name, p in model.named_parameters()}
        return cls([[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups])


Reader = Callable[[plain.Live], Foreign]


def reader_of(folder: Path) -> Reader | None:
    """Return what reads the optimizer's states of a folder that was written without zero3d; None where it has none.

    Raises CheckpointError where there are states that nothing here reads.
    """
    of_deepspeed = deepspeed.found(folder)
    if of_deepspeed is None and len(steps := sorted(folder.glob("global_step*"))) == 1:
        of_deepspeed = deepspeed.found(steps[0])
    if of_deepspeed is None and (folder / "pytorch_model").is_dir():  # Accelerate's
        of_deepspeed = deepspeed.found(folder / "pytorch_model")
    if of_deepspeed is not None:
        return partial(_of_deepspeed, of_deepspeed)
    if any((path / dcp.METADATA).is_file() for path in folder.glob("optimizer_*")):
        return partial(_of_dcp, folder)
    if plain.found(folder) is not None:
        return partial(_plain, folder)
    if parts := sorted(path.name for pattern in PIECES for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder} has states of an optimizer ({parts[0]}) in a form that is not read here: resume it with what "
            "wrote it, or pass the folder's weights to the model and train anew."
        )
    return None


def go_on(engine: Engine, folder: Path, order: Order, read: Reader, adapters: str | None = None) -> None:
    """Load masters, moments and counts of a folder that `reader_of` reads. All ranks call it. Raises CheckpointError.

    adapters  name of PEFT's adapter that is trained; frozen weights then stay as they are
    """
    live, patient = _live(engine, order, adapters), engine.world.patient
    on_the_way = folder / ON_THE_WAY

    def imported() -> None:
        shutil.rmtree(on_the_way, ignore_errors=True)
        with laid_out(folder, "its writer"):
            write(_fitted(read(live), live), on_the_way)

    try:
        agree(patient, imported if engine.world.rank == 0 else lambda: None)
        engine.load(on_the_way)
    finally:
        with suppress(CheckpointError):
            agree(patient, lambda: None)
        if engine.world.rank == 0:
            shutil.rmtree(on_the_way, ignore_errors=True)


def take_rates(engine: Engine, scheduler: Any) -> None:
    """Give the optimizer's groups the rates at which a schedule is, which a checkpoint of others may not have."""
    for group, rate in zip(engine.optimizer.torch.param_groups, getattr(scheduler, "_last_lr", ()), strict=False):
        group["lr"] = rate


def _of_deepspeed(folder: Path, live: plain.Live) -> Foreign:
    return deepspeed.read(folder)


def _of_dcp(folder: Path, live: plain.Live) -> Foreign:
    return dcp.read(dcp.found(folder))


def _plain(folder: Path, live: plain.Live) -> Foreign:
    return plain.read(folder, live)


def _fitted(foreign: Foreign, live: plain.Live) -> Foreign:
    """Give a checkpoint of Adam's the class that goes on, and sort its weights as this model has them."""
    if not foreign.moments and live.kind in ADAMS:
        raise CheckpointError(
            f"{foreign.source} has no moments of {live.kind}: they would begin at zero. Pass the weights to the model, "
            "and train anew."
        )
    if foreign.kind in ADAMS and live.kind in ADAMS:
        foreign.kind = live.kind
    _rename(foreign, live)
    for name in [name for name in foreign.masters if name not in live.trained]:
        kept = foreign.buffers if name in live.buffers else foreign.frozen
        kept[name] = foreign.masters.pop(name)
        foreign.moments.pop(name, None)
    for name in [name for name in foreign.frozen if name in live.buffers]:
        foreign.buffers[name] = foreign.frozen.pop(name)
    there = foreign.masters.keys() | foreign.frozen.keys()
    if live.saved is not None:
        foreign.kept = {n: shape for n, shape in live.shapes.items() if n not in there and n not in live.trained}
    foreign.buffers = {name: values for name, values in foreign.buffers.items() if name in live.buffers}
    return foreign


def _rename(foreign: Foreign, live: plain.Live) -> None:
    """Give tied parameters the name that they have here, once."""
    for kept in (foreign.masters, foreign.moments, foreign.frozen):
        for name in [name for name in kept if name not in live.shapes]:
            own = next((each for each in live.same.get(name, ()) if each in live.shapes), None)
            if own is not None:
                values: Any = kept.pop(name)
                cast("dict[str, Any]", kept).setdefault(own, values)


def _live(engine: Engine, order: Order, adapters: str | None) -> plain.Live:
    shapes, module = engine.full_model.shapes, engine.module
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(p, []).append(name)
    same = {
        name: [name, *(other for other in names if other != name)] for names in by_parameter.values() for name in names
    }
    return plain.Live(
        type(engine.optimizer.torch).__name__,
        shapes,
        frozenset(name for unit in engine.units if unit.grads is not None for name in _owners(engine, unit)),
        same,
        order.groups,
        frozenset(persistent_buffers(module)),
        None if adapters is None else _saved_names(module, adapters),
        partial(plain.states_of, engine.optimizer.torch),
    )


def _owners(engine: Engine, unit: Any) -> list[str]:
    return [engine.full_model.owner(slot.name) for slot in unit.layout.slots]


def _saved_names(module: nn.Module, adapter: str) -> dict[str, str]:
    """Return the names that PEFT gives parameters in a file of adapters, and which each is of."""
    from peft import get_peft_model_state_dict

    stand_ins: dict[str, Tensor] = {name: torch.empty(0) for name, _ in module.named_parameters()}
    names = {id(values): name for name, values in stand_ins.items()}
    saved = get_peft_model_state_dict(module, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=False)
    return {key: names[id(values)] for key, values in saved.items() if id(values) in names}
