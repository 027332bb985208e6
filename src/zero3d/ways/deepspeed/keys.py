"""Every key of DeepSpeed 0.19's JSON: what it becomes here, that it has no effect here, or why it is refused.

A key is written with dots; what begins with a key of OPAQUE has no levels of its own here.
Sources: runtime/config.py, constants.py, zero/config.py, zero/offload_config.py, precision_config.py of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from zero3d.ways.deepspeed.optimizer_kinds import EXTRA

ZERO, PARAM, OPTIMIZER = "zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer"

OF_MUON = ("momentum", "muon_lr", "adam_lr", "ns_method")
MAPPED: Mapping[str, str] = MappingProxyType(
    {
        "train_batch_size": "train.batch",
        "train_micro_batch_size_per_gpu": "train.micro_batch",
        "gradient_accumulation_steps": "train.accumulate",
        "gradient_clipping": "optimizer.clip_norm",
        "steps_per_print": "log.every",
        "bf16.enabled": "precision",
        "bfloat16.enabled": "precision",
        "fp16.enabled": "precision",
        "fp16.loss_scale": "loss_scale",
        "fp16.initial_scale_power": "loss_scale.initial",
        "fp16.loss_scale_window": "loss_scale.window",
        "fp16.hysteresis": "loss_scale.hysteresis",
        "fp16.min_loss_scale": "loss_scale.minimum",
        "communication_data_type": "zero.reduce_dtype",
        "optimizer.type": "optimizer.name",
        "optimizer.params.lr": "optimizer.lr",
        "optimizer.params.betas": "optimizer.betas",
        "optimizer.params.eps": "optimizer.eps",
        "optimizer.params.weight_decay": "optimizer.weight_decay",
        **{f"optimizer.params.{name}": "optimizer.muon" for name in ("momentum", "muon_lr")},
        "optimizer.params.adam_lr": "optimizer.lr",
        **{f"optimizer.params.{name}": "initialize()" for name in EXTRA if name not in OF_MUON},
        "scheduler.type": "schedule.name",
        "scheduler.params": "schedule.options",
        f"{ZERO}.stage": "zero.stage",
        f"{ZERO}.zero_hpz_partition_size": "zero.second_shard",
        f"{ZERO}.zero_quantized_weights": "zero.gather_wire",
        f"{ZERO}.zero_quantized_gradients": "zero.slow_wire",
        f"{ZERO}.cpu_offload": "offload.optimizer",
        f"{ZERO}.cpu_offload_params": "offload.params",
        f"{ZERO}.cpu_offload_param": "offload.params",
        f"{OPTIMIZER}.device": "offload.optimizer",
        f"{OPTIMIZER}.nvme_path": "offload.directory",
        f"{OPTIMIZER}.ratio": "offload.fraction",
        f"{PARAM}.device": "offload.params",
        f"{PARAM}.nvme_path": "offload.directory",
        "tensor_parallel.autotp_size": "mesh.tp",
        "sequence_parallel_size": "mesh.sp",
        f"{ZERO}.mics_shard_size": "mesh.shard",
        "tensorboard.enabled": "log.to",
        "wandb.enabled": "log.to",
        "wandb.project": "log.project",
        "compile.enabled": "train.compile",
        "seed": "seed",
    }
)

UNITS = "the engine gathers, reduces and frees each layer's parameters and schedules this itself"
PARTS = "gradients are always reduced into flat shards, one layer at a time"
WRITES = "offloading has its own threads and pinned buffers"
# Inner keys that say how DeepSpeed does what is done otherwise here, by what is said of them.
_PARTS = """
contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce round_robin_gradients
legacy_stage1
"""
_UNITS = """
allgather_partitions allgather_bucket_size overlap_comm prefetch_bucket_size stage3_prefetch_bucket_size
param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold
stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance
stage3_max_reuse_distance module_granularity_threshold stage3_module_granularity_threshold
use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
log_trace_cache_warnings override_module_apply leaf_module
"""
_WRITES = """
pin_memory buffer_count buffer_size pipeline pipeline_read pipeline_write fast_init super_offload cpuadam_cores_perc
max_in_cpu
"""

IGNORED = ("compile.disable", "comms_config")  # keys of files in use that DeepSpeed does not read
COMMENT = "_"  # with which keys begin that nobody reads
IGNORED_THERE = "DeepSpeed does not read it either"

IDLE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((f"{ZERO}.{key}" for key in _PARTS.split()), PARTS),
        **dict.fromkeys((f"{ZERO}.{key}" for key in _UNITS.split()), UNITS),
        **dict.fromkeys((f"{OPTIMIZER}.{key}" for key in _WRITES.split()), WRITES),
        **dict.fromkeys(
            (f"{PARAM}.{key}" for key in ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu")), WRITES
        ),
        "aio": WRITES,
        f"{ZERO}.cpu_offload_use_pin_memory": WRITES,
        f"{ZERO}.sub_group_size": WRITES,
        f"{ZERO}.load_from_fp32_weights": "every checkpoint contains the fp32 masters",
        f"{ZERO}.elastic_checkpoint": "every checkpoint resumes on any number of ranks",
        f"{ZERO}.pipeline_loading_checkpoint": "each rank reads only its own shard",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save": "checkpoint.export writes the full weights",
        f"{ZERO}.gather_16bit_weights_on_model_save": "checkpoint.export writes the full weights",
        f"{ZERO}.stage3_gather_fp16_weights_on_model_save": "checkpoint.export writes the full weights",
        f"{ZERO}.ignore_unused_parameters": "unused parameters get a gradient of zero",
        f"{ZERO}.compute_grad_norm": "the gradient norm is computed in every step",
        f"{ZERO}.parameter_alignment": "shards are aligned to 16 elements",
        f"{ZERO}.enable_sanity_checks": "checks are always on",
        f"{ZERO}.memory_efficient_linear": "frozen weights are sharded too, and freed after use",
        f"{ZERO}.save_muon_momentum_buffer_in_memory": "the momentum is kept with the other optimizer states",
        "activation_checkpointing": "it affects only models that call DeepSpeed's checkpointing; use activations=full",
        "zero_allow_untested_optimizer": "every element-wise optimizer is accepted",
        "zero_force_ds_cpu_optimizer": "the optimizer is always torch's",
        "optimizer.legacy_fusion": "the optimizer is always torch's",
        "optimizer.params.torch_adam": "Adam and AdamW are always torch's",
        "optimizer.params.fused": "AdamW is always torch's fused implementation",
        "optimizer.params.foreach": "AdamW is always torch's fused implementation",
        "optimizer.params.fp32_optimizer_states": "optimizer states are fp32",
        "optimizer.params.ns_method": "Newton-Schulz always runs on the matrix itself",
        "fp16.auto_cast": "floating-point inputs are always cast to the precision of the model",
        "bf16.immediate_grad_update": "gradients are reduced as soon as they are computed",
        "bf16.check_grad_overflow": "a step with NaN or infinite gradients is never applied",
        "bfloat16.immediate_grad_update": "gradients are reduced as soon as they are computed",
        "bfloat16.check_grad_overflow": "a step with NaN or infinite gradients is never applied",
        "check_grad_overflow": "a step with NaN or infinite gradients is never applied",
        "data_types.grad_accum_dtype": "gradients are accumulated in fp32",
        "seq_parallel_communication_data_type": "sequence parallelism communicates in the dtype of attention",
        "prescale_gradients": "gradients are summed in fp32 and divided once",
        "gradient_predivide_factor": "gradients are summed in fp32 and divided once",
        "disable_allgather": UNITS,
        "dump_state": "zero3d config show prints the configuration",
        "dataloader_drop_last": "every sequence of an epoch is used",
        "wall_clock_breakdown": "use profile.steps for a trace",
        "memory_breakdown": "the table at the end of a run shows every category",
        "comms_logger": "the table at the end of a run shows every collective",
        "flops_profiler": "the lines of a run show FLOP/s; use profile.steps for a trace",
        "timers": "use profile.steps for a trace",
        "monitor_config": "metrics.jsonl is always written",
        "csv_monitor": "metrics.jsonl is always written",
        "tensorboard.output_path": "event files are in OUTPUT/tensorboard",
        "tensorboard.job_name": "event files are in OUTPUT/tensorboard",
        "wandb.group": "set WANDB_RUN_GROUP",
        "wandb.team": "set WANDB_ENTITY",
        "checkpoint.tag_validation": "ranks agree on every checkpoint",
        "checkpoint.use_node_local_storage": "each rank writes its own files",
        "checkpoint.parallel_write": "each rank writes its own files",
        "vocabulary_size": "it is taken from the model",
        "log_level": "there is only one log level",
        "disable_python_gc": "zero3d train collects garbage between steps only",
        "tensor_parallel.vocab_parallel_lm_head": "the model's tensor-parallel plan decides this",
        "tensor_parallel.vocab_parallel_ce_backend": "the loss is torch's",
        "use_data_before_expert_parallelism": "expert parallelism always uses data-parallel ranks: mesh.ep",
        "tensor_parallel.tp": "the degree is set by autotp_size",
        "tensor_parallel.dtype": "the precision is set for the whole run",
        "tensor_parallel.tp_overlap_comm": UNITS,
        "compile.backend": "train.compile always uses inductor",
        **dict.fromkeys(IGNORED, IGNORED_THERE),
    }
)


class Refused(NamedTuple):
    """A key that cannot be had. neutral: values that ask for nothing; instead: what to use."""

    why: str
    instead: str
    neutral: tuple[Any, ...] = (False, None)


LATER = "not implemented"
REMOVED_7, REMOVED_8 = "DeepSpeed itself has removed it in 0.19.7", "DeepSpeed itself has removed it in 0.19.8"
REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        "amp": Refused(REMOVED_8, "bf16: {enabled: true}"),
        "torch_autocast": Refused("autocast computes parts of a model in fp32", "bf16: {enabled: true}"),
        "sparse_attention": Refused(REMOVED_7, "model.attn=sdpa or flash_attention_2"),
        "compression_training": Refused(REMOVED_7, "a model that has already been compressed"),
        "quantize_training": Refused(REMOVED_7, "bf16: {enabled: true}"),
        "progressive_layer_drop": Refused(REMOVED_8, "dropout in the model's config"),
        "hybrid_engine": Refused("every engine can generate", "engine.generate"),
        "autotuning": Refused("zero3d has a planner", "zero3d plan MODEL --gpus N"),
        "elasticity": Refused(REMOVED_8, "health.min_ranks with train --max-restarts"),
        "eigenvalue": Refused(REMOVED_8, "nothing instead"),
        "data_efficiency": Refused(LATER, "data.train with weights"),
        "curriculum_learning": Refused(REMOVED_8, "data.train with weights"),
        "expert_parallel": Refused("expert parallelism is set in the mesh", "mesh.ep=N beside the JSON"),
        "nebula": Refused(REMOVED_7, "checkpoint.asynchronous=true"),
        "comet": Refused(LATER, "wandb, tensorboard or metrics.jsonl"),
        "inference": Refused("zero3d only trains", "the exported folder"),
        "graph_harvesting": Refused(REMOVED_8, "train.compile=true"),
        "pipeline": Refused("the pipeline is made from the model's blocks", "mesh.pp"),
        "sparse_gradients": Refused(REMOVED_8, "false; gradients of embeddings are dense"),
        "gradient_allreduce_op": Refused("gradients are always averaged", "mean", ("mean", None)),
        "managed_gradient_accumulation": Refused(
            "the engine counts micro-batches", "engine.set_gradient_accumulation_boundary", (True, None)
        ),
        "compile.deepcompile": Refused(LATER, "compile: {enabled: true}"),
        "data_types.param_dtype": Refused("masters are fp32", "bf16 or fp16: {enabled: true}", ("fp32", None)),
        "data_types.keep_in_fp32_modules": Refused(
            "the model itself names the modules that stay in fp32", "auto", ("auto", None)
        ),
        "data_types.buffer_dtype": Refused("buffers keep their dtype", "null", (None,)),
        "checkpoint.load_universal": Refused(
            "DeepSpeed checkpoints must be converted first", "zero3d ckpt import SOURCE FOLDER, and false"
        ),
        "fp16.consecutive_hysteresis": Refused(LATER, "hysteresis"),
        "fp16.fp16_master_weights_and_grads": Refused(
            "masters are fp32", "zero.master=split, which saves 2 bytes per parameter"
        ),
        "bf16.bf16_master_weights_and_grads": Refused(
            "masters are fp32", "zero.master=split, which saves 2 bytes per parameter"
        ),
        "bf16.bf16_optimizer_states": Refused(
            "optimizer states are fp32", "offload.moments=bf16, with offloaded states"
        ),
        "bfloat16.bf16_master_weights_and_grads": Refused(
            "masters are fp32", "zero.master=split, which saves 2 bytes per parameter"
        ),
        "optimizer.params.per_head_muon": Refused(LATER, "false, and optimizer.split for fused matrices"),
        "optimizer.params.bias_correction": Refused("AdamW always corrects the bias", "true", (True, None)),
        "optimizer.params.adam_w_mode": Refused(
            "weight decay is decoupled, as in AdamW", "true, or initialize() in a program", (True, None)
        ),
        "optimizer.params.amsgrad": Refused(LATER, "false"),
        "optimizer.params.max_grad_norm": Refused("DeepSpeed refuses it too", "gradient_clipping", (None, 0, 0.0)),
        f"{ZERO}.zero_quantized_nontrainable_weights": Refused(LATER, "false"),
        f"{ZERO}.zeropp_loco_param": Refused(REMOVED_8, "null", (None,)),
        f"{ZERO}.mics_hierarchical_params_gather": Refused(REMOVED_7, "mics_shard_size alone"),
        f"{ZERO}.zenflow": Refused(LATER, "offload_optimizer", (None,)),
    }
)
OPAQUE = frozenset(  # sections whose inner keys are looked at by nobody: without effect, or refused as they are
    {key for key in REFUSED if "." not in key}
    | {
        "aio",
        "activation_checkpointing",
        "comms_logger",
        "comms_config",
        "flops_profiler",
        "timers",
        "monitor_config",
        "csv_monitor",
        f"{ZERO}.leaf_module",
        "scheduler.params",
        "checkpoint.parallel_write",
        "tensor_parallel.tp",
    }
)
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(  # in any case, also of keys without an effect
    {"checkpoint.tag_validation": ("Ignore", "Warn", "Fail")}
)
DOTTED = frozenset({*MAPPED, *IDLE, *REFUSED})
SECTIONS = frozenset(
    ".".join(parts[:depth]) for parts in (key.split(".") for key in DOTTED) for depth in range(1, len(parts))
)
