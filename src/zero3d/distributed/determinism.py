"""Deterministic algorithms on an accelerator, and what the bits of a run depend on there.

    torch's algorithms             kernels that add in the order in which threads arrive (index_add, the backward of
                                   attention) take a fixed one, or raise an error where there is none
    CUBLAS_WORKSPACE_CONFIG        without it cuBLAS may choose another kernel each time; read once, when it starts
    cuDNN's benchmark              off: no timing decides which kernel runs
    FLASH_ATTENTION_DETERMINISTIC  the backward of the package flash_attn, as transformers calls it
    NCCL_ALGO                      the order in which NCCL adds: activations over tp, native reduce-scatters. By itself
                                   it chooses by size, and may add in switches (NVLS, SHARP); read when groups are made

The CPU needs none of it: there the same number of threads gives the same bits, and nothing is set.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from zero3d.distributed.devices import has_float64
from zero3d.errors import ConfigError, short

CUBLAS, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")  # the values that torch takes as deterministic
NCCL_ALGO, NCCL_PROTO = "NCCL_ALGO", "NCCL_PROTO"
RING = "Ring"  # what every collective of every version of NCCL has
FLASH = "FLASH_ATTENTION_DETERMINISTIC"
REFUSED, CUBLAS_RAN = " does not have a deterministic implementation", "because it uses CuBLAS"  # torch's words


def make_deterministic(device: str | torch.device | None = None) -> None:
    """Let torch, cuBLAS, cuDNN and NCCL give the same bits in every run on this machine, software and mesh.

    Call it before `Mesh` and `Engine`, and before anything is computed on the device: in the environment it sets what
    is not there. An operation of torch that has no deterministic form raises torch's RuntimeError from now on; a
    warning would not do, for with warnings torch leaves attention's backward as it is. Memory is not filled, which
    torch does otherwise. On the CPU it does nothing.

    device  of the mesh (default: this rank's accelerator, else the cpu)

    Raises ConfigError for a CUBLAS_WORKSPACE_CONFIG with which cuBLAS does not repeat its bits.
    """
    kind = torch.device(device).type if device is not None else _accelerator()
    if kind == "cpu":
        return
    if kind == "cuda":
        _fix_cublas()
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
    os.environ.setdefault(FLASH, "1")
    if not dist.is_initialized():  # groups that are there have read it
        os.environ.setdefault(NCCL_ALGO, RING)
    torch.use_deterministic_algorithms(True)
    options: Any = torch.utils.deterministic
    options.fill_uninitialized_memory = False  # it costs a kernel for each allocation


def _accelerator() -> str:
    """Return the kind of device that a mesh takes by default."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if kind is None or not has_float64(kind) else kind.type


def _fix_cublas() -> None:
    """Choose cuBLAS's workspace, where nobody has; warn where cuBLAS may have started without one."""
    given = os.environ.setdefault(CUBLAS, WORKSPACES[0]) if _cublas_rests() else os.environ.get(CUBLAS)
    if given is None:
        os.environ[CUBLAS] = WORKSPACES[0]
        warnings.warn(
            f"deterministic algorithms are asked for after this process has used its GPU without {CUBLAS}, which is "
            "read once: where the next matrix product is refused, call zero3d.make_deterministic() before all others, "
            f"or type {CUBLAS}={WORKSPACES[0]} before the command.",
            stacklevel=3,
        )
    elif given not in WORKSPACES:
        raise ConfigError(
            f"{CUBLAS}={short(given)}: with {' or '.join(WORKSPACES)} cuBLAS gives the same bits in every run. Type "
            f"{CUBLAS}={WORKSPACES[0]}, or unset it."
        )


def _cublas_rests() -> bool:
    """Say whether cuBLAS cannot have run in this process: nothing was ever allocated on a GPU."""
    cuda: Any = torch.cuda
    return not cuda.is_initialized() or not any(map(cuda.max_memory_allocated, range(cuda.device_count())))


def mode() -> str:
    """Return "on", "off", or "warnings only", with which torch leaves attention's backward as it is."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warnings only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def warn_of_exact(device: torch.device) -> None:
    """Warn where exact sums over ranks are asked for and the device's kernels need not repeat their own."""
    if device.type != "cpu" and mode() != "on":
        warnings.warn(
            f"exact=True on {device.type} with deterministic algorithms {mode()}: sums over ranks have a fixed order, "
            "but kernels may still add in another order each time. Call zero3d.make_deterministic() before anything "
            "else, in a file leave train.deterministic out.",
            stacklevel=3,
        )


@contextmanager
def refusals_named() -> Iterator[None]:
    """Turn torch's refusal, inside, of an operation without a deterministic form into a ConfigError: what to type."""
    try:
        yield
    except RuntimeError as error:
        operation, refused, _ = str(error).partition(REFUSED)
        if not refused and CUBLAS_RAN not in str(error):
            raise
        if refused:
            fact = f"{short(operation)} has no form that gives the same bits in every run: replace it"
        else:
            fact = f"cuBLAS started without {CUBLAS}: type {CUBLAS}={WORKSPACES[0]} before the command"
        raise ConfigError(
            f"train.deterministic (auto: on with zero.exact and health.replay): {fact}, or do without by "
            "train.deterministic=false."
        ) from error


def device_facts(device: torch.device, backend: str, ranks_per_host: int | None) -> dict[str, str | int]:
    """Return what bits depend on beside the name of an accelerator; nothing for the CPU.

    backend  of the process groups, of which NCCL's sums depend on its version, settings and the placement of ranks
    """
    if device.type == "cpu":
        return {}
    facts: dict[str, str | int] = {"deterministic": mode(), "backend": backend}
    if device.type == "cuda":
        backends: Any = torch.backends
        matmul, cudnn = backends.cuda.matmul, backends.cudnn
        facts |= {
            "cublas_workspace": os.environ.get(CUBLAS, "unset"),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": str(torch.version.cuda or f"hip {torch.version.hip}"),
            "cudnn": str(cudnn.version()),
            "fp32": f"matmul {matmul.fp32_precision}, conv {cudnn.conv.fp32_precision}, rnn {cudnn.rnn.fp32_precision}",
            "narrow_sums": f"bf16 {matmul.allow_bf16_reduced_precision_reduction}, "
            f"fp16 {matmul.allow_fp16_reduced_precision_reduction}, in fp16 {matmul.allow_fp16_accumulation}",
        }
    if backend == "nccl":
        cuda: Any = torch.cuda
        facts |= {
            "nccl": ".".join(map(str, cuda.nccl.version())),
            "nccl_algorithm": os.environ.get(NCCL_ALGO, "chosen by NCCL"),
            "nccl_protocol": os.environ.get(NCCL_PROTO, "chosen by NCCL"),
            "ranks_per_host": ranks_per_host or 0,
        }
    return facts
