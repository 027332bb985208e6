"""Packages that a configuration needs beside zero3d's own requirements. No torch.

They are looked for without importing one, but for those of object stores.

package      extra        asked for by
peft         hf           lora.rank
Pillow       vlm          data.images
pyarrow      data         data in parquet or arrow files, as far as names tell
trackers' names           log.to: of each its package and extra, but for those of TRACKER_PACKAGES
of a protocol             URLs of object stores (stores/urls.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from zero3d.config import Config
from zero3d.config.sections import OTEL, PROMETHEUS
from zero3d.data.fetched import urls_of as urls_of_data
from zero3d.data.files import named_formats
from zero3d.errors import ConfigError
from zero3d.stores.urls import check_shared, check_url, is_url

COLUMNS = ("parquet", "arrow")
IMPORTED_AS = {
    "Pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "opentelemetry-sdk": "opentelemetry.sdk.metrics",  # all above it are namespaces, which other packages share
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}
TRACKER_PACKAGES = {  # of trackers that have other names than their packages
    PROMETHEUS: ("prometheus-client",),
    OTEL: ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}


def check_packages(config: Config) -> None:
    """Refuse a configuration that needs a package which is not installed. Raises ConfigError."""
    for asked, package, extra in _needed(config):
        if not is_installed(IMPORTED_AS.get(package, package)):
            raise ConfigError(f"{asked} needs {package}: pip install 'zero3d[{extra}]'.")


def check_stores(config: Config, resume: str | None) -> None:
    """Refuse URLs of object stores that need a package, or that other processes do not see. Raises ConfigError."""
    for asked, url in urls_of(config, resume):
        check_url(url, asked)
        check_shared(url, asked)


def urls_of(config: Config, resume: str | None = None) -> list[tuple[str, str]]:
    """Return each key that has a URL of an object store, and the URL."""
    given = [*urls_of_data(config.data), ("checkpoint.to", config.checkpoint.to), ("--resume", resume)]
    return [(asked, url) for asked, url in given if url is not None and is_url(url)]


def is_installed(module: str) -> bool:
    """Return whether a package can be imported.

    A folder of that name in the current directory, as wandb makes one, is a namespace package and does not count.
    """
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # a package above it
        return False
    return spec is not None and spec.origin is not None


def _needed(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield each setting that needs a package, the package, and the extra that installs it."""
    if config.lora.rank is not None:
        yield "lora.rank", "peft", "hf"
    if config.data.images is not None:
        yield "data.images", "Pillow", "vlm"
    for path, format in named_formats(config.data).items():
        if format in COLUMNS:
            yield f"{path}: reading {format}", "pyarrow", "data"
    for name, asked in config.log.trackers.items():
        for package in TRACKER_PACKAGES.get(name, (name,)):
            yield asked, package, name
