"""Kernels of mixers where a model runs without values: they make and keep what `tools/plan/mixers.py` says.

On a card transformers' mixers call kernels of fla, mamba_ssm and causal_conv1d. Without a card there are none, and the
code in torch that stands for them makes tensors which no kernel makes. So the names by which mixers call them
(models/mixing.py) are given stand-ins for the time of a block:

    inputs --> contiguous, as the kernel wants them --> kept bytes, output; room for what comes and goes
    gradient of the output --> room for what comes and goes; gradients of inputs

The operator `mixer_products` says how much was computed, and how many bytes were read and written.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero3d.models.mixing import (
    CONVOLUTION,
    FUNCTIONS,
    FUSED,
    SCANS,
    Call,
    installed as calls_of,
    is_kernel,
    is_taken_apart,
    mixers,
    mixing_files,
    told_first,
)
from zero3d.sequence.prefix import STATES
from zero3d.tools.plan.mixers import (
    DELTA_CHUNK,
    DeltaHeads,
    Kernel,
    SsdHeads,
    convolution,
    delta_rule,
    fused_mamba1,
    fused_mamba2,
    mamba1,
    mamba2,
)
from zero3d.tools.sim.flops import FORMULAS

ALL = frozenset(FUNCTIONS)
_ENDS = {name: names.end for name, names in STATES.items()}


@torch.library.custom_op("zero3d::mixer_products", mutates_args=())
def mixer_products(like: Tensor, operations: int, moved: int) -> Tensor:
    """Say that so many multiplications and additions were made, and so many bytes moved."""
    return like.new_empty(0)


@mixer_products.register_fake
def _(like: Tensor, operations: int, moved: int) -> Tensor:
    return like.new_empty(0)


FORMULAS[torch.ops.zero3d.mixer_products] = lambda like, operations, moved, **_: operations


def installed(model: nn.Module) -> frozenset[str]:
    """Return the names by which a model's files call a package's kernel here."""
    return frozenset(
        name
        for file in mixing_files(model)
        for name in FUNCTIONS
        if name in (held := vars(sys.modules[file])) and is_kernel(held[name])
    )


@contextmanager
def as_kernels(model: nn.Module, names: Collection[str], in_pieces: bool) -> Iterator[None]:
    """Let stand-ins of kernels run inside the block, where a model's files call one of these names.

    in_pieces  fused kernels give way to their pieces, as for packed rows and adapters (models/mixing.py), and where
               tp or sp share a mixer out
    """
    in_pieces = in_pieces or any(map(is_taken_apart, mixers(model).values()))
    with ExitStack() as stack:
        for held in (vars(sys.modules[file]) for file in mixing_files(model)) if names else ():
            for name in names:
                if name in held:
                    stack.callback(held.__setitem__, name, held[name])
                    function = getattr(held[name], "original", held[name])
                    held[name] = told_first(name, _stand_in(name, function, in_pieces))
        yield


def runs_fused(model: nn.Module, names: Collection[str]) -> bool:
    """Return whether a kernel of these names would do all of some mixer of a model, on rows of one document."""
    found: list[Any] = list(mixers(model).values())
    called = {name for mixer in found for name, _, _ in calls_of(mixer)}
    return not called.isdisjoint({*FUSED} & {*names}) and not any(map(is_taken_apart, found))


def _stand_in(name: str, function: Callable[..., Any], in_pieces: bool) -> Callable[..., Any]:
    names = list(inspect.signature(inspect.unwrap(function)).parameters)

    @wraps(function)
    def stands(*args: Any, **kwargs: Any) -> Any:
        if name in FUSED and in_pieces:
            return None
        return _STAND_INS[name](Call(names, args, kwargs).given)

    return stands


class _Run(NamedTuple):
    """Says how a kernel runs beside its formula.

    shape   of the output, in the dtype of its first input
    saves   which inputs it keeps
    guard   it wants inputs contiguous, and keeps them so
    by      how many of the inputs, the first, are weights by which all tokens are multiplied inside of it
    state   of the last state in fp32, where it is asked for
    """

    kernel: Kernel
    shape: tuple[int, ...]
    saves: tuple[int, ...]
    guard: bool = False
    by: int = 0
    state: tuple[int, ...] | None = None


class _Runs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kernel, given = run.kernel, [t for t in inputs if t is not None]
        ready = [t if t is None or not run.guard else t.contiguous() for t in inputs]
        first = given[run.by]
        kept = _room(first, kernel.kept)
        passing = _room(first, kernel.forward)
        made = first.new_empty(run.shape)
        for weight in given[: run.by]:
            made = F.linear(first.new_empty(*run.shape[:2], weight.shape[1]), weight)
        moved = sum(t.nbytes for t in (*given[run.by :], made)) + 2 * (kernel.kept + kernel.forward)
        mixer_products(first, kernel.products, moved)
        del passing
        ctx.run, ctx.likes = run, [None if t is None else (t.shape, t.dtype) for t in inputs]
        ctx.save_for_backward(kept, *(ready[i] for i in run.saves))
        return made, None if run.state is None else first.new_empty(run.state, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, kernel, by = grads[0], ctx.run.kernel, ctx.run.by
        kept, *saved = ctx.saved_tensors
        passing = _room(kept, kernel.backward)
        mixer_products(kept, kernel.again, 0)
        found: list[Tensor | None] = [
            None if like is None or not needs else kept.new_empty(like[0], dtype=like[1])
            for like, needs in zip(ctx.likes, ctx.needs_input_grad[1:], strict=True)
        ]
        for i, weight in enumerate(saved[:by]):
            out, into = (grad.new_empty(*grad.shape[:2], size).flatten(0, 1) for size in weight.shape)
            torch.mm(out, weight)
            if found[i] is not None:
                found[i] = torch.mm(out.t(), into)
        del passing
        return None, *found


def _room(like: Tensor, nbytes: int) -> Tensor:
    return like.new_empty(nbytes, dtype=torch.uint8)


def _convolution(given: dict[str, Any]) -> Tensor:
    x, weight, bias = given["hidden_states"], given["weight"], given.get("bias")
    rows, channels, tokens = x.shape
    kernel = convolution(rows, tokens, channels, weight.shape[1], given.get("activation") is not None)
    made: Tensor = _Runs.apply(_Run(kernel, (rows, tokens, channels), (0, 1)), x, weight, bias)[0]  # type: ignore[no-untyped-call]
    return made.transpose(1, 2)  # as its input lies


def _delta(by_channel: bool, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    q, k, v, g, beta = (given[name] for name in ("query", "key", "value", "g", "beta"))
    rows, tokens, key_heads, key = k.shape
    heads, value = v.shape[2:]
    normed = bool(given.get("use_qk_l2norm_in_kernel", False))
    chunk = given.get("chunk_size", DELTA_CHUNK)
    shape = DeltaHeads(key_heads, heads, key, value)
    kernel = delta_rule(rows, tokens, shape, q.element_size(), chunk, by_channel, normed)
    saves = (*(() if normed else (0, 1)), 2, *((3,) if by_channel else ()), 4)
    last = (rows, heads, key, value) if given.get(_ENDS["torch_chunk_gated_delta_rule"]) else None
    run = _Run(kernel, v.shape, saves, guard=True, state=last)
    made: tuple[Tensor, Tensor | None] = _Runs.apply(run, q, k, v, g, beta)  # type: ignore[no-untyped-call]
    return made


def _mamba2(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    x, b, z = given["hidden_states"], given["B"], given.get("z")
    (rows, tokens, heads, head), (groups, state) = x.shape, b.shape[2:]
    shape = SsdHeads(heads, head, groups, state)
    kernel = mamba2(rows, tokens, shape, given["chunk_size"], x.element_size(), z is not None)
    inputs = [x, *(given.get(name) for name in ("dt", "A", "B", "C", "D", "dt_bias", "z"))]
    last = (rows, heads, head, state) if given.get(_ENDS["mamba2_chunk_scan"]) else None
    made, ends = _Runs.apply(_Run(kernel, x.shape, tuple(range(len(inputs))), state=last), *inputs)  # type: ignore[no-untyped-call]
    return made if ends is None else (made, ends)


def _mamba1(given: dict[str, Any]) -> Tensor:
    x, a, z = given["hidden_states"], given["A"], given.get("z")
    rows, channels, tokens = x.shape
    kernel = mamba1(rows, tokens, channels, a.shape[-1], x.element_size(), z is not None)
    inputs = [x, *(given.get(name) for name in ("dt", "A", "B", "C", "D", "delta_bias", "z"))]
    run = _Run(kernel, x.shape, tuple(range(len(inputs))), guard=True)
    made: Tensor = _Runs.apply(run, *inputs)[0]  # type: ignore[no-untyped-call]
    return made


def _fused_mamba2(given: dict[str, Any]) -> Tensor:
    mixed, filters, d = given["zxbcdt"], given["conv1d_weight"], given["D"]
    rows, tokens, _ = mixed.shape
    heads, head, groups = d.shape[0], given["headdim"], given["ngroups"]
    state = (filters.shape[0] - heads * head) // groups // 2
    chunk, taps = given["chunk_size"], filters.shape[1]
    shape = SsdHeads(heads, head, groups, state)
    kernel = fused_mamba2(rows, tokens, shape, chunk, mixed.element_size(), taps)
    weight = given["outproj_weight"]
    rest = ("conv1d_bias", "dt_bias", "A", "D", "rmsnorm_weight", "outproj_bias")
    inputs = [weight, mixed, filters, *(given.get(name) for name in rest)]
    run = _Run(kernel, (rows, tokens, weight.shape[0]), tuple(range(len(inputs))), by=1)
    made: Tensor = _Runs.apply(run, *inputs)[0]  # type: ignore[no-untyped-call]
    return made


def _fused_mamba1(given: dict[str, Any]) -> Tensor:
    mixed, a = given["xz"], given["A"]
    rows, doubled, tokens = mixed.shape
    weights = [given[name] for name in ("x_proj_weight", "delta_proj_weight", "out_proj_weight")]
    taps, rank = given["conv1d_weight"].shape[-1], weights[1].shape[1]
    kernel = fused_mamba1(rows, tokens, doubled // 2, a.shape[-1], rank, mixed.element_size(), taps)
    rest = ("conv1d_weight", "conv1d_bias", "out_proj_bias", "A", "D", "delta_bias")
    norms = ("b_rms_weight", "c_rms_weight", "dt_rms_weight")
    inputs = [*weights, mixed, *(given.get(name) for name in (*rest, *norms))]
    run = _Run(kernel, (rows, tokens, weights[2].shape[0]), tuple(range(len(inputs))), by=3)
    made: Tensor = _Runs.apply(run, *inputs)[0]  # type: ignore[no-untyped-call]
    return made


_STAND_INS: dict[str, Callable[[dict[str, Any]], Any]] = {
    CONVOLUTION: _convolution,
    **dict(
        zip(
            SCANS,
            (lambda given: _delta(False, given), lambda given: _delta(True, given), _mamba2, _mamba1),
            strict=True,
        )
    ),
    **dict(zip(FUSED, (_fused_mamba2, _fused_mamba1), strict=True)),
}
