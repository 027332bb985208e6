"""The batch script of `zero3d launch slurm`: what is asked of the cluster, a preflight, and one task of srun per GPU.

    #SBATCH lines   nodes, GPUs, cores, memory, time; whole nodes unless --shared
    NCCL            variables that --nccl and --nccl-debug name
    preflight       zero3d doctor --preflight on all nodes; where it finds what would stop the run, the job ends here
    the run         a log for each rank

Cores are given to srun itself: from Slurm 22.05 on it does not take them from sbatch, and a task with one core shares
it among training, data, saves and NCCL's threads.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from zero3d.errors import ConfigError, short

CORES, MEMORY = 8, "64G"  # of a GPU where nodes are shared with other jobs, unless said otherwise
LIMIT = "24:00:00"
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}$|UNLIMITED$|INFINITE$", re.IGNORECASE)
SIZE = re.compile(r"\d+[KMGT]?$")
VARIABLE = re.compile(r"(NCCL_)?([A-Z][A-Z0-9_]*)=(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Resources:
    """Holds the options of a batch script beside nodes and GPUs.

    time           as sbatch takes it
    partition, account  None: the cluster's own
    cpus_per_task  cores of a GPU; None: an equal share of the node's, or CORES of a shared node
    mem            of a node; None: all, or MEMORY for each GPU of a shared node
    shared         whether other jobs may run on these nodes
    container      image: a .sif file for Apptainer, anything else for Pyxis
    mount          SOURCE:TARGET folders of the container, beside the current one
    nccl           NAME=VALUE of NCCL's variables
    nccl_debug     whether NCCL writes a log, a file for each rank
    preflight      whether all nodes are examined first
    """

    time: str = LIMIT
    partition: str | None = None
    account: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    shared: bool = False
    container: str | None = None
    mount: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()
    nccl_debug: bool = False
    preflight: bool = True

    def given(self) -> list[str]:
        """Return the options that are not at their defaults."""
        names = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return [f"--{name.replace('_', '-')}" if name != "preflight" else "--no-preflight" for name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a batch script."""
    group = parser.add_argument_group("of slurm")
    group.add_argument("--time", default=LIMIT, help=f"limit, as sbatch takes it (default: {LIMIT})")
    group.add_argument("--partition", metavar="NAME", help="(default: the cluster's)")
    group.add_argument("--account", metavar="NAME", help="(default: yours)")
    group.add_argument(
        "--cpus-per-task",
        type=int,
        metavar="N",
        help=f"cores for each GPU (default: an equal share of the node's, with --shared {CORES})",
    )
    group.add_argument(
        "--mem", help=f"memory of a node, such as 500G (default: all, with --shared {MEMORY} for each GPU)"
    )
    group.add_argument("--shared", action="store_true", help="take parts of nodes on which other jobs run, too")
    group.add_argument("--container", metavar="IMAGE", help="run in it: FILE.sif by Apptainer, any other by Pyxis")
    group.add_argument(
        "--mount", action="append", default=[], metavar="FROM:TO", help="a folder of the container, beside this one"
    )
    group.add_argument(
        "--nccl", action="append", default=[], metavar="NAME=VALUE", help="set NCCL_NAME, such as SOCKET_IFNAME=ib0"
    )
    group.add_argument("--nccl-debug", action="store_true", help="have NCCL write a log, a file for each rank")
    group.add_argument("--no-preflight", action="store_false", dest="preflight", help="do not examine the nodes first")


def resources_of(arguments: argparse.Namespace, grace: int) -> Resources:
    """Return what these options ask for. grace: seconds before the limit in which a run stops. Raises ConfigError."""
    values: dict[str, Any] = {each.name: getattr(arguments, each.name) for each in fields(Resources)}
    asked = Resources(**values | {name: tuple(values[name]) for name in ("mount", "nccl")})
    if not TIME.match(asked.time):
        raise ConfigError(f"--time {short(asked.time)}: type it as sbatch takes it, such as 24:00:00 or 2-00:00:00.")
    if (limit := seconds_of(asked.time)) is not None and limit <= grace:
        raise ConfigError(
            f"--time {asked.time} is {limit} seconds (a number alone is minutes), and {grace} seconds before the limit "
            f"the run is told to stop: type more than {grace // 60} minutes."
        )
    if asked.mem is not None and not SIZE.match(asked.mem):
        raise ConfigError(f"--mem {short(asked.mem)}: type a whole number with K, M, G or T, such as 500G.")
    if asked.cpus_per_task is not None and asked.cpus_per_task < 1:
        raise ConfigError(f"--cpus-per-task {asked.cpus_per_task}: type a whole number from 1.")
    for option, name in (("--partition", asked.partition), ("--account", asked.account)):
        if name is not None and not re.fullmatch(r"[\w.,+-]+", name):
            raise ConfigError(f"{option} {short(name)}: type its name, without spaces.")
    for pair in asked.mount:
        if asked.container is None:
            raise ConfigError(f"--mount {short(pair)} is a folder of a container: add --container IMAGE.")
        if not re.fullmatch(r"[^:,]+:[^:,]+", pair):
            raise ConfigError(f"--mount {short(pair)}: type FOLDER:FOLDER, the one here and its name in the container.")
    for pair in asked.nccl:
        if not VARIABLE.match(pair):
            raise ConfigError(
                f"--nccl {short(pair)}: type NAME=VALUE, such as SOCKET_IFNAME=ib0 for NCCL_SOCKET_IFNAME."
            )
    return asked


