"""`zero3d ckpt ls | verify | show | diff | export | import | prune`: checkpoints in one process, without ranks or GPU.

ls      what a folder holds, and which of it is whole                       manifest, parts and sizes
verify  every byte and every box                                            all of it
show    what is in one: parameters, states, options, place in the data      parts and headers, of one tensor its values
diff    two against each other, tensor by tensor, whatever meshes they have parts, headers and all values
export  a Hugging Face folder                                               all of it, verified first
import  another trainer's checkpoint, as one of ours               all of it
prune   what may go

A FOLDER is a run's output, its `checkpoints`, one step-N, or a URL that has copies (checkpoint.to) or is one; a STEP is
one step-N, or the newest of such a folder.
Nothing of a model is run, and no pickle is read. Exit code 1: `verify` found damage, `diff` a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from zero3d.checkpoint.copies import Copies, Look, copy_export, find_places, located, refuse_checkpoints, told
from zero3d.checkpoint.folders import MANIFEST, checkpoints, discard, is_checkpoint, leftovers, remove
from zero3d.checkpoint.inventory import (
    CHECKPOINTS,
    QUICK,
    Listed,
    directory_of,
    inventory,
    inventory_of_copies,
    plan_pruning,
    plan_pruning_copies,
    size_of,
)
from zero3d.errors import CheckpointError, ConfigError, short
from zero3d.memory.file_lock import is_held
from zero3d.stores.cache import shown
from zero3d.stores.urls import check_url, is_url
from zero3d.tools.cli import ckpt_import, ckpt_text
from zero3d.train.lock import LOCK, FolderLock, check_free

if TYPE_CHECKING:
    from zero3d.checkpoint.examine import Examination
    from zero3d.checkpoint.stored_states import StoredStates

ACTIONS = {
    "ls": "list the checkpoints of a folder: step, time, mesh, size, format, and whether they are whole",
    "verify": "check every byte and every box of checkpoints; exit code 1 if one is damaged",
    "show": "show what a checkpoint holds, or statistics of one tensor's values",
    "diff": "say which tensors of two checkpoints differ, and by how much; exit code 1 if any does",
    "export": "write the weights of a checkpoint as a Hugging Face folder",
    "import": "convert a checkpoint of DeepSpeed or torch.distributed.checkpoint into one of zero3d",
    "prune": "remove older checkpoints; without --yes, only show which",
}
FOLDER = "a run's output, its checkpoints, or one step-N"
COPIES = "a URL of copies (checkpoint.to)"
STEP = "a step-N, or a folder or URL, which means its newest step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and what each takes."""
    actions = parser.add_subparsers(dest="action", metavar="|".join(ACTIONS), required=True)
    made = {
        name: actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        for name, summary in ACTIONS.items()
    }
    for name in ("ls", "prune"):
        made[name].add_argument(
            "folder", metavar="FOLDER", help=f"{FOLDER if name == 'ls' else FOLDER[:-16]}; or {COPIES}"
        )
    made["verify"].add_argument("words", nargs="+", metavar="FOLDER", help=f"{FOLDER}; or {COPIES}; several, too")
    made["show"].add_argument("step", metavar="STEP", help=STEP)
    made["show"].add_argument("pattern", nargs="?", metavar="NAME-PATTERN", help="of parameters: 'layers.0.*'")
    made["diff"].add_argument("first", metavar="A", help=STEP)
    made["diff"].add_argument("second", metavar="B", help=STEP)
    export = made["export"]
    export.add_argument("step", metavar="STEP", help=STEP)
    export.add_argument("folder", metavar="FOLDER", help="the folder to write, new or empty, or a URL")
    export.add_argument(
        "--config",
        metavar="PATH",
        help="the model's config.json or folder, a preset, or a run's config.yaml (default: that of the run's folder); "
        "none: only weights and buffers, under the model's own names",
    )
    export.add_argument(
        "--as",
        dest="kind",
        choices=("adapter", "merged", "base", "whole"),
        help="for a model with adapters: the adapters for PEFT (default), or full weights with the adapters merged in "
        "or without them",
    )
    export.add_argument(
        "--base", metavar="FOLDER", help="the folder of frozen weights that the checkpoint left out, if it was moved"
    )
    export.add_argument("--ema", action="store_true", help="export the averages of the weights (train.ema)")
    ckpt_import.declare(made["import"])
    prune = made["prune"]
    prune.add_argument(
        "--keep", type=int, metavar="K", help="how many of the newest whole checkpoints stay, beside the best"
    )
    prune.add_argument("--leftovers", action="store_true", help="also remove leftovers of killed saves")
    prune.add_argument("--yes", action="store_true", help="remove them; without --yes nothing is removed")
    for each in made.values():
        each.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Do what the action says; return the exit code."""
    actions: Mapping[str, Callable[[argparse.Namespace], int]] = {
        "ls": _list,
        "verify": _verify,
        "show": _show,
        "diff": _diff,
        "export": _export,
        "import": _import,
        "prune": _prune,
    }
    try:
        return actions[arguments.action](arguments)
    except RecursionError:
        raise CheckpointError("a manifest is nested too deeply to be shown: use another step-N.") from None


def given(folder: str) -> Path:
    """Return a folder that was typed. Raises CheckpointError where there is none."""
    path = os.path.expanduser(folder)
    if not os.path.isdir(path):  # a Path's own raises for long names
        found = "is not a folder" if os.path.exists(path) else "is not there"
        raise CheckpointError(f"{short(folder)} {found}: type {FOLDER}.")
    return Path(path)


def step_in(folder: str) -> Path:
    """Return the checkpoint that was typed, or the newest of a folder. Raises CheckpointError."""
    return checkpoints_in(folder)[-1]


def checkpoints_in(folder: str) -> list[Path]:
    """Return the checkpoint that was typed, or all of a folder. Raises CheckpointError where there is none."""
    if is_url(folder):
        check_url(folder)
        return list(find_places(folder).values()) or [located(folder)]
    path = given(folder)
    found = [path] if is_checkpoint(path) else list(checkpoints(directory_of(path)).values())
    if not found:
        raise CheckpointError(f"no checkpoint in {short(folder)}: it has no step-N folder with a {MANIFEST}.")
    return found


def output_of(directory: Path) -> Path | None:
    """Return the output folder of the run whose checkpoints these are; None for a directory that is no run's."""
    root = directory.resolve().parent
    return root if directory.resolve().name == CHECKPOINTS else None


