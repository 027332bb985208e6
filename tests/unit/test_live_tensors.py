"""The largest tensors that are alive when memory has run out."""

import sys

import torch

from zero3d.train.live_tensors import largest_tensors


class Refusing(torch.Tensor):
    """Somebody's own class, which has no device at the moment."""

    @property
    def device(self):
        raise LookupError("it is nowhere")


def test_a_tensor_that_refuses_to_be_looked_at_hides_no_other_and_equals_come_by_name():
    refusing = torch.zeros(3).as_subclass(Refusing)
    b = a = torch.zeros(1 << 20, dtype=torch.float64)
    a = torch.zeros(1 << 20, dtype=torch.float64)
    found = [
        each for each in largest_tensors(torch.device("cpu"), None, [sys._getframe()]) if " in test_a_ten" in each.name
    ]
    assert [each.name.split(" ")[0] for each in found][:2] == ["a", "b"]
    assert {each.nbytes for each in found[:2]} == {8 << 20}
    del refusing, a, b
