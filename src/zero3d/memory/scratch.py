"""Scratch of the cast from masters to weights, and of the update of masters in halves. Pure arithmetic, no torch.

Where several operations follow one another on the same numbers, they work on a group at a time: what the first one
reads and writes the next one finds in a cache, and memory sees each number once. A group is

    CPU            2^18 elements     1 MB of fp32, inside a core's cache
    accelerators   2^21 elements     8 MB: with as much scratch twice beside it, half of an A100's L2 of 40 MB

and such a kernel runs about as long as its launch takes. Masters in halves are joined, updated and split again in
buckets, which an optimizer's own step visits one by one.
"""

IN_CACHE = ("cpu",)  # types of devices whose caches say how much is done at once


def cached_group(device: str) -> int:
    """Return the elements on which several operations follow one another inside a cache of a device of this type."""
    return 1 << (18 if device in IN_CACHE else 21)


def cast_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements of scratch with which `precision.cast_all` casts so many, 8 bytes for one of a group."""
    return 2 * min(elements, cached_group(device))


def halves_group(device: str) -> int:
    """Return the most masters in halves that are joined or split at once: in few launches, for there are many."""
    return 1 << (18 if device in IN_CACHE else 25)


def update_bucket(device: str) -> int:
    """Return the most masters in halves that are updated at once on a device of this type."""
    return 1 << (18 if device in IN_CACHE else 24)


def update_scratch(elements: int, device: str) -> int:
    """Return the fp32 elements of scratch in which so many masters in halves are updated."""
    return min(elements, update_bucket(device))
