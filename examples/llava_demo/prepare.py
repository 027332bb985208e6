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


def lay_out(folder, files, sizes=shapes.SIZES):
    """Draw all images in these sizes and copy the runs' files, into `folder`; return how many images there are."""
    folder.mkdir(exist_ok=True)
    for name, (kinds, count, seed) in DRAWN.items():
        shapes.save(folder, name, kinds, count, seed, sizes)
    for file in files:
        shutil.copy(file, folder)
    return sum(count for _, count, _ in DRAWN.values())


def prepare(folder):
    """Write everything into `folder`; return the line that says so."""
    images = lay_out(folder, [Path(__file__).parent / f"{run}.yaml" for run in RUNS])
    parameters = tiny_llava.save(folder / "tiny-llava")
    return f"{folder}: a LLaVA of {parameters:,} parameters, {images:,} images"


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1])))
