"""Paths that are URLs of object stores, and what their protocols need."""

from __future__ import annotations

import re
from typing import NamedTuple

from zero3d.errors import ConfigError, short

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
KNOWN = "s3://, gs://, az://, hf:// or file://"
IN_A_PROCESS = "memory"


class Package(NamedTuple):
    """Names what installs a protocol of fsspec."""

    module: str
    asked: str


PACKAGES = {
    "s3": Package("s3fs", "'zero3d[s3]'"),
    "s3a": Package("s3fs", "'zero3d[s3]'"),
    "gs": Package("gcsfs", "gcsfs"),
    "gcs": Package("gcsfs", "gcsfs"),
    "az": Package("adlfs", "adlfs"),
    "abfs": Package("adlfs", "adlfs"),
    "hf": Package("huggingface_hub", "huggingface_hub"),
}


def is_url(path: object) -> bool:
    """Return whether a path is a URL."""
    return URL.match(str(path)) is not None


def protocol_of(url: str) -> str:
    """Return the protocol of a URL."""
    match = URL.match(url)
    assert match is not None
    return match[1].lower()


def check_url(url: str, asked: str | None = None) -> None:
    """Refuse a URL whose protocol is unknown, or needs a package that is not installed. Raises ConfigError.

    asked  the key or option that has it
    """
    from fsspec.registry import get_filesystem_class

    protocol, given = protocol_of(url), _given(url, asked)
    try:
        get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(f"{given}: there is no store of the kind {protocol}://: type {KNOWN}.") from None
    except ImportError as error:
        package = PACKAGES.get(protocol)
        needed = f"a package: {error}" if package is None else f"{package.module}: pip install {package.asked}"
        raise ConfigError(f"{given} needs {needed}.") from None


def check_shared(url: str, asked: str | None = None) -> None:
    """Refuse a store that other processes do not see. Raises ConfigError."""
    if protocol_of(url) == IN_A_PROCESS:
        raise ConfigError(
            f"{_given(url, asked)} is memory of one process, which other ranks do not see and which ends with it: "
            f"type {KNOWN}."
        )


def _given(url: str, asked: str | None) -> str:
    """Return a URL as a message begins with it."""
    return short(url) if asked is None else f"{asked}={short(url)}"
