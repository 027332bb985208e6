"""Values that travel in blocks: what is lost, what is not finite, tails, and bytes."""

import pytest
import torch

from zero3d.distributed.block_bytes import BLOCK, SCALE, coding_scratch, message_bytes
from zero3d.distributed.block_codec import LEAST_SCALE, BlockCodec

BITS = pytest.mark.parametrize("bits", [8, 4])
SIZES = (1, 5, 255, 256, 257, 4096, 70_001)


def values_of(n, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp()


def through(codec, values, dtype=torch.float32, **options):
    """The values after a message, and each one's scale."""
    message = torch.full((codec.message_bytes(values.numel()),), 255, dtype=torch.uint8)
    codec.encode(values, message, **options)
    out = torch.empty(values.numel(), dtype=dtype)
    codec.decode(message, out)
    blocks = -(-values.numel() // BLOCK)
    return out, message[: SCALE * blocks].view(torch.float32).repeat_interleave(BLOCK)[: values.numel()]


@BITS
@pytest.mark.parametrize("n", SIZES)
def test_at_most_half_a_scale_is_lost(bits, n):
    codec, values = BlockCodec(bits), values_of(n)
    found, scales = through(codec, values)
    assert bool(((found.double() - values).abs() <= 0.5001 * scales.double()).all())
    blocks = values.split(BLOCK)
    largest = torch.cat([block.abs().max().expand(len(block)) for block in blocks])
    assert torch.allclose(scales, largest / codec.most, rtol=1e-6)


@BITS
def test_halves_go_to_the_even_code(bits):
    codec = BlockCodec(bits)
    values = torch.tensor([float(codec.most), 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert through(codec, values)[0].tolist() == [codec.most, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0]


@BITS
def test_every_code_survives(bits):
    codec = BlockCodec(bits)
    values = torch.arange(-codec.most, codec.most + 1).float()
    assert torch.equal(through(codec, values)[0], values)


@BITS
def test_noise_leaves_the_mean_and_repeats_by_its_generator(bits):
    codec, values = BlockCodec(bits), torch.full((BLOCK * 64,), 0.3)
    values[::BLOCK] = codec.most  # a scale of 1
    found, scales = through(codec, values, noise=torch.Generator().manual_seed(1))
    again, _ = through(codec, values, noise=torch.Generator().manual_seed(1))
    assert torch.equal(found, again)
    assert bool(((found - values).abs() < scales).all())
    others = found.view(-1, BLOCK)[:, 1:]
    assert set(others.unique().tolist()) == {0.0, 1.0}
    assert abs(float(others.mean()) - 0.3) < 0.02
    assert float(found.abs().max()) == codec.most  # the largest is not rounded up


@BITS
def test_what_is_not_finite_makes_a_block_nan(bits):
    values = values_of(6 * BLOCK)
    for block, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        values[block * BLOCK + 7] = bad
    found, _ = through(BlockCodec(bits), values)
    assert bool(found[: 3 * BLOCK].isnan().all())
    assert bool(found[3 * BLOCK :].isfinite().all())


@BITS
def test_zeros_huge_values_and_tiny_ones(bits):
    codec, largest = BlockCodec(bits), torch.finfo(torch.float32).max
    values = torch.zeros(4 * BLOCK)
    values[BLOCK + 3], values[2 * BLOCK :] = largest, 1e-42
    values[3 * BLOCK] = -LEAST_SCALE
    found, scales = through(codec, values)
    assert torch.equal(found[:BLOCK], torch.zeros(BLOCK))
    assert found[BLOCK + 3] == pytest.approx(largest, rel=1e-6)
    assert bool(((found.double() - values).abs() <= 0.5 * scales.double()).all())
    assert float(scales.min()) == LEAST_SCALE
    assert found[3 * BLOCK] == -LEAST_SCALE


@BITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_from_fp32(bits, dtype):
    codec, values = BlockCodec(bits), values_of(1000).to(dtype)
    wide, _ = through(codec, values.float())
    assert torch.equal(through(codec, values, dtype)[0], wide.to(dtype))


@BITS
def test_bits_do_not_depend_on_scratch_or_neighbours(bits):
    """A part of whole blocks has the codes that it has in the whole, however much is coded at once."""
    codec, values = BlockCodec(bits), values_of(10 * BLOCK)
    whole, _ = through(codec, values)
    groups, _ = through(codec, values, scratch=torch.empty(3 * BLOCK))
    assert torch.equal(whole, groups)
    part, _ = through(codec, values[4 * BLOCK : 7 * BLOCK])
    assert torch.equal(part, whole[4 * BLOCK : 7 * BLOCK])


@BITS
def test_bytes_are_a_scale_and_whole_blocks_of_codes(bits):
    codec = BlockCodec(bits)
    assert [codec.message_bytes(n) for n in (1, 256, 257)] == [4 + 32 * bits, 4 + 32 * bits, 2 * (4 + 32 * bits)]
    assert message_bytes(1 << 20, 8) / (2 << 20) == pytest.approx(0.5078, abs=1e-4)  # of bf16
    assert coding_scratch(300, "cpu") == 512


@BITS
def test_values_are_left_as_they_were(bits):
    values = values_of(700)
    before = values.clone()
    through(BlockCodec(bits), values)
    assert torch.equal(values, before)


@BITS
@pytest.mark.parametrize("room", [None, 2 * BLOCK, 7 * BLOCK])
def test_messages_of_several_ranks_are_decoded_together(bits, room):
    codec, values = BlockCodec(bits), values_of(5 * 3 * BLOCK).view(5, -1)
    messages = torch.empty(5, codec.message_bytes(3 * BLOCK), dtype=torch.uint8)
    for row, message in zip(values, messages, strict=True):
        codec.encode(row, message)
    found = torch.empty_like(values)
    codec.decode(messages, found, None if room is None else torch.empty(room))
    assert torch.equal(found, torch.stack([through(codec, row)[0] for row in values]))
