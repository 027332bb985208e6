"""What commands print and leave, before and after a change that is to change none of it (a refactoring).

    python tests/characterize.py record A    in the checkout before the change
    python tests/characterize.py record B    there again: what differs between A and B is measured, and does not count
    python tests/characterize.py record C    in the checkout after it
    python tests/characterize.py compare A B C

`record A 'plan*' tensor` runs the commands with these names alone, and `record A --short` those that tell the most in the least
time. Commands are those of characterize.yaml, each run in a folder of its own by the zero3d of the checkout that this file is in;
where a line has several, with && between them, they share the folder.

What is recorded of a command: its exit code; what it printed, parsed where that is JSON; errors; metrics and configurations that
it wrote; the SHA-256 of every file of a checkpoint, and the content of those in JSON; and of every rank of `train` all that its
ledgers and arenas were told, in that order, from the engine's construction on (`Told`).

Checkpoints are hashed as they are. Without help they would differ from run to run in the states of Python's and numpy's random
numbers, which training does not seed: `seed` does, in every process.
"""

import argparse
import functools
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).parent
SETTINGS = HERE / "characterize.yaml"
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
MODELS = ("llama", "qwen3_moe", "qwen3")  # saved as models/NAME
VOCAB = 64  # of these models, which tp can divide
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
DIGEST = re.compile(r"[0-9a-f]{16,}")
EVENTS = "events of rank "  # begins the name of a file with what a rank's ledgers and arenas were told


