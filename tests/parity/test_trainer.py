"""Hugging Face's Trainer on our engine: the curve of a plain Trainer on one process, at every stage, resume included."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from models import hf
from trainers import Rows, keep_only, launched, logged, train

CLOSE = {"rel": 1e-5, "abs": 1e-7}


def assert_same(found, wanted):
    assert wanted[0]
    for one, other in zip(found, wanted, strict=True):
        assert len(one) == len(other)
        for values, expected in zip(one, other, strict=True):
            assert values == pytest.approx(expected, **CLOSE)


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory):
    """What a plain Trainer logs on one process, evaluating every fourth step."""
    return ranks(1, logged, "plain", tmp_path_factory.mktemp("plain"), {"eval_strategy": "steps", "eval_steps": 4})[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_trainer_on_two_ranks_has_the_curve_of_a_plain_one(ranks, tmp_path, plain, stage):
    for found in ranks(2, logged, stage, tmp_path, {"eval_strategy": "steps", "eval_steps": 4}):
        assert_same(found, plain)


SAVED = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 4}


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 0)), ((1, 1), (2, 2))])
def test_a_trainer_resumes_on_another_number_of_ranks_and_stage(ranks, tmp_path, plain, before, after):
    world, stage = before
    ranks(world, logged, stage, tmp_path, SAVED)
    keep_only(tmp_path, 6)
    world, stage = after
    found = ranks(world, logged, stage, tmp_path, SAVED, None, "llama", True)[0]
    assert_same(found, plain)  # its log has the steps before, too


def test_a_resume_loads_states_and_not_only_weights(ranks, tmp_path, plain):
    ranks(1, logged, 1, tmp_path, SAVED | {"save_only_model": True})
    keep_only(tmp_path, 6)
    steps = ranks(1, logged, 1, tmp_path, SAVED, None, "llama", True)[0][0]
    assert steps[6][0] == pytest.approx(plain[0][6][0], rel=1e-4), "weights are those of the checkpoint"
    assert steps[8][0] != pytest.approx(plain[0][8][0], rel=1e-4), "moments began anew"


def weights_saved(kind, folder):
    """Train, save in the end; what from_pretrained finds there, and what the trainer's model answers."""
    from transformers import AutoModelForCausalLM

    with launched():
        trainer, _ = train(kind, folder, {"save_strategy": "steps", "save_steps": 12})
        trainer.save_model()
        found = trainer.predict(Rows(8, seed=1)).metrics["test_loss"]
    again = [AutoModelForCausalLM.from_pretrained(place) for place in (folder, folder / "checkpoint-12")]
    return [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in again], found


def test_saved_weights_are_those_of_a_plain_trainer(ranks, tmp_path):
    wanted, loss = ranks(1, weights_saved, "plain", tmp_path / "plain")[0]
    for stage in (0, 3):
        for found, predicted in ranks(2, weights_saved, stage, tmp_path / f"{stage}"):
            assert predicted == pytest.approx(loss, rel=1e-5)
            for one, other in zip(found, wanted, strict=True):
                assert one.keys() == other.keys()
                for name, tensor in one.items():
                    torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6)


def best(kind, folder, options):
    """Where the best checkpoint is, and the loss of evaluation after it was loaded."""
    with launched():
        trainer, _ = train(kind, folder, BEST | options)
        return Path(trainer.state.best_model_checkpoint).name, trainer.evaluate()["eval_loss"]


BEST = {
    "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 0.2,
    "load_best_model_at_end": True, "save_total_limit": 2,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}])
def test_the_best_model_is_loaded_in_the_end(ranks, tmp_path, options):
    wanted = ranks(1, best, "plain", tmp_path / "plain", options)[0]
    for found in ranks(2, best, 3, tmp_path / "ours", options):
        assert found == (wanted[0], pytest.approx(wanted[1], rel=1e-5))


def adapters():
    """A model with LoRA."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(hf("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def test_adapters_are_trained_saved_and_resumed(ranks, tmp_path):
    options = SAVED | {"learning_rate": 0.05}
    wanted = ranks(1, logged, "plain", tmp_path / "plain", options, None, adapters)[0]
    found = ranks(2, logged, 3, tmp_path / "ours", options, None, adapters)[0]
    assert_same(found, wanted)
    keep_only(tmp_path / "ours", 6)
    assert_same(ranks(1, logged, 2, tmp_path / "ours", options, None, adapters, True)[0], wanted)
    one, other = (safetensors.torch.load_file(tmp_path / who / "checkpoint-12" / ADAPTER) for who in ("plain", "ours"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-6)


ADAPTER = "adapter_model.safetensors"
RECOMPUTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize(("options", "stage"), [
    (RECOMPUTED | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, 3),
    (RECOMPUTED | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, 3),
    ({"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}, 2),
    ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "max_steps": 8}, 1),  # the epoch ends inside a window
    ({"average_tokens_across_devices": True, "neftune_noise_alpha": None, "optim": "adamw_torch_fused"}, 3),
    ({"optim": "sgd", "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}, 2),
    ({"auto_find_batch_size": True}, 3),
    ({"torch_empty_cache_steps": 2, "include_num_input_tokens_seen": "all"}, 0),
])  # fmt: skip
def test_arguments_of_training_mean_the_same(ranks, tmp_path, options, stage):
    wanted = ranks(1, logged, "plain", tmp_path / "plain", options)[0]
    for found in ranks(2, logged, stage, tmp_path / "ours", options):
        assert_same(found, wanted)
