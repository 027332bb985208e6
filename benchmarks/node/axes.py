"""Every stage and every axis on the devices of a node, beside one process with the same batches.

Weights and sums are fp32, so that what is left are orders of sums. The ranks of each axis start by themselves: one that
hangs leaves the others' results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from campaign.account import Account, Place
from campaign.training import FP32_TOLERANCE, Curve, compare
from torch import Tensor, nn

from node.launches import launched, start_of
from zero3d import Engine, Mesh

STEPS, ROWS, LENGTH, RATE = 3, 8, 32, 0.1
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip
CUT_STAGES, CPU_STAGES = {"tp": (1, 3), "pp": (1, 3)}, {"tp": (3,), "pp": (1,)}


class Case(NamedTuple):
    """A way to share a training out. experts: the model is a mixture."""

    name: str
    stage: int
    degrees: dict[str, int]
    experts: bool = False


def cases(ranks: int, stages: Mapping[str, Sequence[int]]) -> Iterator[list[Case]]:
    """Yield cases in launches: those of a launch share processes. stages: of tp and pp."""
    yield [Case(f"stage {stage}", stage, {"dp": ranks}) for stage in range(4)]
    yield [Case(f"tp 2, stage {stage}", stage, {"tp": 2}) for stage in stages["tp"]]
    yield [Case(f"pp 2, stage {stage}", stage, {"pp": 2}) for stage in stages["pp"]]
    yield [Case("sp 2, stage 3", 3, {"dp": ranks, "sp": 2})]
    yield [Case("ep 2, stage 3", 3, {"dp": ranks, "ep": 2}, experts=True)]
    if ranks >= 4:
        yield [Case(f"shard {ranks // 2}, stage 3", 3, {"dp": ranks, "shard": ranks // 2})]
    if ranks == 8:
        yield [Case("dp 2 x tp 2 x pp 2, stage 1", 1, {"dp": 2, "tp": 2, "pp": 2})]


def axes(place: Place, account: Account) -> None:
    """Train each case on all ranks and compare losses and gradient norms with one process."""
    device = torch.device("cpu" if place.on_cpu else "cuda:0")
    plain = {experts: alone(device, experts) for experts in (False, True)}
    launches = list(cases(place.ranks, CPU_STAGES if place.on_cpu else CUT_STAGES))
    if place.on_cpu:  # where processes take longer to start than to train
        launches = [[case for launch in launches for case in launch]]
    start = start_of(place, len(launches))
    for launch in launches:
        curves = launched(account, [case.name for case in launch], start, curves_of, launch)
        if curves is None:
            continue
        for case in launch:
            compare(account, case.name, curves[case.name], plain[case.experts], FP32_TOLERANCE)
        if len({case.stage for case in launch if case.degrees == launch[0].degrees}) == 4:
            stages = [curves[case.name] for case in launch if case.name.startswith("stage")]
            account.ran("all stages have the same bits", all(curve == stages[0] for curve in stages))


def curves_of(device: torch.device, launch: list[Case]) -> dict[str, Curve]:
    """On a rank: train every case."""
    return {case.name: curve_of(device, case) for case in launch}


def curve_of(device: torch.device, case: Case) -> Curve:
    """Train this rank's rows, in a pipeline as two micro-batches a step."""
    mesh = Mesh(**case.degrees, device=device)
    parts = 2 if mesh.pp > 1 else 1
    schedule: dict[str, Any] = {"schedule": "1f1b"} if mesh.pp > 1 else {}
    engine = Engine(
        model_of(device, case.experts), stage=case.stage, mesh=mesh, precision="fp32", optimizer=sgd,
        accumulate=parts, clip_norm=None, **schedule,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        own = rows_of(step, device).chunk(mesh.degrees.rows)[mesh.row]
        losses.append(float(engine.train_batch([{"input_ids": ids, "labels": ids} for ids in own.chunk(parts)])))
        norms.append(float(engine.last_step.grad_norm))
    engine.close()
    mesh.close()
    return Curve(losses=losses, norms=norms)


def alone(device: torch.device, experts: bool) -> Curve:
    """Train in one process without an engine."""
    model = model_of(device, experts)
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        ids = rows_of(step, device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    return Curve(losses=losses, norms=norms)


def model_of(device: torch.device, experts: bool) -> nn.Module:
    """Make the same small model in fp32 wherever it is called."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    kind, config = (MixtralForCausalLM, MixtralConfig) if experts else (LlamaForCausalLM, LlamaConfig)
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if experts else {}
    return kind(config(**SIZES, **more, use_cache=False)).to(device)


def rows_of(step: int, device: torch.device) -> Tensor:
    """Return the token ids [ROWS, LENGTH] of a step, the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(SIZES["vocab_size"], (ROWS, LENGTH), generator=generator).to(device)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Make the optimizer of every case: its updates are as exact as gradients."""
    return torch.optim.SGD(params, lr=RATE)
