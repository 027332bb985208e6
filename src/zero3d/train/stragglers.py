"""Ranks that are slower than their peers in a healthy run, by the seconds that each takes of its own. No torch.

    peers     ranks of the same pipeline stage, who do alike; a rank is compared with the median of the others
    in steps  compute, data, host: the mean of its excess over the last KEPT steps, without the lowest and the highest
              quarter of them, so that pauses in some steps are no slowness
    in saves  the median of its excess in the last saves, of the time of all steps since the save before

It is told of when the excess is at least LEAST of a step, LEAST_SECONDS, and FAR standard errors: its own scatter, or
what is usual among ranks where that is more. `tests/unit/test_stragglers.py` has how often that is wrong.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from zero3d.train.spikes import NORMAL
from zero3d.zero.step_parts import BY_HOST, COMPUTE, DATA, OwnStep

Values = NDArray[numpy.float64]  # by rank
SAVE = "save"
KINDS = (COMPUTE, DATA, SAVE, BY_HOST)
KEPT, ENOUGH = 50, 20  # steps that are looked at, and how many must be there
SAVES, ENOUGH_SAVES = 10, 5
LEAST, LEAST_SECONDS, FAR = 0.03, 0.001, 5.0
SLOWER = LEAST / 2  # in a step that counts as one in which a rank was slower
OFTEN, OFTEN_IN_SAVES = 0.6, 0.8  # of the steps, of the saves: it must be slower in more of them
LASTS = 0.95  # the most of a step's noise that is taken to be the next one's, too
CUT = 0.25  # of the steps, at each end
FACTS = 3  # numbers of a window beside its seconds
MOST_NUMBERS = 1 << 15  # seconds of steps that all ranks together tell in a message
DISPLACED = 0.1  # of a computing thread's time, by which it was less on a core than its peers
FIELDS = ("slowest_rank", "slowest_over", "slowest_steps", "slowest_of_steps")


class Slow(NamedTuple):
    """The slowest rank.

    over       its own seconds of a step over the median of its peers, as a share of these
    times, of  in how many of how many steps it was slower than its peers by SLOWER at least, or saves by LEAST
    seconds    of a step over the median of its peers, by kind; the largest is the reason
    on_core    share of its computing thread's own seconds in which that ran on a core; NaN where nobody knows
    peers_on_core    the median of that over all other ranks
    """

    rank: int
    over: float
    times: int
    of: int
    seconds: Mapping[str, float]
    on_core: float = math.nan
    peers_on_core: float = math.nan

    @property
    def part(self) -> str:
        """What it is slow in."""
        return max(KINDS, key=lambda kind: self.seconds[kind])

    def fields(self) -> dict[str, float]:
        """Return the fields of a record."""
        numbers = (self.rank, self.over, self.times, self.of)
        by_kind = {f"slowest_{kind}_s": self.seconds[kind] for kind in KINDS}
        cores = {"slowest_on_core": self.on_core, "slowest_peers_on_core": self.peers_on_core}
        core = {name: value for name, value in cores.items() if not math.isnan(value)}
        return dict(zip(FIELDS, numbers, strict=True)) | by_kind | core

    @classmethod
    def of_fields(cls, record: Mapping[str, object]) -> Slow | None:
        """Return what a record has the fields of; None where it has none."""
        names = (*FIELDS, *(f"slowest_{kind}_s" for kind in KINDS))
        numbers = [value for name in names if isinstance(value := record.get(name), (int, float))]
        if len(numbers) < len(names) or not all(map(math.isfinite, numbers)):
            return None
        rank, over, times, of = numbers[: len(FIELDS)]
        told = [record.get(name) for name in ("slowest_on_core", "slowest_peers_on_core")]
        cores = [value if isinstance(value, float) else math.nan for value in told]
        seconds = dict(zip(KINDS, numbers[len(FIELDS) :], strict=True))
        return cls(int(rank), over, int(times), int(of), seconds, *cores)

    def line(self, hosts: Sequence[str] = ()) -> str:
        """Say it. hosts: of each rank, where they are known."""
        where = f" ({hosts[self.rank]})" if self.rank < len(hosts) else ""
        what = "saves" if self.part == SAVE else "steps"
        off = ""
        if self.part == COMPUTE and self.on_core < self.peers_on_core - DISPLACED:
            on, others = 100 * self.on_core, 100 * self.peers_on_core
            off = f" (its thread was on a core in {on:.0f} % of that time, its peers' in {others:.0f} %)"
        many = f"+{100 * self.over:.0f} % over the median in {self.times} of {self.of} {what}"
        return f"slowest rank {self.rank}{where}: {many}: {self.part}{off}"


# --- what ranks tell each other -----------------------------------------------------------------


class Window(NamedTuple):
    """What a rank tells of the steps since it told last.

    totals   own seconds of each of the last steps, the newest last; NaN where there are fewer than are told
    means    own seconds of a step, by kind
    steps    since it told last
    saves    among them
    on_core  see `Slow`
    """

    totals: Sequence[float]
    means: Mapping[str, float]
    steps: float
    saves: float
    on_core: float

    def numbers(self) -> list[float]:
        """Return them in a row."""
        return [*self.totals, *(self.means[kind] for kind in KINDS), self.steps, self.saves, self.on_core]

    @classmethod
    def of_numbers(cls, row: Sequence[float]) -> Window:
        """Return what `numbers` made a row of."""
        totals, means, facts = row[: -len(KINDS) - FACTS], row[-len(KINDS) - FACTS : -FACTS], row[-FACTS:]
        return cls(totals, dict(zip(KINDS, means, strict=True)), *facts)


def steps_told(every: int, ranks: int) -> int:
    """Return of how many steps each rank tells its seconds, where it does so every so many: the message stays small."""
    return max(1, min(every, KEPT, MOST_NUMBERS // ranks))


class OwnTimes:
    """Collects what this rank tells: its own seconds since it has told last. before: steps of earlier sessions."""

    def __init__(self, before: int = 0) -> None:
        self._before = before
        self._told = before + 1  # the first step, which allocates and compiles, counts in none
        self._save, self._saves = 0.0, 0
        self._core = 0.0

    def saved(self, seconds: float) -> None:
        """Add a save, of which so many seconds were this rank's own."""
        self._save, self._saves = self._save + seconds, self._saves + 1

    def on_core(self, seconds: float) -> None:
        """Add what the thread of a step has computed."""
        self._core += seconds

    def window(self, own: Iterable[OwnStep], last: int, told: int) -> Window:
        """Return what to tell, up to step `last` of the session, which all ranks have measured; `told` totals."""
        last += self._before
        steps = [step for step in own if self._told < step.step <= last]  # the newest of them: clocks keep so many
        totals = [step.total for step in steps[-told:]]
        kept, many = max(1, len(steps)), max(0, last - self._told)
        means = {kind: sum(getattr(step, kind) for step in steps) / kept for kind in (COMPUTE, DATA, BY_HOST)}
        means[SAVE] = self._save / max(1, many)
        computing = means[COMPUTE] * many
        core = min(1.0, self._core / computing) if computing and self._core else math.nan
        window = Window([math.nan] * (told - len(totals)) + totals, means, many, self._saves, core)
        self._told, self._core = max(self._told, last), 0.0
        self._save, self._saves = 0.0, 0
        return window


