"""Checkpoints beside what the disk does with the same bytes, and beside torch.distributed.checkpoint (DCP).

    python benchmarks/checkpoint.py --ranks 2 --megabytes 500 --rounds 5 --json out.json

A round measures every way in turn, each first in turn, after a barrier; a time is that of the slowest rank, figures are
medians over the rounds. All write, or read, the same bytes of tensors: a random Llama's fp32 masters and both moments,
each rank its share. Code is warmed up by one uncounted round, in which the copies for saves behind training are made.

    writing   raw            every rank writes its bytes from memory, and has the disk take them (fsync)
              save           `engine.save`: checksums, manifest and commit included
              dcp            `torch.distributed.checkpoint.save` with `sync_files`, no checksums
    reading   raw            every rank reads its file into memory, from a disk whose pages no cache has
              load           `engine.load`: every checksum verified before anything is taken, then states and weights
              dcp            `torch.distributed.checkpoint.load` into tensors that are there
    stall     asynchronous   seconds that training waits for `engine.save(wait=False)`: its call, and the copy
                             before the next update; the write goes on behind the steps that follow
              dcp            seconds that the call of `async_save` takes, with a staging copy that is used again

Targets: save and load at least 0.9x as fast as raw, a stall of at most a tenth of a save. The exit code is 0 whether
they are met or not. Rates depend on what else runs: only those of a quiet machine count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Start, command_line, over_ranks, positive, run_ranks
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from zero3d import Engine, Mesh

SPEED, STALL = 0.9, 0.1  # targets
MB = 10**6
SAVED = 12  # bytes of a parameter: a master and two moments
CHUNK = 1 << 25
LAYER = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 4096}
TOKENS = (1, 256)
WRITING, READING, ASIDE = ("raw", "save", "dcp"), ("raw", "load", "dcp"), ("asynchronous", "dcp")
Seconds = dict[str, dict[str, list[float]]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(prefix="zero3d-checkpoint-", dir=arguments.directory) as scratch:
        result = run_ranks(Start(arguments.ranks), measure, scratch, arguments.megabytes, arguments.rounds)
    result = {"ranks": arguments.ranks, **result, "targets": targets(result["seconds"])}
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=positive, default=500, help="size of a checkpoint")
    parser.add_argument("--directory", type=Path, help="an existing folder on the disk to measure (default: temporary)")
    arguments = parser.parse_args(argv)
    if arguments.directory is not None and not arguments.directory.is_dir():
        parser.error(f"--directory {arguments.directory} is not a folder: pass one on the disk to measure")
    return arguments


# --- on every rank ------------------------------------------------------------------------------


def measure(device: torch.device, scratch: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Seconds of the slowest rank by kind and way, one per counted round, and the bytes of all ranks."""
    bed = Bed(device, Path(scratch), megabytes)
    kinds: dict[str, dict[str, Callable[[], float]]] = {
        "writing": {"raw": bed.raw_write, "save": bed.save, "dcp": bed.dcp_save},
        "reading": {"raw": bed.raw_read, "load": bed.load, "dcp": bed.dcp_load},
        "stall": {"asynchronous": bed.save_behind, "dcp": bed.dcp_behind},
    }
    seconds: Seconds = {kind: {way: [] for way in ways} for kind, ways in kinds.items()}
    for turn in range(1 + rounds):
        for kind, ways in kinds.items():
            names = list(ways)
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[kind][way].append(bed.slowest(ways[way]))
    counted = {kind: {way: times[1:] for way, times in by_way.items()} for kind, by_way in seconds.items()}
    total = over_ranks([float(bed.nbytes)], dist.ReduceOp.SUM, device)[0]
    return {"bytes": int(total), "seconds": counted, "first": {kind: _first(ways) for kind, ways in seconds.items()}}


def _first(ways: dict[str, list[float]]) -> dict[str, float]:
    """Return what the round that is not counted took."""
    return {way: times[0] for way, times in ways.items()}


