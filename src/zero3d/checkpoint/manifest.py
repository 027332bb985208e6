"""The manifest of a checkpoint: what is in it, as checked values, and the checksums over it.

    manifest.sha256     SHA-256 of manifest.json, as sha256sum prints it
    manifest.json       format 4, or 5
      step              applied steps                                mesh       pp, dp, tp of who saved it
      parts             rank-N.json -> its SHA-256, by rank          about      what the run's bits depend on
      parameters        name -> shape, trainable, dtype              exact      summands of exact mode, or null
      optimizer         class, groups' options, scalars              scheduler  its state, or null
      loop              what the training loop gave, or null         loss_scale
    rank-N.json         what rank N has written
      file, xxh3_128    its tensors' file                            parameters those of its units, as above
      tensors           rows: name, state, box, dtype, key           scalars    the optimizer's, or none
      own               key -> shape, dtype                          python_rng random states of `random` and numpy
      xxh3_64           key -> checksum of a tensor, own ones too    (`files.py`: damage is found, forgery is not)

Format 5 is that of checkpoints from which frozen weights were left out, for a folder has them: `base` has its path
(`folder`) and the `digest` of its weights (frozen_base.py), and their parameters say `base`: true. All others have
format 4.

A rank's own tensors are its buffers and random states. No file and no process ever holds the rows of all ranks, of
which there are some for every tensor and rank.

Formats 1 to 3 are refused (decision 106).

`manifest_parser.py` reads it from its files and checks it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.checkpoint.fields import Field
from zero3d.checkpoint.folders import MANIFEST
from zero3d.distributed.degrees import Degrees
from zero3d.shards.boxes import Box, Shape

NEWEST = WITH_BASE = 5  # only where frozen weights were left out
FORMAT = 4
MASTER, FROZEN, AVERAGE = "master", "weight", "ema"
BUFFER, STREAM = "buffer:", "rng:"  # how keys of a rank's own tensors begin
TORCH, NUMPY = f"{STREAM}torch", f"{STREAM}numpy"
FLOATING = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
OTHERS = {
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
CODES = FLOATING | OTHERS  # torch's names of dtypes -> those of safetensors
WORDS, WORD = 624, 2**32 - 1  # of the Mersenne Twister


class TensorSpec(NamedTuple):
    """Describes a tensor in a file; dtype by torch's name."""

    shape: Shape
    dtype: str


class BoxRow(NamedTuple):
    """Describes a box of one state of one parameter, and the tensor that holds it."""

    name: str
    state: str
    box: Box
    dtype: str
    key: str


@dataclass(frozen=True)
class ParameterSpec:
    """Describes one parameter of the full model.

    in_base  it is frozen, and its values were left out: the base has them
    """

    shape: Shape
    trainable: bool
    dtype: str
    in_base: bool = False


@dataclass(frozen=True)
class Part:
    """Holds what one rank of those that saved a checkpoint has written: its file of tensors, and what is in it.

    source       the file that says so, for messages
    checksum     of the file of tensors, as `files.has_checksum` takes it
    own          buffers and random states
    scalars      of the optimizer; none where the rank has no optimizer states
    python_rng   random states of `random` and numpy
    sums         checksums of tensors by their keys
    """

    source: str
    file: str
    checksum: str
    parameters: Mapping[str, ParameterSpec]
    rows: Sequence[BoxRow]
    own: Mapping[str, TensorSpec]
    scalars: Mapping[str, float]
    python_rng: Field
    sums: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """Holds what a checkpoint in `folder` says of itself, but for the ranks' parts.

    fields   all of it, for what only a model can judge
    parts    files of the ranks' parts -> their SHA-256, by rank
    """

    folder: Path
    fields: Field
    format: int
    step: int
    mesh: Degrees
    parameters: Mapping[str, ParameterSpec]
    parts: Mapping[str, str]

    def value(self, name: str) -> Any:
        """Return an entry as it was written; None where there is none."""
        return self.fields.entries().get(name)

    @property
    def left_out(self) -> list[str]:
        """Names of the frozen parameters whose values the base has."""
        return [name for name, parameter in self.parameters.items() if parameter.in_base]

    @property
    def about(self) -> Mapping[str, Any]:
        """What the bits of the run that saved it depended on."""
        return self.value("about") or {}


def file_of(rank: int) -> str:
    """Return the name of the file of a rank of the mesh."""
    return f"rank-{rank:05d}.safetensors"


def part_of(rank: int) -> str:
    """Return the name of the file with a rank's part of the manifest."""
    return f"rank-{rank:05d}.json"


def key_of(name: str, state: str, box: Box) -> str:
    """Return the key of a box in its file."""
    return f"{state}:{name}@" + ",".join(f"{start}:{stop}" for start, stop in box)


def checksum_line(text: bytes) -> str:
    """Return what stands in the checksum's file."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def allowed_dtypes(state: str, parameter: ParameterSpec) -> tuple[str, ...]:
    """Return the dtypes in which a state of a parameter may be stored."""
    if state == FROZEN:
        return (parameter.dtype,)
    return ("float32", "float64") if state == MASTER else tuple(CODES)
