"""What the demo needs, in one folder: drawn images with their conversations, a tiny LLaVA, the two files of its runs.

python examples/llava_demo/prepare.py FOLDER
"""

import shutil
import sys
from pathlib import Path

import shapes
import tiny_llava

RUNS = ("whole", "adapters")
DRAWN = {"first": (shapes.FIRST, 3000, 1), "new": (shapes.NEW, 2000, 2), "first_held_out": (shapes.FIRST, 240, 3),
         "new_held_out": (shapes.NEW, 240, 4)}  # fmt: skip


def prepare(folder):
    """Write everything into `folder`; return the line that says so."""
    folder.mkdir(exist_ok=True)
    for name, (kinds, count, seed) in DRAWN.items():
        shapes.save(folder, name, kinds, count, seed)
    for run in RUNS:
        shutil.copy(Path(__file__).parent / f"{run}.yaml", folder)
    parameters = tiny_llava.save(folder / "tiny-llava")
    images = sum(count for _, count, _ in DRAWN.values())
    return f"{folder}: a LLaVA of {parameters:,} parameters, {images:,} images"


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1])))
