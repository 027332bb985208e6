"""Tables of the names of DeepSpeed 0.19.8 that programs call: built here, an alias of something else, or refused.

    fate      of a name that is read or called here
    built     it does what the line says
    alias     it is another thing of this name
    refused   ConfigError when it is called, subclassed or imported, AttributeError when it is read, with the line as
              what to use

A name of the engine that is in none of these tables is the module's, as there. Source: deepspeed/__init__.py,
runtime/engine.py, runtime/pipe/engine.py, runtime/zero/__init__.py, utils/__init__.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from zero3d.errors import ConfigError

BUILT, ALIAS, REFUSED = "built", "alias", "refused"


class Name(NamedTuple):
    """Says how a name is treated here. parts: it is a module of DeepSpeed's, and each name in it is refused, too."""

    fate: str
    line: str
    parts: bool = False


def _table(
    built: Mapping[str, str], alias: Mapping[str, str], refused: Mapping[str, str], parts: Mapping[str, str]
) -> Mapping[str, Name]:
    rows = {name: Name(BUILT, line) for name, line in built.items()}
    rows |= {name: Name(ALIAS, line) for name, line in alias.items()}
    rows |= {name: Name(REFUSED, line) for name, line in refused.items()}
    return MappingProxyType(rows | {name: Name(REFUSED, line, parts=True) for name, line in parts.items()})


PACKAGE = _table(
    {
        "initialize": "builds an engine; returns (engine, optimizer, loader, scheduler)",
        "init_distributed": "starts torch.distributed from the launcher's environment, or for a single process",
        "add_config_arguments": "adds --deepspeed and --deepspeed_config to an argument parser",
        "DeepSpeedEngine": "the class of the engine",
        "utils": "the functions below",
        "zero": "the functions below",
        "runtime": "an empty package; the modules below are refused",
    },
    {
        "comm": "torch.distributed",
        "DeepSpeedConfigError": "zero3d.errors.ConfigError",
        "__version__": "0.19.8, the version whose interface this is",
    },
    {
        "init_inference": "use engine.generate, or engine.export and an inference server",
        "default_inference_config": "use engine.generate, or engine.export and an inference server",
        "tp_model_init": "write tensor_parallel: {autotp_size: N} in the JSON",
        "set_autotp_mode": "write tensor_parallel: {autotp_size: N} in the JSON",
        "PipelineModule": "use zero3d.Engine(mesh=zero3d.Mesh(pp=N)), which cuts a plain model",
        "OnDevice": "use torch.device('meta') and zero3d.Engine(weights=...), or build the model on the CPU",
        "get_accelerator": "use torch.accelerator",
        "InferenceEngine": "use engine.generate, or engine.export and an inference server",
        "DeepSpeedHybridEngine": "use engine.generate, which trains and generates with one engine",
        "DeepSpeedTransformerLayer": "use the model's own layers, with model.attn=sdpa",
        "log_dist": "use logging on the rank with torch.distributed.get_rank() == 0",
    },
    {
        "ops": "use torch.optim.AdamW(params, fused=True), or name the optimizer in the JSON",
        "moe": "use a Hugging Face model with experts and zero3d.Engine(mesh=zero3d.Mesh(ep=N))",
        "pipe": "use zero3d.Engine(mesh=zero3d.Mesh(pp=N)), which cuts a plain model",
        "checkpointing": "use zero3d.activations.recompute(model) before initialize()",
        "accelerator": "use torch.accelerator",
        "module_inject": "write tensor_parallel: {autotp_size: N} in the JSON",
        "sequence": "write sequence_parallel_size: N in the JSON",
        "checkpoint": "use zero3d ckpt import, which reads DeepSpeed's checkpoints",
        "inference": "use engine.generate, or engine.export and an inference server",
        "launcher": "use torchrun, or zero3d launch",
        "profiling": "use zero3d train with profile.steps, which makes a trace",
        "monitor": "use zero3d train with log.to=tensorboard",
    },
)

