"""The commit file: it says which step a rank's disk slab holds whole, and in which slot. No torch.

    {"format": 2, "owner": ..., "records": ..., "step": 7, "slot": 1, "before": 6, "sums": "89ab...",
     "sums_before": "0123...", "sha256": ...}

    owner    the caller's name for the run and the rank
    records  SHA-256 of the records' names and sizes
    slot     where `step` is, 0 or 1; `before`, the step committed before it, is in the other one until that is
             overwritten (null: there is none)
    sums     XXH3 in 64 bits of each record of `step`, 16 hexadecimal digits each in the order of the records, and of
             the step before; nothing where they are not known
    sha256   of all the rest

Format 1 had no sums: a run can go on from its records, but nobody can check them.
It is written beside itself, fsynced and renamed: a reader finds the old one or the new one, never a part.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.errors import CheckpointError, short
from zero3d.reading import Unreadable, read_object

FORMAT = 2
READABLE = (1, FORMAT)
DIGITS = 16  # of a record's sum


class Commit(NamedTuple):
    """A whole step and its slot, and the step committed before it, which the other slot held then.

    sums  of the records of each, one after the other; "" where they are not known
    """

    step: int
    slot: int
    before: int | None = None
    sums: str = ""
    sums_before: str = ""


def digest(records: Mapping[str, int]) -> str:
    """Return the SHA-256 of records' names and bytes in order."""
    return hashlib.sha256(json.dumps(list(records.items())).encode()).hexdigest()


def write(path: Path, commit: Commit, owner: str, records: str) -> None:
    """Put a commit in the place of the one before. Raises OSError; the one before is whole then."""
    entries = {"format": FORMAT, "owner": owner, "records": records, **commit._asdict()}
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)  # what somebody has put there might be a link
    with fresh.open("x") as file:
        file.write(json.dumps(entries | {"sha256": sha256_of(entries)}))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a commit for good: no loss of power brings it back. Raises OSError."""
    path.unlink(missing_ok=True)
    sync(path.parent)


def sync(directory: Path) -> None:
    """Have the disk take the entries of a folder."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path, owner: str, records: str) -> Commit | None:
    """Return the commit, None where there is none. Raises CheckpointError for a file of others or a damaged one."""
    if not path.exists():
        return None
    try:
        entries = read_object(path)
    except Unreadable as error:
        raise CheckpointError(f"{path} {error}: {_remedy(path)}") from error
    checksum = entries.pop("sha256", None)
    sums = [entries.get(key) for key in ("sums", "sums_before")] if entries.get("format") == FORMAT else ["", ""]
    known = entries.get("format") in READABLE and all(isinstance(each, str) for each in sums)
    if checksum != sha256_of(entries) or not known:
        raise CheckpointError(f"{path} is damaged, or of another version of zero3d: {_remedy(path)}")
    if entries["owner"] != owner:
        raise CheckpointError(
            f"{path} belongs to {short(entries['owner'])}, and this is {short(owner)}: {_remedy(path)}"
        )
    if entries["records"] != records:
        raise CheckpointError(
            f"{path} has records of other names or sizes, as of another model, mesh or placement: {_remedy(path)}"
        )
    return Commit(entries["step"], entries["slot"], entries["before"], *sums)


def step_of(path: Path) -> int | None:
    """Return the step of a commit, whosever it is; None where none can be read."""
    try:
        step = read_object(path).get("step")
    except (Unreadable, OSError):
        return None
    return step if isinstance(step, int) and 0 < step < 1 << 62 else None


def sha256_of(entries: Mapping[str, Any]) -> str:
    """Return the SHA-256 of entries of a JSON file, in whatever order they stand."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _remedy(path: Path) -> str:
    return (
        "go on from a checkpoint in another folder (offload.directory=FOLDER), or remove "
        f"{path.parent} if nobody needs what is in it."
    )
