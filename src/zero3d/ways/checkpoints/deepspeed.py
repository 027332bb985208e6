"""DeepSpeed's checkpoints of ZeRO stages 1 to 3, in any number of files, and universal ones.

    global_step3/mp_rank_00_model_states.pt                     stages 1, 2: weights in 16 bits, shapes, frozen weights
                 zero_pp_rank_R_mp_rank_00_model_states.pt      stage 3: shapes, this rank's parts of frozen weights
                 [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   this rank's flat part of masters and moments
    latest       the name of the last folder
    global_step3_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt   universal: a tensor in a file

Stages 1 and 2: a rank's flat part of a group is a slice of all its parameters, one behind the other;
`param_slice_mappings` says which of their elements it has. Stage 3: each parameter is cut into equal parts, the last
one padded, and a rank's flat part has its own of each. Layouts are those that DeepSpeed 0.19 writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3d.errors import CheckpointError, short
from zero3d.reading import Unreadable, read_text
from zero3d.ways.checkpoints.archives import map_file, read_torch
from zero3d.ways.checkpoints.foreign import MOMENTS, MOST_DIMS, Foreign

LATEST, LONGEST = "latest", 1 << 12  # bytes of its file
RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
MASTER = "master"


def found(folder: Path) -> Path | None:
    """Return the folder of a checkpoint of DeepSpeed's, this one or that which `latest` names; None without one."""
    if (folder / LATEST).is_file():
        try:
            name = read_text(folder / LATEST, LONGEST).strip()
        except (OSError, Unreadable) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{folder / LATEST} {why}: name the folder of a step itself.") from error
        if not name.isprintable() or Path(name).parts != (name,) or name == "..":
            raise CheckpointError(
                f"{folder / LATEST} names {short(ascii(name))}, which is not a folder beside it: name the folder of a "
                "step itself."
            )
        folder = folder / name
    if any(folder.glob("*_optim_states.pt")) or (folder / "zero").is_dir():
        return folder
    return None


def read(folder: Path) -> Foreign:
    """Read a checkpoint that `found` has. Raises CheckpointError."""
    if (folder / "zero").is_dir():
        return _universal(folder)
    ranks = _ranks(folder)
    models = _models(folder)
    source = f"DeepSpeed {short(models[0].get('ds_version', ''))} ({folder.name})"
    foreign = Foreign(source, int(models[0].get("global_steps", 0)))
    shapes = {name: _shape(name, shape) for group in models[0]["param_shapes"] for name, shape in group.items()}
    for state in (MASTER, *MOMENTS):
        flat = [list(_flat(rank, state)) for rank in ranks]
        if not flat[0]:
            continue
        whole = _of_stage_3(flat, shapes) if "fp32_flat_groups" in ranks[0] else _of_slices(flat, ranks, shapes)
        for name, values in whole:
            if state == MASTER:
                foreign.masters[name] = values
            else:
                foreign.moments.setdefault(name, {})[state] = values
    foreign.step = _applied(ranks[0], foreign.step - int(models[0].get("skipped_steps", 0)))
    _add_frozen(foreign, models)
    _add_tied(foreign, models[0])
    return foreign


def _ranks(folder: Path) -> list[Any]:
    """Return the optimizer's states of all ranks. Raises CheckpointError where some are not there."""
    found = [match for path in folder.iterdir() if (match := RANK.search(path.name))]
    if any(match[2] != "00" for match in found):
        raise CheckpointError(
            f"{folder} was saved with model parallelism: make it universal with DeepSpeed's ds_to_universal first."
        )
    if twice := [match.string for match in found if sum(int(other[1]) == int(match[1]) for other in found) > 1]:
        raise CheckpointError(f"{folder} has {' and '.join(twice[:2])} of one rank: leave one of them.")
    files = {int(match[1]): match.string for match in found}
    read = {rank: _saved(folder, name).get("optimizer_state_dict", {}) for rank, name in sorted(files.items())}
    counted = next(iter(read.values())).get("partition_count", len(read))
    wanted = max(counted) if isinstance(counted, (list, tuple)) else counted
    if list(read) != list(range(wanted)):
        raise CheckpointError(f"{folder} was saved by {wanted} ranks, and has files of {len(read)}: copy all of them.")
    return list(read.values())


