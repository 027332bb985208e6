"""Names and patterns of modules and parameters, as people write them in a configuration.

    vision_tower          a module of this name, wherever it is, and all in it
    model.layers.0        the same with its place
    *.embed_tokens, layers.[01]   shell patterns over the same
    q_proj.weight         a parameter

PEFT wraps a layer and keeps it as `base_layer`: patterns are held against names without that, too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from zero3d.config.hints import nearest
from zero3d.errors import ConfigError, short

WRAPPED = "base_layer"
SHOWN = 12


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a model's weights, by all their names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name, buffer in inner._buffers.items()
        if buffer is not None and name not in inner._non_persistent_buffers_set
    }


def own_name(name: str) -> str:
    """Return a parameter's or module's name in the model without adapters."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def matches(name: str, pattern: str) -> bool:
    """Say whether a pattern names this parameter or module, or a module around it."""
    parts = own_name(name).split(".")
    heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(head, form) for head in heads for form in (pattern, f"*.{pattern}"))


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Say whether any of the patterns names it."""
    return any(matches(name, pattern) for pattern in patterns)


def check_patterns(key: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """Refuse a pattern that names nothing. Raises ConfigError with what could be meant.

    names  of the parameters or modules that there are
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            candidates = _candidates(names)
            like = nearest(pattern, candidates)
            more = ", ..." if len(candidates) > SHOWN else ""
            raise ConfigError(
                f"{key}: {short(pattern)!r} names nothing in the model."
                f"{f' Did you mean {like}?' if like else ''} There are {', '.join(candidates[:SHOWN])}{more}."
            )


def _candidates(names: Collection[str]) -> list[str]:
    """Return the last words of names, those of modules before those of their parameters, each once, no numbers."""
    words: dict[str, None] = {}
    for name in names:
        parts = [part for part in own_name(name).split(".") if not part.isdigit()]
        words |= dict.fromkeys(part for part in parts[-2:] if part not in ("weight", "bias"))
    return list(words)
