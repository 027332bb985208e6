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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple

from zero3d.data.borders import Span, spans_of
from zero3d.data.chat_keys import LISTS, Message, Options, is_learnt, unused
from zero3d.data.tokenizers import HfTokenizer, Tokenizer, in_short, is_panic, no_template, told
from zero3d.errors import ConfigError, DataError, Zero3dError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Tokens(NamedTuple):
    """Tokens of a conversation.

    ids      [n]
    targets  [n]  1 where a token is learnt
    across   whether a token belongs to an answer and to what is before it, so that it is none
    """

    ids: list[int]
    targets: list[int]
    across: bool


class Rendered(NamedTuple):
    """A conversation as a text, and where the answers that are learnt lie in it.

    marked  whether the template says so itself; then a token that an answer begins within is learnt, as transformers'
            masks have it
    """

    text: str
    answers: list[Span]
    marked: bool


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
        self._with_tools = self.source if template else _template_of(tokenizer, tools=True)

    def encode(self, messages: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS) -> Tokens:
        """Return ids and targets of one conversation. Raises ValueError where the template refuses it.

        options  what the template gets beside the messages
        """
        return self.tokens(self.render(messages, options))

    def render(self, messages: Sequence[Message], options: Mapping[str, Any] = NO_OPTIONS) -> Rendered:
        """Return one conversation as a text, and where the assistant wrote in it.

        Raises ValueError where the template refuses it.
        """
        source = self._source(options)
        with self._refusals():
            if GENERATION.search(source):
                return self._by_marks(messages, source, dict(options))
            return self._by_prefixes(messages, source, dict(options))

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return what the next answer is given after. Raises ValueError where the template refuses the messages."""
        with self._refusals():
            return self._render(messages, self.source, {}, add_generation_prompt=True)

    def unused(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of keys at which neither the template looks nor we do."""
        return unused(messages, dict(options), self._source(options))

    def tokens(self, rendered: Rendered, start: bool = False) -> Tokens:
        """Return ids and targets of a rendered text; if `start`, with the special tokens that it may lack."""
        text, answers, marked = rendered
        with told(self._name):
            encoded = self._inner(text, add_special_tokens=start, return_offsets_mapping=True, verbose=False)
        spans = spans_of(text, encoded.tokens(), encoded["offset_mapping"], encoded.sequence_ids())
        across = [any(first < a < end for a, _ in answers) for first, end in spans]
        targets = [
            int(any(a <= first < b for a, b in answers) or (marked and over))
            for (first, _), over in zip(spans, across, strict=True)
        ]
        return Tokens(list(encoded["input_ids"]), targets, any(across) and not marked)

    def starts_itself(self, text: str) -> bool:
        """Say whether a rendered text has the token that starts one."""
        token = self._inner.bos_token
        return token is not None and text.startswith(token)

    def _source(self, options: Mapping[str, Any]) -> str:
        return self.source if options.get("tools") is None else self._with_tools

    def _by_marks(self, messages: Sequence[Message], source: str, options: Options) -> Rendered:
        """Render once: transformers says which characters its marks are around.

        Its masks of tokens are not taken: an answer whose first character is in no token has none there, and one whose
        last is in none never ends.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, found = render_jinja_template(
            conversations=[list(messages)],
            chat_template=source,
            return_assistant_tokens_mask=True,
            **{**self._inner.special_tokens_map, **options},
        )
        spans: list[Span] = [(start, end) for start, end in found[0]]
        learnt = [is_learnt(message) for message in messages if message["role"] == "assistant"]
        if not all(learnt):
            if len(spans) != len(learnt):
                raise ValueError(
                    f"the chat template marks {len(spans)} answers of {len(learnt)} messages of the assistant's, so "
                    "which of them are not to be learnt is unknown"
                )
            spans = list(compress(spans, learnt))
        return Rendered(str(texts[0]), spans, marked=True)

    def _by_prefixes(self, messages: Sequence[Message], source: str, options: Options) -> Rendered:
        whole = self._render(messages, source, options)
        answers = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not is_learnt(message):
                continue
            if index == 0:
                raise ValueError("it starts with the assistant, and the template shows no prompt before that")
            answered = self._render(messages[: index + 1], source, options)
            prompt = self._prompt(messages[:index], source, options, answered)
            if not (answered.startswith(prompt) and whole.startswith(answered)):
                raise DataError(
                    f"the chat template of {self._name} does not only append: message {index} changes what was "
                    "rendered before it, so the assistant's tokens are unknown. Put {% generation %} and "
                    "{% endgeneration %} around the answer in the template."
                )
            answers.append((len(prompt), len(answered)))
        return Rendered(whole, answers, marked=False)

    def _prompt(self, messages: Sequence[Message], source: str, options: Options, answered: str) -> str:
        """Return what an answer is given after.

        Options may add to it what no answer shows, such as an empty thought where thinking is switched off: then it
        is what it would be without them.
        """
        prompt = self._render(messages, source, options, add_generation_prompt=True)
        if answered.startswith(prompt):
            return prompt
        plain = {name: value for name, value in options.items() if name in LISTS}
        return prompt if plain == options else self._render(messages, source, plain, add_generation_prompt=True)

    def _render(self, messages: Sequence[Message], source: str, options: Options, **more: bool) -> str:
        return str(
            self._inner.apply_chat_template(messages, chat_template=source, tokenize=False, **{**options, **more})
        )

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise ValueError for what a template raises: a program of others may raise anything."""
        from jinja2 import TemplateError

        try:
            yield
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


def _template_of(tokenizer: HfTokenizer, tools: bool = False) -> str:
    """Return a tokenizer's template, for chats with tools the one that it has for those.

    Raises ConfigError where it has several, and none by default.
    """
    try:
        return str(tokenizer.inner.get_chat_template(tools=[] if tools else None))
    except Exception as error:
        raise ConfigError(
            f"the chat template of {tokenizer.name} cannot be used ({in_short(error)}): give it one, in "
            "chat_template.jinja, or set data.tokenizer to that of another chat model."
        ) from error
