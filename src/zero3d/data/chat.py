"""Conversations to tokens: the tokenizer's template, and which tokens the assistant wrote.

    template with {% generation %}   it says itself what the assistant wrote
    any other                        rendered up to each answer:
                                     |<-- m[:i] + generation prompt -->|<-- the answer: targets -->|
                                     |<------------- m[:i+1] ------------------------------------->| ...
                                     each must be a prefix of the next, or nobody knows where an answer is

Tokens are made from the whole text at once, so that they are those the model will see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

from zero3d.data import trial
from zero3d.data.patience import Patience, TookTooLong
from zero3d.data.tokenizers import HfTokenizer, Tokenizer, no_template
from zero3d.data.trial import in_short, is_panic, told, try_template
from zero3d.errors import ConfigError, DataError, Zero3dError

Tokens = tuple[list[int], list[int]]  # ids, and 1 where a token is a target
Span = tuple[int, int]  # characters of a text
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The template of one tokenizer, or one given for it. Raises ConfigError where there is none."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        if not isinstance(tokenizer, HfTokenizer) or not (template or tokenizer.inner.chat_template):
            raise no_template(tokenizer.name)
        if not tokenizer.inner.is_fast:
            raise ConfigError(f"chat messages need a fast tokenizer (tokenizer.json), and {tokenizer.name} is none.")
        self._name = tokenizer.name
        self._inner = tokenizer.inner
        self.source: str = template or _template_of(tokenizer)
        try_template(self.source, tokenizer.inner.special_tokens_map, tokenizer.name)
        self._marked = bool(GENERATION.search(self.source))
        self._patience = Patience(trial.SECONDS)

    def encode(self, messages: Sequence[dict[str, Any]]) -> Tokens:
        """Return ids and targets of one conversation. Raises ValueError where the template refuses it."""
        with self._refusals():
            if self._marked:
                encoded = self._by_marks(messages)
                return list(encoded["input_ids"]), list(encoded["assistant_masks"])
            return self.tokens(*self._by_prefixes(messages))

    def render(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[Span]]:
        """Return one conversation as a text, and where the assistant wrote in it.

        Raises ValueError where the template refuses it.
        """
        with self._refusals():
            if not self._marked:
                return self._by_prefixes(messages)
            encoded = self._by_marks(messages, tokenizer_kwargs={"return_offsets_mapping": True})
            written = zip(encoded["assistant_masks"], encoded["offset_mapping"], strict=True)
            runs = [[span for _, span in run] for mask, run in groupby(written, itemgetter(0)) if mask]
            return self._render(messages), [(run[0][0], run[-1][1]) for run in runs]

    def tokens(self, text: str, answers: Sequence[Span], start: bool = False) -> Tokens:
        """Return ids and targets of a rendered text; if `start`, with the special tokens that it may lack."""
        with told(self._name):
            encoded = self._inner(text, add_special_tokens=start, return_offsets_mapping=True, verbose=False)
        targets = [int(any(a <= first < b for a, b in answers)) for first, _ in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), targets

    def starts_itself(self, text: str) -> bool:
        """Say whether a rendered text has the token that starts one."""
        token = self._inner.bos_token
        return token is not None and text.startswith(token)

    def _by_marks(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        return self._inner.apply_chat_template(
            messages, chat_template=self.source, return_dict=True, return_assistant_tokens_mask=True, **options
        )

    def _by_prefixes(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[Span]]:
        whole = self._render(messages)
        answers = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise ValueError("it starts with the assistant, and the template shows no prompt before that")
            prompt = self._render(messages[:index], add_generation_prompt=True)
            answered = self._render(messages[: index + 1])
            if not (answered.startswith(prompt) and whole.startswith(answered)):
                raise DataError(
                    f"the chat template of {self._name} does not only append: message {index} changes what was "
                    "rendered before it, so the assistant's tokens are unknown. Put {% generation %} and "
                    "{% endgeneration %} around the answer in the template."
                )
            answers.append((len(prompt), len(answered)))
        return whole, answers

    def _render(self, messages: Sequence[dict[str, Any]], **options: bool) -> str:
        return str(self._inner.apply_chat_template(messages, chat_template=self.source, tokenize=False, **options))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise ValueError for what a template raises: a program of others may raise anything."""
        from jinja2 import TemplateError

        try:
            with self._patience.limited():
                yield
        except TookTooLong:
            raise ValueError(
                f"the chat template takes more than {self._patience.seconds:g} s of a processor for it"
            ) from None
        except Zero3dError:
            raise
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        except ValueError:
            raise
        except BaseException as error:
            if is_panic(error):  # of a tokenizer that is called with the template
                raise ValueError(f"the tokenizer fails on it ({in_short(error)})") from error
            if not isinstance(error, Exception):
                raise
            raise ValueError(f"the chat template refuses it: {in_short(error)}") from error


def _template_of(tokenizer: HfTokenizer) -> str:
    """Return the template of a tokenizer. Raises ConfigError where it has several, and none by default."""
    try:
        return str(tokenizer.inner.get_chat_template())
    except Exception as error:
        raise ConfigError(
            f"the chat template of {tokenizer.name} cannot be used ({in_short(error)}): give it one, in "
            "chat_template.jinja, or set data.tokenizer to that of another chat model."
        ) from error
