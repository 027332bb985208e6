"""A process that writes steps into a disk slab, one after the other, and may kill itself at any call of the system.

    python tests/disk_steps.py DIRECTORY STEPS [CALL]

goes on after the newest step that is there, and prints "committed K" and "confirmed K" as it gets there. CALL: the number of the call at which it is killed; of a write
half has been done then.
"""

import hashlib
import mmap
import os
import signal
import sys
from pathlib import Path

from zero3d.memory.blocks import padded
from zero3d.offload import direct_file
from zero3d.offload.disk_slab import DiskSlab

RECORDS = {"embed": 1, "block.0": 4096, "block.1": 40_001, "norm": 4095, "head": 12_288}
CALLS = ("pwritev", "fdatasync", "fsync", "replace", "open", "unlink")
OWNER = "run 1, rank 0 of 1"


def contents(step, index):
    """What a record holds at a step."""
    name, nbytes = list(RECORDS.items())[index]
    seed = hashlib.sha256(f"{step} {name}".encode()).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def memory(nbytes):
    """Memory that direct I/O takes."""
    return memoryview(mmap.mmap(-1, max(padded(nbytes), 1)))


def write_step(slab, step):
    for index, nbytes in enumerate(RECORDS.values()):
        given = memory(nbytes)
        given[:nbytes] = contents(step, index)
        slab.write(index, given)


def holds(slab, step):
    """Whether all records are those of a step."""
    read = []
    for index, nbytes in enumerate(RECORDS.values()):
        taken = memory(nbytes)
        slab.read(index, taken)
        read.append(bytes(taken[:nbytes]) == contents(step, index))
    return all(read)


def die_at(call):
    """Be killed at this call of CALLS from now on."""
    left = call

    def dying(name):
        original = getattr(os, name)

        def called(*arguments, **named):
            nonlocal left
            left -= 1
            if left == 0:
                if name == "pwritev":
                    file, [given], offset = arguments
                    original(file, [given[: len(given) // 8192 * 4096]], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return called

    for name in CALLS:
        setattr(os, name, dying(name))


def main(directory, steps, call=None):
    direct_file.CHUNK = 8192
    with DiskSlab(Path(directory), 0, RECORDS, OWNER) as slab:
        if call is not None:
            die_at(int(call))
        first = 0
        if slab.steps:
            first = slab.steps[0] + 1
            slab.resume(slab.steps[0])
        for step in range(first, first + int(steps)):
            write_step(slab, step)
            slab.commit(step)
            print(f"committed {step}", flush=True)
            slab.confirm(step)
            print(f"confirmed {step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
