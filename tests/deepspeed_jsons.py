"""JSONs for DeepSpeed as projects give them (their key sets, written anew), with what each must become here.

ACCEPTED  name: JSON, what the caller says, some keys of the configuration that it makes
REFUSED   name: JSON, what the caller says, what the one line says
"""

AUTOS = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
FP16 = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1}  # fmt: skip
MIXED = {"fp16": FP16, "bf16": {"enabled": "auto"}}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", **WARMUP["params"]}}
CPU, NVME, NONE = (
    {"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True},
    {"device": "none", "pin_memory": True},
)  # fmt: skip
TWO = {
    "stage": 2,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
}
HF_TWO = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
          "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True}  # fmt: skip
THREE = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
         "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
         "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
         "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
HF = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
      "train_micro_batch_size_per_gpu": "auto"}  # fmt: skip
PRINTS = {"steps_per_print": 2000, "wall_clock_breakdown": False}
LLAVA = AUTOS | MIXED
FACTORY = HF | {"zero_allow_untested_optimizer": True} | MIXED
AXOLOTL = HF | PRINTS | {"fp16": FP16 | {"auto_cast": False}, "bf16": {"enabled": "auto"}}
BF16 = ["precision=bf16", "train.micro_batch=2"]
FULL = [*BF16, "optimizer.lr=2e-5", "optimizer.betas=[0.9,0.999]", "optimizer.eps=1e-8", "optimizer.weight_decay=0.01",
        "optimizer.clip_norm=0.5", "schedule.warmup=10"]  # fmt: skip
TAKEN = {"optimizer.lr": 2e-5, "optimizer.betas": (0.9, 0.999), "optimizer.weight_decay": 0.01}
MEGATRON = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10, "gradient_clipping": 1.0,
            "prescale_gradients": True, "wall_clock_breakdown": False}  # fmt: skip
CHAT = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
        "prescale_gradients": False, "wall_clock_breakdown": False}  # fmt: skip
TUTORIAL = {"train_batch_size": 16, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
            "wall_clock_breakdown": False}  # fmt: skip


def zero(section, **more):
    return {"zero_optimization": section | more}


