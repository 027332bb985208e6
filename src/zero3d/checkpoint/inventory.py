"""What a directory of checkpoints holds, by a look that reads no tensors: for lists, and for what may go.

looked at       manifest.json and every rank's part against their checksums; every file of tensors by the size that its
                header says, of a store by its name
not looked at   bytes of tensors, which `examine.py` hashes
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero3d.checkpoint.copies import Copies, Look, find_places, told
from zero3d.checkpoint.folders import MANIFEST, checkpoints, is_checkpoint, leftovers, step_of
from zero3d.checkpoint.integrity import check_size
from zero3d.checkpoint.manifest import Manifest, file_of
from zero3d.checkpoint.manifest_parser import open_manifest, read_part_text
from zero3d.errors import CheckpointError, RetiredFormatError, short
from zero3d.stores.cache import origin

QUICK = "manifest and parts by their checksums, files of tensors by their sizes; zero3d ckpt verify reads all bytes"
CHECKPOINTS, BEST = "checkpoints", "best"
OF_WHAT_IS_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EMLINK)  # errors that are faults


@dataclass(frozen=True)
class Listed:
    """Describes one checkpoint of a directory.

    manifest  None where it cannot be read
    saved     when, in seconds since 1970; None where nobody can say
    fault     what the look at it has found; None where it is whole as far as that goes
    best      the run's link points to it
    unread    the fault is that the disk or a right denied a look, which says nothing on what is there
    retired   the fault is a format that only older versions read, for which it may be whole
    """

    folder: Path
    step: int | None
    manifest: Manifest | None
    saved: float | None
    size: int
    fault: str | None
    best: bool
    unread: bool = False
    retired: bool = False


def directory_of(folder: Path) -> Path:
    """Return the directory that holds the checkpoints of a run's output folder, or of what is that directory itself."""
    inner = folder / CHECKPOINTS
    return inner if inner.is_dir() and not checkpoints(folder) else folder


def inventory(folder: Path) -> list[Listed]:
    """Return the checkpoints of a directory, or the one that a folder is, oldest first. Raises CheckpointError."""
    if is_checkpoint(folder):
        return [look_at(folder, best=best_step(folder.parent) == step_of(folder) is not None)]
    directory = directory_of(folder)
    best = best_step(directory)
    return [look_at(each, step == best) for step, each in checkpoints(directory).items()]


def inventory_of_copies(url: str) -> list[Listed]:
    """Return the checkpoints below a URL, or the one that it is, oldest first. Raises CheckpointError."""
    found = find_places(url)
    with told(url, "read"):
        best = Copies(url).best()
    return [look_at(place, step == best) for step, place in found.items()]


def look_at(folder: Path, best: bool = False) -> Listed:
    """Look at one checkpoint, without a word on the bytes of its tensors."""
    manifest, fault, unread, retired, step = None, None, False, False, step_of(folder)
    try:
        manifest = open_manifest(folder)
        check_files(manifest)
        check_name(manifest)
    except CheckpointError as error:
        fault, cause = str(error), error.__cause__
        unread = isinstance(cause, OSError) and cause.errno not in OF_WHAT_IS_THERE
        retired = isinstance(error, RetiredFormatError)
    if step is None and manifest is not None:
        step = manifest.step
    return Listed(folder, step, manifest, _saved(folder), size_of(folder), fault, best, unread, retired)


def check_name(manifest: Manifest) -> None:
    """Refuse a folder that is named as one of another step: `--resume auto` goes by names. Raises CheckpointError."""
    step = step_of(manifest.folder)
    if step is not None and step != manifest.step:
        raise CheckpointError(
            f"{manifest.folder} has the name of step {step}, and its {MANIFEST} is of step {manifest.step}: rename it, "
            "if it was renamed; else use another step-N."
        )


def check_files(manifest: Manifest) -> None:
    """Check that all files are there, parts by their checksums, tensors by their sizes. Raises CheckpointError."""
    for rank in range(manifest.mesh.world):
        read_part_text(manifest.folder, rank, list(manifest.parts.values())[rank])
        check_size(manifest.folder / file_of(rank))


def best_step(directory: Path) -> int | None:
    """Return the step to which a run's link of its lowest held-out loss points."""
    try:
        target = (directory / BEST).readlink().name
    except OSError:
        return None
    return next((step for step, each in checkpoints(directory).items() if each.name == target), None)


def size_of(folder: Path) -> int:
    """Return the bytes of the regular files of a folder, or of its objects in a store."""
    if (known := origin(folder)) is not None:
        return sum(stored.size for stored in known.objects.values())
    try:
        found = [entry.lstat() for entry in folder.iterdir()]
    except OSError:
        return 0
    return sum(each.st_size for each in found if stat.S_ISREG(each.st_mode))


def _saved(folder: Path) -> float | None:
    if origin(folder) is not None:
        return None
    try:
        return (folder / MANIFEST).lstat().st_mtime
    except OSError:
        return None


@dataclass(frozen=True)
class Pruning:
    """Says which checkpoints of a directory or a URL stay and which go, and which leftovers of killed saves go."""

    directory: Path | str
    kept: Sequence[Listed]
    doomed: Sequence[Listed]
    leftovers: Sequence[Path]


def plan_pruning(folder: Path, keep: int | None, and_leftovers: bool) -> Pruning:
    """Choose what may go: the `keep` newest whole ones and the best one stay, damaged ones and older ones do not.

    Links stay, and count for nothing: what they lead to is elsewhere. None keeps all. Where nothing is whole nothing is
    chosen. Raises CheckpointError.
    """
    directory = directory_of(folder)
    if is_checkpoint(directory):
        raise CheckpointError(f"{short(folder)} is one checkpoint: give the directory that holds it, or remove it.")
    listed = [each for each in inventory(directory) if not each.folder.is_symlink()]
    found = leftovers(directory)
    if not listed and not found:
        raise CheckpointError(f"no checkpoint in {short(folder)}: it has no step-N folder with a {MANIFEST}.")
    return _choose(directory, listed, found if and_leftovers else [], keep)


def plan_pruning_copies(url: str, look: Look, keep: int | None, and_leftovers: bool) -> Pruning:
    """Choose likewise among copies below a URL. Raises CheckpointError."""
    listed = inventory_of_copies(url)
    if not look.objects:
        raise CheckpointError(f"no checkpoint below {short(url)}: give the URL that step-N lie below.")
    return _choose(url, listed, [Path(name) for name in look.leftovers] if and_leftovers else [], keep)


def _choose(directory: Path | str, listed: Sequence[Listed], found: Sequence[Path], keep: int | None) -> Pruning:
    """Choose among what was looked at. Raises CheckpointError where something cannot be read, or nothing is whole."""
    if unread := [each.fault for each in listed if each.unread or each.retired]:
        raise CheckpointError(f"nothing is removed while {len(unread)} of {len(listed)} cannot be read: {unread[0]}")
    whole = [each for each in listed if each.fault is None]
    if keep is not None and listed and not whole:
        raise CheckpointError(
            f"none of the {len(listed)} checkpoints in {directory} is whole: nothing is removed. Look at them with "
            f"zero3d ckpt verify {directory}."
        )
    staying = {each.folder for each in (listed if keep is None else whole[-keep:])}
    doomed = [
        each
        for each in listed
        if each.folder not in staying and not each.best and each.folder.name == f"step-{each.step}"
    ]
    kept = [each for each in listed if each not in doomed]
    return Pruning(directory, kept, doomed, found)