def answer(arguments: argparse.Namespace, data: Any, lines: Iterator[str]) -> None:
    """Print what was found: as one JSON object, or in lines."""
    print(json.dumps(ckpt_text.plain(data), indent=2) if arguments.json else "\n".join(lines))


# --- the actions ----------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    if is_url(arguments.folder):
        data = list_copies(arguments.folder)
        answer(arguments, data, ckpt_text.listed(data))
        return 0
    folder = given(arguments.folder)
    listed = inventory(folder)
    one = is_checkpoint(folder)
    directory = folder.parent if one else directory_of(folder)
    left = [] if one else leftovers(directory)
    if not listed and not left:
        raise CheckpointError(f"no checkpoint in {short(folder)}: it has no step-N folder with a {MANIFEST}.")
    root = output_of(directory)
    running = root is not None and is_held(root / LOCK)
    data = {
        "directory": directory,
        "running": running,
        "checked": QUICK,
        "checkpoints": [_as_json(each) for each in listed],
        "leftovers": [{"name": each.name, "path": each, "bytes": size_of(each)} for each in left],
    }
    answer(arguments, data, ckpt_text.listed(data))
    return 0


def list_copies(url: str) -> dict[str, Any]:
    """Return as data what is below a URL. Raises ConfigError and CheckpointError."""
    check_url(url)
    listed, look = inventory_of_copies(url), look_at_copies(url)
    if not listed and not look.leftovers:
        located(url)  # says that there is none
    return {
        "directory": url,
        "running": False,
        "checked": QUICK,
        "checkpoints": [_as_json(each) for each in listed],
        "leftovers": [_left_copy(url, look, name) for name in look.leftovers],
    }


def look_at_copies(url: str) -> Look:
    """Return what a listing of a URL says. Raises CheckpointError."""
    with told(url, "read"):
        return Copies(url).look()


def _left_copy(url: str, look: Look, name: str) -> dict[str, Any]:
    objects = look.objects[name].values()
    return {"name": name, "path": f"{url.rstrip('/')}/{name}", "bytes": sum(stored.size for stored in objects)}


def _as_json(each: Listed) -> dict[str, Any]:
    manifest = each.manifest
    return {
        "name": each.folder.name,
        "path": shown(each.folder),
        "step": each.step,
        "saved": None if each.saved is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.saved)),
        "mesh": None if manifest is None else manifest.mesh._asdict(),
        "ranks": None if manifest is None else manifest.mesh.world,
        "bytes": each.size,
        "format": None if manifest is None else manifest.format,
        "state": "whole" if each.fault is None else "retired" if each.retired else "damaged",
        "fault": each.fault,
        "best": each.best,
    }


