"""TrainingArguments with a JSON of DeepSpeed's: read by us, beside the arguments' own values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from zero3d.config import Config, load
from zero3d.errors import ConfigError
from zero3d.ways.deepspeed.document import Document, document_of, parse, read_document
from zero3d.ways.deepspeed.merge import Merged, together
from zero3d.ways.huggingface.accelerate.world import must_say_cpu

WHERE = "TrainingArguments"
LAUNCHERS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")  # what `accelerate launch` says of a configuration


def without_json(original: Callable[[], None], args: TrainingArguments) -> None:
    """Run TrainingArguments.__post_init__ as if there was no JSON, then check the JSON beside the other arguments.

    On CPUs a launcher's ranks are processes of one training. Raises ConfigError, one for all values that contradict
    each other.
    """
    given, args.deepspeed = args.deepspeed, None
    if asked := [name for name in LAUNCHERS if parse_flag_from_env(name)]:
        raise ConfigError(
            f"{asked[0]} is set, as by accelerate launch with such a configuration: launch with torchrun, and give the "
            "stage to Trainer(stage=3), patch(stage=3) or TrainingArguments(deepspeed='ds.json')."
        )
    args.use_cpu = args.use_cpu or must_say_cpu()
    try:
        original()
    finally:
        args.deepspeed = given
    json_of(args)


class Json(NamedTuple):
    """A JSON and the arguments together: what became of each key, and the configuration that they make."""

    made: Merged
    settings: Config

    def has(self, key: str) -> bool:
        """Say whether the JSON has a key with a value."""
        return self.made.document.values.get(key) is not None


def json_of(args: TrainingArguments) -> Json | None:
    """Return what the JSON of some arguments and their values make together; None without one. Raises ConfigError."""
    if not args.deepspeed:
        return None
    document = _document(args.deepspeed)
    made = together(document, _given(args, document), WHERE)
    settings = load(made.tree)
    if (settings.mesh.tp or 1) > 1:
        raise ConfigError(
            f"{document.name}: tensor_parallel.autotp_size={settings.mesh.tp} in a Trainer is not supported: leave it "
            "out, or train with zero3d train --deepspeed."
        )
    if settings.mesh.shard is not None:
        raise ConfigError(
            f"{document.name}: zero_optimization.mics_shard_size={settings.mesh.shard} in a Trainer is not supported: "
            f"pass parallelism_config=ParallelismConfig(dp_replicate_size=N, dp_shard_size={settings.mesh.shard}), or "
            "train with zero3d train --deepspeed."
        )
    return Json(made, settings)


def sequence_ranks(args: TrainingArguments, document: Document | None) -> int:
    """Return how many ranks share sequences, by parallelism_config or a JSON. Raises ConfigError where they differ."""
    given, parallelism = (document.values if document else {}).get("sequence_parallel_size"), args.parallelism_config
    said = given if isinstance(given, int) else None
    if parallelism is None:
        return max(1, said or 1)
    if said not in (None, parallelism.sp_size):
        raise ConfigError(
            f"sequence_parallel_size is {said} in the JSON, and ParallelismConfig(sp_size={parallelism.sp_size}) is "
            "given: make them equal."
        )
    return int(parallelism.sp_size)


def _document(given: Any) -> Document:
    if isinstance(given, Mapping):
        return document_of(given, "deepspeed")
    if str(given).lstrip().startswith("{"):
        return document_of(parse(given, "deepspeed="), "deepspeed")
    return read_document(Path(given))


def _given(args: TrainingArguments, document: Document) -> dict[str, Any]:
    """Return the arguments by our keys, those that a JSON of DeepSpeed's has words for."""
    micro, accumulate = args.per_device_train_batch_size, args.gradient_accumulation_steps
    half = args.fp16 or args.fp16_full_eval
    given = {
        "train.micro_batch": micro,
        "train.accumulate": accumulate,
        "train.batch": micro * accumulate * ((args.world_size or 1) // sequence_ranks(args, document)),
        "precision": "bf16" if args.bf16 or args.bf16_full_eval else "fp16" if half else "fp32",
        "optimizer.clip_norm": args.max_grad_norm or None,
    }
    if "optimizer.type" in document.values:
        given |= {
            "optimizer.lr": args.learning_rate,
            "optimizer.betas": (args.adam_beta1, args.adam_beta2),
            "optimizer.eps": args.adam_epsilon,
            "optimizer.weight_decay": args.weight_decay,
        }
    return given
