"""Blocks: the unit in which memory and disk are cut where direct I/O may read or write. No torch."""

from __future__ import annotations

BLOCK = 4096  # bytes: what disks and file systems ask offsets, lengths and addresses of direct I/O to be multiples of


def padded(nbytes: int) -> int:
    """Return the bytes of the whole blocks that hold so many.

    >>> [padded(n) for n in (0, 1, 4096, 4097)]
    [0, 4096, 4096, 8192]
    """
    return -(-nbytes // BLOCK) * BLOCK
