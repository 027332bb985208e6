"""Read manifest.json and check all of it that needs no model.

types and ranges of every entry; parts are those of the mesh's ranks. `manifest_parts.py` has what ranks say, which
older formats had in manifest.json, too. Every refusal is a CheckpointError that names file and field.
"""

from __future__ import annotations

from pathlib import Path

from zero3d.checkpoint.base_digest import DIGITS
from zero3d.checkpoint.fields import USE_ANOTHER, Field, parse_fields, quote
from zero3d.checkpoint.files import read
from zero3d.checkpoint.folders import CHECKSUM, MANIFEST
from zero3d.checkpoint.manifest import (
    NEWEST,
    OLDEST,
    WITH_BASE,
    WITHOUT_PARTS,
    Manifest,
    checksum_line,
    file_of,
    part_of,
)
from zero3d.checkpoint.manifest_parts import check_scalars, parse_digest, parse_inline, parse_parameters, parse_xxh3
from zero3d.distributed.degrees import AXES, Degrees
from zero3d.errors import CheckpointError


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
    if number > NEWEST:
        raise CheckpointError(
            f"{folder} has format {number}, and this zero3d reads formats {OLDEST} to {NEWEST}: upgrade zero3d, or go "
            "on from an older step-N."
        )
    if number > OLDEST and not sealed:
        raise CheckpointError(f"{folder / CHECKSUM} is missing: format {number} has a checksum there. {USE_ANOTHER}")
    return parse_manifest(folder, fields)


def parse_manifest(folder: Path, fields: Field) -> Manifest:
    """Return the manifest that these fields are, all of them checked. Raises CheckpointError."""
    number = fields.entry("format").integer(OLDEST, NEWEST)
    inline = number <= WITHOUT_PARTS
    listed = fields.entry("files" if inline else "parts")
    mesh = _mesh(fields, listed)
    names = [file_of(rank) if inline else part_of(rank) for rank in range(mesh.world)]
    if list(listed.entries()) != names:
        raise CheckpointError(
            f"{fields.file}: {listed.name} should be {names[0]} to {names[-1]}, in the order of {mesh}, and it has "
            f"{', '.join(map(quote, list(listed.entries())[:3]))}. {USE_ANOTHER}"
        )
    parameters = parse_parameters(fields.entry("parameters"), number)
    step = fields.entry("step").integer()
    _check_optimizer(fields.entry("optimizer"))
    _check_scale(fields.entry("loss_scale"))
    _check_about(fields, mesh, number)
    if number >= WITH_BASE:
        _check_base(fields.entry("base"))
    if fields.has("exact"):
        _check_exact(fields.entry("exact"), mesh)
    for name in ("scheduler", "loop", "exact"):
        if number > OLDEST:
            fields.entry(name)
        if fields.has(name):
            fields.entry(name).entries()
    digests = {name: parse_digest(value) for name, value in listed.items()}
    return Manifest(
        folder, fields, number, step, mesh, parameters, digests,
        parse_inline(fields, parameters, number > OLDEST) if inline else (),
    )  # fmt: skip


def _mesh(fields: Field, listed: Field) -> Degrees:
    """Return the mesh that saved it; manifests that do not say know no other axis than dp."""
    ranks = len(listed.entries())
    if not fields.has("mesh") and fields.entry("format").value == OLDEST:
        return Degrees(1, max(1, ranks), 1)
    mesh = fields.entry("mesh")
    degrees = Degrees(**{axis: mesh.entry(axis).integer(1, 1 << 24) for axis in AXES})
    if mesh.has("ep"):  # older ones know none
        degrees = degrees._replace(ep=mesh.entry("ep").integer(1, degrees.dp))
    if degrees.dp % degrees.ep:
        mesh.entry("ep").refuse(f"a divisor of dp, {degrees.dp}")
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


def _check_about(fields: Field, mesh: Degrees, number: int) -> None:
    if number == OLDEST and not fields.has("about"):
        return
    about = fields.entry("about")
    for name, fact in about.items():
        if not (fact.value is None or isinstance(fact.value, (str, int))):
            fact.refuse("a text, a whole number or null")
        if name in (*AXES, "ep"):
            fact.one_of(getattr(mesh, name))
    if number > OLDEST and about.has("leaves") != fields.has("exact"):
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
