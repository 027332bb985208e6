"""The names of DeepSpeed 0.19.8 that are refused, and what to use instead; docs/deepspeed-reference.md lists all names.

    read of a module's name       something that raises ConfigError when it is called or subclassed, with the line
    read of the engine's name     AttributeError, with the line
    read or import of a module    AttributeError or MissingModule (imports.py), with the line

A name of the engine that is neither built nor refused is the module's, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from zero3d.errors import ConfigError

OURS = "zero3d.ways.deepspeed"
ALIASES: Mapping[str, str] = MappingProxyType(  # modules
    {"comm": "torch.distributed", "ops.adam": f"{OURS}.adam", "runtime.utils": f"{OURS}.memory_usage"}
)
_NAMES = {  # what to use: the names; NAME.* is a module of DeepSpeed's with all that is in it
    "use engine.generate, or engine.export and an inference server": (
        "init_inference default_inference_config InferenceEngine inference.*"
    ),
    "write tensor_parallel: {autotp_size: N} in the JSON": "tp_model_init set_autotp_mode module_inject.*",
    "use zero3d.Engine(mesh=zero3d.Mesh(pp=N)), which cuts a plain model": "PipelineModule pipe.* runtime.pipe.*",
    "use torch.device('meta') and zero3d.Engine(weights=...), or build the model on the CPU": "OnDevice utils.OnDevice",
    "use engine.generate, which trains and generates with one engine": "DeepSpeedHybridEngine",
    "use the model's own layers, with model.attn=sdpa": "DeepSpeedTransformerLayer",
    "use torch.optim, or name the optimizer in the JSON": (
        "ops.lion.* ops.lamb.* ops.adagrad.* ops.muon.* ops.op_builder.*"
    ),
    "use model.attn=sdpa, and torch's own operations": "ops.transformer.* ops.sparse_attention.* ops.fp_quantizer.*",
    "use offload in the JSON, whose files the engine reads and writes": "ops.aio.* ops.gds.*",
    "use a Hugging Face model with experts and zero3d.Engine(mesh=zero3d.Mesh(ep=N))": "moe.*",
    "use zero3d.activations.recompute(model) before initialize()": "checkpointing.* runtime.activation_checkpointing.*",
    "write sequence_parallel_size: N in the JSON": "sequence.* engine.get_sequence_parallel_group",
    "use zero3d ckpt import, which reads DeepSpeed's checkpoints": "checkpoint.*",
    "use torchrun, or zero3d launch": "launcher.*",
    "use zero3d train with profile.steps, which makes a trace": (
        "profiling.* engine.get_wall_clock_timers engine.get_compile_time"
    ),
    "use zero3d train with log.to=tensorboard": "monitor.*",
    "use stage 0 or 1, which reduce once in a step, and no_sync()": "engine.coalesce_grad_reduction",
    "leave it out: the last backward of a step reduces": (
        "engine.allreduce_gradients engine.buffered_allreduce_fallback"
    ),
    "write gradient_clipping in the JSON; step() clips": "engine.clip_fp32_gradients",
    "call train_batch_size(), train_micro_batch_size_per_gpu(), gradient_accumulation_steps()": "engine.get_batch_info",
    "call optimizer_name()": "engine.get_type",
    "write zero_optimization.offload_optimizer in the JSON": "engine.offload_states engine.reload_states",
    "use zero3d ckpt import, which reads DeepSpeed's checkpoints of experts": "engine.load_moe_state_dict",
    "use set_batch_fn()": "engine.set_data_post_process_func",
    "choose the data in your own data loader": (
        "engine.set_custom_curriculum_learning_schedule engine.data_efficiency_enabled runtime.data_pipeline.*"
    ),
    "write compile: {enabled: true} in the JSON": "engine.register_compile_pass",
    "write compile: {enabled: true} in the JSON, and read is_compiled": "engine.is_deepcompile_enabled",
    "leave it out: every layer has every token": "engine.random_ltd_enabled",
    "use zero3d.Engine(mesh=zero3d.Mesh(pp=N)): a JSON has no pipeline here": "engine.get_pipeline_parallel_rank",
    "use safe_get_full_fp32_param: shards do not follow parameters": "utils.safe_get_local_fp32_param",
    "use safe_set_full_fp32_param: shards do not follow parameters": "utils.safe_set_local_fp32_param",
    "use safe_get_full_grad: shards do not follow parameters": "utils.safe_get_local_grad",
    "use safe_set_full_grad: shards do not follow parameters": "utils.safe_set_local_grad",
    "use safe_get_full_optimizer_state: shards do not follow parameters": "utils.safe_get_local_optimizer_state",
    "use safe_set_full_optimizer_state: shards do not follow parameters": "utils.safe_set_local_optimizer_state",
    "leave it out; zero3d.Engine(units=...) sets what is gathered together": (
        "utils.set_z3_leaf_modules utils.unset_z3_leaf_modules utils.get_z3_leaf_modules"
    ),
    "use torch.cuda.nvtx.range": "utils.instrument_w_nvtx",
    "use zero3d.Mesh, whose axes have the process groups": "utils.groups.*",
    "use zero3d ckpt export, which writes a folder for from_pretrained": "utils.zero_to_fp32.*",
    "leave it out: shared parameters are detected": (
        "zero.register_external_parameter zero.unregister_external_parameter"
    ),
    "use engine.generate, or engine.engine.full_params()": "zero.unwrap_model_for_generation",
    "use zero3d.Engine(gather_budget='64MB'), which gathers larger layers in tiles": "zero.TiledLinear",
    "write scheduler in the JSON, or pass lr_scheduler=SCHEDULER to initialize()": "runtime.lr_schedules.*",
    "use deepspeed.zero.GatheredParameters: parameters have no ds_id and no ds_status here": "runtime.zero.*",
    "use deepspeed.DeepSpeedEngine": "runtime.engine.*",
    "use deepspeed.DeepSpeedConfigError, and the JSON": "runtime.config.*",
    "write fp16 in the JSON": "runtime.fp16.*",
    "write bf16 in the JSON": "runtime.bf16_optimizer.*",
    "use torch's own": "runtime.utils.clip_grad_norm_ runtime.utils.get_global_norm runtime.utils.partition_balanced",
    "use engine.deepspeed_io, and utils.RepeatingLoader": "runtime.dataloader.*",
}
INSTEAD: Mapping[str, str] = MappingProxyType({name: line for line, names in _NAMES.items() for name in names.split()})


def module_line(name: str) -> str | None:
    """Return what to use for a module such as ops.adam, by its first two names; None for one that is nobody's."""
    first, *rest = name.split(".")
    return (INSTEAD.get(f"{first}.{rest[0]}.*") if rest else None) or INSTEAD.get(f"{first}.*")


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


def refusing(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module: it returns what stands for a refused name, and raises when that is used.

    It raises AttributeError for a module of DeepSpeed's, and for a name that is unknown.
    """
    prefix = "" if module == "deepspeed" else f"{module}."

    def get(name: str) -> Any:
        if (line := INSTEAD.get(f"{prefix}{name}.*")) is not None:
            raise AttributeError(f"there is no deepspeed.{name} here: {line}.")
        if (line := INSTEAD.get(f"{prefix}{name}")) is not None:
            return Refused(name, module, line)
        raise AttributeError(f"module 'zero3d.ways.{module}' has no attribute {name!r}")

    return get
