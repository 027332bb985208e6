"""Whether a run that goes on from a checkpoint has the bits of one that was never interrupted, and if not, why.

Two mappings are compared: what the checkpoint notes of its run (`about`), and the same of the run that goes on, after
it has loaded. What is in them, and why bits change with it, is declared elsewhere: facts in `spec/bits.py`, values of
keys where the keys are (`bits=`), axes that fold dp in `distributed/degrees.py`. Options of the optimizer's groups are
compared one by one, as the manifest has them (`update_settings.py`).

                         must be the same                              may differ
    plain                the mesh, all facts and values that are       stage; moment of reduction with one micro-batch
                         compared always                               a step; what leaves the device and where to
    exact on both sides  tp, pp, sp, micro-batches per step over       dp, ep, shard, stage, moment of reduction,
                         all ranks, what is compared always            algorithm, what leaves the device and where to

On an accelerator all of `distributed.determinism.device_facts` beside them: deterministic algorithms, which must be on,
its libraries, their settings. Where the backend adds what ranks have (native gradients over dp, activations over tp) it
must be the same, and its order known: NCCL of the same version, with a named algorithm, its ranks placed alike; then
the stage must be the same, too.

The batches must be the same ones, in micro-batches of the same size. A run of `zero3d train` notes both; an engine in
a loop of its own does not see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from zero3d.config.keys import KEYS
from zero3d.distributed.degrees import FOLDS
from zero3d.errors import short
from zero3d.spec.bits import ALWAYS, DEVICE, EXACT, EXACT_WOULD, FACTS, NCCL, PLAIN, SAME_DP, SEVERAL, UNKNOWN, Bits
from zero3d.spec.declaring import as_noted, noted_as

BITWISE = "bitwise"
IMPORTED = "imported"  # from whom, of a checkpoint that another trainer wrote
EMA = "ema"  # decay of averages; nothing where there are none
LEAVES, OPTIONS, SCHEDULER, MICRO_BATCHES, MICRO_BATCH = (
    "leaves",
    "options",
    "scheduler",
    "micro_batches",
    "micro_batch",
)
CYCLES, MOMENTA = "cycle_momentum=True", ("betas", "momentum")  # of a schedule, and the options that it moves
BACKEND = "by the backend"  # NCCL, above all
ALL = {fold.name: "all of dp" for fold in FOLDS if fold.usual is None}


def _rows() -> Iterator[tuple[str, Bits]]:
    """Yield the row of everything that is compared, by the name under which a checkpoint notes it."""
    yield from FACTS.items()
    for fold in FOLDS:
        when, why = (PLAIN, f"{fold.bits}{EXACT_WOULD}") if fold.exact else (ALWAYS, fold.bits)
        yield fold.name, Bits(why, when, fold.usual, told=True, fact=fold.name)
    for key in KEYS.values():
        section, _, name = key.name.rpartition(".")
        if key.bits is not None and not key.bits.fact:
            yield noted_as(section, name), key.bits._replace(usual=as_noted(key.bits.usual))


ROWS: Mapping[str, Bits] = MappingProxyType(dict(_rows()))
USUAL = {name: row.usual for name, row in ROWS.items() if row.usual != UNKNOWN}  # where a checkpoint notes nothing


class Change(NamedTuple):
    """Says what was noted, what it is now, and why bits change with it."""

    name: str
    was: Any
    now: Any
    why: str = ""

    def __str__(self) -> str:
        if words := ROWS[self.name].words if self.name in ROWS else "":
            return f"other {words} ({self.why})"
        was, now = _shown(*(ALL.get(self.name, value) if value is None else value for value in (self.was, self.now)))
        return f"{self.name} {was} -> {now}{f' ({self.why})' if self.why else ''}"


def _shown(one: Any, other: Any) -> tuple[str, str]:
    """Return two values as a line quotes them; of long ones that begin alike from the word where they differ."""
    if short(one) != short(other):
        return short(one), short(other)
    texts = str(one), str(other)
    alike = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), len(texts[0]))
    start = texts[0].rfind(" ", 0, alike) + 1
    return f"... {short(texts[0][start:])}", f"... {short(texts[1][start:])}"


def resume_guarantee(saved: Mapping[str, Any], live: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> str:
    """Return one line that begins with "bitwise" or "not bitwise". The arguments: `state.EngineState.about`.

    saved  noted by the checkpoint
    live   of the run after it has loaded
    given  of the run before it loaded: where a value of the checkpoint has taken the place of another, the line says so
    """
    line = _guarantee(saved, live) + _of_averages(saved.get(EMA), live.get(EMA))
    if given is None or IMPORTED in saved or not (replaced := _replaced(given, live)):
        return line
    shown = [(each.name, *_shown(each.now, each.was)) for each in replaced]
    listed = ", ".join(f"{name} {now} in place of {was}" for name, now, was in shown)
    return f"{line}; the checkpoint's values count: {listed} (load(..., settings='given') takes this engine's)"


def changes(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[Change]:
    """Return what differs of all that bits depend on; a value that is not known counts as another one."""
    saved, live = USUAL | dict(saved), USUAL | dict(live)
    found = [
        Change(name, saved.get(name, UNKNOWN), live[name], _why(name, row, saved))
        for name, row in ROWS.items()
        if name in live and _compared(name, row, saved, live) and saved.get(name, UNKNOWN) != live[name]
    ]
    return found + _of_options(saved, live)


def unusual(about: Mapping[str, Any]) -> list[Change]:
    """Return the settings of a run that change bits and are not as usual, but degrees and what only hashes tell."""
    degrees = {fold.name for fold in FOLDS}
    told = (name for name in USUAL if name in about and name not in degrees and not ROWS[name].words)
    found = (Change(name, USUAL[name], about[name], ROWS[name].why) for name in told)
    return [each for each in found if as_noted(each.now) != each.was]


def _replaced(given: Mapping[str, Any], live: Mapping[str, Any]) -> list[Change]:
    """Return the options and the schedule of an engine that those of a checkpoint have replaced."""
    schedule = [Change(SCHEDULER, given[SCHEDULER], live[SCHEDULER])]
    moved = MOMENTA if CYCLES in live[SCHEDULER] else ()  # by the schedule, as far as it has come
    options = [each for each in _of_options(given, live) if each.name not in moved]
    return [each for each in schedule if each.was != each.now] + options


def _guarantee(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    if IMPORTED in saved:
        return f"not bitwise: it was imported from {saved[IMPORTED]}"
    was, is_ = (about.get(LEAVES) is not None for about in (saved, live))
    if was != is_:
        return f"not bitwise: exact was {was} when it was saved, and is {is_} now"
    found = changes(saved, live)
    reasons = [str(each) for each in found if each.was != UNKNOWN]
    if unknown := [each.name for each in found if each.was == UNKNOWN]:
        reasons.append(f"{UNKNOWN} of the checkpoint: {', '.join(unknown)}")
    if reasons := reasons or list(_never(live)):
        return f"not bitwise: {'; '.join(reasons)}"
    moved = _moved(USUAL | dict(saved), USUAL | dict(live))
    same = "" if MICRO_BATCH in live else ", in batches and micro-batches of the same size"
    return f"{BITWISE}: as if it had not been interrupted{''.join(f', {change}' for change in moved)}{same}"


# --- which rows count -----------------------------------------------------------------------------


def _compared(name: str, row: Bits, saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return whether another value of a fact or a key changes bits, between these two runs."""
    exact = live[LEAVES] is not None
    if name == "products":  # where the CPU's kernels differ by name already, there is nothing to add
        return bool(saved.get("kernels") == live.get("kernels"))
    if name == "schedule_state":  # nor where schedules differ by what is noted of them
        return all(saved.get(each) == live.get(each) for each in (SCHEDULER, "factors"))
    if row.when in (PLAIN, EXACT):
        return exact == (row.when == EXACT)
    if row.when == SAME_DP:
        return not exact and saved.get("dp") == live["dp"]
    if row.when == SEVERAL:
        return not exact and (_micro_batches(saved), _micro_batches(live)) != (1, 1)
    if row.when in (DEVICE, NCCL):
        # Of another device, which differs by its name, only what was noted.
        known = name in saved or saved.get("kernels") == live.get("kernels")
        return known and (row.when == DEVICE or _backend_adds(live)) and "deterministic" in live
    return row.when == ALWAYS


