"""Conversations with images: LLaVA's records and chat messages with image parts, as messages of parts.

    {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", ...}]}
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": ...}]}]}
    {"images": ["a.jpg"], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ...}]}]}

become messages whose content is a list of {type: image} and {type: text, text}, and the images in their order. A column
`images` is for parts that name none; without parts its images come before the first text of the user. Other keys of a
message or a turn stay in it. Turns from function_call are messages with tool_calls, those from observation the tool's.
LLaVA: Liu et al., "Visual Instruction Tuning" (2023).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from zero3d.data.chat_keys import Malformed, Message, calls_tools, message_of, with_system
from zero3d.data.image_files import is_image
from zero3d.errors import short

MARK = "<image>"  # where an image stands in a text of LLaVA's
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
PATHS = ("image", "path", "url")  # keys of an image part that may name its file
Messages = list[Message]
Images = tuple[Any, ...]  # in the forms of image_files
NONE: Mapping[str, Any] = MappingProxyType({})


def from_llava(value: Mapping[str, Any]) -> tuple[Messages, Images]:
    """Return messages and images of a record of LLaVA's. Raises Malformed."""
    images = _images_of("image", value.get("image"))
    turns = value["conversations"]
    if not isinstance(turns, list) or not turns:
        raise Malformed("conversations is not a list of {from, value}")
    messages = [_turn(index, turn) for index, turn in enumerate(turns)]
    marks = sum(part["type"] == "image" for message in messages for part in message.get("content", ()))
    if marks != len(images):
        raise Malformed(f"{_count(marks, MARK)} in its texts, and {_count(len(images), 'image')}: they must be as many")
    messages = _shown(with_system(messages, value))
    check_turns(messages)
    return messages, images


def from_messages(value: list[Any], given: Any = None, record: Mapping[str, Any] = NONE) -> tuple[Messages, Images]:
    """Return messages and images of a chat, any of whose contents may be a list of parts. Raises Malformed.

    given   the record's `images`, for parts that name none
    record  what else it has
    """
    if not isinstance(value, list):
        raise Malformed("messages is not a list of {role, content}")
    messages: Messages = []
    others = list(_images_of("images", given))
    count, images = len(others), list[Any]()
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Malformed(f"message {index} has no role")
        message = message_of(index, message)
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if parts is None and calls_tools(message):
            messages.append(message)
            continue
        if not isinstance(parts, list):
            raise Malformed(f"content of message {index} is a {type(content).__name__}: a text or a list of parts")
        messages.append(message | {"content": [_part(index, part, images, others) for part in parts]})
    messages = _shown(with_system(messages, record))
    check_turns(messages)
    if others and not images:
        first = next(message for message in messages if message["role"] == "user")
        first["content"] = [{"type": "image"}] * len(others) + first["content"]
        images, others = others, []
    if others:
        raise Malformed(
            f"{_count(count, 'image')} in images, and {count - len(others)} of its parts name none: they "
            "must be as many"
        )
    return messages, tuple(images)


def check_turns(messages: Messages) -> None:
    """Refuse roles out of order: the user and the assistant speak in turn, a system message comes first.

    Raises Malformed.
    """
    spoken = [(at, m["role"]) for at, m in enumerate(messages) if m["role"] in ("user", "assistant")]
    if any(message["role"] == "system" for message in messages[1:]):
        raise Malformed("a system message is not the first")
    if not spoken or spoken[0][1] != "user":
        raise Malformed("it begins with the assistant: a user's message comes first")
    for (first, one), (second, other) in pairwise(spoken):
        if one == other and second == first + 1:
            raise Malformed(f"messages {first} and {second} are both the {one}'s: they must take turns")
    if all(role != "assistant" for _, role in spoken):
        raise Malformed("no message is the assistant's, so there is nothing to learn")


def has_images(value: Mapping[str, Any]) -> bool:
    """Say whether a record is one of LLaVA's, or a chat with images or with contents that are lists of parts."""
    messages = value.get("messages")
    return (
        "conversations" in value
        or ("images" in value and messages is not None)
        or (
            isinstance(messages, list)
            and any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in messages)
        )
    )


def _turn(index: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise Malformed(f"turn {index} of conversations is no {{from, value}}")
    if turn.get("from") not in ROLES:
        raise Malformed(f"turn {index} is from {short(repr(turn.get('from')))}: one of {', '.join(ROLES)}")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if turn["from"] == "function_call":
        return message_of(index, {"role": "assistant", "tool_calls": _calls(index, turn["value"]), **others})
    texts = turn["value"].split(MARK)
    parts: list[dict[str, str]] = []
    for place, text in enumerate(texts):
        parts += [{"type": "image"}] if place else []
        text = text.strip("\n") if len(texts) > 1 else text  # the template puts a line between an image and a text
        parts += [{"type": "text", "text": text}] if text else []
    return message_of(index, {"role": ROLES[turn["from"]], "content": parts, **others})


def _calls(index: int, value: str) -> list[dict[str, Any]]:
    """Return tool_calls of what a turn from function_call says: {name, arguments} as JSON, or a list of those."""
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise Malformed(f"turn {index} is from function_call, and its value is no JSON of {{name, arguments}}")
    return [{"type": "function", "function": call} for call in calls]


def _shown(messages: Messages) -> Messages:
    """Return messages whose contents are lists of parts."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def as_texts(messages: Messages) -> Messages | None:
    """Return messages with texts for contents; None where one has several parts, or an image."""
    made = []
    for message in messages:
        parts = message.get("content")
        if parts is not None:
            if len(parts) > 1 or any(part["type"] != "text" for part in parts):
                return None
            message = message | {"content": parts[0]["text"] if parts else ""}
        made.append(message)
    return made


def unused_of_parts(messages: Any) -> set[str]:
    """Return names of what parts of contents hold beside their texts and images."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    keys = {key for part in parts for key, value in part.items() if value is not None}
    return {f"messages[].content[].{key}" for key in keys - {"type", "text", *PATHS}}


def _part(index: int, part: Any, images: list[Any], others: list[Any]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image":
        image = next((part[key] for key in PATHS if is_image(part.get(key))), None)
        if image is not None or others:
            images.append(others.pop(0) if image is None else image)
            return {"type": "image"}
    raise Malformed(f"a part of message {index} is neither {{type: text, text}} nor {{type: image, image: PATH}}")


def _images_of(key: str, value: Any) -> Images:
    images = () if value is None else (value,) if is_image(value) else value
    if not isinstance(images, (list, tuple)) or not all(map(is_image, images)):
        raise Malformed(f"{key} is {short(repr(value))}: the path of a file, or a list of paths")
    return tuple(images)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