def _verify(arguments: argparse.Namespace) -> int:
    from zero3d.checkpoint.examine import examine

    folders = [each for word in arguments.words for each in checkpoints_in(word)]
    found = []
    for folder in folders:
        start = time.perf_counter()
        examined = examine(folder)
        found.append(_examined(examined, time.perf_counter() - start))
        if not arguments.json:
            print("\n".join(ckpt_text.verified(found[-1])), flush=True)  # the next one may take minutes
    if arguments.json:
        answer(arguments, {"checkpoints": found}, iter(()))
    return int(any(each["faults"] for each in found))


def _examined(found: Examination, seconds: float) -> dict[str, Any]:
    return {
        "path": shown(found.folder),
        "step": found.step,
        "mesh": found.mesh,
        "state": "whole" if found.whole else "damaged",
        "files": found.files,
        "bytes": found.bytes,
        "tensors": found.tensors,
        "parameters": found.parameters,
        "seconds": seconds,
        "foreign": list(found.foreign),
        "faults": [{"file": fault.file, "fault": fault.message} for fault in found.faults],
    }


def _show(arguments: argparse.Namespace) -> int:
    from zero3d.checkpoint.stored_states import StoredStates

    data = contents(StoredStates(step_in(arguments.step)), arguments.pattern)
    answer(arguments, data, ckpt_text.shown(data))
    return 0


def contents(stored: StoredStates, pattern: str | None) -> dict[str, Any]:
    """Return what a checkpoint holds; with a pattern its parameters of such names, of a single one statistics.

    Raises CheckpointError.
    """
    from zero3d.checkpoint.stored_states import statistics

    manifest = stored.manifest
    optimizer = manifest.value("optimizer")
    names = [name for name in stored.parameters if pattern is None or fnmatchcase(name, pattern)]
    if not names:
        near = [name for name in stored.parameters if pattern is not None and pattern.strip("*") in name][:3]
        meant = f"type {', '.join(near)}" if near else f"names are like {next(iter(stored.parameters), 'none')}"
        raise CheckpointError(f"{stored.folder} has no parameter {short(pattern)!r}: {meant}.")
    single = names[0] if len(names) == 1 else None
    return {
        "path": shown(stored.folder),
        "step": manifest.step,
        "format": manifest.format,
        "mesh": manifest.mesh._asdict(),
        "ranks": manifest.mesh.world,
        "about": dict(manifest.about),
        "elements": {
            "all": sum(prod(each.shape) for each in stored.parameters.values()),
            "trainable": sum(prod(each.shape) for each in stored.parameters.values() if each.trainable),
        },
        "count": len(stored.parameters),
        "base": manifest.value("base") and {**manifest.value("base"), "parameters": len(manifest.left_out)},
        "parameters": [_parameter(stored, name) for name in names],
        "pattern": pattern,
        "statistics": None
        if single is None
        else {state: statistics(stored, single, state)._asdict() for state in stored.states.get(single, {})},
        "optimizer": {"class": optimizer["class"], "groups": optimizer["groups"], "scalars": dict(stored.scalars)},
        "scheduler": manifest.value("scheduler"),
        "loss_scale": manifest.value("loss_scale"),
        "exact": manifest.value("exact"),
        "loop": manifest.value("loop"),
        "ranks_own": [
            {
                "rank": rank,
                "buffers": {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in own.buffers.items()},
                "random": sorted({*own.streams, *own.python_rng}),
            }
            for rank, own in enumerate(stored.own)
        ],
    }


def _parameter(stored: StoredStates, name: str) -> dict[str, Any]:
    from zero3d.precision import dtype_name

    spec = stored.parameters[name]
    states = stored.states.get(name, {})
    return {
        "name": name,
        "shape": spec.shape,
        "dtype": spec.dtype,
        "trainable": spec.trainable,
        "base": spec.in_base,
        "states": {state: dtype_name(dtype) for state, dtype in states.items()},
    }


