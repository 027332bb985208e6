"""Keys of a chat beside its texts: what the template gets of them, and which answers are learnt.

    record    tools, documents       handed to the template: a list, or its JSON text
              functions              the older form of tools
              chat_template_kwargs   more values for the template, by name: an object, or its JSON text
              system                 a text, which becomes the first message
    message   tool_calls             a list, or its JSON text; function_call is its older form
              weight 0, train false, loss false   the answer is not learnt
              any other              handed to the template with the message; null counts as absent

Keys at which neither we nor the template look are counted (`unused`), so that nothing is left out without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zero3d.errors import short

Options = dict[str, Any]  # what a template gets beside the messages
Message = dict[str, Any]
LISTS = ("tools", "documents")
KWARGS = "chat_template_kwargs"
KEYS = (*LISTS, "functions", KWARGS, "system")
OURS = {  # arguments of apply_chat_template that are no values for a template
    *("conversation", "conversations", "messages", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "processor_kwargs", "sanitize_control_tokens"),
}
LEARNT = ("weight", "train", "loss")  # of a message: whether it is learnt
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one thing, which transformers fills in


class Malformed(ValueError):
    """Says what is wrong with a conversation."""


def options_of(record: Mapping[str, Any]) -> Options:
    """Return what the template gets of a record beside its messages. Raises Malformed."""
    options = _of_json(KWARGS, record.get(KWARGS), dict) or {}
    options = {name: value for name, value in options.items() if value is not None}
    if ours := sorted(OURS & options.keys()):
        raise Malformed(f"{KWARGS} has {short(ours[0])}, which is an argument of zero3d's own: leave it out")
    given = {"tools": _objects("tools", record.get("tools")), "documents": _documents(record.get("documents"))}
    if (functions := _objects("functions", record.get("functions"))) is not None:
        given["tools"] = (given["tools"] or []) + [{"type": "function", "function": each} for each in functions]
    for name, value in given.items():
        other = options[name] = _objects(name, options.get(name))
        if value is not None and other is not None and other != value:
            raise Malformed(f"its {name} and those in {KWARGS} differ: give them once")
        options[name] = other if value is None else value
    return {name: value for name, value in options.items() if value is not None}


def with_system(messages: Sequence[Message], record: Mapping[str, Any]) -> list[Message]:
    """Return the messages with the record's `system` before them, where it has one. Raises Malformed."""
    text = record.get("system")
    if text is None or text == "":
        return list(messages)
    if not isinstance(text, str):
        raise Malformed(f"system is a {type(text).__name__}, not a text")
    if messages and messages[0].get("role") == "system":
        raise Malformed("system is beside a first message that is the system's: give one of them")
    return [{"role": "system", "content": text}, *messages]


def message_of(index: int, message: Mapping[str, Any]) -> Message:
    """Return a message as a template takes it. Raises Malformed."""
    made = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := made.get("tool_calls"), str):
        made["tool_calls"] = _of_json(f"tool_calls of message {index}", calls, list) or []
    if "function_call" in made:
        call = _of_json(f"function_call of message {index}", made.pop("function_call"), dict)
        if call and made.get("tool_calls"):
            raise Malformed(f"message {index} has tool_calls and function_call: give one of them")
        made |= {"tool_calls": [{"type": "function", "function": call}]} if call else {}
    weight = made.get("weight")
    if made.get("role") == "assistant" and weight is not None and weight not in (0, 1):
        raise Malformed(f"weight of message {index} is {short(repr(weight))}: 0 or 1")
    return made


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Return whether the answer in a message of the assistant is learnt."""
    return message.get("weight", 1) != 0 and message.get("train") is not False and message.get("loss") is not False


def calls_tools(message: Mapping[str, Any]) -> bool:
    """Return whether a message calls tools, and so may have no content."""
    return "tool_calls" in message or "function_call" in message


def unused(messages: Sequence[Message], options: Options, source: str) -> Iterator[str]:
    """Yield the names of what this template does not look at, and we do not either."""
    for name in options:
        if not _names(source, name):
            yield name if name in LISTS else f"{KWARGS}.{name}"
    for key in sorted({key for message in messages for key in message if not _is_ours(key, message)}):
        if not any(_names(source, name) for name in (REASONING if key in REASONING else (key,))):
            yield f"messages[].{key}"


def without_nulls(value: Any) -> Any:
    """Return a value of a table without keys that are null: a column gives every row the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _names(source: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source) is not None


def _is_ours(key: str, message: Message) -> bool:
    if key in ("train", "loss") and not isinstance(message[key], bool):
        return False
    return key in ("role", "content") or (key in LEARNT and message["role"] == "assistant")


def _documents(value: Any) -> list[Any] | None:
    """Return documents for a template; None for a column of that name which holds something else."""
    try:
        return _objects("documents", value)
    except Malformed:
        return None


def _objects(name: str, value: Any) -> list[Any] | None:
    """Return a list of objects, each of which may be its JSON text. Raises Malformed."""
    found = _of_json(name, value, list)
    if found is None:
        return None
    items = [_of_json(f"an item of {name}", item, dict) for item in found]
    if None in items:
        raise Malformed(f"an item of {name} is empty")
    return items


def _of_json(name: str, value: Any, kind: type) -> Any:
    """Return a value of this kind, also where it is given as JSON text; None for nothing. Raises Malformed."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Malformed(f"{name} is a text that is not JSON: {short(value)}") from None
    if value is not None and not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list of objects"
        raise Malformed(f"{name} is a {type(value).__name__}: expected {wanted}, or its JSON text")
    return value
