"""Text that a loaded model continues: prompts of texts, chats and images, and tokens one after another.

    text                 the tokenizer's ids, with the token that starts a text
    --chat               the chat template with the text as the user's message, up to where the answer begins
    --image              the same with images before the text, as training makes them (data/images.py)

Each text is continued by itself, so that it does not depend on the others.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig

from zero3d.checkpoint.forms import ADAPTER, WHOLE
from zero3d.data.chat import ChatTemplate
from zero3d.data.image_files import decode, require_pillow, size_of
from zero3d.data.images import FILES, Vision
from zero3d.data.tokenizers import BYTES, HfTokenizer, Tokenizer, load_tokenizer
from zero3d.errors import ConfigError, OutOfBudget, short
from zero3d.models.bases import config_number, sees_images
from zero3d.models.open import read_config
from zero3d.models.packing import inner_model
from zero3d.precision import Precision
from zero3d.tools.cli.generate_source import Source
from zero3d.train.export_places import ExportPlace
from zero3d.train.exported_folder import load_export

POSITIONS = "max_position_embeddings"
BEFORE = 8  # tokens of a prompt that are read with those after it
OF_A_RUN = ": set data.tokenizer."  # ends an error of a tokenizer, and is no help here
TYPE_ONE = "type a folder with tokenizer.json, or bytes where tokens are bytes."
CUT = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character decode to


class Choices(NamedTuple):
    """Holds what the command line says of prompts and tokens.

    tokens       the most that are made
    temperature  0: the most likely token each time; else tokens are drawn
    images       their files
    """

    tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    chat: bool = False
    images: tuple[str, ...] = ()

    @classmethod
    def of(cls, typed: Mapping[str, Any]) -> Choices:
        """Return what options of the command line say, by their names there."""
        known = {name: typed[name] for name in cls._fields if name in typed}
        return cls(tokens=typed["max_tokens"], images=tuple(typed["image"]), **known)


class Prompt(NamedTuple):
    """Holds what a model continues: ids [1, tokens], and what it takes of images beside them."""

    ids: Tensor
    images: Mapping[str, Tensor]


class Generate(Protocol):
    """Continues ids [1, tokens]; returns all of them."""

    def __call__(self, ids: Tensor, **options: Any) -> Tensor: ...


def tokenizer_of(source: Source, typed: str | None) -> Tokenizer:
    """Load the tokenizer that was typed, or that of the folder. Raises ConfigError, also for an unreadable config."""
    read_config(source.base or source.folder)  # which a tokenizer of the folder needs, too, and would be blamed for
    if typed is not None:
        return _typed_tokenizer(typed)
    if source.tokenizer is not None:
        return load_tokenizer(source.tokenizer)
    folders = [source.folder, *([] if source.base is None else [source.base])]
    for folder in folders:
        try:
            return load_tokenizer(None, str(folder))
        except ConfigError as error:
            reason = str(error).removesuffix(OF_A_RUN)
    raise ConfigError(
        f"{source.said} has no tokenizer ({reason}): type --tokenizer FOLDER, or --tokenizer bytes where tokens are "
        "bytes."
    )


def _typed_tokenizer(name: str) -> Tokenizer:
    """Load what --tokenizer names. Raises ConfigError, which speaks of that."""
    if name != BYTES and not os.path.isdir(os.path.expanduser(name)):
        raise ConfigError(f"--tokenizer {short(name)}: no folder of that name, and nothing is downloaded: {TYPE_ONE}")
    try:
        return load_tokenizer(name)
    except ConfigError as error:
        raise ConfigError(f"--tokenizer: {str(error).replace(OF_A_RUN, f': {TYPE_ONE}')}") from error


def load_model(source: Source, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Load the model by transformers, an adapter by PEFT on its base. Raises ConfigError, OutOfBudget."""
    kind = WHOLE if source.base is None else ADAPTER
    place = ExportPlace(source.folder.parent, kind, source.folder.name)
    of_run: Any = "auto" if source.precision is None else Precision.of(source.precision).dtype
    try:
        model = load_export(place, source.base, dtype or of_run, source.part)
        return (model if dtype is None else model.to(dtype)).to(device).eval()
    except torch.OutOfMemoryError as error:
        raise no_room(device) from error
    except SafetensorError as error:
        raise ConfigError(
            f"{source.said} cannot be loaded: a file of its weights is damaged ({_in_short(error)}): copy or export it "
            "again."
        ) from error
    except (OSError, ValueError, ImportError) as error:  # as transformers says what is odd in a folder
        raise ConfigError(f"{source.said} cannot be loaded: {type(error).__name__}: {_in_short(error)}") from error


