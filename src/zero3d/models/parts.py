"""Chooses the class that a config opens as: the whole model, with its towers, or the language model in it alone.

    model.part=whole   the class that config.json names under `architectures`, where transformers' maps of language
                       models, or of models of images and text, have it for this type of config; else what these maps
                       say by themselves, language models first, and a note says so
    model.part=text    the language model that the first map has for the config, or else for its text_config

Types of two classes, such as Qwen3.5 and Llama 4, have one config for both:

    Qwen3_5Config   Qwen3_5ForConditionalGeneration   model.visual, model.language_model, lm_head
                    Qwen3_5ForCausalLM                              model,                lm_head
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

from zero3d.config.sections import TEXT, WHOLE
from zero3d.errors import ConfigError, short

IN_TEXT = {  # patterns of a whole model's keys -> what stands for them in its text model alone, the head first
    r"^(model\.)?(language_model|text_model)\.(?=lm_head\.)": "",
    r"^(model\.)?(language_model|text_model)\.(model\.)?": "model.",
}


class Choice(NamedTuple):
    """Says what a config opens as.

    config  that the class takes
    auto    the class of transformers that makes it, such as AutoModelForCausalLM
    name    of the model's own class
    note    a line for people, "" where there is nothing to say
    """

    config: Any
    auto: Any
    name: str
    note: str = ""


def choose(config: Any, part: str = WHOLE) -> Choice:
    """Return the class that a config opens as. Raises ConfigError where it has no text model of its own."""
    return _text(config) if part == TEXT else _whole(config)


def _maps() -> tuple[tuple[Any, Any], ...]:
    """Return the classes that build language models, each with its map of configs to models."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    )


def _classes(mapping: Any, config: Any) -> list[Any]:
    """Return the classes that a map has for a config."""
    found = mapping.get(type(config), ())
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _whole(config: Any) -> Choice:
    candidates = [(auto, cls) for auto, mapping in _maps() for cls in _classes(mapping, config)]
    if not candidates:  # transformers refuses it in its own words
        return Choice(config, _maps()[0][0], "")
    named = (getattr(config, "architectures", None) or [None])[0]
    found = next((pair for pair in candidates if pair[1].__name__ == named), None)
    auto, cls = found or candidates[0]
    return Choice(config, auto, cls.__name__, "" if found else _said(config, named, [cls for _, cls in candidates]))


def _said(config: Any, named: object, classes: list[Any]) -> str:
    """Return the note on a config that names no class, or one that is not known."""
    names = list(dict.fromkeys(cls.__name__ for cls in classes))
    if named is not None:
        known = " or ".join(names)
        return f"the config names {short(repr(named))}, and transformers builds {known} of it: opened as {names[0]}"
    if len(names) == 1:
        return ""
    return (
        f"the config names no class, and transformers builds {' or '.join(names)} of it: opened as {names[0]}; for "
        f'another write "architectures": ["{names[-1]}"] into config.json'
    )


def _text(config: Any) -> Choice:
    auto, mapping = _maps()[0]
    inner = config.get_text_config()
    for cls in _classes(mapping, config):
        if inner is config or getattr(cls, "config_class", None) is type(inner):
            return Choice(config, auto, cls.__name__)
    if inner is not config and not getattr(inner, "is_encoder_decoder", False):
        for cls in _classes(mapping, inner):
            alone = copy.deepcopy(inner)
            # The whole model's config says whether its head is tied.
            alone.tie_word_embeddings = getattr(config, "tie_word_embeddings", alone.tie_word_embeddings)
            return Choice(alone, auto, cls.__name__)
    raise ConfigError(
        f"model.part={TEXT}: transformers has no class for the language model of {type(config).__name__} alone "
        f"({type(inner).__name__}): type model.part={WHOLE}, and freeze='[...]' with the names of its towers if they "
        "shall stay as they are."
    )


def text_class(config: Any) -> str:
    """Return the name of the class that model.part=text opens in the place of the whole model's; "" without one."""
    try:
        text, whole = choose(config, TEXT).name, choose(config).name
    except ConfigError:
        return ""
    return text if text != whole else ""


def key_in_text(key: str) -> str:
    """Return the key that a tensor of a whole model's folder has in one of its text model alone."""
    for pattern, instead in IN_TEXT.items():
        key = re.sub(pattern, instead, key)
    return key
