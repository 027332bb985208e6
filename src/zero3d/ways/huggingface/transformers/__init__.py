"""Hugging Face's Trainer on our engine, by one changed import, or by `patch()` for scripts that cannot change theirs.

    from transformers import Trainer      ->  from zero3d.ways.huggingface.transformers import Trainer
    trl's SFTTrainer, DPOTrainer, ...     ->  from zero3d.ways.huggingface.transformers import patch; patch(stage=3)

trainer.py    Trainer and patch(): where the seams are put
seams.py      the methods of transformers.Trainer that are ours, each around the one that it replaces
callbacks.py  TRL's callbacks that read weights, such as sync_ref_model's
arguments.py  TrainingArguments(deepspeed="ds.json") without DeepSpeed

Importing this package changes two things in transformers. A JSON of DeepSpeed's in TrainingArguments is read here; and
ranks that torchrun starts on CPUs are processes of one training without `use_cpu=True`, too.
"""

from zero3d.ways.huggingface.transformers.trainer import Trainer, patch

__all__ = ["Trainer", "patch"]
