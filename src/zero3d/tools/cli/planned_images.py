"""What a plan knows of images: those of a run's data, where its file is given, and steps that are priced by its data.

Torch is loaded for images alone.
"""

from __future__ import annotations

from pathlib import Path

from zero3d.config import Config
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.images import FileImages, with_mean_patches
from zero3d.tools.plan.lengths import Lengths, with_lengths
from zero3d.tools.plan.spec import Evaluate

PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # of a folder whose model takes images


def evaluated_by(lengths: Lengths | None, pictures: FileImages | None) -> Evaluate:
    """Return what prices plans by a run's own data, as far as that says anything."""
    priced = evaluate if pictures is None else with_mean_patches(evaluate, pictures)
    return priced if lengths is None else with_lengths(priced, lengths)


def images_of(config: Config | None) -> tuple[FileImages | None, str]:
    """Return what a sample of a run's data says of images; None where it says nothing, and why."""
    if config is None:
        return None, ""
    if not any((Path(config.model.path).expanduser() / name).is_file() for name in PROCESSORS):
        return None, f" ({config.model.path} has no processor)"
    from zero3d.tools.sim.file_images import file_images

    return file_images(config)