def _diff(arguments: argparse.Namespace) -> int:
    from zero3d.checkpoint.difference import compare
    from zero3d.checkpoint.stored_states import StoredStates

    a, b = (StoredStates(step_in(each)) for each in (arguments.first, arguments.second))
    compared = compare(a, b)
    data = {
        "a": {"path": shown(a.folder), "step": a.manifest.step, "states": compared.hashes[0]},
        "b": {"path": shown(b.folder), "step": b.manifest.step, "states": compared.hashes[1]},
        "equal": compared.equal,
        "tensors": compared.tensors,
        "differences": [each._asdict() for each in compared.differences],
        "facts": {name: {"a": one, "b": other} for name, (one, other) in compared.facts.items()},
    }
    answer(arguments, data, ckpt_text.compared(data))
    return 0 if compared.equal else 1


def _import(arguments: argparse.Namespace) -> int:
    done = ckpt_import.imported(arguments.source, arguments.folder, arguments.weights_only)
    answer(arguments, done, ckpt_import.lines(done))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from zero3d.tools.cli.ckpt_export import Asked, export

    asked = Asked(arguments.config, arguments.kind, arguments.base, arguments.ema)
    step = step_in(arguments.step)
    if is_url(arguments.folder):
        check_url(arguments.folder)
        refuse_checkpoints(arguments.folder)
        with TemporaryDirectory() as place:
            data = export(step, Path(place) / "export", asked)
            copy_export(data["folder"], arguments.folder)
        data |= {"folder": arguments.folder}
    else:
        data = export(step, Path(arguments.folder), asked)
    data |= {"checkpoint": shown(step)}
    answer(arguments, data, ckpt_text.exported(data))
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    chosen = arguments.keep, arguments.leftovers, arguments.yes
    if is_url(arguments.folder):
        data = prune_copies(arguments.folder, *chosen)
    else:
        data = prune(given(arguments.folder), *chosen)
    answer(arguments, data, ckpt_text.pruned(data))
    return 0


def prune(folder: Path, keep: int | None, and_leftovers: bool, yes: bool) -> dict[str, Any]:
    """Choose what goes, and remove it if `yes`; return both as data. Raises ConfigError and CheckpointError."""
    _check_pruning(keep, and_leftovers)
    with ExitStack() as stack:
        directory = directory_of(folder).resolve()
        root = directory.parent if directory.name == CHECKPOINTS else None
        if root is not None:
            check_free(root)
            if yes and ((root / "config.yaml").exists() or (root / LOCK).exists()):  # no run starts meanwhile
                stack.enter_context(FolderLock()).acquire(root)
        planned = plan_pruning(folder, keep, and_leftovers)
        sizes = {each: size_of(each) for each in planned.leftovers}
        removed: list[Path] = []
        if yes:
            for each in planned.doomed:
                assert each.step is not None
                discard(directory, each.step)
                removed += [each.folder] if not each.folder.exists() else []
            for left in planned.leftovers:
                remove(left)
                removed += [left] if not left.exists() else []
    return {
        "directory": planned.directory,
        "keep": keep,
        "kept": [_described(each) for each in planned.kept],
        "doomed": [_described(each) for each in planned.doomed],
        "leftovers": [{"name": each.name, "path": each, "bytes": size} for each, size in sizes.items()],
        "removed": removed if yes else None,
    }


def prune_copies(url: str, keep: int | None, and_leftovers: bool, yes: bool) -> dict[str, Any]:
    """Choose what goes of copies below a URL, and remove it if `yes`; return both as data.

    No lock says whether a run writes there. Raises ConfigError and CheckpointError.
    """
    check_url(url)
    _check_pruning(keep, and_leftovers)
    look = look_at_copies(url)
    planned = plan_pruning_copies(url, look, keep, and_leftovers)
    going = [each.folder.name for each in planned.doomed] + [each.name for each in planned.leftovers]
    if yes:
        with told(url, "pruned"):
            Copies(url).discard(going, look)
    return {
        "directory": url,
        "keep": keep,
        "kept": [_described(each) for each in planned.kept],
        "doomed": [_described(each) for each in planned.doomed],
        "leftovers": [_left_copy(url, look, each.name) for each in planned.leftovers],
        "removed": [f"{url.rstrip('/')}/{name}" for name in going] if yes else None,
    }


def _check_pruning(keep: int | None, and_leftovers: bool) -> None:
    if keep is None and not and_leftovers:
        raise ConfigError("nothing to remove was named: type --keep K, --leftovers, or both.")
    if keep is not None and keep < 1:
        raise ConfigError(f"--keep {keep}: at least 1 stays, the newest whole one.")


def _described(each: Listed) -> dict[str, Any]:
    return {
        "name": each.folder.name,
        "path": shown(each.folder),
        "step": each.step,
        "bytes": each.size,
        "best": each.best,
        "state": "whole" if each.fault is None else "damaged",
    }
