"""The manifest of a checkpoint as checked values, and the checksum over it.

    manifest.sha256     SHA-256 of manifest.json, as sha256sum prints it
    manifest.json       format 2
      step              applied steps                                mesh       pp, dp, tp of who saved it
      files             rank file -> its SHA-256                     about      what the run's bits depend on
      parameters        name -> shape, trainable, dtype              exact      leaves of exact mode, or null
      tensors           rows: name, state, box, dtype, file, key     scheduler  its state, or null
      own               rank file -> key -> shape, dtype             loss_scale
      optimizer         class, groups' options, scalars              loop       what the training loop gave, or null
      python_rng        random states of `random` and numpy, by rank

A rank's own tensors are its buffers and random states. Format 1 had no checksum, no `own` and no dtypes of rows, and
its first manifests no mesh.

What is checked here needs no model: types and ranges; files are those of the mesh's ranks; a row's key says
what the row says; the boxes of every state are all of its tensor exactly once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.checkpoint.fields import USE_ANOTHER, Field, parse_json, quote
from zero3d.checkpoint.files import read
from zero3d.checkpoint.folders import CHECKSUM, MANIFEST
from zero3d.distributed.degrees import AXES, Degrees
from zero3d.errors import CheckpointError
from zero3d.shards.boxes import Box, Shape

FORMAT, OLDEST = 2, 1
MASTER, FROZEN = "master", "weight"
BUFFER, STREAM = "buffer:", "rng:"  # how keys of a rank's own tensors begin
TORCH, NUMPY, ACCELERATOR = (f"{STREAM}{name}" for name in ("torch", "numpy", "accelerator"))
FLOATING = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
            "float8_e5m2": "F8_E5M2"}  # fmt: skip
OTHERS = {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32",
          "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64"}  # fmt: skip
CODES = FLOATING | OTHERS  # torch's names of dtypes -> those of safetensors
WORDS, WORD = 624, 2**32 - 1  # of the Mersenne Twister


class TensorSpec(NamedTuple):
    """A tensor in a file; dtype by torch's name, or "" where the manifest does not say."""

    shape: Shape
    dtype: str


class BoxRow(NamedTuple):
    """A box of one state of one parameter, and the tensor that holds it."""

    name: str
    state: str
    box: Box
    dtype: str
    file: str
    key: str


@dataclass(frozen=True)
class ParameterSpec:
    """One of the full model's."""

    shape: Shape
    trainable: bool
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint in `folder` says of itself; `fields` is all of it, for what only a model can judge."""

    folder: Path
    fields: Field
    format: int
    step: int
    mesh: Degrees
    files: Mapping[str, str]
    parameters: Mapping[str, ParameterSpec]
    rows: Sequence[BoxRow]
    rank_tensors: Mapping[str, Mapping[str, TensorSpec]]

    def value(self, name: str) -> Any:
        """A part as it was written; None where there is none."""
        return self.fields.entries().get(name)

    @property
    def about(self) -> Mapping[str, Any]:
        """What the bits of the run that saved it depended on."""
        return self.value("about") or {}


def file_of(rank: int) -> str:
    """Name of the file of a rank of the mesh."""
    return f"rank-{rank:05d}.safetensors"


def key_of(name: str, state: str, box: Box) -> str:
    """Of a box in its file."""
    return f"{state}:{name}@" + ",".join(f"{start}:{stop}" for start, stop in box)


def checksum_line(text: bytes) -> str:
    """What stands in the checksum's file."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


# --- reading ------------------------------------------------------------------------------------


def open_manifest(folder: Path) -> Manifest:
    """Read and check it. Raises CheckpointError, which names file and field."""
    text = read(folder / MANIFEST)
    sealed = (folder / CHECKSUM).exists() or (folder / CHECKSUM).is_symlink()
    if sealed and read(folder / CHECKSUM) != checksum_line(text).encode():
        raise CheckpointError(
            f"{folder / MANIFEST} or {CHECKSUM} differs from what was saved: they do not agree. {USE_ANOTHER}"
        )
    fields = parse_json(text, str(folder / MANIFEST))
    number = fields.entry("format").integer()
    if number > FORMAT:
        raise CheckpointError(
            f"{folder} has format {number}, and this zero3d reads formats {OLDEST} to {FORMAT}: upgrade zero3d, or go "
            "on from an older step-N."
        )
    if number == FORMAT and not sealed:
        raise CheckpointError(f"{folder / CHECKSUM} is missing: format {number} has a checksum there. {USE_ANOTHER}")
    return parse_manifest(folder, fields)


