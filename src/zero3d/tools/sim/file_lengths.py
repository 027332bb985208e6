"""How many tokens the sequences of a run's data have, by a sample of its records.

    SAMPLE records (sampled_records.py) -> tokens by the run's tokenizer, and by the processor
    of a folder that takes images, cut at data.length

Text without packing is cut into sequences of data.length: its pieces are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from zero3d.config import Config
from zero3d.data.encode import Encoder
from zero3d.data.files import FILL_ME, STDLIB
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.images import KINDS, Vision
from zero3d.data.records import Pictured, Record
from zero3d.data.tokenizers import Tokenizer, load_tokenizer
from zero3d.errors import ConfigError, Zero3dError
from zero3d.models.places import folder_of
from zero3d.tools.plan.lengths import Lengths
from zero3d.tools.sim.sampled_records import sampled

SAMPLE = 512  # records that are looked at


def lengths_of(config: Config) -> tuple[Lengths | None, str]:
    """Return the lengths of a sample of the run's data; None where they decide nothing or nobody knows, and why."""
    data = config.data
    if data.packing or data.train == (STDLIB,) or FILL_ME in data.train:
        return None, ""
    try:
        tokenizer = load_tokenizer(data.tokenizer, folder_of(config.model))
        tokens = sorted(_lengths(sampled(config, SAMPLE), config, tokenizer))
    except (Zero3dError, OSError, ValueError) as error:
        return None, f"its data could not be read ({str(error).splitlines()[0].rstrip('.')})"
    if not tokens:
        return None, "no record of its data that was looked at could be used"
    return Lengths(tuple(tokens), data.length, data.group_by_length), ""


def _lengths(found: list[tuple[Path, Record]], config: Config, tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the tokens of each sequence that these records make."""
    encoders: dict[Path, Encoder] = {}
    vision = _vision(config, found)
    longest, pieces = config.data.length, 0
    for folder, record in found:
        if folder not in encoders:
            images = None if vision is None else ImageTokens(tokenizer, vision, folder, files=False)
            encoders[folder] = Encoder(tokenizer, skip=True, images=images)
        with suppress(Zero3dError, OSError, ValueError):
            for document in encoders[folder].encode([record]):
                if document.example:
                    yield min(len(document.ids), longest)
                    continue
                pieces += len(document.ids)
                if document.last:
                    yield from [longest] * (pieces // longest)
                    yield from [pieces % longest] * (pieces % longest > 1)  # one token has no target
                    pieces = 0


def _vision(config: Config, found: list[tuple[Path, Record]]) -> Vision | None:
    """Return the processor of the model's folder, where records have images. Raises ConfigError."""
    if not any(isinstance(record, Pictured) and record.images for _, record in found):
        return None
    where = folder_of(config.model)
    if where is None:
        raise ConfigError(f"the data have images, and {config.model.path} is no folder with a processor")
    return Vision(Path(where), frozenset({"pixel_values", *KINDS}))
