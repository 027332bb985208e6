"""The key or choice that was probably meant: a key elsewhere, another trainer's name for it, a typing error."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from types import MappingProxyType

from zero3d.errors import short

LIKE = 0.7  # difflib's ratio from which two names are taken for the same; lora is not lr (0.67)
LONGEST = 64  # characters of a word that may be a mistyped one
LIKE_CHOICE = 0.5  # lower among few choices: float16 is fp16 (0.55)
FOREIGN: Mapping[str, str] = MappingProxyType(  # names in DeepSpeed, Hugging Face and others -> what to write here
    {
        "activation_checkpointing": "activations: full",
        "attn_implementation": "model.attn",
        "bf16": "precision: bf16",
        "block_size": "data.length",
        "bnb_4bit_use_double_quant": "model.quantize: nf4-double",
        "cpu_offload": "offload.optimizer: host",
        "dataloader_num_workers": "data.workers",
        "dataset": "data.train",
        "dtype": "precision",
        "early_stopping_patience": "evaluate.patience",
        "dynamo_backend": "train.compile",
        "ema_decay": "train.ema",
        "eval": "evaluate",
        "eval_every": "evaluate.every",
        "eval_steps": "evaluate.every",
        "fp16": "precision: fp16",
        "fp8": "model.linear: fp8",
        "full_determinism": "train.deterministic",
        "gradient_accumulation_steps": "train.accumulate",
        "gradient_checkpointing": "activations: full",
        "gradient_clipping": "optimizer.clip_norm",
        "greater_is_better": "evaluate.highest",
        "init_lora_weights": "lora.init",
        "hidden_size": "model.path, whose config.json has it",
        "learning_rate": "optimizer.lr",
        "lora.r": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
        "lora_r": "lora.rank",
        "lora_target_modules": "lora.targets",
        "logging_steps": "log.every",
        "load_best_model_at_end": "checkpoint.best, which keeps it in checkpoints/best",
        "load_in_4bit": "model.quantize: nf4",
        "load_in_8bit": "model.quantize: int8",
        "lr_scheduler_type": "schedule.name",
        "max_grad_norm": "optimizer.clip_norm",
        "max_length": "data.length",
        "max_seq_length": "data.length",
        "max_steps": "train.steps",
        "metric_for_best_model": "evaluate.best",
        "mixed_precision": "precision",
        "mm_projector_lr": "optimizer.groups: [{match: multi_modal_projector, lr: VALUE}]",
        "modules_to_save": "lora.train_also",
        "model_name_or_path": "model.path",
        "num_train_epochs": "train.epochs",
        "nvme_path": "offload.directory",
        "offload_optimizer": "offload.optimizer",
        "offload_param": "offload.params",
        "optimizer.params": "optimizer, without a level between",
        "optimizer.type": "optimizer.name",
        "output_dir": "output",
        "per_device_train_batch_size": "train.micro_batch",
        "quantization_bit": "model.quantize: nf4-double, or int8 for 8 bits",
        "report_to": "log.to",
        "save_every": "checkpoint.every",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "seq_len": "data.length",
        "sequence_length": "data.length",
        "steps_per_print": "log.every",
        "target_modules": "lora.targets",
        "tensor_parallel": "mesh.tp",
        "torch_compile": "train.compile",
        "torch_dtype": "precision",
        "train_batch_size": "train.batch",
        "train_micro_batch_size_per_gpu": "train.micro_batch",
        "use_dora": "lora.dora",
        "use_liger_kernel": "train.tiled_loss, which is its loss alone; train.compile fuses norms, RoPE and SwiGLU",
        "use_rslora": "lora.rslora",
        "warmup_ratio": "schedule.warmup, which below 1 is a fraction",
        "warmup_steps": "schedule.warmup",
        "world_size": "mesh.dp, which is computed where left out",
        "zero_optimization": "zero",
    }
)


def nearest(word: str, known: Collection[str], cutoff: float = LIKE_CHOICE) -> str | None:
    """Return the known word most like this one, if any is."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=cutoff) if len(word) <= LONGEST else []
    return close[0] if close else None


def unknown(name: str, keys: Collection[str], sections: Collection[str]) -> str:
    """Return the message for a dotted key that does not exist."""
    if len(name) > LONGEST or not name.isprintable():
        return f"unknown key {short(name)}. See all keys: zero3d config explain"
    if name in keys:  # written with its dot inside a file
        section, _, field = name.partition(".")
        return f"{name} is written as two levels in a file: {section}: {{{field}: ...}}"
    parent, _, field = name.rpartition(".")
    other = FOREIGN.get(name) or FOREIGN.get(field.lower().replace("-", "_"))
    if other:
        return f"unknown key {name}. Here it is {other}."
    if parent in keys:
        return f"unknown key {name}: {parent} is a value, not a section."
    meant = candidates(name, keys, sections)
    if meant:
        return f"unknown key {name}. Did you mean {' or '.join(meant)}?"
    return f"unknown key {name}. See all keys: zero3d config explain"


def candidates(name: str, keys: Collection[str], sections: Collection[str]) -> list[str]:
    """Return up to three keys or sections: those of that last name wherever they are, else the nearest one."""
    parent, _, field = name.lower().rpartition(".")

    def score(known: str) -> tuple[float, float]:
        above, _, last = known.rpartition(".")
        flat = _like(name, known.replace(".", "_"))  # log_every
        return max(flat, _like(field, last)), _like(parent, above)

    everything = [*keys, *sections]
    same = [known for known in everything if known.rpartition(".")[2] == field]
    if same:
        return sorted(same, key=lambda known: -score(known)[1])[:3]
    likely = [known for known in everything if score(known)[0] >= LIKE]
    return [max(likely, key=lambda known: score(known)[0] + score(known)[1] / 2)] if likely else []


def _like(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
