"""Adapters on a base of 4 bits beside the same on one of bf16, and beside PEFT with bitsandbytes.

    python benchmarks/qlora.py --ranks 2 --rounds 3 --json out.json

    bf16, nf4, nf4-double   zero3d.Engine at stage 3, LoRA on all linear layers of a drawn Llama
    peft                    PEFT on bitsandbytes' Linear4bit, torch's AdamW, one process; beside it zero3d's nf4, too

Bytes of a rank are what its process grows by when the model is opened and the engine built, after a tiny one has been
trained in it; every variant has a process of its own for it. Seconds of a step are the slowest rank's, of variants turn
by turn in the same processes. Targets: layers of nf4 are gathered in 0.281x of bf16's bytes, of nf4-double in 0.258x; a
rank grows by at most 0.40x; a step of nf4 on one rank takes at most as long as PEFT's. The exit code is 0 whether they
are met or not.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ranks import Start, command_line, over_ranks, positive, run_ranks
from torch import Tensor, nn
from turns import WARM_UP, turn_order

from zero3d import Engine
from zero3d.config import load
from zero3d.models.names import own_name
from zero3d.models.quantised import QuantisedLinear
from zero3d.models.trained import open_trained
from zero3d.shards.boxes import whole

BASE, PEER = "bf16", "peft"
FORMATS = ("nf4", "nf4-double")
TARGETS = {"nf4": 0.281, "nf4-double": 0.258}
HELD = 0.40
SMALL, OWN = "Qwen2.5-0.5B", "drawn"
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
RANK = 8


def config_of(arguments: argparse.Namespace, **sizes: int) -> dict[str, Any]:
    """The config.json of a Llama with a small vocabulary."""
    hidden, heads = arguments.hidden, max(1, arguments.hidden // 128)
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": hidden,
        "intermediate_size": arguments.intermediate, "num_hidden_layers": arguments.layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 2048,
    } | sizes  # fmt: skip


def opened(config: dict[str, Any], name: str) -> Any:
    """The model with adapters, its base in a format, as `zero3d train` opens it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        model = {"path": str(path), "init": "random", "quantize": None if name == BASE else name}
        return open_trained(load({"model": model, "lora": {"rank": RANK, "targets": ["all-linear"]}}))


def engine_of(config: dict[str, Any], name: str) -> Engine:
    made = opened(config, name)
    return Engine(made.module.train(), weights=made.weights, stage=3, optimizer=adamw)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def tokens(seed: int, arguments: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (arguments.micro_batch, arguments.seq), generator=generator)


