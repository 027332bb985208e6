"""One training step, by each engine, like for like: same model, batches, dtypes, optimizer and clip.

Everywhere: bf16 weights in forward and backward over fp32 masters (fp32: the weights are the
masters), gradients that travel in the reduce dtype, their global norm clipped at 1.0, fused
AdamW with lr 3e-4. Gradients are dropped at the end of a step, so that what is held between
steps is model states and nothing else. Frozen weights (LoRA's base) come in bf16. zero3d and
FSDP2 also take a step's batch in several micro-batches, each of which they reduce at once, and
recompute blocks in backward: zero3d by its own `recompute`, FSDP2 by torch's `checkpoint_wrapper`.

    zero3d-S         zero3d.Engine at stage S
    zero3d-exact-S   the same with exact=True
    zero3d-autocast-S  the same with autocast=True
    zero3d-cast-3    stage 3 whose weights are cast from their masters in each gather
    fsdp2-reshard    fully_shard on exactly the modules that zero3d makes units of, then on the root;
                     fp32 sharded parameters, MixedPrecisionPolicy; reshard_after_forward=True but for
                     the root, where torch's default keeps the few parameters outside those modules
    fsdp2-noreshard  the same with reshard_after_forward=False
    ddp              bf16: the module holds bf16 weights; a communication hook casts each bucket to
                     the reduce dtype, all-reduces and divides it, and keeps the fp32 result as
                     the gradients of fp32 masters, which are copied back to the bf16 weights after the
                     update. The bf16 bucket is left alone: nothing is rounded twice or copied
                     twice. fp32: DDP as it comes. Default bucket size, gradients as bucket views
    plain            no communication at all, every rank trains on its own: bf16 weights, fp32
                     masters and gradients, else the loop of the PyTorch tutorials

zero3d and plain sum bf16 gradients that travelled in bf16 in fp32; FSDP2 and DDP leave the sum
to the backend, which rounds it to bf16.
"""

# No `from __future__ import annotations`: DDP inspects the annotations of its communication hook.

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from zero3d import Engine, Mesh
from zero3d.activations.recomputation import recompute
from zero3d.models.blocks import find_blocks, find_owners

CLIP = 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """What all variants share; `build` makes the model, equal on every call and rank: fp32, but what is frozen.

    accumulate   micro-batches of a step, equal parts of its batch     zero3d and FSDP2 alone
    recompute    blocks keep their inputs alone                        likewise
    narrow       weights are made in bf16, and masters from them       likewise
    """

    build: Callable[[], nn.Module]
    device: torch.device
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    accumulate: int = 1
    recompute: bool = False
    narrow: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


class Variant(Protocol):
    """A model in training."""

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clip, update; this rank's loss before the update."""
        ...

    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        """This rank's loss, without update."""
        ...


