"""Hosts of one job examined together: torchrun or srun starts `zero3d doctor` on all of them, rank 0 prints.

every rank     says in the launcher's store who it is; those that never come are named
first ranks    one a host: examine their own host, answer and ask each other over sockets (time there and back, whose
               clock is off), then reduce with each other, and pass bytes to their neighbours (links.py)
rank 0         gathers what they found: a row where all hosts agree, one for each that does not

Sockets are on the interface that is asked for, else where this host's name leads, else towards MASTER_ADDR.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from zero3d.errors import Zero3dError
from zero3d.tools.doctor.allreduce import against, timed_sum
from zero3d.tools.doctor.examine import examine
from zero3d.tools.doctor.finding import (
    BROKEN,
    OK,
    SKIPPED,
    UNANSWERED,
    VERDICTS,
    WARNING,
    Finding,
    Request,
    environment,
    rate,
)
from zero3d.tools.doctor.links import Link, backend, judge_links, links
from zero3d.tools.doctor.network import address_of_name, source_of
from zero3d.tools.doctor.table import Probe
from zero3d.tools.doctor.versions import installed

COME = 45.0  # seconds in which all ranks must have come
ANSWER = 5.0  # of one connection
REDUCE = 30.0
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # 0: a link that hangs is a finding, and torch does not end the doctor
BYTES, REPEATS = 4 << 20, 3  # 10 s in all on a link of 10 Mbit/s
EXAMINED = 150.0  # in which a host must have told what it found
SKEW, SLOW_TRIP = 1.0, 20.0  # seconds; milliseconds
TIME = struct.Struct("!d")
HCAS = "hcas"
PACKAGES = ("zero3d", "torch", "transformers", "numpy")
Said = dict[int, dict[str, Any]]  # rank -> what it says of itself


@dataclass(frozen=True)
class Across:
    """Has what the first ranks of all hosts measured together.

    links  paces; a text where passing bytes failed; None where nothing was reduced
    """

    reduced: Finding
    links: Sequence[Link] | str | None


@dataclass(frozen=True)
class Trip:
    """From one host to another: milliseconds there and back, seconds that the other clock is ahead; or the fault."""

    milliseconds: float = 0.0
    ahead: float = 0.0
    fault: str = ""


def together(probes: Sequence[Probe], request: Request) -> dict[str, Finding] | None:
    """Examine all hosts; return all findings on rank 0, None elsewhere. Raises Zero3dError without a store."""
    from zero3d.distributed.rendezvous import shared_store

    where = f"{environment('MASTER_ADDR')}:{environment('MASTER_PORT')}"
    try:
        store, rank, world = shared_store(os.environ, timedelta(seconds=COME))
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise Zero3dError(
            f"rank {environment('RANK')} on {socket.gethostname()} does not reach the store at {where} ({reason}): is "
            f"rank 0's host up? From here: nc -vz {where.replace(':', ' ')}"
        ) from error
    first = environment("LOCAL_RANK") in ("", "0")
    address = own_address(request)
    listening = answer_time(address) if first else None
    me = {
        "host": socket.gethostname(),
        "first": first,
        "address": address,
        "port": listening.getsockname()[1] if listening is not None else 0,
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
    }
    store.set(f"doctor/rank/{rank}", json.dumps(me))
    if not first:
        return None
    ranks = come(store, world)
    leaders = {each: said for each, said in ranks.items() if said["first"]}
    with ThreadPoolExecutor(1) as pool:
        examined = pool.submit(examine, list(probes), replace(request, port=0))
        trips = ask_all(leaders, rank)
        across = measure_across(store, sorted(leaders), rank, request) if len(ranks) == world else None
        found = {name: each.finding.as_dict() for name, each in examined.result().items()}
    told = {
        "host": me["host"],
        "findings": found,
        "trips": {str(peer): vars(trip) for peer, trip in trips.items()},
        "reduced": across.reduced.as_dict() if across is not None else None,
        "links": across.links if across is not None else None,
    }
    store.set(f"doctor/found/{rank}", json.dumps(told))
    if rank != 0:
        return None
    return merge(gather(store, sorted(leaders)), ranks, world)


def own_address(request: Request) -> str:
    """Return the address at which other hosts shall reach this one."""
    name = request.interface or environment("GLOO_SOCKET_IFNAME") or environment("NCCL_SOCKET_IFNAME")
    if source_of(name):
        return source_of(name)
    given = address_of_name(socket.gethostname())
    if given and not given.startswith("127."):
        return given
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((environment("MASTER_ADDR"), 9))  # sends nothing
        return str(towards.getsockname()[0])
    return given or "127.0.0.1"


def answer_time(address: str) -> socket.socket:
    """Listen at this address, and tell the time to whoever connects and asks."""
    listening = socket.create_server((address, 0))

    def serve() -> None:
        while True:
            with suppress(OSError):
                peer, _ = listening.accept()
                with peer:
                    peer.settimeout(ANSWER)
                    while peer.recv(1):
                        peer.sendall(TIME.pack(time.time()))

    threading.Thread(target=serve, daemon=True).start()
    return listening


def come(store: Any, world: int) -> Said:
    """Return what all ranks say of themselves, without those that do not come."""
    keys = [f"doctor/rank/{rank}" for rank in range(world)]
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=COME))
    return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}


def ask_all(leaders: Said, rank: int) -> dict[int, Trip]:
    """Make a trip to every other host."""
    others = [peer for peer in leaders if peer != rank]
    with ThreadPoolExecutor(16) as pool:
        trips = pool.map(lambda peer: trip(leaders[peer]["address"], leaders[peer]["port"]), others)
        return dict(zip(others, trips, strict=True))


def trip(address: str, port: int) -> Trip:
    """Ask another host for its time some times; the quickest answer counts."""
    try:
        with socket.create_connection((address, port), ANSWER) as peer:
            answers = []
            for _ in range(5):
                begun = time.time()
                peer.sendall(b"?")
                theirs = TIME.unpack(_receive(peer, TIME.size))[0]
                ended = time.time()
                answers.append((ended - begun, theirs - (begun + ended) / 2))
    except TimeoutError:
        return Trip(fault=f"{address}:{port} does not answer in {ANSWER:.0f} s")
    except OSError as error:
        return Trip(fault=f"{address}:{port}: {error.strerror or error}")
    seconds, ahead = min(answers)
    return Trip(1e3 * seconds, ahead)


def _receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionError("it hangs up")
        data += more
    return data


def measure_across(store: Any, ranks: list[int], rank: int, request: Request) -> Across | None:
    """Reduce among the first ranks of all hosts over gloo, then time what neighbours pass; None for one host."""
    if len(ranks) == 1:
        return None
    if request.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = request.interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", request.interface)
    os.environ.setdefault(HANDLING, "0")
    reduced: list[tuple[float, bool] | str] = []
    timed: list[Sequence[Link] | str] = []

    def work() -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        into: list[Any] = reduced
        try:
            dist.init_process_group(
                backend(),
                store=PrefixStore("doctor/across", store),
                rank=ranks.index(rank),
                world_size=len(ranks),
                timeout=timedelta(seconds=REDUCE),
            )
            reduced.append(timed_sum(dist.all_reduce, torch.empty(BYTES // 4), rank, ranks, REPEATS))
            into = timed
            timed.append(links(ranks.index(rank), len(ranks)))
        except Exception as error:  # noqa: BLE001 (a finding)
            into.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(2 * REDUCE)
    silent = f"no answer in {REDUCE:.0f} s"
    result = reduced[0] if reduced else silent
    passed = (timed[0] if timed else silent) if isinstance(result, tuple) else None
    return Across(judge_across(result, len(ranks), request), passed)


def judge_across(result: tuple[float, bool] | str, hosts: int, request: Request) -> Finding:
    """Give the verdict on an all-reduce between hosts: its seconds and whether the sum is right, or its fault."""
    interface = request.interface or environment("GLOO_SOCKET_IFNAME")
    remedy = "GLOO_SOCKET_IFNAME=NAME (NCCL_SOCKET_IFNAME=NAME) on all hosts; open all ports between them"
    if isinstance(result, str):
        return Finding(BROKEN, f"an all-reduce between {hosts} hosts: {result}", remedy)
    seconds, right = result
    if not right:
        return Finding(
            BROKEN, f"an all-reduce between {hosts} hosts ends with a wrong sum", "replace that network card or cable"
        )
    pace = 2 * (hosts - 1) / hosts * BYTES / seconds
    verdict, told = against(pace, request, "across", cpu=True)
    between = f"between {hosts} hosts{f' on {interface}' if interface else ''}"
    text = f"{BYTES >> 20} MiB {between}: {rate(pace)} over gloo{told}"
    return Finding(verdict, text, remedy if verdict != OK else "", {"bandwidth": pace, "seconds": seconds})


def gather(store: Any, leaders: list[int]) -> Said:
    """Return what each host found, without those that have not told it in time."""
    deadline = time.monotonic() + EXAMINED
    told: Said = {}
    for rank in leaders:
        key = f"doctor/found/{rank}"
        with suppress(RuntimeError):
            store.wait([key], timedelta(seconds=max(1.0, deadline - time.monotonic())))
            told[rank] = json.loads(store.get(key))
    return told


def merge(told: Said, ranks: Said, world: int) -> dict[str, Finding]:
    """Make rows of what all hosts found. told: of first ranks; ranks: what all that came say of themselves."""
    leaders = {rank: said for rank, said in ranks.items() if said["first"]}
    rows = {"ranks": judge_ranks(told, ranks, world), "alike": judge_alike(leaders)}
    if len(leaders) > 1:
        trips = {(rank, int(peer)): Trip(**trip) for rank, each in told.items() for peer, trip in each["trips"].items()}
        names = {rank: said["host"] for rank, said in ranks.items()}
        rows |= {"between": judge_trips(trips, names), "clocks between": judge_skew(trips, names)}
        reduced = [Finding(**each["reduced"]) for each in told.values() if each["reduced"] is not None]
        if reduced:
            rows["all-reduce between"] = max(reduced, key=lambda each: VERDICTS.index(each.verdict))
        if passed := [each["links"] for each in told.values() if each["links"] is not None]:
            rows["links between"] = judge_links(passed, [said["host"] for _, said in sorted(leaders.items())])
    findings = {rank: {name: Finding(**tree) for name, tree in each["findings"].items()} for rank, each in told.items()}
    if len(leaders) > 1:
        rows |= judge_adapters({leaders[rank]["host"]: each[HCAS] for rank, each in findings.items() if HCAS in each})
    for name in next(iter(findings.values()), {}):
        rows |= rows_of(name, {rank: each[name] for rank, each in findings.items()}, leaders)
    return rows


def rows_of(name: str, findings: Mapping[int, Finding], leaders: Said) -> dict[str, Finding]:
    """Return one row where all hosts are well, else one for each that is not."""
    unwell = {rank: each for rank, each in findings.items() if each.verdict not in (OK, SKIPPED)}
    if not unwell:
        first = next(iter(findings.values()))
        on_all = f"on all {len(findings)} hosts; {leaders[min(findings)]['host']}: " if len(findings) > 1 else ""
        return {name: replace(first, text=on_all + first.text)}
    return {f"{name} @ {leaders[rank]['host']} (rank {rank})": each for rank, each in unwell.items()}


def judge_ranks(told: Said, ranks: Said, world: int) -> Finding:
    """Say which ranks never came, and which hosts never told what they found."""
    missing = [rank for rank in range(world) if rank not in ranks]
    silent = [rank for rank, said in ranks.items() if said["first"] and rank not in told]
    figures = {"world": world, "missing": missing, "silent": silent}
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        text = f"{len(missing)} of {world} ranks never came in {COME:.0f} s: {listed}"
        return Finding(
            BROKEN, text, "look at the launcher's output on their hosts; the firewall to MASTER_PORT", figures
        )
    if silent:
        text = f"{ranks[silent[0]]['host']} (rank {silent[0]}) did not tell what it found in {EXAMINED:.0f} s"
        return Finding(BROKEN, text, "zero3d doctor on that host alone", figures | {UNANSWERED: EXAMINED})
    hosts = [said["host"] for said in ranks.values() if said["first"]]
    return Finding(
        OK,
        f"{world} ranks on {len(hosts)} hosts: {', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''}",
        figures=figures,
    )


def judge_alike(leaders: Said) -> Finding:
    """Compare the hosts' versions."""
    unlike = []
    for name in ("python", *PACKAGES):
        by_version: dict[str, list[str]] = {}
        for said in leaders.values():
            by_version.setdefault(said[name] or "none", []).append(said["host"])
        if len(by_version) > 1:
            unlike.append(f"{name}: " + ", ".join(f"{version} on {hosts[0]}" for version, hosts in by_version.items()))
    if unlike:
        return Finding(BROKEN, "; ".join(unlike), "install the same versions on all hosts")
    return Finding(OK, f"{len(leaders)} hosts have the same versions of Python, {', '.join(PACKAGES)}")