ACCEPTED = {
    "llava zero2": (LLAVA | zero(TWO), BF16, {"zero.stage": 2, "precision": "bf16", "train.micro_batch": 2}),
    "llava zero3": (LLAVA | zero(THREE), BF16, {"zero.stage": 3, "optimizer.clip_norm": 1.0}),
    "llava zero3 offload": (
        LLAVA | {"gradient_clipping": "auto"} | PRINTS | zero(THREE, offload_optimizer=CPU | {"buffer_count": 4, "fast_init": False}, offload_param=CPU),
        BF16, {"offload.optimizer": "host", "offload.params": "host", "log.every": 2000},
    ),
    "llava zero2, fp16": (LLAVA | zero(TWO), ["precision=fp16"], {"precision": "fp16", "loss_scale.initial": 65536.0}),
    "hf zero1": (HF | MIXED | zero({"stage": 1}), FULL, {"zero.stage": 1, "optimizer.clip_norm": 0.5}),
    "hf zero2": (HF | MIXED | PRINTS | {"optimizer": ADAMW, "scheduler": WARMUP} | zero(HF_TWO, offload_optimizer=CPU), FULL,
                 TAKEN | {"schedule.name": "WarmupLR", "offload.optimizer": "host"}),
    "hf zero3": (HF | MIXED | PRINTS | {"optimizer": ADAMW, "scheduler": DECAY} | zero(THREE, offload_optimizer=CPU, offload_param=CPU),
                 FULL, TAKEN | {"schedule.name": "WarmupDecayLR", "zero.stage": 3}),
    "hf zero3 nvme": (
        HF | MIXED | zero(THREE, offload_optimizer=NVME | {"buffer_count": 4, "fast_init": False},
                          offload_param=NVME | {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9})
        | {"aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}},
        FULL, {"offload.optimizer": "disk", "offload.params": "disk", "offload.directory": "/local_nvme"},
    ),
    "hf zero3, no offload": (HF | MIXED | zero(THREE, offload_optimizer=NONE, offload_param=NONE), FULL,
                             {"offload.optimizer": "none", "offload.params": "none"}),
    "hf fp32": (HF | {"fp16": {"enabled": False}} | zero(HF_TWO), ["train.micro_batch=1"], {"precision": "fp32"}),
    "hf amp off": (HF | {"amp": {"enabled": False, "opt_level": "O1"}} | zero({"stage": 2}), [], {"precision": "fp32"}),
    "hf bf16 on": (HF | {"bf16": {"enabled": True}} | zero({"stage": 2}), [], {"precision": "bf16"}),
    "hf fp16 on": (HF | {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}} | zero({"stage": 2}), [],
                   {"precision": "fp16", "loss_scale.initial": 4096.0, "loss_scale.hysteresis": 1}),
    "hf fixed loss scale": ({"fp16": {"enabled": True, "loss_scale": 128}}, [],
                            {"loss_scale.initial": 128.0, "loss_scale.minimum": 128.0, "loss_scale.window": 2**53}),
    "hf cosine": (HF | {"optimizer": ADAMW, "scheduler": {"type": "WarmupCosineLR", "params": {
        "total_num_steps": "auto", "warmup_num_steps": 5, "cos_min_ratio": 0.1}}}, FULL,
        {"schedule.options": {"total_num_steps": None, "warmup_num_steps": 5.0, "cos_min_ratio": 0.1}}),
    "hf communication": (HF | {"communication_data_type": "bfp16", "bf16": {"enabled": True}}, [], {"zero.reduce_dtype": "bf16"}),
    "hf accumulation dtype": (HF | {"data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": True}}, [], {"precision": "bf16"}),
    "hf tensor parallel": (HF | {"tensor_parallel": {"autotp_size": 2}, "bf16": {"enabled": True}} | zero({"stage": 1, "gather_16bit_weights_on_model_save": True}),
                           [], {"mesh.tp": 2, "zero.stage": 1}),
    "hf leaf modules": (HF | zero({"stage": 3, "leaf_module": {"classes": ["Qwen3MoeSparseMoeBlock"]}}), [], {"zero.stage": 3}),
    "factory z0": (FACTORY | zero({"stage": 0, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": True,
                                   "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
                                   "round_robin_gradients": True}), BF16, {"zero.stage": 0}),
    "factory z2": (FACTORY | zero(HF_TWO, round_robin_gradients=True), BF16, {"zero.stage": 2, "precision": "bf16"}),
    "factory z2 offload": (FACTORY | zero(HF_TWO, offload_optimizer=CPU, round_robin_gradients=True), BF16, {"offload.optimizer": "host"}),
    "factory z3": (FACTORY | zero(THREE), BF16, {"zero.stage": 3}),
    "factory z3 offload": (FACTORY | zero(THREE, offload_optimizer=CPU, offload_param=CPU), BF16, {"offload.params": "host"}),
    "factory fp8 off": (FACTORY | zero(THREE) | {"torch_autocast": {"enabled": False}}, BF16, {"zero.stage": 3}),
    "axolotl zero1": (AXOLOTL | zero({"stage": 1, "overlap_comm": True}), BF16, {"zero.stage": 1}),
    "axolotl zero1 compile": (AXOLOTL | {"compile": {"enabled": True, "backend": "inductor"}} | zero({"stage": 1, "overlap_comm": True}),
                              BF16, {"train.compile": True}),
    "axolotl zero2": (AXOLOTL | zero({"stage": 2, "contiguous_gradients": True, "overlap_comm": True}), BF16, {"zero.stage": 2}),
    "axolotl zero2 compile": (AXOLOTL | {"compile": {"enabled": True}} | zero({"stage": 2}), BF16, {"train.compile": True}),
    "axolotl zero3": (AXOLOTL | zero(THREE | {"sub_group_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}), BF16, {"zero.stage": 3}),
    "axolotl zero3 bf16": (HF | PRINTS | {"bf16": {"enabled": True}} | zero(THREE), ["train.micro_batch=2"], {"precision": "bf16"}),
    "axolotl zero3 offload all": (HF | PRINTS | {"bf16": {"enabled": True}} | zero(THREE, offload_optimizer=CPU, offload_param=CPU), [],
                                  {"offload.optimizer": "host", "offload.params": "host"}),
    "axolotl zero3 offload params": (HF | PRINTS | {"bf16": {"enabled": True}} | zero(THREE, offload_param=CPU, offload_optimizer=CPU), [],
                                     {"offload.params": "host"}),
    "accelerate zero1": (HF | {"bf16": {"enabled": "auto"}, "steps_per_print": float("inf")} | zero({"stage": 1}), BF16, {"zero.stage": 1, "log.every": None}),
    "accelerate zero2": (HF | {"fp16": {"enabled": True, "loss_scale": 0}, "optimizer": ADAMW, "scheduler": DECAY} | zero(HF_TWO), [*FULL[2:], "precision=fp16"],
                         TAKEN | {"precision": "fp16"}),
    "accelerate zero3": (HF | {"bf16": {"enabled": True}, "optimizer": ADAMW, "scheduler": DECAY} | zero(THREE, offload_optimizer=NONE), FULL, TAKEN),
    "accelerate zero3 cpu": (HF | {"bf16": {"enabled": True}} | zero(THREE, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}), [],
                             {"offload.optimizer": "host"}),
    "accelerate plugin": ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
                           "gradient_clipping": 1.0, "steps_per_print": float("inf"), "fp16": {"enabled": False}, "bf16": {"enabled": True},
                           "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "nvme_path": None},
                                                 "offload_param": {"device": "none", "nvme_path": None},
                                                 "stage3_gather_16bit_weights_on_model_save": False}}, [],
                          {"train.micro_batch": 4, "train.accumulate": 2, "offload.optimizer": "none"}),
    "open-r1 zero2": (HF | {"bf16": {"enabled": True}} | zero({"stage": 2, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}), [],
                      {"zero.stage": 2}),
    "open-r1 zero3": (HF | {"bf16": {"enabled": True}} | zero({"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"},
                                                           "stage3_gather_16bit_weights_on_model_save": True}), [], {"zero.stage": 3}),
    "megatron zero0": (MEGATRON | {"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
                                            "initial_scale_power": 11}} | zero({"stage": 0}), [], {"zero.stage": 0, "loss_scale.window": 500}),
    "megatron zero1": (MEGATRON | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} | zero({"stage": 1}), [],
                       {"train.batch": 8, "train.micro_batch": 2, "zero.stage": 1}),
    "megatron zero2": (MEGATRON | {"fp16": {"enabled": True}, "zero_allow_untested_optimizer": True} | zero({"stage": 2, "contiguous_gradients": True}), [],
                       {"zero.stage": 2}),
    "megatron zero3": (MEGATRON | {"bf16": {"enabled": True}} | zero({"stage": 3, "stage3_max_live_parameters": 3e9, "stage3_max_reuse_distance": 3e9,
                                                                  "stage3_param_persistence_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7,
                                                                  "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 9e7,
                                                                  "sub_group_size": 1e9, "offload_optimizer": CPU | {"buffer_count": 4, "pipeline_read": False}}), [],
                       {"offload.optimizer": "host"}),
    "megatron activations": (MEGATRON | {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True,
                                                                     "contiguous_memory_optimization": False, "number_checkpoints": 4}}, [], {"activations": "none"}),
    "megatron curriculum off": (MEGATRON | {"curriculum_learning": {"enabled": False}, "data_efficiency": {"enabled": False}}, [], {"train.batch": 8}),
    "megatron old offload": (MEGATRON | {"fp16": {"enabled": True}} | zero({"stage": 2, "cpu_offload": True}), [], {"offload.optimizer": "host"}),
    "tutorial": (TUTORIAL, [], {"optimizer.lr": 1e-3, "optimizer.betas": (0.8, 0.999), "schedule.name": "WarmupLR",
                                "optimizer.weight_decay": 3e-7, "zero.stage": 0, "precision": "fp32", "train.batch": 16}),
    "tutorial zero": (TUTORIAL | {"fp16": {"enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500,
                                           "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15}}
                      | zero({"stage": 0, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
                              "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False}), [],
                      {"loss_scale.initial": 32768.0}),
    "chat actor": (CHAT | {"fp16": {"enabled": True, "loss_scale_window": 100}, "hybrid_engine": {"enabled": False},
                           "tensorboard": {"enabled": False, "output_path": "logs/ds", "job_name": "step1_tensorboard"}}
                   | zero({"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
                           "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7,
                           "memory_efficient_linear": False}), [], {"log.to": None, "loss_scale.window": 100}),
    "chat monitor": (CHAT | {"bf16": {"enabled": True}, "tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"},
                             "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"}, "csv_monitor": {"enabled": True, "output_path": "z"}},
                     [], {"log.to": ("tensorboard", "wandb"), "log.project": "p"}),
    "profilers": (CHAT | {"flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
                          "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}, "dump_state": True},
                  [], {"train.micro_batch": 4}),
    "one cycle": (CHAT | {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}, "scheduler": {"type": "OneCycle", "params": {
        "cycle_first_step_size": 100, "cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "decay_lr_rate": 0.001, "cycle_min_mom": 0.85,
        "cycle_max_mom": 0.99, "decay_mom_rate": 0.0}}}, [], {"schedule.name": "OneCycle", "optimizer.weight_decay": 0.0}),
    "range test": (CHAT | {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 200,
                                                                          "lr_range_test_step_rate": 5, "lr_range_test_staircase": False}}}, [],
                   {"schedule.name": "LRRangeTest"}),
    "twin flow": (CHAT | {"bf16": {"enabled": True}} | zero({"stage": 3, "offload_optimizer": CPU | {"ratio": 0.3}}), [], {"offload.fraction": 0.3}),
    "no clipping": (CHAT | {"gradient_clipping": 0.0}, [], {"optimizer.clip_norm": None}),
    "clipping absent": ({"train_micro_batch_size_per_gpu": 1}, [], {"optimizer.clip_norm": 1.0}),
    "torch adam": (CHAT | {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True, "adam_w_mode": True}}}, [], {"optimizer.lr": 1e-4}),
    "muon": (CHAT | {"optimizer": {"type": "Muon", "params": {"lr": 0.03, "adam_lr": 2e-4, "momentum": 0.9, "ns_method": "gram"}}}, [],
             {"optimizer.name": "muon", "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.0, "optimizer.eps": 1e-10,
              "optimizer.muon": {"adjust_lr": "original", "momentum": 0.9, "lr": 0.03}}),
    "muon by the caller": (CHAT | {"optimizer": {"type": "Muon", "params": {"lr": "auto"}}}, ["optimizer.lr=1e-3"],
                           {"optimizer.lr": 1e-3, "optimizer.muon": {"adjust_lr": "original", "momentum": 0.95}}),
    "adam without decay": (CHAT | {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False, "weight_decay": 0}}}, [], {"optimizer.weight_decay": 0.0}),
    "un-prefixed": (CHAT | zero({"stage": 3, "prefetch_bucket_size": 1e7, "param_persistence_threshold": 1e5, "max_live_parameters": 1e9,
                                 "max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": True}), [], {"zero.stage": 3}),
    "zero++": (CHAT | zero({"stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True}), [],
               {"zero.stage": 3, "zero.second_shard": 8, "zero.gather_wire": "int8"}),
    "hpz of one": (CHAT | zero({"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "mics_shard_size": -1}), [], {"zero.stage": 3}),
    "mics": (CHAT | zero({"stage": 3, "mics_shard_size": 8}), [], {"zero.stage": 3, "mesh.shard": 8}),
}  # fmt: skip

REFUSED = {
    "one-bit adam": (CHAT | {"optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4}}}, [], "optimizer.type='OneBitAdam' is refused: .* use AdamW"),
    "lamb": (CHAT | {"optimizer": {"type": "Lamb", "params": {"lr": 11e-3}}}, [], "optimizer.type='Lamb' is refused"),
    "sgd in a run": (CHAT | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, [], "optimizer.type='SGD' is refused: it is for programs; use AdamW or Muon, or zero3d.ways.deepspeed.initialize"),
    "an option of another": (CHAT | {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, [], "optimizer.params.momentum is not of AdamW, which has lr, betas"),
    "muon by heads": (CHAT | {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}}, [], "per_head_muon=true is refused"),
    "l2": (CHAT | {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, [], "adam_w_mode=false is refused: weight decay is decoupled, as in AdamW"),
    "amp": (CHAT | {"amp": {"enabled": True, "opt_level": "O1"}}, [], "amp=.* is refused: .*; use bf16"),
    "autocast": (CHAT | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, [], "torch_autocast=.* is refused"),
    "sparse attention": (CHAT | {"sparse_attention": {"mode": "fixed", "block": 16}}, [], "sparse_attention=.* is refused"),
    "compression": (CHAT | {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, [], "compression_training=.* is refused"),
    "layer drop": (CHAT | {"progressive_layer_drop": {"enabled": True, "theta": 0.5}}, [], "progressive_layer_drop=.* is refused"),
    "hybrid engine": (CHAT | {"hybrid_engine": {"enabled": True, "max_out_tokens": 512}}, [], "hybrid_engine=.* is refused: .*; use engine.generate"),
    "autotuning": (CHAT | {"autotuning": {"enabled": True}}, [], "autotuning=.* is refused: .*; use zero3d plan"),
    "elasticity": (CHAT | {"elasticity": {"enabled": True, "max_train_batch_size": 2000}}, [], "DeepSpeed itself has removed it in 0.19.8; use health.min_ranks"),
    "quantised": (CHAT | zero({"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}), [], "zero.slow_wire=int8 says how sums travel between copies of shards"),
    "hpz of no number": (CHAT | zero({"stage": 3, "zero_hpz_partition_size": "host"}), [], "zero.second_shard=host is not a group size"),
    "mics in turns": (CHAT | zero({"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": True}), [], "mics_hierarchical_params_gather=true is refused: DeepSpeed itself has removed it in 0.19.7"),
    "experts": (CHAT | {"expert_parallel": {"enabled": True, "autoep_size": 2}}, [], "expert_parallel=.* use mesh.ep=N beside"),
    "an unmanaged boundary": (CHAT | {"managed_gradient_accumulation": False}, [], "use engine.set_gradient_accumulation_boundary"),
    "universal": (CHAT | {"checkpoint": {"load_universal": True}}, [], "load_universal=true is refused: .* use zero3d ckpt import SOURCE FOLDER"),
    "both precisions": (CHAT | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, [], "bf16 and fp16 are both enabled"),
    "parameters below stage 3": (CHAT | zero({"stage": 2, "offload_param": CPU}), [], "offload_param.device=cpu needs zero_optimization.stage 3"),
    "offload at stage 0": (CHAT | zero({"stage": 0, "offload_optimizer": CPU}), [], "offload_optimizer.device=cpu needs zero_optimization.stage 1"),
    "negative clipping": (CHAT | {"gradient_clipping": -1.0}, [], "gradient_clipping=-1.0: optimizer.clip_norm takes"),
    "a triad that does not multiply": (CHAT | {"gradient_accumulation_steps": 3, "train_batch_size": 16}, ["mesh.dp=2"], "train.batch 16 is not micro_batch 4 x accumulate 3 x dp 2 = 24"),
    "stage 4": (CHAT | zero({"stage": 4}), [], "zero_optimization.stage=4: zero.stage takes a whole number from 0 to 3"),
    "contradictions": (CHAT | {"bf16": {"enabled": True}}, ["train.batch=16", "precision=fp16", "optimizer.clip_norm=0.5"],
                       r"train_batch_size \(train.batch\) is 8 there and 16 here; bf16.enabled \(precision\) is 'bf16' there and 'fp16' here; gradient_clipping"),
    "precision that is not left": (HF | {"fp16": {"enabled": "auto"}}, ["precision=bf16"], "leave fp16 and fp32, and bf16 is here"),
    "two folders": (CHAT | zero({"stage": 3, "offload_optimizer": NVME, "offload_param": NVME | {"nvme_path": "/other"}}), [], "nvme_path is /local_nvme and /other"),
    "a device": (CHAT | zero({"stage": 3, "offload_optimizer": {"device": "gpu"}}), [], "device='gpu' is none, cpu or nvme"),
    "a scheduler": (CHAT | {"scheduler": {"type": "WarmupCosine", "params": {}}}, [], "did you mean WarmupCosineLR"),
    "an option": (CHAT | {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, [], "WarmupLR has no option warmup_steps. Did you mean warmup_num_steps"),
    "a cycle without rates": (CHAT | {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}}, [], "OneCycle needs cycle_max_lr"),
    "parameters of no optimizer": (CHAT | {"optimizer": {"params": {"lr": 1e-4}}}, [], "without optimizer.type"),
    "a section that is none": (CHAT | {"zero_optimization": 3}, [], "zero_optimization is a section, and has 3"),
    "text for a switch": (CHAT | {"bf16": {"enabled": "yes"}}, [], "bf16.enabled='yes' is true, false or auto"),
}  # fmt: skip
TYPOS = {  # key -> what was meant
    "train_batchsize": "train_batch_size", "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_acumulation_steps": "gradient_accumulation_steps", "gradient_cliping": "gradient_clipping",
    "zero_optimisation": "zero_optimization", "zero_optimization.stag": "zero_optimization.stage",
    "zero_optimization.offload_optimiser": "zero_optimization.offload_optimizer",
    "zero_optimization.offload_params": "zero_optimization.offload_param",
    "zero_optimization.overlap_com": "zero_optimization.overlap_comm",
    "zero_optimization.offload_optimizer.devise": "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.pin_mem": "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.nvme_paht": "zero_optimization.offload_param.nvme_path",
    "zero_optimization.reduce_bucket": "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucketsize": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistance_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "fp16.enable": "fp16.enabled", "bf16.enable": "bf16.enabled", "fp16.initial_scale": "fp16.initial_scale_power",
    "fp16.loss_scale_windows": "fp16.loss_scale_window", "optimizer.typ": "optimizer.type", "optimizer.param": "optimizer.params",
    "optimizer.params.learning_rate": "optimizer.params.lr", "optimizer.params.beta": "optimizer.params.betas",
    "optimizer.params.weight_decays": "optimizer.params.weight_decay", "scheduler.name": "scheduler.type",
    "scheduler.param": "scheduler.params", "activation_checkpoint": "activation_checkpointing",
    "communication_dtype": "communication_data_type", "steps_per_prints": "steps_per_print",
    "wall_clock_break_down": "wall_clock_breakdown", "tensorboard.enable": "tensorboard.enabled", "wandb.projects": "wandb.project",
    "tensor_parallel.auto_tp_size": "tensor_parallel.autotp_size", "data_types.grad_accum": "data_types.grad_accum_dtype",
    "learning_rate": "optimizer.params.lr", "optimizer.learning_rate": "optimizer.params.lr", "optimizer.name": "optimizer.type",
    "max_grad_norm": "gradient_clipping", "batch_size": "train_batch_size", "zero_stage": "zero_optimization.stage",
    "optimizer.params.epsilon": "optimizer.params.eps", "optimizer.params.beta1": "optimizer.params.betas",
    "accumulation_steps": "gradient_accumulation_steps", "tp_size": "tensor_parallel.autotp_size",
    "stage": "zero_optimization.stage", "offload_optimizer": "zero_optimization.offload_optimizer", "lr": "optimizer.params.lr",
    "enabled": None, "compile.enable": "compile.enabled", "checkpoint.tag_validate": "checkpoint.tag_validation",
}  # fmt: skip
