"""GPUs: what the driver has and torch sees, peer-to-peer, NCCL with and without it, ACS, pinned memory.

Every rule is a function of texts and outcomes; the probes read them from the machine. Without a GPU they are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from zero3d.tools.doctor.allreduce import BYTES, Outcome, against, command
from zero3d.tools.doctor.finding import BROKEN, OK, SKIPPED, WARNING, Finding, Request, amount, rate
from zero3d.tools.doctor.topology import QUERY, REFUSED, Bridges, Card, bridges, cards, matrix
from zero3d.tools.doctor.versions import ask

NONE = Finding(SKIPPED, "no GPU here")
ONE = Finding(SKIPPED, "one GPU here: it has no peer")
BUSY = 1 << 30  # bytes of a card's memory that others may hold before a run
PINNED = 256 << 20
SLOW_COPY = 3e9  # bytes per second: less than any PCIe link of four lanes
NCCL_SECONDS = 60.0
ALIKE = 0.8  # of the rate without peer-to-peer: with it should not be slower
LOOK = "sudo lspci -vvv | grep -i ACSCtl    (SrcValid+ is on)"
OFF = (
    "switch ACS (and, unless virtual machines need it, VT-d / AMD-Vi) off in the BIOS, or add intel_iommu=off / "
    "amd_iommu=off or iommu=pt to the kernel's command line, or for each bridge: "
    "sudo setpci -s BRIDGE ECAP_ACS+0x6.w=0000"
)


def present() -> int:
    """Count the GPUs that this system has files for, without any driver's help; AMD's count as 1 together."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/kfd").exists())


