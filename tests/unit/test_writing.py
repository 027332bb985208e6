"""Files of tensors that are written chunk by chunk, and hashed on their way."""

import errno
import json
import os

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from zero3d.checkpoint import writing
from zero3d.checkpoint.files import has_checksum
from zero3d.checkpoint.manifest import CODES
from zero3d.checkpoint.writing import told, write_tensors
from zero3d.errors import CheckpointError


def tensors():
    """Every dtype that a file may hold, strided views, scalars, nothing at all; odd sizes before wider dtypes."""
    torch.manual_seed(1)
    wide = torch.randn(40, 12, 8)
    each = {f"of {name}": torch.arange(7).to(getattr(torch, name)) for name in CODES}
    return each | {
        "whole": wide, "strided": wide[::2, 1:9, 3:6], "transposed": wide.transpose(0, 2), "scalar": torch.tensor(1.5),
        "nothing": torch.empty(0, 3), "half \u00e4": wide.to(torch.float16)[1], "gradient": torch.ones(3).requires_grad_(),
    }  # fmt: skip


def checksum_of(values):
    """What `checkpoint/files.py` says of a tensor."""
    return xxhash.xxh3_64(bytes(values.detach().contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()


@pytest.mark.parametrize("most", [1 << 25, 4096, 96, 8])
def test_a_file_holds_what_it_was_given_whatever_the_buffer_and_its_checksum_is_that_of_what_was_written(
    tmp_path, monkeypatch, most
):
    for name in ("BUFFER_BYTES", "GIVEN_BYTES", "BLOCK_BYTES"):
        monkeypatch.setattr(writing, name, most)
    path, given = tmp_path / "x.safetensors", tensors()
    checksums = write_tensors(path, given, format="pt", writer="somebody")
    assert checksums.tensors == {key: checksum_of(value) for key, value in given.items()}
    assert checksums.file == xxhash.xxh3_128(path.read_bytes()).hexdigest()
    assert has_checksum(path, checksums.file)
    assert not has_checksum(path, f"{int(checksums.file, 16) ^ 1:032x}")
    read = load_file(path)
    assert read.keys() == given.keys()
    for key, value in given.items():
        assert read[key].dtype == value.dtype
        assert read[key].shape == value.shape
        assert read[key].contiguous().view(-1).tolist() == value.detach().contiguous().view(-1).tolist(), key
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "writer": "somebody"}


def test_every_tensor_begins_at_a_multiple_of_its_elements_size(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors())
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    sizes = {key: value.element_size() for key, value in tensors().items()}
    assert all(header[key]["data_offsets"][0] % size == 0 for key, size in sizes.items())


def test_host_memory_is_one_buffer_of_bounded_size(tmp_path, monkeypatch):
    for name in ("BUFFER_BYTES", "GIVEN_BYTES"):
        monkeypatch.setattr(writing, name, 1000)
    seen, made, empty = [], [], torch.empty
    staged = writing._staged

    def noted(tensors):
        for key, chunk in staged(tensors):
            seen.append(len(chunk))
            yield key, chunk

    monkeypatch.setattr(writing, "_staged", noted)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: made.append(sizes) or empty(*sizes, **options))
    values = {"a": torch.zeros(99, 100).t(), "b": torch.zeros(3, dtype=torch.int64)}
    write_tensors(tmp_path / "x.safetensors", values)
    assert made == [(1000,)]  # none where all lie in the host's memory as they are written
    assert sum(seen) == 100 * 99 * 4 + 24
    assert max(seen) <= 1000
    write_tensors(tmp_path / "x.safetensors", {name: value.contiguous() for name, value in values.items()})
    assert made[1:] == [(0,)]
    assert max(seen) <= 1000


def test_a_dtype_that_no_file_holds_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"x\.safetensors: buffer:b is complex128, which safetensors files do not"
    ):
        write_tensors(tmp_path / "x.safetensors", {"buffer:b": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize(("number", "remedy"), [
    (errno.ENOSPC, "make room"), (errno.EEXIST, "move away what else has this name"), (errno.EIO, "have the disk looked at"),
])  # fmt: skip
def test_an_error_of_the_system_is_told_with_its_own_remedy(tmp_path, number, remedy):
    (tmp_path / "checkpoints" / "step-9").mkdir(parents=True)
    place = tmp_path / "checkpoints" / "step-9"
    for end in (" and try again.", "; the older checkpoints are whole."):
        with pytest.raises(CheckpointError) as error, told(place / "file", 1000):
            raise OSError(number, os.strerror(number))
        assert str(error.value).endswith(f"free): {remedy}{end}")
        (place / "manifest.json").touch()


def test_a_file_in_the_place_of_the_checkpoints_is_to_be_moved_away(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match=r"\(File exists\): move away what else has this name and try again"):
        with told(tmp_path / "checkpoints" / "step-1"):
            (tmp_path / "checkpoints").mkdir()
