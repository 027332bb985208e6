"""Compute dtypes, the cast from master to compute weight, masters in two halves, and dynamic loss scaling."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from zero3d.errors import ConfigError, NonFiniteError
from zero3d.memory.scratch import cast_scratch, group_elements
from zero3d.spec.dtypes import Dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LEAST = -0x7FFF7FFF  # as two 16-bit integers: a low half is at least 0x8001, a high half may be all, 0x8000


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as files and tables have it, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(dtype: torch.dtype) -> Dtype:
    """Return a dtype as the blueprint has it."""
    return Dtype(NAMES.get(dtype, dtype_name(dtype)), dtype.itemsize)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return the dtype that the blueprint has by name."""
    found = DTYPES[dtype.name] if dtype.name in DTYPES else getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def slow_products(precision: str, device: torch.device) -> str | None:
    """Return a warning where torch multiplies matrices of a precision without the CPU's vectors, or None.

    On AVX2 alone a product of bf16 matrices took 8 to 17 times as long as one of fp32 matrices.
    """
    if precision != "bf16" or device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    return "this CPU (AVX2) multiplies bf16 matrices about ten times as slowly as fp32 ones: --precision fp32 is faster"


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling for fp16, DeepSpeed's rule.

    initial     first scale
    window      applied steps without overflow after which the scale doubles
    hysteresis  overflows tolerated before the scale halves
    minimum     the scale never falls below it
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0


@dataclass(frozen=True)
class Precision:
    """What an engine computes in. Masters, m and v are fp32 (fp64 under fp64)."""

    name: str
    loss_scaling: LossScaling = field(default_factory=LossScaling)

    @classmethod
    def of(cls, value: str | Precision) -> Precision:
        """Accept a name or a Precision; refuse the rest with the nearest name."""
        precision = value if isinstance(value, Precision) else cls(value)
        if precision.name not in DTYPES:
            near = difflib.get_close_matches(str(precision.name), DTYPES, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"precision {precision.name!r} is unknown: pass one of {', '.join(DTYPES)}.{hint}")
        return precision

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def scales_loss(self) -> bool:
        return self.name == "fp16"


def at_least_fp32(loss: Tensor) -> Tensor:
    """Return a loss, or what it is made of, in no fewer than 32 bits."""
    return loss if loss.dtype.itemsize >= 4 else loss.float()


def as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the parts of a product in the dtype in which autocast, which is on, computes it."""
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def to_compute(master: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Cast masters to compute weights; the one cast used everywhere.

    fp32 to bf16 rounds half away from zero, so that a bf16 weight and a 16-bit remainder can
    rebuild the master exactly; torch rounds half to even, which differs only at ties. A tie's low
    16 bits are 0x8000, as an integer the smallest: raised to the next, they make it round up in
    magnitude, and no other result changes (infinities, NaN and signed zeros included).
    """
    if out is None:
        out = torch.empty(master.shape, dtype=dtype, device=master.device)
    if not rounds_away(master.dtype, dtype):
        return out.copy_(master)
    cast_flat(master.reshape(-1), out.view(-1), master.new_empty(cast_scratch(master.numel(), master.device.type)))
    return out


