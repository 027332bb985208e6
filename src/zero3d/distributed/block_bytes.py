"""Bytes of values that travel in blocks: a scale in fp32, then the codes of its elements. No torch.

    bits    block of 256 elements          bytes an element
    8       4 of scale + 256 of codes      1 + 4/256
    4       4 of scale + 128 of codes      1/2 + 4/256

The last block of a message is whole, too: codes behind the last element are zeros.
"""

from __future__ import annotations

from zero3d.memory.scratch import cached_group

BLOCK = 256  # elements that share a scale; where every slot of a unit begins at a multiple of it
SCALE = 4  # bytes
CODE_BITS = 8  # of weights that are gathered so


def block_bytes(bits: int) -> int:
    """Return the bytes of one block."""
    return SCALE + BLOCK * bits // 8


def message_bytes(elements: int, bits: int) -> int:
    """Return the bytes in which so many elements travel.

    >>> [message_bytes(n, 8) for n in (1, 256, 257)]
    [260, 260, 520]
    >>> message_bytes(512, 4)
    264
    """
    return -(-elements // BLOCK) * block_bytes(bits)


def coding_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements in which so many are coded on a device of this type."""
    return min(-(-elements // BLOCK) * BLOCK, cached_group(device))
