"""Finds which kinds of mixing a type's modeling file defines, and a config that has a layer of each.

Sizes that transformers gives a type may name one kind of layer alone: LFM2's are all attention, Bamba's all Mamba 2.
No released model is like that. What a file defines are its modules that mix tokens by recurrences or convolutions
(mixing.py), and its attention. Kinds are lists of names in a config, such as layer_types; which names there are, the
sources of config and model say. Those are tried, and the model that is built of them is looked at. So are feed-forward
layers, dense ones and experts, of which a config has numbers or lists of names.
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
DENSE = ("mlp_only_layers", "mlp_layer_types", "first_k_dense_replace", "num_dense_layers")  # which layers are dense
FEED_FORWARD = ("MLP", "Experts")  # ends of classes' names
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


def feed_forward_left_out(model: nn.Module) -> tuple[str, ...]:
    """Return the dense feed-forward layers and experts that a model's file defines and the model has none of."""
    present = {type(module) for module in model.modules()}
    own = [each for each in _own_classes(getattr(model, "config", None)) if each.__name__.endswith(FEED_FORWARD)]
    return tuple(each.__name__ for each in own if not any(issubclass(kind, each) for kind in present))


def with_each_kind(make: Callable[..., Any], build: Callable[[Any], nn.Module]) -> Any:
    """Return a config with a layer of each kind where one is found; else as `make()` has it.

    make   makes a config of a type, with some options
    build  makes a model of it, without weights
    """
    found: dict[str, Any] = {}
    for left_out, options in ((kinds_left_out, _options), (feed_forward_left_out, _dense_options)):
        config = make(**found)
        if left_out(build(config)):
            found |= _first(make, build, left_out, [found | more for more in options(config)])
    return make(**found)


def _first(
    make: Callable[..., Any],
    build: Callable[[Any], nn.Module],
    left_out: Callable[[nn.Module], tuple[str, ...]],
    options: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the first options with which a model has all that it may leave out; none where there are no such."""
    for each in options:
        try:
            if not left_out(build(make(**each))):
                return each
        except Exception:  # noqa: BLE001 (any error of its own: it takes no such value)
            continue
    return {}


def _defined(config: Any) -> tuple[list[type[nn.Module]], list[type[nn.Module]]]:
    """Return the mixers that a type's file defines, and its attention."""
    own = _own_classes(config)
    mix = [each for each in own if is_mixer_class(each)]
    return mix, [each for each in own if each not in mix and each.__name__.endswith("Attention")]


def _own_classes(config: Any) -> list[type[nn.Module]]:
    if (file := _modeling(config)) is None:
        return []
    classes = [each for each in vars(file).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return [each for each in classes if each.__module__ == file.__name__]


def _dense_options(config: Any) -> Iterator[dict[str, Any]]:
    """Yield options that may make the first layer a dense one where all have experts, by names that a config has."""
    text = config.get_text_config()
    kinds = getattr(text, DENSE[1], None)
    values = ([0], ["dense", *kinds[1:]] if isinstance(kinds, list) else None, 1, 1)
    for name, value in zip(DENSE, values, strict=True):
        if value is not None and hasattr(text, name):
            yield {name: value}


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
