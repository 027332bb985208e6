"""State dicts as JSON values and back: JSON knows no tuples, no tensors and no keys but text."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def to_json(value: Any) -> Any:
    """Return a state as values that JSON can hold. Raises TypeError for anything else."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def from_json(value: Any, like: Any) -> Any:
    """Return values read from JSON with the types of `like`, the same state as it is now."""
    if isinstance(like, Tensor):
        return like.new_tensor(value)
    if isinstance(like, dict) and isinstance(value, dict):
        keys = {str(key): key for key in like}
        numbers = bool(like) and all(isinstance(key, int) for key in like)
        items = {
            keys.get(key, int(key) if numbers else key): from_json(item, like.get(keys.get(key, key)))
            for key, item in value.items()
        }
        return items if type(like) is dict else type(like)(items)
    if isinstance(like, (list, tuple)) and isinstance(value, list):
        pairs = [from_json(item, like[i] if i < len(like) else None) for i, item in enumerate(value)]
        return pairs if type(like) is list else tuple(pairs)
    return float(value) if isinstance(like, float) and isinstance(value, str) else value  # inf is a text in JSON
