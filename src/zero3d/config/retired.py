"""Keys of an earlier version: each is answered in one line with what to type now, and an old run's file still reads.

    typed, or in a file      ConfigError: the key, that it is retired, and the keys of now with the value it had
    OUTPUT/config.yaml       read as the keys of now, so that the run which wrote it goes on

A row is deleted one release after its key. docs/retired.md lists the rows.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

from zero3d.config.kinds import convert
from zero3d.errors import short

FILE = "config.yaml"  # of a run, in its output folder


class Retired(NamedTuple):
    """Describes a key that is gone.

    types  what it took; null and false asked for nothing
    now    keys that say the same, {value} being its value; a tuple is added to the list that is there
    note   what to do where no key says the same, {output} being the run's folder
    """

    types: tuple[Any, ...]
    now: Mapping[str, str | tuple[str, ...]]
    note: str = ""


RETIRED: Mapping[str, Retired] = MappingProxyType(
    {
        "log.tensorboard": Retired((bool,), {"log.to": ("tensorboard",)}),
        "log.wandb": Retired((str, NoneType), {"log.to": ("wandb",), "log.project": "{value}"}),
        "plan.write_back": Retired(
            (bool,),
            {},
            "after ten steps a run writes its rates to {output}/profile.json, so leave plan.write_back out and type "
            "plan.cluster={output}/profile.json for the next run",
        ),
    }
)


def answer(given: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return the line that answers retired keys and their values. others: the values of keys that stay, as written."""
    *most, last = given
    asked = {name: RETIRED[name] for name, value in given.items() if _meant(name, value) not in (None, False)}
    now = [f"{key}={_typed(value)}" for key, value in replaced(given, others).items()]
    words = [f"type {' '.join(now)} in {'their' if most else 'its'} place"] if now else []
    output = short(str(others.get("output") or "OUTPUT"))
    words += [row.note.format(output=output) for row in asked.values() if row.note]
    keys = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    return f"{keys} retired: {'; '.join(words) or ('leave them out' if most else 'leave it out')}."


def example(name: str) -> Any:
    """Return a value that a retired key might have had."""
    return "PROJECT" if str in RETIRED[name].types else True


def replaced(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of now, with values, that say what retired ones with these values asked for."""
    now: dict[str, Any] = {}
    for name, value in given.items():
        meant = _meant(name, value)
        if meant in (None, False):
            continue
        for key, new in RETIRED[name].now.items():
            if isinstance(new, str):
                now[key] = new.format(value=meant if isinstance(meant, str) else short(meant))
            else:
                now[key] = list(dict.fromkeys([*now.get(key, _listed(others.get(key))), *new]))
    return now


def as_now(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the tree of an old run's file without retired keys, and with what they asked for."""
    sections = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    flat = {f"{key}.{name}": value for key, section in sections.items() for name, value in section.items()}
    given = {name: flat.pop(name) for name in RETIRED if name in flat}
    now = dict(tree)
    for name in given:
        section, _, key = name.partition(".")
        now[section] = {name: value for name, value in now[section].items() if name != key}
    for name, value in replaced(given, flat).items():
        section, _, key = name.partition(".")
        now[section] = {**now[section], key: value}
    return now


def is_of_a_run(file: Path, output: object) -> bool:
    """Return whether a run wrote a file: `output` in it names its folder, or checkpoints lie beside it."""
    folder = file.resolve().parent
    try:
        is_named = isinstance(output, str) and Path(output).resolve().name == folder.name
    except (OSError, ValueError):  # a name that no folder has
        is_named = False
    return is_named or any(folder.glob("checkpoints/*step-*/manifest.json"))


def _meant(name: str, value: Any) -> Any:
    """Return a retired key's value as it was read; as it is where it would have been refused."""
    try:
        return convert(value, RETIRED[name].types)
    except ValueError:
        return value


def _listed(value: Any) -> list[str]:
    try:
        return list(convert(value, (tuple[str, ...], NoneType)) or ())
    except ValueError:
        return []


def _typed(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else shlex.quote(short(value))
