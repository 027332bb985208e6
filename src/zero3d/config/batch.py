"""The batch equation: batch = micro_batch x accumulate x dp, in sequences per optimizer step.

Where the ranks of a dp axis share sequences out (mesh.sp), rows = dp / sp takes the place of dp.

given                       computed
nothing                     micro_batch 1, accumulate 1
micro_batch                 accumulate 1
accumulate                  micro_batch 1
batch                       accumulate 1, micro_batch = batch / dp
batch, accumulate           micro_batch = batch / (accumulate x dp)
batch, micro_batch          accumulate = batch / (micro_batch x dp)
micro_batch, accumulate     batch
all three                   must be equal
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from zero3d.config.sections import Train
from zero3d.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """Counts sequences per step over all ranks, per rank and forward, forwards per rank and step, ranks.

    dp    ranks that have other sequences than each other
    name  what these are in the equation: dp, or rows
    """

    batch: int
    micro_batch: int
    accumulate: int
    dp: int
    name: str = "dp"

    @property
    def equation(self) -> str:
        """One line with the numbers."""
        product = f"micro_batch {self.micro_batch} x accumulate {self.accumulate} x {self.name} {self.dp}"
        return f"batch {self.batch} = {product} (sequences per step)"


def resolve_batch(train: Train, dp: int, sp: int = 1) -> Batch:
    """Fill in what `train` leaves out, for `dp` data-parallel ranks, of which `sp` share sequences.

    Raises ConfigError.
    """
    dp, name = dp // sp, "rows" if sp > 1 else "dp"
    batch, micro, accumulate = train.batch, train.micro_batch, train.accumulate
    if batch is None:
        micro, accumulate = micro or 1, accumulate or 1
        return Batch(micro * accumulate * dp, micro, accumulate, dp, name)
    if micro is not None and accumulate is not None:
        if batch != micro * accumulate * dp:
            raise ConfigError(_unequal(Batch(batch, micro, accumulate, dp, name)))
    elif micro is not None:
        accumulate = _divide(batch, "micro_batch", micro, dp, name)
    else:
        accumulate = accumulate or 1
        micro = _divide(batch, "accumulate", accumulate, dp, name)
    return Batch(batch, micro, accumulate, dp, name)


def _divide(batch: int, name: str, factor: int, dp: int, ranks: str) -> int:
    """Return batch / (factor x dp). Raises ConfigError when it is not whole; `ranks`: the name of dp."""
    portion = factor * dp
    if batch % portion == 0:
        return batch // portion
    low = batch // portion * portion
    ways = [f"train.batch={near}" for near in (low, low + portion) if near]
    if batch % dp == 0:
        ways += [f"train.{name}={near}" for near in _divisors_around(batch // dp, factor)]
    shown = f"{name} {factor} x {ranks} {dp}" if factor > 1 or name == "micro_batch" else f"{ranks} {dp}"
    raise ConfigError(
        f"train.batch {batch} is not a multiple of {shown} = {portion}: {batch} / {portion} = {batch / portion:.4g}. "
        f"Type {' or '.join(ways)}."
    )


def _divisors_around(number: int, factor: int) -> list[int]:
    """Return the nearest divisors of `number` below and above `factor`."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = [divisor for divisor in divisors if divisor < factor]
    above = [divisor for divisor in divisors if divisor > factor]
    return below[-1:] + above[:1]


def _unequal(asked: Batch) -> str:
    batch, micro, accumulate, dp = asked.batch, asked.micro_batch, asked.accumulate, asked.dp
    product = micro * accumulate * dp
    ways = [f"train.batch={product}"]
    if batch % (micro * dp) == 0:
        ways.append(f"train.accumulate={batch // (micro * dp)}")
    if batch % (accumulate * dp) == 0:
        ways.append(f"train.micro_batch={batch // (accumulate * dp)}")
    return (
        f"train.batch {batch} is not micro_batch {micro} x accumulate {accumulate} x {asked.name} {dp} = {product}. "
        f"Type {' or '.join(ways)}; one of the three may be null."
    )
