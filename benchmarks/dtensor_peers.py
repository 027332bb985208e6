"""torch's tensor parallel by DTensor, alone and under FSDP2 and torch's pipelining: what mesh.py measures against.

Here, too, is the model of both sides, and what counts DTensor's collectives.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import pipeline
import torch
import torch.distributed as dist
from peers import CLIP, adamw
from pipeline import Fsdp2, Lm, Part, sum_of_losses
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from zero3d import Mesh

NO_TRAFFIC = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


class Counting(TorchDispatchMode):
    """Counts functional collectives. torch's CommDebugMode fails in a module's second call under one mode (2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again as what DTensor makes of it
        self.collectives += func.namespace == "_c10d_functional" and func.name() not in NO_TRAFFIC
        return func(*args, **(kwargs or {}))


class Separate(nn.Module):
    """q, k and v as three matrices, which make the fused one's outputs."""

    def __init__(self, fused: nn.Linear) -> None:
        super().__init__()
        d = fused.in_features
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        for linear, weight, bias in zip(self.children(), fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
            linear.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def build(arguments: argparse.Namespace) -> Lm:
    """The same fp32 weights wherever it is called, with the projections that were asked for."""
    model = pipeline.build(arguments.model)
    for block in model.blocks if arguments.qkv == "separate" else ():
        block.qkv = Separate(block.qkv)
    return model


class Torch:
    """What both peers share: torch's plan, its vocabulary-parallel loss, and one norm over all ranks."""

    tp: DeviceMesh

    def parallelize(self, model: nn.Module, tp: DeviceMesh) -> None:
        """Cut a model, or a pipeline stage's part of one, in place."""
        self.tp = tp
        for block in model.blocks:  # type: ignore[union-attr]
            block.heads //= tp.size()
            if isinstance(block.qkv, nn.Linear):
                sort_by_rank(block.qkv, tp.size())
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
        present = {name: style for name, style in plan.items() if getattr(model, name) is not None}
        for name in ("up", "qkv.q", "qkv.k", "qkv.v") if isinstance(block.qkv, Separate) else ("up", "qkv"):
            present[f"blocks.*.{name}"] = ColwiseParallel()
        for name in ("attention_out", "down"):
            present[f"blocks.*.{name}"] = RowwiseParallel()
        parallelize_module(model, tp, present)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        whole = DTensor.from_local(logits, self.tp, [Shard(-1)], run_check=False)
        return sum_of_losses(whole, targets).to_local()

    def clip_over(self, cut: list[Tensor], common: list[Tensor]) -> None:
        """Clip local gradients by the norm over all ranks, of which tp hold the same common ones."""
        total = get_total_norm(cut) ** 2 + get_total_norm(common) ** 2 / self.tp.size()
        dist.all_reduce(total)
        torch._foreach_mul_([*cut, *common], torch.clamp(CLIP / (total.sqrt() + 1e-6), max=1.0))

    def count(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Collectives of activations in one step."""
        with Counting() as seen:
            self.step(micro_batches)
        return seen.collectives

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        raise NotImplementedError


class Fsdp2Tp(Torch, Fsdp2):
    """fully_shard over parallelize_module, in torch.distributed.pipelining."""

    def build(self, arguments: argparse.Namespace) -> Lm:
        return build(arguments)

    def shard(self, part: Part, mesh: DeviceMesh) -> None:
        self.parallelize(part, mesh["tp"])
        super().shard(part, mesh)

    def groups(self) -> list[Any]:
        """Parameters on the dp axis and those on dp and tp: a fused step takes one mesh."""
        by_mesh: dict[Any, list[Tensor]] = {}
        for p in self.weights:
            by_mesh.setdefault(p.device_mesh, []).append(p)  # type: ignore[attr-defined]
        return [{"params": params} for params in by_mesh.values()]

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        with loss_parallel():
            return Fsdp2.step(self, micro_batches)

    def clip(self) -> None:
        """Global norm over all axes."""
        self.clip_over(*local_grads(self.weights))


class DTensorTp(Torch):
    """parallelize_module and nothing else."""

    def __init__(self, mesh: Mesh, arguments: argparse.Namespace) -> None:
        self.model = build(arguments).bfloat16()  # each weight is a bf16 number
        self.parallelize(self.model, mesh.torch)
        self.weights = list(self.model.parameters())
        self.masters = [nn.Parameter(local(p.detach()).float()) for p in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = adamw(self.masters)

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        count = sum(targets.numel() for _, targets in micro_batches)
        total = 0.0
        grads = [master.grad for master in self.masters if master.grad is not None]
        torch._foreach_zero_(grads)
        for ids, targets in micro_batches:
            with loss_parallel():
                loss = self.loss(self.model(ids), targets) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            torch._foreach_add_(grads, [local_grad(p) for p in self.weights])
            self.model.zero_grad(set_to_none=True)
        cut = [is_cut(p) for p in self.weights]
        split = [[grad for grad, which in zip(grads, cut, strict=True) if which is wanted] for wanted in (True, False)]
        self.clip_over(*split)
        self.optimizer.step()
        torch._foreach_copy_([local(p.detach()) for p in self.weights], [p.detach() for p in self.masters])
        return total


def sort_by_rank(qkv: nn.Linear, size: int) -> None:
    """Sort the rows of a fused matrix, so that each rank's chunk of it is q, k and v of its heads."""
    for p in qkv.parameters():
        p.data = p.data.unflatten(0, (3, size, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def local_grad(p: Tensor) -> Tensor:
    """The gradient of what this rank has of a parameter; DTensor leaves that of an embedding whole."""
    grad = p.grad
    assert grad is not None
    if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return local(grad)


def is_cut(p: Tensor) -> bool:
    """Whether the tp axis cuts a parameter."""
    return (
        isinstance(p, DTensor)
        and dict(zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True)).get("tp", Replicate()).is_shard()
    )


def local_grads(weights: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients as this rank has them: of parameters that are cut over tp, and of the others."""
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    for p in weights:
        found[is_cut(p)].append(local_grad(p))
    return found[True], found[False]