def parse_manifest(folder: Path, fields: Field) -> Manifest:
    """A manifest of everything that is written in it, checked. Raises CheckpointError."""
    number = fields.entry("format").integer(OLDEST, FORMAT)
    files = fields.entry("files")
    mesh = _mesh(fields, len(files.entries()))
    names = [file_of(rank) for rank in range(mesh.world)]
    if list(files.entries()) != names:
        raise CheckpointError(
            f"{fields.file}: files should be {names[0]} to {names[-1]}, in the order of {mesh}, and it has "
            f"{', '.join(map(quote, list(files.entries())[:3]))}. {USE_ANOTHER}"
        )
    parameters = {name: _parameter(entry) for name, entry in fields.entry("parameters").items()}
    rows = [_row(row, parameters, files.entries(), number) for row in fields.entry("tensors").rows()]
    _check_tiling(fields.file, rows, parameters)
    step = fields.entry("step").integer()
    _check_optimizer(fields.entry("optimizer"))
    _check_scale(fields.entry("loss_scale"))
    _check_about(fields, mesh, number)
    if fields.has("exact"):
        _check_exact(fields.entry("exact"), mesh)
    for name in ("scheduler", "loop", "exact"):
        if number == FORMAT:
            fields.entry(name)
        if fields.has(name):
            fields.entry(name).entries()
    for state in fields.entry("python_rng").rows(mesh.world):
        _check_streams(state)
    return Manifest(
        folder, fields, number, step, mesh, {name: _digest(value) for name, value in files.items()}, parameters, rows,
        _own(fields, files.entries()) if number == FORMAT else {},
    )  # fmt: skip


def _mesh(fields: Field, files: int) -> Degrees:
    """The mesh that saved it; manifests that do not say know no other axis than dp."""
    if not fields.has("mesh") and fields.entry("format").value == OLDEST:
        return Degrees(1, max(1, files), 1)
    mesh = fields.entry("mesh")
    degrees = Degrees(**{axis: mesh.entry(axis).integer(1, 1 << 24) for axis in AXES})
    if degrees.world != files:
        raise CheckpointError(
            f"{fields.file}: mesh {degrees} has {degrees.world} ranks, and files has {files} entries. {USE_ANOTHER}"
        )
    return degrees


def _digest(field: Field) -> str:
    text = field.text()
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        field.refuse("a SHA-256 in 64 digits")
    return text


def _described(field: Field) -> TensorSpec:
    shape = tuple(size.integer() for size in field.entry("shape").rows())
    return TensorSpec(shape, str(field.entry("dtype").one_of(*CODES)))


def _parameter(field: Field) -> ParameterSpec:
    shape, dtype = _described(field)
    return ParameterSpec(shape, field.entry("trainable").flag(), dtype)


def _own(fields: Field, files: Mapping[str, Any]) -> dict[str, dict[str, TensorSpec]]:
    listed = fields.entry("own")
    if list(listed.entries()) != list(files):
        listed.refuse("a mapping with the entries of files")
    for _, keys in listed.items():
        if unknown := [key for key in keys.entries() if not key.startswith((BUFFER, STREAM))]:
            keys.refuse(f"a mapping of {BUFFER}NAME and {STREAM}NAME, and has {quote(unknown[0])}")
        (words,) = keys.entry(NUMPY).entry("shape").rows(1)
        words.one_of(WORDS)
        keys.entry(NUMPY).entry("dtype").one_of("int64")
        keys.entry(TORCH).entry("dtype").one_of("uint8")
    return {file: {key: _described(each) for key, each in keys.items()} for file, keys in listed.items()}


# --- rows ---------------------------------------------------------------------------------------


def _row(field: Field, parameters: Mapping[str, ParameterSpec], files: Mapping[str, Any], number: int) -> BoxRow:
    name, state, file = (field.entry(part).text() for part in ("name", "state", "file"))
    if name not in parameters:
        field.entry("name").refuse("a name among parameters")
    if file not in files:
        field.entry("file").refuse("a name among files")
    parameter = parameters[name]
    box = _box(field.entry("box"), parameter.shape)
    if state == "" or (state == FROZEN) == parameter.trainable:
        field.entry("state").refuse(f"{MASTER} or a moment" if parameter.trainable else FROZEN)
    dtype = "" if number == OLDEST else _dtype(field.entry("dtype"), state, parameter)
    field.entry("key").one_of(key_of(name, state, box))
    return BoxRow(name, state, box, dtype, file, key_of(name, state, box))