def cast_flat(master: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Cast flat masters to compute weights as `to_compute` does. scratch: fp32, as in `cast_all`."""
    if rounds_away(master.dtype, out.dtype):
        cast_all([(master, out)], scratch)
    else:
        out.copy_(master)


def rounds_away(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether torch's own cast would round ties otherwise than `to_compute`, which takes scratch."""
    return wide == torch.float32 and narrow == torch.bfloat16


def cast_all(pairs: Sequence[tuple[Tensor, Tensor]], scratch: Tensor) -> None:
    """Cast flat fp32 masters to bf16 weights as `to_compute` does, three launches for every group that fits.

    scratch  [2 k] fp32, for groups of k elements: their masters, and what low halves are at least
    """
    room = scratch.numel() // 2
    if not room:
        return
    wide, least = scratch[:room], least_halves(scratch[room:])
    for group in _groups(pairs, room):
        masters, weights = [master for master, _ in group], [weight for _, weight in group]
        sizes = [master.numel() for master in masters]
        cast = wide[: sum(sizes)]
        source = masters[0] if len(masters) == 1 else torch.cat(masters, out=cast)
        torch._foreach_copy_(weights, torch.split(raise_ties(source, least, cast), sizes))


def least_halves(scratch: Tensor) -> Tensor:
    """Fill fp32 scratch with what the 16-bit halves of as many masters are at least where ties are raised."""
    return scratch.view(torch.int32).fill_(_LEAST).view(torch.int16)


def raise_ties(master: Tensor, least: Tensor, out: Tensor) -> Tensor:
    """Return flat masters of which torch's own cast to bf16 is `to_compute`'s; `least` are `least_halves` or more."""
    torch.maximum(master.view(torch.int16), least[: 2 * len(out)], out=out.view(torch.int16))
    return out


def _groups(pairs: Sequence[tuple[Tensor, Tensor]], room: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Cut flat pairs of tensors into groups of at most `room` elements."""
    group: list[tuple[Tensor, Tensor]] = []
    left = room
    for master, weight in pairs:
        start = 0
        while start < master.numel():
            stop = min(start + left, master.numel())
            group.append((master[start:stop], weight[start:stop]))
            left, start = left - (stop - start), stop
            if not left:
                yield group
                group, left = [], room
    if group:
        yield group


@dataclass(frozen=True)
class Halves:
    """Holds an fp32 tensor as its bf16 weights and the remainders beside them, of one shape."""

    weights: Tensor
    remainder: Tensor
    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.weights.shape

    def __getitem__(self, index: Any) -> Halves:
        """Return a part of it, which is a view."""
        return Halves(self.weights[index], self.remainder[index])


def joined(values: Tensor | Halves) -> Tensor:
    """Return a tensor itself, halves as a new fp32 tensor, where the remainders are."""
    if isinstance(values, Tensor):
        return values
    flat = values.remainder.new_empty(values.shape.numel(), dtype=values.dtype)
    weights = values.weights.to(flat.device)
    return join_master(weights.reshape(-1), values.remainder.reshape(-1), flat).view(values.shape)


def join_master(weights: Tensor, remainder: Tensor, out: Tensor) -> Tensor:
    """Rebuild flat fp32 masters from bf16 weights and their int16 remainders, bit for bit, and return them.

    As integers: master = (weight << 16) + remainder. The remainder is the master's low half taken as a signed number,
    so that the weight beside it is the high half rounded half away from zero, which is `to_compute`'s.
    """
    size = group_elements(out.device.type)
    for high, low, exact in _parts([weights.view(torch.int16), remainder, out.view(torch.int32)], size):
        torch.add(low, exact.copy_(high), alpha=1 << 16, out=exact)
    return out


def split_master(master: Tensor, weights: Tensor, remainder: Tensor, scratch: Tensor | None = None) -> None:
    """Split flat fp32 masters into bf16 weights and int16 remainders, from which `join_master` rebuilds every number.

    Weights are `to_compute`'s, and NaN where masters are. Of a NaN nothing else is kept: rounding up makes a zero of
    an accelerator's own, 0x7FFFFFFF.

    scratch  [k] fp32, for groups of k elements; one is made where none is given. Masters that are no longer needed may
             lend their own memory
    """
    room = min(master.numel(), group_elements(master.device.type)) if scratch is None else scratch.numel()
    wide = master.new_empty(room) if scratch is None else scratch
    for high, low, exact in _parts([weights.view(torch.int16), remainder, master], room):
        number = torch.nan_to_num(exact, math.nan, math.inf, -math.inf, out=wide[: len(exact)]).view(torch.int32)
        low.copy_(number)  # modulo 2^16
        number.add_(1 << 15)  # carries into the high half where the remainder is negative
        high.copy_(number.bitwise_right_shift_(16))  # in place first: a fifth faster than out=high


def _parts(flat: list[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Cut flat tensors of one length into parts of at most `size` elements."""
    if flat[0].numel() <= size:  # what to cut them costs is a third of a small update's time
        return iter([tuple(flat)])
    return zip(*(torch.split(each, max(size, 1)) for each in flat), strict=True)


def is_finite(values: Tensor) -> Tensor:
    """Tell whether all values are finite: one flag on the device, without a copy of them. Not of an empty tensor."""
    least, most = torch.aminmax(values.detach())  # both are NaN where one value is; a norm takes twenty times as long
    return least.isfinite() & most.isfinite()


def are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Tell of each tensor, none of which is empty, whether all its values are finite; waits for each device once."""
    ends: dict[torch.device, list[Tensor]] = {}
    for values in tensors:
        ends.setdefault(values.device, []).extend(torch.aminmax(values.detach()))
    told = {device: iter(torch.stack(pairs).isfinite().view(-1, 2).all(1).tolist()) for device, pairs in ends.items()}
    return [next(told[values.device]) for values in tensors]


class LossScale:
    """Owns the loss scale: it doubles after `window` good steps and halves when `hysteresis` is used up."""

    def __init__(self, precision: Precision) -> None:
        self.rule = precision.loss_scaling
        self.dynamic = precision.scales_loss
        self.value = self.rule.initial if self.dynamic else 1.0
        self._patience = self.rule.hysteresis
        self._steps = 0
        self._last_overflow = -1

    @property
    def can_fall(self) -> bool:
        """Whether an overflow lowers the scale, which is how it finds its value."""
        return self.dynamic and self.value > self.rule.minimum

    @property
    def spent(self) -> bool:
        """Whether the next overflow is an error."""
        return self.dynamic and not self.can_fall and self._patience <= 1

    def update(self, overflow: bool) -> None:
        """Account for one boundary. Raises NonFiniteError on an overflow at the minimum scale."""
        if not self.dynamic:
            return
        boundary = self._steps
        self._steps += 1  # before anything is raised: the state can be saved after that, too
        if overflow:
            self._overflow(boundary)
        elif (boundary - self._last_overflow) % self.rule.window == 0:
            self._patience = self.rule.hysteresis
            self.value *= 2

    def _overflow(self, boundary: int) -> None:
        self._last_overflow = boundary
        if self._patience > 1:
            self._patience -= 1
        elif not self.can_fall:
            raise NonFiniteError(
                f"fp16 gradients overflow at the minimum loss scale {self.value:g} (boundary {boundary}): "
                "the model diverges or does not fit fp16. Pass precision='bf16', or lower the learning rate."
            )
        else:
            self.value = max(self.value / 2, self.rule.minimum)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint stores, as JSON has it."""
        state = {"dynamic": self.dynamic, "value": self.value, "patience": self._patience}
        return state | {"steps": self._steps, "last_overflow": self._last_overflow}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from `state()`; a scale means nothing to a precision without one, and the other way round."""
        if not (self.dynamic and state["dynamic"]):
            return
        self.value = float(state["value"])
        self._patience = int(state["patience"])
        self._steps = int(state["steps"])
        self._last_overflow = int(state["last_overflow"])
