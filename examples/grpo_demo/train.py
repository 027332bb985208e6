"""What each training rank runs: weights to the sampler, its completions back, one step of GRPO with them; again.

    torchrun --nproc-per-node 2 examples/grpo_demo/train.py FOLDER STEPS SEED ...

Rank 0 writes a line of FOLDER/log.jsonl for each step.
"""

import json
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Listener
from pathlib import Path

import sorting
import torch
import torch.distributed as dist

import zero3d

RATE, WARMUP, LAST_RATE = 1e-3, 20, 0.1  # the learning rate: its peak, steps to it, what is left of it in the end
ENTROPY = 0.4  # by which loss falls with the entropy of the next token; the weight falls to 0 in the end
CLIP = 0.2  # how far a token's probability may move from that with which it was sampled


def schedule(steps):
    """Return the learning rate's factor by step, for a scheduler of torch."""
    return lambda step: min(1.0, (step + 1) / WARMUP) * (1 - (1 - LAST_RATE) * min(step, steps) / steps)


def advantages(rewards):
    """Return rewards less the mean of their group, by its standard deviation, [n]."""
    groups = rewards.view(-1, sorting.GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).view(-1)


def grpo(logits, batch, entropy_weight):
    """Return the loss, and by how much a token's probability differs from the sampler's at most.

    logits  of all tokens but the last: those of the signs, and of the places but the last, say what comes next
    """
    prompts, completions, logs = batch
    log_probabilities = logits[:, -sorting.PLACES :].log_softmax(-1)
    ratio = (log_probabilities.gather(2, completions[:, :, None])[:, :, 0] - logs).exp()
    gain = advantages(sorting.rewards(prompts, completions))[:, None]
    clipped = torch.minimum(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
    return -clipped - entropy_weight * entropy, float((ratio.detach() - 1).abs().max())


def shared(message):
    """Return rank 0's message on all ranks."""
    messages = [message]
    dist.broadcast_object_list(messages)
    return messages[0]


def own_rows(batch, mesh):
    """Return this rank's completions with their prompts and log-probabilities; groups stay together."""
    rows = slice(len(batch["prompts"]) * mesh.rank // 2, len(batch["prompts"]) * (mesh.rank + 1) // 2)
    return [torch.from_numpy(batch[key][rows]) for key in ("prompts", "completions", "logs")]


def train(mesh, folder, seed, steps, log):
    """Train from random weights; rank 0 writes lines into `log`."""
    torch.manual_seed(seed)
    engine = zero3d.Engine(
        sorting.model(), mesh=mesh, stage=3, precision="fp32",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(steps)),
    )  # fmt: skip
    with ExitStack() as stack:
        sender = samples = None
        if mesh.rank == 0:
            folder.mkdir()
            listener = stack.enter_context(Listener(str(folder / "samples")))
            sender = stack.enter_context(zero3d.weights.LocalSender(folder / "weights", timeout=sorting.PATIENCE))
        for step in range(steps + 1):
            sent = engine.send_weights(sender, bucket_bytes="1MB")
            if mesh.rank == 0:
                samples = samples or stack.enter_context(listener.accept())
            batch, sampling, exact = shared(samples.recv() if samples else None)
            figures = {"seed": seed, "step": step, "sampling": sampling, "streaming": sent.seconds, "exact": exact}
            if step < steps:
                figures |= learn(engine, batch, ENTROPY * (1 - step / steps))
            if mesh.rank == 0:
                print(json.dumps(figures), file=log, flush=True)
                if exact is not None and (step % 50 == 0 or step == steps):
                    told = f"mean reward {figures['reward']:.2f}, " if step < steps else ""
                    print(f"seed {seed}, step {step:3}: {told}exact match {exact:.0%}", flush=True)
    engine.close()


def learn(engine, batch, entropy_weight):
    """Take a step; return its figures."""
    begun = time.perf_counter()
    prompts, completions, _ = rows = own_rows(batch, engine.mesh)
    logits = engine(input_ids=torch.cat([prompts, completions[:, :-1]], 1)).logits
    loss, ratio = grpo(logits, rows, entropy_weight)
    engine.backward(loss)
    engine.step()
    everything = torch.from_numpy(batch["prompts"]), torch.from_numpy(batch["completions"])
    reward = float(sorting.rewards(*everything).mean())
    return {"training": time.perf_counter() - begun, "reward": reward, "ratio": ratio}


def main(words):
    """Train once from each seed, one after another."""
    torch.set_num_threads(1)
    folder, steps, *seeds = words
    mesh = zero3d.Mesh()
    with (Path(folder) / "log.jsonl").open("a") as log:
        for seed in map(int, seeds):
            train(mesh, Path(folder) / f"seed-{seed}", seed, int(steps), log)
    mesh.close()


if __name__ == "__main__":
    main(sys.argv[1:])
