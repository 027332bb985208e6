"""What a plan knows of images: those of a run's data, where its file is given. Torch is loaded for these alone."""

from __future__ import annotations

from pathlib import Path

from zero3d.config import Config
from zero3d.tools.plan.images import FileImages

PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # of a folder whose model takes images


def images_of(config: Config | None) -> tuple[FileImages | None, str]:
    """Return what a sample of a run's data says of images; None where it says nothing, and why."""
    if config is None:
        return None, ""
    if not any((Path(config.model.path).expanduser() / name).is_file() for name in PROCESSORS):
        return None, f" ({config.model.path} has no processor)"
    from zero3d.tools.sim.file_images import file_images

    return file_images(config)