def _micro_batches(about: Mapping[str, Any]) -> Any:
    """Return how many micro-batches the last step had; older checkpoints note it under another name, or do not."""
    return about.get(MICRO_BATCHES, about.get("accumulate"))


def _why(name: str, row: Bits, saved: Mapping[str, Any]) -> str:
    return f"{_micro_batches(saved) or 'several'} {row.why}" if row.when == SEVERAL else row.why


def _backend_adds(about: Mapping[str, Any]) -> bool:
    """Return whether an accelerator's backend, and not zero3d, adds what ranks have."""
    return BACKEND in (about.get("dp_sums"), about.get("tp_sums"))


def _never(live: Mapping[str, Any]) -> Iterator[str]:
    """Yield why an accelerator does not repeat its bits even where nothing has changed."""
    if live.get("deterministic", "on") != "on":
        yield f"deterministic algorithms are {live['deterministic']} (pass train.deterministic=true)"
    if _backend_adds(live) and live["backend"] not in ("nccl", "gloo"):
        yield f"{live['backend']} adds the ranks' terms in an unknown order"
    if _backend_adds(live) and live.get("nccl_algorithm") == "chosen by NCCL":
        yield "NCCL chooses how it adds the ranks' terms (set NCCL_ALGO=Ring before the first process group)"


def _moved(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[Change]:
    """Return what a run names that differs and changes no bit."""
    told = [name for name, row in ROWS.items() if row.told and name in live]
    return [Change(name, saved[name], live[name]) for name in told if name in saved and saved[name] != live[name]]


# --- options of groups, averages ------------------------------------------------------------------


def _of_options(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[Change]:
    """Return what differs of the options of the optimizer's groups: once where all groups change alike."""
    if OPTIONS not in live:
        return []
    if OPTIONS not in saved:
        return [Change(OPTIONS, UNKNOWN, "")]
    found: dict[tuple[str, str, str], Change] = {}
    for was, now in zip(saved[OPTIONS], live[OPTIONS], strict=False):
        for name in sorted(was.keys() | now.keys()):
            if was.get(name) != now.get(name):
                change = Change(name, was.get(name), now.get(name), FACTS[OPTIONS].why)
                found.setdefault((name, str(change.was), str(change.now)), change)
    return list(found.values())


def _of_averages(saved: Any, live: Any) -> str:
    """Return what becomes of averages of the weights, which no training reads, where they do not go on as they were."""
    if saved == live:
        return ""
    if saved is None:
        return "; averages of weights (ema) begin with the weights of this step: the checkpoint has none"
    return "; its averages of weights (ema) are left out" if live is None else f"; ema {saved} -> {live} from here on"
