"""Names the CPU's kernels by what they compute: two CPUs of one name give the same bits, as far as a trial can see.

torch says which of its own kernels it takes ("AVX512"). oneDNN and MKL choose theirs by the CPU, and by variables of
the environment (ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS), and MKL has no call that tells its choice. So a few
products are computed, and their bits are the name: a hash beside the vendor and a hash of the CPU's instructions.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

SHAPES = ((5, 35, 33), (64, 96, 96), (32, 2048, 64))  # M, K / 2, N: less than a vector, some blocks, a long sum
UNNAMED = "cpu"
WIDE = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")  # how instructions that products use begin


def capability() -> str:
    """Return torch's name of its own kernels for this CPU."""
    return torch.backends.cpu.get_cpu_capability()


@cache
def products() -> str:
    """Return a name of the kernels of matrix products: vendor, instructions, bits of a trial (milliseconds, once)."""
    vendor, flags = _cpu()
    instructions = " ".join(sorted(flag for flag in flags if flag.startswith(WIDE)))
    return f"{vendor} {_short(instructions.encode())} {trial()}"


def trial() -> str:
    """Return a hash of the bits of products in fp32 and bf16, and of attention.

    The terms of each sum cancel except for rounding errors, so that every order of adding has its own bits, in bf16,
    too.
    """
    # In a dry run, too, it is this machine that is asked, and under autocast for products of the dtypes named here.
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        found = [
            product.float()
            for rows, terms, columns in SHAPES
            for dtype in (torch.float32, torch.bfloat16)
            for product in _products(rows, terms, columns, dtype)
        ]
        return _short(b"".join(each.contiguous().numpy().tobytes() for each in found))


def _products(rows: int, terms: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a product [M, N] as a layer's forward has it, one as its backward has it, and attention of N rows."""
    left, right = _values(rows, terms, dtype), _values(columns, terms, dtype)
    left, right = torch.cat([left, -left.flip(1)], dim=1), torch.cat([right, right.flip(1)], dim=1)
    yield F.linear(left, right)
    yield left @ right.t().contiguous()
    heads = right[None, None, :, :64].clamp(-1, 1)
    yield F.scaled_dot_product_attention(heads, heads, heads)


def _values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of many magnitudes, the same on every machine; no generator is asked.

    Products of bf16 numbers that are alike in size add up in fp32 without any rounding, and tell nothing.
    """
    numbers = torch.arange(rows * columns, device="cpu", dtype=torch.int64) * 2654435761 % 2**32
    return torch.ldexp(numbers.double() / 2**31 - 1, numbers % 19 - 9).to(dtype).view(rows, columns)


def _cpu() -> tuple[str, list[str]]:
    """Return the vendor and the instructions of this CPU as Linux names them, elsewhere the architecture alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() or UNNAMED, []
    said: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        said.setdefault(name.strip().lower(), value.strip())
    vendor = said.get("vendor_id") or said.get("cpu implementer") or platform.machine() or UNNAMED
    return vendor, (said.get("flags") or said.get("features") or "").split()


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
