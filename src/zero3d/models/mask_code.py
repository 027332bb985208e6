"""What the code of a Hugging Face model's forward says: the names that it uses, whether positions make its masks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from threading import Lock
from typing import Any

from torch import nn

MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_ONE_PARSE = Lock()  # Python 3.11 fails where threads parse at a time (cpython#106905), and ranks may be threads
WRAPPED = ("__func__", "__wrapped__", "func", "inner")  # attributes of methods, wrappers and partials: what they call


def code_of(forward: Any) -> Any:
    """Return the code of a forward inside of what wraps it; a class where it has none."""
    while (name := next((name for name in WRAPPED if hasattr(forward, name)), None)) is not None:
        forward = getattr(forward, name)
    return getattr(forward, "__code__", type(forward))


def masks_by_position(kind: type[nn.Module]) -> bool | None:
    """Return whether all masks that this class's forward makes get position_ids; None if it makes none."""
    try:
        with _ONE_PARSE:
            tree = ast.parse(textwrap.dedent(source_of(kind)))
    except SyntaxError:
        return None
    makers = set(MASKS)  # and the local names that one of them was given
    makers |= {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (_names(node.value) - _called(node.value)) & makers
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _names(node.func) & makers]
    if not calls:
        return None
    collected = any(isinstance(node, ast.Constant) and node.value == "position_ids" for node in ast.walk(tree))
    return all(_passes_positions(call, collected) for call in calls)


def source_of(kind: type[nn.Module]) -> str:
    """Return the source of a class's forward, "" where there is none."""
    try:
        return inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return ""


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _called(tree: ast.AST) -> set[str]:
    return {name for node in ast.walk(tree) if isinstance(node, ast.Call) for name in _names(node.func)}


def _passes_positions(call: ast.Call, collected: bool) -> bool:
    """Return whether a call passes position_ids: by name, or in `**options` that were put together before."""
    return any(word.arg == "position_ids" or (word.arg is None and collected) for word in call.keywords)
