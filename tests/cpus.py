"""The tests as on another CPU: `make test CPU=avx2`, `default`, `noise`, and `make test-part` of one of them.

avx2     kernels for CPUs with AVX2 and no more, where this one's libraries heed their variables (MKL does on Intel's)
default  those for CPUs without it
noise    matrix products whose last bit is drawn (`noise.py`); noise:7 draws by another seed than 1

Environment variables carry the choice to workers, fork servers, ranks and commands; torch reads them when it is imported.
"""

import os
import platform
from hashlib import sha256
from pathlib import Path

VARIABLE = "ZERO3D_TEST_CPU"
KERNELS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
CHOICES = (*KERNELS, "noise")
HOOK = Path(__file__).with_name("another_cpu")  # its sitecustomize.py begins the noise in commands


def begin(environment):
    """Be the CPU that the environment names, in this process and those that it starts; before torch is imported."""
    begin_noise(tell(environment))


def tell(environment):
    """Add to an environment what makes a process be the CPU that it names, and what it starts."""
    chosen = environment.get(VARIABLE, "")
    environment.update(KERNELS.get(chosen, {}))
    if seed_of(chosen):
        others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(HOOK))]
        environment["PYTHONPATH"] = os.pathsep.join([str(HOOK), *others])
    return environment


def as_here(environment):
    """Return an environment that a test made anew, for a process of the CPU that this one is."""
    return tell(environment | {VARIABLE: os.environ.get(VARIABLE, "")})


def begin_noise(environment):
    """Make this process's matrix products noisy if the environment says so; once."""
    if seed := seed_of(environment.get(VARIABLE, "")):
        import noise

        noise.begin(seed)


def seed_of(chosen):
    """The seed of a noisy CPU, None of another."""
    name, _, seed = chosen.partition(":")
    return (seed or "1") if name == "noise" else None


def refusal(chosen):
    """What is wrong with a CPU's name, or None."""
    if not chosen or chosen in KERNELS or seed_of(chosen):
        return None
    return f"CPU={chosen}: the tests run as on {', '.join(CHOICES)}, or without CPU= as on this one"


def of_commit(commit):
    """The CPU that a commit's hash chooses, for `.ci/run`."""
    return CHOICES[sha256(f"cpu of {commit}".encode()).digest()[0] % len(CHOICES)]


def header(chosen):
    """A line on the CPU that the tests run on."""
    import torch

    words = f"on {model()} with {torch.__version__}'s kernels for {torch.backends.cpu.get_cpu_capability()}"
    return f"{words}, CPU={chosen}" if chosen else words


def model():
    """The CPU's name, as its system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    import sys

    print(of_commit(sys.argv[1]))
