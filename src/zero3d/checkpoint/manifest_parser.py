"""Read manifest.json and check all of it that needs no model.

types and ranges of every entry; files are those of the mesh's ranks; a row's key says what the row says; the boxes of
every state are all of its tensor exactly once. Every refusal is a CheckpointError that names file and field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from zero3d.checkpoint.fields import USE_ANOTHER, Field, parse_fields, quote
from zero3d.checkpoint.files import read
from zero3d.checkpoint.folders import CHECKSUM, MANIFEST
from zero3d.checkpoint.manifest import (
    BUFFER,
    CODES,
    FORMAT,
    FROZEN,
    MASTER,
    NUMPY,
    OLDEST,
    STREAM,
    TORCH,
    WORD,
    WORDS,
    BoxRow,
    Manifest,
    ParameterSpec,
    TensorSpec,
    allowed_dtypes,
    checksum_line,
    file_of,
    key_of,
)
from zero3d.checkpoint.tiling import tiling_fault
from zero3d.distributed.degrees import AXES, Degrees
from zero3d.errors import CheckpointError
from zero3d.shards.boxes import Box, Shape


def open_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises CheckpointError, which names file and field."""
    text = read(folder / MANIFEST)
    sealed = (folder / CHECKSUM).exists() or (folder / CHECKSUM).is_symlink()
    if sealed and read(folder / CHECKSUM) != checksum_line(text).encode():
        raise CheckpointError(
            f"{folder / MANIFEST} or {CHECKSUM} differs from what was saved: they do not agree. {USE_ANOTHER}"
        )
    fields = parse_fields(text, str(folder / MANIFEST))
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
    """Return the manifest that these fields are, all of them checked. Raises CheckpointError."""
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
        _rank_tensors(fields, files.entries()) if number == FORMAT else {},
    )  # fmt: skip


def _mesh(fields: Field, files: int) -> Degrees:
    """Return the mesh that saved it; manifests that do not say know no other axis than dp."""
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


def _tensor_spec(field: Field) -> TensorSpec:
    shape = tuple(size.integer() for size in field.entry("shape").rows())
    return TensorSpec(shape, str(field.entry("dtype").one_of(*CODES)))


def _parameter(field: Field) -> ParameterSpec:
    shape, dtype = _tensor_spec(field)
    return ParameterSpec(shape, field.entry("trainable").flag(), dtype)


def _rank_tensors(fields: Field, files: Mapping[str, Any]) -> dict[str, dict[str, TensorSpec]]:
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
    return {file: {key: _tensor_spec(entry) for key, entry in keys.items()} for file, keys in listed.items()}


# --- rows ---------------------------------------------------------------------------------------


def _row(field: Field, parameters: Mapping[str, ParameterSpec], files: Mapping[str, Any], number: int) -> BoxRow:
    name, state, file = (field.entry(key).text() for key in ("name", "state", "file"))
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
    """Check that every state of a parameter is all of it exactly once, in one dtype."""
    states: dict[tuple[str, str], list[BoxRow]] = {
        (name, MASTER if parameter.trainable else FROZEN): []
        for name, parameter in parameters.items()
        if prod(parameter.shape)
    }
    for row in rows:
        states.setdefault((row.name, row.state), []).append(row)
    for (name, state), boxes in states.items():
        fault = tiling_fault(parameters[name].shape, [row.box for row in boxes])
        if fault is not None:
            raise CheckpointError(
                f"{file}: tensors have {fault} of {state} of {quote(name)}: every element should be in exactly one "
                f"box. {USE_ANOTHER}"
            )
        if len({row.dtype for row in boxes}) > 1:
            raise CheckpointError(f"{file}: tensors have {state} of {quote(name)} in several dtypes. {USE_ANOTHER}")


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
