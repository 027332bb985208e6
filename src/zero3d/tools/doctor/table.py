"""The doctor's table: symptom -> probe -> remedy. docs/doctor.md shows it, a test compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero3d.tools.doctor import adapters, allreduce, devices, limits, network, storage, versions
from zero3d.tools.doctor.finding import Finding, Request


@dataclass(frozen=True)
class Probe:
    """One row.

    symptom   what a user sees when this is wrong
    looks_at  what is examined
    remedy    what helps; a finding says more exactly what to type
    run       the examination; it may hang or crash: it runs in a process that may be killed
    timeout   seconds until that is done
    torch     it needs torch: all of these share one process, for importing torch takes seconds
    """

    name: str
    symptom: str
    looks_at: str
    remedy: str
    run: Callable[[Request], Finding]
    timeout: float = 20.0
    torch: bool = False


PROBES = (
    Probe(
        "versions",
        "imports fail: operator torchvision::nms does not exist; no kernel image; driver too old",
        "torch, CUDA, driver, torchvision, transformers, Python, whether the first four import together, and which row "
        "of docs/tested.md has these versions",
        "install versions that belong together, or uninstall torchvision: zero3d does not need it",
        versions.versions,
        60.0,
        True,
    ),
    Probe(
        "allreduce",
        "on the CPU, ranks wait for each other forever, or steps are slow",
        "an all-reduce over 2 gloo ranks of this machine: its end, its sum, and its rate against `zero3d calibrate`",
        "GLOO_SOCKET_IFNAME=lo (or --interface); fewer other jobs on these cores",
        allreduce.gloo,
        30.0,
        True,
    ),
    Probe(
        "gpus",
        "CUDA is not available; out of memory at once",
        "the GPUs that the driver and torch see, their memory, other processes on them, and errors they report",
        "install a torch for that driver; set CUDA_VISIBLE_DEVICES; end the other process; ask for another node",
        devices.gpus,
        40.0,
        True,
    ),
    Probe(
        "pinned",
        "copies between host and GPU are slow, offload fails to pin",
        "whether 256 MiB of pinned memory can be allocated, and how fast they are copied",
        "raise the container's memory and locked-memory limits: ulimit -l unlimited",
        devices.pinned,
        40.0,
        True,
    ),
    Probe(
        "p2p",
        "several GPUs of a node are slow together",
        "which pairs of GPUs can access each other's memory, and over which link (nvidia-smi topo)",
        "GPUs without peer-to-peer communicate through host memory: NCCL_P2P_DISABLE=1 tells NCCL so",
        devices.peer_to_peer,
    ),
    Probe(
        "nccl",
        "a hang at 100 % utilisation of all GPUs, or wrong sums",
        "an all-reduce over all GPUs of this host, with NCCL_P2P_DISABLE=1 and without",
        "hangs only with peer-to-peer: switch ACS and the IOMMU off (BIOS; intel_iommu=off or iommu=pt), until then "
        "NCCL_P2P_DISABLE=1",
        devices.nccl,
        150.0,
    ),
    Probe(
        "acs",
        "the same: ACS sends traffic between GPUs through the root complex",
        "ACSCtl of all PCI bridges (lspci -vvv, as root), the IOMMU",
        "switch ACS off in the BIOS, or with setpci on each bridge that is named",
        devices.acs,
    ),
    Probe(
        "nics",
        "connection refused to 127.0.1.1, ranks of two hosts never meet",
        "interfaces that are up, with addresses and speed; the requested one; the address of this host's name",
        "GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME, or --interface NAME to try one here",
        network.interfaces,
    ),
    Probe(
        "hcas",
        "several nodes are slow together; NCCL: no device found",
        "ports of InfiniBand and RoCE adapters: which are up, at what rate, which NCCL_IB_HCA means; nvidia_peermem",
        "NCCL_IB_HCA with the ports that are up; ibstat; modprobe nvidia-peermem",
        adapters.adapters,
    ),
    Probe(
        "hosts",
        "ranks wait at the start for a host that never comes",
        "for each of --hosts: its name, a connection from the interface, and how long that takes",
        "check the name in DNS or /etc/hosts, the firewall in between, and whether that host is up",
        network.hosts,
    ),
    Probe(
        "ports",
        "address already in use; cannot bind; the store times out",
        "whether ports can be bound and reached on loopback and the interface; who has --port or MASTER_PORT",
        "choose another MASTER_PORT; ip link set lo up; end the process that is named",
        network.ports,
    ),
    Probe(
        "shm",
        "NCCL: no space left on device; bus error in data workers",
        "the size of /dev/shm, its free space, and whether it can be written",
        "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm",
        storage.shared_memory,
    ),
    Probe(
        "limits",
        "too many open files; cannot register memory (InfiniBand)",
        "how many files and processes and how much locked memory a process may have",
        "ulimit -n 65536; ulimit -l unlimited (docker run --ulimit memlock=-1)",
        limits.limits,
    ),
    Probe(
        "disk",
        "offload to disk, or saving, is slow",
        "a file of 32 MiB in --disk, written and read with O_DIRECT and without, against `zero3d calibrate`",
        "choose a folder on a local NVMe disk with ext4 or xfs; tmpfs, overlay and NFS may have no O_DIRECT",
        storage.disk,
        40.0,
    ),
    Probe(
        "space",
        "saving fails: no space left on device",
        "free bytes and files in --disk",
        "zero3d ckpt prune, or choose another disk",
        storage.space,
    ),
    Probe(
        "clocks",
        "files are rebuilt, logs of different hosts disagree, certificates are refused",
        "this clock against that of the file system, of files in --disk and of zero3d's files; network time",
        "timedatectl set-ntp true, or start chronyd, on the host that is off",
        storage.clocks,
    ),
    Probe(
        "leftovers",
        "GPU memory is used by no known process; output is in use; ports are taken",
        "zero3d processes without a launcher, locks that are held in --disk, shared memory that no process maps",
        "kill the processes that are named",
        limits.leftovers,
    ),
)
