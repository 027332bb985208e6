"""What the engine has beside stages: at stage 3 against stage 0 on one device, or against what it stands for.

optimizers  Muon, and AdamW with moments of 8 bits: stage 3 has the bits of stage 0
experts     a mixture of experts in grouped products: likewise
bases       adapters on a base of 4 and 8 bits: the losses of the same base decoded to bf16, to the bit
weights     a stream of weights: the bits of an export
sequence    sequences shared out over two ranks on one device: the losses of one process; masks in blocks, too
fp8         linear layers that multiply in fp8, blocks compiled: tokens/s and losses beside bf16
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from llama import BATCH, LENGTH, SHAPE, measure_speed, utilisation
from peers import CLIP, Setting, Zero3d, adamw, shared_mesh
from ranks import Start, run_ranks
from torch import Tensor

from campaign.account import Account, Place
from campaign.edges import llama
from campaign.loopback import Loopback
from campaign.training import FP32_TOLERANCE, MIDDLE, Curve, compare, run_of, setting_of, train
from campaign.turns import free, made
from zero3d import Engine, Mesh, make_deterministic
from zero3d.config import load
from zero3d.models.open import Opened
from zero3d.models.trained import open_trained
from zero3d.optim import adamw8bit, muon
from zero3d.weights.buckets import Assembler

STEPS = 3
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
CAUSAL = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 256}
FORMATS = ("nf4", "nf4-double", "int8", "fp8")
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {"muon": lambda: muon(lr=2e-2), "8 bits": lambda: adamw8bit(1e-3)}
FP8_LOSS = 0.02  # of a loss after the same steps


# --- optimizers and experts -----------------------------------------------------------------------


def optimizers(place: Place, account: Account) -> None:
    """Train by every optimizer at stage 0, and at stage 3 with its collectives: equal bits."""
    make_deterministic(place.device)
    run, mesh = run_of(place, account, MIDDLE._replace(precision="bf16")), Loopback(place.device)
    for name, rule in OPTIMIZERS.items():
        curves = [
            train(
                Engine(
                    setting_of(mesh.device, run).build(), stage=stage, mesh=mesh, precision=run.precision,
                    clip_norm=CLIP, optimizer=rule(),
                ),
                run,
            )
            for stage in (0, 3)
        ]  # fmt: skip
        compare(account, name, curves[1], curves[0], 0.0)


def experts(place: Place, account: Account) -> None:
    """Train a mixture of experts at stage 0, and at stage 3 with its collectives: equal bits."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_deterministic(place.device)
    shape = {**WIDE, **CAUSAL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    account.ran("shape", shape)
    mesh = Loopback(place.device)
    curves = []
    for stage in (0, 3):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, output_router_logits=True, use_cache=False))
        model.set_experts_implementation("grouped_mm")
        engine = Engine(model, stage=stage, mesh=mesh, precision="bf16", clip_norm=CLIP, optimizer=adamw)
        curves.append(causal_curve(engine, shape["vocab_size"]))
    compare(account, "grouped products", curves[1], curves[0], 0.0)


def causal_curve(engine: Engine, vocab: int) -> Curve:
    """Train a language model of Hugging Face on drawn tokens; values are read after the last step."""
    losses, norms = [], []
    for number in range(STEPS):
        ids = drawn(number, vocab, engine.mesh.device)
        losses.append(engine.train_batch([{"input_ids": ids, "labels": ids}]))
        norms.append(engine.last_step.grad_norm)
    return Curve(losses=[float(loss) for loss in losses], norms=[float(norm) for norm in norms])


def drawn(number: int, vocab: int, device: torch.device) -> Tensor:
    """Return the token ids [4, 128] of a step."""
    return torch.randint(3, vocab, (4, 128), generator=torch.Generator().manual_seed(number)).to(device)


# --- bases of few bits, and streams of weights ----------------------------------------------------


class Decoded:
    """The weights of a plain model whose matrices are what those of a quantised one decode to."""

    def __init__(self, packed: Any) -> None:
        self._packed = packed

    def __call__(self, name: str, box: Any) -> Tensor:
        found: Tensor = self._packed.decoded(name, box)
        return found


def bases(place: Place, account: Account) -> None:
    """Train adapters on a base of every format, and on what it decodes to: equal bits; bytes of the card beside."""
    make_deterministic(place.device)
    account.ran("shape", {**WIDE, **CAUSAL})
    mesh = Loopback(place.device)
    with saved_llama() as folder:
        for name in FORMATS:
            plain, packed = opened(folder, None), opened(folder, name)
            decoded = replace(plain, weights=packed.weights.over(Decoded(packed.weights.source)))  # type: ignore[attr-defined]
            found, wanted = (
                causal_curve(
                    Engine(
                        each.module, weights=each.weights, stage=3, mesh=mesh, precision="bf16", clip_norm=CLIP,
                        optimizer=adamw,
                    ),
                    CAUSAL["vocab_size"],
                )
                for each in (packed, decoded)
            )  # fmt: skip
            compare(account, name, found, wanted, 0.0)


