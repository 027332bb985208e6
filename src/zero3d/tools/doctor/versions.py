"""Packages that must fit together: torch, CUDA, the driver, torchvision, transformers, Python.

tested.json, which benchmarks/tables.py writes with docs/tested.md, has the versions with which the tests ran.

torchvision comes in one version for each of torch's; another one breaks every import of transformers, peft and trl
(`operator torchvision::nms does not exist`), though none of them needs it for language models.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero3d.errors import short
from zero3d.tools.doctor.finding import BROKEN, OK, WARNING, Finding, Request

PYTHON, TORCH, TRANSFORMERS = (3, 11), (2, 11), (5, 16)
PACKAGES = ("torch", "torchvision", "transformers", "tokenizers", "peft", "safetensors", "numpy")
# The oldest Linux driver for a major version of CUDA (minor versions are compatible): NVIDIA's release notes.
DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
TESTED = Path(__file__).with_name("tested.json")
NO_VISION = "pip uninstall torchvision (zero3d does not need it), or install the one for torch"


def versions(request: Request) -> Finding:
    """Compare versions, then import what a run imports."""
    found = {name: version for name in PACKAGES if (version := installed(name))}
    found["python"] = platform.python_version()
    torch, error = imported("torch")
    if torch is None:
        return Finding(
            BROKEN, f"import torch fails: {error}", "reinstall it: pip install --force-reinstall torch", found
        )
    found["cuda"] = getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None) or ""
    found["driver"] = driver()
    complaints = [*compare(found), *import_all(torch)]
    listed = ", ".join(f"{name} {found[name]}" for name in (*PACKAGES[:3], "python") if found.get(name))
    if found["cuda"]:
        listed += f", CUDA {found['cuda']}, driver {found['driver'] or 'none'}"
    here = {**found, "system": platform.system(), "machine": platform.machine()}
    tested = tested_row(here, json.loads(TESTED.read_text()))
    found["tested"] = str(tested["row"]) if tested else ""
    listed += f"; {say_tested(tested)}"
    if not complaints:
        return Finding(OK, listed, figures=found)
    complaints.sort(key=lambda each: each.verdict != BROKEN)
    first = complaints[0]
    return Finding(first.verdict, "; ".join(each.text for each in complaints), first.remedy, found)


def installed(name: str) -> str:
    """Return a package's version, empty where it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def imported(name: str) -> tuple[Any, str]:
    """Return a module, or None and why it cannot be imported."""
    try:
        return import_module(name), ""
    except Exception as error:  # noqa: BLE001 (whatever a broken package raises)
        return None, f"{type(error).__name__}: {short(error)}"


def import_all(torch: Any, load: Callable[[str], tuple[Any, str]] = imported) -> list[Finding]:
    """Import torchvision, then transformers and peft, where they are there, and say which of them fails and by whom."""
    complaints = []
    vision = ""
    if find_spec("torchvision") is not None:
        vision = load("torchvision")[1]
        if vision:
            text = (
                f"torchvision {installed('torchvision') or '(of no version)'} does not fit torch {torch.__version__}: "
                f"{vision}; with it every import of transformers, peft and trl fails"
            )
            complaints.append(Finding(BROKEN, text, NO_VISION))
    for name in ("transformers", "peft"):
        if find_spec(name) is None or vision:
            continue
        module, error = load(name)
        if module is None:
            complaints.append(Finding(BROKEN, f"import {name} fails: {error}", f"pip install -U {name}"))
    return complaints


def tested_row(here: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the first row of docs/tested.md that is of these versions, None if none is.

    here   versions by package, with python, system and machine; the last numbers of Python's do not count, nor does the
           build of torch (+cpu)
    """

    def key(of: Mapping[str, Any]) -> tuple[Any, ...]:
        torch = str(of["torch"]).partition("+")[0]
        return of["system"], of["machine"], numbers(of["python"]), torch, of.get("transformers", "")

    return next((row for row in rows if key(row) == key(here)), None)


def say_tested(row: Mapping[str, Any] | None) -> str:
    """Return in words how the tests ended with these versions."""
    if row is None:
        return "no row of docs/tested.md has these versions"
    failed = row["failed"]
    return f"row {row['row']} of docs/tested.md ({failed or 'no'} test{'s' if failed > 1 else ''} failed)"


def compare(found: Mapping[str, str]) -> list[Finding]:
    """Say which versions are too old or do not fit each other. found: name -> version, with python, cuda, driver."""
    complaints = []
    for name, least in (("python", PYTHON), ("torch", TORCH), ("transformers", TRANSFORMERS)):
        if found.get(name) and numbers(found[name]) < least:
            wanted = ".".join(map(str, least))
            text = f"{name} {found[name]} is older than {wanted}"
            complaints.append(Finding(BROKEN, text, f"install {name} {wanted} or newer (pip install -U {name})"))
    torch, vision = (numbers(found.get(name, "")) for name in ("torch", "torchvision"))
    if torch and vision and (vision[0], vision[1] - 15) != (0, torch[1]) and torch[0] == 2:
        text = f"torchvision {found['torchvision']} is for torch 2.{vision[1] - 15}, and here is torch {found['torch']}"
        remedy = f"{NO_VISION}: pip install 'torchvision==0.{torch[1] + 15}.*'"
        complaints.append(Finding(WARNING, text, remedy))
    builds = [found.get(name, "").partition("+")[2] for name in ("torch", "torchvision")]
    if all(builds) and builds[0] != builds[1]:
        text = f"torch is built for {builds[0]}, torchvision for {builds[1]}"
        complaints.append(Finding(WARNING, text, NO_VISION))
    return complaints + compare_driver(found.get("cuda", ""), found.get("driver", ""))


def compare_driver(cuda: str, driver: str) -> list[Finding]:
    """Say whether a driver is too old for the CUDA that torch was built with."""
    needed = DRIVERS.get(numbers(cuda)[0]) if numbers(cuda) else None
    if not driver or needed is None or numbers(driver) >= needed:
        return []
    first = f"{needed[0]}.{needed[1]}"
    text = f"the driver {driver} is older than {first}, the first for CUDA {cuda}, which torch is built for"
    return [
        Finding(BROKEN, text, "update the driver, or install a torch built for an older CUDA (pytorch.org/get-started)")
    ]


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; nothing where there are none."""
    match = re.match(r"(\d{1,9})(?:\.(\d{1,9}))?", version)
    return (int(match[1]), int(match[2] or 0)) if match else ()


def driver() -> str:
    """Return the version of NVIDIA's driver, empty without one."""
    return (ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines() or [""])[0].strip()


def ask(*command: str, seconds: float = 20.0) -> str:
    """Return what a program of the system prints, nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        sys.stderr.write(done.stderr.decode(errors="replace")[-1000:])
        return ""
    return done.stdout.decode(errors="replace")
