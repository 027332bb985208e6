"""The parts of gpu_check.py and cluster_check.py, and the processes they run in.

account     what a part writes down while it runs, and the place it runs at
calls       one call: its parts, one after the other
process     a part in a fresh process with a limit
worker      that process
record      results of all parts in one JSON file, and as a table
training    short trainings that the parts compare

loopback    axes of one rank that call their backend's collectives
numbers     parity, bits, two ranks on one device
streams     order on the side streams, slowed side streams, the CUDA sanitizer
host        what the host waits for, and how often a step calls the device
holdings    bytes on the device
turns       tokens/s of several variants in turns, eager and compiled, beside FSDP2
speed       profiles: kernels, idle time
tiers       records, activations and parameters off the device, beside all on it
largest     the largest model that the plan says fits, beside the plan
features    optimizers, experts, quantised bases, streams of weights, sequences over ranks, products in fp8
threads     ranks that are threads, and share the device
edges       what programs do beyond a step; other people's loops
command     `zero3d train`

All of it needs torch and NEEDS; a part that needs more says so in its row, and is skipped without that.
"""

import sys
from collections.abc import Iterable
from importlib.util import find_spec

NEEDS = ("numpy", "psutil", "safetensors", "yaml", "xxhash")
PACKAGES = {"yaml": "PyYAML"}  # whose names differ from their modules'


def missing(modules: Iterable[str]) -> list[str]:
    """Return the packages of modules that are not installed."""
    return [PACKAGES.get(name, name) for name in modules if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # it is known not to be
        return False


if absent := missing(NEEDS):
    print(f"the campaign needs {', '.join(absent)} beside torch: pip install {' '.join(absent)}", file=sys.stderr)
    raise SystemExit(2)
