"""Step time of a mixture of experts on an ep axis, beside data parallelism and transformers' own expert parallelism.

    python benchmarks/experts.py --ranks 2 --json out.json
    python benchmarks/experts.py --ranks 4 --experts 8 32 128

    dp           zero3d.Engine at stage 3: every rank gathers all experts
    ep-exact     the same with ep = ranks: a product for each rank whose tokens came
    ep-fast      the same: one product of all sources
    transformers its dispatch by all-to-all, what are no experts over FSDP2 (DistributedConfig(fsdp_size, ep_size))

A Qwen3-MoE of 4 blocks (about 60 M parameters: 32 experts a layer, of which a token meets 2), fp32, fused AdamW, no
clipping, micro-batches of --tokens tokens, in the same processes turn by turn; a step's seconds are the slowest rank's.
The losses of all must agree. Without transformers' own (before 5.20) it is left out.

Then a layer alone, forward and backward, of ever more experts of the same width: how dispatch grows.
Targets: ep-fast <= 0.95x of dp and <= 0.90x of transformers, ep-exact <= 1.20x of ep-fast; from 8 to 128 experts a
layer's time grows by less than the experts. The exit code is 0 whether they are met or not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ranks import Start, command_line, over_ranks, positive, run_ranks, synchronize
from torch import Tensor, nn
from turns import WARM_UP, turn_order

from zero3d import Engine, Mesh
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.expert_parallel.plan import find_experts
from zero3d.expert_parallel.share import share_out
from zero3d.memory.arena import Arena

NATIVE = "transformers"
VARIANTS = ("dp", "ep-exact", "ep-fast", NATIVE)
RATIOS = (("ep-fast", "dp", 0.95), ("ep-fast", NATIVE, 0.90), ("ep-exact", "ep-fast", 1.20))
VOCAB, SIZE = 8192, 384


def config_of(experts: int, size: int = SIZE, layers: int = 4) -> Any:
    """Return a Qwen3-MoE's configuration."""
    import transformers

    return transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCAB, hidden_size=size, intermediate_size=size, moe_intermediate_size=size,
        num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=6, head_dim=64, num_experts=experts,
        num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Own:
    """zero3d's engine."""

    def __init__(self, name: str, folder: str, device: torch.device) -> None:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ep = 1 if name == "dp" else dist.get_world_size()
        self.engine = Engine(
            model.train(), mesh=Mesh(ep=ep, device=device), precision="fp32", optimizer=adamw, clip_norm=None,
            experts="fast" if name == "ep-fast" else "exact",
        )  # fmt: skip

    def step(self, ids: Tensor) -> float:
        """Train on this rank's micro-batch; return the mean loss over ranks."""
        return float(self.engine.train_batch([{"input_ids": ids, "labels": ids}]))