class Own:
    """zero3d's engine."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.engine = engine_of(config, name)

    def step(self, ids: Tensor) -> float:
        loss = self.engine(input_ids=ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())


class Peft:
    """PEFT on bitsandbytes' layers, with the weights and adapters of zero3d's variants, and torch's optimizer."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        import bitsandbytes as bnb
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        own = opened(config, BASE)
        values = {name: own.weights(name, whole(tuple(p.shape))) for name, p in own.module.named_parameters()}
        model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
        for name, p in model.named_parameters():
            p.data.copy_(values[next(each for each in values if own_name(each) == name)])
        for layer, linear in list(model.model.layers.named_modules()):
            if isinstance(linear, nn.Linear):
                parent, _, local = layer.rpartition(".")
                packed = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                    compress_statistics=False,
                ).to(torch.bfloat16)  # fmt: skip
                packed.load_state_dict(linear.state_dict())
                setattr(model.model.layers.get_submodule(parent), local, packed.to("cpu"))
        wanted = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(model, wanted, autocast_adapter_dtype=False).train()
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                p.data.copy_(values[name.removeprefix("base_model.model.")])
        self.optimizer = adamw([p for p in self.model.parameters() if p.requires_grad])

    def step(self, ids: Tensor) -> float:
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def timed(device: torch.device, arguments: argparse.Namespace, names: Sequence[str]) -> Any:
    """By variant: seconds of each counted step of the slowest rank, and the losses of all steps."""
    config = config_of(arguments)
    variants = {name: (Peft if name == PEER else Own)(config, name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + arguments.rounds):
        ids = tokens(turn * dist.get_world_size() + dist.get_rank(), arguments)
        for name in (names[i] for i in turn_order(len(names), turn)):
            dist.barrier()
            begun = time.perf_counter()
            losses[name].append(variants[name].step(ids))
            seconds[name].append(time.perf_counter() - begun)
    return {name: over_ranks(times[WARM_UP:], dist.ReduceOp.MAX, device) for name, times in seconds.items()}, losses


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def held(device: torch.device, arguments: argparse.Namespace, name: str) -> Any:
    """Bytes by which the process of the first rank grows, and what the engine counts of it."""
    Own(config_of(arguments, **TINY), name).step(tokens(0, arguments))
    before = resident()
    engine = engine_of(config_of(arguments), name)
    grown = resident() - before
    return {"grown": grown, "counted": sum(entry.measured for entry in engine.memory)}


def computed(config: dict[str, Any], name: str) -> dict[str, int]:
    """Weights of the quantised layers, the bytes they are gathered in, and the bytes of all frozen weights."""
    module: nn.Module = opened(config, name).module
    layers = [layer for layer in module.modules() if isinstance(layer, QuantisedLinear)]
    frozen = [p for p in module.parameters() if not p.requires_grad]
    return {
        "weights": sum(layer.in_features * layer.out_features for layer in layers),
        "gathered": sum(layer.packed.numel() for layer in layers),
        "frozen": sum(p.numel() * (1 if p.dtype == torch.uint8 else 2) for p in frozen),
        "others": sum(p.numel() for p in frozen if p.dtype != torch.uint8),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--hidden", type=positive, default=1536)
    parser.add_argument("--intermediate", type=positive, default=4096)
    parser.add_argument("--micro-batch", type=positive, default=1)
    parser.add_argument("--seq", type=positive, default=128)
    arguments = parser.parse_args(argv)
    names = (BASE, *FORMATS)
    shapes = {OWN: config_of(arguments), SMALL: QWEN}
    seconds, losses = run_ranks(Start(arguments.ranks), timed, arguments, names)
    alone, alone_losses = run_ranks(Start(1), timed, arguments, ("nf4", PEER))
    result = {
        "torch": torch.__version__, "arguments": {**vars(arguments), "json": None},
        "bytes": {shape: {name: computed(config, name) for name in FORMATS} for shape, config in shapes.items()},
        "held": {name: run_ranks(Start(arguments.ranks, malloc="map"), held, arguments, name) for name in names},
        "seconds": seconds, "losses": losses, "alone": alone, "alone_losses": alone_losses,
    }  # fmt: skip
    print(show(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def gathered(result: dict[str, Any], shape: str, name: str) -> float:
    """What layers are gathered in, over what they are in bf16."""
    found = result["bytes"][shape][name]
    return float(found["gathered"] / (2 * found["weights"]))


def frozen(result: dict[str, Any], shape: str, name: str) -> float:
    """The bytes of the whole base, over those in bf16."""
    found = result["bytes"][shape][name]
    return float(found["frozen"] / (2 * (found["weights"] + found["others"])))


def grown(result: dict[str, Any], name: str) -> float:
    """What a rank's process grows by, over that of bf16."""
    return float(result["held"][name]["grown"] / result["held"][BASE]["grown"])


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    middle = {name: median(times) for name, times in result["seconds"].items()}
    lines = [f"{name:<12} step {seconds:.3f} s, {seconds / middle[BASE]:.3f}x" for name, seconds in middle.items()]
    for name in FORMATS:
        share, all_of_it = gathered(result, OWN, name), frozen(result, SMALL, name)
        lines.append(f"{name:<12} gathered {share:.4f}x (target {TARGETS[name]}x); base of {SMALL} {all_of_it:.3f}x")
        lines.append(f"{name:<12} a rank grows by {grown(result, name):.3f}x (target <= {HELD}x)")
    alone = {name: median(times) for name, times in result["alone"].items()}
    lines.append(f"one rank: nf4 / {PEER}: {alone['nf4'] / alone[PEER]:.3f}x (target <= 1.00x)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
