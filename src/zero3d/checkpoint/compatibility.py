"""Checks that a checkpoint is one of this engine: its model, optimizer, scheduler, buffers and random states.

`manifest_parser.py` has checked the manifest by itself. Nothing stays changed here; every refusal is a CheckpointError.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy
import torch
from torch import Tensor

from zero3d.checkpoint.fields import USE_ANOTHER, Field, quote, quote_name
from zero3d.checkpoint.frozen_base import check_digest, needed_base
from zero3d.checkpoint.json_values import from_json
from zero3d.checkpoint.manifest import AVERAGE, FLOATING, FROZEN, MASTER, Manifest, TensorSpec
from zero3d.checkpoint.option_values import check_alike, check_option, check_scalars
from zero3d.checkpoint.resume_contract import EMA, IMPORTED
from zero3d.checkpoint.state import EngineState
from zero3d.errors import CheckpointError
from zero3d.models.written_numbers import WrittenNumber
from zero3d.precision import dtype_name
from zero3d.spec.optimizer import OPTIMIZERS

ADAM = {"exp_avg", "exp_avg_sq"}  # states that the engine gives Adam and AdamW from the start
OURS = {  # what to type, by the name of a class that torch has not
    row.kind: f"optimizer.name={row.name} ({row.call.replace(':', '.')})"
    for row in OPTIMIZERS.values()
    if row.call.startswith("zero3d.optim")
}
ALIKE = [  # names of classes with the same states and options, stored otherwise
    {row.kind, OPTIMIZERS[row.codes].kind} for row in OPTIMIZERS.values() if row.codes is not None
]
ANOTHER_MODEL = "is a checkpoint of another model"
COUNTED = 1 << 24  # Adam's own count of steps is an fp32 number, which goes up to here
COUNTERS = ("last_epoch", "_step_count")  # of torch's schedulers
PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")


def check_compatible(manifest: Manifest, engine: EngineState) -> None:
    """Refuse a checkpoint of another model or optimizer, or with values that these cannot have; states come later."""
    _check_parameters(manifest, engine)
    _check_trainable(manifest, engine)
    _check_base(manifest, engine)
    check_run(manifest, engine)


def check_run(manifest: Manifest, engine: EngineState) -> None:
    """Refuse states of another optimizer or scheduler, or with values that these cannot have."""
    _check_kind(manifest, engine)
    _check_groups(manifest, engine)
    _check_scheduler(manifest, engine)


# --- the model ----------------------------------------------------------------------------------


def _check_parameters(manifest: Manifest, engine: EngineState) -> None:
    saved = {name: parameter.shape for name, parameter in manifest.parameters.items()}
    live = engine.full_model.shapes
    differences = [
        f"{quote_name(name)}: checkpoint {saved[name]}, model {live[name]}"
        for name in saved
        if name in live and saved[name] != live[name]
    ]
    differences += [f"{quote_name(name)} is only in the checkpoint" for name in saved if name not in live]
    differences += [f"{quote_name(name)} is only in the model" for name in live if name not in saved]
    if differences:
        listed = "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        raise CheckpointError(
            f"{manifest.folder} {ANOTHER_MODEL} ({len(saved)} parameters, this model {len(live)}): "
            f"{listed}. Build the model the checkpoint was saved from."
        )


def _check_trainable(manifest: Manifest, engine: EngineState) -> None:
    trainable = engine.full_model.trainable
    changed = [name for name, saved in manifest.parameters.items() if saved.trainable != (name in trainable)]
    if changed:
        raise CheckpointError(
            f"{manifest.folder}: {len(changed)} parameters were frozen in one run and trained in the other, "
            f"first {changed[0]!r}: set requires_grad as it was when the checkpoint was saved."
        )
    for unit in engine.owned_units:
        for slot in unit.layout.slots if unit.grads is None else ():
            dtype = manifest.parameters[engine.full_model.owner(slot.name)].dtype
            if not convertible(dtype, unit.dtype):
                raise CheckpointError(
                    f"{manifest.fields.file}: {slot.name!r} was saved as {dtype}, and the model has it as "
                    f"{dtype_name(unit.dtype)}: build the model the checkpoint was saved from."
                )


def _check_base(manifest: Manifest, engine: EngineState) -> None:
    """Refuse a checkpoint whose frozen weights were left out where this engine has none, or those of another folder."""
    if not manifest.left_out or IMPORTED in manifest.about:  # one that was imported leaves them as the model has them
        return
    base = engine.base
    if base is None or not base.known.issuperset(manifest.left_out):
        raise CheckpointError(
            f"{needed_base(manifest)}, and this engine took them from no such folder: load that folder, wherever it "
            "is now (model.path, or Engine(weights=...))."
        )
    if base.digest:
        remedy = "go on with the base that the checkpoint was saved with, wherever it is now (model.path)"
        check_digest(manifest, base.folder, base.digest, remedy)


def convertible(saved: str, live: torch.dtype) -> bool:
    """Say whether a value of one dtype may be read into another: floats as another float, all else as it is."""
    return saved == dtype_name(live) or (saved in FLOATING and live.is_floating_point)


def buffer_problem(name: str, saved: TensorSpec, live: Tensor) -> str | None:
    """Return why a saved buffer is not the model's, or None. One that is empty in the model may have grown since."""
    if (saved.shape == tuple(live.shape) or live.numel() == 0) and convertible(saved.dtype, live.dtype):
        return None
    return (
        f"buffer {quote(name)} is {saved.dtype} {saved.shape} in the checkpoint, and {dtype_name(live.dtype)} "
        f"{tuple(live.shape)} in the model: build the model the checkpoint was saved from."
    )


