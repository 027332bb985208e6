"""Buckets: tensors go in whole or in parts, each with a checksum, and come out with the same bits or not at all."""

from itertools import chain
from random import Random

import pytest
import torch
import xxhash

from zero3d.errors import ConfigError, StreamError
from zero3d.weights.buckets import ALIGN, Assembler, Bucket, Packer, check_bucket_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def memories(nbytes, count=2):
    return [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)]


def drawn(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sent(tensors, nbytes, dtype=None):
    """What comes of tensors in buckets that are described by their headers alone."""
    packer, assembler, found = Packer(memories(nbytes)), Assembler(), {}
    for bucket in chain(packer.feed(tensors, dtype), packer.flush()):
        again = Bucket.of(bucket.number, bucket.memory, bucket.nbytes, bucket.header())
        found |= {name: tensor.clone() for name, tensor in assembler.unpack(again)}
    assert assembler.missing == []
    assert (assembler.count, assembler.nbytes) == (len(found), sum(t.nbytes for t in found.values()))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_out_is_what_went_in_however_it_is_cut(seed):
    draw = Random(seed)
    blocks = draw.randint(1, 5)
    tensors = {
        f"t{i}": drawn([draw.randint(0, 9) for _ in range(draw.randint(0, 3))], draw.choice(DTYPES), i)
        for i in range(draw.randint(1, 8))
    }
    found = sent(tensors, blocks * ALIGN)
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in tensors.items())


def test_a_header_is_all_that_a_bucket_needs_beside_its_memory():
    tensors = {"a": drawn((3, 5)), "b": drawn((700,), torch.bfloat16), "c": torch.tensor(3)}
    found = sent(tensors, 1024)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_checksum_is_the_xxh3_of_a_tensors_bytes_and_comes_with_its_last_part():
    tensor = drawn((300,))
    packer = Packer(memories(512))
    parts = [(part.offset, part.checksum) for b in packer.feed({"a": tensor}) for part in b.parts]
    parts += [(part.offset, part.checksum) for b in packer.flush() for part in b.parts]
    assert parts == [(0, ""), (128, ""), (256, xxhash.xxh3_64(tensor.numpy().tobytes()).hexdigest())]


def test_floating_numbers_alone_get_another_dtype():
    found = sent({"weight": drawn((4, 4)), "steps": torch.tensor([257])}, 4096, torch.bfloat16)
    assert torch.equal(found["weight"], drawn((4, 4)).bfloat16())
    assert (found["steps"].dtype, found["steps"].tolist()) == (torch.int64, [257])


def test_tensors_that_still_have_their_checksum_are_left_out_whatever_their_size():
    tensors = {"a": drawn((4,)), "large": drawn((700,)), "b": drawn((5,), seed=1)}
    first = Packer(memories(1024))
    assert {name for name, _ in taken(first, tensors, torch.bfloat16)} == tensors.keys()
    second = Packer(memories(1024), first.checksums)
    tensors["b"] = tensors["b"] + 1
    assert [name for name, _ in taken(second, tensors, torch.bfloat16)] == ["b"]
    assert second.unchanged == 2
    assert second.checksums.keys() == first.checksums.keys()
    third = Packer(memories(1024), second.checksums)
    assert list(taken(third, tensors, torch.bfloat16)) == []


def taken(packer, tensors, dtype):
    assembler = Assembler()
    for bucket in chain(packer.feed(tensors, dtype), packer.flush()):
        yield from assembler.unpack(bucket)


def test_a_whole_tensor_is_a_view_of_its_bucket():
    memory = memories(4096)
    packer = Packer(memory)
    list(packer.feed({"a": drawn((4,))}))
    (bucket,) = packer.flush()
    ((_, tensor),) = Assembler().unpack(bucket)
    assert tensor.data_ptr() == memory[0].data_ptr()


def test_a_byte_that_changed_is_found():
    packer = Packer(memories(4096))
    list(packer.feed({"a": drawn((4,)), "b": drawn((4,))}))
    (bucket,) = packer.flush()
    bucket.memory[ALIGN] += 1  # the first byte of b
    assembler = Assembler()
    arriving = assembler.unpack(bucket)
    assert next(arriving)[0] == "a"
    with pytest.raises(StreamError, match=r"'b' has arrived with the checksum .* a machine or a link changes bytes"):
        next(arriving)


def test_a_part_that_is_missing_or_out_of_turn_is_found():
    packer, assembler = Packer(memories(512, 4)), Assembler()
    first, second, third = [*packer.feed({"a": drawn((300,))}), *packer.flush()]
    assert list(assembler.unpack(first)) == []
    assert assembler.missing == ["a"]
    with pytest.raises(StreamError, match="'a' goes on at element 256, and 128 have come"):
        list(assembler.unpack(third))
    again = Assembler()
    assert [name for bucket in (first, second, third) for name, _ in again.unpack(bucket)] == ["a"]


@pytest.mark.parametrize("row", [
    ["a", "float32", [4], 0, 4, 0, ""], ["a", "no_dtype", [1], 0, 1, 0, ""], ["a", "save", [1], 0, 1, 0, ""],
    ["a", "uint8", [2], 0, 2, 1, ""],
])  # fmt: skip
def test_a_header_that_no_bucket_has_is_refused(row):
    with pytest.raises(StreamError, match="'a' is announced as"):
        Bucket.of(0, torch.zeros(64, dtype=torch.uint8), 12, [row])


def test_a_bucket_has_room_for_something():
    assert check_bucket_bytes(4096) == check_bucket_bytes(4097) == 4096
    for nbytes in (64, 4095):
        with pytest.raises(ConfigError, match=f"bucket_bytes={nbytes:,} is less than a bucket has: type 4,096 or more"):
            check_bucket_bytes(nbytes)