def known() -> list[Card]:
    """Return the cards that NVIDIA's driver tells of."""
    return cards(ask("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))


def gpus(request: Request) -> Finding:
    """Compare the GPUs that the driver has with those that torch sees."""
    there, told = present(), known()
    if not there and not told:
        return NONE
    import torch

    seen = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    built = torch.version.cuda or torch.version.hip or ""
    return judge_gpus(max(there, len(told)), told, seen, built, os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge_gpus(there: int, told: list[Card], seen: int, built: str, visible: str | None) -> Finding:
    """Give the verdict. seen: devices of torch; built: its CUDA, empty for a CPU build; visible: the variable."""
    figures: dict[str, Any] = {"devices": there, "torch": seen, "memory": [card.memory for card in told]}
    if seen == 0 and not built:
        remedy = "install a torch built for CUDA: pytorch.org/get-started"
        return Finding(BROKEN, f"{_count(there)}, and this torch is built for the CPU alone", remedy, figures)
    if seen == 0:
        remedy = (
            "unset CUDA_VISIBLE_DEVICES"
            if visible is not None
            else "nvidia-smi, dmesg | grep -i nvrm; reload the driver"
        )
        shown = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        return Finding(BROKEN, f"{_count(there)}, of which torch sees none{shown}", remedy, figures)
    sick = [card for card in told if card.errors]
    if sick:
        text = "; ".join(f"GPU {card.index} has {card.errors} uncorrected memory errors" for card in sick)
        return Finding(BROKEN, text, "nvidia-smi -q -d ECC; reset or replace that card, use another node", figures)
    busy = [card for card in told if card.used > BUSY]
    if busy:
        text = "; ".join(f"GPU {card.index}: {amount(card.used)} of {amount(card.memory)} in use" for card in busy)
        return Finding(WARNING, f"{text}, before a run", "nvidia-smi: end the processes that it shows", figures)
    names = sorted({card.name for card in told})
    kinds = f" ({', '.join(names)}, {amount(told[0].memory)})" if told else ""
    text = f"torch sees {seen} of {_count(there)}{kinds}"
    if len(names) > 1:
        return Finding(WARNING, text, "unlike cards wait for the slowest: choose with CUDA_VISIBLE_DEVICES", figures)
    return Finding(OK, text, figures=figures)


def _count(devices: int) -> str:
    return f"{devices} GPU{'s' if devices > 1 else ''}"


def pinned(request: Request) -> Finding:
    """Pin memory of the host and copy it to the first GPU and back."""
    if not present():
        return NONE
    import torch

    if not torch.cuda.is_available():
        return Finding(SKIPPED, "torch sees no GPU")
    try:
        source = torch.zeros(PINNED, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        remedy = "more memory for this container; ulimit -l unlimited (docker run --ulimit memlock=-1)"
        return Finding(BROKEN, f"{amount(PINNED)} cannot be pinned: {str(error).partition(chr(10))[0]}", remedy)
    target = torch.empty(PINNED, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    pace = PINNED / min(seconds)
    return judge_pinned(pace, request)


def judge_pinned(pace: float, request: Request) -> Finding:
    """Give the verdict on a copy's bytes per second."""
    figures = {"bandwidth": pace}
    verdict, told = against(pace, request, "host_link", cpu=False)
    text = f"{amount(PINNED)} pinned and copied at {rate(pace)}{told}"
    if verdict == OK and pace >= SLOW_COPY:
        return Finding(OK, text, figures=figures)
    remedy = "nvidia-smi -q | grep -A4 'GPU Link': fewer lanes than the slot has? Reseat the card, or another slot"
    return Finding(WARNING, text, remedy, figures)


def peer_to_peer(request: Request) -> Finding:
    """Ask the driver which GPUs reach each other's memory, and over what."""
    if not present():
        return NONE
    if present() == 1:
        return ONE
    if shutil.which("nvidia-smi") is None:
        return Finding(SKIPPED, "no nvidia-smi here")
    return judge_pairs(matrix(ask("nvidia-smi", "topo", "-p2p", "r")), matrix(ask("nvidia-smi", "topo", "-m")))


def judge_pairs(reached: dict[tuple[int, int], str], links: dict[tuple[int, int], str]) -> Finding:
    """Give the verdict. reached: OK or why not, for each pair of GPUs; links: NV18, PIX, SYS, ..."""
    if not reached:
        return Finding(SKIPPED, "nvidia-smi topo tells nothing here")
    over = ", ".join(sorted(set(links.values()))) or "unknown links"
    refused = {pair: word for pair, word in reached.items() if word != "OK"}
    figures = {"pairs": len(reached), "refused": len(refused), "links": sorted(set(links.values()))}
    if not refused:
        return Finding(OK, f"all {len(reached)} pairs reach each other, over {over}", figures=figures)
    (one, other), word = min(refused.items())
    why = REFUSED.get(word, word)
    text = (
        f"{len(refused)} of {len(reached)} pairs have no peer-to-peer, GPU {one} and {other} first: {why}; over {over}"
    )
    remedy = (
        "nothing is wrong: such cards go through the host's memory. If runs hang: NCCL_P2P_DISABLE=1"
        if set(refused.values()) == {"GNS"}
        else "put these cards under one switch or CPU, or go through the host's memory: NCCL_P2P_DISABLE=1"
    )
    return Finding(WARNING, text, remedy, figures)


def nccl(request: Request) -> Finding:
    """Reduce over all GPUs with peer-to-peer and without it, each in processes of its own."""
    if not present():
        return NONE
    count = len(known()) or present()
    if count == 1:
        return ONE
    ran = [outcome_of("nccl", count, NCCL_SECONDS, disable) for disable in (False, True)]
    return judge_nccl(ran[0], ran[1], count, request)


def outcome_of(backend: str, ranks: int, seconds: float, disable: bool) -> Outcome:
    """Run the all-reduce as a command, with NCCL_P2P_DISABLE=1 or without that variable."""
    variables = {key: value for key, value in os.environ.items() if key != "NCCL_P2P_DISABLE"}
    variables |= {"NCCL_P2P_DISABLE": "1"} if disable else {}
    try:
        done = subprocess.run(
            command(backend, ranks, seconds),
            env=variables,
            capture_output=True,
            timeout=seconds + 12,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Outcome(
            fault="hang", text=f"hangs: no answer in {seconds + 12:.0f} s, and its processes cannot be ended"
        )
    except (IndexError, ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return Outcome(fault="crash", text=f"ends with exit code {done.returncode}: {last[:200]}")


def judge_nccl(with_peers: Outcome, without: Outcome, count: int, request: Request) -> Finding:
    """Give the verdict on both runs: only peer-to-peer fails, both fail, or both work."""
    figures = {"with": with_peers.as_dict(), "without": without.as_dict(), "devices": count}
    if with_peers.fault and not without.fault:
        text = (
            f"NCCL's all-reduce over {count} GPUs {with_peers.text}; with NCCL_P2P_DISABLE=1 it works "
            f"({rate(without.bandwidth)}): peer-to-peer is broken, and ACS or the IOMMU is the usual cause"
        )
        return Finding(BROKEN, text, f"now: export NCCL_P2P_DISABLE=1. Look: {LOOK}. Cure: {OFF}", figures)
    if with_peers.fault:
        text = f"NCCL's all-reduce over {count} GPUs {with_peers.text}; with NCCL_P2P_DISABLE=1 it {without.text}"
        remedy = (
            "not peer-to-peer: NCCL_DEBUG=INFO zero3d doctor --only nccl says where; /dev/shm (row shm), "
            "NCCL_SOCKET_IFNAME=lo, on NVSwitch systemctl status nvidia-fabricmanager"
        )
        return Finding(BROKEN, text, remedy, figures)
    if without.fault:
        text = (
            f"NCCL's all-reduce over {count} GPUs works ({rate(with_peers.bandwidth)}), but with NCCL_P2P_DISABLE=1 it "
        )
        remedy = "shared memory fails between ranks: see row shm, NCCL_SHM_DISABLE=1 says whether that is it"
        return Finding(WARNING, text + without.text, remedy, figures)
    verdict, told = against(with_peers.bandwidth, request, "inside", cpu=False)
    text = (
        f"{BYTES >> 20} MiB over {count} GPUs: {rate(with_peers.bandwidth)} with peer-to-peer, "
        f"{rate(without.bandwidth)} without{told}"
    )
    if with_peers.bandwidth < ALIKE * without.bandwidth:
        return Finding(WARNING, text, f"peer-to-peer is slower than the host's memory: ACS? {LOOK}", figures)
    return Finding(
        verdict, text, "nvidia-smi topo -m, nvidia-smi nvlink -s: a link is down or shared" * (verdict != OK), figures
    )


def acs(request: Request) -> Finding:
    """Look at the access control of all PCI bridges."""
    if not present():
        return NONE
    if present() == 1:
        return ONE
    if shutil.which("lspci") is None:
        return Finding(SKIPPED, "no lspci here: install pciutils, or on the host (not in a container): " + LOOK)
    translated = any(Path("/sys/class/iommu").glob("*")) and "iommu=pt" not in Path("/proc/cmdline").read_text()
    return judge_acs(bridges(ask("lspci", "-vvv")), translated)


def judge_acs(found: Bridges, translated: bool) -> Finding:
    """Give the verdict. translated: an IOMMU translates addresses of devices."""
    figures = {"bridges": found.count, "sending": list(found.sending), "iommu": translated}
    if found.sending:
        listed = ", ".join(found.sending[:6]) + (" ..." if len(found.sending) > 6 else "")
        text = f"ACS is on at {len(found.sending)} of {found.count} PCI bridges ({listed})"
        return Finding(WARNING, text + (", and an IOMMU translates" if translated else ""), OFF, figures)
    if found.denied:
        return Finding(SKIPPED, "only root may see it", f"as root: zero3d doctor --only acs, or {LOOK}", figures)
    if translated:
        text = f"ACS is off at all {found.count} PCI bridges, but an IOMMU translates addresses"
        return Finding(
            WARNING, text, "add iommu=pt to the kernel's command line (not inside a virtual machine)", figures
        )
    return Finding(OK, f"ACS is off at all {found.count} PCI bridges", figures=figures)
