"""Torch's OutOfMemoryError in a loop of one's own says what the engine held."""

import pytest
import torch
from models import batch, build, loss_of

import zero3d
from zero3d.train.post_mortem import find_exhaustion


def test_the_error_of_an_engines_method_carries_what_it_held_once():
    engine = zero3d.Engine(build("net"), stage=2, precision="bf16")
    loss = loss_of(engine, batch(0))
    hook = torch.OutOfMemoryError("CUDA out of memory.")

    def fail(grad):
        raise hook

    loss.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine.backward(loss)
    (note,) = raised.value.__notes__
    assert note.startswith("held by the engine: parameters ")
    assert "optimizer " in note
    assert "(device)" in note


def test_another_error_carries_nothing():
    engine = zero3d.Engine(build("net"), stage=2, precision="bf16")
    loss = loss_of(engine, batch(0))

    def fail(grad):
        raise ValueError("x")

    loss.register_hook(fail)
    with pytest.raises(ValueError, match="x") as raised:
        engine.backward(loss)
    assert not hasattr(raised.value, "__notes__")


def test_a_shortage_that_was_dealt_with_is_not_the_reason_of_a_later_error():
    def caught(error):
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError:
                raise error from None
        except ValueError as found:
            return found

    assert find_exhaustion(caught(ValueError("another"))) is None
    assert find_exhaustion(torch.OutOfMemoryError("CUDA out of memory")) is not None
