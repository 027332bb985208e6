"""A trial of kernels on the device: whether a model's mixers keep packed documents apart with those installed.

    alone   each document in a row of its own     what is wanted, values and gradients of what goes in
    told    all in two rows, told where they end   must be equal to it, but for rounding in the dtype
    untold  the same rows as one document each     must not be, or the trial says nothing

One mixer of each kind is tried by itself, with its own sizes of heads, chunks and convolutions: without depth,
vocabulary or MLP. Documents are of one token, of a chunk, shorter and longer. Where a mixer is wrong, its kernels are
called again with what they were given, and the first that is wrong by itself is named. Nothing is communicated.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.errors import ConfigError
from zero3d.models.copies import copy_with
from zero3d.models.mixing import CONVOLUTION, FUSED, SCANS, Call, installed, is_kernel, kernel_of, mixers, parameters_of
from zero3d.models.packed_documents import Documents, Told, during, told
from zero3d.models.packing_trial import Untried
from zero3d.precision import dtype_name

ROWS = ((70, 5, 99), (1, 64, 109))  # tokens of documents; kernels of delta rules make chunks of 64
NEAR = 4e-3  # of the largest number: products of fp32 may have the digits of tf32
ROUNDINGS = 6  # of a dtype, where these are more
CPU = "cpu"  # where there are no kernels
LEAKS = 2.0  # so many times as much a row must be off that is told nothing
_found: dict[str, str] = {}
_one_at_a_time = Lock()  # globals of a file are all ranks' that are threads
_Recorded = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Parts(NamedTuple):
    """Says what a function takes and makes of time: dimensions by parameter, and that of its output."""

    given: dict[str, Tensor]
    dims: Mapping[str, int]
    out: int


def try_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a line on what was tried, None where no kernel is installed. Raises ConfigError for one that is wrong.

    Models of one config share a trial.
    """
    if not (kinds := {f"{type(each).__name__} {each!r}": each for each in mixers(model).values() if _kernels(each)}):
        return None
    begun = time.monotonic()
    names = sorted({type(each).__name__ for each in kinds.values()})
    key = _key(model, kinds, device, dtype)
    try:
        if key not in _found:
            _found[key] = next(filter(None, (_tried(each, device, dtype) for each in kinds.values())), "")
    except Untried as why:
        return f"data.packing: that kernels of {', '.join(names)} keep documents apart was not tried ({why})"
    if wrong := _found[key]:
        raise ConfigError(
            f"documents cannot be packed: on {device.type} in {dtype_name(dtype)}, {wrong}. Install another version of "
            "its package, uninstall it, or give each document a row (data.packing=false in a run's file)."
        )
    took = time.monotonic() - begun
    return (
        f"data.packing: kernels of {', '.join(names)} keep documents apart on {device.type} in {dtype_name(dtype)}, "
        f"tried in {took:.1f} s"
    )


def wrong_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model's kernels let packed documents see each other on an accelerator; None where they do not.

    An engine asks before anything is cut: whether rows will be packed, it sees by those that come.
    """
    if device.type == CPU or isinstance(torch.empty(0), FakeTensor):
        return None
    try:
        try_kernels(model, device, dtype)
    except ConfigError as error:
        return str(error)
    return None


def kernels_in(model: nn.Module) -> list[str]:
    """Return the kernels of packages that a model's mixers call, sorted."""
    found = {kernel_of(each) for mixer in mixers(model).values() for each in _kernels(mixer).values()}
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in found)


