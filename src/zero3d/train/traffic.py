"""The bytes that a run sent beside the formulas' (engine/traffic_formulas.py), by operation, unit by unit.

Evaluations and checkpoints are taken out on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from zero3d.account.traffic import Moved, Sent
from zero3d.distributed.degrees import DATA
from zero3d.engine.engine import Engine
from zero3d.engine.traffic_formulas import Routed, SessionCounts
from zero3d.train.tables import TrafficRow


class TrainingTraffic:
    """Counts what training moved in the ledger: evaluations and checkpoints are taken out."""

    def __init__(self, engine: Engine) -> None:
        self._ledger, self.formulas = engine.traffic, engine.traffic_formulas
        self._excluded: Counter[tuple[str, str, str, str]] = Counter()
        self._begun, self._last = self.formulas.routed, 0
        engine.traffic.reset()
        self.formulas.begin_count()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave what is moved inside out of the count: it is no training."""
        before, routed = self._rows(), self.formulas.routed
        yield
        self._begun = self._begun.plus(self.formulas.routed.less(routed))
        self._excluded.update({key: figure - before[key] for key, figure in self._rows().items()})

    @property
    def routed(self) -> Routed:
        """What routers and attentions have made training send."""
        return self.formulas.routed.less(self._begun)

    def last_step(self) -> int:
        """Return bytes since this was called last."""
        self.formulas.end_count()
        total = sum(entry.moved.bytes for entry in self.entries())
        self._last, last = total, self._last
        return total - last

    def entries(self) -> list[Sent]:
        """Return training's traffic by axis, operation and unit."""
        training = self._rows() - self._excluded
        names = dict.fromkeys(key[:3] for key in training)
        return [Sent(*key, Moved(*(training[*key, f] for f in Moved._fields))) for key in names]

    def _rows(self) -> Counter[tuple[str, str, str, str]]:
        rows: Counter[tuple[str, str, str, str]] = Counter()
        for entry in self._ledger:
            for name in Moved._fields:
                rows[entry.axis, entry.op, entry.unit, name] += getattr(entry, name)
        return rows


def traffic_rows(traffic: TrainingTraffic, counts: SessionCounts) -> list[TrafficRow]:
    """Return measured and planned traffic of the whole session, per operation."""
    entries = traffic.entries()
    formula, measured = (
        by_operation(traffic.formulas.of_session(counts, entries, traffic.routed)),
        by_operation(entries),
    )
    return [
        TrafficRow(op, Moved.total(units.values()), Moved.total(actual.values()), actual == units)
        for op in formula | measured
        for units, actual in [(formula.get(op, {}), measured.get(op, {}))]
    ]


def by_operation(rows: Iterable[Sent]) -> dict[str, dict[str, Moved]]:
    """Add rows up, by operation (with its axis, but for those of the data) and unit."""
    found: dict[str, dict[str, Moved]] = {}
    for axis, op, unit, moved in rows:
        units = found.setdefault(op if axis in DATA else f"{op} ({axis})", {})
        units[unit] = Moved.total([units.get(unit, Moved()), moved])
    return found
