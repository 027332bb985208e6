"""The cost of a training run: GPU-hours, days, energy and money.

    hours    tokens / tokens of a step x seconds of a step x GPUs
    days     hours / GPUs / 24
    energy   hours x the watts that a card takes at most: at this step time an upper bound, for cards that wait or copy
             take less
    money    hours x the price of one

Watts are the catalogue's, gpu.power of a cluster file, or --watts; where nobody knows them there is no energy.
"""

from __future__ import annotations

from typing import NamedTuple

from zero3d.tools.plan.spec import ClusterSpec, Estimate

HOUR, DAY, KILO = 3600, 24, 1000


class Bill(NamedTuple):
    """Holds hours of all GPUs together, days, kWh at full power, and money. None: no watts, no price."""

    hours: float
    days: float
    kwh: float | None
    money: float | None

    @classmethod
    def of(cls, estimate: Estimate, cluster: ClusterSpec, tokens: float, price: float | None) -> Bill:
        """Return the bill for so many tokens. price: of a GPU-hour."""
        hours = tokens / estimate.tokens * estimate.seconds.mid * cluster.gpus / HOUR
        watts = cluster.gpu.power
        kwh, money = (None if each is None else hours * each for each in (watts, price))
        return cls(hours, hours / cluster.gpus / DAY, None if kwh is None else kwh / KILO, money)
