"""DeepSpeed's JSON, read and checked key by key: what is left is what asks for something.

DeepSpeed reads its files as Hjson, which every JSON is: a file that is not JSON is read so where that library is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zero3d.config.hints import nearest
from zero3d.errors import ConfigError, short
from zero3d.reading import Unreadable, read_text
from zero3d.ways.deepspeed.keys import (
    CHOICES,
    COMMENT,
    DOTTED,
    IDLE,
    IGNORED,
    OPAQUE,
    OPTIMIZER,
    PARAM,
    REFUSED,
    SECTIONS,
    ZERO,
)

AUTO = "auto"
OF_PROGRAMS = {"optimizer.params.adam_w_mode"}  # which `initialize` takes, and nothing else
NAMED = 8  # other problems that are named
LIKE = 0.6  # difflib's ratio from which a key of the same section is meant
ELSEWHERE = 0.75  # and a key of another section, which may share most of its name with it
SYNONYMS: Mapping[str, str] = MappingProxyType(  # what others call a key, by its last name
    {
        **dict.fromkeys(("learning_rate", "base_lr", "peak_lr"), "optimizer.params.lr"),
        **dict.fromkeys(("beta1", "beta2", "adam_beta1", "adam_beta2"), "optimizer.params.betas"),
        **dict.fromkeys(("epsilon", "adam_eps", "adam_epsilon"), "optimizer.params.eps"),
        **dict.fromkeys(("wd", "l2", "decay", "weight_decay_rate"), "optimizer.params.weight_decay"),
        **dict.fromkeys(("optim", "optimiser"), "optimizer"),
        **dict.fromkeys(("optimizer_type", "optimizer_name", "optimizer.name"), "optimizer.type"),
        **dict.fromkeys(("lr_scheduler", "schedule"), "scheduler"),
        **dict.fromkeys(("lr_scheduler_type", "scheduler_type", "scheduler.name"), "scheduler.type"),
        **dict.fromkeys(("warmup", "warmup_steps", "num_warmup_steps"), "scheduler.params.warmup_num_steps"),
        **dict.fromkeys(("max_steps", "total_steps", "num_training_steps"), "scheduler.params.total_num_steps"),
        **dict.fromkeys(("batch", "batch_size", "global_batch_size"), "train_batch_size"),
        **dict.fromkeys(
            ("micro_batch", "micro_batch_size", "per_device_train_batch_size"), "train_micro_batch_size_per_gpu"
        ),
        **dict.fromkeys(
            ("accumulate", "accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"),
            "gradient_accumulation_steps",
        ),
        **dict.fromkeys(
            (
                "clip",
                "clip_grad",
                "grad_clip",
                "clip_norm",
                "clip_grad_norm",
                "max_norm",
                "max_grad_norm",
                "gradient_clip_val",
            ),
            "gradient_clipping",
        ),
        **dict.fromkeys(("half", "float16"), "fp16"),
        **dict.fromkeys(("dtype", "torch_dtype", "precision", "mixed_precision"), "bf16.enabled"),
        "zero": ZERO,
        "zero_stage": f"{ZERO}.stage",
        **dict.fromkeys(("optimizer_offload", "offload_optimizer_device"), f"{OPTIMIZER}.device"),
        **dict.fromkeys(("param_offload", "offload_param_device"), f"{PARAM}.device"),
        **dict.fromkeys(("logging_steps", "log_every", "print_every"), "steps_per_print"),
        **dict.fromkeys(("random_seed", "manual_seed"), "seed"),
        **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size", "autotp"), "tensor_parallel.autotp_size"),
        **dict.fromkeys(("sp", "sp_size", "sequence_parallel_degree"), "sequence_parallel_size"),
        "gradient_checkpointing": "activation_checkpointing",
        "torch_compile": "compile",
    }
)


class Document(NamedTuple):
    """The values of a JSON by dotted key: those with an effect here, and those without."""

    name: str
    values: dict[str, Any]
    idle: dict[str, Any]

    @property
    def ignored(self) -> list[str]:
        """Return the keys that DeepSpeed does not read either."""
        return [key for key in self.idle if key not in IDLE or key in IGNORED]


def read_document(path: Path, program: bool = False) -> Document:
    """Read a file; program: for `initialize`. Raises ConfigError, one for all keys that are unknown or refused."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Unreadable as error:
        raise ConfigError(f"{path} {error}.") from error
    return document_of(parse(text, str(path)), str(path), program)


