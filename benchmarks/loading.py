"""How fast a Hugging Face folder becomes a sharded engine, beside a raw read of the same bytes.

    python benchmarks/loading.py --ranks 2 --megabytes 500 --rounds 7 --json out.json

    raw       every rank reads its share of the files' bytes, end to end, into memory of its own
    weights   every rank: `open_model`, then `Engine(module, weights=weights, stage=3)` with all weights but
              one norm frozen: what it ends with is what raw ends with, the rank's share of the bytes
    nf4       weights, with model.quantize=nf4: every rank reads the weights of its slice and keeps 0.56 bytes of each
    engine    the same as weights with everything trainable: also masters (4 bytes per parameter, 2 x the bytes of the
              files), gradients (2 x) and two moments (4 x), allocated and written once; no bytes of the files

The folder is a random Llama in bf16, saved by `save_pretrained` in several files. A round measures
all three after a barrier, each first in turn; a time is that of the slowest rank, MB/s are the
folder's bytes over it. What a file costs depends on where it lies, so all find the same:

    cold    every file has been dropped from the page cache (`posix_fadvise`): the disk decides
    warm    every file has just been read: memory and Python decide, above all building the module

Memory for the result is allocated within the time. Code is warmed up by one uncounted round.
Target: `weights` from a cold disk is at least 0.8x as fast as the raw read.

With `--memory` no time is measured, but what a rank's process grows by, in processes of their own,
after a load that is thrown away: at most while it loads, and with the engine that it keeps. Target:
beyond what it keeps it holds at most what one block of weights takes while it is packed
(`READ_AT_ONCE`, or the largest matrix where that is smaller, at 22 bytes a weight: fp32 and what is
made of it), and the pages of the file that is open. The exit code is 0 whether targets are met or not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from memory import gauge
from ranks import Start, command_line, over_ranks, positive, run_ranks
from torch import Tensor

from zero3d import Engine, Mesh
from zero3d.config import Model
from zero3d.models.codecs import READ_AT_ONCE
from zero3d.models.files import REOPEN_BYTES
from zero3d.models.open import open_model
from zero3d.models.quantised import QuantisedLinear, quantise

TARGET = 0.8
PACKING = 22  # bytes of a weight while it is packed: as read, in fp32, scaled, its code
MB = 10**6
LAYER = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 8192}
FILES = 3
CACHES = ("cold", "warm")
WAYS = ("raw", "weights", "nf4", "engine")
KEPT = ("weights", "nf4")  # whose memory is measured
TRAINED = "model.norm.weight"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(prefix="zero3d-loading-", dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        make_folder(folder, arguments.megabytes)
        files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
        total = sum(Path(file).stat().st_size for file in files)
        result: dict[str, Any] = {"ranks": arguments.ranks, "bytes": total, "files": len(files)}
        if arguments.memory:
            start = Start(arguments.ranks, malloc="map")
            result["memory"] = {way: run_ranks(start, grown, str(folder), way) for way in KEPT}
        else:
            seconds = run_ranks(Start(arguments.ranks), measure, str(folder), files, arguments.rounds)
            result |= {"seconds": seconds, "ratios": {cache: ratios(times) for cache, times in seconds.items()}}
    print(show_memory(result) if arguments.memory else show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """How fast each way is, to a raw read."""
    return {way: median(seconds["raw"]) / median(seconds[way]) for way in WAYS[1:]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--megabytes", type=positive, default=500, help="size of the model's files")
    parser.add_argument("--memory", action="store_true", help="what a rank holds, in place of seconds")
    parser.add_argument("--scratch", type=Path, help="where the folder is made; it should lie on a disk")
    return parser.parse_args(argv)


def make_folder(folder: Path, megabytes: int) -> None:
    """A random bf16 Llama of about this size in at least two files, written through to the disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    h, ffn, vocab = LAYER["hidden_size"], LAYER["intermediate_size"], LAYER["vocab_size"]
    per_layer, outside = 2 * (4 * h * h + 3 * h * ffn), 2 * 2 * vocab * h  # bytes: 2 per parameter
    layers = max(round((megabytes * MB - outside) / per_layer), 1)
    model = LlamaForCausalLM(LlamaConfig(**LAYER, num_hidden_layers=layers)).bfloat16()
    model.save_pretrained(folder, max_shard_size=(layers * per_layer + outside) // FILES + MB)
    os.sync()  # only clean pages can be dropped from the cache


# --- on every rank ------------------------------------------------------------------------------


def measure(device: torch.device, folder: str, files: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of the slowest rank by cache state and way, one per counted round."""
    mesh = Mesh(device=device)
    ways: dict[str, Callable[[], object]] = {
        "raw": lambda: read_share(files, dist.get_rank(), dist.get_world_size()),
        **{way: partial(load, folder, mesh, way) for way in WAYS[1:]},
    }
    seconds: dict[str, dict[str, list[float]]] = {cache: {way: [] for way in ways} for cache in CACHES}
    for turn in range(1 + rounds):
        for cache in CACHES:
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                seconds[cache][way].append(timed(ways[way], files, cache, device))
    return {cache: {way: times[1:] for way, times in by_way.items()} for cache, by_way in seconds.items()}


def timed(way: Callable[[], object], files: list[str], cache: str, device: torch.device) -> float:
    """Seconds of the slowest rank; what was read is freed again."""
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        for file in files:
            drop(file) if cache == "cold" else Path(file).read_bytes()
    dist.barrier()
    begun = time.perf_counter()
    loaded = way()
    took = time.perf_counter() - begun
    del loaded
    return over_ranks([took], dist.ReduceOp.MAX, device)[0]


def drop(file: str) -> None:
    """Forget a file's pages: the next read comes from the disk."""
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def read_share(files: list[str], rank: int, ranks: int) -> list[Tensor]:
    """The rank-th part of all files' bytes laid end to end."""
    sizes = [Path(file).stat().st_size for file in files]
    total, begin = sum(sizes), 0
    first, last = rank * total // ranks, (rank + 1) * total // ranks
    parts = []
    for file, size in zip(files, sizes, strict=True):
        start, stop = max(first - begin, 0), min(last - begin, size)
        if start < stop:
            part = torch.empty(stop - start, dtype=torch.uint8)
            with open(file, "rb", buffering=0) as handle:
                handle.seek(start)
                fill(handle, memoryview(part.numpy()))
            parts.append(part)
        begin += size
    return parts


def fill(handle: Any, memory: memoryview) -> None:
    """Read until `memory` is full: one call reads 2 GiB at most."""
    done = 0
    while done < len(memory):
        done += handle.readinto(memory[done:])


def load(folder: str, mesh: Mesh, way: str) -> Engine:
    """The folder as an engine at stage 3; frozen but for one norm where the way is not "engine"."""
    opened = open_model(Model(path=folder))
    for name, p in opened.module.named_parameters():
        p.requires_grad_(way == "engine" or name == TRAINED)
    if way == "nf4":
        opened = quantise(opened, way, torch.bfloat16)
    return Engine(opened.module, weights=opened.weights, stage=3, mesh=mesh)


def grown(device: torch.device, folder: str, way: str) -> dict[str, int]:
    """Bytes by which a rank's process grows: at most while it loads, and with the engine; the most of all ranks.

    block  what packing may hold, 0 where nothing is packed
    """
    mesh, memory = Mesh(device=device), gauge(device, exact=True)
    load(folder, mesh, way)
    gc.collect()
    memory.reset()
    before = memory.now()
    engine = load(folder, mesh, way)
    peak, kept = memory.peak() - before, memory.now() - before
    sizes = [m.in_features * m.out_features for m in engine.module.modules() if isinstance(m, QuantisedLinear)]
    block = PACKING * min(READ_AT_ONCE, max(sizes, default=0))
    most = over_ranks([float(peak), float(kept)], dist.ReduceOp.MAX, device)
    return {"peak": int(most[0]), "kept": int(most[1]), "block": block, "pages": REOPEN_BYTES}


def may(memory: dict[str, int]) -> int:
    """Bytes that a rank may hold beyond what it keeps."""
    return memory["block"] + memory["pages"]


def beyond(memory: dict[str, int]) -> float:
    """What a rank held beyond what it keeps, over what it may hold."""
    return (memory["peak"] - memory["kept"]) / may(memory)


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    head = f"{result['bytes'] / MB:.0f} MB in {result['files']} files, {result['ranks']} ranks, medians"
    lines = [head, f"{'cache':<8}{'way':<10}{'MB/s':>8}{'x raw':>8}{'>= ' + str(TARGET):>9}"]
    for cache, by_way in result["seconds"].items():
        for way, times in by_way.items():
            ratio = result["ratios"][cache].get(way, 1.0)
            judged = ("yes" if ratio >= TARGET else "NO") if (cache, way) == ("cold", "weights") else ""
            speed = result["bytes"] / MB / median(times)
            lines.append(f"{cache:<8}{way:<10}{speed:>8.0f}{ratio:>8.2f}{judged:>9}")
    return "\n".join(lines)


def show_memory(result: dict[str, Any]) -> str:
    """What ranks held, as text."""
    return "\n".join(
        f"{way}: at most {found['peak'] / MB:.0f} MB, kept {found['kept'] / MB:.0f} MB; beyond {beyond(found):.2f}x of "
        f"{may(found) / MB:.0f} MB"
        for way, found in result["memory"].items()
    )


if __name__ == "__main__":
    sys.exit(main())