def _models(folder: Path) -> list[Any]:
    """Return what is known of the model: by rank at stage 3."""
    names = [path.name for path in folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt")]
    by_rank = {int(name.split("_")[3]): name for name in names}
    return [_saved(folder, by_rank[rank]) for rank in sorted(by_rank)] or [_saved(folder, "mp_rank_00_model_states.pt")]


def _saved(folder: Path, name: str) -> Any:
    return read_torch(map_file(folder, name))


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    """Return a parameter's shape. Raises CheckpointError."""
    if (
        not isinstance(shape, (tuple, list))
        or len(shape) > MOST_DIMS
        or any(type(size) is not int or size < 0 for size in shape)
    ):
        raise CheckpointError(f"the shape of {short(name)} is {short(repr(shape))}: copy the files again.")
    return tuple(shape)


def _base(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of torch's optimizer, which both layouts have under another name."""
    found = rank.get("base_optimizer_state", rank.get("optimizer_state_dict", {}))
    return found if isinstance(found, dict) else {"state": dict(enumerate(found))}


def _flat(rank: Mapping[str, Any], state: str) -> Iterator[Tensor]:
    """Yield a rank's flat parts of a state, by group; nothing where it has none."""
    if state == MASTER:
        yield from rank.get("fp32_flat_groups", rank.get("single_partition_of_fp32_groups", ()))
        return
    states = _base(rank).get("state", {})
    for index in sorted(states):
        if state in states[index]:
            yield states[index][state]


def _applied(rank: Mapping[str, Any], default: int) -> int:
    """Return the number of steps that Adam counted."""
    for state in _base(rank).get("state", {}).values():
        if "step" in state:
            return int(state["step"])
    return default


def _of_slices(
    flat: Sequence[Sequence[Tensor]], ranks: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters of stages 1 and 2: slices of all ranks, one behind the other."""
    parts: dict[str, list[Tensor]] = {}
    for of_rank, rank in zip(flat, ranks, strict=True):
        mappings = rank.get("param_slice_mappings")
        if mappings is None or len(mappings) != len(of_rank):
            raise CheckpointError(
                "a file of DeepSpeed's does not say which elements it has: save it with 0.9 or newer."
            )
        for values, mapping in zip(of_rank, mappings, strict=True):
            _check_apart(values, mapping)
            for name, at in mapping.items():
                parts.setdefault(name, []).append(values[at.start : at.start + at.numel])
    yield from _joined(parts, shapes)


def _check_apart(values: Tensor, mapping: Mapping[str, Any]) -> None:
    """Raise CheckpointError where slices of a flat part overlap, or reach beyond it."""
    end, before = 0, ""
    for start, numel, name in sorted((at.start, at.numel, name) for name, at in mapping.items()):
        if type(start) is not int or type(numel) is not int or numel < 0 or not end <= start <= values.numel() - numel:
            raise CheckpointError(
                f"a file of DeepSpeed's has {short(numel)} elements of {short(name)} at {short(start)}, and "
                f"{f'{short(before)} up to {end:,}' if before else 'nothing before'}, in a flat part of "
                f"{values.numel():,}: copy it again."
            )
        end, before = start + numel, name


def _of_stage_3(
    flat: Sequence[Sequence[Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters of stage 3: an equal part from every rank."""
    whole = [torch.cat([values.flatten() for values in of_rank]) for of_rank in flat]
    parts: dict[str, list[Tensor]] = {}
    start = 0
    for name, shape in shapes.items():
        size = -(-prod(shape) // len(whole))
        parts[name] = [values[start : start + size] for values in whole]
        start += size
    yield from _joined(parts, shapes)


def _joined(parts: Mapping[str, list[Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        found = parts.get(name, [])
        if (numel := sum(part.numel() for part in found)) < prod(shape):
            raise CheckpointError(f"the files have {numel:,} of {prod(shape):,} elements of {name}: copy all of them.")
        values = torch.cat([part.flatten() for part in found] or [torch.empty(0)])
        yield name, values[: prod(shape)].reshape(shape)


def _add_frozen(foreign: Foreign, models: Sequence[Mapping[str, Any]]) -> None:
    """Take frozen weights, whole or in a part from every rank, and buffers."""
    shapes = {name: _shape(name, shape) for name, shape in (models[0].get("frozen_param_shapes") or {}).items()}
    fragments = [dict(model["frozen_param_fragments"]) for model in models] if shapes else []
    parts = {name: [of_model[name] for of_model in fragments] for name in shapes}
    foreign.frozen |= _joined(parts, shapes)
    for name in models[0].get("buffer_names") or ():
        if isinstance(values := models[0]["module"].get(name), Tensor):
            foreign.buffers[name] = values


def _add_tied(foreign: Foreign, model: Mapping[str, Any]) -> None:
    """Leave out other names of a parameter: the model that loads them ties them itself."""
    for name in model.get("shared_params") or {}:
        foreign.masters.pop(name, None)
        foreign.moments.pop(name, None)


def _universal(folder: Path) -> Foreign:
    foreign = Foreign(f"a universal checkpoint of DeepSpeed's ({folder.name})")
    for of_parameter in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        files = {path.stem: str(path.relative_to(folder)) for path in of_parameter.glob("*.pt")}
        if "fp32" not in files:
            raise CheckpointError(
                f"{of_parameter} has no fp32.pt: it is not a universal checkpoint, or was not copied whole."
            )
        foreign.masters[of_parameter.name] = _tensor(folder, files["fp32"])
        if moments := {state: _tensor(folder, files[state]) for state in MOMENTS if state in files}:
            foreign.moments[of_parameter.name] = moments
        if "step" in files:
            foreign.step = int(_tensor(folder, files["step"]))
    for path in folder.glob("*model_states.pt"):
        model = _saved(folder, path.name)
        foreign.step = foreign.step or int(model.get("global_steps", 0))
        _add_tied(foreign, model)
        break
    return foreign


def _tensor(folder: Path, name: str) -> Tensor:
    saved = _saved(folder, name)
    values = saved.get("param", saved.get("step")) if isinstance(saved, dict) else saved
    if not isinstance(values, (Tensor, int, float)):
        raise CheckpointError(f"{folder / name} has no tensor: it is not a universal checkpoint.")
    return torch.as_tensor(values)
