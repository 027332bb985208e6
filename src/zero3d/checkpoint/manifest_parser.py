"""Read what a checkpoint says of itself, and check all of it that needs no model.

manifest.json    types and ranges of every entry; parts are those of the mesh's ranks
rank-N.json      types and ranges of every entry; a row's key says what the row says; a part is what the manifest lists
all parts        have the boxes of every state all of its tensor exactly once

One rank's part is read at a time, so that nobody ever holds all of them. Every refusal is a CheckpointError that names
file and field.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Set
from math import prod
from pathlib import Path

from zero3d.checkpoint.fields import USE_ANOTHER, Field, parse_fields, quote
from zero3d.checkpoint.files import SHA256_DIGITS, XXH3_DIGITS, present, read
from zero3d.checkpoint.folders import CHECKSUM, MANIFEST
from zero3d.checkpoint.frozen_base import DIGITS
from zero3d.checkpoint.manifest import (
    BUFFER,
    CODES,
    FORMAT,
    FROZEN,
    MASTER,
    NEWEST,
    NUMPY,
    STREAM,
    TORCH,
    WITH_BASE,
    WORD,
    WORDS,
    BoxRow,
    Manifest,
    ParameterSpec,
    Part,
    TensorSpec,
    allowed_dtypes,
    checksum_line,
    file_of,
    key_of,
    part_of,
)
from zero3d.checkpoint.tiling import TilingSums, tiling_fault
from zero3d.distributed.degrees import AXES, FOLDS, Degrees
from zero3d.errors import CheckpointError, RetiredFormatError
from zero3d.shards.boxes import Box, Shape

HEXADECIMAL = frozenset("0123456789abcdef")
LAST_READER = "39bedfef"  # the last commit that reads formats below FORMAT; what it saves has FORMAT


def open_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises CheckpointError, which names file and field."""
    text = read(folder / MANIFEST)
    sealed = os.path.lexists(present(folder / CHECKSUM))
    if sealed and read(folder / CHECKSUM) != checksum_line(text).encode():
        raise CheckpointError(
            f"{folder / MANIFEST} or {CHECKSUM} differs from what was saved: they do not agree. {USE_ANOTHER}"
        )
    fields = parse_fields(text, str(folder / MANIFEST))
    number = fields.entry("format").integer()
    if number > NEWEST:
        raise CheckpointError(
            f"{folder} has format {number}, and this zero3d reads formats {FORMAT} and {NEWEST}: upgrade zero3d, or go "
            "on from an older step-N."
        )
    if 0 < number < FORMAT:
        raise RetiredFormatError(
            f"{folder} has format {number}, and this zero3d reads formats {FORMAT} and {NEWEST}. The last version that "
            f"reads it is 0.1.0 at commit {LAST_READER}: type git checkout {LAST_READER} in a clone, and resume there "
            f"for one step. What that saves has format {FORMAT} and goes on here (docs/retired.md)."
        )
    if not sealed:
        raise CheckpointError(f"{folder / CHECKSUM} is missing: format {number} has a checksum there. {USE_ANOTHER}")
    return parse_manifest(folder, fields)


def parse_manifest(folder: Path, fields: Field) -> Manifest:
    """Return the manifest that these fields are, all of them checked. Raises CheckpointError."""
    number = fields.entry("format").integer(FORMAT, NEWEST)
    listed = fields.entry("parts")
    mesh = _mesh(fields, listed)
    names = [part_of(rank) for rank in range(mesh.world)]
    if list(listed.entries()) != names:
        raise CheckpointError(
            f"{fields.file}: {listed.name} should be {names[0]} to {names[-1]}, in the order of {mesh}, and it has "
            f"{', '.join(map(quote, list(listed.entries())[:3]))}. {USE_ANOTHER}"
        )
    parameters = parse_parameters(fields.entry("parameters"), number)
    step = fields.entry("step").integer()
    _check_optimizer(fields.entry("optimizer"))
    _check_scale(fields.entry("loss_scale"))
    _check_about(fields, mesh)
    if number >= WITH_BASE:
        _check_base(fields.entry("base"))
    if fields.has("exact"):
        _check_exact(fields.entry("exact"), mesh)
    for name in ("scheduler", "loop", "exact"):
        if (entry := fields.entry(name)).value is not None:
            entry.entries()
    digests = {name: parse_digest(value) for name, value in listed.items()}
    return Manifest(folder, fields, number, step, mesh, parameters, digests)


