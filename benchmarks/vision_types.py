"""What becomes of every type that AutoModelForImageTextToText builds: trained, refused, failed, not tried, and why.

    python benchmarks/vision_types.py --json FILE                  all types, each in processes of its own
    python benchmarks/vision_types.py --types llava,qwen3_vl       some of them

Trials are zero3d.tools.vision.trial's. docs/models.md and `zero3d models --vision` show what came of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from zero3d.errors import ConfigError
from zero3d.models.build import build
from zero3d.tools.vision.table import Type
from zero3d.tools.vision.tiny import tiny_config, types
from zero3d.tools.vision.trial import UNTRIED, trial
from zero3d.train.setup.support import support_of

ASKED = {"packing": "packed", "pp": "pp", "tp": "tp"}  # rows of `zero3d models`, and columns of the table
ANSWERS = {True: "yes", False: "no", None: "-"}
SECONDS = 60.0  # that the engine's checks may take


def row(kind: str) -> Type:
    """What becomes of a type."""
    found = trial(kind)
    answers = dict.fromkeys(ASKED.values(), "-") if found.verdict == UNTRIED else _answers(kind)
    return Type(type=kind, trained=found.verdict, **answers, processor=processor(kind), why=found.why)


def processor(kind: str) -> str:
    """Whether there is an image processor without torchvision."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as NAMES

    classes = NAMES.get(kind) or {}
    if classes.get("pil"):
        return "yes"
    return next((package for package, name in classes.items() if name), "-")


def _answers(kind: str) -> dict[str, str]:
    """The engine's checks, asked in a process that is ended where it does not come back."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_ask, args=(kind, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else dict.fromkeys(ASKED.values(), "?")
    except EOFError:
        return dict.fromkeys(ASKED.values(), "?")
    finally:
        process.kill()
        process.join()


def _ask(kind: str, end: Connection) -> None:
    answers = {row.name: ANSWERS[row.supported] for row in support_of(build(tiny_config(kind))).rows}
    end.send({column: answers[name] for name, column in ASKED.items()})
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Try types one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", default="", metavar="TYPE,...", help="those alone; else all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # processes are forked
    chosen = arguments.types.split(",") if arguments.types else list(types())
    if unknown := sorted({*chosen} - {*types()}):
        raise ConfigError(f"{unknown[0]}: AutoModelForImageTextToText builds no such type")
    rows = []
    for number, kind in enumerate(chosen, 1):
        rows.append(row(kind))
        print(f"{number} of {len(chosen)}: {', '.join(rows[-1])}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {
        "transformers": transformers.__version__, "types": [each._asdict() for each in rows],
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    print(text) if arguments.json is None else arguments.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
