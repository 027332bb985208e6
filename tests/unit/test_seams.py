"""The seams in transformers and Accelerate are where ours expect them: the name of one that moved is in the failure."""

import inspect
import warnings
from types import SimpleNamespace

import accelerate
import pytest
import torch
import transformers
import vision
from accelerate.optimizer import AcceleratedOptimizer

import zero3d
from zero3d.ways.huggingface.accelerate import Accelerator
from zero3d.ways.huggingface.accelerate.accelerator import OTHERS
from zero3d.ways.huggingface.accelerate.optimizer import EngineOptimizer
from zero3d.ways.huggingface.transformers import Trainer, patch
from zero3d.ways.huggingface.transformers.seams import SEAMS

PLAIN = {name: vars(transformers.Trainer).get(name) for name in SEAMS}
ARGUMENTS = {  # what each is called with besides self
    "create_accelerator_and_postprocess": [],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_move_model_to_device": ["model", "device"],
    "create_optimizer": ["model"],
    "create_scheduler": ["num_training_steps", "optimizer"],
    "save_model": ["output_dir", "_internal_call"],
    "_save": ["output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_best_model": [],
    "_finalize_training": ["trial", "num_train_samples", "start_time"],
    "evaluation_loop": ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
    "get_total_train_batch_size": ["args"],
    "_track_num_input_tokens": ["inputs"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
}


def names(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", SEAMS)
def test_a_method_of_trainer_is_there_with_these_arguments(name):
    assert PLAIN[name] is not None, f"transformers.Trainer has no {name} any more"
    assert names(PLAIN[name]) == ARGUMENTS[name]


@pytest.mark.parametrize("words", [
    "self.accelerator = Accelerator(**args)", "self.is_deepspeed_enabled = getattr(self.accelerator.state",
])  # fmt: skip
def test_the_trainer_makes_its_accelerator_by_that_name(words):
    assert words in inspect.getsource(PLAIN["create_accelerator_and_postprocess"])
    assert hasattr(transformers.trainer, "Accelerator")


@pytest.mark.parametrize(("method", "words"), [
    ("train", "self._load_from_checkpoint(resume_from_checkpoint)"),
    ("_prepare_for_training", "model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)"),
    ("_prepare_for_training", "self._load_optimizer_and_scheduler(resume_from_checkpoint)"),
    ("_run_epoch", "self.accelerator.gradient_state._set_sync_gradients(do_sync_step)"),
    ("_run_epoch", "self.accelerator.optimizer_step_was_skipped"),
    ("training_step", "self.accelerator.backward(loss, **kwargs)"),
    ("_clip_grad_norm", "self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)"),
    ("_save_checkpoint", "self._save_optimizer_and_scheduler(output_dir)"),
    ("save_model", "self._save(output_dir)"),
    ("evaluation_loop", "self.accelerator.prepare_model(model, evaluation_mode=True)"),
])  # fmt: skip
def test_what_the_trainer_calls_is_still_called(method, words):
    source = inspect.getsource(PLAIN.get(method) or getattr(transformers.Trainer, method))
    assert words in source, f"transformers.Trainer.{method} has changed"


@pytest.mark.parametrize("name", [
    "prepare", "prepare_model", "prepare_optimizer", "backward", "clip_grad_norm_", "clip_grad_value_",
    "unscale_gradients", "get_state_dict", "save_state", "load_state", "free_memory", "mixed_precision",
])  # fmt: skip
def test_what_ours_replaces_in_accelerate_is_there(name):
    assert name in vars(accelerate.Accelerator), f"accelerate.Accelerator has no {name} any more"
    assert name in vars(Accelerator)


def test_accelerates_other_ways_to_shard_are_known():
    given = set(inspect.signature(accelerate.Accelerator.__init__).parameters)
    assert {name for name in given if name.endswith("_plugin") or "parallel" in name or "plugins" in name} == {
        *OTHERS, "dynamo_plugin", "gradient_accumulation_plugin", "parallelism_config",
    }  # fmt: skip
    assert given >= {"mixed_precision", "cpu", "gradient_accumulation_steps"}


def test_the_prepared_optimizer_has_what_schedules_and_loops_use():
    replaced = {"__init__", "step", "zero_grad", "state_dict", "load_state_dict"}
    assert replaced <= set(vars(AcceleratedOptimizer)) & set(vars(EngineOptimizer))
    assert {"param_groups", "step_was_skipped"} <= set(vars(AcceleratedOptimizer))


def test_a_patch_that_is_refused_changes_nothing():
    with pytest.raises(zero3d.ConfigError, match="ZeRO stage 7"):
        patch(stage=7)
    assert {name: vars(transformers.Trainer)[name] for name in SEAMS} == PLAIN
    assert not hasattr(transformers.Trainer, "zero3d_undo")


def test_patching_is_undone_and_may_be_repeated():
    assert {name: vars(transformers.Trainer)[name] for name in SEAMS} == PLAIN
    assert all(vars(Trainer)[name] is not PLAIN[name] for name in SEAMS)
    undo = patch(stage=1)
    try:
        assert patch(stage=2) is undo
        assert transformers.Trainer.zero3d.stage == 2
        assert all(vars(transformers.Trainer)[name].__wrapped__ is PLAIN[name] for name in SEAMS)
    finally:
        undo()
        undo()
    assert {name: vars(transformers.Trainer)[name] for name in SEAMS} == PLAIN
    assert not hasattr(transformers.Trainer, "zero3d")


def test_the_arguments_are_read_by_ours():
    assert transformers.TrainingArguments.__post_init__.__wrapped__.__module__ == "transformers.training_args"


def test_vllm_of_a_trainers_own_is_refused_with_the_reason(monkeypatch):
    """TRL would hand it the placeholders of released parameters; on a CPU there is no vLLM either."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    trainer = SimpleNamespace(args=SimpleNamespace(use_vllm=True), zero3d=None)
    with pytest.raises(
        zero3d.errors.ConfigError, match=r"use_vllm=True: .* shards here; and vLLM computes on GPUs, of .*Leave"
    ):
        SEAMS["create_accelerator_and_postprocess"](lambda: None, trainer)


@pytest.mark.parametrize(("family", "world", "alike", "completions", "on", "said"), [
    ("llava", 2, 1, True, False, 1),
    ("llava", 2, 1, False, False, 0),
    ("llava", 2, 2, True, True, 0),
    ("llava", 1, 1, True, True, 0),
    (None, 2, 1, True, True, 0),
])  # fmt: skip
def test_images_are_not_logged_by_ranks_of_which_some_may_have_none(family, world, alike, completions, on, said):
    """By TRL's GRPO: they are gathered there. Ranks that are given the same prompts may."""
    args = SimpleNamespace(world_size=world, log_completions=completions, process_index=0)
    trainer = SimpleNamespace(
        args=args, accelerator=SimpleNamespace(alike=alike), callback_handler=SimpleNamespace(callbacks=[]),
        model=vision.model(family) if family else torch.nn.Linear(2, 2), log_multimodal=True,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert SEAMS["train"](lambda: "trained", trainer) == "trained"
    assert trainer.log_multimodal is on
    lines = [str(each.message) for each in caught]
    assert len(lines) == said
    assert all("Type GRPOConfig(log_multimodal=False)" in line for line in lines)
