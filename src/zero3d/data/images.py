"""Images as a model takes them: the folder's own processor, and the tokens that stand for an image.

    "USER: <image> What?"  -- expand -->  "USER: <image><image>... What?"  -- tokenizer -->  USER : [image] x 576 What ?

The whole text is tokenized at once, as that processor does it: tokens of an image may merge with what is around it.
How many tokens an image has, and which stand around them, is what the processor of the model says of an image of that
size (`replace_image_token`); sizes are read from headers, and a size is asked about once. Pixels are made of one
document at a time, as the processor's own call takes a conversation, and joined when a batch is (image_rules.py).

A processor's class is that of the folder, and what it makes is found by calling it: families have no code of their own.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.data.borders import Span
from zero3d.data.image_files import BadImage
from zero3d.data.image_rules import Outputs, Rule, Rules, find_rules
from zero3d.data.processor_sizes import check_sizes
from zero3d.data.tokenizers import is_panic
from zero3d.errors import ConfigError
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.document_positions import DocumentPositions
from zero3d.models.foreign_code import no_foreign_code, refuse_code_in

FILES = ("processor_config.json", "preprocessor_config.json")
VIDEOS = "video_preprocessor_config.json"
PIXELS = "images"  # the entry of a sample that has what the processor made of each of its documents with images
KINDS = (*TOLD_APART, "moe_mm_token_type_ids")  # what tells tokens of images from others
PACKAGES = ("torchvision", "num2words", "timm", "sentencepiece")  # which some processors need beside Pillow
SIDES = (1, 2, 4, 8, 16, 28, 32, 56, 64, 112, 224, 448)  # pixels of a blank image: the first that a processor takes
SETTINGS = ("size", "crop_size", "patch_size", "merge_size", "temporal_patch_size", "image_seq_length", "image_seq_len",
            "num_additional_image_tokens", "vision_feature_select_strategy", "image_grid_pinpoints")  # fmt: skip
LONGEST = 300  # characters of an error of transformers
Size = tuple[int, int]  # width, height


class _Found(NamedTuple):
    """What calling the processor has shown.

    rules   what its outputs belong to
    image   the token that the features of images replace
    apart   whether the tokens of an image are the same whichever others its document has
    """

    rules: Rules
    image: int
    apart: bool


class Vision:
    """The processor of a model's folder. Pickling carries the path and what was found: a worker opens it again.

    takes      names of what the model's forward takes
    positions  makes those of a document of a packed row [4, tokens]; None where they are its places
    Raises ConfigError for a folder without one, or with one that cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        takes: frozenset[str],
        positions: DocumentPositions | None = None,
        found: _Found | None = None,
    ) -> None:
        self.folder, self.takes = folder, takes
        self.positions = positions
        self._processor = open_processor(folder)
        check_sizes(self._processor.image_processor, folder, FILES)
        self.tokenizer = self._processor.tokenizer
        self._options = self._processor._merge_kwargs(
            self._processor.valid_processor_kwargs, tokenizer_init_kwargs=self.tokenizer.init_kwargs
        )["images_kwargs"] | {"return_tensors": "pt"}
        self.mark_text = _mark(self._processor, folder)
        self._expansions: dict[Size, tuple[str, int]] = {}
        self._found = self._find() if found is None else found
        self.image_text = str(self.tokenizer.convert_ids_to_tokens(self.image))

    def __reduce__(self) -> tuple[type[Vision], tuple[Path, frozenset[str], DocumentPositions | None, _Found]]:
        return Vision, (self.folder, self.takes, self.positions, self._found)

    @property
    def image(self) -> int:
        """The token that the features of images replace."""
        return self._found.image

    @property
    def rules(self) -> Rules:
        """What the processor's outputs belong to."""
        return self._found.rules

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
                "as many, and no text may have that mark itself"
            )
        made, found = pieces[0], _within(answers, 0, len(pieces[0]), 0)
        at = len(pieces[0])  # in `text`
        for piece, expansion in zip(pieces[1:], self._expanded(sizes), strict=True):
            at += len(self.mark_text)
            made += expansion
            found += _within(answers, at, at + len(piece), len(made) - at)
            made += piece
            at += len(piece)
        return made, found

    def tokens(self, sizes: Sequence[Size]) -> int:
        """Return how many tokens the images of a document have that features replace."""
        return sum(expansion.count(self.image_text) for expansion in self._expanded(sizes))

    def patches(self, sizes: Sequence[Size]) -> int:
        """Return how many patches the processor makes of a document's images, or tiles where it makes those."""
        return sum(self._of(size)[1] for size in sizes)

    def _expanded(self, sizes: Sequence[Size]) -> list[str]:
        """Return what stands for each image of a document."""
        if not self._found.apart and len(sizes) > 1:
            texts = self._call([[white(size) for size in sizes]])[1]
            if len(texts) != len(sizes):
                raise ValueError(f"{type(self._processor).__name__} takes one image a conversation, not {len(sizes)}")
            return texts
        return [self._of(size)[0] for size in sizes]

    def _of(self, size: Size) -> tuple[str, int]:
        """Return what stands for an image of this size by itself, and its patches; asked about once."""
        if size not in self._expansions:
            made, texts = self._call([[white(size)]])
            self._expansions[size] = texts[0], _patches(made["pixel_values"].shape, self.rules.of["pixel_values"])
        return self._expansions[size]

    def outputs(self, images: Sequence[Any]) -> Outputs:
        """Return what the processor makes of a document's decoded images. Raises BadImage where it raises an error."""
        made = self._call([list(images)])[0]
        return {name: made[name] for name in self.rules.of if name in made}

    def pixels(self, documents: Sequence[Outputs]) -> dict[str, Tensor]:
        """Return what the model takes of documents' outputs: pixel_values, and sizes or masks where it has some."""
        joined = self.rules.concatenate(documents)
        return {name: value for name, value in joined.items() if name in self.takes}

    def blank(self) -> tuple[dict[str, Tensor], Size]:
        """Return what the model takes of a white image, the smallest with a token, and its size. Raises BadImage."""
        raised = BadImage(f"{type(self._processor).__name__} gives a white image no token")
        for side in SIDES:
            try:
                if self.tokens([(side, side)]):
                    return self.pixels([self.outputs([white((side, side))])]), (side, side)
            except BadImage as error:
                raised = error
        raise raised

    def settings(self) -> str:
        """Say what the processor is set to, of what decides the form of images and how many tokens they have."""
        told: dict[str, Any] = {}
        for part in (self._processor.image_processor, self._processor):
            told |= {name: value for name in SETTINGS if (value := getattr(part, name, None)) is not None}
        return ", ".join(f"{name} {_plain(value)}" for name, value in told.items())

    def kinds(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return int64 [tokens] that tell tokens of images from those of texts, where the model takes such.

        Those of a processor that takes a suffix tell what is given (0) from what is written (1), which sees only what
        comes before.
        """
        names = [name for name in KINDS if name in self.takes]
        if "suffix" in inspect.signature(type(self._processor).__call__).parameters:
            written = (labels >= 0).cumsum(0) > 0
            return {name: written.long() for name in names}
        return {name: self._kind(name, ids) for name in names}

    def _kind(self, name: str, ids: Tensor) -> Tensor:
        told = getattr(self._processor, f"create_{name}", None)
        if told is None or len(inspect.signature(told).parameters) > 1:
            return (ids == self.image).long()
        return ids.new_tensor(told([ids.tolist()])[0])

    def shown(self, sample: dict[str, Tensor], documents: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return a sample of input_ids and labels with what tells images' tokens from others, and its images' outputs.

        documents  the decoded images of each document of the sample
        Raises BadImage.
        """
        kinds = self.kinds(sample["input_ids"], sample["labels"])
        return sample | kinds | {PIXELS: [self.outputs(images) for images in documents if images]}

    def stacked(
        self, samples: Sequence[dict[str, Any]], stack: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return samples `stack`ed to a micro-batch, with the pixels of all images in their order."""
        plain = [{name: value for name, value in sample.items() if name != PIXELS} for sample in samples]
        return stack(plain) | self.pixels([outputs for sample in samples for outputs in sample[PIXELS]])

    def _find(self) -> _Found:
        expansions: list[list[str]] = []

        def process(documents: list[list[Any]]) -> Mapping[str, Any]:
            made, texts = self._call(documents)
            expansions.append(texts)
            return made

        try:
            rules = find_rules(process, self.takes)
        except ValueError as error:
            raise ConfigError(f"the processor of {self.folder} cannot be used: {error}{_remedy(error)}.") from error
        if "pixel_values" not in rules.of:
            raise ConfigError(f"the processor of {self.folder} cannot be used: it makes no pixel_values.")
        first, second, together, *_ = expansions
        return _Found(rules, self._image_token(second[0]), together == first + second)

    def _image_token(self, expansion: str) -> int:
        """Return the token that features replace: of those that stand for an image, the one there are most of."""
        met = Counter(self.tokenizer(expansion, add_special_tokens=False)["input_ids"])
        met.pop(self.tokenizer.unk_token_id, None)
        named = [token for token in self._processor.image_token_ids if token in met]
        if not met:
            raise ConfigError(f"the tokenizer of {self.folder} has none of the tokens that stand for an image.")
        return int(max(named or met, key=met.__getitem__))

    def _call(self, documents: list[list[Any]]) -> tuple[Mapping[str, Any], list[str]]:
        """Return what the processor makes of documents' images, and what stands for each image. Raises BadImage."""
        processor = self._processor
        try:
            made, texts = processor._process_images(documents, **self._options)
            if getattr(processor, "default_use_image_id", False):  # MiniCPM-V numbers the images of each text
                marks = [self.mark_text * len(images) for images in documents]
                texts = processor._prepend_local_ids(marks, texts, self.mark_text)
            return {name: _tensor(value) for name, value in made.items()}, list(map(str, texts))
        except NotImplementedError as error:
            raise ConfigError(
                f"the processor of {self.folder} cannot be used: {type(processor).__name__} does not say which tokens "
                "stand for an image."
            ) from error
        except Exception as error:  # whatever a processor does
            sizes = ", ".join("{} x {}".format(*image.size) for images in documents for image in images)
            raise BadImage(
                f"{type(processor).__name__} of {self.folder} raised {type(error).__name__} for an image of {sizes} "
                f"pixels: {_in_short(error)}"
            ) from error


def _plain(value: Any) -> str:
    """Return a setting in words: of a size those of its numbers that are set."""
    numbers = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if not numbers:
        return str(value)
    return f"({', '.join(f'{name} {number}' for name, number in numbers.items() if number is not None)})"


def _mark(processor: Any, folder: Path) -> str:
    """Return what stands for an image in a text of the chat template."""
    for name in ("image_placeholder_token", "image_token"):
        if isinstance(mark := getattr(processor, name, None), str):
            return mark
    raise ConfigError(
        f"the processor of {folder} cannot be used: {type(processor).__name__} has no token that stands for an image."
    )


def _tensor(value: Any) -> Any:
    """Return a list of whole numbers, in which some processors count, as a tensor; anything else as it is."""
    numbers = isinstance(value, list) and value and all(type(number) is int for number in value)
    return torch.tensor(value) if numbers else value


def _patches(shape: Sequence[int], rule: Rule) -> int:
    """Return how many patches pixel_values of this shape have, or tiles.

    As another output counts them; else of [.., patches, numbers] or [.., tiles, channels, height, width].
    """
    if rule.counts is not None:
        return int(shape[rule.dim] / rule.per)
    return prod(shape[:-1] if len(shape) <= 3 else shape[:-3])


def white(size: Size) -> Any:
    """Return a white image."""
    from PIL import Image

    return Image.new("RGB", size, "white")


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
        raise ConfigError(
            f"the processor of {folder} cannot be used: {type(error).__name__}: {_in_short(error)}{_remedy(error)}"
        ) from error


def _remedy(error: BaseException) -> str:
    """Return what to type where an error speaks of a package that is missing."""
    said = str(error).lower()
    missing = [name for name in PACKAGES if name in said and find_spec(name) is None]
    return f" (type pip install {' '.join(missing)})" if missing else ""


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:LONGEST]


def _build(folder: Path) -> Any:
    """Return an object of the folder's own class, which takes the parts that need torchvision for granted."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    refuse_code_in(folder)
    with no_foreign_code():
        model_type = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
        image_processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    own = _own_class(_class_of(folder, model_type))
    takes = inspect.signature(own.__init__).parameters
    settings = {"chat_template": tokenizer.chat_template} | _settings(folder)
    given = {"image_processor": image_processor, "tokenizer": tokenizer}
    parts = {name: given[name] if name in given else _Unused(_video_settings(folder)) for name in own.get_attributes()}
    # A class checks that its video processor is one, which needs torchvision.
    unchecked = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
    made = type(own.__name__, (own,), unchecked)(
        **parts, **{name: value for name, value in settings.items() if name in takes}
    )
    made.chat_template = settings["chat_template"]
    return made


class _Unused:
    """Stands for a part of a processor that makes nothing of images, such as that for videos: its settings alone."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._settings.get(name)


def _own_class(name: str) -> Any:
    """Return transformers' processor class of this name, also where it is hidden since a package is missing."""
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,
        model_type_to_module_name,
        processor_class_from_name,
    )

    found = processor_class_from_name(name)
    if found is None:
        raise ValueError(f"transformers has no {name}")
    if not getattr(found, "is_dummy", False):
        return found
    for model_type, processor in PROCESSOR_MAPPING_NAMES.items():
        room = model_type_to_module_name(model_type)
        module = f"transformers.models.{room}.processing_{room}"
        if processor == name and find_spec(module) is not None:
            return getattr(import_module(module), name)
    return found


def _class_of(folder: Path, model_type: str) -> str:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    for file in FILES:
        name = _read(folder / file).get("processor_class")
        if isinstance(name, str):
            return name
    return str(PROCESSOR_MAPPING_NAMES[model_type])


def _settings(folder: Path) -> dict[str, Any]:
    """Return what processor_config.json says of the processor itself, and the chat template of the folder."""
    settings = _read(folder / FILES[0])
    template, older = folder / "chat_template.jinja", folder / "chat_template.json"
    if template.is_file():
        settings["chat_template"] = template.read_text()
    else:
        settings |= _read(older)
    parts = ("processor_class", "image_processor", "video_processor", "tokenizer", "feature_extractor", "auto_map")
    return {key: value for key, value in settings.items() if key not in parts}


def _video_settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = _read(folder / FILES[0]).get("video_processor") or _read(folder / VIDEOS)
    return settings


def _read(file: Path) -> dict[str, Any]:
    """Return what a JSON file says; nothing where there is none."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found
