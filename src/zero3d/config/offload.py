"""What leaves the device, as an engine takes it: the section `offload` of a file, with its folder. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zero3d.config.sections import Config
from zero3d.errors import ConfigError
from zero3d.spec.offload import HOST_BUDGET, Offload
from zero3d.spec.sizes import parse_size

FOLDER = "offload"  # of an output folder


def offload_of(config: Config) -> Offload:
    """Return the section; its folder is OUTPUT/offload where it names none and the output has a name.

    Raises ConfigError.
    """
    asked = config.offload
    if asked.directory is None and config.output is not None:
        asked = replace(asked, directory=str(Path(config.output) / FOLDER))
    return Offload.of(asked)


def offload_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that this run cannot have, and why; what sections cannot be together is in spec/rules.py."""
    section = config.offload
    if section.host_budget is not None:
        try:
            parse_size(section.host_budget, HOST_BUDGET)
        except ConfigError as error:
            yield HOST_BUDGET, str(error)
