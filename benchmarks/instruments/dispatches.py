"""Count what a training step has torch dispatch, phase by phase: on an accelerator each of these is a kernel launch.

    python benchmarks/instruments/dispatches.py [--dp 8] [--blocks 32] [--variants stage0,stage3] [--json OUT]

plain PyTorch, FSDP2 and stages 0-3 train one small Llama in bf16 with clipping and fused AdamW. The process group is a
fake one of `dp` ranks, whose peers are not there, so this runs anywhere in seconds; the third step is counted. It is
taken for NCCL's: the engine sends 16-bit gradients as terms, and adds them up itself. Not counted are views,
allocations, reads of the host and marks of the profiler, which launch nothing. What torch does in one multi-tensor call
(`_foreach`, `_fused`) and a collective count once each.

With --seconds it measures what the phases take of the host, on two gloo ranks: step_seconds.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

BENCHMARKS = Path(__file__).resolve().parents[1]
VARIANTS = ("plain", "fsdp2", "stage0", "stage1", "stage2", "stage3")
HIDDEN, VOCABULARY, BATCH, LENGTH, STEPS = 64, 512, 2, 16, 3
LAUNCH_NOTHING = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "set_", "detach", "alias",
    "lift_fresh", "_local_scalar_dense", "item", "record_stream", "_has_same_storage_numel", "is_same_size",
}  # fmt: skip


class Dispatches(TorchDispatchMode):
    """Counts what is dispatched inside, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """How many launches an accelerator would have seen."""
        return self.by_name.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and space != "profiler" and name not in LAUNCH_NOTHING:
            self.by_name[func._schema.name] += 1
        return out


class Step(NamedTuple):
    """What the phases of one step dispatched."""

    forward: Dispatches
    backward: Dispatches
    step: Dispatches

    @property
    def total(self) -> int:
        """All phases together."""
        return sum(phase.total for phase in self)


class Llama(nn.Module):
    """A Hugging Face Llama that returns its loss; head and embedding are not tied."""

    def __init__(self, blocks: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=blocks, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        self.inner = LlamaForCausalLM(config)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        logits = self.inner(input_ids=ids, use_cache=False).logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trained(NamedTuple):
    """How a variant does each phase."""

    forward: Callable[..., Tensor]
    backward: Callable[[Tensor], None]
    step: Callable[[], object]


def count(variant: str, dp: int = 8, blocks: int = 32) -> Step:
    """Return what the third step of a variant dispatches on a fake process group of `dp` ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp)
    try:
        torch.manual_seed(0)
        trained = build(variant, dp, Llama(blocks))
        ids, targets = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for _ in range(2))
        for _ in range(STEPS):
            counted = Step(Dispatches(), Dispatches(), Dispatches())
            with counted.forward:
                loss = trained.forward(ids, targets)
            with counted.backward:
                trained.backward(loss)
            with counted.step:
                trained.step()
        return counted
    finally:
        dist.destroy_process_group()
        gc.collect()


def build(variant: str, dp: int, model: nn.Module, peers: bool = False) -> Trained:
    """Return a variant's phases. peers: its process group has them, and an engine reduces as it does on that."""
    if variant.startswith("stage"):
        engine = (_engine if peers else _peerless_engine)(model, variant)
        return Trained(engine, engine.backward, engine.step)
    if variant == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shared: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (dp,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        }
        for block in model.inner.model.layers:  # type: ignore[union-attr]
            fully_shard(block, **shared)
        fully_shard(model, reshard_after_forward=False, **shared)
    elif variant == "ddp":
        model = nn.parallel.DistributedDataParallel(model.bfloat16())
    else:
        model = model.bfloat16()
    optimizer = adamw(model.parameters())

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Trained(model, lambda loss: loss.backward(), step)  # type: ignore[no-untyped-call]


def _engine(model: nn.Module, variant: str) -> Any:
    from zero3d import Engine, Mesh

    stage, weights = int(variant[len("stage")]), variant.partition("-")[2] or "kept"
    options: dict[str, Any] = {"precision": "bf16", "optimizer": adamw, "clip_norm": 1.0, "weight_shards": weights}
    return Engine(model, stage=stage, mesh=Mesh(device="cpu"), **options)


def _peerless_engine(model: nn.Module, variant: str) -> Any:
    """Return an engine that reduces as it does on NCCL; terms of absent peers are zeros."""
    from zero3d.distributed import algorithms, collectives

    class Peerless(algorithms.AllToAll):
        def exchange(self, call: Any, values: Tensor) -> Tensor:
            super().exchange(call, values)
            with _disable_current_modes():
                return values.repeat(self._size)

        def all_to_all(self, call: Any, full: Tensor, take: Any) -> Any:
            def arrived(terms: list[Tensor]) -> None:
                with _disable_current_modes():
                    torch._foreach_zero_(terms)
                take(terms)

            return super().all_to_all(call, full, arrived)

    def open_algorithm(axis: Any, arena: Any = None, reduce_scatter: str = "", on_host: int | None = None) -> Any:
        if reduce_scatter and axis.size > 1:
            return Peerless(axis, arena)
        return algorithms.Fake(axis, arena)

    with mock.patch.object(collectives, "open_algorithm", open_algorithm):
        return _engine(model, variant)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all variants."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def main() -> None:
    """Print a table, and write what was counted or measured if asked."""
    parser = argparse.ArgumentParser(description="Count what a training step has torch dispatch.")
    parser.add_argument("--dp", type=int, help="ranks of the process group (default 8, with --seconds 2)")
    parser.add_argument("--blocks", type=int, default=32, help="blocks of the Llama (default 32)")
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        help=f"some of {','.join(VARIANTS)}, stage3-cast; with --seconds ddp, too",
    )
    parser.add_argument("--seconds", action="store_true", help="measure CPU seconds and own calls on gloo ranks")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="--seconds: of that checkout, too, in turns")
    parser.add_argument("--rounds", type=int, default=30, help="--seconds: turns of each (default 30)")
    parser.add_argument("--json", type=Path, help="write the counts of every operation there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.seconds:
        _measure(options)
        return
    dp = options.dp or 8
    found = {variant: count(variant, dp, options.blocks) for variant in options.variants or VARIANTS}
    print(f"{'dp ' + str(dp):8} {'forward':>8} {'backward':>8} {'step':>6} {'all':>6}")
    for variant, counted in found.items():
        print(
            f"{variant:8} {counted.forward.total:8,} {counted.backward.total:8,} {counted.step.total:6,} "
            f"{counted.total:6,}"
        )
    if options.json is not None:
        rows = {
            variant: {phase: dict(getattr(counted, phase).by_name) for phase in Step._fields}
            for variant, counted in found.items()
        }
        record = {"dp": dp, "blocks": options.blocks, "torch": torch.__version__, "dispatches": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def _measure(options: argparse.Namespace) -> None:
    sys.path.append(str(BENCHMARKS))
    from instruments.step_seconds import measure, show

    dp = options.dp or 2
    found = measure(options.variants or ("stage3", "ddp"), dp, options.blocks, options.against, options.rounds)
    print(f"{dp} gloo ranks, {options.blocks} blocks, {options.rounds} turns\n{show(found)}")
    if options.json is not None:
        options.json.write_text(json.dumps({"dp": dp, "blocks": options.blocks, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
