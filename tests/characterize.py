"""What commands print and leave, before and after a change that is to change none of it (a refactoring).

    python tests/characterize.py record A    in the checkout before the change
    python tests/characterize.py record B    there again: what differs between A and B is measured, and does not count
    python tests/characterize.py record C    in the checkout after it
    python tests/characterize.py compare A B C

Commands are those of characterize.yaml, each run in a folder of its own by the zero3d of the checkout that this file is in.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SETTINGS = HERE / "characterize.yaml"
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
MODELS = ("llama", "qwen3_moe", "qwen3")  # saved as models/NAME
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def record(into, names):
    """Run the commands; write what each printed and left as INTO/NAME.json."""
    import torch
    import yaml

    torch.set_num_threads(1)
    import zero3d.cli.main
    import zero3d.train.run  # noqa: F401 - forks of this process have it

    settings = yaml.safe_load(SETTINGS.read_text())
    into.mkdir(parents=True, exist_ok=True)
    for name, words in settings["commands"].items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), settings["files"])
            found = run(Path(folder), words.split())
        (into / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{name}: exit code {found['code']}", flush=True)


def prepare(folder, files):
    """Make what commands read: models, rows of token ids, files of the settings."""
    from training import save_model, save_rows

    for name in MODELS:
        save_model(folder / "models" / name, name)
    save_rows(folder / "rows.npy")
    for name, text in files.items():
        (folder / name).write_text(text)


def run(folder, words):
    """Run `zero3d WORDS` in the folder, in a fork; return its exit code, what it printed, and its metrics."""
    from commands import run_in_fork

    output = folder / "printed"
    output.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    if not (pid := os.fork()):
        code = 1
        try:
            code = run_in_fork(words, folder, environment, output)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def text_of(path):
        return path.read_text(errors="replace").replace(str(folder.resolve()), "FOLDER")

    printed = text_of(output / "stdout")
    found = {"code": code, "printed": json.loads(printed) if printed.startswith(("{", "[")) else printed.splitlines()}
    if code:
        found["error"] = text_of(output / "stderr").splitlines()
    for name in ("metrics.jsonl", "config.yaml", "emitted.yaml", "emitted.json"):
        for path in sorted(folder.rglob(name)):
            found[str(path.relative_to(folder))] = text_of(path).splitlines()
    shutil.rmtree(output)
    return found


def leaves(found, place=()):
    """Yield (place, value) of everything in nested data; of texts every number and what stands between is one."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from leaves(value, (*place, key))
    elif isinstance(found, list):
        yield (*place, "length"), len(found)
        for number, value in enumerate(found):
            yield from leaves(value, (*place, number))
    elif isinstance(found, str):
        yield (*place, "words"), NUMBER.sub("#", found)
        yield from (((*place, f"number {k}"), value) for k, value in enumerate(NUMBER.findall(found)))
    else:
        yield place, found


def compare(before, again, after):
    """Print what differs after the change and did not between two runs before it; return how many commands differ."""
    names = [{path.stem for path in folder.glob("*.json")} for folder in (before, again, after)]
    differing = 0
    for name in sorted(set.union(*names)):
        if not all(name in found for found in names):
            print(f"{name}: not in all three")
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
            for place in sorted(differ, key=str)[:10]:
                print(f"  {' '.join(map(str, place))}: {first[place]!r} -> {third.get(place)!r}")
            for place in sorted(new, key=str)[:10]:
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
    verb.add_argument("names", nargs="*")
    verb = verbs.add_parser("compare")
    for name in ("before", "again", "after"):
        verb.add_argument(name, type=Path)
    given = parser.parse_args()
    if given.verb == "record":
        record(given.into.resolve(), set(given.names))
        return 0
    return 1 if compare(given.before, given.again, given.after) else 0


if __name__ == "__main__":
    sys.exit(main())
