"""Compute dtypes, the cast from master to compute weight, and dynamic loss scaling."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero3d.errors import ConfigError, NonFiniteError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 18  # elements; keeps the integer scratch inside a core's cache


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


def to_compute(master: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Cast masters to compute weights; the one cast used everywhere.

    fp32 to bf16 rounds half away from zero, so that a bf16 weight and a 16-bit remainder can
    rebuild the master exactly; torch rounds half to even, which differs only at ties. A tie has
    bit 15 set and all lower bits clear: setting bit 0 wherever bit 15 is set makes a tie round
    up in magnitude and changes no other result (infinities and NaN included).
    """
    if out is None:
        out = torch.empty(master.shape, dtype=dtype, device=master.device)
    if not (master.dtype == torch.float32 and dtype == torch.bfloat16):
        return out.copy_(master)
    source, target = master.reshape(-1), out.view(-1)
    chunk = _CHUNK if master.device.type == "cpu" else max(source.numel(), 1)
    for start in range(0, source.numel(), chunk):
        bits = source[start : start + chunk].view(torch.int32)
        ties = bits.bitwise_right_shift(15).bitwise_and_(1)
        target[start : start + chunk].copy_(ties.bitwise_or_(bits).view(torch.float32))
    return out


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