def no_room(device: torch.device) -> OutOfBudget:
    """Return the error for a model that does not fit on a device."""
    return OutOfBudget(f"{device} has no room for the model: type --ranks N to cut it over N devices, or --device cpu.")


# --- prompts --------------------------------------------------------------------------------------


def prompts_of(
    texts: Sequence[str], choices: Choices, model: nn.Module, tokenizer: Tokenizer, source: Source
) -> list[Prompt]:
    """Make the prompts of all texts. Raises ConfigError."""
    if choices.images:
        return [_with_images(texts[0], choices, model, source)]
    made = []
    for text in texts:
        ids = _in_chat([{"role": "user", "content": text}], tokenizer) if choices.chat else tokenizer.encode([text])[0]
        made.append(Prompt(torch.tensor([ids], dtype=torch.int64), {}))
    for text, prompt in zip(texts, made, strict=True):
        _check_ids(text, prompt.ids, model, tokenizer)
    return made


def check_chat(tokenizer: Tokenizer) -> None:
    """Refuse --chat where there is no template. Raises ConfigError."""
    if not isinstance(tokenizer, HfTokenizer) or not tokenizer.inner.chat_template:
        raise ConfigError(
            f"--chat: the tokenizer {tokenizer.name} has no chat template: leave --chat out, or type --tokenizer with "
            "the folder of a chat model's (it has chat_template.jinja)."
        )


def _in_chat(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    check_chat(tokenizer)
    try:
        text = ChatTemplate(tokenizer).prompt(messages)
    except ValueError as error:
        raise ConfigError(f"--chat: {error}") from error
    return tokenizer.encode([text], start=False)[0]


def _check_ids(text: str, ids: Tensor, model: nn.Module, tokenizer: Tokenizer) -> None:
    if not ids.numel():
        raise ConfigError(f"the text {short(repr(text))} has no tokens to continue: type at least a character.")
    rows = config_number(model, "vocab_size")
    highest = int(ids.max())
    if rows is not None and highest >= rows:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} gives token {highest:,}, and the model's vocabulary has {rows:,}: it is "
            "another model's. Type --tokenizer with the model's own."
        )


def _with_images(text: str, choices: Choices, model: nn.Module, source: Source) -> Prompt:
    """Return the prompt of a text with images before it, as training makes a conversation with them."""
    inner = inner_model(model)
    takes = frozenset(inspect.signature(inner.forward).parameters)
    if "pixel_values" not in takes or not sees_images(inner):
        raise ConfigError(f"--image: {type(inner).__name__} of {source.said} takes no images: leave --image out.")
    folder = next((each for each in (source.folder, source.base) if each is not None and _has_processor(each)), None)
    if folder is None:
        raise ConfigError(
            f"--image: {source.said} has no processor ({' or '.join(FILES)}): copy that of the model into it "
            "(AutoProcessor.from_pretrained(MODEL).save_pretrained(FOLDER))."
        )
    require_pillow()
    vision = Vision(folder, takes)
    tokenizer = HfTokenizer(vision.tokenizer, str(folder), "")
    try:
        files = [{"bytes": Path(image).read_bytes(), "path": image} for image in choices.images]
        pictures, sizes = ([of(Path(), file) for file in files] for of in (decode, size_of))
        rendered = _rendered(text, len(pictures), vision, tokenizer)
        expanded, _ = vision.expand(rendered, [], sizes)
        template = bool(vision.template or vision.tokenizer.chat_template)
        ids = torch.tensor(tokenizer.encode([expanded], start=not template)[0])
        kinds = vision.kinds(ids, torch.full_like(ids, -100))
        pixels = vision.pixels([vision.outputs(pictures)])
    except OSError as error:
        raise ConfigError(f"--image {error.filename}: it cannot be read ({error.strerror}).") from error
    except ValueError as error:  # a BadImage, or what the template refuses
        raise ConfigError(f"--image: {error}.") from error
    _check_ids(text, ids, model, tokenizer)
    return Prompt(ids[None], {**{name: each[None] for name, each in kinds.items()}, **pixels})


def _has_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES) and (folder / "config.json").is_file()


def _rendered(text: str, images: int, vision: Vision, tokenizer: HfTokenizer) -> str:
    """Return the user's message of images and a text by the chat template; without one the images' marks before it."""
    template = vision.template or vision.tokenizer.chat_template
    if not template:
        return vision.mark_text * images + "\n" * bool(images) + text
    content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
    return ChatTemplate(tokenizer, vision.template).prompt([{"role": "user", "content": content}])


# --- tokens ---------------------------------------------------------------------------------------


