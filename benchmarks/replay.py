"""health.replay measured: planted flips of a gradient that are found and named, sound steps without an alarm, its cost.

python benchmarks/replay.py --json benchmarks/results/replay.json

flips   one bit of one gradient on one rank, each at random: rank, parameter, place, bit; in the step or in what is
        computed again. Found: before the update, on all ranks. Named: rank, unit and parameter
sound   steps with a replay in each, dropout on, and how many alarms
cost    steps with a replay beside steps without one, in turns in one run: their difference over K steps, beside
        1 / (K x M). Seconds of one machine, which other work on it changes
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ranks import Start, run_ranks
from torch import Tensor, nn

import zero3d
from zero3d.errors import CorruptionError

MICRO = 2  # micro-batches a step, but for the cost
WORDS = {2: torch.int16, 4: torch.int32}


class Net(nn.Module):
    """Blocks with dropout between an embedding and a head."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width),
                          nn.Dropout(0.1)) for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, vocab]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(logits: Tensor, ids: Tensor) -> tuple[Tensor, float]:
    """The sum of losses of the next token, and its number of targets."""
    targets = ids[:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"), float(len(targets))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all three, print them and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000, help="sound steps, each with a replay")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of steps for the cost")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of a step for the cost")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    arguments = parser.parse_args(argv)
    result = run_ranks(
        Start(arguments.ranks), measure, arguments.stage, arguments.flips, arguments.steps, arguments.rounds,
        arguments.micro,
    )  # fmt: skip
    result = {"arguments": {**vars(arguments), "json": str(arguments.json)}, "torch": torch.__version__, **result}
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["flips"]["named"] == arguments.flips and not result["sound"]["alarms"] else 1


# --- on every rank ------------------------------------------------------------------------------


def measure(device: torch.device, stage: int, flips: int, steps: int, rounds: int, micro: int) -> dict[str, Any]:
    """Everything, one after the other."""
    found = plant(make(stage, 1, 61, 32, 2), flips)
    sound = train(make(stage, 1, 61, 32, 2), steps)
    return {"flips": found, "sound": sound, "cost": cost(make(stage, 2, 2048, 256, 4, micro), rounds, micro)}


def make(stage: int, every: int, vocab: int, width: int, layers: int, micro: int = MICRO) -> zero3d.Engine:
    """An engine of a small model."""
    torch.manual_seed(7)
    model = Net(vocab, width, layers)
    engine = zero3d.Engine(model, stage=stage, precision="bf16", loss=loss, accumulate=micro, replay=every)
    torch.manual_seed(engine.world.rank)
    return engine


def batches(engine: zero3d.Engine, draw: torch.Generator, rows: int, micro: int = MICRO) -> list[Tensor]:
    """This rank's micro-batches of a step."""
    vocab = engine.module.embed.num_embeddings
    ids = torch.randint(vocab, (engine.dp.size * micro, rows, 17), generator=draw)
    return list(ids[engine.dp.rank * micro : (engine.dp.rank + 1) * micro])


class Fault:
    """Flips one bit of one gradient on one rank, once; `arm` says which. Its hooks are on every parameter."""

    def __init__(self, engine: zero3d.Engine) -> None:
        self._name, self._left, self._place, self._bit = "", 0, 0, 0
        for name, p in engine.module.named_parameters():
            p.register_hook(partial(self._look, name))

    def arm(self, name: str, backward: int, place: int, bit: int) -> None:
        """Flip this bit of a parameter's gradient in its backward of this number from now on, from 1."""
        self._name, self._left, self._place, self._bit = name, backward, place, bit

    def _look(self, name: str, grad: Tensor) -> Tensor:
        self._left -= name == self._name
        hit = name == self._name and self._left == 0
        return flipped(grad, self._place, self._bit) if hit else grad


def plant(engine: zero3d.Engine, flips: int) -> dict[str, int]:
    """Flip a bit in each of so many steps, and count what is found and named; a sound step after each."""
    names, ranks = [name for name, _ in engine.module.named_parameters()], range(engine.world.size)
    draw, data, fault = random.Random(5), torch.Generator().manual_seed(3), Fault(engine)
    counts = {"planted": flips, "found": 0, "named": 0, "applied": 0, "sound_steps": 0, "false_alarms": 0}
    for _ in range(flips):
        rank, name, again = draw.choice(ranks), draw.choice(names), draw.randrange(2)
        place, bit, steps = draw.randrange(1 << 30), draw.randrange(16), engine.steps
        # The replayed micro-batch alternates: its two backwards are the first two of a step, or the last two.
        if engine.world.rank == rank:
            fault.arm(name, 1 + again + (steps + 1) // 2 % MICRO, place, bit)
        try:
            engine.train_batch(batches(engine, data, 2))
        except CorruptionError as error:
            counts["found"] += 1
            told = [each for each in ranks if f" rank {each} (" in str(error)]
            counts["named"] += told == [rank] and f"parameter {name}." in str(error)
        counts["applied"] += engine.steps - steps
        try:
            engine.train_batch(batches(engine, data, 2))
            counts["sound_steps"] += 1
        except CorruptionError:
            counts["false_alarms"] += 1
    return counts


def flipped(grad: Tensor, place: int, bit: int) -> Tensor:
    """Return a gradient with one bit changed."""
    changed = grad.clone()
    words = changed.view(-1).view(WORDS[grad.element_size()])
    words[place % len(words)] ^= 1 << bit if bit < 15 else -(1 << 15)
    return changed


def train(engine: zero3d.Engine, steps: int) -> dict[str, Any]:
    """Train soundly, and count alarms."""
    data, alarms, begun = torch.Generator().manual_seed(4), 0, time.monotonic()
    for _ in range(steps):
        try:
            engine.train_batch(batches(engine, data, 2))
        except CorruptionError:
            alarms += 1
    assert engine.replay is not None
    return {"steps": steps, "replays": engine.replay.count, "alarms": alarms, "seconds": time.monotonic() - begun}


def cost(engine: zero3d.Engine, rounds: int, micro: int) -> dict[str, Any]:
    """Compare steps with a replay, every second one, with the others: by the clock, and by this rank's processor."""
    data = torch.Generator().manual_seed(4)
    clocks = {"wall": time.perf_counter, "processor": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {name: {"plain": [], "replay": []} for name in clocks}
    for i in range(2 * rounds + 4):
        given = batches(engine, data, 16, micro)
        begun = {name: clock() for name, clock in clocks.items()}
        engine.train_batch(given)
        for name, clock in clocks.items() if i >= 4 else ():
            seconds[name]["replay" if i % 2 else "plain"].append(clock() - begun[name])
    shares = {}
    for name, of in seconds.items():
        plain, replayed = median(of["plain"]), median(of["replay"])
        shares[name] = (replayed - plain) / (2 * plain)
    return {"every": 2, "micro_batches": micro, "seconds": seconds, "share": shares, "expected": 1 / (2 * micro)}


# --- the result ---------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    flips, sound, cost = result["flips"], result["sound"], result["cost"]
    return "\n".join(
        (
            f"flips: {flips['found']} of {flips['planted']} found, {flips['named']} named, {flips['applied']} applied",
            f"sound steps: {sound['alarms']} alarms in {sound['replays']} replays of {sound['steps']} steps",
            f"cost: {cost['share']['wall']:.1%} of a step by the clock, {cost['share']['processor']:.1%} by the "
            f"processor, {cost['expected']:.1%} by formula (K={cost['every']}, M={cost['micro_batches']})",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
