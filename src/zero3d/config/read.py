"""A Config from a YAML file or a dict, and from dotted overrides.

    file or dict --flatten--> {"zero.stage": 2, ...} <--parse-- "zero.stage=2"
                                     |
                          Key.read: type and range of each
                                     |
                          Config, then checks across keys

Problems are collected; one ConfigError tells the first and names the keys of the others.
Relative paths stay as they are written, relative to the current directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zero3d.config.hints import unknown
from zero3d.config.keys import KEYS, SECTIONS, takes_list, takes_names, takes_table, value_of
from zero3d.config.kinds import describe_value
from zero3d.config.problems import problems_across
from zero3d.config.retired import FILE, RETIRED, answer, as_now, is_of_a_run
from zero3d.config.sections import Config
from zero3d.config.yaml_file import parse_yaml, read_yaml
from zero3d.errors import ConfigError, short

NAMED = 8  # other problems that are named
EITHER = {"train.steps": "train.epochs", "train.epochs": "train.steps"}  # say the same in two ways


class Problem(NamedTuple):
    """Says what is wrong with one key. text: None for one that does not exist."""

    key: str
    where: str
    text: str | None = None

    def message(self) -> str:
        """Return its message. The nearest key is looked for only here, for the one problem that is shown."""
        return self.where + (unknown(self.key, KEYS, SECTIONS) if self.text is None else self.text)


class Setting(NamedTuple):
    """Holds a value as it was written, and where."""

    value: Any
    where: str  # put before a message about it
    override: bool = False


def load(source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration. Raises ConfigError.

    source       a YAML file, a dict of the same form, or None for the defaults
    overrides    such as zero.stage=2, data.train=a.txt,b.txt, data.train=[a.txt], optimizer.clip_norm=null;
                 they win over the source, and the last one of a key wins; train.steps displaces the
                 source's train.epochs, and the other way round
    """
    values, settings, problems = _given(source, overrides)
    config = _build(values)
    problems += [problem._replace(where=settings[problem.key].where) for problem in _across(config)]
    _raise(problems)
    return config


