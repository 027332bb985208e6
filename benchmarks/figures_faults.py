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
    """A fault, what is promised, the tests that check it (files in tests/), and what was measured."""

    fault: str
    promise: str
    tests: str
    figure: Callable[[], str] | None = None


def stalled(fault: str) -> str:
    """Seconds from a fault to the report and to the last process gone."""
    [run] = results("watchdog")
    part = run["parts"]["faults"]
    row = part["rows"][fault]
    waited = f" (timeout {part['timeout']:.0f} s)" if fault in ("stop", "loop", "other") else ""
    named = (
        "" if all(row["named"].values()) else f", not named: {', '.join(k for k, v in row['named'].items() if not v)}"
    )
    met = "met" if row["met"] else "missed"
    return f"report after {row['block_s']:.1f} s{waited}, all gone after {row['gone_s']:.1f} s{named}: {met}"


def heartbeats() -> str:
    """What heartbeats and the ledger take of a step."""
    [run] = results("watchdog")
    cost = run["parts"]["cost"]
    return f"{100 * cost['share']:.2f} % of a step (at most {100 * cost['target']:.0f} %: {_met(cost['met'])})"


def no_alarms() -> str:
    """Reports that a run without faults wrote."""
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
        f"within {BLOCK} a report names the rank, the unit, the collective and all stacks; "
        f"within {watchdog.GONE:.0f} s more all processes are gone; exit code 1",
        "parity/test_stalls.py",
        lambda: stalled("stop"),
    ),
    Row("a rank loops forever", "the same", "parity/test_stalls.py", lambda: stalled("loop")),
    Row(
        "a rank is in a different collective than the others",
        "the same, and the report names both calls; where ranks can tell, an OrderError does so within seconds",
        "parity/test_stalls.py",
        lambda: stalled("other"),
    ),
    Row(
        "at stage 3 some ranks call a branch, an expert or a tower that is a unit of its own, and others do not",
        "within seconds OrderError on all ranks, with the unit, the ranks and what to change; a slow rank is no error",
        "ranks/test_unequal_units.py",
    ),
    Row(
        "a hang on NCCL whose flight recorder is on",
        "each rank writes its record, and the report or the error names the file",
        "unit/test_flight_recorder.py",
    ),
    Row(
        "a rank is killed, without `--max-restarts`",
        "the report has its last call and the stacks of the other ranks; exit code 1",
        "parity/test_stalls.py",
        lambda: stalled("kill"),
    ),
    Row(
        "the launcher is killed",
        "the ranks say so and end, with a checkpoint if their step ends in time",
        "parity/test_stalls.py",
        lambda: stalled("launcher"),
    ),
    Row(
        "no fault: an ordinary run is watched",
        "heartbeats and the traffic ledger cost almost nothing",
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
        "a hang, with `--max-restarts`",
        "it is reported and ended, and all ranks restart from the newest checkpoint; the loss curve is bitwise equal",
        "parity/test_stalled_runs.py",
    ),
    Row(
        "a hang in a pipeline or in tensor parallelism",
        "the report names the message, its micro-batch, and the rank that should have sent it",
        "parity/test_stalled_runs.py, unit/test_pipeline_waits.py",
    ),
    Row(
        "the link between two hosts is cut or slow, or a host is gone",
        "both sides name the ranks they wait for, and end; a slow link changes no bit",
        "ranks/test_two_hosts.py (two network namespaces; needs root)",
    ),
    Row(
        "a rank is killed, with `--max-restarts`",
        "all ranks restart from the newest checkpoint",
        "unit/test_elastic.py",
        restarted,
    ),
    Row(
        "ranks are lost, with `zero.exact`",
        "dp 4, 2, 4: the loss and norm of every step are bitwise equal",
        "ranks/test_restarts.py",
        lambda: killed(DP),
    ),
    Row(
        "ranks are lost, without `zero.exact`",
        'dp 4, 3, 2, 4: losses agree to 1e-6, and the run says "not bitwise"',
        "ranks/test_restarts.py",
    ),
    Row(
        "torchrun starts more ranks than the batch allows",
        "spare ranks wait, also through a restart",
        "ranks/test_restarts.py",
    ),
    Row("a rank dies twice without completing a step", "its slot counts as lost", "unit/test_elastic.py"),
    Row(
        "bad input, NaN, a wrongly computed gradient, a signal that asks to stop", "no restart", "unit/test_elastic.py"
    ),
    Row(
        "SIGTERM, SIGINT, SIGHUP, SIGUSR1",
        "one checkpoint, exit code 128 + signal",
        "unit/test_stop.py, parity/test_stopping.py",
    ),
    Row(
        "SIGKILL at random moments, also during saves",
        "the newest checkpoint verifies, no checkpoint is lost, and the resumed loss curve is bitwise equal",
        "parity/test_saves_behind.py, ranks/test_random_kills.py",
        lambda: killed(KILL),
    ),
    Row(
        "the disk fills up while a checkpoint is written",
        "the message has the path and the bytes needed and free; training continues with a warning, or ends "
        "with `checkpoint.on_error=stop`; earlier checkpoints stay",
        "parity/test_saves_behind.py, parity/test_checkpoint.py",
    ),
    Row(
        "a disk that fails only at fsync, or a power failure after a save",
        "every file is synced before the checkpoint gets its name; a file that cannot be synced is named, "
        "and nothing is committed",
        "parity/test_checkpoint.py",
    ),
    Row(
        "no fault: saving and loading",
        "as fast as the disk, including checksums; in the background almost without waiting",
        "unit/test_checkpoint_benchmark.py",
        saving,
    ),
    Row(
        "a checkpoint with a flipped bit, or a truncated, missing or swapped file",
        "it is refused, with file and tensor; `zero3d ckpt verify run` finds it",
        "parity/test_checkpoint_damage.py, unit/test_ckpt.py",
        lambda: cases("faults-checkpoints", "checkpoints"),
    ),
    Row(
        "a malicious checkpoint or configuration",
        "it ends in a zero3d error; no code is run, and no file outside is read",
        "parity/test_checkpoint_damage.py, unit/test_config_hostile.py",
        lambda: cases("faults-configs", "configs"),
    ),
    Row(
        "another dp, tp, pp, stage or offload on resume",
        "the states are equal; losses agree to 1e-6 if they are not bitwise equal",
        "parity/test_checkpoint.py, parity/test_mesh_checkpoint.py",
    ),
    Row(
        "another model or optimizer on resume",
        "it is refused, with the difference",
        "parity/test_checkpoint.py, parity/test_pipeline_checkpoint.py",
    ),
    Row(
        "a gradient is computed wrongly once",
        "it is found before the update, with rank, host, unit and parameter",
        "parity/test_replay.py, parity/test_replay_train.py",
        flips,
    ),
    Row("no fault: `health.replay` on a healthy machine", "no alarm", "parity/test_replay.py", sound),
    Row(
        "a pipeline stage computes wrongly once",
        "it is found before the update; the report names the rank and stage where it began, not those it reached",
        "parity/test_replay_pipeline.py",
    ),
    Row(
        "a rank always computes wrongly",
        "with dp of 3 or more it is named; with dp 2 both ranks are; with dp 1 it is not found",
        "parity/test_replay.py",
    ),
    Row(
        "NaN gradients on one rank",
        "all ranks skip the step; when the run ends, it names rank, unit and parameter",
        "parity/test_train_health.py",
    ),
    Row(
        "fp16 overflows in every step",
        "at the smallest loss scale the run ends, with unit, rank and what to lower",
        "parity/test_train_health.py",
    ),
    Row(
        "a device or a host is out of memory",
        "a report has what was allocated, the largest tensors, and what to change and how much that saves; "
        "on a host, before the kernel kills a process",
        "parity/test_post_mortem.py, unit/test_host_memory.py",
    ),
    Row("a bad line of data, an empty file", "the message has file and line", "unit/test_data_sources.py"),
    Row("a lock or a watchdog file of a dead run", "the next run starts", "unit/test_folder_lock.py"),
    Row(
        "a missing network interface, a port in use, a low limit of open files, a small /dev/shm, a full "
        "disk, a driver that hangs",
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


# What tools found on the code before, by what they watch.
BEFORE = {
    "a unit with a hole waits for backward's end (C1)": ("a hole",),
    "compute waits for copies of units that are gathered ahead (C2)": ("superfluous waits",),
    "groups of a caller change the names of later ones (C4)": ("a caller's groups",),
}


def concurrency() -> str:
    """Which tool finds which fault of concurrency: planted ones, and three on the code that had them."""
    [planted], [before] = results("concurrency"), results("concurrency-before")
    tools = list(planted["found"]["none"])
    rows = [
        [fault, *("; ".join(found[tool]) for tool in tools)]
        for fault, found in planted["found"].items()
        if fault != "none"
    ]
    earlier = before["found"]["none"]
    rows += [
        [
            f"{fault}, in the code before",
            *("; ".join(each for each in earlier[tool] if each in watched) for tool in tools),
        ]
        for fault, watched in BEFORE.items()
    ]
    return table(["fault", *tools], rows)


FAULTS: dict[str, Callable[[], str]] = {"faults": matrix, "concurrency": concurrency}