def _mesh(fields: Field, listed: Field) -> Degrees:
    """Return the mesh that saved it."""
    ranks = len(listed.entries())
    mesh = fields.entry("mesh")
    degrees = Degrees(**{axis: mesh.entry(axis).integer(1, 1 << 24) for axis in AXES})
    for fold in FOLDS:
        if mesh.has(fold.name):  # else it is the usual one
            degree = mesh.entry(fold.name).integer(1, degrees.dp)
            if degrees.dp % degree:
                mesh.entry(fold.name).refuse(f"a divisor of dp, {degrees.dp}")
            degrees = degrees._replace(**{fold.name: degree})
    if degrees.world != ranks:
        raise CheckpointError(
            f"{fields.file}: mesh {degrees} has {degrees.world} ranks, and {listed.name} has {ranks} entries. "
            f"{USE_ANOTHER}"
        )
    return degrees


def _check_optimizer(field: Field) -> None:
    field.entry("class").text()
    for group in field.entry("groups").rows():
        group.entries()
    check_scalars(field.entry("scalars"))


def _check_scale(field: Field) -> None:
    field.entry("dynamic").flag()
    if field.entry("value").number() <= 0:
        field.entry("value").refuse("a number above 0")
    field.entry("patience").integer(1)
    steps = field.entry("steps").integer()
    field.entry("last_overflow").integer(-1, max(steps - 1, -1))


def _check_base(field: Field) -> None:
    field.entry("folder").text()
    parse_xxh3(field.entry("digest"), DIGITS)


def _check_about(fields: Field, mesh: Degrees) -> None:
    about = fields.entry("about")
    for name, fact in about.items():
        if not (fact.value is None or isinstance(fact.value, (str, int))):
            fact.refuse("a text, a whole number or null")
        if name in Degrees._fields:
            fact.one_of(getattr(mesh, name))
    if about.has("leaves") != fields.has("exact"):
        about.entry("leaves").refuse("null where exact is, and a number where it is not")


def _check_exact(field: Field, mesh: Degrees) -> None:
    field.entry("seed").integer()
    field.entry("batches").integer()
    covers = field.entry("covers")
    for degree in covers.entry("dp").rows():
        degree.integer(1)
    for axis in ("tp", "pp"):
        covers.entry(axis).one_of(getattr(mesh, axis))
    if covers.entry("rows").value is not None:
        covers.entry("rows").integer()


# --- the parts of all ranks -----------------------------------------------------------------------


def read_part(folder: Path, rank: int, sha256: str, number: int) -> Part:
    """Read the part of a rank, in a format, whose file has this SHA-256. Raises CheckpointError."""
    return parse_part(parse_fields(read_part_text(folder, rank, sha256), str(folder / part_of(rank))), rank, number)


def read_part_text(folder: Path, rank: int, sha256: str) -> bytes:
    """Return the text of a rank's part, which has this SHA-256. Raises CheckpointError."""
    path = folder / part_of(rank)
    text = read(path)
    if hashlib.sha256(text).hexdigest() != sha256:
        raise CheckpointError(f"{path} differs from what was saved: its SHA-256 is not the manifest's. {USE_ANOTHER}")
    return text


def part_of_rank(manifest: Manifest, rank: int) -> Part:
    """Return what a rank of those that saved a checkpoint has written. Raises CheckpointError."""
    return read_part(manifest.folder, rank, manifest.parts[part_of(rank)], manifest.format)