def number_problem(name: str, saved: TensorSpec) -> str | None:
    """Return why what is saved is no number that a forward has written, or None."""
    if saved.shape == () and saved.dtype in ("int64", "float64"):
        return None
    return f"{quote(name)} is {saved.dtype} {saved.shape}, and a number of the model has this name. {USE_ANOTHER}"


def fill_named(
    name: str, values: Tensor, buffers: Mapping[str, Sequence[Tensor]], numbers: Mapping[str, WrittenNumber]
) -> None:
    """Copy a saved buffer into those of this name, or set the number."""
    for buffer in buffers.get(name, ()):
        fill_buffer(buffer, values)
    if name not in buffers:
        numbers[name].write(values)


def fill_buffer(live: Tensor, values: Tensor) -> None:
    """Copy a saved buffer into the model's, which takes its shape if it was empty."""
    if live.numel() == 0:  # in memory of its own: it may be a part of another tensor's
        live.data = live.new_empty(values.shape)
    live.copy_(values)


# --- the optimizer ------------------------------------------------------------------------------


def _check_kind(manifest: Manifest, engine: EngineState) -> None:
    saved, live = manifest.fields.entry("optimizer"), engine.optimizer.torch
    live_class, saved_class = type(live).__name__, _saved_class(manifest)
    if live_class != saved_class and {live_class, saved_class} not in ALIKE:
        raise CheckpointError(
            f"{manifest.folder} holds states of {saved_class}, this engine uses {live_class}: build it with "
            f"{OURS.get(saved_class, saved_class)}."
        )
    groups, saved_groups = len(live.param_groups), len(saved.entry("groups").value)
    if groups != saved_groups and saved_groups:  # one that was imported says nothing of groups
        raise CheckpointError(
            f"{manifest.folder} has {saved_groups} parameter groups, this engine {groups}: pass "
            "the param_groups it was saved with."
        )


def _saved_class(manifest: Manifest) -> str:
    return quote(manifest.fields.entry("optimizer").entry("class").value).strip("'")


def _check_groups(manifest: Manifest, engine: EngineState) -> None:
    """Check options of the groups: all that this torch knows, of the types that they had from the start."""
    live, groups = engine.optimizer.torch, manifest.fields.entry("optimizer").entry("groups").rows()
    for built, saved in zip(engine.optimizer.built, groups, strict=False):
        if _same_torch(manifest):
            for name in live.defaults if type(live).__name__ == _saved_class(manifest) else ():
                saved.entry(name)
        if "params" in saved.entries():
            saved.refuse("options without params, which are tensors")
        for name, value in saved.items():
            check_option(name, value, built, live.defaults.get(name, built.get(name)))
        if saved.entry("lr").number() < 0:
            saved.entry("lr").refuse("a number from 0")


