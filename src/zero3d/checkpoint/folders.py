"""Which checkpoints a directory holds, by the names of its entries; what others left there is not touched.

step-N          a checkpoint, whole since it was renamed; N without leading zeros is how we write it
.step-N.tmp     being written, or left by a process that died
.step-N.old     the one that was there while step N was saved again: the only one, where a process died
                between the two renames of that

An export is a folder of weights, whose metadata name us as their writer, and of what exports write beside them, such as
a model card that nobody has changed since; .NAME.old is the one that was at NAME while it was replaced, as above.
"""

from __future__ import annotations

import re
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from zero3d.checkpoint.model_card import CARD, is_card
from zero3d.errors import CheckpointError
from zero3d.offload.commit_file import sync
from zero3d.stores.cache import origin

MANIFEST, CHECKSUM = "manifest.json", "manifest.sha256"
_STEP = re.compile(r"step-([0-9]+)")
_ASIDE = re.compile(r"\.step-([0-9]+)\.old")
_UNFINISHED = re.compile(r"\.step-([0-9]+)\.tmp")
WEIGHTS, INDEX = re.compile(r"(model(-\d+-of-\d+)?|adapter_model|trained)\.safetensors"), "model.safetensors.index.json"
_BESIDE = re.compile(  # configs, and what transformers saves of a tokenizer and a processor
    r"((generation_|adapter_|tokenizer_|((video_)?pre)?processor_)?config|special_tokens_map|added_tokens)\.json"
    r"|(tokenizer|tekken|vocab)\.json|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece.*)\.model|.*\.tiktoken"
    r"|chat_template.*"
)
_TEMPLATES = "additional_chat_templates"  # a folder of a tokenizer with several


def is_complete(folder: Path) -> bool:
    """Say whether it is a folder, no link to one, with a manifest, which is written last."""
    try:
        return stat.S_ISDIR(folder.lstat().st_mode) and stat.S_ISREG((folder / MANIFEST).lstat().st_mode)
    except OSError:
        return False


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of complete checkpoints that are named as we name them, in order."""
    numbered = ((_number(_STEP, entry.name), entry) for entry in _entries(directory))
    return sorted(n for n, entry in numbered if n is not None and entry.name == f"step-{n}" and is_complete(entry))


def checkpoints(directory: Path) -> dict[int, Path]:
    """Return the folders to resume from by step, oldest first; one that lost its manifest is among them."""
    folders: dict[int, Path] = {}
    for entry in _entries(directory):
        number = _number(_STEP, entry.name)
        if number is not None and _is_folder(entry) and (number not in folders or entry.name == f"step-{number}"):
            folders[number] = entry
    for entry in _entries(directory):
        number = _number(_ASIDE, entry.name)
        if number is not None and number not in folders and is_complete(entry):
            folders[number] = entry
    return dict(sorted(folders.items()))


def find(directory: Path) -> Path:
    """Return the checkpoint itself, or the newest one in a directory of them. Raises CheckpointError."""
    if is_checkpoint(directory):
        return directory
    folders = checkpoints(directory)
    if not folders:
        raise CheckpointError(
            f"no checkpoint in {directory}: it has no step-N folder with a {MANIFEST}. Check the path."
        )
    return folders[max(folders)]


def is_checkpoint(directory: Path) -> bool:
    """Return whether a folder is itself a checkpoint, by its name or its manifest, and not a directory of checkpoints.

    A folder of the cache that stands for one in a store counts before its files are fetched.
    """
    if origin(directory) is not None:
        return True
    named = any(_number(pattern, directory.name) is not None for pattern in (_STEP, _ASIDE))
    return (directory / MANIFEST).is_file() or (named and directory.is_dir() and not checkpoints(directory))


def step_of(checkpoint: Path) -> int | None:
    """Return the step that a checkpoint's name says, or None."""
    found = (_number(pattern, checkpoint.name) for pattern in (_STEP, _ASIDE))
    return next((number for number in found if number is not None), None)


