"""What nvidia-smi and lspci print, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

PAIR = dict[tuple[int, int], str]
# What `nvidia-smi topo -p2p r` says of a pair that does not reach each other's memory.
REFUSED = {
    "CNS": "the chipset does not support it",
    "GNS": "the card does not support it",
    "TNS": "they are too far apart",
    "NS": "it is not supported",
    "DR": "it is disabled by a setting of the driver",
    "U": "unknown",
}


@dataclass(frozen=True)
class Card:
    """A GPU as its driver has it: bytes of memory, utilisation in percent, uncorrected memory errors."""

    index: int
    name: str
    memory: float
    used: float
    utilisation: float
    errors: int


QUERY = "index,name,memory.total,memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total"


def cards(text: str) -> list[Card]:
    """Read `nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`; what a card does not tell is 0."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY.split(",")) and cells[0].isdecimal():
            figures = [float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else 0.0 for cell in cells[2:]]
            found.append(
                Card(int(cells[0]), cells[1], figures[0] * 2**20, figures[1] * 2**20, figures[2], int(figures[3]))
            )
    return found


def matrix(text: str) -> PAIR:
    """Read a matrix of `nvidia-smi topo`: the word for each ordered pair of different GPUs.

            GPU0    GPU1    CPU Affinity
    GPU0     X      NV18    0-47
    GPU1    NV18     X      0-47
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    columns: list[int] = []
    pairs: PAIR = {}
    for line in plain.splitlines():
        cells = line.split()
        numbers = [int(cell[3:]) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        if len(numbers) > 1 and not columns:  # a row names one
            columns = numbers
        elif columns and cells and re.fullmatch(r"GPU\d+", cells[0]) and len(cells) > len(columns):
            row = int(cells[0][3:])
            pairs |= {(row, column): cells[1 + i] for i, column in enumerate(columns) if column != row}
    return pairs


@dataclass(frozen=True)
class Bridges:
    """PCI bridges as lspci has them.

    sending   addresses of those whose ACS sends traffic between their devices through the root complex
    denied    whether lspci was not allowed to look
    count     bridges in all
    """

    sending: tuple[str, ...]
    denied: bool
    count: int


def bridges(text: str) -> Bridges:
    """Read `lspci -vvv`: a bridge is concerned where its ACSCtl has SrcValid+, ReqRedir+ or CmpltRedir+."""
    sending, count, denied = [], 0, False
    for block in re.split(r"\n(?=\S)", text):
        head, _, rest = block.partition("\n")
        if "bridge" not in head.lower():
            continue
        count += 1
        denied = denied or "<access denied>" in rest
        if re.search(r"ACSCtl:.*\b(SrcValid|ReqRedir|CmpltRedir)\+", rest):
            sending.append(head.split()[0])
    return Bridges(tuple(sending), denied, count)