RUNTIME = _table(
    {},
    {},
    {},
    {
        "lr_schedules": "write scheduler in the JSON, or pass lr_scheduler=SCHEDULER to initialize()",
        "zero": "use deepspeed.zero.GatheredParameters: parameters have no ds_id and no ds_status here",
        "engine": "use deepspeed.DeepSpeedEngine",
        "config": "use deepspeed.DeepSpeedConfigError, and the JSON",
        "pipe": "use zero3d.Engine(mesh=zero3d.Mesh(pp=N)), which cuts a plain model",
        "activation_checkpointing": "use zero3d.activations.recompute(model) before initialize()",
        "fp16": "write fp16 in the JSON",
        "bf16_optimizer": "write bf16 in the JSON",
        "utils": "use torch.cuda.memory_stats, and gradient_clipping in the JSON",
        "dataloader": "use engine.deepspeed_io, and utils.RepeatingLoader",
        "data_pipeline": "choose the data in your own data loader",
    },
)

ENGINE = _table(
    {
        "forward": "calls the module, as engine(...) does",
        "backward": "runs backward on loss / accumulation steps, or on the loss itself with scale_wrt_gas=False",
        "step": "at the last micro-batch of a step: clips, updates, and advances the scheduler",
        "zero_grad": "discards the accumulated gradients at every stage (in DeepSpeed only at stages 0 and 1)",
        "no_sync": "inside, backward completes no step; refused at stages 2 and 3, when nested, and around step()",
        "is_gradient_accumulation_boundary": "whether this is the last micro-batch of a step",
        "set_gradient_accumulation_boundary": "sets this by hand instead of counting micro-batches",
        "was_step_applied": "whether the latest step() changed parameters",
        "train": "sets the module's mode, and returns the engine",
        "eval": "sets the module's mode, and returns the engine",
        "train_batch": "runs a step on micro-batches from an iterator; returns the mean loss of all ranks",
        "eval_batch": "returns the mean loss of all ranks on micro-batches from an iterator",
        "set_dataiterator": "sets the iterator of train_batch()",
        "set_dataloader": "sets the loader of train_batch()",
        "set_batch_fn": "sets a function that is applied to every micro-batch of train_batch() and eval_batch()",
        "is_first_stage": "always True: a JSON cannot set up a pipeline here",
        "is_last_stage": "always True: a JSON cannot set up a pipeline here",
        "deepspeed_io": "returns a loader for this rank's micro-batches of a dataset",
        "module_state_dict": "returns the full weights on rank 0 and {} on the others, at every stage",
        "load_module_state_dict": "loads full weights, which must be the same on all ranks",
        "save_checkpoint": "writes a zero3d checkpoint with client_state, tensors included, and the file latest",
        "load_checkpoint": "resumes from it; load_optimizer_states=False, load_lr_scheduler_states=False and "
        "load_module_only=True load parts of it",
        "save_16bit_model": "writes a Hugging Face folder, or a single safetensors file with save_filename",
        "compile": "nothing to do if the JSON has compile: {enabled: true}; otherwise refused",
        "is_compiled": "whether the JSON turned compilation on",
        "destroy": "closes the engine; the module is whole and trainable again",
        "empty_partition_cache": "frees gathered parameters and the allocator's unused memory",
        "get_lr": "returns the learning rate of each parameter group",
        "get_mom": "returns, for each parameter group, the momentum (SGD, RMSprop) or the betas (others)",
        "set_lr": "sets the learning rate of all parameter groups",
        "get_global_grad_norm": "returns the gradient norm of the last step before clipping",
        "get_data_types": "returns the dtypes of the model and of accumulated gradients",
        "train_batch_size": "returns the samples per step over all ranks",
        "train_micro_batch_size_per_gpu": "returns the samples per forward",
        "gradient_accumulation_steps": "returns the micro-batches per step and rank",
        "set_train_batch_size": "changes the batch size, by the number of micro-batches",
        "set_train_micro_batch_size": "changes the samples per forward",
        "zero_optimization": "whether the stage is above 0",
        "zero_optimization_stage": "the stage",
        "zero_optimization_partition_gradients": "whether the stage is 2 or 3",
        "zero_optimization_partition_weights": "whether the stage is 3",
        "gradient_clipping": "the maximum gradient norm; 0 turns clipping off",
        "fp16_enabled": "whether the model computes in fp16",
        "bfloat16_enabled": "whether the model computes in bf16",
        "loss_scale": "the value in the JSON; 0 means dynamic",
        "dynamic_loss_scale": "whether the loss scale is dynamic",
        "cur_scale": "the loss scale in use",
        "optimizer_name": "the name of the optimizer's class",
        "optimizer_params": "the value in the JSON",
        "scheduler_name": "the value in the JSON",
        "scheduler_params": "the value in the JSON",
        "steps_per_print": "the value in the JSON",
        "get_data_parallel_rank": "this rank's index among data-parallel ranks",
        "get_tensor_parallel_rank": "this rank's index among tensor-parallel ranks",
        "global_steps": "steps so far, including skipped ones",
        "global_samples": "samples in these steps",
        "micro_steps": "calls of step()",
        "skipped_steps": "steps that were not applied",
        "device": "the device of the model",
        "local_rank": "the launcher's local rank",
        "global_rank": "of torch.distributed",
        "world_size": "of torch.distributed",
        "dp_world_size": "the number of data-parallel ranks",
        "mp_world_size": "the number of tensor-parallel ranks",
        "module": "the model",
        "optimizer": "the torch optimizer over this rank's shards of the masters",
        "lr_scheduler": "the scheduler that advances after every applied step",
        "training_dataloader": "the loader made from initialize(training_data=...)",
        "config": "the configuration passed to initialize()",
    },
    {"save_fp16_model": "save_16bit_model", "get_model_parallel_rank": "get_tensor_parallel_rank"},
    {
        "scale": "use engine.backward(loss), which scales it",
        "coalesce_grad_reduction": "use stage 0 or 1, which reduce once in a step, and no_sync()",
        "allreduce_gradients": "leave it out: the last backward of a step reduces",
        "buffered_allreduce_fallback": "leave it out: the last backward of a step reduces",
        "clip_fp32_gradients": "write gradient_clipping in the JSON; step() clips",
        "get_batch_info": "call train_batch_size(), train_micro_batch_size_per_gpu(), gradient_accumulation_steps()",
        "get_wall_clock_timers": "use zero3d train with profile.steps, which makes a trace",
        "get_type": "call optimizer_name()",
        "offload_states": "write zero_optimization.offload_optimizer in the JSON",
        "reload_states": "write zero_optimization.offload_optimizer in the JSON",
        "get_sequence_parallel_group": "write sequence_parallel_size: N in the JSON",
        "load_moe_state_dict": "use zero3d ckpt import, which reads DeepSpeed's checkpoints of experts",
        "set_data_post_process_func": "use set_batch_fn()",
        "set_custom_curriculum_learning_schedule": "choose the data in your own data loader",
        "register_compile_pass": "write compile: {enabled: true} in the JSON",
        "is_deepcompile_enabled": "write compile: {enabled: true} in the JSON, and read is_compiled",
        "get_compile_time": "use zero3d train with profile.steps, which makes a trace",
        "data_efficiency_enabled": "choose the data in your own data loader",
        "random_ltd_enabled": "leave it out: every layer has every token",
        "get_pipeline_parallel_rank": "use zero3d.Engine(mesh=zero3d.Mesh(pp=N)): a JSON has no pipeline here",
    },
    {},
)

