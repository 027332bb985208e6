"""An engine of verl's on ours: `import zero3d.integrations.verl` registers it under the name zero3d, for cpu and cuda.

    actor_rollout_ref.model.external_lib=zero3d.integrations.verl       what verl imports on every worker
    actor_rollout_ref.actor.strategy=zero3d                             by which verl chooses its engine

    batch in nested tensors --padded--> forward --> log-probabilities, entropy, nested again --> verl's loss
    verl's losses are scaled to be averaged over dp; micro-batches of a step are added up

Weights go to verl's rollout as `Engine.stream_weights` sends them, one bucket after the other, to every rank: each of
them has a rollout of its own, or takes part in none. Adapters of LoRA are not trained here.

The interface is that of verl 0.9.1: `BaseEngine`, and what its workers call of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import cos, pi
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from verl.utils import tensordict_utils
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from zero3d.activations import recompute
from zero3d.config import Model
from zero3d.distributed.agreement import exchange_texts
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.models.open import open_model
from zero3d.weights.buckets import Bucket, whole

NAME = "zero3d"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cpu", "cuda"])
class VerlEngine(BaseEngine):  # type: ignore[misc]
    """Trains a causal language model as verl's workers ask it to; `engine` is ours, once `initialize` has built it.

    options  of `zero3d.Engine`, and bucket_bytes; what verl's configs say comes on top of them. Ranks share batches
             out over dp alone
    """

    options: ClassVar[Mapping[str, Any]] = {"stage": 3}
    engine: Engine

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if model_config.lora_rank:
            raise ConfigError(f"lora_rank={model_config.lora_rank}: the engine zero3d trains whole models; leave it 0.")
        if engine_config.dtype not in PRECISIONS:
            raise ConfigError(f"dtype={engine_config.dtype!r}: one of {', '.join(PRECISIONS)}.")
        self._model, self._config = model_config, engine_config
        self._optimizer = optimizer_config
        self.mode: str | None = None

    def initialize(self) -> None:
        """Build the engine with the weights of the model's folder; every rank reads only what it holds."""
        options = {**self.options, "offload": self._offload()}
        self._bucket_bytes = options.pop("bucket_bytes", "256MB")
        opened = open_model(Model(path=self._model.local_path))
        recompute(opened.module, "full" if self._model.enable_gradient_checkpointing else "none")
        config = self._optimizer
        if config is not None:
            rates = {"lr": config.lr, "betas": tuple(config.betas), "weight_decay": config.weight_decay}
            options |= {"optimizer": partial(torch.optim.AdamW, **rates), "clip_norm": config.clip_grad}
        precision = PRECISIONS[self._config.dtype]
        self.engine = Engine(opened.module, mesh=Mesh(), weights=opened.weights, precision=precision, **options)
        self._schedule = None if config is None else LambdaLR(self.engine.optimizer.torch, partial(_factor, config))

    def _offload(self) -> Mapping[str, str] | None:
        asked = {"params": self._config.param_offload, "optimizer": self._config.optimizer_offload}
        return {what: "host" for what, wanted in asked.items() if wanted} or self.options.get("offload")

    # --- where it is ------------------------------------------------------------------------------

    @property
    def is_param_offload_enabled(self) -> bool:
        """Return False: verl has no parameters to move, since the engine places its own."""
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Return False: verl has no optimizer states to move, since the engine places its own."""
        return False

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Do nothing: what is where is said by `offload`, for all of training."""

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place on dp."""
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        """Return the ranks that have batches of their own: all of them."""
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        """Return the group of these ranks."""
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return True: every rank has outputs."""
        return True

    # --- training ---------------------------------------------------------------------------------

    @contextmanager
    def _as(self, mode: str) -> Iterator[None]:
        self.mode = mode
        self.engine.module.train(mode == "train")
        try:
            yield
        finally:
            if mode == "train":
                self.optimizer_zero_grad()
            self.mode = None

    def train_mode(self, **kwargs: Any) -> Any:
        """Return a context in which the model trains; gradients of a step that was not applied are forgotten."""
        return self._as("train")

    def eval_mode(self, **kwargs: Any) -> Any:
        """Return a context in which the model is evaluated."""
        return self._as("eval")

    def optimizer_zero_grad(self) -> None:
        """Forget the gradients of this step so far."""
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        """Apply the step, unless its gradients are not finite; return their norm before it was clipped."""
        return float(self.engine.step().grad_norm)

    def lr_scheduler_step(self) -> float:
        """Move the learning rate on, and return it."""
        assert self._schedule is not None
        self._schedule.step()
        return float(self._schedule.get_last_lr()[0])

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run a batch's micro-batches, backward with them unless `forward_only`; return outputs, losses and metrics."""
        tokens = data["loss_mask"].sum().to(self.engine.mesh.device)
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        size = self.get_data_parallel_size()
        tensordict_utils.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=size)
        micro_batches, indices = prepare_micro_batches(
            data=data, dp_group=self.get_data_parallel_group(), same_micro_num_in_dp=True
        )
        outputs = []
        for number, micro_batch in enumerate(micro_batches, 1):
            with torch.set_grad_enabled(not forward_only):
                loss, output = self._forward(micro_batch.to(self.engine.mesh.device), loss_function)
            if not forward_only:
                last = number == len(micro_batches)
                self.engine.backward_sum(loss, weight=float(last), last=last)
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _forward(self, batch: Any, loss_function: Callable[..., Any] | None) -> tuple[Tensor, dict[str, Any]]:
        """Return verl's loss of a micro-batch, or 1 where it wants none, and what it collects of it."""
        found, loss, metrics = self._outputs(batch), torch.ones(()), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=found, data=batch, dp_group=group)
        detached = {name: tensor.detach() for name, tensor in found.items()}
        return loss, {"model_output": detached, "loss": loss.detach().item(), "metrics": metrics}

    def _outputs(self, batch: Any) -> dict[str, Tensor]:
        """Return the log-probability of each token's next one, nested as the batch is, and the entropy if it is asked.

        That of a sequence's last token is of the next sequence's first, as verl's losses expect: they leave it out.
        """
        ids, positions = batch["input_ids"], batch["position_ids"]
        offsets = ids.offsets()
        padded = torch.nested.to_padded_tensor(ids, 0)
        mask = torch.arange(padded.shape[1], device=padded.device) < offsets.diff()[:, None]
        logits = self.engine(
            input_ids=padded,
            attention_mask=mask.long(),
            position_ids=torch.nested.to_padded_tensor(positions, 0),
            use_cache=False,
        ).logits
        temperature = torch.as_tensor(batch["temperature"], dtype=torch.float32, device=logits.device).view(-1, 1, 1)
        flat = (logits.float() / temperature.clamp(min=1e-8))[mask]
        labels = torch.roll(ids.values(), -1)
        found = {"log_probs": -cross_entropy(flat, labels, reduction="none")}
        if tensordict_utils.get_non_tensor_data(data=batch, key="calculate_entropy", default=False):
            logs = flat.log_softmax(-1)
            found["entropy"] = -(logs.exp() * logs).sum(-1)
        return {name: torch.nested.nested_tensor_from_jagged(values, offsets) for name, values in found.items()}

    # --- weights, and checkpoints -----------------------------------------------------------------

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return names and whole tensors, for every rank, and no adapter; all ranks take them to the end together."""
        return everywhere(self.engine, self._bucket_bytes), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save all states into a folder, from which any number of ranks goes on; verl's trainer removes old ones."""
        schedule = None if self._schedule is None else self._schedule.last_epoch
        self.engine.save(local_path, loop={"schedule": schedule})

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Go on from a folder that `save_checkpoint` wrote."""
        loop = self.engine.load(local_path)
        if self._schedule is not None:
            self._schedule.load_state_dict(self._schedule.state_dict() | {"last_epoch": loop["schedule"]})


def everywhere(engine: Engine, bucket_bytes: int | str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors of an engine's weights on every rank, each verified there, as the caller's own."""
    for name, tensor in whole(_shared(engine, bucket_bytes)):
        yield name, tensor.to(engine.mesh.device, copy=True)


