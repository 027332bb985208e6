"""A stream of weights to a process of the same host, beside a gather of each parameter and a raw copy of the bytes.

    python benchmarks/stream.py --json out.json

    stream     zero3d at stage 3: `send_weights` through shared memory; the receiver verifies and copies each tensor
    each       FSDP2: `full_tensor()` of each parameter on all ranks, kept by rank 0, then sent as `raw` is
    raw        as many bytes that rank 0 has in one tensor, copied into the same shared memory, and out of it
    bare       shards sent to rank 0, a unit at a time, into one storage, and from there as `raw`: the least that a
               stream of sharded weights does by messages, without a look at what it sends

Two ranks on gloo, fp32, a GPT of about 200 parameters, one thread a process. All take turns in the same processes; the
seconds are rank 0's, from a barrier to the last acknowledgement. Of `each` those of the gathers alone are told, too.

Memory is of rank 0, in fresh processes whose malloc maps tensors one by one (`ranks.map_tensors`): the most that it has
in a turn above what it had before, with the two buckets, which a sender keeps. Of `raw` it is the buckets.

Targets: stream <= 0.40x of each's time and <= 0.30x of its memory, <= 1.30x of raw's time. Raw copies each byte twice,
on two cores at once. A stream copies it three times (into the unit, the bucket, the receiver's tensor), and reads it
three times more (for values that are not finite, for both checksums); so on two cores 1.30x of raw's time is out of
reach, and 1.30x of bare's is what that can mean here. The exit code is 0 whether they are met or not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from memory import gauge
from model import Shape, build_gpt
from ranks import Start, command_line, run_ranks
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import zero3d
from zero3d.weights import LocalSender
from zero3d.weights.buckets import Bucket
from zero3d.weights.local import LocalReceiver, join

VARIANTS = ("stream", "each", "raw", "bare")
OF_EACH, OF_MEMORY, OF_RAW = 0.40, 0.30, 1.30
WARM_UP = 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.receive:
        receive(arguments.receive, arguments.raw)
        return 0
    result = {
        "torch": torch.__version__,
        "arguments": {**vars(arguments), "model": vars(arguments.model), "json": None},
        **run_ranks(Start(arguments.ranks), timed, arguments),
        "memory": run_ranks(Start(arguments.ranks, malloc="map"), held, arguments),
    }
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Shape.parse, default=Shape(layers=17, d=512, vocab=2048))
    parser.add_argument("--bucket", type=int, default=16 << 20, help="bytes of a bucket (default %(default)s)")
    parser.add_argument("--receive", type=Path, help="receive streams at a path, as a process that this script starts")
    parser.add_argument("--raw", action="store_true", help="bytes, and no tensors")
    return parser.parse_args(argv)


# --- the other process ------------------------------------------------------------------------------


def receive(path: Path, raw: bool) -> None:
    """Take streams until the sender is gone."""
    torch.set_num_threads(1)
    into: dict[str, Tensor] = {}
    with join(path, 60.0) as sender:
        while True:
            try:
                for name, tensor in bytes_of(sender) if raw else sender.receive():
                    into.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            except zero3d.errors.StreamError:
                return


def bytes_of(sender: LocalReceiver) -> Any:
    """Yield the bytes of a stream's buckets, which nobody verifies."""
    stream = sender._hear(None)["stream"]
    while "bucket" in (message := sender._hear(None)):
        yield str(message["bucket"]), sender._taken(message["bucket"], message["bytes"])[: message["bytes"]]
        sender._answer({"have": message["bucket"]})
    sender._answer({"have all": stream})


# --- on a rank ----------------------------------------------------------------------------------------