def _key(model: nn.Module, kinds: Mapping[str, nn.Module], device: torch.device, dtype: torch.dtype) -> str:
    config: Any = getattr(model, "config", None)
    kernels = [f"{name} {kernel_of(each)!r}" for kind in kinds.values() for name, each in _kernels(kind).items()]
    words = [*kinds, *kernels, str(device), str(dtype), config.to_json_string() if config is not None else ""]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _kernels(mixer: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the functions of a mixer behind which there is a package's kernel, by name."""
    found = ((name, function) for name, _, function in installed(mixer) if name in (CONVOLUTION, *SCANS))
    return {name: function for name, function in found if is_kernel(function)}


def _tried(mixer: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with a mixer, "" for nothing. Raises Untried."""
    name, near = type(mixer).__name__, max(NEAR, ROUNDINGS * torch.finfo(dtype).eps)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS]).to(device)
    documents = Documents.of(positions)
    assert documents is not None
    generator = torch.Generator().manual_seed(0)
    try:
        trial = _copied(mixer, device, dtype, generator)
        x = torch.randn(*positions.shape, _width(mixer), generator=generator).to(device, dtype)
        _both(trial, {"hidden_states": x}, None, None)
    except Exception as error:  # any error of its own, quoted
        raise Untried(_quoted(error)) from error
    try:
        off, leak = _compare(trial, _Parts({"hidden_states": x}, {"hidden_states": 1}, 1), documents)
    except Exception as error:  # noqa: BLE001 (any error of its own, quoted)
        return f"{name} does not run where it is told of documents ({_quoted(error)})"
    if off <= near and leak <= LEAKS * near:
        raise Untried(f"{name} that is told nothing is off by {leak:.1g} alone")
    if off <= near:
        return ""
    for function, parts, call in _calls(trial, x, documents):
        off_by, _ = _compare(call, parts, documents)
        if off_by > near:
            kernel = kernel_of(function)
            return (
                f"{kernel.__module__}.{kernel.__qualname__}, which {name} calls, lets documents see each other: they "
                f"are off by {off_by:.1g} of what they are alone, where rounding is {near:.1g}"
            )
    return f"{name} lets documents see each other, though each of its kernels does not: they are off by {off:.1g}"


def _quoted(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {line}"


def _copied(mixer: nn.Module, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """Return a copy of a mixer with random weights on a device; rates of decay are slow, so that states last."""

    def drawn(p: Tensor) -> nn.Parameter:
        values = torch.randn(p.shape, generator=generator)
        values = values / max(1, p[:1].numel()) ** 0.5 if p.dim() > 1 else values / 4 - 1
        return nn.Parameter(values.to(device, dtype), requires_grad=False)

    if any(not p.is_floating_point() for p in mixer.parameters()):
        raise Untried("its weights are in groups of bits")
    new: dict[nn.Module | Tensor, object] = {p: drawn(p) for p in mixer.parameters()}
    new |= {b: torch.ones(b.shape, dtype=b.dtype, device=device) for b in mixer.buffers()}
    trial: nn.Module = copy_with(mixer, new).train()
    return trial


def _width(mixer: nn.Module) -> int:
    """Return how wide a mixer's input is: that of its first projection; of a convolution alone, its channels."""
    layers = [each for each in mixer.modules() if isinstance(each, nn.Linear)]
    if layers:
        return layers[0].in_features
    return next(each.in_channels for each in mixer.modules() if isinstance(each, nn.Conv1d))


# --- packed against alone -----------------------------------------------------------------------------------------


def _compare(function: Callable[..., Any], parts: _Parts, documents: Documents) -> tuple[float, float]:
    """Return how far off documents in rows are from documents alone: told where they end, and untold."""
    told, of_told, weights = _both(function, parts.given, documents, None)
    untold, _, _ = _both(function, parts.given, None, weights)
    off = leak = 0.0
    for row, start, stop in documents.spans:
        span = row, start, stop - start
        given = {name: _part(t, parts.dims[name], span) for name, t in parts.given.items()}
        alone, of_alone, _ = _both(function, given, None, _part(weights, parts.out, span))
        off = max(off, _off(_part(told, parts.out, span), alone))
        leak = max(leak, _off(_part(untold, parts.out, span), alone))
        for name, grad in of_told.items():
            off = max(off, _off(_part(grad, parts.dims[name], span), of_alone[name]))
    return off, leak


def _both(
    function: Callable[..., Any], given: Mapping[str, Tensor], documents: Documents | None, weights: Tensor | None
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return what a function makes, gradients of what it was given, and the weights of the sum that was derived."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    with torch.enable_grad(), during(Told(documents, in_pieces=True)):
        made = function(**leaves)
    made = made[0] if isinstance(made, (tuple, list)) else made
    if weights is None:
        weights = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(made.device)
    grads = torch.autograd.grad((made.float() * weights).sum(), list(leaves.values()), allow_unused=True)
    return made, {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}, weights


def _part(t: Tensor, dim: int, span: tuple[int, int, int]) -> Tensor:
    row, start, length = span
    return t[row : row + 1].narrow(dim, start, length)


def _off(made: Tensor, wanted: Tensor) -> float:
    """Return how far off values are, in parts of the largest that was wanted; infinity where some are not finite."""
    made, wanted = made.detach().float(), wanted.detach().float()
    off = float((made - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
    return off if math.isfinite(off) else math.inf


# --- calls of kernels ---------------------------------------------------------------------------------------------


def _calls(
    trial: nn.Module, x: Tensor, documents: Documents
) -> Iterator[tuple[Callable[..., Any], _Parts, Callable[..., Any]]]:
    """Yield each call that a told mixer makes: the function, what it was given of time, and the call itself."""
    recorded: list[_Recorded] = []
    with _recording(trial, documents, recorded), torch.no_grad(), during(Told(documents, in_pieces=True)):
        trial(x)
    for name, function, args, kwargs in recorded:
        call = Call(parameters_of(function), args, kwargs)
        dims = {"hidden_states": -1} if name == CONVOLUTION else SCANS[name].time
        given = {each: t for each in dims if isinstance(t := call.given.get(each), Tensor)}
        parts = _Parts(given, {each: dims[each] for each in given}, -1 if name == CONVOLUTION else SCANS[name].out)
        yield function, parts, partial(call, function)


@contextmanager
def _recording(trial: nn.Module, documents: Documents, made: list[_Recorded]) -> Iterator[None]:
    """Keep what functions that mix tokens are called with inside, told of these documents and no others'."""
    with _one_at_a_time, ExitStack() as stack:
        for name, file, function in installed(trial):
            if name in FUSED:
                continue

            @wraps(function)
            def keep(*args: Any, name: str = name, function: Callable[..., Any] = function, **kwargs: Any) -> Any:
                if (now := told()) is not None and now.documents is documents:
                    made.append((name, function, args, kwargs))
                return function(*args, **kwargs)

            stack.callback(setattr, sys.modules[file], name, function)
            setattr(sys.modules[file], name, keep)
        yield
