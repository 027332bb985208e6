"""Images as a model takes them: the folder's own processor, and the tokens that stand for an image.

    "USER: <image> What?"  -- expand -->  "USER: <image><image>... What?"  -- tokenizer -->  USER : [image] x 576 What ?

The whole text is tokenized at once, as that processor does it: tokens of an image may merge with what is around it.
How many tokens an image has, and which stand around them, is what the processor of the model says of an image of that
size (`replace_image_token`); sizes are read from headers, and a size is asked about once. Pixels are made when a batch
is: `pixels` calls the folder's image processor in the form that needs no torchvision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from zero3d.data.borders import Span
from zero3d.data.tokenizers import is_panic
from zero3d.errors import ConfigError
from zero3d.models.foreign_code import no_foreign_code, refuse_code_in

FILES = ("processor_config.json", "preprocessor_config.json")
PIXELS = "images"  # the entry of a sample that has its decoded images
LONGEST = 300  # characters of an error of transformers
Size = tuple[int, int]  # width, height


class Vision:
    """The processor of a model's folder. Pickling carries the path: a worker opens it again.

    takes   names of what the model's forward takes
    Raises ConfigError for a folder without one, or with one that cannot be used.
    """

    def __init__(self, folder: Path, takes: frozenset[str]) -> None:
        self.folder, self.takes = folder, takes
        self._processor = open_processor(folder)
        self._options = dict(getattr(type(self._processor), "images_kwargs", None) or {})
        self._expansions: dict[Size, str] = {}
        self._nested = type(self._processor.image_processor).__name__.startswith("Idefics3")
        tokenizer = self.tokenizer = self._processor.tokenizer
        self.mark_text = str(self._processor.image_token)
        self.mark = int(tokenizer.convert_tokens_to_ids(self.mark_text))
        inner = getattr(tokenizer, "image_token_id", None)
        self.image = self.mark if inner is None or "gemma3" not in self._kind else int(inner)

    def __reduce__(self) -> tuple[type[Vision], tuple[Path, frozenset[str]]]:
        return Vision, (self.folder, self.takes)

    @property
    def _kind(self) -> str:
        return type(self._processor).__name__.lower()

    @property
    def template(self) -> str | None:
        """The chat template that comes with the processor."""
        template: str | None = self._processor.chat_template
        return template

    @property
    def fingerprint(self) -> str:
        """What decides tokens and pixels of a conversation with images."""
        texts = [(self.folder / name).read_text() for name in FILES if (self.folder / name).is_file()]
        return hashlib.sha256(json.dumps([type(self._processor).__name__, self.template, *texts]).encode()).hexdigest()[
            :16
        ]

    def expand(self, text: str, answers: Sequence[Span], sizes: Sequence[Size]) -> tuple[str, list[Span]]:
        """Put each image's tokens where its mark is in a rendered text; return it, and where the answers are then.

        Nothing of an image is of an answer. Raises ValueError where marks and images are not as many.
        """
        pieces = text.split(self.mark_text)
        if len(pieces) - 1 != len(sizes):
            raise ValueError(
                f"the chat template made {len(pieces) - 1} marks {self.mark_text} of {len(sizes)} images: they must be "
                "as many"
            )
        made, found = pieces[0], _within(answers, 0, len(pieces[0]), 0)
        at = len(pieces[0])  # in `text`
        for piece, size in zip(pieces[1:], sizes, strict=True):
            at += len(self.mark_text)
            made += self._expansion(size)
            found += _within(answers, at, at + len(piece), len(made) - at)
            made += piece
            at += len(piece)
        return made, found

    def _expansion(self, size: Size) -> str:
        """Return what stands for an image of this size."""
        if size not in self._expansions:
            from PIL import Image

            made = self._process([Image.new("RGB", size)])
            self._expansions[size] = str(self._processor.replace_image_token(made, 0))
        return self._expansions[size]

    def pixels(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """Return what the model takes of decoded images: pixel_values, and sizes or masks where it has some."""
        made = self._process(images)
        return {name: value for name, value in made.items() if name in self.takes and isinstance(value, Tensor)}

    def kinds(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return int64 [tokens] that tell tokens of images from those of texts, where the model takes such.

        PaliGemma's tell what it is given (0) from what it writes (1), which sees only what comes before.
        """
        if "paligemma" in self._kind:
            written = (labels >= 0).cumsum(0) > 0
            return {"token_type_ids": written.long()} if "token_type_ids" in self.takes else {}
        names = [name for name in ("token_type_ids", "mm_token_type_ids") if name in self.takes]
        return {name: (ids == self.image).long() for name in names}

    def shown(self, sample: dict[str, Tensor], images: Sequence[Any]) -> dict[str, Any]:
        """Return a sample of input_ids and labels with what tells images' tokens from others, and decoded images."""
        return sample | self.kinds(sample["input_ids"], sample["labels"]) | {PIXELS: images}

    def stacked(
        self, samples: Sequence[dict[str, Any]], stack: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return samples `stack`ed to a micro-batch, with the pixels of all images in their order."""
        plain = [{name: value for name, value in sample.items() if name != PIXELS} for sample in samples]
        images = [image for sample in samples for image in sample[PIXELS]]
        return stack(plain) | (self.pixels(images) if images else {})

    def _process(self, images: Sequence[Any]) -> Any:
        given = [[image] for image in images] if self._nested else list(images)
        return self._processor.image_processor(given, return_tensors="pt", **self._options)


def _within(spans: Sequence[Span], start: int, stop: int, shift: int) -> list[Span]:
    """Return what of spans lies within start to stop, shifted."""
    cut = [(max(a, start), min(b, stop)) for a, b in spans]
    return [(a + shift, b + shift) for a, b in cut if a < b]


def open_processor(folder: Path) -> Any:
    """Open a model folder's processor without torchvision; of video processors nothing is used. Raises ConfigError."""
    if not any((folder / name).is_file() for name in FILES):
        raise ConfigError(
            f"the data have images, and {folder} has no processor ({' or '.join(FILES)}): give model.path a folder "
            "that the model's processor was saved in, too (processor.save_pretrained)."
        )
    try:
        return _build(folder)
    except BaseException as error:  # whatever is odd in its files
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        line = " ".join(str(error).split())[:LONGEST]
        raise ConfigError(f"the processor of {folder} cannot be used: {type(error).__name__}: {line}") from error


def _build(folder: Path) -> Any:
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import processor_class_from_name

    refuse_code_in(folder)
    with no_foreign_code():
        kind = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
        image_processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    settings = _settings(folder)
    if kind in ("internvl", "qwen2_vl", "qwen2_5_vl"):
        settings.setdefault("chat_template", tokenizer.chat_template)
        return (InternVL if kind == "internvl" else QwenVL)(image_processor, tokenizer, settings)
    return processor_class_from_name(_class_of(folder, kind))(image_processor, tokenizer, **settings)


class QwenVL:
    """Does what transformers' Qwen2VLProcessor does for images; that one needs torchvision, for videos."""

    images_kwargs: Mapping[str, Any] = {}

    def __init__(self, image_processor: Any, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = settings["chat_template"]
        self.image_token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"

    def replace_image_token(self, made: Mapping[str, Any], index: int) -> str:
        """Return a token for every merge_size x merge_size patches."""
        patches = int(made["image_grid_thw"][index].prod())
        return str(self.image_token * (patches // self.image_processor.merge_size**2))


class InternVL:
    """Does what transformers' InternVLProcessor does for images; that one needs torchvision, for videos."""

    images_kwargs: Mapping[str, Any] = {"crop_to_patches": True}

    def __init__(self, image_processor: Any, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = settings["chat_template"]
        self.image_token = tokenizer.context_image_token
        self._around = tokenizer.start_image_token, tokenizer.end_image_token
        self._tokens = settings.get("image_seq_length", 256)

    def replace_image_token(self, made: Mapping[str, Any], index: int) -> str:
        """Return as many tokens for every patch as its settings say, and what stands around them."""
        first, last = self._around
        return f"{first}{self.image_token * (self._tokens * int(made['num_patches'][index]))}{last}"


def _class_of(folder: Path, model_type: str) -> str:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    for file in FILES:
        if (folder / file).is_file():
            name = json.loads((folder / file).read_text()).get("processor_class")
            if isinstance(name, str):
                return name
    return str(PROCESSOR_MAPPING_NAMES[model_type])


def _settings(folder: Path) -> dict[str, Any]:
    """Return what processor_config.json says of the processor itself, and the chat template of the folder."""
    file = folder / FILES[0]
    settings = json.loads(file.read_text()) if file.is_file() else {}
    parts = ("processor_class", "image_processor", "video_processor", "tokenizer", "feature_extractor", "auto_map")
    settings = {key: value for key, value in settings.items() if key not in parts}
    template, older = folder / "chat_template.jinja", folder / "chat_template.json"
    if template.is_file():
        settings["chat_template"] = template.read_text()
    elif older.is_file():
        settings |= json.loads(older.read_text())
    return settings
