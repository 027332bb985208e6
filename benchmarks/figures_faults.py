"""The matrix of docs/reliability.md: fault, promise, test and figure, the figures from results/*.json.

A figure of a target says whether it was met; a row without a figure is kept by its test alone, which tells yes or no.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import doctor
import restart
import watchdog
from figures_measured import results, table, verdict

KILL, DP = "kills", "elastic"  # parts of faults.py


class Row(NamedTuple):
    """A fault, what is promised, the tests that keep it (files in tests/), and what was measured."""

    fault: str
    promise: str
    tests: str
    figure: Callable[[], str] | None = None


def stalled(fault: str) -> str:
    """Seconds from a fault to the block and to the last process gone."""
    [run] = results("watchdog")
    part = run["parts"]["faults"]
    row = part["rows"][fault]
    waited = f" (timeout {part['timeout']:.0f} s)" if fault in ("stop", "loop", "other") else ""
    named = (
        "" if all(row["named"].values()) else f", not named: {', '.join(k for k, v in row['named'].items() if not v)}"
    )
    met = "met" if row["met"] else "missed"
    return f"block after {row['block_s']:.1f} s{waited}, all gone after {row['gone_s']:.1f} s{named}: {met}"


def heartbeats() -> str:
    """What heartbeats and the ledger take of a step."""
    [run] = results("watchdog")
    cost = run["parts"]["cost"]
    return f"{100 * cost['share']:.2f} % of a step (at most {100 * cost['target']:.0f} %: {_met(cost['met'])})"


def no_alarms() -> str:
    """Blocks that a run without faults wrote."""
    [run] = results("watchdog-healthy")
    found = run["parts"]["healthy"]
    return (
        f"{found['alarms']} alarms in {found['steps']:,} healthy steps, timeout {found['timeout']:.0f} s: "
        f"{_met(found['met'])}"
    )


def restarted() -> str:
    """Seconds from a kill to a new step, and where they go."""
    [run] = results("restart")
    times, limit = run["median"], restart.TARGET
    parts = ", ".join(f"{name} {times[name]:.1f}" for name in restart.MOMENTS[:-1])
    judged = verdict([times["trained"]], limit)
    return f"a new step {times['trained']:.1f} s after the kill (at most {limit:.0f} s: {judged}); {parts}"


def killed(part: str) -> str:
    """Kills of all runs of this part, by what was hit or by the size of dp that went on."""
    if part == DP:
        [found] = _parts("faults-kills", DP)
        attempts = {way: row["attempts"] for way, row in found["rows"].items()}
        return f"{_none_failed(found).replace('cases', 'kills')}; {_listed(attempts)}"
    told = []
    for run in results("faults-kills"):
        if part in run["parts"]:
            found = run["parts"][part]
            victims: Counter[str] = Counter()
            for what, row in found["rows"].items():
                victims[f"of {what.partition(',')[0]}"] += 0 if what.startswith("not hit") else row["lives"]
            told.append(f"{_none_failed(found).replace('cases', 'kills')} ({_listed(+victims)})")
    return "; with asynchronous saves: ".join(told)


def cases(name: str, part: str) -> str:
    """Outcomes of cases by the thousand."""
    [found] = _parts(name, part)
    kinds = f" of {len(found['kinds'])} kinds" if "kinds" in found else ""
    outcomes = _listed({what: row["cases"] for what, row in found["rows"].items()})
    return f"{_none_failed(found, kinds)}; {outcomes}"


def flips() -> str:
    """Planted flips that were found before the update, and named."""
    [run] = results("replay")
    found = run["flips"]
    judged = _met(found["planted"] == found["found"] == found["named"] and not found["applied"])
    told = f"{found['found']} of {found['planted']} flips found"
    return f"{told}, {found['named']} named, {found['applied']} applied: {judged}"


def sound() -> str:
    """Alarms of sound steps, and what a replay costs."""
    [run] = results("replay")
    steps, cost = run["sound"], run["cost"]
    return (
        f"{steps['alarms']} alarms in {steps['replays']:,} replays: {_met(not steps['alarms'])}; "
        f"cost {100 * cost['share']['wall']:.1f} % of a step, 1/(K M) is {100 * cost['expected']:.1f} %"
    )


def saving() -> str:
    """Saves, loads and stalls beside their targets."""
    [run] = results("checkpoint")
    told = []
    for found in run["targets"]:
        most = "at most" if found["what"].startswith("stall") else "at least"
        told.append(f"{found['what']}: {found['reached']:.2f}x ({most} {found['target']:.2f}x: {_met(found['met'])})")
    return "; ".join(told)


def examined() -> str:
    """Seconds of `zero3d doctor`."""
    [run] = results("doctor")
    judged = verdict([run["median"]], doctor.TARGET)
    return f"{run['median']:.1f} s on a healthy machine (at most {doctor.TARGET:.0f} s: {judged})"


def _parts(name: str, part: str) -> list[Any]:
    return [run["parts"][part] for run in results(name) if part in run["parts"]]


def _none_failed(found: Mapping[str, Any], of: str = "") -> str:
    [target] = found["targets"]
    return f"{target['reached']} {_thousands(target['what'])}{of}: {_met(target['met'])}"


def _thousands(text: str) -> str:
    return " ".join(f"{int(word):,}" if word.isdigit() else word for word in text.split())


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())


def _met(met: bool) -> str:
    return "met" if met else "missed"


BLOCK = f"timeout + {watchdog.BLOCK:.0f} s"
ROWS = (
    Row(
        "a rank is stopped (SIGSTOP)",
        f"within {BLOCK} rank, unit, collective and all stacks are named; "
        f"within {watchdog.GONE:.0f} s more all processes are gone; exit code 1",
        "parity/test_stalls.py",
        lambda: stalled("stop"),
    ),
    Row("a rank loops for ever", "the same", "parity/test_stalls.py", lambda: stalled("loop")),
    Row(
        "a rank is in another collective",
        "the same, with both calls",
        "parity/test_stalls.py",
        lambda: stalled("other"),
    ),
    Row(
        "a rank is killed, without `--max-restarts`",
        "its last call and the stacks of ranks that still run; exit code 1",
        "parity/test_stalls.py",
        lambda: stalled("kill"),
    ),
    Row(
        "the launcher is killed",
        "ranks say so and end, with a checkpoint where their step ends in time",
        "parity/test_stalls.py",
        lambda: stalled("launcher"),
    ),
    Row(
        "no fault: an ordinary run is watched",
        "heartbeats and the ledger cost next to nothing",
        "unit/test_heartbeat.py",
        heartbeats,
    ),
    Row(
        "no fault: a save, a compilation or a tokenization takes long",
        "no alarm within `health.slow_timeout`",
        "unit/test_watchdog.py",
        no_alarms,
    ),
    Row(
        "a stall, with `--max-restarts`",
        "named, ended, and all start again from the newest checkpoint; curve bitwise",
        "parity/test_stalled_runs.py",
    ),
    Row(
        "a stall in a pipeline, or over tp",
        "which message of which micro-batch is waited for, and whose",
        "parity/test_stalled_runs.py, unit/test_pipeline_waits.py",
    ),
    Row(
        "the link between two hosts is cut or slow, or a host is gone",
        "both sides name whom they wait for, and end; a slow link changes no bit",
        "ranks/test_two_hosts.py (two network namespaces; needs root)",
    ),
    Row(
        "a rank is killed, with `--max-restarts`",
        "all start again from the newest checkpoint",
        "unit/test_elastic.py",
        restarted,
    ),
    Row(
        "ranks are lost, under `zero.exact`",
        "dp 4, 2, 4: every step's loss and norm bitwise",
        "ranks/test_restarts.py",
        lambda: killed(DP),
    ),
    Row(
        "ranks are lost, without it",
        'dp 4, 3, 2, 4: losses to 1e-6, and it says "not bitwise"',
        "ranks/test_restarts.py",
    ),
    Row("torchrun starts more ranks than fit", "spare ones wait, also through a restart", "ranks/test_restarts.py"),
    Row("a rank dies twice before a step", "its slot counts as lost", "unit/test_elastic.py"),
    Row(
        "bad input, NaN, a gradient that was computed wrongly, a signal that asks to stop",
        "no restart",
        "unit/test_elastic.py",
    ),
    Row(
        "SIGTERM, SIGINT, SIGHUP, SIGUSR1",
        "one checkpoint, exit code 128 + signal",
        "unit/test_stop.py, parity/test_stopping.py",
    ),
    Row(
        "SIGKILL at random moments, also in saves",
        "the newest checkpoint verifies, none is lost, and the curve is bitwise that of an uninterrupted run",
        "parity/test_saves_behind.py, ranks/test_random_kills.py",
        lambda: killed(KILL),
    ),
    Row(
        "a full disk while a checkpoint is written",
        "path, bytes needed and free; a warning, or with `checkpoint.on_error=stop` the end; earlier ones stay",
        "parity/test_saves_behind.py, parity/test_checkpoint.py",
    ),
    Row(
        "a disk that errs only when it is synced, or power that is lost after a save",
        "every file is synced before the checkpoint has its name; one that is not is named, and nothing is committed",
        "parity/test_checkpoint.py",
    ),
    Row(
        "no fault: saving and loading",
        "as fast as the disk, checksums included; behind training almost no wait",
        "unit/test_checkpoint_benchmark.py",
        saving,
    ),
    Row(
        "a flipped bit, a truncated, missing or swapped file of a checkpoint",
        "refused, file and tensor named; `zero3d ckpt verify run` finds it",
        "parity/test_checkpoint_damage.py, unit/test_ckpt.py",
        lambda: cases("faults-checkpoints", "checkpoints"),
    ),
    Row(
        "a hostile checkpoint or configuration",
        "one of our errors; nothing is executed, nothing outside is read",
        "parity/test_checkpoint_damage.py, unit/test_config_hostile.py",
        lambda: cases("faults-configs", "configs"),
    ),
    Row(
        "another dp, tp, pp, stage or offload on resume",
        "equal states; losses to 1e-6 where not bitwise",
        "parity/test_checkpoint.py, parity/test_mesh_checkpoint.py",
    ),
    Row(
        "another model or optimizer on resume",
        "refused, with the difference",
        "parity/test_checkpoint.py, parity/test_pipeline_checkpoint.py",
    ),
    Row(
        "a gradient is computed wrongly, once",
        "found before the update, rank, host, unit and parameter named",
        "parity/test_replay.py, parity/test_replay_train.py",
        flips,
    ),
    Row("no fault: `health.replay` on a sound machine", "no alarm", "parity/test_replay.py", sound),
    Row(
        "a stage of a pipeline computes wrongly, once",
        "found before the update; the rank and stage on which it began are named, not those it reached",
        "parity/test_replay_pipeline.py",
    ),
    Row(
        "a rank computes wrongly each time",
        "dp 3 and more: named; dp 2: both are; dp 1: not found",
        "parity/test_replay.py",
    ),
    Row(
        "NaN gradients on one rank",
        "all skip; at the end rank, unit and parameter are named",
        "parity/test_train_health.py",
    ),
    Row(
        "fp16 overflows for ever",
        "at the smallest loss scale the run ends, with unit, rank and what to lower",
        "parity/test_train_health.py",
    ),
    Row(
        "a device or a host is out of memory",
        "what was live, the largest tensors, what to change and what that saves, from the planner; on a host before "
        "the kernel kills",
        "parity/test_post_mortem.py, unit/test_host_memory.py",
    ),
    Row("a bad line of data, an empty file", "file and line named", "unit/test_data_sources.py"),
    Row("a lock or a watch file of a dead run", "the next run starts", "unit/test_folder_lock.py"),
    Row(
        "an interface that is not there, a port that is taken, few open files, a small /dev/shm, a full disk, a driver "
        "that hangs",
        "`zero3d doctor` names it, and what to type",
        "unit/test_doctor.py",
        examined,
    ),
)


def matrix() -> str:
    """Return the whole matrix."""
    rows = []
    for row in ROWS:
        tests = ", ".join(_linked(words) for words in row.tests.split(", "))
        rows.append([row.fault, row.promise, tests, row.figure() if row.figure else ""])
    return table(["fault", "promise", "test", "figure"], rows)


def _linked(words: str) -> str:
    path, blank, rest = words.partition(" ")
    return f"`tests/{path}`{blank}{rest}"


FAULTS: dict[str, Callable[[], str]] = {"faults": matrix}