def check_states(manifest: Manifest, stored: Mapping[str, Sequence[str]], engine: EngineState) -> None:
    """Check that moments are those of this optimizer: Adam's two, and for others the same in a whole group.

    `stored` has the states of every parameter by its name.
    """
    saved = manifest.fields.entry("optimizer")
    by_name, options = {name: set(states) for name, states in stored.items()}, saved.entry("groups").rows()
    first: dict[int, tuple[str, set[str]]] = {}
    check_scalars(manifest, set().union(*by_name.values()), engine)
    adam = type(engine.optimizer.torch) in (torch.optim.Adam, torch.optim.AdamW)
    for unit in engine.owned_units:
        for slot in unit.layout.slots if unit.grads is not None else ():
            if slot.numel == 0:
                continue
            states = by_name[engine.full_model.owner(slot.name)] - {MASTER, FROZEN}
            if EMA in manifest.about:
                _check_average(manifest, slot.name, states)
            states -= {AVERAGE}
            if adam and not (options and options[slot.group].entries().get("amsgrad")):
                expected = ADAM
            else:
                expected = first.setdefault(slot.group, (slot.name, states))[1]
            if states != expected:
                raise CheckpointError(
                    f"{manifest.fields.file}: tensors have the states {_listed(states)} of {quote(slot.name)}, and "
                    f"should have {_listed(expected)}. {USE_ANOTHER}"
                )
    has_moments = any(by_name[name] & ADAM for name in by_name)
    if adam and has_moments and manifest.step < COUNTED:
        saved.entry("scalars").entry("step").one_of(float(manifest.step))


def _check_average(manifest: Manifest, name: str, states: set[str]) -> None:
    if AVERAGE not in states:
        raise CheckpointError(f"{manifest.fields.file}: tensors have no average of {quote(name)}. {USE_ANOTHER}")


def _listed(states: set[str]) -> str:
    return ", ".join(map(quote, sorted(states))) or "none"


def _same_torch(manifest: Manifest) -> bool:
    """Say whether this torch saved it: another one may have other names of options and states."""
    return manifest.about.get("torch") == torch.__version__


# --- the scheduler ------------------------------------------------------------------------------


def _check_scheduler(manifest: Manifest, engine: EngineState) -> None:
    if engine.scheduler is None:
        return
    if manifest.value("scheduler") is None:
        groups = manifest.fields.entry("optimizer").entry("groups").rows()
        if any("initial_lr" in group.entries() for group in groups):  # torch's schedulers write it there
            manifest.fields.entry("scheduler").refuse("the state of the scheduler that set initial_lr")
        return
    saved, live = manifest.fields.entry("scheduler"), engine.scheduler.state_dict()
    if _same_torch(manifest) and saved.entries().keys() != {str(key) for key in live}:
        raise CheckpointError(
            f"{saved.file}: scheduler has the entries of another one ({_listed(set(saved.entries()))}; this engine's "
            f"has {_listed({str(key) for key in live})}): build the engine with the scheduler it was saved with."
        )
    for name, value in live.items():
        if str(name) in saved.entries():
            entry = saved.entry(str(name))
            check_alike(entry, value)
            if name in COUNTERS:
                entry.integer(-1)
            if name in PER_GROUP:
                entry.rows(len(engine.optimizer.torch.param_groups))
    _try(manifest, engine.scheduler)


def _try(manifest: Manifest, scheduler: Any) -> None:
    """Let the scheduler load its state, which is put back: a class of the user's may have rules of its own."""
    before = deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(from_json(manifest.value("scheduler"), before))
    except Exception as error:
        raise CheckpointError(
            f"{manifest.fields.file}: scheduler is not taken by {type(scheduler).__name__} ({type(error).__name__}: "
            f"{quote(str(error))}): build the engine with the scheduler it was saved with."
        ) from error
    finally:
        scheduler.load_state_dict(before)


# --- random states ------------------------------------------------------------------------------


def check_streams(file: str, tensors: Mapping[str, Tensor], python_rng: Field, device: torch.device) -> None:
    """Try random states on generators that nobody uses, `device` being the engine's. Raises CheckpointError."""
    for name, attempt in _attempts(tensors, python_rng.value, device):
        try:
            attempt()
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{file}: {name} is not a random state ({quote(str(error))}). {USE_ANOTHER}"
            ) from None


def _attempts(
    tensors: Mapping[str, Tensor], python_rng: Mapping[str, Any], device: torch.device
) -> Iterator[tuple[str, Callable[[], Any]]]:
    version, words, cached = python_rng["python"]
    kind, position, has_cached, gauss = python_rng["numpy"]
    yield "rng:torch", lambda: torch.Generator().set_state(tensors["torch"])
    if "accelerator" in tensors and device.type != "cpu":
        yield "rng:accelerator", lambda: torch.Generator(device).set_state(tensors["accelerator"])
    yield "python_rng", lambda: random.Random().setstate((version, tuple(words), cached))
    state = (kind, tensors["numpy"].numpy(), position, has_cached, gauss)
    yield "rng:numpy", lambda: _try_numpy(state)


def _try_numpy(state: tuple[Any, ...]) -> None:
    words = state[1]
    if words.min() < 0 or words.max() >= 2**32:
        raise ValueError("words lie outside of 32 bits")
    numpy.random.RandomState().set_state((state[0], words.astype(numpy.uint32), *state[2:]))
