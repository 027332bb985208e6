"""Measure what this machine's devices, links and disk really do: a cluster file for the planner, within a minute.

    figure                  measured as
    ----------------------  -----------------------------------------------------------------------
    gpu.flops               not measured: the data sheet's peak; without one, the best product's rate
    gpu.matrix, gpu.half    bf16 products n x n x n, n = 256, 512, ...: seconds = 2 n^3 / matrix x (1 + half / n)
    gpu.flash               attention of 16 heads of 64, length 256, 512, ...; the best rate
    gpu.bandwidth           a copy of 64 MB and more: bytes read and written
    inside, across          all-reduces of 64 kB to 16 MB: seconds = hops x latency + bytes / bandwidth
    host_link               copies from pinned host memory; on a CPU the memory's own
    host_bandwidth          copies in the host's memory by all ranks of a node: bytes read and written
    communicator            bytes that the device has less of once a process group has carried a message; on devices
    disk                    a file written, synced and read again as a disk slab's is, by one rank of a node
    host_memory, memory     as the system says

All ranks measure at the same time, as they compute at the same time in training. Rank 0's figures are written. What a
step takes beside is fitted on steps of small models (tools/advice/small_runs.py).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from zero3d.distributed.groups import new_group
from zero3d.distributed.mesh import Mesh
from zero3d.errors import ConfigError
from zero3d.offload.direct_file import DirectFile
from zero3d.tools.plan.hardware import cluster, named
from zero3d.tools.plan.spec import ClusterSpec, Gpu, Link

LONG = 0.25  # seconds of one call, at which a sweep ends
REPEATS = 5
SIDE, LAUNCHED = 256, 2048  # first side of products; on accelerators smaller ones take as long as their launch
LENGTH = 256  # first length of attention
HEADS, HEAD = 16, 64
MESSAGES = tuple(1 << power for power in range(16, 25))  # bytes: 64 kB to 16 MB
MEASURED = "measured"
ALWAYS = (  # measured wherever ranks are
    *(f"gpu.{name}" for name in ("matrix", "half", "flash", "bandwidth", "memory")),
    *("host_memory", "host_link", "disk", "host_bandwidth"),
)


Sweep = Callable[[torch.device, "Sizes"], Sequence[float]]


class Sizes(NamedTuple):
    """The largest of what is measured: side of a matrix, length of a sequence; bytes copied, on disk, of messages."""

    side: int = 16384
    copied: int = 64 << 20
    disk: int = 128 << 20
    messages: Sequence[int] = MESSAGES


class Rates(NamedTuple):
    """Rates of one rank: operations per second of products and attention, bytes per second of copies.

    half  smallest side of a product at which it reaches half of that
    """

    matrix: float
    half: float
    flash: float
    bandwidth: float
    host_link: float
    host_memory: float


def calibrate(mesh: Mesh, folder: Path, sizes: Sizes = Sizes()) -> ClusterSpec:  # noqa: B008 (cannot be changed)
    """Measure on every rank of `mesh` together, the same answer on all; `folder` is on the disk that is meant."""
    device = mesh.device
    mesh.everyone  # noqa: B018 (its groups are made by all ranks together)
    sweeps: Sequence[Sweep] = (_products, _attention, _copies, _host_copies, _host_memory)
    rates = Rates(*(rate for sweep in sweeps for rate in _with_all(mesh, partial(sweep, device, sizes))))
    local = mesh.local_world or mesh.world
    communicator = _communicator(mesh, max(sizes.messages))
    inside, across = _links(mesh, local, sizes.messages)
    (disk,) = _with_all(mesh, lambda: (_disk(folder, sizes.disk) if mesh.local_rank == 0 else 0.0,))
    spec = _spec(mesh, rates, local, inside, across, disk)
    if communicator is None:
        return spec
    return replace(spec, communicator=communicator, provenance={**spec.provenance, "communicator": MEASURED})


def _per_partner(inside: Link, sheet: Link, local: int) -> Link:
    """Return a link that so many ranks of a node measured: of links to partners, they used those among themselves."""
    used = sheet.to(local - 1) / sheet.bandwidth
    return replace(inside, bandwidth=inside.bandwidth / used, partners=sheet.partners)


def _spec(mesh: Mesh, rates: Rates, local: int, inside: Link | None, across: Link | None, disk: float) -> ClusterSpec:
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    name = named(device)
    base = cluster(name or "a100-80", mesh.world, mesh.world // local)
    sources = base.provenance if name else dict.fromkeys(base.provenance, "assumed as of an a100-80")
    peak = base.gpu.flops if name not in (None, "cpu") else rates.matrix
    host = float(psutil.virtual_memory().total)
    memory = host / local if mesh.device.type == "cpu" else float(torch.cuda.mem_get_info(mesh.device)[1])
    provenance = {**sources, **dict.fromkeys(ALWAYS, MEASURED)}
    provenance |= {key: MEASURED for key, link in (("inside", inside), ("across", across)) if link is not None}
    matrix, flash = (min(1.0, rate / peak) for rate in (rates.matrix, rates.flash))
    power = base.gpu.power if name else None
    gpu = Gpu(name or device, memory, peak, rates.bandwidth, matrix, flash, rates.half, power)
    return ClusterSpec(
        gpu,
        mesh.world // local,
        local,
        _per_partner(inside, base.inside, local) if inside else base.inside,
        across or base.across,
        host,
        rates.host_link,
        disk or base.disk,
        local * rates.host_memory,
        provenance=provenance,
    )


# --- one rank -----------------------------------------------------------------------------------


def _with_all(mesh: Mesh, sweep: Callable[[], Sequence[float]]) -> list[float]:
    """Run a measurement on all ranks at once, and return rank 0's figures on all."""
    if mesh.world > 1:
        mesh.everyone.barrier()
    figures = torch.tensor(sweep(), dtype=torch.float64, device=mesh.device)
    if mesh.world > 1:
        mesh.everyone.broadcast(figures, "-")
    return [float(figure) for figure in figures]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of some calls after one to warm up."""
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        times.append(time.perf_counter() - begun)
        if times[-1] > 4 * LONG:
            return times[-1]
    return median(times[1:])


def _sweep(
    work: Callable[[int], tuple[Callable[[], object], float]], device: torch.device, sizes: tuple[int, int]
) -> dict[int, float]:
    """Return the rate at sizes that double, from the first up to the last, or to the first call that takes long."""
    rates, (size, largest) = {}, sizes
    while size <= largest:
        call, amount = work(size)
        seconds = _seconds(call, device)
        rates[size] = amount / seconds
        if seconds > LONG:
            break
        size *= 2
    return rates


def _products(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    def work(n: int) -> tuple[Callable[[], object], float]:
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        return lambda: a @ b, 2.0 * n**3

    first = SIDE if device.type == "cpu" else LAUNCHED
    return fit_products(_sweep(work, device, (min(first, sizes.side), sizes.side)))


def fit_products(rates: Mapping[int, float]) -> tuple[float, float]:
    """Fit products of these sides: 1 / rate = (1 + half / side) / matrix. Return matrix, half.

    Least squares of relative errors, so that small products count as much as large ones.
    """
    rows = np.array([[rate, rate / side] for side, rate in rates.items()])
    inverse, slope = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    if inverse <= 0 or slope < 0:  # no rate falls with the side
        return max(rates.values()), 0.0
    return float(1 / inverse), float(slope / inverse)


def _attention(device: torch.device, sizes: Sizes) -> tuple[float]:
    def work(length: int) -> tuple[Callable[[], object], float]:
        q, k, v = (torch.randn(1, HEADS, length, HEAD, device=device, dtype=torch.bfloat16) for _ in range(3))
        return lambda: F.scaled_dot_product_attention(q, k, v), 4.0 * HEADS * HEAD * length**2

    return (max(_sweep(work, device, (min(LENGTH, sizes.side), sizes.side)).values()),)


def _copies(device: torch.device, sizes: Sizes) -> tuple[float]:
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return (2 * sizes.copied / _seconds(lambda: target.copy_(source), device),)


def _host_copies(device: torch.device, sizes: Sizes) -> tuple[float]:
    source = torch.zeros(sizes.copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    return (sizes.copied / _seconds(lambda: target.copy_(source, non_blocking=True), device),)


def _host_memory(_: torch.device, sizes: Sizes) -> tuple[float]:
    """Return bytes read and written per second by copies in the host's memory."""
    return _copies(torch.device("cpu"), sizes)


