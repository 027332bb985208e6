"""InfiniBand and RoCE adapters (HCAs), as the kernel shows them: ports that are up, and what NCCL is told to use.

/sys/class/infiniband/NAME/ports/N/state        4: ACTIVE
                                  rate          400 Gb/sec (4X NDR)
                                  link_layer    InfiniBand, or Ethernet (RoCE)
/sys/module/nvidia_peermem                      GPUs' memory is read and written by adapters (or by dma-buf)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zero3d.errors import short
from zero3d.tools.doctor.finding import BROKEN, OK, SKIPPED, WARNING, Finding, Request, environment

SYSTEM = Path("/sys")
WANTED, NET = "NCCL_IB_HCA", "NCCL_NET"
ACTIVE = "4: ACTIVE"


class Port(NamedTuple):
    """A port of an adapter, with its rate in Gb/s."""

    adapter: str
    number: int
    active: bool
    rate: float
    layer: str

    def __str__(self) -> str:
        return f"{self.adapter}:{self.number} {self.rate:g} Gb/s {self.layer}"


def adapters(request: Request) -> Finding:
    """List ports that are up; compare them with what NCCL is told to use."""
    peermem = (SYSTEM / "module" / "nvidia_peermem").exists() or not any(Path("/dev").glob("nvidia[0-9]*"))
    return judge(ports(SYSTEM), {name: environment(name) for name in (WANTED, NET)}, peermem)


def ports(system: Path) -> list[Port]:
    """Return the ports that a system has, by name and number. What cannot be read is none."""
    found = []
    with suppress(OSError):
        for folder in sorted((system / "class" / "infiniband").glob("*/ports/*")):
            with suppress(OSError, ValueError):
                state, rate, layer = ((folder / name).read_text().strip() for name in ("state", "rate", "link_layer"))
                gigabits = float(re.match(r"[\d.]*", rate)[0] or 0)  # type: ignore[index]
                found.append(Port(folder.parents[1].name, int(folder.name), state == ACTIVE, gigabits, layer))
    return found


def judge(found: list[Port], told: Mapping[str, str], peermem: bool) -> Finding:
    """Give the verdict. told: NCCL's variables; peermem: adapters reach the memory of GPUs, or there are none."""
    used = [port for port in found if port.active and _is_meant(port, told.get(WANTED, ""))]
    figures = {"ports": [str(port) for port in used]}
    if not used and told.get(NET) == "IB":
        remedy = f"unset {NET}, and NCCL takes sockets; or ask for nodes with adapters"
        return Finding(BROKEN, f"{NET}=IB, and no adapter is up here", remedy, figures)
    if not found:
        return Finding(SKIPPED, "no InfiniBand or RoCE adapter here: NCCL takes sockets")
    if not used and told.get(WANTED):
        text = f"{WANTED}={short(told[WANTED])} names no port that is up: NCCL would take sockets"
        return Finding(WARNING, text, f"unset {WANTED}; there are {', '.join(map(str, found))}", figures)
    if not used:
        return Finding(
            WARNING, f"none of {len(found)} ports is up: NCCL takes sockets", "ibstat; check cables", figures
        )
    text = ", ".join(map(str, used[:8])) + (" ..." if len(used) > 8 else "")
    down = [port for port in found if not port.active]
    if not peermem:
        remedy = "modprobe nvidia-peermem (not needed where NCCL_DEBUG=INFO says DMABUF)"
        return Finding(WARNING, f"{text}; nvidia_peermem is not loaded: copies may go over the host", remedy, figures)
    return Finding(OK, text + (f"; {len(down)} down" if down else ""), figures=figures)


def _is_meant(port: Port, wanted: str) -> bool:
    """Return whether NCCL_IB_HCA takes a port: ^ leaves out, = asks for whole names, else beginnings count."""
    names = wanted.lstrip("^=").split(",") if wanted.lstrip("^=") else []
    if not names:
        return True
    whole = "=" in wanted[:2]
    own = (port.adapter, f"{port.adapter}:{port.number}")
    named = any(name in own if whole or ":" in name else port.adapter.startswith(name) for name in names)
    return named != wanted.startswith("^")