def seconds_of(time: str) -> int | None:
    """Return a limit as sbatch reads it, such as MINUTES, MINUTES:SECONDS or DAYS-HOURS; None where there is none."""
    if not time[0].isdigit() or time == "0":
        return None
    days, dash, rest = time.rpartition("-")
    units = (3600, 60, 1) if dash or rest.count(":") == 2 else (60, 1)
    parts = map(int, rest.split(":"))
    return 86400 * int(days or 0) + sum(unit * part for unit, part in zip(units, parts, strict=False))


def script(
    name: str, size: tuple[int, int], command: str, asked: Resources, comments: Sequence[str], grace: int
) -> str:
    """Return a script for sbatch.

    size      nodes, and GPUs of each
    command   of a rank, quoted for the shell
    grace     seconds before the limit, for a step and its checkpoint
    """
    # Neighbours are on one host, whatever the cluster's own distribution of tasks is.
    srun = 'srun --distribution=block --kill-on-bad-exit=1 --open-mode=append --output="$logs/rank-%t.log" '
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(name, size, asked, grace)),
        "",
        *(f"# {line}" for line in comments),
        f"# {grace} seconds before the limit all ranks get SIGTERM, save and stop; submitted again, the run continues.",
        *_cores(size[1], asked),
        'logs="$SLURM_JOB_NAME-$SLURM_JOB_ID"  # a log for each rank; rank 0 has the lines of the run',
        'mkdir -p "$logs"',
        *_nccl(asked),
        *_preflight(asked),
        'echo "ranks write to $logs/rank-N.log"',
        f"{srun}{_inside(asked)}{command}",
    ]
    return "\n".join(lines) + "\n"


def _options(name: str, size: tuple[int, int], asked: Resources, grace: int) -> Iterator[str]:
    """Yield sbatch's options."""
    nodes, gpus = size
    yield from (f"--job-name={name}", f"--nodes={nodes}", f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}")
    if not asked.shared:
        yield "--exclusive"
    if asked.cpus_per_task or asked.shared:
        yield f"--cpus-per-task={asked.cpus_per_task or CORES}"
    yield f"--mem-per-gpu={MEMORY}" if asked.shared and asked.mem is None else f"--mem={asked.mem or 0}"
    yield f"--time={asked.time}"
    yield from [f"--partition={asked.partition}"] if asked.partition else []
    yield from [f"--account={asked.account}"] if asked.account else []
    yield from ("--output=%x-%j.log", "--open-mode=append", "--requeue", f"--signal=TERM@{grace}")


def _cores(gpus: int, asked: Resources) -> list[str]:
    if asked.cpus_per_task or asked.shared:
        return ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"]
    return [f"export SRUN_CPUS_PER_TASK=$((SLURM_CPUS_ON_NODE / {gpus}))  # an equal share of the node's cores"]


def _nccl(asked: Resources) -> Iterator[str]:
    for pair in asked.nccl:
        found = VARIABLE.match(pair)
        assert found is not None
        yield f"export NCCL_{found[2]}={shlex.quote(found[3])}"
    if asked.nccl_debug:
        yield 'export NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$PWD/$logs/nccl-%h-%p.log"'


def _preflight(asked: Resources) -> list[str]:
    if not asked.preflight:
        return []
    examine = f"srun --distribution=block {_inside(asked)}zero3d doctor --preflight"
    return [f'{examine} || {{ echo "the preflight stops this job: see above"; exit 1; }}']


def _inside(asked: Resources) -> str:
    """Return what runs a command in the container, with a space behind it."""
    if asked.container is None:
        return ""
    image = shlex.quote(asked.container)
    if asked.container.endswith(".sif"):
        binds = "".join(f" --bind {shlex.quote(pair)}" for pair in asked.mount)
        return f'apptainer exec --nv --bind "$PWD" --pwd "$PWD"{binds} {image} '
    mounts = "".join(f",{shlex.quote(pair)}" for pair in asked.mount)
    return f'--container-image={image} --container-mounts="$PWD:$PWD"{mounts} --container-workdir="$PWD" '
