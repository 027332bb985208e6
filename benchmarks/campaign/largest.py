"""The largest Llama that the plan says fits, with its optimizer on the host, and its bytes beside the plan's.

The plan is of the card's memory and of what the host has free: the most blocks that fit both, less a margin. On the
CPU, which has no allocator that keeps account, a small model's states stand in: the formula is met to the byte.
"""

from __future__ import annotations

import os

import psutil
import torch
from model import batch
from peers import CLIP, adamw, shared_mesh
from torch import nn

from campaign.account import Account, Place
from campaign.speed import CPU_SHAPE, build
from zero3d import Engine
from zero3d.activations.recomputation import recompute
from zero3d.memory.arena import STATES
from zero3d.spec.offload import Offload
from zero3d.tools.plan.memory import memory
from zero3d.tools.plan.shapes import fused, llama
from zero3d.tools.plan.spec import Memory, ModelSpec, ParallelPlan
from zero3d.tools.plan.states import states

LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
LENGTH, CPU_LENGTH = 2048, 32
MOST_BLOCKS = 80
LEFT = 0.1  # of the card and the host: left to others
STEPS = 2
NEAR = 0.02  # of the planned bytes
PLAN = ParallelPlan(stage=3, activations="full", offload=Offload(optimizer="host"))


def largest(place: Place, account: Account) -> None:
    """Find the most blocks that fit, build and train them, and compare bytes with the plan's."""
    device = torch.device(place.device)
    length = CPU_LENGTH if place.on_cpu else LENGTH
    shape = dict(CPU_SHAPE) if place.on_cpu else LARGE | {"num_hidden_layers": most_blocks(device)}
    model = planned_model(shape, length)
    account.ran("shape", {**shape, "length": length, "parameters": model.params})
    account.ran("planned", {"allocated": memory(model, PLAN).allocated, "host": memory(model, PLAN).host})
    torch.set_num_threads(1 if place.on_cpu else len(os.sched_getaffinity(0)))
    module = narrow(device, shape)
    recompute(module, "full")
    engine = Engine(
        module, stage=3, mesh=shared_mesh(device), precision="bf16", clip_norm=CLIP, optimizer=adamw,
        offload={"optimizer": "host"},
    )  # fmt: skip
    if not place.on_cpu:
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(STEPS):
        ids, targets = batch(step, 1, length, shape["vocab_size"], device)
        loss = float(engine.train_batch([{"ids": ids, "targets": targets}]))
        account.ran(f"loss of step {step}", loss, "" if loss == loss else "it is not a number")
    if place.on_cpu:
        held = sum(entry.measured for entry in engine.memory if entry.category in STATES and entry.place == "device")
        due = int(states(model, PLAN, device="cpu").total)
        account.ran("states on the device", held, "" if held == due else f"the plan has {due}")
        account.goal("states of the largest model / planned, apart", NEAR, abs(held / due - 1), most=True)
        return
    peak = torch.cuda.max_memory_allocated(device)
    account.ran("peak_allocated", peak)
    apart = abs(peak / memory(model, PLAN).allocated - 1)
    account.goal(f"{model.params / 1e9:.1f}B: peak bytes / planned, apart", NEAR, apart, most=True)


def narrow(device: torch.device, shape: dict[str, object]) -> nn.Module:
    """Make the model in bf16 at once: in fp32 it would not fit beside the engine's."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build(device, shape)
    finally:
        torch.set_default_dtype(torch.float32)


def planned_model(shape: dict[str, object], length: int) -> ModelSpec:
    """Return what the planner knows of the model."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return fused(llama(*(int(str(shape[name])) for name in (*names, "vocab_size")), length))


def most_blocks(device: torch.device) -> int:
    """Return the most blocks that fit the card and the host."""
    card = (1 - LEFT) * torch.cuda.get_device_properties(device).total_memory
    host = (1 - LEFT) * psutil.virtual_memory().available

    def needs(blocks: int) -> Memory:
        return memory(planned_model(LARGE | {"num_hidden_layers": blocks}, LENGTH), PLAN)

    fitting = [n for n in range(1, MOST_BLOCKS + 1) if (found := needs(n)).device <= card and found.host <= host]
    return max(fitting)
