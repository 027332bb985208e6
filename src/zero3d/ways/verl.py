"""An engine of verl's on ours: `import zero3d.ways.verl` registers it under the name zero3d, for cpu and cuda.

    actor_rollout_ref.model.external_lib=zero3d.ways.verl       what verl imports on every worker
    actor_rollout_ref.actor.strategy=zero3d                             by which verl chooses its engine

    batch in nested tensors --padded--> forward --> log-probabilities, entropy, nested again --> verl's loss
    verl's losses are scaled to be averaged over dp; micro-batches of a step are added up

Weights go to verl's rollout as `Engine.stream_weights` sends them, one bucket after the other, to every rank: each of
them has a rollout of its own, or takes part in none. With LoRA (model.lora_rank) a rollout gets what verl asks for:

    base_sync_done    weights              names
    True              the adapter alone    of PEFT's file
    False             the base             of the rollout's layers: base_layer where there is an adapter
    not said          merged               the same; this rollout never gets an adapter

With model.lora.merge they are merged, under the model's own names, whatever is asked.

The interface is that of verl 0.9.1: `BaseEngine`, and what its workers call of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import cos, pi
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from verl.utils import tensordict_utils
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from zero3d.activations import recompute
from zero3d.config import Lora, Model
from zero3d.config.sections import ALL_LINEAR
from zero3d.distributed.groups import new_group
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, short
from zero3d.models.adapters import add_adapters, without_adapters
from zero3d.models.open import open_model
from zero3d.models.saved_adapters import SavedAdapter, read_adapter
from zero3d.ways.everywhere import everywhere

NAME = "zero3d"
AXES = ("tp", "ep", "shard")  # on which every rank has a whole model's output of whole sequences
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cpu", "cuda"])
class VerlEngine(BaseEngine):  # type: ignore[misc]
    """Trains a causal language model as verl's workers ask it to; `engine` is ours, once `initialize` has built it.

    options  of `zero3d.Engine`, tp, ep and shard of `zero3d.Mesh`, and bucket_bytes; what verl's configs say comes on
             top of them
    """

    options: ClassVar[Mapping[str, Any]] = {"stage": 3}
    engine: Engine

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if engine_config.dtype not in PRECISIONS:
            raise ConfigError(f"dtype={engine_config.dtype!r}: one of {', '.join(PRECISIONS)}.")
        for axis in ("pp", "sp"):
            if axis in self.options:
                raise ConfigError(
                    f"VerlEngine.options has {axis}: verl's losses take the output of a whole model for whole "
                    f"sequences, which not every rank has then. Use {', '.join(AXES)}, or leave all ranks to dp."
                )
        self._model, self._config = model_config, engine_config
        self._optimizer = optimizer_config
        self._lora, self._saved = _adapters_of(model_config)
        self._mesh = mesh = Mesh(**{axis: degree for axis, degree in self.options.items() if axis in AXES})
        self._group = mesh.data.gathers or new_group("dp", [mesh.rank], mesh.device, everyone=mesh.world == 1)
        self.mode: str | None = None

    def initialize(self) -> None:
        """Build the engine with the weights of the model's folder; every rank reads only what it holds."""
        options = {key: value for key, value in self.options.items() if key not in AXES} | {"offload": self._offload()}
        self._bucket_bytes = options.pop("bucket_bytes", "256MB")
        opened = open_model(Model(path=self._model.local_path))
        if self._lora.rank is not None:
            opened = add_adapters(opened, self._lora, self._config.seed, self._saved)
        recompute(opened.module, "full" if self._model.enable_gradient_checkpointing else "none")
        config = self._optimizer
        if config is not None:
            rates = {"lr": config.lr, "betas": tuple(config.betas), "weight_decay": config.weight_decay}
            options |= {"optimizer": partial(torch.optim.AdamW, **rates), "clip_norm": config.clip_grad}
        precision = PRECISIONS[self._config.dtype]
        self.engine = Engine(opened.module, mesh=self._mesh, weights=opened.weights, precision=precision, **options)
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
        """Return this rank's place on dp: ranks of one place take the same batches."""
        return self._mesh.place.dp

    def get_data_parallel_size(self) -> int:
        """Return how many ranks have batches of their own."""
        return self._mesh.dp

    def get_data_parallel_group(self) -> Any:
        """Return the group of this rank and those that hold the same part of the model, each with other batches."""
        return self._group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether verl collects this rank's outputs: of tp's, which have the same ones, the first."""
        return self._mesh.place.tp == 0

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

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as its base does: verl's reference, where LoRA is trained."""
        return without_adapters(self.engine.module)

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

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool | None = None, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return names and whole tensors, for every rank, and PEFT's config; all ranks take them to the end together.

        base_sync_done  whether the rollout has the base, and gets the adapter alone; None: it will get no adapter
        layered_summon  says nothing here: units are gathered one by one in any case
        """
        merge = self._lora.rank is None or self._model.lora.get("merge", False)
        sent = "merged" if merge or base_sync_done is None else "alone" if base_sync_done else "none"
        weights = everywhere(self.engine, None, self._bucket_bytes, sent)
        if merge:
            return weights, None
        model: Any = self.engine.module
        config = model.peft_config["default"]
        if not base_sync_done:
            weights = ((replace_lora_wrapper(name, config), tensor) for name, tensor in weights)
        return weights, _told(config)

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


def _adapters_of(model: Any) -> tuple[Lora, SavedAdapter | None]:
    """Return the adapters that verl's config of a model asks for, and the saved one that they go on from.

    Raises ConfigError.
    """
    if model.lora_adapter_path is not None:
        saved = read_adapter(model.lora_adapter_path)
        if not model.lora_rank:
            raise ConfigError(
                f"{short(str(model.lora_adapter_path))} (lora_adapter_path) has an adapter, but lora_rank=0 tells "
                f"verl's rollouts that there is none: pass actor_rollout_ref.model.lora_rank={saved.choice.rank}."
            )
        return saved.choice, saved
    if not model.lora_rank:
        return Lora(), None
    targets, left_out = model.target_modules, model.exclude_modules
    if left_out or (isinstance(targets, str) and targets != ALL_LINEAR):
        asked = f"exclude_modules={left_out!r}" if left_out else f"target_modules={targets!r}"
        raise ConfigError(f"{asked}: name the modules that get an adapter, target_modules=[q_proj,v_proj].")
    named = [targets] if isinstance(targets, str) else targets
    return Lora(model.lora_rank, model.lora_alpha, (*named, *(model.target_parameters or ()))), None


def _told(config: Any) -> dict[str, Any]:
    """Return PEFT's config as rollouts read it: modules by their last names, and the task, which adapters here lack."""
    from peft import TaskType

    names = sorted({name.rpartition(".")[2] for name in config.target_modules})
    return {**config.to_dict(), "target_modules": names, "task_type": TaskType.CAUSAL_LM}


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
