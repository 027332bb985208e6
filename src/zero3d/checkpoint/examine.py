"""Everything about a checkpoint that can be checked without a model, told to the end: the first fault of each file.

manifest     against its checksum, entry by entry                      nothing else is checked where it has a fault
parts        against the manifest's checksums, entry by entry, against one another
tensors      every byte against the checksum of its file; headers against the parts: shapes, dtypes, buffers
random       states are tried on generators that nobody uses
boxes        are all of every state exactly once                       where no part has a fault

`integrity.verify` checks the same for a load, and stops at the first fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from zero3d.checkpoint.compatibility import check_streams
from zero3d.checkpoint.fields import USE_ANOTHER, parse_fields
from zero3d.checkpoint.files import blocks, has_checksum, open_regular, tensor_checksum
from zero3d.checkpoint.folders import CHECKSUM, MANIFEST
from zero3d.checkpoint.integrity import verify_file
from zero3d.checkpoint.inventory import check_name
from zero3d.checkpoint.manifest import STREAM, Manifest, Part, file_of, part_of
from zero3d.checkpoint.manifest_parser import Contents, check_contents, open_manifest, part_of_rank
from zero3d.errors import CheckpointError, RetiredFormatError

LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer ones
LONGEST_KEY = 300  # characters of a tensor's key in a message


@dataclass(frozen=True)
class Fault:
    """Says what is wrong with one file; of a file of tensors, which tensors that may be."""

    file: str
    message: str


@dataclass
class Examination:
    """Collects what was checked of a checkpoint, and the first fault of each of its files.

    bytes    of files that were hashed
    foreign  entries of the folder that are not the checkpoint's, which nobody reads
    """

    folder: Path
    step: int | None = None
    mesh: str = ""
    files: int = 0
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    foreign: Sequence[str] = ()

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.faults


def examine(folder: Path) -> Examination:
    """Check every byte and every box of a checkpoint. Raises nothing for what is wrong with it.

    Raises RetiredFormatError for a format that nothing here reads.
    """
    found = Examination(folder)
    try:
        manifest = open_manifest(folder)
        check_name(manifest)
    except RetiredFormatError:
        raise
    except CheckpointError as error:
        found.faults.append(Fault(MANIFEST, str(error)))
        return found
    found.step = manifest.step
    found.mesh = str(manifest.mesh)
    found.parameters = len(manifest.parameters)
    found.files, found.bytes = 2, sum(map(_size, (folder / MANIFEST, folder / CHECKSUM)))
    contents = Contents()
    for rank in range(manifest.mesh.world):
        _examine_rank(manifest, rank, contents, found)
    if not any(fault.file.endswith(".json") for fault in found.faults):
        try:
            check_contents(contents, manifest)
        except CheckpointError as error:
            found.faults.append(Fault(MANIFEST, str(error)))
    ours = {MANIFEST, CHECKSUM, *manifest.parts, *(file_of(rank) for rank in range(manifest.mesh.world))}
    found.foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
    return found


def _examine_rank(manifest: Manifest, rank: int, contents: Contents, found: Examination) -> None:
    """Check one rank's part and its file of tensors; of that without the part only whether it is there."""
    path = manifest.folder / file_of(rank)
    try:
        part = part_of_rank(manifest, rank)
        contents.add(part)
    except CheckpointError as error:
        found.faults.append(Fault(part_of(rank), str(error)))
        try:
            with open_regular(path):
                pass
        except CheckpointError as missing:
            found.faults.append(Fault(path.name, str(missing)))
        return
    try:
        verify_file(manifest, part)
        _check_streams(manifest, part)
    except CheckpointError as error:
        concerned = ""
        with suppress(CheckpointError):  # a disk that gives the header may not give the rest
            concerned = _concerned(path, part)
        found.faults.append(Fault(path.name, f"{str(error).removesuffix(f' {USE_ANOTHER}')}{concerned}"))
    found.files += 2
    found.tensors += len(part.rows) + len(part.own)
    found.bytes += _size(path) + _size(manifest.folder / part_of(rank))


def _check_streams(manifest: Manifest, part: Part) -> None:
    path = manifest.folder / part.file
    with safe_open(path, framework="pt") as file:
        keys = [key for key in part.own if key.startswith(STREAM)]
        tensors = {key.removeprefix(STREAM): file.get_tensor(key) for key in keys}
    check_streams(str(path), tensors, part.python_rng, torch.device("cpu"))


def _concerned(path: Path, part: Part) -> str:
    """Say which tensors are lost or changed with a file's bytes; nothing where it has the bytes that were saved."""
    expected = [*(row.key for row in part.rows), *part.own]
    places, size = _places(path), _size(path)
    lost = [key for key in expected if places is None or key not in places or places[key][1] > size]
    if lost or places is None:
        return f" Lost: {_listed(lost)}."
    if has_checksum(path, part.checksum):
        return ""
    changed = [key for key in expected if tensor_checksum(blocks(path, *places[key])) != part.sums[key]]
    return f" Changed: {_listed(changed)}." if changed else " Changed: its header, and no tensor by its checksum."


def _places(path: Path) -> dict[str, tuple[int, int]] | None:
    """Return where every tensor lies in a file, by what is left of its header; None where nobody can read that."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= LONGEST_HEADER else b""
        entries = parse_fields(text, str(path)).items()
        offsets = {key: entry.entry("data_offsets").rows(2) for key, entry in entries if key != "__metadata__"}
        return {key: (8 + length + a.integer(), 8 + length + b.integer()) for key, (a, b) in offsets.items()}
    except CheckpointError:
        return None


def _listed(keys: Sequence[str]) -> str:
    shown = ", ".join(ascii(key)[:LONGEST_KEY] for key in keys[:3])
    return shown if len(keys) == 1 else f"{len(keys)} tensors ({shown}{', ...' if len(keys) > 3 else ''})"


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