UTILS = _table(
    {
        "safe_get_full_fp32_param": "returns the full fp32 master of a parameter",
        "safe_set_full_fp32_param": "overwrites it, together with the weight",
        "safe_get_full_optimizer_state": "returns a full optimizer state, such as exp_avg",
        "safe_set_full_optimizer_state": "overwrites it",
        "safe_get_full_grad": "returns the full gradient before step(), averaged over ranks",
        "safe_set_full_grad": "overwrites it",
        "safe_update_full_grad_vectorized": "overwrites the gradients of listed parameters by a function",
        "RepeatingLoader": "restarts a loader when it is exhausted",
    },
    {},
    {
        "safe_get_local_fp32_param": "use safe_get_full_fp32_param: shards do not follow parameters",
        "safe_set_local_fp32_param": "use safe_set_full_fp32_param: shards do not follow parameters",
        "safe_get_local_grad": "use safe_get_full_grad: shards do not follow parameters",
        "safe_set_local_grad": "use safe_set_full_grad: shards do not follow parameters",
        "safe_get_local_optimizer_state": "use safe_get_full_optimizer_state: shards do not follow parameters",
        "safe_set_local_optimizer_state": "use safe_set_full_optimizer_state: shards do not follow parameters",
        "set_z3_leaf_modules": "leave it out; zero3d.Engine(units=...) sets what is gathered together",
        "unset_z3_leaf_modules": "leave it out; zero3d.Engine(units=...) sets what is gathered together",
        "get_z3_leaf_modules": "leave it out; zero3d.Engine(units=...) sets what is gathered together",
        "log_dist": "use logging on the rank with torch.distributed.get_rank() == 0",
        "logger": "use logging.getLogger('zero3d')",
        "OnDevice": "use torch.device('meta') and zero3d.Engine(weights=...), or build the model on the CPU",
        "instrument_w_nvtx": "use torch.cuda.nvtx.range",
    },
    {
        "groups": "use zero3d.Mesh, whose axes have the process groups",
        "zero_to_fp32": "use zero3d ckpt export, which writes a folder for from_pretrained",
    },
)