def reader(prompt: Prompt, tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Return what makes text of tokens after a prompt: its last ones are read with them, since some join a word."""
    last = [int(token) for token in prompt.ids[0, -BEFORE:]]
    before = tokenizer.decode(last)

    def read(ids: Sequence[int]) -> str:
        text = tokenizer.decode([*last, *ids])
        return text[len(before) :] if text.startswith(before) else tokenizer.decode(ids)

    return read


class Printer:
    """Hands on text as tokens come, in whole characters: what transformers calls a streamer, given the prompt first."""

    def __init__(self, read: Callable[[Sequence[int]], str], write: Callable[[str], None]) -> None:
        self._read, self._write = read, write
        self._ids: list[int] | None = None
        self._shown = 0

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token after another."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.flatten().tolist()
        text = self._read(self._ids)
        if not text.endswith(CUT):
            self._show(text)

    def end(self) -> None:
        """Show what is left."""
        self._show(self._read(self._ids or []))

    def _show(self, text: str) -> None:
        self._write(text[self._shown :])
        self._shown = max(self._shown, len(text))


def continued(
    generate: Generate, model: nn.Module, prompt: Prompt, choices: Choices, streamer: Printer | None = None
) -> list[int]:
    """Return the tokens that come after a prompt. Raises ConfigError, OutOfBudget."""
    length = prompt.ids.shape[1]
    options = generation(model, choices, room_of(model, length, choices.tokens))
    torch.manual_seed(choices.seed)
    mask = torch.ones_like(prompt.ids)
    try:
        out = generate(prompt.ids, attention_mask=mask, generation_config=options, streamer=streamer, **prompt.images)
    except torch.OutOfMemoryError as error:
        raise no_room(next(model.parameters()).device) from error
    return [int(token) for token in out[0, length:]]


def room_of(model: nn.Module, length: int, tokens: int) -> int:
    """Return how many tokens may come after a prompt of `length`. Raises ConfigError where none may."""
    positions = config_number(model, POSITIONS)
    if positions is None or length + tokens <= positions:
        return tokens
    if length >= positions:
        raise ConfigError(
            f"the text has {length:,} tokens and the model {positions:,} positions, so none is left to go on: shorten "
            f"it by {length - positions + 1:,} tokens or more."
        )
    return positions - length


def generation(model: Any, choices: Choices, tokens: int) -> GenerationConfig:
    """Return the model's own settings, where a text ends among them, with what the command line chooses."""
    own = getattr(model, "generation_config", None)
    made: GenerationConfig = GenerationConfig() if own is None else copy.deepcopy(own)
    drawn = choices.temperature > 0
    made.do_sample = drawn
    made.temperature = choices.temperature if drawn else None
    made.top_k = (choices.top_k or 0) if drawn else None
    made.top_p = (choices.top_p or 1.0) if drawn else None
    for name in ("min_p", "typical_p"):
        setattr(made, name, None)
    made.max_new_tokens, made.max_length = tokens, None
    if made.pad_token_id is None:
        ends = made.eos_token_id
        made.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return made


# --- what is printed ------------------------------------------------------------------------------


def say(
    generate: Generate,
    model: nn.Module,
    texts: Sequence[str],
    typed: Mapping[str, Any],
    tokenizer: Tokenizer,
    source: Source,
    first: bool = True,
) -> None:
    """Print what comes after each text: token by token on a terminal, else when it is whole. Notes are on stderr.

    Of several texts each has a line with its beginning, as head(1) names files.

    typed  options of the command line by their names
    first  whether this process prints, of several ranks
    """
    choices = Choices.of(typed)
    made: list[dict[str, Any]] = []
    as_text = first and not typed["json"]
    live = as_text and sys.stdout.isatty()
    for text, prompt in zip(texts, prompts_of(texts, choices, model, tokenizer, source), strict=True):
        if first:
            _note_room(model, prompt.ids.shape[1], choices.tokens)
        if as_text and len(texts) > 1:
            print(f"{chr(10) * bool(made)}==> {short(text)} <==", flush=True)
        read = reader(prompt, tokenizer)
        ids = continued(generate, model, prompt, choices, Printer(read, _write) if live else None)
        made.append({"text": text, "continuation": read(ids), "tokens": len(ids)})
        if as_text:
            print("" if live else made[-1]["continuation"], flush=True)
    if first and typed["json"]:
        print(json.dumps({"source": source.said, "step": source.step, "texts": made}), flush=True)


def _note_room(model: nn.Module, length: int, tokens: int) -> None:
    """Print a line on stderr if the model has positions for fewer tokens than were asked for."""
    room = room_of(model, length, tokens)
    if room < tokens:
        why = f"the text has {length:,} and the model {length + room:,} positions"
        print(f"at most {room:,} tokens, not {tokens:,}: {why}", file=sys.stderr, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
