"""What recurrences and short convolutions of hybrids are made of: modules that mix tokens, and their parameters.

    Mamba, Mamba 2, Gated DeltaNet, KDA    conv1d [channels, 1, width], A_log, D, dt_bias
    short convolutions (LFM2)              conv   [channels, 1, width]
    RG-LRU (RecurrentGemma)                conv_1d, recurrent_param, biases of gates by head
    RWKV                                   time_decay, time_first, time_mix_*

These are rates, filters and offsets of single channels or heads: no matrices, whatever their dimensions. They are told
by what a module has, not by what it is called, since mixers are called mamba, mixer, conv, linear_attn, temporal_block.
Whether a module mixes tokens is asked here alone: mixing.py knows transformers' classes, others have one of these.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from zero3d.models.mixing import is_mixer_class

RATES = ("A_log", "recurrent_param", "time_decay")  # a module with one of them of its own is a recurrence
OWN = (*RATES, "D", "time_first")  # of a recurrence, like its biases
READ = ("dt_proj",)  # linear layers of Mamba 1 whose weight the mixer multiplies by itself: no forward of theirs runs
LOADS = ("LOAD_ATTR", "LOAD_METHOD")  # of bytecode
SHIFTS = "time_mix_"  # RWKV's shares of this token and the one before, [1, 1, width], in its feed-forward, too


def is_short_convolution(module: nn.Module) -> bool:
    """Return whether a module is a convolution of channels over their last tokens: depthwise, padded to be causal.

    Convolutions of towers for sounds are padded on both sides, or outside.
    """
    if not isinstance(module, nn.Conv1d):
        return False
    (width,), (padding,) = module.kernel_size, module.padding if isinstance(module.padding, tuple) else (0,)
    depthwise = module.groups == module.in_channels == module.out_channels
    return depthwise and width > 1 and padding == module.dilation[0] * (width - 1)


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module mixes tokens otherwise than by attention.

    It is of a class that mixing.py keeps documents apart in, or has a short convolution or a recurrence itself.
    """
    has_own = _is_recurrence(module) or any(map(is_short_convolution, module.children()))
    return has_own or is_mixer_class(type(module))


def read_past(model: nn.Module) -> set[str]:
    """Return the names of linear layers whose weight is read past them: an adapter or a code would do nothing.

    A mixer does, or a module that multiplies by what it has clamped while it is trained (Gemma 3n).
    """
    clamped = {kind: _clamped(kind) for kind in {type(module) for module in model.modules()}}
    return read_by_mixers(model) | {
        f"{owner}.{name}".lstrip(".")
        for owner, module in model.named_modules()
        for name in clamped[type(module)]
        if hasattr(module, name)
    }


def _clamped(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of modules for which methods of a class have `self.NAME.weight.clamp(...)`."""
    return frozenset(name for method in vars(kind).values() if inspect.isfunction(method) for name in _clamps(method))


def _clamps(method: Any) -> Iterator[str]:
    code = inspect.unwrap(method).__code__
    if {"weight", "clamp"} <= set(code.co_names):
        steps = [step.argval if step.opname in LOADS else "" for step in dis.get_instructions(code)]
        for name, *more in zip(steps, steps[1:], steps[2:], strict=False):
            if more == ["weight", "clamp"]:
                yield name


def read_by_mixers(model: nn.Module) -> set[str]:
    """Return the names of linear layers whose weight a mixer reads past them."""
    mixers = ((owner, module) for owner, module in model.named_modules() if _is_recurrence(module))
    return {
        f"{owner}.{name}".lstrip(".") for owner, module in mixers for name, _ in module.named_children() if name in READ
    }


def own_of_recurrences(model: nn.Module) -> set[str]:
    """Return the names of parameters that are of recurrences or of mixers' convolutions, and no matrices.

    Convolutions of a mixer may be padded outside, and mix channels of a head (Zaya).
    """
    found = set()
    mixers = (module for module in model.modules() if is_mixer_class(type(module)))
    of_mixers = {child for mixer in mixers for child in mixer.children() if isinstance(child, nn.Conv1d)}
    for owner, module in model.named_modules():
        recurs, convolves = _is_recurrence(module), is_short_convolution(module) or module in of_mixers
        for name, _ in module.named_parameters(recurse=False):
            if convolves or name.startswith(SHIFTS) or (recurs and (name in OWN or name.endswith("bias"))):
                found.add(f"{owner}.{name}".lstrip("."))
    return found


def _is_recurrence(module: nn.Module) -> bool:
    return any(isinstance(module._parameters.get(name), nn.Parameter) for name in RATES)
