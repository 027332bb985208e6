"""GRPO end to end on this machine: two training ranks at stage 3 and a sampler, which gets their weights every step.

    python examples/grpo_demo/demo.py [FOLDER [SEED ...]]

A small model of random weights learns to sort three digits, from rewards alone, once from each of three seeds. Figures
and a picture go into FOLDER (zero3d-demo-grpo).
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from zero3d.spec.palette import RUNS, light

HERE = Path(__file__).parent
STEPS, SEEDS, ENOUGH = 100, ("0", "1", "2"), 0.8
WORK = ("sampling", "streaming", "training")


def run(folder, seeds):
    """Start the sampler and `train.py` on two ranks; return the exit code of the first that ends in failure, or 0."""
    words = [str(folder), str(STEPS), *seeds]
    sampler = subprocess.Popen([sys.executable, str(HERE / "sampler.py"), *words])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    trainers = subprocess.Popen([*torchrun, str(HERE / "train.py"), *words])
    try:
        while None in (codes := (sampler.poll(), trainers.poll())) and not any(codes):
            time.sleep(0.1)
        return next((code for code in codes if code), 0)
    finally:
        for process in (sampler, trainers):
            process.terminate()
            process.wait()


def read(folder):
    """Return the lines of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def last(lines):
    """Return the last exact match of each seed."""
    return {line["seed"]: line["exact"] for line in lines if line["exact"] is not None}


def seconds(lines):
    """Return the seconds of each kind of work, over all steps."""
    return {kind: sum(line.get(kind, 0.0) for line in lines) for kind in WORK}


def picture(lines, file):
    """Draw rewards and exact matches by step, and the seconds of a step by what it does."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curves, work = figure.subplots(1, 2, width_ratios=[3, 1])
    for seed, colour in zip(last(lines), RUNS, strict=False):
        own = [line for line in lines if line["seed"] == seed]
        rewarded = [line for line in own if "reward" in line]
        evaluated = [line for line in own if line["exact"] is not None]
        curves.plot(*_points(rewarded, "reward"), color=colour, linewidth=0.9, alpha=0.6)
        curves.plot(*_points(evaluated, "exact"), color=colour, marker="o", markersize=3, label=f"seed {seed}")
    curves.axhline(ENOUGH, color="grey", linewidth=0.8, linestyle=":")
    curves.set(
        xlabel="step", ylim=(0, 1.02), title="exact match of all 216 prompts (dots), mean reward of a step (lines)"
    )
    curves.legend(loc="lower right")
    steps = sum("reward" in line for line in lines)
    spent = {kind: 1e3 * total / steps for kind, total in seconds(lines).items()}
    bars = work.bar(list(spent), list(spent.values()), color=[light("raw"), RUNS[3], RUNS[0]])
    work.bar_label(bars, fmt="%.0f")
    work.set(title="milliseconds of a step")
    figure.savefig(file, dpi=100)


def _points(lines, key):
    return [line["step"] for line in lines], [line[key] for line in lines]


def main(words):
    """Run the demo; 0 where the model sorts at least eight of ten prompts, whatever the seed."""
    folder, seeds, begun = Path(words[0] if words else "zero3d-demo-grpo"), words[1:] or SEEDS, time.monotonic()
    if folder.exists():
        print(f"{folder} exists: remove it, or name another folder.", file=sys.stderr)
        return 2
    folder.mkdir(parents=True)
    if code := run(folder, seeds):
        return code
    lines = read(folder)
    spent = ", ".join(f"{kind} {total:.1f} s" for kind, total in seconds(lines).items())
    print(f"exact match: {', '.join(f'{share:.0%}' for share in last(lines).values())}    {spent}")
    print(f"largest |ratio - 1| of a sampled token's probability: {max(line.get('ratio', 0.0) for line in lines):.1e}")
    picture(lines, folder / "rewards.png")
    print(f"picture: {folder / 'rewards.png'}    all of it took {time.monotonic() - begun:.0f} s")
    return 0 if min(last(lines).values()) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