def _disk(folder: Path, nbytes: int) -> float:
    """Return bytes per second of a file that is written and read again, past the page cache where that can be.

    Raises ConfigError where it cannot be written.
    """
    memory = memoryview(mmap.mmap(-1, nbytes))  # begins at a whole block, as direct I/O asks
    memory[:] = os.urandom(1 << 20) * (nbytes >> 20)  # what no disk can make smaller
    try:
        with TemporaryDirectory(dir=folder, prefix=".zero3d-calibrate-") as temporary:
            file = DirectFile(Path(temporary) / "records", nbytes)
            begun = time.perf_counter()
            file.write(memory, 0)
            file.sync()
            file.read(memory, 0)
            seconds = time.perf_counter() - begun
            file.close()
            return 2 * nbytes / seconds
    except OSError as error:
        raise ConfigError(f"calibrate writes a file of {nbytes >> 20} MB in {folder}: {error.strerror}") from error


def _communicator(mesh: Mesh, nbytes: int) -> float | None:
    """Return bytes of a communicator of all ranks, on the rank that has given most; None where no device has any."""
    if mesh.on_cpu or mesh.world == 1:
        return None
    device, memory = mesh.device, torch.get_device_module(mesh.device)
    message = torch.zeros(nbytes // 4, device=device)

    def taken() -> float:
        """Return bytes of the device that no tensor has."""
        memory.synchronize(device)
        free, total = memory.mem_get_info(device)
        return float(total - free - memory.memory_reserved(device))

    before = taken()
    dist.all_reduce(message, group=new_group("measured", range(mesh.world), device, everyone=True))
    most = torch.tensor(taken() - before, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return max(0.0, float(most))


# --- links --------------------------------------------------------------------------------------


def _links(mesh: Mesh, local: int, messages: Sequence[int]) -> tuple[Link | None, Link | None]:
    """Measure links inside a node and between nodes; None where there is no such pair of ranks."""
    nodes = mesh.world // local
    here = [mesh.rank // local * local + i for i in range(local)]
    peers = [mesh.rank % local + i * local for i in range(nodes)]
    return tuple(_link(mesh, ranks, messages) for ranks in (here, peers))  # type: ignore[return-value]


def _link(mesh: Mesh, ranks: Sequence[int], messages: Sequence[int]) -> Link | None:
    """Measure the link between these ranks; every rank of the mesh is in one such group."""
    if len(ranks) == 1:
        return None
    group = new_group("link", ranks, mesh.device, everyone=False)
    n, seconds = len(ranks), []
    for size in messages:
        message = torch.zeros(size // 4, device=mesh.device)

        def reduce(message: Tensor = message) -> None:
            dist.all_reduce(message, group=group)

        seconds.append(_seconds(reduce, mesh.device))
    link = fit(n, messages, seconds)
    agreed = torch.tensor([link.bandwidth, link.latency], dtype=torch.float64, device=mesh.device)
    mesh.everyone.broadcast(agreed, "-")
    return Link(float(agreed[0]), float(agreed[1]), 0.0)


def fit(n: int, sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit a ring all-reduce over n ranks: seconds = 2 (n-1) latency + 2 (n-1)/n bytes / bandwidth.

    Least squares of relative errors, so that small messages count as much as large ones.
    """
    hops = 2 * (n - 1)
    rows = np.array([[hops / s, hops / n * size / s] for size, s in zip(sizes, seconds, strict=True)])
    latency, inverse = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    if latency <= 0:  # all of it is bandwidth
        latency, inverse = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if inverse <= 0:
        inverse = seconds[-1] / (hops / n * sizes[-1])
    return Link(float(1 / inverse), float(latency), 0.0)
