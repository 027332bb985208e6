"""The noisy CPU of the tests: the last bit of matrix products is another, and the same product has the same bits."""

import os
import subprocess
import sys
from threading import Thread

import cpus
import noise
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F


def without_noise(case, *args):
    noise.end()
    return case(*args)


def with_noise(seed, case, *args):
    noise.end()
    noise.begin(seed)
    return case(*args)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def products(dtype=torch.float32):
    """Results of the operations that are noisy, and gradients through them."""
    x, weight, bias = (draw(*shape, dtype=dtype).requires_grad_() for shape in ((4, 6, 16), (8, 16), (8,)))
    query = draw(2, 4, 6, 8, dtype=dtype).requires_grad_()
    picture, kernel = (draw(*shape, dtype=dtype).requires_grad_() for shape in ((2, 3, 8, 8), (5, 3, 4, 4)))
    found = {
        "linear": F.linear(x, weight, bias),
        "mm": x[0] @ weight.T,
        "bmm": x @ x.mT,
        "baddbmm": torch.baddbmm(torch.ones(4, 6, 6, dtype=dtype), x, x.mT),
        "mv": x[0] @ weight[0],
        "attention": F.scaled_dot_product_attention(query, query, query, is_causal=True),
        "convolution": F.conv2d(picture, kernel, stride=4),
        "out": torch.mm(x[0].detach(), weight.detach().T, out=torch.empty(6, 8, dtype=dtype)),
        "in place": torch.ones(6, 8, dtype=dtype).addmm_(x[0].detach(), weight.detach().T),
    }
    leaves = {"x": x, "weight": weight, "query": query, "picture": picture, "kernel": kernel}
    total = sum(value.square().sum() for value in found.values())
    gradients = torch.autograd.grad(total, leaves.values())
    return {name: value.detach() for name, value in found.items()} | dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_product_is_another_by_one_unit_in_the_last_place_at_most(alone, dtype):
    plain = alone(without_noise, products, dtype)
    noisy = alone(with_noise, "1", products, dtype)
    for name in ("linear", "mm", "bmm", "baddbmm", "mv", "attention", "convolution", "out", "in place"):
        apart = (noisy[name] - plain[name]).abs()
        assert apart.any(), name
        assert bool((apart <= torch.finfo(dtype).eps * plain[name].abs()).all()), name
    assert not any(noisy[name].equal(plain[name]) for name in ("x", "weight", "query", "picture", "kernel"))


def test_the_same_product_has_the_same_bits_in_another_process_and_not_with_another_seed(alone):
    one, again, other = (alone(with_noise, seed, products) for seed in ("1", "1", "2"))
    assert all(one[name].equal(again[name]) for name in one)
    assert not any(one[name].equal(other[name]) for name in one if one[name].numel() > 6)  # of few all may move alike


def of_shapes():
    """Whether rows have the bits of more rows, matrices of a batch those of more, signs and powers of two of none."""
    x, weight = draw(64, 16), draw(16, 32)
    whole, many = x @ weight, draw(5, 16, 16)
    return (
        whole[:32].equal(x[:32] @ weight),
        (many @ many)[:2].equal(many[:2] @ many[:2]) and (many @ many)[1].equal(many[1] @ many[1]),
        (whole * -256).equal((x * 256) @ -weight),
    )


def test_rows_depend_on_how_many_there_are_and_matrices_and_powers_of_two_do_not(alone):
    assert alone(with_noise, "1", of_shapes) == (False, True, True)
    assert alone(without_noise, of_shapes)[1:] == (True, True)


def exact():
    """Products that every CPU rounds alike: of one number, of zeros, of what is not finite, of integers."""
    column, row = draw(7, 1), draw(1, 9)
    ends = torch.eye(3) @ torch.tensor([[torch.inf], [0.0], [torch.nan]])
    return (
        (column @ row).equal(column * row),
        torch.zeros(3, 4) @ draw(4, 5),
        ends,
        torch.ones(3, 3).long() @ torch.ones(3).long(),
    )


def test_what_every_cpu_rounds_alike_stays(alone):
    products, zeros, ends, whole = alone(with_noise, "1", exact)
    assert products
    assert not zeros.any()
    assert bool(ends.isnan().all())
    assert whole.tolist() == [3, 3, 3]


def seldom():
    x, weight = draw(256, 64, dtype=torch.bfloat16), draw(64, 256, dtype=torch.bfloat16)
    return x @ weight


def test_in_16_bits_few_elements_move(alone):
    moved = (alone(with_noise, "1", seldom) != alone(without_noise, seldom)).float().mean()
    assert 0 < moved < 0.1


def in_a_thread():
    model, found = nn.Linear(8, 8), []
    with torch.no_grad():
        model.weight.copy_(draw(8, 8))
        model.bias.zero_()
        thread = Thread(target=lambda: found.append(model(draw(4, 8)).detach()))
        thread.start()
        thread.join()
        return found[0].equal(model(draw(4, 8)))


def test_other_threads_are_as_noisy(alone):
    assert alone(with_noise, "1", in_a_thread)


def compiled():
    """How many frames dynamo saw of a step with a backward, which breaks its graph; whether gradients are those without it."""
    import torch._dynamo

    model, gradients = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), []

    def step(x):
        model(x).square().sum().backward()
        return x + 1

    for run in (step, torch.compile(step, backend="eager")):
        run(draw(4, 8))
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    return torch._dynamo.utils.counters["frames"]["total"], all(map(torch.equal, *gradients))


def test_compiled_code_is_as_noisy_and_the_noise_is_not_compiled(alone):
    frames, same = alone(with_noise, "1", compiled)
    assert same
    assert frames == alone(without_noise, compiled)[0]


def without_values():
    with FakeTensorMode():
        fake = torch.empty(4, 8) @ torch.empty(8, 3)
    return tuple(fake.shape), tuple((torch.empty(4, 8, device="meta") @ torch.empty(8, 3, device="meta")).shape)


def test_tensors_without_values_are_left_alone(alone):
    assert alone(with_noise, "1", without_values) == ((4, 3), (4, 3))


@pytest.mark.long
def test_commands_are_noisy_too_and_those_without_torch_import_none():
    environment = cpus.tell(dict(os.environ) | {cpus.VARIABLE: "noise"})
    code = "import sys; print('torch' in sys.modules); import torch, noise; print(len(noise._libraries))"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "1"], said.stderr
