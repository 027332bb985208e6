"""`zero3d doctor`: what is wrong with this machine, with a launcher's hosts together, or with a run that died."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zero3d.config.hints import nearest
from zero3d.errors import FAULT, ConfigError, short
from zero3d.tools.cli.rank_environment import MOST_PORT, join_environment
from zero3d.tools.cli.worker import quiet_environment

if TYPE_CHECKING:
    from zero3d.tools.doctor.dead_run import DeadRun
    from zero3d.tools.doctor.finding import Finding, Request
    from zero3d.tools.doctor.table import Probe

RUN, SLOW_RANK = "run", "slow rank"  # the row of a dead run, and of a rank that is slower than its peers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("--disk", metavar="FOLDER", default=".", help="the disk to examine (default: this folder)")
    parser.add_argument("--interface", metavar="NAME", default="", help="network interface for the ranks")
    parser.add_argument(
        "--hosts", metavar="A,B", default="", help="other hosts that must answer, each NAME or NAME:PORT"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port on which rank 0 will listen (default: MASTER_PORT, if set)"
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="file of rates to compare with, as `zero3d calibrate` writes it"
    )
    parser.add_argument(
        "--run",
        metavar="OUTPUT",
        dest="output",
        help="show what the watchdog of a run has written, and a rank that is slow, and examine nothing else",
    )
    parser.add_argument("--only", metavar="NAME,...", default="", help="run only these probes")
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="examine what would stop a job, on all of its hosts; exit code 1 for such findings alone",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine and print; return 1 where something is broken. Raises ConfigError for bad input."""
    quiet_environment()
    if arguments.output is not None:
        return examine_run(arguments)
    probes, request = chosen(arguments.only, arguments.preflight), request_of(arguments)
    if join_environment() and int(os.environ["WORLD_SIZE"]) > 1:
        return examine_hosts(arguments, probes, request)
    from rich.console import Console

    from zero3d.tools.doctor.examine import examine

    begun = time.monotonic()
    with Console(stderr=True).status("examining this machine") as status:
        left = {probe.name for probe in probes}

        def report(name: str) -> None:
            left.discard(name)
            status.update(f"examining this machine: {', '.join(sorted(left))}")

        examined = examine(probes, request, report=report)
    findings = {name: each.finding for name, each in examined.items()}
    taken = {name: each.seconds for name, each in examined.items()}
    return conclude(arguments, findings, taken, time.monotonic() - begun)


def chosen(only: str, preflight: bool = False) -> list[Probe]:
    """Return the probes that are asked for, in the order of the table. Raises ConfigError."""
    from zero3d.tools.doctor.preflight import EXAMINED
    from zero3d.tools.doctor.table import PROBES

    if preflight:
        if only:
            raise ConfigError("--preflight has probes of its own: leave --only out.")
        return [probe for probe in PROBES if probe.name in EXAMINED]
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [probe.name for probe in PROBES]
    for name in names:
        if name not in known:
            near = nearest(name, known)
            meant = f" Did you mean {near}?" if near else ""
            raise ConfigError(f"--only {short(name)}: no such probe; there are {', '.join(known)}.{meant}")
    if only and not names:
        raise ConfigError(f"--only names no probe; there are {', '.join(known)}.")
    return [probe for probe in PROBES if not names or probe.name in names]


def request_of(arguments: argparse.Namespace) -> Request:
    """Make a Request of the options. Raises ConfigError."""
    from zero3d.tools.doctor.finding import Request

    if not 0 <= arguments.port <= MOST_PORT:
        raise ConfigError(f"--port {arguments.port}: ports are numbers from 1 to {MOST_PORT}.")
    expected, device = calibrated(arguments.cluster) if arguments.cluster else ({}, "")
    hosts = tuple(host.strip() for host in arguments.hosts.split(",") if host.strip())
    return Request(arguments.disk, arguments.interface, hosts, arguments.port, expected=expected, device=device)


def calibrated(file: str) -> tuple[dict[str, float], str]:
    """Return the rates of a cluster file in bytes per second, and its device. Raises ConfigError."""
    from zero3d.tools.plan.hardware import read_file

    tree = read_file(file)
    rates = {name: rate for name, rate in tree.items() if name in ("disk", "host_link")}
    rates |= {name: tree[name]["bandwidth"] for name in ("inside", "across") if "bandwidth" in tree.get(name, {})}
    gpu = tree.get("gpu")
    return {key: float(value) for key, value in rates.items()}, str(
        gpu if isinstance(gpu, str) else (gpu or {}).get("name", "")
    )


def examine_run(arguments: argparse.Namespace) -> int:
    """Read what the watchdogs of a run have written, and print it."""
    from zero3d.tools.doctor.dead_run import judge_run, judge_silence, read_runs
    from zero3d.tools.doctor.slow_rank import judge_slow_rank

    begun = time.monotonic()
    output = Path(arguments.output)
    dead = read_runs(output)
    alone = len(dead) == 1
    findings = {
        RUN if alone else f"{RUN} @ {run.host or number}": judge_run(run, output) for number, run in enumerate(dead)
    }
    findings = findings or {RUN: judge_silence(output)}
    if (slow := judge_slow_rank(output)) is not None:
        findings[SLOW_RANK] = slow
    return conclude(arguments, findings, {}, time.monotonic() - begun, dead)


def examine_hosts(arguments: argparse.Namespace, probes: list[Probe], request: Request) -> int:
    """Examine all hosts of a launcher's job together; rank 0 prints."""
    from zero3d.tools.doctor.together import together

    begun = time.monotonic()
    findings = together(probes, request)
    code = 0 if findings is None else conclude(arguments, findings, {}, time.monotonic() - begun)
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for a host that does not answer


def conclude(
    arguments: argparse.Namespace,
    findings: Mapping[str, Finding],
    taken: Mapping[str, float],
    seconds: float,
    dead: Sequence[DeadRun] = (),
) -> int:
    """Print what was found; return the exit code."""
    from rich.console import Console

    from zero3d.tools.doctor.finding import exit_code
    from zero3d.tools.doctor.preflight import stops
    from zero3d.tools.doctor.table import PROBES
    from zero3d.tools.doctor.view import as_json, show, show_run

    symptoms = {probe.name: probe.symptom for probe in PROBES}
    if arguments.json:
        print(as_json(findings, symptoms, taken, seconds, dead), flush=True)
    else:
        console = Console(highlight=False)
        for each in dead:
            show_run(each, console)
        show(findings, symptoms, seconds, console)
    if not arguments.preflight:
        return exit_code(findings)
    stopping = stops(findings)
    if stopping and not arguments.json:
        console.print(f"this stops the job: {', '.join(stopping)}")
    return FAULT if stopping else 0
