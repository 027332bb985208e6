"""Mixers of hybrids whose sequences two ranks share, beside one process: time, activations, and bytes by formula.

    python benchmarks/hybrid_sequence.py --ranks 2 --rounds 7 --json FILE

    one      zero3d.Engine on one rank, which has whole sequences
    heads    the same with sp = ranks, recurrences shared out by heads
    prefix   by states that pass from rank to rank

Models of one kind of mixer, fp32, one thread a rank, one sequence of --tokens tokens. All train by turns, in processes
of their own that sleep until it is their turn. Counted are the seconds from where a mixer is called to where it
returns, and from where its output's gradient comes to where its input's is done: the slowest rank's, waits for the
other one among them; and of these the seconds that a rank's process was on a core.

Activations are the most that a rank's process has in two steps above what it holds between steps, each alone in fresh
processes whose malloc gives back what is freed. Bytes that the first rank sends over sp in a step are compared with the
formula's.

Targets: of the way that mesh.sp_mixers=auto takes mixers need <= 0.65x of one's time and <= 0.55x of its activations.
The exit code is 0 whether they are met or not.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from crews import Crew, crew
from hybrid_packing import SIZES, TYPES
from memory import gauge
from ranks import Start, command_line, over_ranks, positive, run_ranks
from turns import WARM_UP, turn_order

from zero3d import Engine, Mesh
from zero3d.models.bases import decoder_of
from zero3d.models.mixing import mixers
from zero3d.sequence.choice import weigh
from zero3d.sequence.trial import try_rows
from zero3d.spec.mesh import HEADS, PREFIX

ONE = "one"
WAYS = (ONE, HEADS, PREFIX)
NAMES = ("qwen3_5_text", "mamba2")
OF_TIME, OF_ACTIVATIONS = 0.65, 0.55
MEMORY_STEPS = 2


def build(name: str, tokens: int) -> Any:
    """Build a model of mixers of this type alone, with the same weights in every process."""
    import transformers as t

    torch.manual_seed(0)
    of_type = TYPES[name] | ({"layer_types": ["linear_attention"] * 2} if "layer_types" in TYPES[name] else {})
    sizes = SIZES | of_type | {"max_position_embeddings": tokens, "use_cache": False}
    return t.AutoModelForCausalLM.from_config(t.AutoConfig.for_model(name, **sizes)).float().train()


class Timed:
    """On one rank: an engine, and the clock of its mixers."""

    def __init__(self, device: torch.device, name: str, way: str, tokens: int) -> None:
        self.tokens, ranks = tokens, dist.get_world_size()
        kind = way if way != ONE else HEADS
        self.engine = Engine(
            build(name, tokens), stage=2, precision="fp32", clip_norm=None, sp_mixers=kind, accumulate=1,
            mesh=Mesh(sp=ranks, device=device), optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True),
        )  # fmt: skip
        self.seconds = self.on_core = 0.0
        self.begun = (0.0, 0.0)
        for mixer in mixers(self.engine.module).values():
            mixer.register_forward_pre_hook(self._called, with_kwargs=True)
            mixer.register_forward_hook(self._returned)

    def _begin(self, *_: Any) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def _end(self, *_: Any) -> None:
        begun, used = self.begun
        self.seconds += time.perf_counter() - begun
        self.on_core += time.process_time() - used

    def _called(self, _: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if hidden.requires_grad:
            hidden.register_hook(self._end)
        self._begin()

    def _returned(self, _: Any, args: Any, made: Any) -> None:
        self._end()
        output = made[0] if isinstance(made, tuple) else made
        output.register_hook(self._begin)

    def step(self, turn: int) -> tuple[float, float, float]:
        """Return the seconds of mixers in a step on this rank, those on a core, and the loss."""
        ids = torch.randint(3, 60, (1, self.tokens), generator=torch.Generator().manual_seed(turn))
        dist.barrier()
        self.seconds = self.on_core = 0.0
        loss = float(self.engine.train_batch([{"input_ids": ids, "labels": ids}]))
        return self.seconds, self.on_core, loss

    def sent(self) -> tuple[int, int]:
        """Return the bytes of rows and states that a step sends over sp, and those of the formula."""
        sequence = self.engine.sequence
        self.engine.traffic.reset()
        before = None if sequence is None else sequence.calls
        self.step(0)
        if sequence is None:
            return 0, 0
        measured = sum(each.bytes for each in self.engine.traffic if each.axis == "sp")
        return measured, sum(each.moved.bytes for each in sequence.traffic(sequence.calls.less(before)))


def time_ways(arguments: argparse.Namespace, name: str) -> dict[str, dict[str, Any]]:
    """Return by way seconds of each counted step, the slowest rank's, losses, and bytes that the first rank sends."""
    found: dict[str, dict[str, Any]] = {way: {"seconds": [], "on_core": [], "losses": []} for way in WAYS}
    with ExitStack() as stack:
        crews: dict[str, Crew] = {
            way: stack.enter_context(
                crew(Start(1 if way == ONE else arguments.ranks), Timed, name, way, arguments.tokens)
            )
            for way in WAYS
        }
        for way in WAYS:
            found[way]["sent"], found[way]["formula"] = crews[way].ask("sent")[0]
        for turn in range(WARM_UP + arguments.rounds):
            for way in (WAYS[i] for i in turn_order(len(WAYS), turn)):
                seconds, used, losses = zip(*crews[way].ask("step", turn + 1), strict=True)
                if turn >= WARM_UP:
                    found[way]["seconds"].append(max(seconds))
                    found[way]["on_core"].append(max(used))
                    found[way]["losses"].append(losses[0])
    return found


