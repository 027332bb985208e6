"""Specs of traced models, kept on disk: a second plan of a model needs neither torch nor transformers. No torch.

    $ZERO3D_CACHE or ~/.cache/zero3d      specs/<digest>.json     the last `KEPT` that were used

Presets, as `zero3d plan NAME` takes them, are in the package (tools/plan/preset_specs.py). The digest is of all that a
trace depends on: the text of its config, what was asked of it, versions of Python and of the libraries, and size
and time of every file of zero3d. Where a function makes the model nothing is kept; a
file that cannot be read is made anew, and a folder that cannot be written is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zero3d.config import Lora, Model
from zero3d.errors import short
from zero3d.models.places import check_model_path, config_file, is_called
from zero3d.models.presets import PRESETS
from zero3d.stores.cache import cache_root
from zero3d.tools.cli.progress import say
from zero3d.tools.plan.preset_specs import MISREAD, folded, preset_spec, unfolded
from zero3d.tools.plan.spec import ModelSpec

KEPT = 64  # files
LIBRARIES = ("torch", "transformers", "peft", "kernels")
ROOT = Path(__file__).parents[2]


def open_spec(path: str, length: int | None, **settings: Any) -> ModelSpec:
    """Return `model_spec.open_spec` of the same arguments, known, kept or traced now. Raises ConfigError as it does.

    A name that is nothing's is refused before anything is imported.
    """
    model = Model(path=path, init="random")
    check_model_path(model)
    if not os.path.exists(path) and (known := preset_spec(path, length, **settings)) is not None:
        return known
    file = None if is_called(model) else _folder() / f"{_digest(path, length, settings)}.json"
    spec = None if file is None else _read(file)
    if spec is None:
        say(f"tracing a step of {short(path)}, kept for the next time")
        from zero3d.tools.cli.train import quiet_libraries
        from zero3d.tools.sim.model_spec import open_spec as traced

        quiet_libraries()  # transformers warns of what a config leaves open, and no model is trained here
        spec = traced(path, length, **settings)
        if file is not None:
            with suppress(OSError):
                _write(file, spec)
    return spec


def _folder() -> Path:
    return cache_root() / "specs"


def _digest(path: str, length: int | None, settings: dict[str, Any]) -> str:
    asked = {key: asdict(value) if isinstance(value, (Lora, Model)) else value for key, value in settings.items()}
    config = PRESETS[path] if not os.path.exists(path) else config_file(Path(path)).read_text(errors="replace")
    files = sorted((str(file.relative_to(ROOT)), *_stamp(file)) for file in ROOT.rglob("*.py"))
    versions = [platform.python_version(), *map(_version, LIBRARIES)]
    text = json.dumps([path, config, length, asked, versions, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _read(file: Path) -> ModelSpec | None:
    """Return what a file holds, None where there is none that can be read."""
    try:
        spec = unfolded(json.loads(file.read_text()))
        os.utime(file)
    except MISREAD:
        return None
    return spec


def _write(file: Path, spec: ModelSpec) -> None:
    """Write a file whole or not at all, and remove those that were not used for longest. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(folded(spec), separators=(",", ":")))
    fresh.replace(file)
    kept = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
    for each in kept[:-KEPT]:
        each.unlink()
