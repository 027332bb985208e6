"""`zero3d models [PATH | PRESET | TYPE]`: what a model supports, by the engine's own checks, without its weights.

A type of images and text is also tried: a tiny model of it trains on two ranks of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero3d.config import Model
from zero3d.config.hints import nearest
from zero3d.config.sections import TEXT
from zero3d.errors import ConfigError, short
from zero3d.models.places import FETCH, is_called
from zero3d.models.presets import PRESETS
from zero3d.spec.text import columns, count
from zero3d.tools.cli.preflight import check_transformers
from zero3d.tools.cli.train import quiet_libraries
from zero3d.tools.cli.worker import quiet_environment
from zero3d.tools.vision.table import Table, as_text, read

if TYPE_CHECKING:
    from torch import nn

    from zero3d.train.setup.support import Row, Support

WIDTH = 100
ANSWERS = {True: "yes", False: "no", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    kinds = "a folder or config.json, a preset, module:function, or a model_type of transformers with its usual sizes"
    parser.add_argument("model", nargs="?", metavar="PATH | PRESET | TYPE", help=f"{kinds}; without one, the presets")
    parser.add_argument(
        "--families",
        action="store_true",
        help="answer for every language model type of transformers, with its usual sizes; takes minutes",
    )
    parser.add_argument(
        "--vision",
        action="store_true",
        help="which model types of images and text are trained, packed, cut: what was tried for this version",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the answers. Raises ConfigError."""
    if (arguments.model is not None) + arguments.families + arguments.vision > 1:
        raise ConfigError("zero3d models answers for one model, for --families or for --vision: leave the others out.")
    if arguments.vision:
        print(json.dumps(_vision_as_json(read())) if arguments.json else as_text(read()))
        return 0
    if arguments.model is None and not arguments.families:
        print(json.dumps({"presets": list(PRESETS)}) if arguments.json else _presets())
        return 0
    check_transformers(Model(path=arguments.model or "demo"))
    quiet_environment()
    quiet_libraries()
    from zero3d.tools.vision.tiny import types
    from zero3d.train.setup.support import with_text_part

    if arguments.families:
        families = dict(_families())
        print(json.dumps(families) if arguments.json else "\n".join(columns(list(_as_table(families)), "<" * 10)))
        return 0
    folder = Path(arguments.model)
    at = folder if os.path.isdir(folder) else None
    found = with_text_part(_answers(arguments.model, at), _text_support(arguments.model, at))
    if not os.path.exists(arguments.model) and arguments.model in types():
        found = found._replace(rows=(*found.rows, _trained(arguments.model)))
    print(json.dumps(_as_json(found)) if arguments.json else _support_text(found))
    return 0


def _answers(name: str, folder: Path | None) -> Support:
    """Return what a model supports; of a type, also what depends on kinds of layers that its usual sizes lack."""
    from transformers import CONFIG_MAPPING

    from zero3d.train.setup.support import support_of

    model = _bare(name)
    found = support_of(model, folder)
    is_type = name in CONFIG_MAPPING and name not in PRESETS and not os.path.exists(name)
    return depending(found, model) if is_type else found


def depending(found: Support, model: nn.Module) -> Support:
    """Return answers for a type, of which those on packing and sp are open where kinds of its layers are left out."""
    from zero3d.models.layer_kinds import kinds_left_out
    from zero3d.train.setup.support import Row

    if not (missing := kinds_left_out(model)):
        return found
    said = f"depends on layer_types: the type has layers of {', '.join(missing)}, too, and its usual sizes have none"
    rows = (Row(row.name, None, said) if row.name in ("sp", "packing") else row for row in found.rows)
    return found._replace(rows=tuple(rows))


def _trained(kind: str) -> Row:
    """Return the answer of a trial of a type, which takes seconds."""
    from zero3d.tools.vision.trial import TRAINED, UNTRIED, trial
    from zero3d.train.setup.support import Row

    found = trial(kind)
    if found.verdict == TRAINED:
        said = "at stage 3 on two ranks, of which one has no image, a tiny model of the type equals plain PyTorch"
        return Row("trained", True, said)
    return Row("trained", None if found.verdict == UNTRIED else False, "", f"{found.verdict}: {found.why}")


def _vision_as_json(table: Table) -> dict[str, Any]:
    return {**table._asdict(), "types": [row._asdict() for row in table.types]}


def _text_support(name: str, folder: Path | None) -> Support | None:
    """Return what model.part=text supports of a model, None where that is the same or nothing. Raises ConfigError."""
    from transformers import CONFIG_MAPPING

    from zero3d.models.build import build
    from zero3d.models.open import preset, read_config
    from zero3d.models.parts import text_class
    from zero3d.train.setup.support import support_of

    if os.path.exists(name) or name in PRESETS:
        config = read_config(Path(name)) if os.path.exists(name) else preset(name)
    elif name in CONFIG_MAPPING:
        model: Any = _of_type(name)
        config = model.config
    else:
        return None  # a function makes it
    return support_of(build(config, part=TEXT), folder) if text_class(config) else None