def _shared(engine: Engine, bucket_bytes: int | str) -> Iterator[Bucket]:
    """Yield rank 0's buckets on all ranks; each takes a broadcast."""
    memory = torch.empty(0, dtype=torch.uint8)
    for bucket in engine.stream_weights(bucket_bytes=bucket_bytes):
        first = engine.mesh.rank == 0
        text = json.dumps([bucket.nbytes, bucket.header()]) if first else ""
        nbytes, header = json.loads(exchange_texts(engine.world, text)[0])
        if memory.numel() < nbytes and not first:
            memory = torch.empty(nbytes, dtype=torch.uint8)
        shared = bucket.memory if first else memory
        engine.world.broadcast(shared[:nbytes], "a bucket")
        yield bucket if first else Bucket.of(bucket.number, shared, nbytes, header)


def _factor(config: Any, step: int) -> float:
    """Return the part of the learning rate that a step has: warm-up, then constant or along a cosine."""
    total, warm_up = config.total_training_steps, config.lr_warmup_steps
    if warm_up is None or warm_up <= 0:
        warm_up = int(config.lr_warmup_steps_ratio * total)
    if step < warm_up:
        return float(step / warm_up)
    if getattr(config, "lr_scheduler_type", "constant") == "constant":
        return 1.0
    least = getattr(config, "min_lr_ratio", None) or 0.0
    done = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return float(least + (1 - least) * (1 + cos(2 * pi * config.num_cycles * done)) / 2)