ZERO = _table(
    {"GatheredParameters": "gathers parameters; what you write into them inside is kept"},
    {},
    {
        "Init": "build the model on the CPU of every rank, or use zero3d.models.open.open_model and "
        "zero3d.Engine(weights=...), with which each rank reads only its own shard",
        "register_external_parameter": "leave it out: shared parameters are detected",
        "unregister_external_parameter": "leave it out: shared parameters are detected",
        "unwrap_model_for_generation": "use engine.generate, or engine.engine.full_params()",
        "TiledLinear": "use zero3d.Engine(gather_budget='64MB'), which gathers larger layers in tiles",
    },
    {},
)

TABLES: Mapping[str, Mapping[str, Name]] = MappingProxyType(
    {
        "deepspeed": PACKAGE,
        "engine": ENGINE,
        "deepspeed.utils": UTILS,
        "deepspeed.zero": ZERO,
        "deepspeed.runtime": RUNTIME,
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"comm": "torch.distributed"})  # modules


def instead_of(table: Mapping[str, Name], name: str) -> str | None:
    """Return what to use for a name that is refused, else None."""
    row = table.get(name)
    return row.line if row is not None and row.fate == REFUSED else None


def module_line(name: str) -> str | None:
    """Return what to use for a module such as ops.adam, by its first two names; None for one that is nobody's."""
    first, _, rest = name.partition(".")
    second = TABLES.get(f"deepspeed.{first}", {}).get(rest.partition(".")[0])
    row = second or PACKAGE.get(first)
    return row.line if row is not None and row.parts else None


class Refused:
    """Stands for a class, a function or an object of DeepSpeed's that is not here. Nothing is an instance of it."""

    _why = ""  # of one that is copied, before it has its own

    def __init__(self, name: str, module: str, line: str) -> None:
        self.__name__, self._why = name, f"{name} of {module} is not supported: {line}."

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(self._why)

    def __mro_entries__(self, bases: tuple[object, ...]) -> NoReturn:
        raise ConfigError(self._why)

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._why)


def refused(module: str, table: Mapping[str, Name], name: str) -> Any:
    """Return what stands in a module for a name that is refused: it raises ConfigError when it is called or subclassed.

    Raises AttributeError for a module of DeepSpeed's, and for a name that is unknown.
    """
    line = instead_of(table, name)
    if line is None:
        raise AttributeError(f"module 'zero3d.integrations.{module}' has no attribute {name!r}")
    if table[name].parts:
        raise AttributeError(f"there is no deepspeed.{name} here: {line}.")
    return Refused(name, module, line)


def as_markdown() -> str:
    """Return the tables of docs/deepspeed-reference.md: every name and what becomes of it."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, table in TABLES.items():
        yield from (f"### {title}", "", "| name | here | what it does, or what to use |", "|---|---|---|")
        yield from (f"| `{name}` | {row.fate} | {row.line} |" for name, row in table.items())
        yield ""