class Contents:
    """Collects what the parts of a checkpoint say together, in memory that does not grow with their number.

    parameters  of all ranks
    scalars     of the optimizer, which all ranks that have any have alike
    states      parameter -> names of its states, in the order in which they came
    """

    def __init__(self) -> None:
        self.parameters: dict[str, ParameterSpec] = {}
        self.scalars: Mapping[str, float] = {}
        self.states: dict[str, list[str]] = {}
        self._dtypes: dict[tuple[str, str], str] = {}
        self._tiling = TilingSums()

    def add(self, part: Part) -> None:
        """Take one part, the next by rank. Raises CheckpointError where it contradicts those before it."""
        for name, parameter in part.parameters.items():
            if self.parameters.setdefault(name, parameter) != parameter:
                raise CheckpointError(
                    f"{part.source}: parameters describe {quote(name)} differently than other ranks' parts. "
                    f"{USE_ANOTHER}"
                )
        if part.scalars and self.scalars and part.scalars != self.scalars:
            raise CheckpointError(f"{part.source}: scalars are not those of other ranks' parts. {USE_ANOTHER}")
        self.scalars = self.scalars or part.scalars
        for row in part.rows:
            state = row.name, row.state
            self._tiling.add(state, row.box)
            if state not in self._dtypes:
                self.states.setdefault(row.name, []).append(row.state)
            if self._dtypes.setdefault(state, row.dtype) != row.dtype:
                raise CheckpointError(
                    f"{part.source}: tensors have {row.state} of {quote(row.name)} in several dtypes. {USE_ANOTHER}"
                )

    def faults(self) -> Iterable[tuple[str, str]]:
        """Yield the states (parameter, state) whose boxes are not all of it exactly once."""
        needed = {
            (name, MASTER if parameter.trainable else FROZEN): None
            for name, parameter in self.parameters.items()
            if prod(parameter.shape) and not parameter.in_base
        }
        for name, state in needed | dict.fromkeys(self._dtypes):
            if not self._tiling.whole((name, state), self.parameters[name].shape):
                yield name, state


def read_contents(manifest: Manifest, look: Callable[[int, Part], None] = lambda rank, part: None) -> Contents:
    """Read the parts of all ranks one by one, let `look` see each, and hold them to the manifest and to one another.

    Raises CheckpointError.
    """
    contents = Contents()
    for rank in range(manifest.mesh.world):
        part = part_of_rank(manifest, rank)
        contents.add(part)
        look(rank, part)
    check_contents(contents, manifest)
    return contents


def check_contents(contents: Contents, manifest: Manifest) -> None:
    """Hold what the parts of all ranks say together to the manifest. Raises CheckpointError."""
    for name in {**manifest.parameters, **contents.parameters}:
        if contents.parameters.get(name) != manifest.parameters.get(name):
            raise CheckpointError(
                f"{manifest.fields.file}: parameters describe {quote(name)} differently than the ranks' parts. "
                f"{USE_ANOTHER}"
            )
    if contents.scalars != manifest.value("optimizer")["scalars"]:
        manifest.fields.entry("optimizer").entry("scalars").refuse("those of the ranks' parts")
    check_tiling(contents, manifest)


def check_tiling(contents: Contents, manifest: Manifest) -> None:
    """Raise CheckpointError for a state whose boxes are not all of it once, and say where: its boxes are read again."""
    for name, state in contents.faults():
        parts = (part_of_rank(manifest, rank) for rank in range(manifest.mesh.world))
        boxes = [row.box for part in parts for row in part.rows if (row.name, row.state) == (name, state)]
        fault = tiling_fault(contents.parameters[name].shape, boxes)
        raise CheckpointError(
            f"{manifest.fields.file}: tensors have {fault} of {state} of {quote(name)}: every element should be in "
            f"exactly one box. {USE_ANOTHER}"
        )


# --- one part -----------------------------------------------------------------------------------


def parse_part(fields: Field, rank: int, number: int) -> Part:
    """Return the part of a rank, in a format, that these fields are, all of them checked. Raises CheckpointError."""
    file = fields.entry("file").one_of(file_of(rank))
    checksum = parse_xxh3(fields.entry("xxh3_128"), XXH3_DIGITS)
    parameters = parse_parameters(fields.entry("parameters"), number)
    rows = [_row(row, parameters) for row in fields.entry("tensors").rows()]
    scalars = check_scalars(fields.entry("scalars"))
    _check_streams(fields.entry("python_rng"))
    own = _own(fields.entry("own"))
    sums = _checksums(fields.entry("xxh3_64"), {*(row.key for row in rows), *own})
    return Part(fields.file, file, checksum, parameters, rows, own, scalars, fields.entry("python_rng"), sums)


