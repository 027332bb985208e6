"""Finds where in a text's tokens its parts begin: a completion behind its prompt, answers in a chat.

    prompt   completion   tokens of both as one text, as a model sees them
    "2+2="   " 4"         "2" "+" "2" "=" | " 4"      the first that begins behind the border is the first target
    "2+2= "  "4"          "2" "+" "2" "="   " 4" |    one that is across the border is no target, and is counted

A fast tokenizer says where its tokens lie in the text that it was given, whatever it made of it first (offsets). Some
leave out the blanks at a token's beginning (`trim_offsets`): those are put back. Of tokenizers that are not fast the
tokens of the prompt alone are compared with those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Span = tuple[int, int]  # characters of a text
BLANK = "\u0120"  # how a byte-level token writes a blank


class Parted(NamedTuple):
    """Tokens of a prompt and its completion together.

    ids     [n]
    first   the first that belongs to the completion alone
    across  whether one belongs to both
    """

    ids: list[int]
    first: int
    across: bool


def spans_of(text: str, tokens: Sequence[str], offsets: Sequence[Span], parts: Sequence[int | None]) -> list[Span]:
    """Return where each token lies in the text; where the tokenizer added one of its own, (-1, -1).

    parts  None for those that it added
    """
    return [
        (-1, -1) if part is None else (start - _trimmed(text, token, start, end), end)
        for token, (start, end), part in zip(tokens, offsets, parts, strict=True)
    ]


def _trimmed(text: str, token: str, start: int, end: int) -> int:
    """Return how many blanks a token begins with that its offsets leave out."""
    if not token.startswith(BLANK) or (start < end and text[start] == " "):
        return 0
    leading = len(token) - len(token.lstrip(BLANK))
    before = text[max(start - leading, 0) : start]
    return len(before) - len(before.rstrip(" "))


def parted(ids: Sequence[int], spans: Sequence[Span], border: int) -> Parted:
    """Return tokens of a text with the border at this character of it."""
    first = next((at for at, (_, end) in enumerate(spans) if end >= 0), len(spans))  # behind what was added in front
    across = False
    for at in range(first, len(spans)):
        start, end = spans[at]
        if 0 <= start < border:
            first, across = at + 1, across or end > border
    return Parted(list(ids), first, across)


def parted_by_prompt(
    ids: Sequence[int], added: Sequence[int], prompt: Sequence[int], completion: str, decode: Callable[[Any], str]
) -> Parted:
    """Return tokens of a text by those of its prompt alone.

    added   1 where the tokenizer added one of its own
    prompt  tokens of the prompt alone, without such
    """
    ids, inner = list(ids), [at for at, own in enumerate(added) if not own]
    if not inner:
        return Parted(ids, len(ids), False)
    same = 0
    while same < min(len(inner), len(prompt)) and ids[inner[same]] == prompt[same]:
        same += 1
    if same == len(prompt):
        return Parted(ids, inner[same] if same < len(inner) else inner[-1] + 1, False)
    for place in range(same + 1, len(inner)):  # the one at `same` begins in the prompt
        if completion.endswith(decode([ids[at] for at in inner[place:]])):
            return Parted(ids, inner[place], True)
    return Parted(ids, inner[-1] + 1, True)