class Native:
    """transformers' model as it distributes it, and torch's optimizer over what it makes of parameters."""

    def __init__(self, folder: str, device: torch.device) -> None:
        import transformers
        from transformers.distributed import DistributedConfig

        ranks, rank = dist.get_world_size(), str(dist.get_rank())
        os.environ |= {"RANK": rank, "WORLD_SIZE": str(ranks)}
        how = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, dtype=torch.float32)
        self.model, self.device = model.train(), device
        self.optimizer = adamw(self.model.parameters())

    def step(self, ids: Tensor) -> float:
        """Train on this rank's micro-batch; return the mean loss over ranks."""
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def timed(device: torch.device, arguments: argparse.Namespace, folder: str, names: list[str]) -> Any:
    """By variant: seconds of each counted step of the slowest rank, and the loss of the last."""
    variants = {name: Native(folder, device) if name == NATIVE else Own(name, folder, device) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses = {}
    for turn in range(WARM_UP + arguments.rounds):
        generator = torch.Generator().manual_seed(turn * dist.get_world_size() + dist.get_rank())
        ids = torch.randint(VOCAB, (1, arguments.tokens), generator=generator).to(device)
        for name in (names[i] for i in turn_order(len(names), turn)):
            taken, losses[name] = _clocked(lambda: variants[name].step(ids), device)  # noqa: B023
            seconds[name].append(taken)
    slowest = {name: over_ranks(times[WARM_UP:], dist.ReduceOp.MAX, device) for name, times in seconds.items()}
    return slowest, losses, layer_times(device, arguments)


def layer_times(device: torch.device, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """By way of computing: median seconds of a layer's forward and backward, for each number of experts."""
    import transformers

    mesh = Mesh(ep=dist.get_world_size(), device=device)
    found: dict[str, list[float]] = {"own forward": [], "ep-exact": [], "ep-fast": []}
    for experts in arguments.experts:
        for how in found:
            torch.manual_seed(0)
            layer = transformers.AutoModelForCausalLM.from_config(config_of(experts, 128, 1)).to(device)
            if how != "own forward":
                comm = Comm(mesh.axis("ep"), Arena(device), Ledger())
                share_out([layer], find_experts(layer), comm, how.partition("-")[2], True)
            found[how].append(_median_of(layer.model.layers[0].mlp.experts, experts, device, arguments))
    return found


def _median_of(layer: nn.Module, experts: int, device: torch.device, arguments: argparse.Namespace) -> float:
    hidden = torch.randn(arguments.tokens, 128, device=device, requires_grad=True)
    chosen = torch.rand(arguments.tokens, experts, device=device).topk(2).indices
    weights = torch.full((arguments.tokens, 2), 0.5, device=device)

    def once() -> None:
        layer(hidden, chosen, weights).sum().backward()

    times = [_clocked(once, device)[0] for _ in range(WARM_UP + arguments.rounds)]
    return median(over_ranks(times[WARM_UP:], dist.ReduceOp.MAX, device))


def _clocked(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds of a call on this rank, all beginning together, and what it returns."""
    dist.barrier()
    synchronize(device)
    begun = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - begun, result


def main(argv: Sequence[str] | None = None) -> int:
    import transformers

    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=positive, default=512, help="of a rank's micro-batch")
    parser.add_argument("--experts", type=positive, nargs="+", default=[8, 32, 128], help="of the layer alone")
    parser.add_argument("--size", type=positive, default=SIZE, help="hidden units, and an expert's")
    arguments = parser.parse_args(argv)
    wrong = [count for count in arguments.experts if count % arguments.ranks]
    if wrong:
        parser.error(f"--experts {wrong[0]}: {arguments.ranks} ranks do not divide them")
    names = [name for name in VARIANTS if name != NATIVE or find_spec("transformers.distributed.expert_parallel")]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(32, arguments.size))
        model.save_pretrained(folder)
        seconds, losses, layers = run_ranks(Start(arguments.ranks), timed, arguments, folder, names)
    result = {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "arguments": {**vars(arguments), "json": None}, "params": sum(p.numel() for p in model.parameters()),
        "seconds": seconds, "losses": losses, "layers": layers,
    }  # fmt: skip
    print(show(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{'variant':<14}{'median s':>10}{'min s':>9}{'loss':>10}"]
    middle = {name: median(times) for name, times in result["seconds"].items()}
    for name, times in result["seconds"].items():
        lines.append(f"{name:<14}{middle[name]:>10.3f}{min(times):>9.3f}{result['losses'][name]:>10.5f}")
    for name, other, target in RATIOS:
        if other in middle:
            lines.append(f"{name} / {other}: {middle[name] / middle[other]:.3f}x (target <= {target:.2f}x)")
    counts = result["arguments"]["experts"]
    lines.append(f"{'a layer, ms':<14}" + "".join(f"{count:>10}" for count in counts) + f"{'growth':>10}")
    for how, times in result["layers"].items():
        cells = "".join(f"{1e3 * seconds:>10.2f}" for seconds in times)
        lines.append(f"{how:<14}{cells}{times[-1] / times[0]:>9.2f}x")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
