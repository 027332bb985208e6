"""How long `zero3d doctor` takes on this machine, from typing it to its answer, and how many probes are ok.

    python benchmarks/doctor.py --json out.json

Names and addresses of the machine, which the doctor prints, are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

TARGET = 20.0  # seconds on a healthy machine without GPUs
COMMAND = [sys.executable, "-P", "-m", "zero3d.tools.cli.main", "doctor", "--json"]


def main(argv: Sequence[str] | None = None) -> int:
    """Examine this machine so many times, print the median and write all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for everything measured")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds is a whole number from 1")
    rounds = [one_round() for _ in range(arguments.rounds)]
    taken = median(each["seconds"] for each in rounds)
    result = {"target": TARGET, "rounds": rounds, "median": taken, "met": taken <= TARGET}
    print(f"{taken:.1f} s (at most {TARGET:.0f} s: {'met' if result['met'] else 'MISSED'}); {rounds[-1]['rows']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def one_round() -> dict[str, object]:
    """Return the seconds of one examination, its verdict, and how many rows have which verdict."""
    begun = time.monotonic()
    done = subprocess.run(COMMAND, capture_output=True, text=True)
    seconds = time.monotonic() - begun
    told = json.loads(done.stdout)
    rows = Counter(finding["verdict"] for finding in told["findings"])
    return {"seconds": seconds, "verdict": told["verdict"], "rows": dict(sorted(rows.items()))}


if __name__ == "__main__":
    sys.exit(main())