def record(into, names, short):
    """Run the commands; write what each printed and left as INTO/NAME.json."""
    import torch
    import yaml

    torch.set_num_threads(1)
    import zero3d.tools.cli.main
    import zero3d.train.run  # noqa: F401 - forks of this process have it

    os.register_at_fork(after_in_child=seed)
    settings = yaml.safe_load(SETTINGS.read_text())
    wanted = [*names, *(settings["short"] if short else ())] or ["*"]
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as prepared:
        prepare(Path(prepared), settings["files"])
        for name, line in settings["commands"].items():
            if not any(fnmatch(name, pattern) for pattern in wanted):
                continue
            begin = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(prepared, folder, dirs_exist_ok=True)
                ran = [run(Path(folder), words.split()) for words in line.split("&&")]
                found = {**ran.pop(), **left_by(Path(folder)), **({"before": ran} if ran else {})}
            (into / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            print(f"{name}: exit code {found['code']}, {time.monotonic() - begin:.1f} s", flush=True)


def seed():
    """Seed what a run does not: the random numbers of Python and numpy."""
    import numpy

    random.seed(0)
    numpy.random.seed(0)  # the global state, which checkpoints hold


def prepare(folder, files):
    """Make what commands read: models, rows of token ids, images with texts, files of the settings."""
    import pictures
    from training import save_model, save_rows

    for name in MODELS:
        save_model(folder / "models" / name, name, vocab=VOCAB)
    save_model(folder / "models" / "deep", vocab=VOCAB, num_hidden_layers=4)  # a config: its weights are of two layers
    pictures.save_model(folder / "models" / "llava")
    pictures.save_data(folder, pictured=8, plain=4)
    save_rows(folder / "rows.npy")
    for name, text in files.items():
        (folder / name).write_text(text)


def run(folder, words):
    """Run `zero3d WORDS` in the folder, in a fork; return its exit code and what it printed."""
    from commands import run_in_fork

    output = folder / "printed"
    output.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    if not (pid := os.fork()):
        code = 1
        try:
            if words[0] == "train":
                Told(folder).listen()
            code = run_in_fork(words, folder, environment, output)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    printed = text_of(output / "stdout", folder)
    found = {"code": code, "printed": json.loads(printed) if printed.startswith(("{", "[")) else printed.splitlines()}
    if code:
        found["error"] = text_of(output / "stderr", folder).splitlines()
    shutil.rmtree(output)
    return found


def text_of(path, folder):
    """Read a file; where the folder is does not matter."""
    return path.read_text(errors="replace").replace(str(folder.resolve()), "FOLDER")


def left_by(folder):
    """Read what commands left in their folder: files of a run, checkpoints, what ledgers and arenas were told."""
    found = {}
    for pattern in ("metrics.jsonl", "config.yaml", "emitted.yaml", "emitted.json", f"{EVENTS}*"):
        for path in sorted(folder.rglob(pattern)):
            found[str(path.relative_to(folder))] = text_of(path, folder).splitlines()
    for path in sorted(folder.glob("*/checkpoints/*/*")):
        name = str(path.relative_to(folder))
        found[f"sha256 of {name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix == ".json":
            found[name] = json.loads(path.read_text())
    return found


class Told:
    """Writes what ledgers, arenas and the engine of this process, and of its forks, are told into files, one for each rank."""

    def __init__(self, folder):
        self.folder = folder
        self.files = {}  # by process

    def listen(self):
        """Write a line for each call of these methods."""
        from zero3d import Engine
        from zero3d.distributed.ledger import Ledger
        from zero3d.memory.arena import Arena

        self.hear(Ledger, ("record", "widen", "reset"), lambda ledger: "ledger")
        self.hear(
            Arena,
            ("allocate", "hold", "let_go", "borrow", "give_back", "fill", "drain", "reset_peaks"),
            lambda arena: f"arena of {arena.place}",
        )
        self.hear(Engine, ("_open", "train_batch", "step"), lambda engine: "engine", given=False)

    def hear(self, owner, names, whose, given=True):
        """Have a class's methods write lines; given: with their arguments, before they are called, else when they are over."""
        for name in names:
            setattr(owner, name, self.heard(getattr(owner, name), name, whose, given))

    def heard(self, method, name, whose, given):
        """Return a method that writes a line for each of its calls."""

        def call(this, *args, **named):
            if given:
                values = [*args, *(f"{key}={value}" for key, value in named.items())]
                self.write(f"{whose(this)}: {name} {' '.join(map(as_word, values))}")
            result = method(this, *args, **named)
            if not given:
                self.write(f"{whose(this)}: {name} is over")
            return result

        return functools.wraps(method)(call)

    def write(self, line):
        """Write a line into this rank's file."""
        if os.getpid() not in self.files:
            name = f"{EVENTS}{os.environ.get('RANK', '0')}"
            self.files[os.getpid()] = open(self.folder / name, "a", buffering=1)  # noqa: SIM115 - as long as the process
        self.files[os.getpid()].write(f"{line}\n")


def as_word(value):
    """Return an argument in a line: of a tensor its shape and dtype."""
    return f"{list(value.shape)} {value.dtype}" if hasattr(value, "shape") else str(value)


def leaves(found, place=()):
    """Yield (place, value) of everything in nested data; of texts every number and what stands between is one, and events and digests are whole."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from leaves(value, (*place, key))
    elif isinstance(found, list):
        yield (*place, "length"), len(found)
        for number, value in enumerate(found):
            yield from leaves(value, (*place, number))
    elif isinstance(found, str) and (place[0].startswith(EVENTS) or DIGEST.fullmatch(found)):
        yield place, found
    elif isinstance(found, str):
        yield (*place, "words"), NUMBER.sub("#", found)
        yield from (((*place, f"number {k}"), value) for k, value in enumerate(NUMBER.findall(found)))
    else:
        yield place, found


def in_order(place):
    """Sort places as one reads: tenth after second."""
    return [(isinstance(step, str), step if isinstance(step, int) else 0, str(step)) for step in place]


def compare(before, again, after):
    """Print what differs after the change and did not between two runs before it; return how many commands differ."""
    names = [{path.stem for path in folder.glob("*.json")} for folder in (before, again, after)]
    differing = 0
    if missing := len((names[0] | names[1]) - names[2]):
        print(f"{missing} commands were not run after the change")
    for name in sorted(names[2]):
        if not all(name in found for found in names):
            print(f"{name}: was not run twice before the change")
            differing += 1
            continue
        first, second, third = (
            dict(leaves(json.loads((folder / f"{name}.json").read_text()))) for folder in (before, again, after)
        )
        same = {place for place, value in first.items() if second.get(place, ...) == value}
        measured = set(first) ^ set(second) | {place for place in first if place not in same}
        differ = [place for place in same if third.get(place, ...) != first[place]]
        new = [place for place in third if place not in first and place not in measured]
        if differ or new:
            differing += 1
            print(f"{name}: {len(differ)} of {len(same)} differ, {len(new)} are new")
            for place in sorted(differ, key=in_order)[:10]:
                print(f"  {' '.join(map(str, place))}: {first[place]!r} -> {third.get(place)!r}")
            for place in sorted(new, key=in_order)[:10]:
                print(f"  {' '.join(map(str, place))}: new, {third[place]!r}")
        else:
            print(f"{name}: {len(same)} equal, {len(first) - len(same)} measured")
    return differing


def main():
    """Record or compare; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("record")
    verb.add_argument("into", type=Path)
    verb.add_argument("names", nargs="*", help="names of commands, * stands for any letters (default: all)")
    verb.add_argument("--short", action="store_true", help="the commands that characterize.yaml lists as short")
    verb = verbs.add_parser("compare")
    for name in ("before", "again", "after"):
        verb.add_argument(name, type=Path)
    given = parser.parse_args()
    if given.verb == "record":
        record(given.into.resolve(), given.names, given.short)
        return 0
    return 1 if compare(given.before, given.again, given.after) else 0


if __name__ == "__main__":
    sys.exit(main())