class Accumulated:
    """A step in micro-batches: `accumulate` of `_add`, then `update`."""

    accumulate = 1
    module: nn.Module

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss = self.gradients(ids, targets)
        self.update()
        return loss

    def gradients(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of a step; this rank's loss."""
        parts = zip(ids.chunk(self.accumulate), targets.chunk(self.accumulate), strict=True)
        losses = [self._add(*part) for part in parts]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _add(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of a micro-batch; its loss."""
        raise NotImplementedError

    def update(self) -> None:
        """Clip, update, drop gradients."""
        raise NotImplementedError


def adamw(params: Iterable[Any]) -> AdamW:
    """The optimizer of every variant."""
    return AdamW(params, lr=3e-4, fused=True)


def build_variant(name: str, setting: Setting) -> Variant:
    """A variant by its name. Every rank must build the same ones in the same order."""
    if name.startswith("zero3d-"):
        weights = "cast" if "-cast-" in name else "kept"
        options = {"exact": "exact" in name, "autocast": "autocast" in name}
        return Zero3d(setting, int(name.rpartition("-")[2]), weights, **options)
    if name.startswith("fsdp2-"):
        return Fsdp2(setting, reshard=name == "fsdp2-reshard")
    if name.startswith("deepspeed-"):
        from deepspeed_peer import DeepSpeed  # it builds on this module, and is an extra

        return DeepSpeed(setting, int(name.removeprefix("deepspeed-")))
    return Ddp(setting) if name == "ddp" else Plain(setting)


@cache
def shared_mesh(device: torch.device) -> Mesh:
    """One mesh for all engines of a process."""
    return Mesh(device=device)


class Zero3d(Accumulated):
    """zero3d's engine."""

    def __init__(self, setting: Setting, stage: int, weights: str = "kept", **options: Any) -> None:
        model, self.accumulate = setting.build(), setting.accumulate
        recompute(model, "full" if setting.recompute else "none")
        self.engine = Engine(
            model,
            stage=stage,
            mesh=shared_mesh(setting.device),
            precision=setting.precision,
            reduce_dtype=setting.reduce_dtype,
            clip_norm=CLIP,
            optimizer=adamw,
            accumulate=setting.accumulate,
            weight_shards=weights,
            **options,
        )
        self.module = self.engine.module

    def _add(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(ids, targets)
        self.engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self.engine.step()

    @torch.no_grad()
    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(ids, targets)
        self.engine.release()
        return loss


class Fsdp2(Accumulated):
    """torch's fully_shard, unit by unit as zero3d has them."""

    def __init__(self, setting: Setting, reshard: bool) -> None:
        self.module, self.accumulate = setting.build().to(setting.device), setting.accumulate
        if setting.recompute:
            blocks = set(find_blocks(self.module).values())
            apply_activation_checkpointing(self.module, check_fn=blocks.__contains__)
        low = setting.precision != "fp32"
        policy = MixedPrecisionPolicy(
            param_dtype=setting.dtype if low else None, reduce_dtype=DTYPES[setting.reduce_dtype] if low else None
        )
        mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
        for module in find_owners(self.module, None).values():
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(self.module, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=policy)
        if setting.narrow:
            self.module.float()  # its shards
        self.optimizer = adamw(p for p in self.module.parameters() if p.requires_grad)

    def _add(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.module(ids, targets)
        (loss / self.accumulate).backward()
        return loss.detach()

    def update(self) -> None:
        clip_grad_norm_(self.module.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.module(ids, targets)
        return loss


class Masters:
    """fp32 values behind a model's weights, and their optimizer; in fp32 the weights themselves."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.weights = list(model.parameters())
        self.separate = dtype != torch.float32
        self.values = [nn.Parameter(p.detach().clone()) for p in self.weights] if self.separate else self.weights
        for weight in self.weights:  # parameters only: buffers keep their dtype, as in zero3d and FSDP2
            weight.data = weight.data.to(dtype)
        self.optimizer = adamw(self.values)

    def update(self) -> Tensor:
        """Clip, step, and bring the weights up to date; the norm before clipping."""
        norm = clip_grad_norm_(self.values, CLIP)
        self.optimizer.step()
        if self.separate:
            torch._foreach_copy_([p.data for p in self.weights], [p.data for p in self.values])
        for weight in self.weights:
            weight.grad = None
        return norm


class Plain:
    """The loop one would write without any engine; `norm` is that of the last step's gradients."""

    def __init__(self, setting: Setting) -> None:
        self.model = setting.build().to(setting.device)
        self.masters = Masters(self.model, setting.dtype)
        if self.masters.separate:
            for value in self.masters.values:
                value.grad = torch.zeros_like(value)

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, targets)
        loss.backward()
        if self.masters.separate:
            local = [p.grad for p in self.masters.weights if p.grad is not None]
            torch._foreach_copy_([p.grad for p in self.masters.values if p.grad is not None], local)
        self.norm = self.masters.update()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, targets)
        return loss


class Ddp:
    """DistributedDataParallel; below fp32 with fp32 masters and a reduction in the chosen dtype."""

    def __init__(self, setting: Setting) -> None:
        model = setting.build().to(setting.device)
        self.masters = Masters(model, setting.dtype)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.masters.separate:
            self.reduction = MasterReduction(self.masters, DTYPES[setting.reduce_dtype])
            self.model.register_comm_hook(None, self.reduction.reduce)

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, targets)
        loss.backward()
        self.masters.update()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model.module(ids, targets)
        return loss


class MasterReduction:
    """DDP communication hook: averaged fp32 gradients for masters, one flat buffer per bucket."""

    def __init__(self, masters: Masters, wire: torch.dtype) -> None:
        self._master_of = dict(zip(masters.weights, masters.values, strict=True))
        self._wire = wire
        self._flat: dict[tuple[int, int], Tensor] = {}  # by (bucket, elements): DDP regroups once

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks and point the masters' gradients at the result."""
        local = bucket.buffer()
        flat = self._buffer(bucket.index(), local)
        for weight, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = grad.storage_offset() - local.storage_offset()
            self._master_of[weight].grad = flat[start : start + grad.numel()].view(grad.shape)
        sent = flat.copy_(local) if self._wire == flat.dtype else local

        def finish(_: Any) -> Tensor:
            if sent is not flat:
                flat.copy_(sent)
            flat.div_(dist.get_world_size())
            return local

        return dist.all_reduce(sent, async_op=True).get_future().then(finish)

    def _buffer(self, index: int, local: Tensor) -> Tensor:
        key = (index, local.numel())
        if key not in self._flat:
            self._flat = {k: v for k, v in self._flat.items() if k[0] != index}
            self._flat[key] = torch.empty(local.numel(), dtype=torch.float32, device=local.device)
        return self._flat[key]
