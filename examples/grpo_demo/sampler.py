"""The process that samples: it has no engine, receives weights, and answers with completions.

python examples/grpo_demo/sampler.py FOLDER STEPS SEED ...
"""

import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

import sorting
import torch

import zero3d

EVERY = 10  # steps between two evaluations


def serve(folder, seed, steps):
    """Sample once for each step of a run, with the weights that have come before it; evaluate in between."""
    torch.manual_seed(seed)
    model, prompts = sorting.model(), sorting.all_prompts()
    parameters = model.state_dict()
    with (
        zero3d.weights.connect(folder / "weights", sorting.PATIENCE) as trainer,
        Client(str(folder / "samples")) as samples,
    ):
        for step in range(steps + 1):
            for name, tensor in trainer.receive():
                parameters[name].copy_(tensor)
            begun = time.perf_counter()
            asked = prompts[torch.randint(len(prompts), (sorting.PROMPTS,))].repeat_interleave(sorting.GROUP, 0)
            completions, logs = sorting.sample(model, asked)
            seconds = time.perf_counter() - begun
            exact = sorting.exact_match(model) if step % EVERY == 0 or step == steps else None
            batch = {"prompts": asked.numpy(), "completions": completions.numpy(), "logs": logs.numpy()}
            samples.send((batch, seconds, exact))


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, steps, *seeds = sys.argv[1:]
    for number in map(int, seeds):
        serve(Path(place) / f"seed-{number}", number, int(steps))
