"""Qwen3-VL end to end on this machine: a tiny one learns drawn shapes in full, then adapters learn new shapes.

    python examples/vlm_demo/demo.py [FOLDER]

Everything goes into FOLDER (zero3d-demo-vlm). The first steps are run four times: with ZeRO-2 and with ZeRO-3 on two
ranks, in two pipeline stages, and with each sequence on two ranks. Their losses must be the same. Then come a run in
full and two of adapters, one beside the model in fp32 and one beside it in 4 bits. A picture has the losses, and four
images that no run has seen, with what each model says of them.
"""

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "llava_demo"))  # whose shapes these are, and how models are run and asked

import drawing  # noqa: E402
import look  # noqa: E402
import tiny_qwen3_vl  # noqa: E402
from prepare import lay_out  # noqa: E402
from typed import train  # noqa: E402

from zero3d.data.images import open_processor  # noqa: E402

FILES = ("whole.yaml", "adapters.yaml")
SPLITS = {
    "ZeRO-2, dp 2": "zero.stage=2",
    "ZeRO-3, dp 2": "zero.stage=3",
    "two pipeline stages": "mesh.pp=2",
    "sequences on two ranks": "mesh.sp=2",
}
STEPS, NEAR = 40, 1e-5  # of the runs that are compared, and how far apart their losses may be
MODELS = {  # by how they were trained: the model, and an adapter
    "not trained": ("tiny-qwen3-vl", None),
    "in full": ("whole/hf", None),
    "LoRA": ("whole/hf", "adapters/adapter"),
    "LoRA on nf4": ("whole/hf", "adapters-nf4/adapter"),
}
KNOWS = {"in full": ("first",), "LoRA": ("first", "new"), "LoRA on nf4": ("first", "new")}  # shapes by model
ENOUGH = 0.9  # of the answers


def losses(folder):
    """Run the first steps in every way; return the losses of each by step."""
    found = {}
    for name, setting in SPLITS.items():
        output = setting.replace("=", "-")
        words = (setting, f"train.steps={STEPS}", "checkpoint.export=false", f"output={output}")
        train(folder, "whole", *words, log=f"{output}.log")
        records = map(json.loads, (folder / output / "metrics.jsonl").read_text().splitlines())
        found[name] = [record["loss"] for record in records if "loss" in record]
    return found


def apart(curves):
    """Return how far each curve is from the first one, by step."""
    first, *others = curves
    return {name: [abs(a - b) for a, b in zip(curves[name], curves[first], strict=True)] for name in others}


def ask(folder):
    """Ask all models about all held-out images; return by kind of shapes and model (image, true, said) of each."""
    told = {"first": {}, "new": {}}
    for name, (model, adapter) in MODELS.items():
        loaded = look.load(folder / model, adapter and folder / adapter, open_processor)
        for kinds, by_model in told.items():
            by_model[name] = list(look.answers(loaded, folder, f"{kinds}_held_out"))
    return told


def report(told):
    """Print how many answers are right; return the models that know too little of what they have learnt."""
    weak = []
    for name in MODELS:
        shares = {kinds: look.accuracy(by_model[name]) for kinds, by_model in told.items()}
        print(
            f"{name:>12}: "
            + ", ".join(f"{kinds} shapes: colour {c:.0%}, shape {s:.0%}" for kinds, (c, s) in shares.items())
        )
        weak += [name] * any(min(shares[kinds]) < ENOUGH for kinds in KNOWS.get(name, ()))
    return weak


def some(told):
    """Return two images of the first shapes and two of the new ones: each, what is true, the words of each model."""
    shown = []
    for by_model in told.values():
        rows = list(zip(*by_model.values(), strict=True))
        first = rows[0]
        other = next(row for row in rows if not set(row[0][1].split()[1:]) & set(first[0][1].split()[1:]))
        for row in (first, other):
            image, true, _ = row[0]
            shown.append((image, true, dict(zip(by_model, [said for _, _, said in row], strict=True))))
    return shown


def main(words):
    """Run the demo; 0 where the four losses are the same and models know what they have learnt."""
    folder, begun = Path(words[0] if words else "zero3d-demo-vlm"), time.monotonic()
    if folder.exists():
        print(f"{folder} exists: remove it, or name another folder.", file=sys.stderr)
        return 2
    images = lay_out(folder, [HERE / file for file in FILES], tiny_qwen3_vl.SIZES)
    parameters = tiny_qwen3_vl.save(folder / "tiny-qwen3-vl")
    print(f"{folder}: a Qwen3-VL of {parameters:,} parameters, {images:,} images")
    curves = losses(folder)
    train(folder, "whole", log="whole.log")
    train(folder, "adapters", log="adapters.log")
    train(folder, "adapters", "model.quantize=nf4", "output=adapters-nf4", log="adapters-nf4.log")
    print()
    distances, told = apart(curves), ask(folder)
    for name, distance in distances.items():
        print(f"{name}: {len(distance)} losses are at most {max(distance):.1e} from those of {next(iter(curves))}")
    weak = report(told)
    drawing.picture(some(told), curves, distances, NEAR, folder / "learnt.png")
    print(f"picture: {folder / 'learnt.png'}    all of it took {time.monotonic() - begun:.0f} s")
    print("next: zero3d train on a folder of your own; docs/llava.md")
    return int(bool(weak) or max(map(max, distances.values())) > NEAR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
