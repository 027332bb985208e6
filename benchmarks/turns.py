"""Variants step by step in turns, timed.

Variants that can share processes do; each stage of DeepSpeed has processes of its own. Whoever's
turn it is takes one step after a barrier of its process group, all others wait.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from crews import Crew, crew
from llama import build_llama
from memory import Data
from model import Shape, add_adapters, batch, build_gpt
from peers import DTYPES, Setting, build_variant
from ranks import Start, synchronize
from torch import nn

WARM_UP = 2
FAMILIES: dict[str, Callable[[Shape], nn.Module]] = {"gpt": build_gpt, "llama": build_llama}


class Timed:
    """On one rank: variants and the clock."""

    def __init__(self, device: torch.device, arguments: argparse.Namespace, names: list[str]) -> None:
        setting, self.data = prepare(device, arguments)
        self.device = device
        self.variants = {name: build_variant(name, setting) for name in names}

    def step(self, name: str, turn: int) -> float:
        """Seconds of one step on this rank."""
        tokens = self.data(turn)
        dist.barrier()
        synchronize(self.device)
        begun = time.perf_counter()
        self.variants[name].step(*tokens)
        synchronize(self.device)
        return time.perf_counter() - begun

    def loss(self, name: str) -> float:
        """Loss of this rank's first batch."""
        return float(self.variants[name].evaluate(*self.data(0)))


def time_variants(start: Start, arguments: argparse.Namespace, names: list[str]) -> dict[str, dict[str, Any]]:
    """Seconds of every counted step, that of the slowest rank, and the loss after the last, by variant."""
    with ExitStack() as stack:
        place: dict[str, Crew] = {}
        for members in share_processes(names):
            place |= dict.fromkeys(members, stack.enter_context(crew(start, Timed, arguments, members)))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(WARM_UP + arguments.rounds):
            for index in turn_order(len(names), turn):
                name = names[index]
                seconds[name].append(max(place[name].ask("step", name, turn)))
        losses = {name: fmean(place[name].ask("loss", name)) for name in names}
    counted = {name: times[WARM_UP:] for name, times in seconds.items()}
    return {
        name: {"min": min(times), "median": median(times), "times": times, "loss": losses[name]}
        for name, times in counted.items()
    }


def share_processes(names: list[str]) -> list[list[str]]:
    """Which variants live together.

    >>> share_processes(["zero3d-0", "deepspeed-0", "deepspeed-3", "ddp"])
    [['zero3d-0', 'ddp'], ['deepspeed-0'], ['deepspeed-3']]
    """
    together = [name for name in names if not name.startswith("deepspeed-")]
    alone = [[name] for name in names if name.startswith("deepspeed-")]
    return [together, *alone] if together else alone


def prepare(device: torch.device, arguments: argparse.Namespace) -> tuple[Setting, Data]:
    """What every variant is built from, and the batch of each step on this rank."""
    a = arguments
    setting = Setting(partial(build, a), device, a.precision, a.reduce_dtype, a.accumulate, a.recompute)

    def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = step * dist.get_world_size() + dist.get_rank()
        return batch(seed, a.accumulate * a.micro_batch, a.seq, a.model.vocab, device)

    return setting, data


def build(arguments: argparse.Namespace) -> nn.Module:
    """The model of a run, with its adapters."""
    return add_adapters(FAMILIES[arguments.family](arguments.model), arguments.lora, DTYPES[arguments.precision])


def turn_order(count: int, turn: int) -> list[int]:
    """Who goes when: a Williams design, in which each follows each other equally often.

    0, n-1, 1, n-2, ... shifted by one every round; for odd n every other cycle runs backwards.

    >>> [turn_order(4, turn) for turn in range(4)]
    [[0, 3, 1, 2], [1, 0, 2, 3], [2, 1, 3, 0], [3, 2, 0, 1]]
    """
    zigzag = [position // 2 if position % 2 == 0 else count - 1 - position // 2 for position in range(count)]
    order = [(index + turn) % count for index in zigzag]
    return order[::-1] if count % 2 and turn // count % 2 else order
