"""Step time and memory of a sequence axis, beside one rank, torch's context parallelism and DeepSpeed's Ulysses.

    python benchmarks/sequence.py --ranks 2 --json out.json
    python benchmarks/sequence.py --variants one,sp --tokens 2048 --memory-tokens 0

    one        zero3d.Engine on one rank, which has whole sequences
    sp         the same with sp = ranks
    torch-cp   torch's context parallelism (its ring) over FSDP2
    ulysses    DeepSpeed's UlyssesSPAttentionHF, its engine at stage 3 (pip install 'zero3d[bench]')

A Llama of the demo's width, fp32, AdamW without clipping. All train on the same sequence of --tokens tokens by turns,
in processes of their own that sleep until it is their turn, one thread a rank; a step's seconds are the slowest rank's.
Beside them are the seconds that a rank's process was on a core, waits left out, which a busy machine changes less.
Losses must agree. What a peer fails with is recorded in its place.

Memory is of `one` and `sp`, each alone in fresh processes and at --memory-tokens tokens: the most that a rank's process
has in two steps above what it had after its imports; what it holds between steps is told apart, so that activations
are the rest. glibc maps tensors one by one meanwhile, and gives them back when they are freed (`ranks.map_tensors`).

Targets: a step of `sp` <= 1.10x of one's / ranks and <= 0.90x of each peer's; its memory <= 0.60x of one's. The exit
code is 0 whether they are met or not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from crews import Crew, crew
from deepspeed_peer import private_extensions, quiet
from memory import gauge
from ranks import Start, command_line, over_ranks, positive, run_ranks
from torch import Tensor
from torch.nn import functional as F
from turns import WARM_UP, turn_order

from zero3d import Engine, Mesh
from zero3d.models.presets import PRESETS

ONE, OWN, TORCH, ULYSSES = "one", "sp", "torch-cp", "ulysses"
VARIANTS = (ONE, OWN, TORCH, ULYSSES)
OF_ONE, OF_PEER, OF_MEMORY = 1.10, 0.90, 0.60
MEMORY_STEPS = 2


def llama(tokens: int, layers: int = 3) -> Any:
    """Return the demo's Llama with room for longer sequences; the same weights in every process."""
    import transformers

    torch.manual_seed(0)
    config = {**PRESETS["demo"], "max_position_embeddings": tokens, "num_hidden_layers": layers, "use_cache": False}
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def tokens_of(turn: int, tokens: int) -> Tensor:
    """Return the micro-batch of a step, the same on every rank: [1, tokens]."""
    return torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(turn))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Own:
    """zero3d's engine, whose sp group is all ranks."""

    def __init__(self, device: torch.device, tokens: int, layers: int = 3) -> None:
        self.engine = Engine(
            llama(tokens, layers), stage=3 if dist.get_world_size() > 1 else 2, precision="fp32", optimizer=adamw,
            mesh=Mesh(sp=dist.get_world_size(), device=device), clip_norm=None,
        )  # fmt: skip

    def step(self, ids: Tensor) -> float:
        """Train on a whole sequence; return its mean loss."""
        return float(self.engine.train_batch([{"input_ids": ids, "labels": ids}]))


