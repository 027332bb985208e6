"""Mutations of configurations, drawn from a seed: a file's text and overrides as nobody would write them."""

import random
from functools import cache

from zero3d.config import load, to_yaml
from zero3d.errors import Zero3dError

PARTS = ["\0", "\t", "\n", " ", "[", "]", "{", "}", ":", ": ", "- ", "? ", "&a ", "*a", "<<: *a", "!", "!!int ", "!!timestamp ",
         "|", ">", "'", '"', "#", "%", "@", "`", "---\n", "...\n", "1:30", "010", "0x", "0b1", "1e999", ".nan", ".inf", "-0",
         "9" * 30, "~", "null", "yes", "=", "\ufeff", "\x85", "\u2028", "\U0001f600", "\\ud800", "\\0", ",", "every:", "e" * 99]  # fmt: skip


def mutated(text, source):
    """A few places of the text deleted, doubled, swapped or filled with what has a meaning in YAML."""
    for _ in range(source.randint(1, 4)):
        start = source.randrange(len(text) + 1)
        stop = min(len(text), start + source.choice([0, 0, 1, 3, 20]))
        other = source.randrange(len(text) + 1)
        text = text[:start] + source.choice([source.choice(PARTS), text[other : other + 20], ""]) + text[stop:]
    return text


@cache
def good():
    """A configuration with about a third of all keys, so that not every mutation meets the same ones."""
    whole = to_yaml(load(None, ["data.train=a,b", "mesh.tp_plan={a: colwise}", "output=x"])).splitlines(keepends=True)
    return "".join(line for line in whole if line.endswith(":\n") or sum(line.encode()) % 3 == 0)


OVERRIDES = ["train.steps=12", "data.train=a,b", "mesh.tp_plan={a: colwise}", "optimizer.betas=0.9,0.95", "zero.stage=3",
             "output=x", "checkpoint.every=5", "optimizer.lr=3e-4", "activations=every:4", "data.validation=0.1"]  # fmt: skip


def mutation(number):
    """Case `number`: the bytes of a file, and overrides, of which half the cases have some."""
    source = random.Random(number)
    text = mutated(good(), source).encode("utf-8", "surrogatepass")
    return text, [mutated(source.choice(OVERRIDES), source) for _ in range(source.choice([0, 0, 1, 2]))]


def mutated_load(file, number):
    """Load case `number` from a file; our error's text, or "" for a configuration. All else is a failure."""
    text, overrides = mutation(number)
    file.write_bytes(text)
    try:
        load(file, overrides)
    except Zero3dError as error:
        said = str(error).replace(str(file.parent), "")
        assert "\n" not in said, f"mutation {number}: {said}"
        assert len(said) <= 900, f"mutation {number}: {said}"
        return said
    except Exception as error:
        raise AssertionError(f"mutation {number}: {text!r}, {overrides}") from error
    return ""