# --- who is slow --------------------------------------------------------------------------------


class _Saves(NamedTuple):
    """Saves that were told of together: what ranks took over their peers, of each step since those before.

    shares  the same as a share of a step
    """

    many: int
    seconds: Values
    shares: Values


class Stragglers:
    """Finds the slowest rank from what all ranks tell.

    stages  the pipeline stage of each rank: who has the same does alike
    """

    def __init__(self, stages: Sequence[int]) -> None:
        of = numpy.asarray(stages)
        self._peers = [peers for stage in numpy.unique(of) if len(peers := numpy.flatnonzero(of == stage)) > 1]
        self._compares = numpy.isin(numpy.arange(len(of)), [rank for peers in self._peers for rank in peers])
        self._over: deque[Values] = deque(maxlen=KEPT)  # of each step, by rank: share of its peers' median
        self._usual: deque[Values] = deque(maxlen=KEPT)  # that median
        self._means: deque[tuple[int, Values]] = deque(maxlen=KEPT)  # steps, seconds over peers [ranks, kinds]
        self._saves: deque[_Saves] = deque(maxlen=SAVES)
        self._since: float | None = None  # steps since the last save; not known before the first

    def hear(self, windows: Sequence[Window]) -> Slow | None:
        """Take what the ranks tell, in their order; return the slowest one if it is far slower than its peers."""
        if not self._peers:
            return None
        steps = 0
        for totals in numpy.array([window.totals for window in windows]).T:
            if numpy.isfinite(totals).all():
                over, usual = self._compared(totals)
                self._over.append(over / numpy.maximum(usual, LEAST_SECONDS))
                self._usual.append(usual)
                steps += 1
        if steps:
            means = [self._compared(numpy.array([w.means[kind] for w in windows]))[0] for kind in KINDS]
            self._means.append((steps, numpy.stack(means, axis=1)))
            self._hear_of_saves(windows, means[KINDS.index(SAVE)])
        found = [self._slow_in_steps(KEPT), self._slow_in_steps(ENOUGH), self._slow_in_saves()]
        most = max(filter(None, found), key=lambda slow: (slow.over, slow.of), default=None)
        if most is None:
            return None
        cores = [window.on_core for rank, window in enumerate(windows) if rank != most.rank and self._compares[rank]]
        return most._replace(on_core=windows[most.rank].on_core, peers_on_core=float(numpy.median(cores)))

    def _hear_of_saves(self, windows: Sequence[Window], over: Values) -> None:
        """Take what ranks' saves took over their peers', in seconds of each step that they were told with."""
        steps = min(window.steps for window in windows)
        since = None if self._since is None else self._since + steps
        if (saves := min(window.saves for window in windows)) > 0:
            if since is not None:
                seconds = over * steps / max(1.0, since)
                step = numpy.maximum(numpy.mean(self._usual, axis=0), LEAST_SECONDS)
                self._saves.append(_Saves(int(saves), seconds, seconds / step))
            since = 0.0
        self._since = since

    def _compared(self, values: Values) -> tuple[Values, Values]:
        """Return each rank's value over the median of its peers, and that median."""
        usual = values.copy()  # of who has no peers: it is as usual
        for peers in self._peers:
            usual[peers] = medians_without(values[peers])
        return values - usual, usual

    def _slow_in_steps(self, last: int) -> Slow | None:
        """Judge the last steps: of all that are kept for what lasts, of a few for what has just begun."""
        if len(self._over) < ENOUGH:
            return None
        over = numpy.stack(self._over)[-last:]
        levels, scatter = _middle(over), _scatter(over)
        rank = int(numpy.where(self._compares, levels, -numpy.inf).argmax())
        error = max(scatter[rank], numpy.median(scatter[self._compares])) / math.sqrt(len(over))
        error *= _lasting(numpy.stack(self._over)[:, self._compares])
        seconds = levels[rank] * numpy.median([usual[rank] for usual in self._usual])
        times = int((over[:, rank] >= SLOWER).sum())
        if levels[rank] < max(LEAST, FAR * error) or seconds < LEAST_SECONDS or times <= OFTEN * len(over):
            return None
        return Slow(rank, float(levels[rank]), times, len(over), self._by_kind(rank) | {SAVE: 0.0})

    def _slow_in_saves(self) -> Slow | None:
        if len(self._saves) < ENOUGH_SAVES:
            return None
        shares, counts = (numpy.stack([getattr(save, name) for save in self._saves]) for name in ("shares", "many"))
        usual = numpy.median(shares, axis=0)
        rank = int(usual.argmax())
        own, seconds = shares[:, rank], float(numpy.mean([save.seconds[rank] for save in self._saves]))
        error = own.std(ddof=1) / math.sqrt(len(own))  # of few values a median deviation may be 0 by chance
        slower = own >= LEAST
        if usual[rank] < max(LEAST, FAR * error) or seconds < LEAST_SECONDS or slower.mean() <= OFTEN_IN_SAVES:
            return None
        times, of = int(counts[slower].sum()), int(counts.sum())
        return Slow(rank, float(own.mean()), times, of, dict.fromkeys(KINDS, 0.0) | {SAVE: seconds})

    def _by_kind(self, rank: int) -> dict[str, float]:
        """Return a rank's seconds of a step over its peers' median, by kind, over the steps that are looked at."""
        total, sums = 0, numpy.zeros(len(KINDS))
        for steps, seconds in reversed(self._means):
            total, sums = total + steps, sums + steps * seconds[rank]
            if total >= KEPT:
                break
        return dict(zip(KINDS, (sums / max(1, total)).tolist(), strict=True))


