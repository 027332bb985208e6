"""Parameters whose new values are on their way: operations on one wait, and find a plain parameter."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d.distributed.axis import Pending
from zero3d.errors import Zero3dError
from zero3d.zero.pending_parameters import arrived, expect
from zero3d.zero.streams import compute_stream, wait_on


class Product(torch.autograd.Function):
    """A product whose gradient nobody asks for."""

    @staticmethod
    def forward(ctx, weight):
        return weight @ torch.ones(4, 1)


X = torch.ones(2, 4)
TOUCHES = {
    "its module": lambda m: m(X),
    "compiled": lambda m: torch.compile(m, backend="eager")(X),
    "F": lambda m: F.embedding(torch.tensor([1]), m.weight),
    "an operator": lambda m: 1.0 + m.weight,
    "an operation of the dispatcher": lambda m: torch.ops.aten.mm(X, m.weight),
    "autograd.Function": lambda m: Product.apply(m.weight),
    "recomputed": lambda m: checkpoint(lambda x: x @ m.weight, X.clone().requires_grad_(), use_reentrant=False),
    "recomputed by reentry": lambda m: checkpoint(torch.matmul, X, m.weight, use_reentrant=True),
    "vmap": lambda m: torch.vmap(lambda x: x @ m.weight)(X),
    "functional_call": lambda m: torch.func.functional_call(m, {"weight": 2 * m.weight}, X),
    "copied from": lambda m: torch.zeros(4, 4).copy_(m.weight),
    "copied into": lambda m: torch.no_grad()(m.weight.copy_)(torch.ones(4, 4)),
    "as an element": lambda m: torch.zeros(4, 4).__setitem__(0, m.bias),
    "in a list": lambda m: torch.stack([m.bias, m.bias]),
    "multi-tensor": lambda m: torch._foreach_lerp_([torch.zeros(4, 4), torch.zeros(4)], list(m.parameters()), 0.5),
    "data": lambda m: m.weight.data,
    "data replaced": lambda m: setattr(m.bias, "data", torch.zeros(4)),
    "address": lambda m: m.weight.data_ptr(),
    "storage": lambda m: m.weight.untyped_storage(),
    "DLPack": lambda m: torch.from_dlpack(m.weight.data),
    "numpy": lambda m: np.asarray(m.weight.detach()),
    "lists": lambda m: m.weight.tolist(),
    "printed": lambda m: repr(m.weight),
    "copied": lambda m: copy.deepcopy(m.weight),
    "saved": lambda m: torch.save(m.weight, io.BytesIO()),
    "state_dict": lambda m: m.state_dict(),
    "one vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "frozen": lambda m: m.requires_grad_(False),
    "optimized": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "cast": lambda m: m.double(),
}


def pending():
    module, waits = nn.Linear(4, 4), []
    params = list(module.parameters())

    def wait():
        waits.append(True)
        arrived(params)

    assert expect(params, wait)
    return module, params, waits


@pytest.mark.parametrize("touch", list(TOUCHES))
def test_whatever_touches_a_parameter_waits_once_and_finds_a_plain_one(touch):
    module, params, waits = pending()
    result = TOUCHES[touch](module)
    assert waits == [True]
    assert {type(p) for p in params} == {nn.Parameter}
    assert not any("wait" in vars(p) for p in params)
    assert type(result) is not type(pending()[1][0])


def test_naming_a_parameter_does_not_wait():
    module, params, waits = pending()
    assert all(isinstance(p, nn.Parameter) for p in params)
    assert set(params) == set(module.parameters())
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert params[0] in {params[0]: 1}
    assert waits == []


def test_a_copy_is_a_plain_parameter():
    module, _, _ = pending()
    copied = copy.deepcopy(module.weight)
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, module.weight)


def test_one_that_was_swapped_away_waits_once_and_is_plain_then():
    module, _, waits = pending()
    other = nn.Parameter(torch.ones(4, 4))
    torch.utils.swap_tensors(module.weight, other)
    for _ in range(2):
        other.detach()
    assert type(other) is nn.Parameter
    assert waits == [True]


def test_a_wait_that_failed_is_told_again_and_does_not_pass_for_new_weights():
    def lost():
        raise Zero3dError("a peer went away")

    engine = zero3d.Engine(nn.Linear(4, 4), stage=1, precision="fp32")
    weights = engine.units[0].weights
    weights._pending_gather = Pending(lost)
    weights.leave()
    with pytest.raises(Zero3dError, match="a peer went away"):
        engine.module.weight.detach()
    for _ in range(2):
        with pytest.raises(Zero3dError, match=r"new weights of unit '.*' did not arrive: look at the first error"):
            engine.module(X)


class Stream:
    """A stream of an accelerator that is not there."""

    device, current = torch.device("cuda", 0), []

    def __init__(self, log):
        self.log = log

    def __enter__(self):
        Stream.current.append(self)

    def __exit__(self, *_):
        Stream.current.pop()

    def wait_stream(self, other):
        self.log.append((self, "waits for", other))


def test_the_stream_of_compute_waits_also_where_another_one_asks_first(monkeypatch):
    log = []
    compute, side = Stream(log), Stream(log)
    Stream.current[:] = [compute]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream.current[-1])
    stream = compute_stream(Stream.device)
    pending = Pending(lambda: log.append((Stream.current[-1], "waits for", "weights")))
    with side:
        wait_on(stream, pending)
    assert log == [(compute, "waits for", "weights"), (side, "waits for", compute)]
    log.clear()
    wait_on(stream, Pending(lambda: log.append("waited")))
    assert log == ["waited"]


class OfItsOwn(nn.Parameter):
    """What a user's model may have."""


def test_parameters_of_another_class_are_not_left_on_their_way():
    params = [nn.Parameter(torch.ones(2)), OfItsOwn(torch.ones(2))]
    assert not expect(params, lambda: None)
    assert [type(p) for p in params] == [nn.Parameter, OfItsOwn]
