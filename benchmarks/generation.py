"""Generation by the model in training at stage 3, beside stage 2 and DeepSpeed's stage 3, through TRL's own context.

    python benchmarks/generation.py --rounds 5 --json FILE       (pip install 'zero3d[bench,trl]')

    zero3d-2          no weight is sharded: what a generation itself takes
    zero3d-3          whole weights are gathered once, as they are by default where every rank has room
    zero3d-3-units    ds3_gather_for_generation=False: each unit is gathered for each token
    deepspeed-3       DeepSpeed gathers whole weights, generates, and releases them
    deepspeed-3-units ds3_gather_for_generation=False: DeepSpeed gathers by module, and by its defaults
                      (stage3_max_live_parameters) need not release a model as small as this one

All have the same Llama in fp32 and write the same tokens, greedily, as many on each rank. A round is what GRPOTrainer
and RLOOTrainer do: `unwrap_model_for_generation`, then `generate`. zero3d's weights are released behind it, as the next
forward of a training does. Variants take turns round by round in an order that changes; DeepSpeed's have processes of
their own, which sleep meanwhile. The seconds are those of the slowest rank, one thread each. One round is warm-up.

Printed are medians, as a part of stage 2's, and what a rank has sent by zero3d's ledger.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from crews import Crew, crew
from deepspeed_peer import installed, private_extensions, quiet
from model import HEAD_SIZE, Shape
from ranks import Start, command_line, positive
from turns import turn_order

OURS = {"zero3d-2": (2, None), "zero3d-3": (3, None), "zero3d-3-units": (3, False)}
THEIRS = {"deepspeed-3": True, "deepspeed-3-units": False}
WARM_UP = 1


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    names = [*OURS, *(THEIRS if arguments.deepspeed else ())]
    with private_extensions():
        result = {
            "torch": torch.__version__,
            "arguments": {**vars(arguments), "model": vars(arguments.model), "json": None},
            **timed(Start(arguments.ranks), arguments, names),
        }
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Shape.parse, default=Shape(layers=4, d=512, vocab=4096))
    parser.add_argument("--rows", type=positive, default=4, help="completions of a rank (default %(default)s)")
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--new", type=positive, default=24, help="tokens of a completion (default %(default)s)")
    parser.add_argument("--no-deepspeed", dest="deepspeed", action="store_false", default=installed())
    return parser.parse_args(argv)


def timed(start: Start, arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Seconds of each round, bytes sent in one, and whether all have written the same tokens."""
    with ExitStack() as stack:
        place: dict[str, Crew] = {}
        for members in ([*OURS], *([name] for name in names if name in THEIRS)):
            place |= dict.fromkeys(members, stack.enter_context(crew(start, Rank, arguments, members)))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        found: dict[str, Any] = {}
        for turn in range(WARM_UP + arguments.rounds):
            for index in turn_order(len(names), turn):
                name = names[index]
                answers = place[name].ask("generate", name)
                seconds[name].append(max(taken for taken, _, _ in answers))
                found[name] = [(tokens, sent) for _, tokens, sent in answers]
    tokens = [[tokens for tokens, _ in ranks] for ranks in found.values()]
    return {
        "seconds": {name: times[WARM_UP:] for name, times in seconds.items()},
        "sent": {name: found[name][0][1] for name in OURS},
        "same_tokens": all(each == tokens[0] for each in tokens),
    }


class Rank:
    """On one rank: the models of some variants, each with its trainer's accelerator."""

    def __init__(self, device: torch.device, arguments: argparse.Namespace, names: Sequence[str]) -> None:
        a = arguments
        draw = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(1, a.model.vocab, (a.rows, a.prompt), generator=draw)
        self.given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        self.given |= {"max_new_tokens": a.new, "min_new_tokens": a.new}
        with redirect_stdout(StringIO()):  # what they hold, and the line about a generation
            self.variants = {name: prepared(name, a.model) for name in names}

    def generate(self, name: str) -> tuple[float, list[list[int]], int]:
        """Seconds of a generation on this rank, its tokens, and the bytes that this rank has sent."""
        from trl.models import unwrap_model_for_generation

        accelerator, model = self.variants[name]
        engine = getattr(accelerator, "engine", None)
        before = sent(engine)
        dist.barrier()
        begun = perf_counter()
        gathers = THEIRS.get(name, True)
        with (
            redirect_stdout(StringIO()),
            unwrap_model_for_generation(model, accelerator, gather_deepspeed3_params=gathers) as unwrapped,
            torch.no_grad(),
        ):
            tokens = unwrapped.generate(**self.given)
        if engine is not None:
            engine.release()
        return perf_counter() - begun, tokens.tolist(), sent(engine) - before


def sent(engine: Any) -> int:
    return 0 if engine is None else sum(entry.bytes for entry in engine.traffic.totals())


def prepared(name: str, shape: Shape) -> tuple[Any, Any]:
    """An accelerator, and the model that it has prepared."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "ACCELERATE_USE_CPU": "true"}
    model = build(shape)
    if name in THEIRS:
        return _deepspeed(model)
    from zero3d.ways.huggingface.accelerate import Accelerator

    stage, gather = OURS[name]
    accelerator = Accelerator(cpu=True, stage=stage, gather_for_generation=gather)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model


def build(shape: Shape) -> Any:
    """Hugging Face's Llama, with the same weights wherever it is called."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = shape.d // HEAD_SIZE
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.d, intermediate_size=4 * shape.d, num_hidden_layers=shape.layers,
        num_attention_heads=heads, num_key_value_heads=heads, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _deepspeed(model: Any) -> tuple[Any, Any]:
    """Accelerate's own Accelerator with DeepSpeed at stage 3."""
    import accelerate
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin

    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    settings["zero_allow_untested_optimizer"] = True
    accelerator = accelerate.Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Median seconds of each variant as a part of stage 2's."""
    middle = {name: median(times) for name, times in result["seconds"].items()}
    return {name: taken / middle["zero3d-2"] for name, taken in middle.items()}


def show(result: dict[str, Any]) -> str:
    """A line for each variant."""
    lines = [f"{'':18}  median, s  of stage 2    sent"]
    for name, ratio in ratios(result).items():
        moved = f"{result['sent'][name] / 1e6:,.1f} MB" if name in result["sent"] else ""
        lines.append(f"{name:18}  {median(result['seconds'][name]):9.3f}  {ratio:9.2f}x    {moved}")
    return "\n".join([*lines, f"the same tokens: {'yes' if result['same_tokens'] else 'no'}"])


if __name__ == "__main__":
    raise SystemExit(main())