class Peer:
    """What peers have in common: this rank's rows of a sequence, and the loss of all of it from each rank's share."""

    def __init__(self, tokens: int) -> None:
        self.ranks, self.rank, self.tokens = dist.get_world_size(), dist.get_rank(), tokens
        self.model = llama(tokens)

    def whole(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, their targets and their positions."""
        return ids.clone(), F.pad(ids[:, 1:], (0, 1), value=-100), torch.arange(self.tokens)[None]

    def loss(self, model: Any, ids: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        """Return the loss whose mean over ranks is that of the whole."""
        output = model(
            input_ids=ids, position_ids=places, labels=targets, shift_labels=targets, num_items_in_batch=self.tokens - 1
        )
        loss: Tensor = output.loss * self.ranks
        return loss

    def mean(self, loss: Tensor) -> float:
        """Return the mean over ranks."""
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / self.ranks


class ContextParallel(Peer):
    """torch's context parallelism over FSDP2. Its attention takes no masks: each module's is taken away before it."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(tokens)
        self.mesh = init_device_mesh(device.type, (self.ranks,), mesh_dim_names=("cp",))
        for block in self.model.model.layers:
            block.self_attn.register_forward_pre_hook(_without_mask, with_kwargs=True)
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = adamw(self.model.parameters())

    def step(self, ids: Tensor) -> float:
        """Train on a whole sequence; return its mean loss."""
        from torch.distributed.tensor.experimental import context_parallel

        given = list(self.whole(ids))
        with context_parallel(self.mesh, buffers=given, buffer_seq_dims=[1] * 3, no_restore_buffers=set(given)):
            loss = self.loss(self.model, *given)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean(loss)


def _without_mask(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"attention_mask": None}


class Ulysses(Peer):
    """DeepSpeed's engine at stage 3, with its attention by heads in the place of sdpa."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        os.environ |= {"DS_ACCELERATOR": device.type, "LOCAL_RANK": str(dist.get_rank())}
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        quiet()
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super().__init__(tokens)
        with redirect_stdout(StringIO()):  # it prints what it holds
            deepspeed.init_distributed(dist_backend=dist.get_backend())
            groups = UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=self.model, core_attn_implementation="sdpa", sequence_parallel_size=self.ranks,
                micro_batch_size=1, seq_length=tokens, seq_length_is_variable=False,
            )  # fmt: skip
            self.engine, *_ = deepspeed.initialize(
                model=self.model, model_parameters=list(self.model.parameters()), optimizer=adamw, mpu=groups,
                config={
                    "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": self.ranks,
                    "zero_optimization": {"stage": 3},
                },
            )  # fmt: skip

    def step(self, ids: Tensor) -> float:
        """Train on a whole sequence; return its mean loss."""
        rows = slice(self.rank * self.tokens // self.ranks, (self.rank + 1) * self.tokens // self.ranks)
        loss = self.loss(self.engine, *(t[:, rows].contiguous() for t in self.whole(ids)))
        self.engine.backward(loss)
        self.engine.step()
        return self.mean(loss)


class Timed:
    """On one rank: a variant and the clock."""

    def __init__(self, device: torch.device, name: str, tokens: int) -> None:
        self.tokens = tokens
        self.variant: Any = {TORCH: ContextParallel, ULYSSES: Ulysses}.get(name, Own)(device, tokens)

    def step(self, turn: int) -> tuple[float, float, float]:
        """Return the seconds of a step on this rank, those that it was on a core, and the loss."""
        ids = tokens_of(turn, self.tokens)
        dist.barrier()
        begun, used = time.perf_counter(), time.process_time()
        loss = self.variant.step(ids)
        return time.perf_counter() - begun, time.process_time() - used, loss


def time_variants(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By variant: seconds of each counted step of the slowest rank, and its losses; of a peer that fails, its error."""
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        crews: dict[str, Crew] = {}
        for name in arguments.variants:
            start = Start(1 if name == ONE else arguments.ranks, timeout_s=arguments.patience)
            try:
                with ExitStack() as own:
                    crews[name] = own.enter_context(crew(start, Timed, name, arguments.tokens))
                    crews[name].ask("step", 0)
                    stack.push(own.pop_all())
                found[name] = {"seconds": [], "on_core": [], "losses": []}
            except Exception as error:
                if name in (ONE, OWN):
                    raise
                del crews[name]
                found[name] = {"error": str(error).strip().splitlines()[-1]}
        names = list(crews)
        for turn in range(WARM_UP + arguments.rounds):
            for name in (names[i] for i in turn_order(len(names), turn)):
                answers = crews[name].ask("step", turn + 1)
                seconds, used, losses = zip(*answers, strict=True)
                found[name]["seconds"].append(max(seconds))
                found[name]["on_core"].append(max(used))
                found[name]["losses"].append(losses[0])
    for name in names:
        found[name] = {what: figures[WARM_UP:] for what, figures in found[name].items()}
    return found


def memory_of(device: torch.device, tokens: int, layers: int) -> dict[str, int]:
    """Return the most bytes of a rank beyond its imports, and those that it holds between steps."""
    import transformers.masking_utils

    assert transformers.masking_utils.create_masks_for_generate
    measure = gauge(device, True)
    gc.collect()
    measure.trim()
    measure.reset()
    before = measure.now()
    own = Own(device, tokens, layers)
    for turn in range(MEMORY_STEPS):
        own.step(tokens_of(turn, tokens))
    most = measure.peak() - before
    gc.collect()
    measure.trim()
    values = over_ranks([float(most), float(measure.now() - before)], dist.ReduceOp.MAX, device)
    return dict(zip(("most", "held"), map(int, values), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    import transformers

    parser = command_line(__doc__)
    parser.add_argument("--variants", type=_names, default=list(VARIANTS), metavar=",".join(VARIANTS))
    parser.add_argument("--tokens", type=positive, default=8192, help="of a sequence, for times")
    parser.add_argument("--memory-tokens", type=int, default=16384, help="of a sequence, for memory; 0: not measured")
    parser.add_argument("--memory-layers", type=positive, default=4, help="as many as have 1 GB of activations")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds after which a peer has failed")
    arguments = parser.parse_args(argv)
    if arguments.tokens % (2 * arguments.ranks):
        parser.error(f"--tokens {arguments.tokens}: torch's ring takes multiples of 2 x {arguments.ranks} ranks")
    if ULYSSES in arguments.variants and not find_spec("deepspeed"):
        arguments.variants.remove(ULYSSES)
    with private_extensions():
        variants = time_variants(arguments)
    memory = {}
    if arguments.memory_tokens:
        for name, ranks in ((ONE, 1), (OWN, arguments.ranks)):
            memory[name] = run_ranks(
                Start(ranks, malloc="map"), memory_of, arguments.memory_tokens, arguments.memory_layers
            )
    result = {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "arguments": {**vars(arguments), "json": None}, "variants": variants, "memory": memory,
    }  # fmt: skip
    print(show(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(VARIANTS)}")
    return names


def ratios(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return what is compared: its name, the ratio, and the most that it may be."""
    ranks, rows = result["arguments"]["ranks"], []
    for what, figures in (("time", "seconds"), ("time on a core", "on_core")):
        middle = {name: median(found[figures]) for name, found in result["variants"].items() if figures in found}
        if {ONE, OWN} <= middle.keys():
            rows.append((f"{what} / (one rank's / {ranks})", middle[OWN] * ranks / middle[ONE], OF_ONE))
        rows += [
            (f"{what} / {name}'s", middle[OWN] / middle[name], OF_PEER)
            for name in (TORCH, ULYSSES)
            if {name, OWN} <= middle.keys()
        ]
    if result["memory"]:
        rows.append(
            ("a rank's memory / one's", result["memory"][OWN]["most"] / result["memory"][ONE]["most"], OF_MEMORY)
        )
    return rows


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{'variant':<12}{'median s':>10}{'min s':>9}{'on a core':>11}{'last loss':>11}"]
    for name, found in result["variants"].items():
        if "error" in found:
            lines.append(f"{name:<12}{found['error']}")
            continue
        times = found["seconds"]
        used, loss = median(found["on_core"]), found["losses"][-1]
        lines.append(f"{name:<12}{median(times):>10.3f}{min(times):>9.3f}{used:>11.3f}{loss:>11.5f}")
    for name, found in result["memory"].items():
        activations = (found["most"] - found["held"]) / 1e9
        lines.append(f"{name:<12}{found['most'] / 1e9:>10.3f} GB at most, {activations:.3f} GB beside what it holds")
    lines += [f"{what}: {ratio:.3f}x (target <= {most:.2f}x)" for what, ratio, most in ratios(result)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