def parse(text: str, name: str) -> Any:
    """Return what a JSON holds, or an Hjson where the library for it is there. Raises ConfigError."""
    if not text.strip():
        raise ConfigError(f"{name} is not JSON: it is empty.")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _Twice as error:
        raise ConfigError(f"{name} is not JSON: {error}.") from error
    except json.JSONDecodeError as error:  # its syntax: it may be Hjson
        why = short(str(error))
    except RecursionError as error:
        raise ConfigError(f"{name} is not JSON that Python reads: it is nested too deeply.") from error
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON that Python reads: {short(str(error).partition(';')[0])}.") from error
    try:
        read = import_module("hjson").loads
    except ImportError as error:
        raise ConfigError(f"{name} is not JSON: {why}. If it is Hjson, type pip install hjson.") from error
    try:
        return read(text, object_pairs_hook=_once)
    except Exception as error:  # whatever that library raises
        raise ConfigError(f"{name} is not JSON: {why}. Nor is it Hjson: {short(str(error))}.") from error


def document_of(tree: Any, name: str, program: bool = False) -> Document:
    """Check a JSON that is read already; program: for `initialize`. Raises ConfigError."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name} is not a configuration of DeepSpeed's: it must be a JSON object.")
    flat: dict[str, Any] = {}
    problems = list(_flatten(tree, "", flat))
    refused = REFUSED.keys() - (OF_PROGRAMS if program else set())
    problems += [why for key, value in flat.items() if key in refused and (why := _refusal(flat, key, value))]
    problems += [
        f"{key}={shown(flat[key])}: it must be one of {', '.join(words)}."
        for key, words in CHOICES.items()
        if key in flat and str(flat[key]).upper() not in map(str.upper, words)
    ]
    raise_all(name, problems)
    idle = {key: value for key, value in flat.items() if key in IDLE or _is_comment(key)}
    values = {key: value for key, value in flat.items() if key not in idle and key not in refused}
    return Document(name, values, idle)


def raise_all(name: str, problems: list[str]) -> None:
    """Raise one ConfigError for all problems, if there are any."""
    if problems:
        first, *others = problems
        more = "" if not others else f" And {len(others)} more: " + " ".join(others[:NAMED])
        raise ConfigError(f"{name}: {first}{more}")


def shown(value: Any) -> str:
    """Return a value of a JSON as messages quote it: true, null, 'text', {'a': 1}."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        return short(repr(value))
    except (ValueError, RecursionError):  # numbers of thousands of digits, a thousand levels
        return f"a {type(value).__name__} that is too large to show"


class _Twice(ValueError):
    """Says which key is there twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Twice(f"the key {short(name)} is there twice")
        found[name] = value
    return found


def _flatten(tree: Mapping[str, Any], above: str, flat: dict[str, Any]) -> Iterator[str]:
    """Fill `flat`; yield what is wrong with a key."""
    for key, value in tree.items():
        name = f"{above}{key if isinstance(key, str) else shown(key)}"
        if "." in name.removeprefix(above) and not str(key).startswith(COMMENT):
            yield _unknown(name)
        elif _is_comment(name) or name in OPAQUE or (name in DOTTED and name not in SECTIONS):
            flat[name] = value
        elif name not in SECTIONS:
            yield _unknown(name)
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.", flat)
        elif value not in (None, False):
            yield f"{name} is a section, and has {shown(value)}."


def _is_comment(name: str) -> bool:
    """Return whether a key begins with an underscore, as notes in a JSON do."""
    return any(part.startswith(COMMENT) for part in name.split("."))


def _unknown(name: str) -> str:
    """Say what was probably meant: a key by another name, of the same section, of that name elsewhere."""
    above, _, last = name.rpartition(".")
    everywhere = sorted({*DOTTED, *SECTIONS})
    siblings = {key.rpartition(".")[2]: key for key in everywhere if key.rpartition(".")[0] == above}
    same = [key for key in everywhere if key.rpartition(".")[2] == last]
    other = SYNONYMS.get(name.lower()) or SYNONYMS.get(last.lower().replace("-", "_"))
    if name in DOTTED or name in SECTIONS:
        meant: str | None = None  # its levels are written in one
        above, _, last = name.rpartition(".")
        return f"{name} is written as levels: {above.split('.')[0]}: {{... {last}: ...}}."
    if other is not None:
        meant = other
    elif same:
        meant = same[0]
    elif near := nearest(last, siblings, LIKE):
        meant = siblings[near]
    else:
        meant = nearest(name, [key for key in everywhere if key not in siblings.values()], ELSEWHERE)
    return f"{short(name) or 'an empty name'} is not a key of DeepSpeed's." + (
        f" Did you mean {meant}?" if meant else ""
    )


def _refusal(flat: Mapping[str, Any], key: str, value: Any) -> str | None:
    """Return why a key is refused with this value."""
    row = REFUSED.get(key)
    if row is None or any(value == neutral and type(value) is type(neutral) for neutral in row.neutral):
        return None
    if isinstance(value, Mapping) and not value.get("enabled", bool(value)):
        return None
    if key == "optimizer.params.adam_w_mode" and not flat.get("optimizer.params.weight_decay", 0):
        return None  # without weight decay both are the same
    return f"{key}={shown(value)} is refused: {row.why}; use {row.instead}."
