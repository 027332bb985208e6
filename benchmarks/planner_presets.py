"""Trace every preset for the package: `python benchmarks/planner_presets.py [NAME ...]`, where one is no longer fresh.

A file is written anew where torch, transformers, the preset or the code that traces are others than it says
(tools/plan/preset_specs.py); --all writes all of them. Long tests compare each with a trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zero3d.config import Model
from zero3d.models.presets import PRESETS
from zero3d.tools.plan.preset_specs import FOLDER, preset_spec, write_preset
from zero3d.tools.plan.spec import Forward, ModelSpec

ON_CARD = Forward(on_card=True)


def traced(name: str) -> ModelSpec:
    """Trace a preset as `zero3d plan NAME` does where nothing else is said."""
    from zero3d.tools.sim.model_spec import open_spec

    return open_spec(name, None, chosen=Model(), packed=None, beyond=True, forward=ON_CARD)


def main(words: Sequence[str] | None = None) -> int:
    """Write the files that are not fresh, and say which."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets (default: every one)")
    parser.add_argument("--all", action="store_true", help="write those that are fresh, too")
    arguments = parser.parse_args(words)
    FOLDER.mkdir(exist_ok=True)
    for name in arguments.names or PRESETS:
        if arguments.all or preset_spec(name, None, packed=None, forward=ON_CARD) is None:
            file = write_preset(traced(name))
            print(f"{file.name:24} {file.stat().st_size:9,} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