def medians_without(values: Values) -> Values:
    """Return for each of several values the median of the others."""
    ordered, rest = numpy.sort(values), len(values) - 1
    low, high = (rest - 1) // 2, rest // 2
    without: Values = (ordered[low + (values <= ordered[low])] + ordered[high + (values <= ordered[high])]) / 2
    return without


def _lasting(over: Values) -> float:
    """Return by how much noise that lasts from step to step makes a mean's error larger, as an AR(1) series has it."""
    rest = over - over.mean(axis=0)
    power = (rest * rest).sum(axis=0)
    alike = (rest[1:] * rest[:-1]).sum(axis=0)[power > 0] / power[power > 0]
    many = len(over)  # of so few the correlation comes out low: Kendall 1954
    last = min(max((many * float(numpy.median(alike)) + 1) / (many - 3), 0.0), LASTS) if len(alike) else 0.0
    return math.sqrt((1 + last) / (1 - last))


def _middle(over: Values) -> Values:
    """Return the mean of each column without its lowest and its highest quarter."""
    cut = int(CUT * len(over))
    middle: Values = numpy.sort(over, axis=0)[cut : len(over) - cut].mean(axis=0)
    return middle


def _scatter(over: Values) -> Values:
    """Return of each column the standard deviation of a normal distribution with its median absolute deviation."""
    scatter: Values = NORMAL * numpy.median(numpy.abs(over - numpy.median(over, axis=0)), axis=0)
    return scatter


def of_history(records: Sequence[Mapping[str, object]]) -> Iterator[tuple[int, Slow]]:
    """Yield the steps at which a record told of a slow rank, and what it told."""
    for record in records:
        step = record.get("step")
        if isinstance(step, int) and (slow := Slow.of_fields(record)) is not None:
            yield step, slow
