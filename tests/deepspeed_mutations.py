"""Mutations of DeepSpeed's JSONs, drawn from a seed: values of other types, keys that are lost or have another name."""

import copy
import json
import random

from deepspeed_jsons import ACCEPTED

from zero3d.config import resolve_batch
from zero3d.errors import Zero3dError
from zero3d.ways.deepspeed.document import document_of
from zero3d.ways.deepspeed.keys import DOTTED, SECTIONS
from zero3d.ways.deepspeed.merge import load_merged, together
from zero3d.ways.deepspeed.report import as_yaml, lines

LONGEST = 3000  # characters of a message that names nine problems
DEEP = {"a": [{"b": [{"c": None}]}]}
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 64, 1 << 62, 10**4299, 0.5, -0.0, 1e308, 1e-320, float("inf"), float("-inf"),
    float("nan"), "", "auto", "AUTO", "none", "cpu", "nvme", "x" * 5000, "a\nb", "a\0b", "\u2028", "1e3", "0x10", "null", "true",
    "AdamW", "WarmupLR", "fp16", [], [1], [None, {}], [[]] * 3, ["auto"], [0.9, 0.99], {}, {"enabled": True},
    {"enabled": "auto"}, {"type": []}, {"device": {}}, {"": {"": {}}}, {"a\nb": 1}, DEEP,
]  # fmt: skip
NAMES = [
    "",
    ".",
    "a.b",
    "a\nb",
    "x" * 5000,
    "enabled",
    "device",
    "type",
    "params",
    "lr",
    "stage",
    "learning_rate",
    "\0",
]


def places(tree):
    """All mappings in a tree that have keys, with each of their keys."""
    for key, value in tree.items():
        yield tree, key
        if isinstance(value, dict):
            yield from places(value)


def mutate(tree, source):
    """Change one place of a tree."""
    found = list(places(tree))
    how = source.choice(["replace", "replace", "replace", "drop", "rename", "add", "add"])
    if how == "add" or not found:
        *sections, last = source.choice(sorted({*DOTTED, *SECTIONS})).split(".")
        for section in sections:
            tree = tree.setdefault(section, {}) if isinstance(tree.get(section, {}), dict) else tree
        tree[last] = copy.deepcopy(source.choice(VALUES))
        return
    where, key = source.choice(found)
    if how == "replace":
        where[key] = copy.deepcopy(source.choice(VALUES))
    elif how == "drop":
        del where[key]
    else:
        value, name = where.pop(key), source.choice([*NAMES, key + "s", key[:-1], key.upper(), source.choice(found)[1]])
        where[name] = value


def mutation(number):
    """Case `number`: a JSON, and what the caller says."""
    source = random.Random(number)
    tree, words, _ = ACCEPTED[source.choice(sorted(ACCEPTED))]
    tree = copy.deepcopy(tree)
    for _ in range(source.randint(1, 3)):
        mutate(tree, source)
    return tree, words


def check(number, file):
    """Translate case `number`, from a file or as a mapping; our error's text, or "" for a translation."""
    tree, words = mutation(number)
    try:
        if number % 2:
            file.write_text(json.dumps(tree))
            config, made = load_merged(file, None, words)
            resolve_batch(config.train, 1)
            assert list(lines(made))
            assert list(as_yaml(made))
        else:
            together(document_of(tree, "config"), {}, "the caller")
    except Zero3dError as error:
        said = str(error)
        assert said.isprintable(), f"mutation {number}: {said!r}"
        assert len(said) <= LONGEST, f"mutation {number}: {len(said)}: {said}"
        return said
    except Exception as error:
        raise AssertionError(f"mutation {number}: {short_of(tree)}") from error
    return ""


def short_of(tree):
    try:
        return json.dumps(tree)[:1000]
    except ValueError:
        return "a huge number"
