"""LLaVA end to end on this machine: a tiny one is made, trained whole on drawn shapes, then adapters learn new shapes.

    python examples/llava_demo/demo.py [FOLDER] [KEY=VALUE ...]

Everything goes into FOLDER (zero3d-demo-llava); the two runs are `zero3d train whole.yaml` and `adapters.yaml` there.
The adapters' run takes KEY=VALUE, too: with model.quantize=nf4 they learn beside a base in 4 bits, and are then asked
on the full one.
"""

import sys
import time
from pathlib import Path

import look
from prepare import RUNS, prepare
from typed import train


def report(folder):
    """Evaluate by generation; print accuracies and write the picture. Returns the accuracies by what was asked."""
    loaded = look.load(folder / "whole" / "hf", folder / "adapters" / "adapter")
    found, shown = {}, []
    for kinds in ("new", "first"):
        told = list(look.answers(loaded, folder, f"{kinds}_held_out"))
        found[kinds] = look.accuracy(told)
        shown += told[:12]
        colour, shape = found[kinds]
        print(f"{kinds} shapes, {len(told)} held-out images: colour {colour:.0%}, shape {shape:.0%}")
    look.picture(shown, folder / "samples.png", "What the adapters say of images they have not seen")
    return found


def main(words):
    """Run the demo; 0 where adapters tell new shapes and colours in more than nine of ten images."""
    folder, begun = Path(words[0] if words else "zero3d-demo-llava"), time.monotonic()
    if folder.exists():
        print(f"{folder} exists: remove it, or name another folder.", file=sys.stderr)
        return 2
    print(prepare(folder))
    whole, adapters = RUNS
    train(folder, whole)
    train(folder, adapters, *words[1:])
    print()
    found = report(folder)
    print(f"samples: {folder / 'samples.png'}    all of it took {time.monotonic() - begun:.0f} s")
    print("next: zero3d train on a folder of your own, as examples/llava_lora.yaml does; docs/llava.md")
    return 0 if min(found["new"]) > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
