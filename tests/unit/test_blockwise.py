"""States in 8 bits: codes, blocks, what is stored twice, and the optimizer on plain tensors."""

import pytest
import torch

from zero3d.errors import ConfigError
from zero3d.optim import adamw8bit
from zero3d.optim.blockwise import BLOCK, Blocks, codes, decode, encode
from zero3d.optim.eight_bit import AdamW8bit

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "positive"])


def random(signed, scale=1.0, blocks=64):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(blocks, BLOCK, generator=generator) * torch.randn(blocks, 1, generator=generator).exp()
    return (values if signed else values.square()) * scale


@KINDS
def test_codes_rise_and_end_at_one(signed):
    values, bounds, first = codes(signed, CPU)
    assert len(values) == 255 == len(bounds)
    assert bool((values.diff() > 0).all())
    assert len(first) == 1 << 16
    assert values[-1] == 1.0
    assert values[0] == (-1.0 if signed else 0.0)
    assert torch.equal(values, -values.flip(0)) == signed
    assert 0.0 in values


@KINDS
def test_every_value_becomes_the_nearest_code(signed):
    blocks = random(signed)
    stored, scales = encode(blocks.clone(), signed)
    values = codes(signed, CPU).values
    away = (blocks / scales[:, None]).double()[..., None] - values.double()
    nearest = away.abs().argmin(-1)
    if not signed:
        nearest[(nearest == 0) & (blocks > 0)] = 1  # what is not 0 stays so
    assert torch.equal(stored.long(), nearest)
    assert torch.equal(scales, blocks.abs().amax(1))


@KINDS
def test_the_table_finds_what_a_search_does(signed):
    """Around every bound, around every power of two, and everywhere between."""
    bounds = codes(signed, CPU).bounds[:-1]
    powers = torch.tensor([2.0**-n for n in range(1, 40)])
    near = torch.cat([bounds, powers, -powers if signed else powers, torch.linspace(-1 if signed else 0, 1, 5001)])
    near = torch.cat([near, near.nextafter(torch.tensor(2.0)), near.nextafter(torch.tensor(-2.0))])
    near = near[(near >= (-1 if signed else 0)) & (near <= 1)]
    blocks = torch.ones(-(-len(near) // (BLOCK - 1)), BLOCK)
    padded = torch.nn.functional.pad(near, (0, len(blocks) * (BLOCK - 1) - len(near)))
    blocks[:, 1:] = padded.view(len(blocks), -1)
    stored, scales = encode(blocks.clone(), signed)
    assert torch.equal(scales, torch.ones(len(blocks)))
    assert torch.equal(stored.long(), torch.bucketize(blocks, bounds))


@KINDS
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-38, 1e30])
def test_what_was_read_is_stored_again_with_its_bits(signed, scale):
    stored, scales = encode(random(signed, scale), signed)
    again, scales_again = encode(decode(stored, scales, signed), signed)
    assert torch.equal(decode(again, scales_again, signed), decode(stored, scales, signed))
    assert torch.equal(scales_again, scales)


@KINDS
def test_numbers_too_small_for_codes_still_read_alike(signed):
    stored, scales = encode(random(signed, 1e-42), signed)
    read = decode(stored, scales, signed)
    assert torch.equal(decode(*encode(read.clone(), signed), signed), read)


@KINDS
def test_the_error_of_a_value_is_bounded(signed):
    blocks = random(signed)
    read = decode(*encode(blocks.clone(), signed), signed)
    largest = blocks.abs().amax(1, keepdim=True)
    assert bool(((read - blocks).abs() <= largest * (0.0106 if signed else 0.0053)).all())


def test_a_second_moment_is_zero_only_where_it_was():
    block = torch.zeros(1, BLOCK)
    block[0, :3] = torch.tensor([1.0, 1e-12, 1e-30])
    read = decode(*encode(block.clone(), False), False)
    assert bool((read[0, :3] > 0).all())
    assert not read[0, 3:].any()


@KINDS
def test_blocks_of_zeros_and_of_one_huge_value(signed):
    blocks = torch.zeros(2, BLOCK)
    blocks[1, 7] = 3e38
    read = decode(*encode(blocks.clone(), signed), signed)
    assert torch.equal(read, blocks)


def test_a_piece_that_ends_inside_a_block():
    state = Blocks(torch.full((2, BLOCK), 9, dtype=torch.uint8), torch.ones(2), 300, True)
    values = torch.arange(-150.0, 150.0)
    state.write(values)
    assert state.read().shape == (300,)
    assert float((state.read() - values).abs().max()) < 1.5
    assert not decode(state.codes, state.scales, True).view(-1)[300:].any()


# --- the optimizer ----------------------------------------------------------------------------------


def steps(make, sizes, count, lr=0.01):
    generator = torch.Generator().manual_seed(5)
    params = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    optimizer = make(params)
    for number in range(count):
        optimizer.param_groups[0]["lr"] = lr / (number + 1)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) + p.detach()
        optimizer.step()
    return params, optimizer


def written_out(params, grads, moments, count, lr, betas=(0.9, 0.999), eps=1e-8, decay=0.01):
    """One step of AdamW in fp64 (Loshchilov and Hutter 2019, algorithm 2)."""
    m, v = moments
    m, v = betas[0] * m + (1 - betas[0]) * grads, betas[1] * v + (1 - betas[1]) * grads**2
    away = m / (1 - betas[0] ** count) / ((v / (1 - betas[1] ** count)).sqrt() + eps)
    return params * (1 - lr * decay) - lr * away, (m, v)


def test_one_step_is_adamw_and_later_ones_are_of_stored_moments():
    (p,), optimizer = steps(lambda params: AdamW8bit(params), [700], 3)
    generator = torch.Generator().manual_seed(5)
    value, moments = torch.randn(700, generator=generator).double(), (torch.zeros(700).double(),) * 2
    for count in (1, 2, 3):
        grad = torch.randn(700, generator=generator) + value.float()
        value, moments = written_out(value, grad.double(), moments, count, 0.01 / count)
        pair = [
            Blocks(torch.zeros(3, BLOCK, dtype=torch.uint8), torch.zeros(3), 700, signed) for signed in (True, False)
        ]
        for state, exact in zip(pair, moments, strict=True):
            state.write(exact.float())
        moments = tuple(state.read().double() for state in pair)
    torch.testing.assert_close(p.detach().double(), value, rtol=1e-4, atol=1e-4)
    assert float(optimizer.state[p]["step"]) == 3


@pytest.mark.parametrize("bucket", [BLOCK, 1024])
def test_how_many_blocks_are_updated_at_once_changes_no_bit(bucket, monkeypatch):
    sizes = [1, 255, 256, 257, 3000, 64]
    whole, _ = steps(lambda params: AdamW8bit(params), sizes, 4)
    monkeypatch.setattr("zero3d.optim.eight_bit.update_bucket", lambda device: bucket)
    cut, _ = steps(lambda params: AdamW8bit(params), sizes, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_pieces_without_a_gradient_and_empty_groups_stay():
    p, q = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    optimizer = AdamW8bit([{"params": [p, q]}, {"params": []}])
    p.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(q, torch.ones(4))
    assert not torch.equal(p, torch.ones(4))


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": float("nan")}])
def test_numbers_that_cannot_be_are_one_line(wrong):
    with pytest.raises(ConfigError, match=r"adamw8bit: .*: pass numbers from 0"):
        adamw8bit(**wrong)
