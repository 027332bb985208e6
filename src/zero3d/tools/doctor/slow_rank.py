"""A rank of a run that is slower than its peers, by the records that the run has written: of one that goes on, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero3d.reading import Unreadable, open_regular, parse_object, read_text
from zero3d.tools.doctor.dead_run import words
from zero3d.tools.doctor.finding import WARNING, Finding
from zero3d.train.folder import Folder, parse_record
from zero3d.train.stragglers import SAVE, of_history
from zero3d.zero.step_parts import BY_HOST, COMPUTE, DATA

MOST_BYTES = 64 << 20  # of report.json
REMEDIES = {
    COMPUTE: "on {host}: zero3d doctor --only gpus,limits; nvidia-smi -q -d PERFORMANCE (heat, power), top (other "
    "processes on its cores); leave the host out where it stays slow",
    DATA: "on {host}: zero3d doctor --only disk for the folder of its data; raise data.workers, or prepare the data "
    "once (data.cache)",
    SAVE: "on {host}: zero3d doctor --only disk,space for the output folder; checkpoint.asynchronous=true saves behind "
    "training",
    BY_HOST: "on {host}: look at what runs between its steps (callbacks, trackers), and at the disk and memory of its "
    "offloaded states: zero3d doctor --only disk,limits",
}


def judge_slow_rank(output: Path) -> Finding | None:
    """Give the verdict on the last slow rank that a run's records tell of; None where they tell of none."""
    told = list(of_history(list(_records(output))))
    if not told:
        return None
    (first, _), (last, slow) = told[0], told[-1]
    hosts = _hosts(output)
    when = f"in {len(told)} records, from step {first:,} to step {last:,} of {Folder(output).last_step:,}"
    host = hosts[slow.rank] if slow.rank < len(hosts) else f"the host of rank {slow.rank}"
    figures = slow.fields() | {"first_step": first, "last_step": last}
    return Finding(WARNING, f"{slow.line(hosts)}; {when}", REMEDIES[slow.part].format(host=host), figures)


def _records(output: Path) -> Iterator[Mapping[str, Any]]:
    with suppress(OSError, Unreadable), open_regular(Folder(output).metrics) as file:
        for line in file:
            if b'"slowest_rank"' in line and (record := parse_record(line.decode(errors="replace"))) is not None:
                yield record


def _hosts(output: Path) -> list[str]:
    """Return the name of each rank's host; none where report.json does not have them."""
    with suppress(OSError, Unreadable):
        hosts = parse_object(read_text(Folder(output).report, MOST_BYTES)).get("hosts")
        return [words(host) for host in hosts] if isinstance(hosts, list) else []
    return []