@contextmanager
def saved_llama() -> Iterator[Path]:
    """Give the folder of a Llama whose matrices groups of all formats divide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="gpu-check-base-") as folder:
        LlamaForCausalLM(LlamaConfig(**WIDE, **CAUSAL, use_cache=False)).save_pretrained(folder)
        yield Path(folder)


def opened(folder: Path, quantize: str | None) -> Opened:
    """Open the folder's model with adapters, in a format or as it is."""
    lora = {"rank": 4, "targets": ["all-linear"]}
    return open_trained(load({"model": {"path": str(folder), "quantize": quantize}, "lora": lora}))


def weights(place: Place, account: Account) -> None:
    """Stream the weights after a step, in small buckets, and export them: equal bits."""
    from safetensors.torch import load_file

    make_deterministic(place.device)
    account.ran("shape", "Llama of 2 blocks of width 64, buckets of 64 KiB")
    engine = Engine(llama(), stage=3, mesh=Loopback(place.device), precision="bf16", clip_norm=CLIP, optimizer=adamw)
    causal_curve(engine, 256)
    with tempfile.TemporaryDirectory(prefix="gpu-check-export-") as folder:
        engine.export(folder)
        due = {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
    assembler, found, buckets = Assembler(), dict[str, Tensor](), 0
    for bucket in engine.stream_weights(bucket_bytes=1 << 16):
        found |= {name: tensor.to("cpu", copy=True) for name, tensor in assembler.unpack(bucket)}
        buckets += 1
    wrong = [name for name, tensor in due.items() if name not in found or not torch.equal(tensor, found[name])]
    account.ran("tensors", {"streamed": len(found), "buckets": buckets}, f"differ: {wrong[:3]}" if wrong else "")


# --- sequences over two ranks ---------------------------------------------------------------------

WAYS: Mapping[str, dict[str, Any]] = {
    "by heads": {"sp_kind": "heads"},
    "by rows": {"sp_kind": "gather"},
    "by heads, masks in blocks": {"sp_kind": "heads", "sp_mask_budget": 1},
}


def sequence(place: Place, account: Account) -> None:
    """Two ranks over gloo on one device, which share sequences out, against one process; documents are packed."""
    account.ran("shape", "Llama of 2 blocks of width 64, 4 sequences of 128 tokens, two documents each, fp32")
    start = Start(2, "gloo", place.device, "default", place.limit_s)
    curves = run_ranks(start, shared_curves, place.on_cpu)
    mesh = Mesh(device=place.device)
    reference = packed_curve(mesh, {})
    for name in WAYS:
        if name in curves:
            compare(account, name, curves[name], reference, FP32_TOLERANCE)
        else:
            account.skipped(name, "torch has no backward of flex attention for CPUs")


def shared_curves(device: torch.device, on_cpu: bool) -> dict[str, Curve]:
    """On a rank: every way to share attention out."""
    return {
        name: packed_curve(Mesh(device=device, sp=2), way)
        for name, way in WAYS.items()
        if not (on_cpu and "sp_mask_budget" in way)
    }


def packed_curve(mesh: Mesh, way: dict[str, Any]) -> Curve:
    """Train a Llama on sequences of two documents, whose attention needs a mask."""
    torch.set_float32_matmul_precision("highest")
    engine = Engine(llama(), stage=3, mesh=mesh, precision="fp32", clip_norm=CLIP, optimizer=adamw, **way)
    losses, norms = [], []
    for number in range(STEPS):
        ids = drawn(number, 256, mesh.device)
        half = torch.arange(ids.shape[1] // 2, device=mesh.device).repeat(2).expand(ids.shape)
        losses.append(engine.train_batch([{"input_ids": ids, "labels": ids, "position_ids": half}]))
        norms.append(engine.last_step.grad_norm)
    return Curve(losses=[float(loss) for loss in losses], norms=[float(norm) for norm in norms])


# --- products in fp8 ------------------------------------------------------------------------------


def fp8(place: Place, account: Account) -> None:
    """Time a 1B Llama at stage 3 with compiled blocks, its linear layers in bf16 and in fp8."""
    device = torch.device(place.device)
    account.ran("shape", {**SHAPE, "batch": BATCH, "length": LENGTH})
    if place.on_cpu:
        account.skipped("products in fp8", "a CPU has none")
        return
    shared_mesh(device)
    rows: dict[str, dict[str, Any]] = {}
    for linear in (None, "fp8"):
        trained = Zero3d(Setting(lambda: made(device, SHAPE, True), device), 3, linear=linear)
        row = measure_speed(device, trained, place.seconds / 2, SHAPE, BATCH, LENGTH)
        rows[linear or "bf16"] = row | utilisation(device, row, SHAPE, LENGTH, place.peak_tflops)
        account.ran(linear or "bf16", rows[linear or "bf16"])
        del trained
        free(device)
    apart = abs(rows["fp8"]["loss"] / rows["bf16"]["loss"] - 1)
    if rows["fp8"]["steps"] == rows["bf16"]["steps"] and apart > FP8_LOSS:
        account.ran("last loss", rows["fp8"]["loss"], f"{apart:.3f} off that of bf16")
    account.goal("fp8, compiled: tokens/s / bf16", 1.0, rows["fp8"]["tokens_per_s"] / rows["bf16"]["tokens_per_s"])
