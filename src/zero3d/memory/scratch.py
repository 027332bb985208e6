"""Scratch of casts from masters to weights, of masters in halves, of decoded matrices. Pure arithmetic, no torch.

Where several operations follow one another on the same numbers, they work on a group at a time:

    CPU            2^18 elements     1 MB of fp32, inside a core's cache: what the first operation reads and writes the
                                     next one finds there, and memory sees each number once
    accelerators   2^24 elements     whose kernels run ten times as long as their launches take. Smaller groups, which
                                     an L2 would hold, were slower on a card (decision 51)

Masters in halves are joined, updated and split again in buckets, which an optimizer's own step visits one by one.
"""

IN_CACHE = ("cpu",)  # types of devices whose caches say how much is done at once


def group_elements(device: str) -> int:
    """Return the elements on which several operations follow one another on a device of this type."""
    return 1 << (18 if device in IN_CACHE else 24)


def cast_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements of scratch with which `precision.cast_all` casts so many, 8 bytes for one of a group."""
    return 2 * min(elements, group_elements(device))


def update_bucket(device: str) -> int:
    """Return the most masters in halves that are updated at once on a device of this type."""
    return group_elements(device)


def update_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements of scratch in which so many masters in halves are updated."""
    return min(elements, update_bucket(device))