def tidied_path(checkpoint: Path) -> Path:
    """Return where a checkpoint is after `tidy`."""
    number = _number(_ASIDE, checkpoint.name)
    return checkpoint if number is None or checkpoint.exists() else checkpoint.with_name(f"step-{number}")


def tidy(directory: Path) -> None:
    """Remove what processes that died have left, and put back an only copy. Nobody may be writing there."""
    for entry in leftovers(directory):
        remove(entry)
    for entry in _entries(directory):
        number = _number(_ASIDE, entry.name)
        if number is not None and not entry.is_symlink() and is_complete(entry):
            whole = directory / f"step-{number}"
            if not whole.exists():
                entry.rename(whole)


def leftovers(directory: Path) -> list[Path]:
    """Return the folders that killed saves have left and nobody needs: unfinished ones, and replaced ones."""
    return [
        entry for entry in _entries(directory) if not entry.is_symlink() and _is_folder(entry) and _is_leftover(entry)
    ]


def _is_leftover(entry: Path) -> bool:
    number = _number(_ASIDE, entry.name)
    if number is not None:
        return is_complete(entry.with_name(f"step-{number}"))
    return _number(_UNFINISHED, entry.name) is not None


def discard(directory: Path, step: int) -> None:
    """Remove a checkpoint under another name, so that a process that dies over it leaves no half of one."""
    doomed = directory / f".step-{step}.tmp"
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        (directory / f"step-{step}").rename(doomed)
    except OSError as error:
        _warn(directory / f"step-{step}", error)
    else:
        remove(doomed)


def remove(folder: Path) -> None:
    """Remove a folder; where that cannot be, warn and go on."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _warn(folder, error)


def _warn(folder: Path, error: OSError) -> None:
    warnings.warn(f"{folder} could not be removed ({error.strerror}): remove it yourself.", stacklevel=3)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return None if match is None else int(match[1])


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _entries(directory: Path) -> Iterator[Path]:
    """Yield a directory's entries in order; none where there is no such directory. Raises CheckpointError."""
    try:
        yield from sorted(directory.iterdir()) if directory.is_dir() else ()
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read ({error.strerror}): check the path and its rights."
        ) from error


def foreign_entry(folder: Path) -> Path | None:
    """Return the first entry of a folder that no export has written, or what is no folder itself; None without one.

    Without weights none of it is an export's; where nothing is, nothing can be lost.
    """
    if not folder.is_dir():
        return folder if folder.exists() else None
    entries = sorted(folder.iterdir())
    if not any(WEIGHTS.fullmatch(entry.name) for entry in entries):
        return entries[0] if entries else None
    return next((entry for entry in entries if not _is_exported(entry)), None)


def _is_exported(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name == _TEMPLATES and all(each.suffix == ".jinja" for each in entry.iterdir())
    if WEIGHTS.fullmatch(entry.name):
        return _names_us(entry)
    if entry.name == CARD:
        return is_card(entry)
    return entry.name == INDEX or _BESIDE.fullmatch(entry.name) is not None


def _names_us(weights: Path) -> bool:
    """Return whether the metadata of a file of weights name us as its writer."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="np") as file:
            return (file.metadata() or {}).get("writer") == "zero3d"
    except (OSError, SafetensorError):
        return False


def put_in_place(fresh: Path, place: Path) -> None:
    """Rename a complete export to its place; the one before it goes once that is on the disk, and stays if it fails.

    One that a process which died between the renames has left aside is put back first. Raises CheckpointError where
    something else is there, OSError.
    """
    aside = place.with_name(f".{place.name}.old")
    if foreign := foreign_entry(aside):
        raise CheckpointError(f"{foreign} was not exported by zero3d, and an export needs {aside.name}: move it.")
    if place.exists():
        shutil.rmtree(aside, ignore_errors=True)
    elif aside.exists():
        aside.rename(place)
    if place.exists():
        place.rename(aside)
    try:
        fresh.rename(place)
    except OSError:
        if aside.exists():
            aside.rename(place)
        raise
    sync(place.parent)
    if aside.exists():
        aside.rename(fresh)  # whose name says that it may be half of one
        shutil.rmtree(fresh, ignore_errors=True)
