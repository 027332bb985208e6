"""A conversation with images to tokens: the chat template, each image's tokens in the place of its mark, tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero3d.data.chat import NO_OPTIONS, ChatTemplate, Tokens
from zero3d.data.chat_keys import Message
from zero3d.data.conversations import Messages
from zero3d.data.image_files import BadImage, size_of
from zero3d.data.images import Vision
from zero3d.data.kept_images import Pictures
from zero3d.data.tokenizers import HfTokenizer, Tokenizer
from zero3d.errors import DataError

PARTS = re.compile(r"\.type\b|\[.type.\]|.type., *.equalto")  # in a template that takes contents as lists of parts


class ImageTokens:
    """Encodes conversations whose images lie in `folder`. Raises ConfigError where there is no chat template.

    files  images must be files, since of others nothing but tokens would be kept
    """

    def __init__(self, tokenizer: Tokenizer, vision: Vision, folder: Path, files: bool = True) -> None:
        self.folder = folder
        self.vision = vision
        self._files = files
        if isinstance(tokenizer, HfTokenizer):  # the processor's own may know more special tokens
            tokenizer = HfTokenizer(vision.tokenizer, tokenizer.name, tokenizer.fingerprint)
        self._template = ChatTemplate(tokenizer, vision.template)
        self._takes_parts = PARTS.search(self._template.source) is not None

    def encode(
        self, messages: Messages, images: Sequence[Any], options: Mapping[str, Any] = NO_OPTIONS
    ) -> tuple[Tokens, Pictures]:
        """Return tokens and images. Raises ValueError for a conversation or an image that cannot be used.

        Raises DataError for images inside the data, where they must be files.
        """
        if self._files and not all(isinstance(image, str) for image in images):
            raise DataError("its images are in the data themselves, and kept are tokens: set data.streaming=true.")
        sizes = [size_of(self.folder, name) for name in images]
        shown = messages if self._takes_parts else [self._flat(message) for message in messages]
        rendered = self._template.render(shown, options)
        start = not self._template.starts_itself(rendered.text)
        try:
            text, answers = self.vision.expand(rendered.text, rendered.answers, sizes)
        except BadImage as error:  # of the processor, which knows no names
            raise BadImage(f"{Pictures(tuple(images)).named}: {error}".removeprefix(": ")) from error
        tokens = self._template.tokens(rendered._replace(text=text, answers=answers), start)
        ids = tokens.ids
        found, wanted = ids.count(self.vision.image), self.vision.tokens(sizes)
        if found != wanted:
            raise ValueError(
                f"its text has {found:,} tokens {self.vision.image_text}, and its {len(images):,} images are "
                f"{wanted:,} of them: write that token in no text, for features of images replace it"
            )
        end = len(ids) - ids[::-1].index(self.vision.image) if images else 0
        return tokens, Pictures(tuple(images), tuple(sizes), end, self.vision.patches(sizes))

    def unused(self, messages: Messages, options: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of keys at which neither the template looks nor we do."""
        return self._template.unused(messages, options)

    def _flat(self, message: Message) -> Message:
        """Return a message with a text for content, marks of images in it."""
        if "content" not in message:
            return message
        mark = self.vision.mark_text
        texts = [mark if part["type"] == "image" else part["text"] for part in message["content"]]
        return {**message, "content": "\n".join(texts)}