def judge_adapters(found: Mapping[str, Finding]) -> dict[str, Finding]:
    """Return a row where hosts have unlike numbers or rates of adapters, by host name."""
    by_ports: dict[tuple[str, ...], list[str]] = {}
    for host, finding in found.items():
        rates = sorted(port.partition(" ")[2] for port in finding.figures.get("ports", []))
        by_ports.setdefault(tuple(rates), []).append(host)
    if len(by_ports) < 2:
        return {}
    listed = "; ".join(f"{len(rates)} on {', '.join(hosts[:3])}" for rates, hosts in by_ports.items())
    return {"hcas alike": Finding(WARNING, f"adapters that are up differ: {listed}", "the slowest host sets the pace")}


def judge_trips(trips: Mapping[tuple[int, int], Trip], hosts: Mapping[int, str]) -> Finding:
    """Say which host does not reach which."""
    cut = {pair: trip for pair, trip in trips.items() if trip.fault}
    if cut:
        (rank, peer), first = min(cut.items())
        way = f"{hosts[rank]} (rank {rank}) to {hosts[peer]} (rank {peer})"
        text = f"{len(cut)} of {len(trips)} ways are cut: {way}: {first.fault}"
        remedy = (
            "open all ports between the hosts; --interface NAME (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) they share"
        )
        return Finding(BROKEN, text, remedy, {"cut": [list(pair) for pair in cut]})
    slowest = max(trips.values(), key=lambda trip: trip.milliseconds)
    text = f"all {len(trips)} ways are open, at most {slowest.milliseconds:.2f} ms there and back"
    if slowest.milliseconds > SLOW_TRIP:
        return Finding(WARNING, text, "a fast network takes 0.1 ms: name its interface with --interface")
    return Finding(OK, text, figures={"milliseconds": slowest.milliseconds})


def judge_skew(trips: Mapping[tuple[int, int], Trip], hosts: Mapping[int, str]) -> Finding:
    """Say whose clock is off, as rank 0's host sees it."""
    seen = {peer: trip.ahead for (rank, peer), trip in trips.items() if rank == 0 and not trip.fault}
    if not seen:
        return Finding(SKIPPED, "rank 0 reaches no other host")
    peer = max(seen, key=lambda each: abs(seen[each]))
    text = f"clocks are at most {abs(seen[peer]):.3f} s apart ({hosts[peer]}, rank {peer})"
    if abs(seen[peer]) > SKEW:
        return Finding(
            WARNING, text, f"on {hosts[peer]}: timedatectl set-ntp true, or start chronyd", {"seconds": seen}
        )
    return Finding(OK, text, figures={"seconds": seen})
