"""Scratch of the cast from masters to weights, and of the update of masters in halves. Pure arithmetic, no torch.

Masters are cast in groups. A kernel on a group of 2^25 elements runs a hundred times as long as it takes to launch; on
the CPU a group of 2^18 stays inside a core's cache. Those in halves are joined, updated and split again in buckets,
which an optimizer's own step visits one by one.
"""

IN_CACHE = ("cpu",)  # types of devices whose caches say how much is done at once


def cast_group(device: str) -> int:
    """Return the most elements that are cast at once on a device of this type."""
    return 1 << (18 if device in IN_CACHE else 25)


def cast_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements of scratch with which `precision.cast_all` casts so many, 8 bytes for one of a group."""
    return 2 * min(elements, cast_group(device))


def update_bucket(device: str) -> int:
    """Return the most masters in halves that are updated at once on a device of this type."""
    return 1 << (18 if device in IN_CACHE else 24)


def update_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements of scratch in which so many masters in halves are updated."""
    return min(elements, update_bucket(device))