def _presets() -> str:
    return f"presets: {', '.join(PRESETS)}\nzero3d models PRESET says what one supports; also a folder, a model_type"


def _bare(name: str) -> nn.Module:
    """Return the model without weights. Raises ConfigError."""
    from transformers import CONFIG_MAPPING

    from zero3d.models.copies import on_meta
    from zero3d.models.open import open_bare, open_model

    model = Model(path=name, init="random")
    if is_called(model):
        return on_meta(open_model(model).module)  # type: ignore[no-any-return]
    if os.path.exists(name) or name in PRESETS:
        return open_bare(model).module
    if name in CONFIG_MAPPING:
        return _of_type(name)
    near = nearest(name, [*PRESETS, *CONFIG_MAPPING])
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"{short(name)!r} is not a folder, a config.json, a preset, module:function or a model_type of the installed "
        f"transformers.{hint} {FETCH}"
    )


def _of_type(kind: str) -> nn.Module:
    """Return a model of a type with its usual sizes; where those fit no model, a tiny one of images and text."""
    from zero3d.models.build import build
    from zero3d.tools.vision.tiny import tiny_model, types

    try:
        return build(usual_config(kind))
    except ConfigError:
        if kind not in types():
            raise
        return tiny_model(kind)


def usual_config(kind: str) -> Any:
    """Return the config of a whole model of a type with the sizes that transformers gives it. Raises ConfigError.

    Of a vision-language model these are of a tower and of a language model that were not made for each other: the
    tower's features get the width of the other, and its image a token of its vocabulary. Of a type with several kinds
    of layers there is one of each.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES

    from zero3d.models.build import build
    from zero3d.models.layer_kinds import with_each_kind

    def make(**options: Any) -> Any:
        config = AutoConfig.for_model(kind, **options)
        if kind in WITH_IMAGES:
            config.architectures = [WITH_IMAGES[kind]]
            fit_tower(config)
        return config

    try:
        return with_each_kind(make, build)
    except Exception as error:  # any error of its own, quoted
        line = " ".join(str(error).split())
        raise ConfigError(f"transformers has no usual sizes of {kind} that it takes itself: {short(line)}") from error


def fit_tower(config: Any) -> None:
    """Give the tower of a usual config the sizes of its language model."""
    vision: Any = getattr(config, "vision_config", None)
    text = config.get_text_config()
    if hasattr(vision, "out_hidden_size"):
        vision.out_hidden_size = text.hidden_size
    elif hasattr(vision, "embed_dim") and hasattr(vision, "spatial_merge_size"):  # Qwen2-VL, beside a width of its own
        vision.hidden_size = text.hidden_size
    if hasattr(vision, "pixel_shuffle_ratio") and hasattr(vision, "projector_input_dim"):  # Llama 4
        vision.intermediate_size = round(vision.hidden_size / vision.pixel_shuffle_ratio**2)
    if hasattr(config, "mm_tokens_per_image") and hasattr(vision, "image_size"):  # Gemma 3 pools patches, 4 x 4 each
        vision.image_size = 4 * isqrt(config.mm_tokens_per_image) * vision.patch_size
    for name in ("image_token_id", "image_token_index"):
        token = getattr(config, name, None)
        if isinstance(token, int) and token >= text.vocab_size:
            setattr(config, name, text.vocab_size - 1)


def _support_text(found: Support) -> str:
    lines = [f"{found.model}: {count(found.parameters)} parameters, {found.blocks or 'no blocks'}", ""]
    for row in found.rows:
        said = row.refusal or row.what
        head = f"  {row.name:<9}{ANSWERS[row.supported]:<5}"
        lines += textwrap.wrap(said, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head.rstrip()]
    return "\n".join(lines)


def _as_json(found: Support) -> dict[str, Any]:
    return {**found._asdict(), "rows": [row._asdict() for row in found.rows]}


def _as_table(families: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a line of cells for each type: what it supports, or why it cannot be built."""
    names: list[str] = []
    for kind, found in families.items():
        if isinstance(found, str):
            continue
        if not names:
            names = [row["name"] for row in found["rows"]]
            yield ["model_type", *names]
        yield [kind, *(ANSWERS[row["supported"]] for row in found["rows"])]


def _families() -> Iterator[tuple[str, Any]]:
    """Yield each type that AutoModelForCausalLM builds, and the answers of what it builds, or why it cannot be."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from zero3d.models.build import build
    from zero3d.train.setup.support import support_of

    for number, kind in enumerate(sorted(NAMES), 1):
        print(f"{number} of {len(NAMES)}: {kind}", file=sys.stderr, flush=True)
        try:
            config = usual_config(kind)
            config.architectures = None
            model = build(config)
            yield kind, _as_json(depending(support_of(model), model))
        except ConfigError as error:
            yield kind, str(error)