def allowed_dtypes(state: str, parameter: ParameterSpec) -> tuple[str, ...]:
    """In which a state of a parameter may be stored."""
    if state == FROZEN:
        return (parameter.dtype,)
    return ("float32", "float64") if state == MASTER else tuple(CODES)


def _dtype(field: Field, state: str, parameter: ParameterSpec) -> str:
    return str(field.one_of(*allowed_dtypes(state, parameter)))


def _box(field: Field, shape: Shape) -> Box:
    box = []
    for edges, size in zip(field.rows(len(shape)), shape, strict=True):
        start, stop = (edge.integer(0, size) for edge in edges.rows(2))
        if start >= stop:
            edges.refuse("a start below its stop")
        box.append((start, stop))
    return tuple(box)


def _check_tiling(file: str, rows: Iterable[BoxRow], parameters: Mapping[str, ParameterSpec]) -> None:
    """Every state of a parameter is all of it exactly once, in one dtype."""
    states: dict[tuple[str, str], list[BoxRow]] = {
        (name, MASTER if each.trainable else FROZEN): [] for name, each in parameters.items() if prod(each.shape)
    }
    for row in rows:
        states.setdefault((row.name, row.state), []).append(row)
    for (name, state), own in states.items():
        fault = tiling_fault(parameters[name].shape, [row.box for row in own])
        if fault is not None:
            raise CheckpointError(
                f"{file}: tensors have {fault} of {state} of {quote(name)}: every element should be in exactly one "
                f"box. {USE_ANOTHER}"
            )
        if len({row.dtype for row in own}) > 1:
            raise CheckpointError(f"{file}: tensors have {state} of {quote(name)} in several dtypes. {USE_ANOTHER}")


def tiling_fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """How boxes fail to be all of a tensor exactly once: "nothing at (0, 3:5)", "2 boxes at (1, 0:4)", or None.

    The first dimension is cut at all edges of boxes; each slab of it is a tensor of one dimension less. Every box
    is looked at once for each slab that it reaches through.
    """
    if not shape:
        return None if len(boxes) == 1 else f"{len(boxes) or 'nothing'}{' boxes' if boxes else ''} at ()"
    edges = sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})
    place = {edge: i for i, edge in enumerate(edges)}
    slabs: list[list[Box]] = [[] for _ in edges[1:]]
    for box in boxes:
        for slab in slabs[place[box[0][0]] : place[box[0][1]]]:
            slab.append(box[1:])
    for (start, stop), slab in zip(pairwise(edges), slabs, strict=True):
        fault = tiling_fault(shape[1:], slab)
        if fault is not None:
            what, _, where = fault.partition(" at (")
            here = f"{start}" if stop == start + 1 else f"{start}:{stop}"
            return f"{what} at ({here}{', ' if where != ')' else ''}{where}"
    return None


# --- everything else ----------------------------------------------------------------------------


def _check_optimizer(field: Field) -> None:
    field.entry("class").text()
    for group in field.entry("groups").rows():
        group.entries()
    for name, scalar in field.entry("scalars").items():
        value = scalar.number()
        if name == "step" and (value < 0 or value % 1):
            scalar.refuse("a whole number from 0")


def _check_scale(field: Field) -> None:
    field.entry("dynamic").flag()
    if field.entry("value").number() <= 0:
        field.entry("value").refuse("a number above 0")
    field.entry("patience").integer(1)
    steps = field.entry("steps").integer()
    field.entry("last_overflow").integer(-1, max(steps - 1, -1))


def _check_about(fields: Field, mesh: Degrees, number: int) -> None:
    if number == OLDEST and not fields.has("about"):
        return
    about = fields.entry("about")
    for name, fact in about.items():
        if not (fact.value is None or isinstance(fact.value, (str, int))):
            fact.refuse("a text, a whole number or null")
        if name in AXES:
            fact.one_of(getattr(mesh, name))
    if number == FORMAT and about.has("leaves") != fields.has("exact"):
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


def _check_streams(field: Field) -> None:
    """States of `random` and of numpy, of one rank."""
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
