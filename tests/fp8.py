"""A package that stands in for torchao's fp8 training on the CPU: the same names, factors rounded to 8 bits."""

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import torch
from torch import nn


@dataclass
class Float8LinearConfig:
    pad_inner_dim: bool = False


def rounded(x):
    """A tensor's values in e4m3, scaled to its largest."""
    scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().max().float().clamp_min(1e-12)
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat, rows = rounded(grad).flatten(0, -2), rounded(x).flatten(0, -2)
        return rounded(grad) @ rounded(weight), flat.T @ rows


class Float8Linear(nn.Linear):
    def forward(self, x):
        y = Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


def convert_to_float8_training(module, *, module_filter_fn=None, config=None):
    assert config.pad_inner_dim
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and module_filter_fn(child, name):
            with torch.device("meta"):
                made = Float8Linear(child.in_features, child.out_features, bias=False)
            made.weight, made.bias = child.weight, child.bias
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, made)
    return module


@contextmanager
def torchao(convert=convert_to_float8_training):
    """The package is there, and this device has products in fp8."""
    package, float8 = ModuleType("torchao"), ModuleType("torchao.float8")
    float8.Float8LinearConfig, float8.convert_to_float8_training = Float8LinearConfig, convert
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {"torchao": package, "torchao.float8": float8}))
        stack.enter_context(mock.patch("zero3d.models.fp8.find_spec", return_value=package))
        stack.enter_context(mock.patch("zero3d.models.fp8.refuse_device", return_value=None))
        yield