def parse_digest(field: Field) -> str:
    """Return a SHA-256 in hexadecimal digits."""
    text = field.text()
    if len(text) != SHA256_DIGITS or set(text) - HEXADECIMAL:
        field.refuse(f"a SHA-256 in {SHA256_DIGITS} digits")
    return text


def parse_xxh3(field: Field, digits: int) -> str:
    """Return a checksum by XXH3 in hexadecimal digits."""
    text = field.text()
    if len(text) != digits or set(text) - HEXADECIMAL:
        field.refuse(f"an XXH3 in {digits} digits")
    return text


def parse_parameters(field: Field, number: int) -> dict[str, ParameterSpec]:
    """Return parameters by name, as a format has them."""
    return {name: _parameter(entry, number) for name, entry in field.items()}


def check_scalars(field: Field) -> Mapping[str, float]:
    """Return scalars of the optimizer by name, as they were written."""
    for name, scalar in field.items():
        value = scalar.number()
        if name == "step" and (value < 0 or value % 1):
            scalar.refuse("a whole number from 0")
    return field.entries()


def _tensor_spec(field: Field) -> TensorSpec:
    shape = tuple(size.integer() for size in field.entry("shape").rows())
    return TensorSpec(shape, str(field.entry("dtype").one_of(*CODES)))


def _parameter(field: Field, number: int) -> ParameterSpec:
    shape, dtype = _tensor_spec(field)
    trainable = field.entry("trainable").flag()
    in_base = number >= WITH_BASE and field.has("base") and field.entry("base").flag()
    if in_base and trainable:
        field.entry("base").refuse("false where trainable is true")
    return ParameterSpec(shape, trainable, dtype, in_base)


def _own(field: Field) -> dict[str, TensorSpec]:
    if unknown := [key for key in field.entries() if not key.startswith((BUFFER, STREAM))]:
        field.refuse(f"a mapping of {BUFFER}NAME and {STREAM}NAME, and has {quote(unknown[0])}")
    (words,) = field.entry(NUMPY).entry("shape").rows(1)
    words.one_of(WORDS)
    field.entry(NUMPY).entry("dtype").one_of("int64")
    field.entry(TORCH).entry("dtype").one_of("uint8")
    return {key: _tensor_spec(entry) for key, entry in field.items()}


def _checksums(field: Field, keys: Set[str]) -> dict[str, str]:
    """Return checksums of tensors, of which there is one for each key."""
    if not keys <= field.entries().keys():
        field.refuse("a mapping with an entry for each key of tensors and of own")
    return {key: parse_xxh3(entry, XXH3_DIGITS // 2) for key, entry in field.items()}


def _row(field: Field, parameters: Mapping[str, ParameterSpec]) -> BoxRow:
    name, state = field.entry("name").text(), field.entry("state").text()
    if name not in parameters:
        field.entry("name").refuse("a name among parameters")
    parameter = parameters[name]
    box = _box(field.entry("box"), parameter.shape)
    if parameter.in_base:
        field.entry("name").refuse("no parameter that was left out")
    if state == "" or (state == FROZEN) == parameter.trainable:
        field.entry("state").refuse(f"{MASTER} or a moment" if parameter.trainable else FROZEN)
    dtype = str(field.entry("dtype").one_of(*allowed_dtypes(state, parameter)))
    field.entry("key").one_of(key_of(name, state, box))
    return BoxRow(name, state, box, dtype, key_of(name, state, box))


def _box(field: Field, shape: Shape) -> Box:
    box = []
    for edges, size in zip(field.rows(len(shape)), shape, strict=True):
        start, stop = (edge.integer(0, size) for edge in edges.rows(2))
        if start >= stop:
            edges.refuse("a start below its stop")
        box.append((start, stop))
    return tuple(box)


def _check_streams(field: Field) -> None:
    """Check the states of `random` and of numpy, of one rank."""
    version, words, cached = field.entry("python").rows(3)
    version.one_of(3)
    *state, position = words.rows(WORDS + 1)
    for word in state:
        word.integer(0, WORD)
    position.integer(0, WORDS)
    if cached.value is not None:
        cached.number()
    kind, position, has_cached, cached = field.entry("numpy").rows(4)
    kind.one_of("MT19937")
    position.integer(0, WORDS)
    has_cached.integer(0, 1)
    cached.number()
