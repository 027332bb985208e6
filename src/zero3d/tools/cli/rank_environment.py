"""Whether this process is one of a launcher's workers, and what RANK, WORLD_SIZE and the rest are then.

RANK is set                                   torchrun, Kubernetes, Ray, our own launcher: join
srun with several tasks                       join: RANK and the rest are made from SLURM_*
srun with one task, a batch script, salloc    a bare machine: start workers

Under health.min_ranks some of the ranks that were started may be spare: the others' WORLD_SIZE is then smaller
(`narrowed`), and the spare ones wait (spare_ranks.py).

srun numbers its steps from 0. A batch script and salloc's shell have SLURM_PROCID and SLURM_NTASKS,
too, but no step number or one of Slurm's special ones, and nobody to wait for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from zero3d.errors import ConfigError, short
from zero3d.memory.segments import ask_for_growing_segments

FIRST_PORT, PORTS = 15000, 15000  # below Linux's ephemeral ports (32768) and Kubernetes' (30000)
MOST_PORT, MOST_DIGITS = 65535, 18
SPECIAL_STEP = 0xFFFFFFF0  # batch, interactive, external and pending steps lie above
NEEDED = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # with RANK
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
ALONE = "start with torchrun or srun, or unset RANK to train on this machine alone."


def join_environment() -> bool:
    """Say whether this process is a launcher's worker; its variables are then complete in os.environ.

    GPUs' memory is asked for in segments that grow (memory/segments.py), as our own launcher does.
    Raises ConfigError when RANK comes without the others, or with what are no numbers.
    """
    if "RANK" not in os.environ:
        slurm = from_slurm(os.environ)
        os.environ.update(slurm)
        if slurm:
            _check_numbers(os.environ)
            ask_for_growing_segments(os.environ)
        return bool(slurm)
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(f"RANK={short(os.environ['RANK'])} is set, but not {', '.join(missing)}: {ALONE}")
    _check_numbers(os.environ)
    ask_for_growing_segments(os.environ)
    return True


def _check_numbers(environment: Mapping[str, str]) -> None:
    """Refuse what no launcher sets. Raises ConfigError."""
    odd = [f"{name}={short(environment[name])}" for name in NUMBERS if _number(environment, name, "0") is None]
    if odd:
        raise ConfigError(f"{', '.join(odd)}: must be a whole number: {ALONE}")
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if rank >= world:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={world}: ranks count from 0 to {world} - 1: {ALONE}")
    if int(environment["MASTER_PORT"]) > MOST_PORT:
        raise ConfigError(
            f"MASTER_PORT={environment['MASTER_PORT']}: ports end at {MOST_PORT}: set the same free one on all ranks."
        )


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker for a task of srun; nothing for all others.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and, where nodes are alike, LOCAL_WORLD_SIZE.
    """
    step, tasks = (_number(environment, f"SLURM_STEP_{name}") for name in ("ID", "NUM_TASKS"))
    rank, local = (_number(environment, f"SLURM_{name}") for name in ("PROCID", "LOCALID"))
    if step is None or step >= SPECIAL_STEP or tasks is None or tasks < 2 or rank is None or local is None:
        return {}
    job = _number(environment, "SLURM_JOB_ID") or 0
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    per_node = re.match(
        r"(\d+)(\(x\d+\))?$", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    )  # 8(x16): all nodes alike
    return {
        **({"LOCAL_WORLD_SIZE": per_node[1]} if per_node else {}),
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or hosts(nodes)[0],
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + (job + step) % PORTS),
    }


def narrowed(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return the variables of a rank in a world of the first `ranks` ranks alone, of which it is one.

    LOCAL_WORLD_SIZE, where it is known, counts those of its host, which are numbered one after the other.
    """
    first = int(environment["RANK"]) - int(environment.get("LOCAL_RANK", "0"))
    local = _number(environment, "LOCAL_WORLD_SIZE")
    return {
        "WORLD_SIZE": str(ranks),
        **({"LOCAL_WORLD_SIZE": str(min(local, ranks - first))} if local and first < ranks else {}),
    }


def hosts(nodes: str) -> list[str]:
    """Return the names in Slurm's short form: "a[01-02,7],b" -> a01, a02, a7, b. Raises ConfigError for none."""
    names = [name for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes) for name in _expand(entry)]
    if not names:
        raise ConfigError(f"Slurm's node list {nodes!r} names no nodes: set MASTER_ADDR to the first one.")
    return names


def _expand(entry: str) -> Iterator[str]:
    """Yield the names of one entry, which may have several brackets: rack[1-2]node[1-2]."""
    before, bracket, rest = entry.partition("[")
    if not bracket:
        yield entry
        return
    ranges, _, after = rest.partition("]")
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(f"{before}{number:0{len(first)}}{after}")


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int | None:
    value = environment.get(name, default)
    return int(value) if value.isdecimal() and len(value) <= MOST_DIGITS else None