class Rank:
    """Has the engine, FSDP2's model and, on rank 0, a sender for each variant with its receiver."""

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self.bucket, self.first = arguments.bucket, dist.get_rank() == 0
        self.engine = zero3d.Engine(
            build_gpt(arguments.model), mesh=zero3d.Mesh(device="cpu"), stage=3, precision="fp32"
        )
        self.sharded = build_gpt(arguments.model)
        for block in self.sharded.blocks:
            fully_shard(block)
        fully_shard(self.sharded)
        self.total = sum(p.numel() * p.element_size() for p in self.sharded.parameters())
        self.senders: dict[str, LocalSender | None] = dict.fromkeys(VARIANTS)
        if self.first:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name in VARIANTS:
                self.senders[name] = stack.enter_context(self._sender(folder / name, name != "stream", stack))
            self.all = torch.ones(self.total, dtype=torch.uint8)
        sizes = [unit.layout.shard * unit.dtype.itemsize for unit in self.engine.units]
        self.shards = [torch.ones(nbytes, dtype=torch.uint8) for nbytes in sizes]
        self.storage = torch.empty(dist.get_world_size(), max(sizes), dtype=torch.uint8) if self.first else None
        self.gathering = 0.0

    def _sender(self, path: Path, raw: bool, stack: ExitStack) -> LocalSender:
        sender = LocalSender(path)
        words = [sys.executable, __file__, "--receive", str(path), *["--raw"] * raw]
        process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})
        stack.callback(process.wait)
        stack.callback(process.kill)
        return sender

    def stream(self) -> None:
        """Stream the engine's weights."""
        self.engine.send_weights(self.senders["stream"], bucket_bytes=self.bucket)

    def each(self) -> None:
        """Gather parameter by parameter, keep all of them on rank 0, then send them."""
        begun, kept = time.perf_counter(), []
        for parameter in self.sharded.parameters():
            whole = parameter.full_tensor().detach()
            if self.first:
                kept.append(whole)
        self.gathering = time.perf_counter() - begun
        self._copied("each", [tensor.reshape(-1).view(torch.uint8) for tensor in kept])

    def raw(self) -> None:
        """Send as many bytes as there are."""
        self._copied("raw", [self.all] if self.first else [])

    def bare(self) -> None:
        """Send shards to rank 0, and what it has of a unit on its way before the next one comes."""
        if self.storage is None:
            for shard in self.shards:
                dist.send(shard, 0)
        else:
            self._copied("bare", self._units(self.storage))

    def _units(self, storage: Tensor) -> Iterator[Tensor]:
        """Yield the bytes of units on rank 0, each in the place of the one before."""
        for shard in self.shards:
            whole = storage.view(-1)[: shard.numel() * len(storage)]
            own, *others = whole.view(len(storage), -1)
            own.copy_(shard)
            for rank, other in enumerate(others, 1):
                dist.recv(other, rank)
            yield whole

    def _copied(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Copy bytes into buckets and send these, as they are."""
        sender = self.senders[name]
        if sender is None:
            return
        memories = sender.memory(self.bucket)
        sender.begin()
        number, used = 0, 0
        for piece in pieces:
            done = 0
            while done < piece.numel():
                memory = memories[number % 2]
                count = min(self.bucket - used, piece.numel() - done)
                memory[used : used + count].copy_(piece[done : done + count])
                used, done = used + count, done + count
                if used == self.bucket:
                    sender.send(Bucket(number, memory, used, ()))
                    number, used = number + 1, 0
        if used:
            sender.send(Bucket(number, memories[number % 2], used, ()))
        sender.finish(0, 0)


def timed(device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """By variant the seconds of every turn; of `each` those of its gathers, too."""
    with ExitStack() as stack:
        rank = Rank(arguments, stack)
        turns: dict[str, Callable[[], None]] = {name: getattr(rank, name) for name in VARIANTS}
        seconds: dict[str, list[float]] = {name: [] for name in (*VARIANTS, "gathers")}
        for turn in range(WARM_UP + arguments.rounds):
            for name in VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]:
                dist.barrier()
                begun = time.perf_counter()
                turns[name]()
                if turn >= WARM_UP:
                    seconds[name].append(time.perf_counter() - begun)
                    if name == "each":
                        seconds["gathers"].append(rank.gathering)
        dist.barrier()
        parameters = sum(1 for _ in rank.sharded.parameters())
        return {"seconds": seconds, "bytes": rank.total, "parameters": parameters}


def held(device: torch.device, arguments: argparse.Namespace) -> dict[str, int]:
    """By variant the most bytes of a turn above those before it, two buckets with it."""
    with ExitStack() as stack:
        rank, memory, found = Rank(arguments, stack), gauge(device, True), {}
        for name in VARIANTS:
            getattr(rank, name)()
            gc.collect()
            memory.trim()
            memory.reset()
            before = memory.now()
            dist.barrier()
            getattr(rank, name)()
            found[name] = memory.peak() - before + 2 * arguments.bucket
        dist.barrier()
        return found


# --- as text ------------------------------------------------------------------------------------------


def ratios(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What is judged: of what, the ratio, the target."""
    middle = {name: median(times) for name, times in result["seconds"].items()}
    memory = result["memory"]
    return [
        ("time of a gather of each parameter and its way", middle["stream"] / middle["each"], OF_EACH),
        ("memory of a gather of each parameter", memory["stream"] / memory["each"], OF_MEMORY),
        ("time of a raw copy", middle["stream"] / middle["raw"], OF_RAW),
        ("time of bare shards and a raw copy", middle["stream"] / middle["bare"], OF_RAW),
    ]


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{result['parameters']} parameters, {result['bytes'] / 1e6:.0f} MB"]
    for name, times in result["seconds"].items():
        held = f"{result['memory'][name] / 1e6:8.1f} MB" if name in result["memory"] else ""
        lines.append(f"{name:<8}{median(times):8.3f} s{held}")
    lines += [f"{ratio:.2f}x of the {what} (target {limit:.2f}x)" for what, ratio, limit in ratios(result)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
