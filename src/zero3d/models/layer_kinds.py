"""Finds which kinds of mixing a type's modeling file defines, and a config that has a layer of each.

Sizes that transformers gives a type may name one kind of layer alone: LFM2's are all attention, Bamba's all Mamba 2.
No released model is like that. What a file defines are its modules that mix tokens by recurrences or convolutions
(mixing.py), and its attention. Kinds are lists of names in a config, such as layer_types; which names there are, the
sources of config and model say. Those are tried, and the model that is built of them is looked at.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from zero3d.models.mixing import is_mixer_class

LISTS = ("layer_types", "layers_block_type", "block_types")
INDICES = "attn_layer_indices"  # Bamba: the layers that attend, where others do not
NAMES = ("linear_attention", "full_attention", "sliding_attention", "conv", "hybrid", "recurrent", "mamba", "attention")


def kinds_left_out(model: nn.Module) -> tuple[str, ...]:
    """Return the mixers that a model's file defines and the model has none of; of attention any will do."""
    mix, attend = _defined(getattr(model, "config", None))
    if not mix:
        return ()
    present = {type(module) for module in model.modules()}
    missing = [each.__name__ for each in mix if not any(issubclass(kind, each) for kind in present)]
    if attend and present.isdisjoint(attend):
        missing.append(attend[0].__name__)
    return tuple(missing)


def with_each_kind(make: Callable[..., Any], build: Callable[[Any], nn.Module]) -> Any:
    """Return a config with a layer of each kind where one is found; else as `make()` has it.

    make   makes a config of a type, with some options
    build  makes a model of it, without weights
    """
    config = make()
    if not _defined(config)[0] or not kinds_left_out(build(config)):
        return config
    for options in _options(config):
        try:
            other = make(**options)
            if not kinds_left_out(build(other)):
                return other
        except Exception:  # noqa: BLE001 (any error of its own: it takes no such list)
            continue
    return config


def _defined(config: Any) -> tuple[list[type[nn.Module]], list[type[nn.Module]]]:
    """Return the mixers that a type's file defines, and its attention."""
    if (file := _modeling(config)) is None:
        return [], []
    classes = [each for each in vars(file).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    own = [each for each in classes if each.__module__ == file.__name__]
    mix = [each for each in own if is_mixer_class(each)]
    return mix, [each for each in own if each not in mix and each.__name__.endswith("Attention")]


def _options(config: Any) -> Iterator[dict[str, Any]]:
    """Yield options that may make a config name each kind of layer."""
    text = config.get_text_config()
    many = text.num_hidden_layers
    files = (sys.modules[type(text).__module__], _modeling(config))
    words = {word for file in files if file is not None for word in _words(file)}
    kinds = [name for name in NAMES if name in words]
    for name in LISTS:
        usual = getattr(text, name, None)
        rest = list(usual) if isinstance(usual, (list, tuple)) else kinds[:1] * many
        new = [kind for kind in kinds if kind not in rest]
        yield {name: [*new, *rest[len(new) :]]}
    yield {INDICES: [many - 1]}


def _words(file: ModuleType) -> Iterator[str]:
    """Yield the words that stand between quotes in a source."""
    for node in ast.walk(ast.parse(inspect.getsource(file))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _modeling(config: Any) -> ModuleType | None:
    """Return the modeling file beside the file of a config; None for a config of no released library."""
    name = type(config.get_text_config()).__module__ if hasattr(config, "get_text_config") else ""
    if not name.startswith("transformers.models."):
        return None
    try:
        return import_module(name.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
