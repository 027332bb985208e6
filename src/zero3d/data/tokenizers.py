"""Text to token ids and back: one small interface over bytes and Hugging Face tokenizers.

    ByteTokenizer   a token is a byte; byte 0, which text does not contain, ends a document
    HfTokenizer     any folder that AutoTokenizer loads; nothing is ever downloaded, and no code of a folder runs

Both answer `encode`, `encode_parted`, `decode`, `eos`, `pad`, `size`, `fingerprint` and `save`.

The tokenizers library panics in Rust over some files and texts. `told` makes that a DataError, which the reader of the
data puts the record's place before.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from zero3d.data.borders import Parted, parted, parted_by_prompt, spans_of
from zero3d.errors import ConfigError, DataError, Zero3dError, short
from zero3d.models.foreign_code import no_foreign_code, refuse_code_in

BYTES = "bytes"
QUOTED = 200  # characters of what a library says
SAMPLE = "e\u0301 <|endoftext|>\r\n"  # what tokenizers with rules of their own change
REMEDY = "set data.tokenizer to a folder with tokenizer.json, or to bytes."
FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*/*.jinja")  # whatever a tokenizer may be made of, no weights
OF_A_MODEL = ("config.json", "generation_config.json", "model.safetensors.index.json")  # of these, what is of none


@contextmanager
def told(name: str) -> Iterator[None]:
    """Raise DataError for whatever a tokenizer raises inside, panics of Rust among it, which are no Exception."""
    try:
        yield
    except Zero3dError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise DataError(
                f"the tokenizer {name} fails on this text ({in_short(error)}): leave the text out, or set "
                "data.tokenizer to another folder."
            ) from error
        raise


def is_panic(error: BaseException) -> bool:
    """Return whether this is a panic of Rust, whose class derives from BaseException and is nobody's to import."""
    return type(error).__name__ == "PanicException"