def memory_of(device: torch.device, name: str, way: str, tokens: int) -> int:
    """Return the most bytes that steps have on a rank beyond those that it holds between them."""
    measure = gauge(device, True)
    timed = Timed(device, name, way, tokens)
    timed.step(0)
    gc.collect()
    measure.trim()
    held = measure.now()
    measure.reset()
    for turn in range(MEMORY_STEPS):
        timed.step(turn)
    return int(over_ranks([float(measure.peak() - held)], dist.ReduceOp.MAX, device)[0])


def chosen(name: str, tokens: int, ranks: int) -> str:
    """Return the way that a run of zero3d train takes."""
    scans = (scan.of_a_run(tokens) for scan in try_rows(decoder_of(build(name, tokens))).scans)
    weighed = weigh(dict.fromkeys(scans), ranks)
    return HEADS if weighed is None else weighed.kind


def ratios(found: dict[str, Any], way: str) -> dict[str, float]:
    """Return a way's part of one process' time of mixers, of that on a core, and of its activations."""
    ways, held = found["ways"], found["activations"]
    times = {what: median(ways[way][what]) / median(ways[ONE][what]) for what in ("seconds", "on_core")}
    return times | {"activations": held[way] / held[ONE]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=positive, default=4096, help="of a sequence")
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(NAMES), metavar=",".join(NAMES))
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {"arguments": {**vars(arguments), "json": None}, "types": {}}
    for name in arguments.types:
        found = {
            "auto": chosen(name, arguments.tokens, arguments.ranks),
            "ways": time_ways(arguments, name),
            "activations": {
                way: run_ranks(
                    Start(1 if way == ONE else arguments.ranks, malloc="map"), memory_of, name, way, arguments.tokens
                )
                for way in WAYS
            },
        }
        result["types"][name] = found
        for way in (HEADS, PREFIX):
            each, sent = ratios(found, way), found["ways"][way]
            which = f"{name} {way}{' (auto)' * (way == found['auto'])}"
            print(
                f"{which}: mixers {each['seconds']:.2f}x of one's time (at most "
                f"{OF_TIME:.2f}x), {each['on_core']:.2f}x on a core, activations {each['activations']:.2f}x (at most "
                f"{OF_ACTIVATIONS:.2f}x), {sent['sent']:,} bytes sent, by formula {sent['formula']:,}; loss "
                f"{sent['losses'][-1]:.5f}, one's {found['ways'][ONE]['losses'][-1]:.5f}"
            )
    result["targets"] = {"seconds": OF_TIME, "activations": OF_ACTIVATIONS}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
