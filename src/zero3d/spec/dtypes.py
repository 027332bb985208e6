"""Dtypes by name and width, for what decides without torch: `precision.dtype_of` and `torch_dtype` translate."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """A dtype: its name, as in a file or as torch has it, and the bytes of an element."""

    name: str
    itemsize: int

    @property
    def is_floating_point(self) -> bool:
        """Return whether its values are rounded numbers, which may be cast."""
        return self.name.startswith(("fp", "bf", "float"))


FP32, FP64, BF16, FP16 = Dtype("fp32", 4), Dtype("fp64", 8), Dtype("bf16", 2), Dtype("fp16", 2)
BY_NAME = {dtype.name: dtype for dtype in (FP32, FP64, BF16, FP16)}


def master_of(precision: str) -> Dtype:
    """Return the dtype of masters and of optimizer states in a precision: fp32, but fp64 in fp64."""
    return FP64 if precision == FP64.name else FP32
