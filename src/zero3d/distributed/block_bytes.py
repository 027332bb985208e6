"""Bytes of values that travel in blocks: a scale in fp32, then the codes of its elements. No torch.

    bits    block of 256 elements          bytes an element
    8       4 of scale + 256 of codes      1 + 4/256
    4       4 of scale + 128 of codes      1/2 + 4/256

The last block of a message is whole, too: codes behind the last element are zeros.
"""

from __future__ import annotations

from zero3d.memory.scratch import group_elements
from zero3d.spec.zero import SAME

BLOCK = 256  # elements that share a scale; where every slot of a unit begins at a multiple of it
SCALE = 4  # bytes
CODE_BITS = 8  # of weights that are gathered so
NARROW = "bf16"
BITS = {NARROW: 16, "int8": 8, "int4": 4}  # of an element, by the form in which terms of sums over copies travel
WIDE = 32  # bits of a sum


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


def term_bytes(elements: int, form: str) -> int:
    """Return the bytes in which so many elements of a term travel."""
    bits = BITS[form]
    return elements * bits // 8 if form == NARROW else message_bytes(elements, bits)


def all_get_terms(ranks: int, bits: int) -> bool:
    """Return whether fewer bytes travel where all ranks get all terms than where each adds up a part and sends it on.

    (R - 1) n terms against (R-1)/R n of them and as many sums.

    >>> [max(ranks for ranks in range(2, 99) if all_get_terms(ranks, bits)) for bits in (16, 8, 4)]
    [3, 5, 9]
    """
    return ranks * bits <= bits + WIDE


def sum_of_copies(elements: int, ranks: int, wide: int, form: str) -> list[tuple[int, int]]:
    """Return what a rank sends to sum so many elements over ranks: numbers of elements, with the bytes of each.

    wide  bytes of an element of a sum
    form  of travelling terms, with their bytes counted one by one; same: as sums travel
    """
    part = elements // ranks * (ranks - 1)
    if form == SAME:
        return [(part, wide), (part, wide)]
    if all_get_terms(ranks, BITS[form]):
        return [((ranks - 1) * term_bytes(elements, form), 1)]
    return [((ranks - 1) * term_bytes(elements // ranks, form), 1), (part, wide)]


def coding_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements in which so many are coded on a device of this type."""
    return min(-(-elements // BLOCK) * BLOCK, group_elements(device))