class Bed:
    """Owns an engine, the same bytes as plain tensors, and the folders of all ways."""

    def __init__(self, device: torch.device, scratch: Path, megabytes: int) -> None:
        self.device, self.scratch = device, scratch
        self.engine = Engine(llama(megabytes), stage=3, mesh=Mesh(device=device), precision="bf16")
        self._number = 0
        self.train()
        self.save()
        own = self._file(self.newest)
        self.nbytes = self.engine.save_figures.nbytes
        self._content = torch.frombuffer(bytearray(own.read_bytes()), dtype=torch.uint8)
        self._state: dict[str, Tensor] = dict(self._tensors())
        pinned = device.type != "cpu"  # elsewhere it refuses all of these
        self._stager = DefaultStager(StagingOptions(pinned, pinned, pinned, pinned))
        self.raw_write()
        self.dcp_save()

    def train(self) -> None:
        """Train one step."""
        generator = torch.Generator().manual_seed(self._number)
        ids = torch.randint(0, LAYER["vocab_size"], TOKENS, generator=generator).to(self.device)
        self._number += 1
        self.engine.train_batch([{"input_ids": ids, "labels": ids}])

    def slowest(self, way: Callable[[], float]) -> float:
        """Return the seconds of the slowest rank."""
        dist.barrier()
        return over_ranks([way()], dist.ReduceOp.MAX, self.device)[0]

    # --- writing --------------------------------------------------------------------------------

    def raw_write(self) -> float:
        """Write this rank's bytes."""
        path = self.scratch / f"raw-{dist.get_rank()}"
        path.unlink(missing_ok=True)
        dist.barrier()
        begun = time.perf_counter()
        content = memoryview(self._content.numpy())
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(content), CHUNK):
                file.write(content[start : start + CHUNK])
            os.fsync(file.fileno())
        return time.perf_counter() - begun

    def save(self) -> float:
        """Save as a run does whose training waits."""
        self._clear("saved")
        begun = time.perf_counter()
        self.newest = self.engine.save(self.scratch / "saved")
        return time.perf_counter() - begun

    def dcp_save(self) -> float:
        """Save the same tensors by DCP."""
        self._clear("dcp")
        begun = time.perf_counter()
        dcp.save(self._state, storage_writer=self._writer("dcp"))
        return time.perf_counter() - begun

    # --- reading --------------------------------------------------------------------------------

    def raw_read(self) -> float:
        """Read this rank's bytes."""
        path = self.scratch / f"raw-{dist.get_rank()}"
        drop(path)
        dist.barrier()
        begun = time.perf_counter()
        into = memoryview(torch.empty_like(self._content).numpy())
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < len(into):
                done += file.readinto(into[done : done + CHUNK])
        return time.perf_counter() - begun

    def load(self) -> float:
        """Load what `save` has written."""
        drop(self._file(self.newest))
        dist.barrier()
        begun = time.perf_counter()
        self.engine.load(self.newest)
        return time.perf_counter() - begun

    def dcp_load(self) -> float:
        """Load what DCP has written."""
        for path in (self.scratch / "dcp").glob(f"__{dist.get_rank()}_*"):
            drop(path)
        dist.barrier()
        begun = time.perf_counter()
        dcp.load(self._state, checkpoint_id=self.scratch / "dcp")
        return time.perf_counter() - begun

    # --- behind training ------------------------------------------------------------------------

    def save_behind(self) -> float:
        """Save behind training; what it has waited."""
        self._clear("behind")
        self.engine.save(self.scratch / "behind", wait=False)
        self.train()
        self.engine.saved()
        return self.engine.save_figures.seconds

    def dcp_behind(self) -> float:
        """Save the same tensors by DCP behind training; what its call has taken."""
        self._clear("dcp-behind")
        begun = time.perf_counter()
        under_way = dcp.async_save(
            self._state, storage_writer=self._writer("dcp-behind"), async_stager=self._stager
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        self.train()
        under_way.result()
        return seconds

    # --- files ----------------------------------------------------------------------------------

    def _writer(self, name: str) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.scratch / name, sync_files=True)

    def _clear(self, name: str) -> None:
        """Begin each time without what was written the last time."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.scratch / name, ignore_errors=True)
        dist.barrier()

    def _file(self, folder: Path) -> Path:
        return folder / f"rank-{dist.get_rank():05d}.safetensors"

    def _tensors(self) -> Sequence[tuple[str, Tensor]]:
        """This rank's tensors, under names that no other rank has: no rank's are another's."""
        from safetensors.torch import load_file

        rank = dist.get_rank()
        return [(f"{rank}/{name}", values) for name, values in load_file(self._file(self.newest)).items()]


def llama(megabytes: int) -> torch.nn.Module:
    """A random bf16 Llama whose checkpoint is of about this size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    h, ffn, vocab = LAYER["hidden_size"], LAYER["intermediate_size"], LAYER["vocab_size"]
    per_layer, outside = SAVED * (4 * h * h + 3 * h * ffn), SAVED * 2 * vocab * h
    layers = max(round((megabytes * MB - outside) / per_layer), 1)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LAYER, num_hidden_layers=layers)).bfloat16()


def drop(path: Path) -> None:
    """Forget a file's pages: the next read comes from the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)  # only clean pages can be dropped
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


# --- figures ------------------------------------------------------------------------------------


def targets(seconds: Seconds) -> list[dict[str, Any]]:
    """What is asked for beside what was reached."""
    writing, reading = ({way: median(times) for way, times in seconds[kind].items()} for kind in ("writing", "reading"))
    stall = median(seconds["stall"]["asynchronous"]) / writing["save"]
    speeds = {"save, of raw": writing["raw"] / writing["save"], "load, of raw": reading["raw"] / reading["load"]}
    judged = [{"what": what, "reached": got, "target": SPEED, "met": got >= SPEED} for what, got in speeds.items()]
    return [*judged, {"what": "stall, of a save", "reached": stall, "target": STALL, "met": stall <= STALL}]


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    nbytes = result["bytes"]
    head = f"{nbytes / MB:.0f} MB of tensors, {result['ranks']} ranks, medians"
    lines = [head, f"{'':<10}{'way':<14}{'s':>8}{'MB/s':>8}"]
    for kind, by_way in result["seconds"].items():
        for way, times in by_way.items():
            speed = "" if kind == "stall" else f"{nbytes / MB / median(times):.0f}"
            lines.append(f"{kind:<10}{way:<14}{median(times):>8.3f}{speed:>8}")
    for target in result["targets"]:
        verdict = "yes" if target["met"] else "NO"
        lines.append(f"{target['what']}: {target['reached']:.3f} (target {target['target']:g}: {verdict})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
