"""NCCL's flight recorder, which torch keeps: the last collectives of a rank, written to a file when nothing moves.

on      where the groups are NCCL's, unless TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE) is 0
file    the variable TORCH_FR_DUMP_TEMP_FILE (TORCH_NCCL_DEBUG_INFO_TEMP_FILE), if set, and the rank behind it; else
        nccl_trace_rank_R in the run's folder, or the temporary one. `torchfrtrace -p nccl_trace_rank_ FOLDER` compares
        those of all ranks
asked   by a monitor, which is another process: by a file in its folder, to which a thread of each rank replies
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero3d.watchdog.own_files import create_own, read_own, write_whole

NAME = "nccl_trace_rank_"
FACT = "flight_recorder"  # by which a rank tells its monitor that it has one
ASKED = "record"
DEADLINE, A_MOMENT = 3.0, 0.05  # seconds in which records come; between two looks
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_MOST = 4096  # bytes of a path


def recorder() -> Callable[..., bytes] | None:
    """Return what gives this process' record; None where it has none, or it is off."""
    torch: Any = sys.modules.get("torch")
    if torch is None or _first(_SIZES) == "0":
        return None
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if "nccl" not in distributed.get_backend_config():
        return None
    found: Callable[..., bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return found


def record(rank: int, folder: Path | None) -> Path | None:
    """Write this process' record, for the run's folder if that is known; return its file, None where there is none."""
    give = recorder()
    if give is None:
        return None
    prefix = _first(_PREFIXES)
    place = Path(tempfile.gettempdir()) if folder is None else folder
    file = Path(f"{prefix}{rank}") if prefix else place / f"{NAME}{rank}"
    with suppress(OSError, RuntimeError):
        with os.fdopen(create_own(file), "wb") as opened:
            opened.write(give())
        return file
    return None


def ask(folder: Path, ranks: Iterable[int], output: Path | None) -> dict[int, str]:
    """Have ranks of a monitor's folder write their records, and return the files of those that reply in time."""
    waiting = set(ranks)
    found: dict[int, str] = {}
    if waiting:
        with suppress(OSError):
            write_whole(folder / ASKED, "" if output is None else str(output))
    end = time.monotonic() + DEADLINE
    while waiting and time.monotonic() < end:
        time.sleep(A_MOMENT)
        for rank in sorted(waiting):
            with suppress(OSError):
                found[rank] = read_own(_reply(folder, rank), _MOST).decode(errors="replace")
                waiting.discard(rank)
    return {rank: file for rank, file in sorted(found.items()) if file}


def reply(folder: Path, rank: int) -> None:
    """Write this process' record if its monitor asks for it, once."""
    if not (folder / ASKED).exists() or _reply(folder, rank).exists():
        return
    with suppress(OSError):
        told = read_own(folder / ASKED, _MOST).decode()
        file = record(rank, Path(told) if told else None)
        write_whole(_reply(folder, rank), "" if file is None else str(file))


def folder_of(facts: Mapping[str, object]) -> Path | None:
    """Return the run's folder, of what a rank has told."""
    output = facts.get("output")
    return Path(output) if isinstance(output, str) else None


def _reply(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.recorded"


def _first(names: Iterable[str]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")