def given_keys(source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys that a source and overrides give a value, by dotted name. Raises ConfigError."""
    values, _, problems = _given(source, overrides)
    _raise(problems)
    return values


def _given(
    source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Setting], list[Problem]]:
    """Return values that are read, where each was written, and what is wrong so far."""
    settings: dict[str, Setting] = {}
    problems: list[Problem] = []
    if source is not None:
        tree = source if isinstance(source, Mapping) else read_tree(Path(source))
        where = "" if isinstance(source, Mapping) else f"{source}: "
        problems += _flatten(tree, where, settings)
    for override in overrides:
        problems += _override(override, settings)
    if retired := {name: settings.pop(name) for name in RETIRED if name in settings}:
        given, others = ({name: setting.value for name, setting in some.items()} for some in (retired, settings))
        name, first = next(iter(retired.items()))
        problems.insert(0, Problem(name, first.where, answer(given, others)))
    values: dict[str, Any] = {}
    for name, (value, where, _) in settings.items():
        try:
            values[name] = KEYS[name].read(value)
        except ValueError as error:
            problems.append(Problem(name, where, str(error)))
    return values, settings, problems


def read_tree(path: Path) -> Mapping[Any, Any]:
    """Return the tree of a run's file; of one that an old run wrote, with the keys of now. Raises ConfigError."""
    tree = read_yaml(path)
    return as_now(tree) if path.name == FILE and is_of_a_run(path, tree.get("output")) else tree


def check(config: Config) -> None:
    """Refuse a Config built in Python that `load` would not have returned. Raises ConfigError."""
    problems = list(_across(config))
    for name, key in KEYS.items():
        value = value_of(config, name)
        try:
            if (read := key.read(value)) != value:
                text = f"{name} takes {key.wants}; write {short(repr(read))} instead of {short(repr(value))}."
                problems.append(Problem(name, "", text))
        except ValueError as error:
            problems.append(Problem(name, "", str(error)))
    _raise(problems)


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the words of a command line into [CONFIG] and [overrides...]. Raises ConfigError."""
    first, rest = (words[0], list(words[1:])) if words else (None, [])
    if first is not None and "=" in first and not os.path.isfile(first):  # a Path's own raises for long words
        first, rest = None, list(words)
    for word in rest:
        if "=" not in word:
            raise ConfigError(f"{_not_a_pair(word)} Only the first word may be a file.")
    return first, rest


def _flatten(tree: Mapping[Any, Any], where: str, settings: dict[str, Setting]) -> Iterator[Problem]:
    """Fill `settings` from nested mappings; what is no key is yielded."""
    for name, value in tree.items():
        if name in KEYS and "." in name:
            yield Problem(name, where)
        elif name not in SECTIONS:
            yield from _take(str(name), value, where, settings)
        elif isinstance(value, Mapping):
            for field, inner in value.items():
                yield from _take(f"{name}.{field}", inner, where, settings)
        elif value is not None:  # a section whose keys are all commented out is null
            example = next(key for key in KEYS if key.startswith(f"{name}."))
            text = f"{name} is a section: write keys under it, such as {example}. All: zero3d config explain {name}"
            yield Problem(name, where, text)


def _override(word: str, settings: dict[str, Setting]) -> Iterator[Problem]:
    """Fill `settings` from one dotted override."""
    name, equals, text = (part.strip() for part in word.partition("="))
    where = f"override {_typed(word)}: "
    if not equals or not name:
        yield Problem(name, "", _not_a_pair(word))
    elif name in SECTIONS:
        example = next(key for key in KEYS if key.startswith(f"{name}."))
        yield Problem(name, where, f"{name} is a section: type one of its keys, such as {example}=VALUE.")
    elif name not in KEYS and (table := name.rpartition(".")[0]) in KEYS and takes_names(KEYS[table]):
        before = settings[table].value if table in settings else None
        both = {**(before if isinstance(before, Mapping) else {}), name.rpartition(".")[2]: text}
        yield from _take(table, both, where, settings, override=True)
    else:
        other = settings.get(EITHER.get(name, ""))
        if other is not None and not other.override and text.lower() not in ("", "null", "none", "~"):
            del settings[EITHER[name]]
        yield from _take(name, _listed(name, text), where, settings, override=True)


def _not_a_pair(word: str) -> str:
    return (
        f"override {_typed(word)} is not KEY=VALUE: type {word if word in KEYS else 'KEY'}=VALUE, such as zero.stage=2."
    )


def _typed(word: str) -> str:
    return describe_value(word).removeprefix("the text ")


def _listed(name: str, text: str) -> Any:
    """Return lists of commas and brackets, mappings of braces, where the key takes one; else the text."""
    if name not in KEYS or not (takes_list(KEYS[name]) or takes_table(KEYS[name])):
        return text
    if text.startswith("[{"[takes_table(KEYS[name])]):
        try:
            return parse_yaml(text)
        except (yaml.YAMLError, ValueError):  # a file may be named [a].txt
            return text
    return [part.strip() for part in text.split(",")] if "," in text and takes_list(KEYS[name]) else text


def _take(name: str, value: Any, where: str, settings: dict[str, Setting], override: bool = False) -> Iterator[Problem]:
    if name in KEYS or name in RETIRED:
        settings[name] = Setting(value, where, override)
    else:
        yield Problem(name, where)


def _build(values: Mapping[str, Any]) -> Config:
    """Return the Config of checked values by dotted name."""
    top = {name: value for name, value in values.items() if "." not in name}
    for section, kind in SECTIONS.items():
        fields = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
        top[section] = kind(**fields)
    return Config(**top)


def _across(config: Config) -> Iterator[Problem]:
    """Yield problems that no key shows alone; the key of each is one that was given."""
    return (Problem(name, "", why) for name, why in problems_across(config))


def _raise(problems: Sequence[Problem]) -> None:
    if not problems:
        return
    keys = list(dict.fromkeys(problem.key for problem in problems[1:]))
    listed = ", ".join(map(short, keys[:NAMED])) + ", ..." * (len(keys) > NAMED)
    more = f" And {len(keys)} more problem{'s' * (len(keys) > 1)}: {listed}." if keys else ""
    raise ConfigError(problems[0].message() + more)
