"""Packages that a configuration needs beside zero3d's own requirements, looked for without importing one. No torch.

package      extra        asked for by
peft         hf           lora.rank
Pillow       vlm          data.images
pyarrow      data         data in parquet or arrow files, as far as names tell
trackers' names           log.to, log.tensorboard, log.wandb: of each its package and extra
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from zero3d.config import Config
from zero3d.data.files import named_formats
from zero3d.errors import ConfigError

COLUMNS = ("parquet", "arrow")
IMPORTED_AS = {"Pillow": "PIL"}


def check_packages(config: Config) -> None:
    """Refuse a configuration that needs a package which is not installed. Raises ConfigError."""
    for asked, package, extra in _needed(config):
        if not is_installed(IMPORTED_AS.get(package, package)):
            raise ConfigError(f"{asked} needs {package}: pip install 'zero3d[{extra}]'.")


def is_installed(module: str) -> bool:
    """Return whether a package can be imported.

    A folder of that name in the current directory, as wandb makes one, is a namespace package and does not count.
    """
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def _needed(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what asks for a package, the package, and the extra that installs it."""
    if config.lora.rank is not None:
        yield "lora.rank", "peft", "hf"
    if config.data.images is not None:
        yield "data.images", "Pillow", "vlm"
    for path, format in named_formats(config.data).items():
        if format in COLUMNS:
            yield f"{path}: reading {format}", "pyarrow", "data"
    for name, asked in config.log.trackers.items():
        yield asked, name, name
