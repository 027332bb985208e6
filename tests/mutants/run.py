"""Plant each fault of tests/mutants/*.yaml in a copy of the checkout and run the tests that may see it: `make mutants`.

found     a test failed, hung, or died of a signal: the ledger names the first one
survived  all passed
broken    no test was run: the fault ends in an error of import or collection, or its text is not in the file once

results.json and TABLE.md keep what came of it, and of the first time. Exit code 1 where a fault survives that is not said to be equivalent.

A fault is {name, kind, file, text, replacement, fault, tests}: `text` stands once in src/zero3d/`file`; `tests` are files
or cases of `make test`, the likeliest first; `equivalent` says why nobody can see it. `long: true` stands where no short
case finds it: the cases of `tests` that are marked long are run for it, too (-m "long or not long").
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS, TABLE = HERE / "results.json", HERE / "TABLE.md"
PRELOADED = ["torch._dynamo", "transformers.models.llama.modeling_llama", "pytest", "numpy"]
TIMEOUT = 240.0  # seconds; the tests of a fault take about 20


def ledger():
    """All faults by "package/name"."""
    return {
        f"{path.stem}/{fault['name']}": fault
        for path in sorted(HERE.glob("*.yaml"))
        for fault in yaml.safe_load(path.read_text())
    }


def copy_of(root, folder):
    """Copy what git knows of a checkout, and files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (source := root / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def arguments_of(fault):
    """Return the arguments with which pytest runs the tests of a fault."""
    marked = ["-m", "long or not long"] if fault.get("long") else []
    return ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", *marked, *fault["tests"]]


def run_tests(folder, arguments, log):
    """Run pytest in the copy as a process that has imported nothing of zero3d; never returns."""
    os.setsid()
    os.chdir(folder)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "src")}
    sys.path[:0] = [str(folder / "src")]
    import pytest

    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(code)


def tried(fault, folder, context):
    """Run the tests of one fault in a copy of the checkout; return its row of results."""
    path = folder / "src" / "zero3d" / fault["file"]
    whole, log = path.read_text(), folder.with_suffix(".log")
    if whole.count(fault["text"]) != 1:
        return {"found": "broken", "by": f"the text stands {whole.count(fault['text'])} times in the file"}
    began = time.monotonic()
    path.write_text(whole.replace(fault["text"], fault["replacement"]))
    try:
        process = context.Process(target=run_tests, args=(folder, arguments_of(fault), log))
        process.start()
        process.join(TIMEOUT)
        hangs = process.exitcode is None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    finally:
        path.write_text(whole)
    said = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)(.*)", said, re.MULTILINE)
    dies = process.exitcode is not None and process.exitcode < 0  # of a signal, as where it reads freed memory
    seen = hangs or dies or process.exitcode == 1
    row = {"found": "found" if seen else "survived" if process.exitcode == 0 else "broken"}
    by = "hangs" if hangs else "its process dies" if dies else failed[1] if failed else f"exit code {process.exitcode}"
    return row | ({"by": by} if row["found"] != "survived" else {}) | {"seconds": round(time.monotonic() - began)}


def run(faults, root, jobs):
    """Return the rows of these faults, tried by several at once, each in its own copy."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as scratch:
        free = SimpleQueue()
        for number in range(jobs):
            free.put(copy_of(root, Path(scratch) / str(number)))

        def one(name):
            folder = free.get()
            try:
                row = tried(faults[name], folder, context)
            finally:
                free.put(folder)
            print(f"{name}: {row['found']} {row.get('by', '')} ({row.get('seconds', 0)} s)", flush=True)
            return name, row

        with ThreadPoolExecutor(jobs) as pool:
            return dict(pool.map(one, faults))


def table(faults, results):
    """Markdown: the counts, and a row per fault."""
    counted = {kind: sum(row["found"] == kind for row in results.values()) for kind in ("found", "survived", "broken")}
    lines = [
        f"{len(results)} faults: " + ", ".join(f"{count} {kind}" for kind, count in counted.items()),
        "",
        "| fault | kind | at first | now | by |",
        "|---|---|---|---|---|",
    ]
    for name, row in results.items():
        by = "equivalent: " + faults[name]["equivalent"] if "equivalent" in faults[name] else row.get("by", "")
        kind = faults[name]["kind"].replace("_", " ")
        lines.append(f"| {name} | {kind} | {row['at first']} | {row['found']} | {by.replace('|', ' ')} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PACKAGE[/NAME]", help="these faults alone (default: all)")
    parser.add_argument("--jobs", type=int, default=max(2, os.cpu_count() or 2), help="faults at the same time")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout whose tests are run")
    arguments = parser.parse_args()
    faults = ledger()
    wanted = {
        name: fault
        for name, fault in faults.items()
        if not arguments.names or {name, name.partition("/")[0]} & set(arguments.names)
    }
    fresh = run(wanted, arguments.root.resolve(), arguments.jobs)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, row in fresh.items():
        row["at first"] = kept.get(name, row).get("at first", row["found"])
    results = {name: (kept | fresh)[name] for name in faults if name in kept or name in fresh}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    TABLE.write_text(table(faults, results))
    left = [name for name, row in fresh.items() if row["found"] != "found" and "equivalent" not in faults[name]]
    print(f"{len(fresh) - len(left)} of {len(fresh)} found" + "".join(f"\n  not found: {name}" for name in left))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