def in_short(error: BaseException) -> str:
    """Return what an error says, in one line with its class."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:QUOTED]}".removesuffix(": ")


OF_BYTES = 1024  # the largest vocabulary for which text is taken to be bytes, where nothing says what it is


class ByteTokenizer:
    """Bytes as tokens; 0 is the end of a document and the padding."""

    name = BYTES
    eos: int | None = 0
    pad = 0
    size = 256
    fingerprint = BYTES

    def encode(self, texts: Sequence[str], start: bool = True) -> list[list[int]]:
        """Return the ids of each text. There is no token that starts one."""
        return [list(text.encode()) for text in texts]

    def encode_parted(self, pairs: Sequence[tuple[str, str]]) -> list[Parted]:
        """Return the ids of each prompt and completion together, and where the completion's begin."""
        return [Parted(list((one + other).encode()), len(one.encode()), False) for one, other in pairs]

    def decode(self, ids: Sequence[int]) -> str:
        """Return printable text; what cannot be shown becomes a replacement character."""
        text = bytes(token for token in ids if 0 < token < self.size).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)

    def save(self, folder: Path) -> str | None:
        """Write a fast tokenizer with the same ids. Return why AutoTokenizer gives others, if it does.

        Raises ImportError.
        """
        from tokenizers import AddedToken, Tokenizer as Fast, decoders, models, pre_tokenizers
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        end = "\0"
        fast = Fast(models.BPE({end: 0} | {shown: byte for byte, shown in enumerate(_shown_bytes()) if byte}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([AddedToken(end, special=True, normalized=False)])
        PreTrainedTokenizerFast(
            tokenizer_object=fast, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
        ).save_pretrained(folder)
        with no_foreign_code():
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if loaded(SAMPLE)["input_ids"] == list(SAMPLE.encode()):
            return None
        return (
            f"AutoTokenizer takes {type(loaded).__name__} for this kind of model, whose ids are no bytes: load the "
            "export's tokenizer with transformers.PreTrainedTokenizerFast"
        )


def _shown_bytes() -> list[str]:
    """Return how a byte-level tokenizer writes each byte: as its visible character, else as one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(256)]


class HfTokenizer:
    """Wraps a Hugging Face tokenizer, `inner`."""

    def __init__(self, inner: Any, name: str, fingerprint: str) -> None:
        self.inner = inner
        self.name = name
        self.fingerprint = fingerprint
        self.eos: int | None = inner.eos_token_id
        self.pad: int = next((i for i in (inner.pad_token_id, inner.eos_token_id) if i is not None), 0)
        self.size = len(inner)

    def encode(self, texts: Sequence[str], start: bool = True) -> list[list[int]]:
        """Return the ids of each text; if `start`, with the tokenizer's special tokens, but never EOS at the end."""
        with told(self.name):
            encoded = self.inner(list(texts), add_special_tokens=start, verbose=False)["input_ids"]
        if not start or self.eos is None:
            return list(encoded)
        return [ids[:-1] if ids and ids[-1] == self.eos else ids for ids in encoded]

    def encode_parted(self, pairs: Sequence[tuple[str, str]]) -> list[Parted]:
        """Return the ids of each prompt and completion together, and where the completion's begin; as `encode` does."""
        texts = [prompt + completion for prompt, completion in pairs]
        with told(self.name):
            if not self.inner.is_fast:
                return [self._parted_by_prompt(*pair) for pair in pairs]
            encoded = self.inner(texts, verbose=False, return_offsets_mapping=True)
            found = []
            for at, (prompt, _) in enumerate(pairs):
                ids, parts = encoded["input_ids"][at], encoded.sequence_ids(at)
                spans = spans_of(texts[at], encoded.tokens(at), encoded["offset_mapping"][at], parts)
                count = self._without_end(ids, parts and parts[-1] is None)
                found.append(parted(ids[:count], spans[:count], len(prompt)))
            return found

    def _parted_by_prompt(self, prompt: str, completion: str) -> Parted:
        whole = self.inner(prompt + completion, verbose=False, return_special_tokens_mask=True)
        ids, added = whole["input_ids"], whole["special_tokens_mask"]
        count = self._without_end(ids, added and added[-1])
        alone = self.inner(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        decode = partial(self.inner.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return parted_by_prompt(ids[:count], added[:count], alone, completion, decode)

    def _without_end(self, ids: Sequence[int], added: bool) -> int:
        """Return how many ids there are without an EOS that the tokenizer has `added` at the end."""
        return len(ids) - bool(added and ids[-1] == self.eos)

    def decode(self, ids: Sequence[int]) -> str:
        """Return text without special tokens."""
        with told(self.name):
            return str(self.inner.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, so that the folder loads with AutoTokenizer."""
        self.inner.save_pretrained(folder)


Tokenizer = ByteTokenizer | HfTokenizer


def load_tokenizer(name: str | None, model: str | None = None) -> Tokenizer:
    """Load the tokenizer of this `name` (bytes or a folder), else that of the model's folder.

    Raises ConfigError where there is none: nothing is downloaded.
    """
    if name == BYTES:
        return ByteTokenizer()
    folder = _folder(name, model)
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase
    except ImportError:
        raise ConfigError(
            f"{_key(name, model)}: a tokenizer needs transformers: type pip install 'zero3d[hf]'."
        ) from None
    refuse_code_in(folder)
    try:
        with no_foreign_code():
            inner = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if isinstance(inner, PreTrainedTokenizerBase):
            return HfTokenizer(inner, str(folder), _fingerprint(folder))
    except BaseException as error:  # every kind of broken folder fails in its own way
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _none_in(folder, why) from error
    raise ConfigError(f"{folder} holds a {type(inner).__name__}, which is not a tokenizer: set data.tokenizer.")


def check_tokenizer(name: str | None, model: str | None) -> None:
    """Refuse the tokenizer of this `name`, else that of the model's folder, where names of files show none.

    Raises ConfigError.
    """
    if name == BYTES:
        return
    folder = _folder(name, model)
    if not any(path.name not in OF_A_MODEL for pattern in FILES for path in folder.glob(pattern)):
        raise _none_in(folder, "it has no tokenizer.json and no other file of one")


def check_template(name: str | None, model: str | None) -> None:
    """Refuse for chats the tokenizer of this `name`, else that of the model's folder, whose files have no template.

    Raises ConfigError.
    """
    if name == BYTES:
        raise no_template(BYTES)
    folder = _folder(name, model)
    config = folder / "tokenizer_config.json"
    if not any(folder.glob("*chat_template*")) and not (config.is_file() and b'"chat_template"' in config.read_bytes()):
        raise no_template(str(folder))


def no_template(name: str) -> ConfigError:
    """Return the error for chats whose tokenizer has no template."""
    return ConfigError(
        f"the data are chat messages, and the tokenizer {name} has no chat template: take a chat model (its folder has "
        "chat_template.jinja), set data.tokenizer to that of one, or give rows with text."
    )


def _folder(name: str | None, model: str | None) -> Path:
    """Return the folder of a tokenizer. Raises ConfigError."""
    if name is None and model is None:
        raise ConfigError(f"the data are text, and the model brings no tokenizer: {REMEDY}")
    folder = os.path.expanduser(name if name is not None else str(model))
    if not os.path.isdir(folder):
        raise ConfigError(f"{_key(name, model)}: no folder of that name, and zero3d does not download: {REMEDY}")
    return Path(folder)


def _none_in(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"{folder} holds no tokenizer that can be loaded ({why}): set data.tokenizer.")


def _key(name: str | None, model: str | None) -> str:
    return f"data.tokenizer={short(name)}" if name is not None else f"the model {model} brings no tokenizer"


def _fingerprint(folder: Path) -> str:
    """Hash the tokenizer's files."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern) if path.is_file()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def check_vocabulary(tokenizer: Tokenizer | None, vocabulary: int, highest: int | None = None) -> None:
    """Refuse a tokenizer, or data whose `highest` id is known, with ids that the model's embedding has no row for."""
    if tokenizer is not None and tokenizer.size > vocabulary:
        raise ConfigError(
            f"tokenizer and vocabulary disagree: {tokenizer.name} has {tokenizer.size:,} tokens, "
            f"the model's vocabulary {vocabulary:,}. Set data.tokenizer to the model's own."
        )
    if highest is not None and highest >= vocabulary:
        raise DataError(
            f"data and vocabulary disagree: the highest token id is {highest:,}, and the model's vocabulary of "
            f"{vocabulary:,} ends at {vocabulary - 1:,}. The data were made with another tokenizer."
        )


def check_length(length: int, positions: int | None) -> None:
    """Refuse sequences longer than the model's positions (None: it has no limit)."""
    if positions is not None and length > positions:
        raise ConfigError(
            f"data.length={length:,} is more than the model's {positions:,} positions: "
            f"set data.length={positions} or less."
        )
