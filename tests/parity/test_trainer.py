"""Hugging Face's Trainer on our engine: the curve of a plain Trainer on one process, at every stage, resume included."""

import functools
import json
import re
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from models import VOCAB, hf
from safetensors.torch import load_file
from tensors import assert_near
from trainers import Rows, arguments, keep_only, launched, logged, losses_of, train

import zero3d

CLOSE = {"rel": 1e-5, "abs": 1e-7}


def assert_same(found, wanted):
    assert wanted[0]
    for one, other in zip(found, wanted, strict=True):
        assert len(one) == len(other)
        for values, expected in zip(one, other, strict=True):
            assert values == pytest.approx(expected, **CLOSE)


# Of six steps, two an epoch: the third is the first one of the second epoch.
SAVED = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}


def whole(kind, folder):
    """What is logged by a training that saves, the loss of a prediction after it; the trainer's model is in `folder`."""
    with launched():
        trainer, found = train(kind, folder, SAVED)
        trainer.save_model()
        return found, trainer.predict(Rows(8, seed=1)).metrics["test_loss"]


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """(kind, number of ranks) -> a folder, and what `whole` returned on every rank."""

    @functools.cache
    def once(kind, world):
        folder = tmp_path_factory.mktemp(f"{kind}-{world}")
        return folder, ranks(world, whole, kind, folder)

    return once


@pytest.fixture(scope="module")
def plain(trained):
    """What a plain Trainer logs on one process, evaluating every second step."""
    return trained("plain", 1)[1][0][0]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_a_trainer_on_two_ranks_has_the_curve_of_a_plain_one(trained, plain, stage):
    for found, _ in trained(stage, 2)[1]:
        assert_same(found, plain)


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 0)), pytest.param((1, 1), (2, 2), marks=pytest.mark.long)])
def test_a_trainer_resumes_on_another_number_of_ranks_and_stage(ranks, trained, tmp_path, plain, before, after):
    world, stage = before
    shutil.copytree(trained(stage, world)[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    world, stage = after
    found = ranks(world, logged, stage, tmp_path, SAVED, None, "llama", True)[0]
    assert_same(found, plain)  # its log has the steps before, too


def test_a_resume_loads_states_and_not_only_weights(ranks, tmp_path, plain):
    ranks(1, logged, 1, tmp_path, SAVED | {"save_only_model": True})
    keep_only(tmp_path, 3)
    steps = ranks(1, logged, 1, tmp_path, SAVED, None, "llama", True)[0][0]
    assert steps[3][0] == pytest.approx(plain[0][3][0], rel=1e-4), "weights are those of the checkpoint"
    assert steps[5][0] != pytest.approx(plain[0][5][0], rel=1e-4), "moments began anew"


def weights_in(folder):
    """What from_pretrained finds in a trainer's folder, and in its last checkpoint."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(place) for place in (folder, folder / "checkpoint-6")]
    return [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]


def test_saved_weights_are_those_of_a_plain_trainer(ranks, trained):
    folder, ((_, loss),) = trained("plain", 1)
    wanted = ranks(1, weights_in, folder)[0]
    for stage in (0, 3):
        folder, answers = trained(stage, 2)
        for _, predicted in answers:
            assert predicted == pytest.approx(loss, rel=1e-5)
        for one, other in zip(ranks(1, weights_in, folder)[0], wanted, strict=True):
            assert_near(one, other, 1e-4, rate=1e-2)


def best(kind, folder, options):
    """Where the best checkpoint is, and the loss of evaluation after it was loaded."""
    with launched():
        trainer, _ = train(kind, folder, BEST | options)
        return Path(trainer.state.best_model_checkpoint).name, trainer.evaluate()["eval_loss"]


BEST = {
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.2,
    "load_best_model_at_end": True, "save_total_limit": 2,
}  # fmt: skip


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), {"save_only_model": True}])
def test_the_best_model_is_loaded_in_the_end(ranks, tmp_path, options):
    wanted = ranks(1, best, "plain", tmp_path / "plain", options)[0]
    for found in ranks(2, best, 3, tmp_path / "ours", options):
        assert found == (wanted[0], pytest.approx(wanted[1], rel=1e-5))


def adapters():
    """A model with LoRA."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(hf("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@pytest.mark.long
def test_adapters_are_trained_saved_and_resumed(ranks, tmp_path):
    options = SAVED | {"learning_rate": 0.05}
    wanted = ranks(1, logged, "plain", tmp_path / "plain", options, None, adapters)[0]
    found = ranks(2, logged, 3, tmp_path / "ours", options, None, adapters)[0]
    assert_same(found, wanted)
    keep_only(tmp_path / "ours", 3)
    assert_same(ranks(1, logged, 2, tmp_path / "ours", options, None, adapters, True)[0], wanted)
    one, other = (load_file(tmp_path / who / "checkpoint-6" / ADAPTER) for who in ("plain", "ours"))
    assert_near(other, one, 1e-4, rate=options["learning_rate"])


PROMPTS = {"PROMPT_TUNING": {}, "PREFIX_TUNING": {"prefix_projection": True, "encoder_hidden_size": 8}, "P_TUNING": {}}


def prompted(kind):
    """A model with virtual tokens, or keys, which PEFT saves as an encoder computes them."""
    from peft import get_peft_config, get_peft_model

    torch.manual_seed(3)
    given = {"peft_type": kind, "task_type": "CAUSAL_LM", "num_virtual_tokens": 3} | PROMPTS[kind]
    return get_peft_model(hf("llama"), get_peft_config(given))


@pytest.mark.parametrize(("kind", "stage"), [
    ("PROMPT_TUNING", 3), ("PREFIX_TUNING", 3),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (("PROMPT_TUNING", 2), ("PREFIX_TUNING", 2), ("P_TUNING", 3))),
])  # fmt: skip
def test_prompts_that_an_encoder_computes_are_saved_by_rank_0(ranks, tmp_path, kind, stage):
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 4, "learning_rate": 0.05}
    build = partial(prompted, kind)
    wanted = ranks(1, logged, "plain", tmp_path / "plain", options, None, build)[0]
    assert_same(ranks(2, logged, stage, tmp_path / "ours", options, None, build)[0], wanted)
    for step in (3, 4):
        one, other = (load_file(tmp_path / who / f"checkpoint-{step}" / ADAPTER) for who in ("plain", "ours"))
        assert_near(other, one, 1e-4, rate=options["learning_rate"])


ADAPTER = "adapter_model.safetensors"
RECOMPUTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize(("options", "stage"), [
    (RECOMPUTED | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, 3),
    pytest.param({"max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "max_steps": 4}, 1, marks=pytest.mark.long),  # the epoch ends inside a window
])  # fmt: skip
def test_arguments_of_training_mean_the_same(ranks, tmp_path, options, stage):
    wanted = ranks(1, logged, "plain", tmp_path / "plain", options)[0]
    for found in ranks(2, logged, stage, tmp_path / "ours", options):
        assert_same(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize(("options", "stage"), [
    (RECOMPUTED | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, 3),
    ({"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}, 2),
    ({"average_tokens_across_devices": True, "neftune_noise_alpha": None, "optim": "adamw_torch_fused"}, 3),
    ({"optim": "sgd", "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}, 2),
    ({"auto_find_batch_size": True}, 3),
    ({"torch_empty_cache_steps": 2, "include_num_input_tokens_seen": "all"}, 0),
])  # fmt: skip
def test_more_arguments_of_training_mean_the_same(ranks, tmp_path, options, stage):
    test_arguments_of_training_mean_the_same(ranks, tmp_path, options, stage)


def generating(kind, folder):
    """Evaluation of a sequence-to-sequence model by generation: how many tokens, which differ by rank, and its loss."""
    import transformers
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from zero3d.ways.huggingface.transformers import patch

    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                      decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)  # fmt: skip
    undo = patch(stage=kind) if kind != "plain" else lambda: None
    try:
        with launched():
            args = arguments(
                folder, Seq2SeqTrainingArguments, max_steps=3, predict_with_generate=True, generation_max_length=7
            )
            trainer = Seq2SeqTrainer(
                T5ForConditionalGeneration(config), args, train_dataset=Rows(16), eval_dataset=Rows(9, 1)
            )
            trainer.train()
            assert kind == "plain" or trainer.accelerator.engine.stage == kind
            steps = losses_of(trainer)[0]
            found = trainer.predict(Rows(9, seed=1))
    finally:
        undo()
    assert transformers.Trainer.train.__module__ == "transformers.trainer"
    return (steps, [found.metrics["test_loss"]]), found.predictions.tolist()


@pytest.mark.long
def test_a_patched_trainer_generates_in_evaluation(ranks, tmp_path):
    wanted, tokens = ranks(2, generating, "plain", tmp_path)[0]  # T5 leaves token weights out: no curve of one process
    for found, predicted in ranks(2, generating, 3, tmp_path):
        assert_same(found, wanted)
        assert predicted == tokens


JSON = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_optimization": {"stage": 3, "overlap_comm": True},
}  # fmt: skip
OPTIMIZER = {"optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}
SCHEDULER = {"scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(
    ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto") | {"warmup_type": "linear"}}}  # fmt: skip


def by_json(folder, tree, options):
    trainer, found = train(None, folder, {"deepspeed": tree} | options)
    return trainer.accelerator.engine.stage, found, trainer.accelerator.engine.optimizer.torch.param_groups[0]["lr"]


@pytest.fixture(scope="module")
def undecayed(ranks, tmp_path_factory):
    """What a plain Trainer logs without weight decay, with a longer warmup."""
    return ranks(1, logged, "plain", tmp_path_factory.mktemp("undecayed"), UNDECAYED)[0]


UNDECAYED = {"weight_decay": 0.0, "warmup_steps": 4}


@pytest.mark.parametrize(
    ("with_schedule", "as_file"), [pytest.param(False, True, marks=pytest.mark.long), (True, False)]
)
def test_a_json_of_deepspeeds_is_honoured(ranks, tmp_path, undecayed, with_schedule, as_file):
    from zero3d.ways.huggingface.transformers.arguments import json_of

    tree = JSON | OPTIMIZER | (SCHEDULER if with_schedule else {})
    (tmp_path / "ds.json").write_text(json.dumps(tree))
    given = [str(tmp_path / "ds.json"), tree]
    one, other = (json_of(arguments(tmp_path / "ours", deepspeed=way, **UNDECAYED)) for way in given)
    assert (one.settings, one.made.document.values) == (other.settings, other.made.document.values)
    stage, (steps, _), _ = ranks(2, by_json, tmp_path / "ours", given[not as_file], UNDECAYED)[0]
    assert stage == 3
    wanted = undecayed[0]
    rates = [0.0, 0.0, *(step[2] for step in wanted[1:])] if with_schedule else [step[2] for step in wanted]
    assert [step[2] for step in steps] == pytest.approx(rates[: len(steps)])
    if not with_schedule:
        assert_same((steps, []), undecayed)


@pytest.mark.parametrize(("tree", "words"), [
    (JSON | {"gradient_clipping": 1.0, "train_batch_size": 64}, "contradicts TrainingArguments: train_batch_size .* is 64 "
     r"there and 8 here; gradient_clipping .* is 1\.0 there and 0\.5 here"),
    (JSON | {"zero_optimisation": {}}, "Did you mean zero_optimization"),
    (JSON | {"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2 in a Trainer is not supported"),
    ("{broken", "deepspeed= is not JSON"),
    ("nowhere.json", "nowhere.json cannot be read"),
])  # fmt: skip
def test_a_json_that_contradicts_the_arguments_is_refused(tmp_path, tree, words):
    import zero3d.ways.huggingface.transformers

    with launched(), pytest.raises(zero3d.ConfigError, match=words):
        arguments(tmp_path, deepspeed=tree)


def test_what_would_shard_a_second_time_is_refused(tmp_path, monkeypatch):
    from zero3d.ways.huggingface.transformers import Trainer

    with pytest.raises(zero3d.ConfigError, match="pass stage=2, not in options"):
        Trainer(hf("llama"), arguments(tmp_path), options={"stage": 2})
    with pytest.raises(zero3d.ConfigError, match="has stage 3, and stage=2 is given"):
        Trainer(hf("llama"), arguments(tmp_path, deepspeed=JSON), stage=2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(zero3d.ConfigError, match=r"ACCELERATE_USE_FSDP is set, .* launch with torchrun"):
        arguments(tmp_path)


def introductions(folder):
    """What a training prints of its engine."""
    from contextlib import redirect_stdout
    from io import StringIO

    out = StringIO()
    with launched(), redirect_stdout(out):
        trainer, _ = train(3, folder, {})
        trainer.accelerator.free_memory()
    return [line for line in out.getvalue().splitlines() if line.startswith("zero3d: ")]


def test_one_line_says_that_zero3d_trains_and_with_what(ranks, tmp_path):
    (said,), others = ranks(2, introductions, tmp_path)
    assert re.fullmatch(r"zero3d: ZeRO stage 3, 2 ranks, \d+\.\d MB of model states on rank 0", said)
    assert others == []


def compiled(folder, options):
    """What is logged, the engine's notes, and whether the model is a plain one after training."""
    import os

    try:
        with launched():
            trainer, found = train(3, folder, SAVED | {"torch_compile": True} | options)
            engine = trainer.accelerator.engine
            notes = engine.notes
            trainer.accelerator.free_memory()
            return found, notes, not any("forward" in vars(module) for module in trainer.model.modules())
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
            del os.environ[name]  # which TrainingArguments has set for whoever comes next
        torch._dynamo.reset()  # its graphs hold tensors without data


@pytest.mark.long
def test_torch_compile_compiles_blocks_with_the_curve_of_a_plain_trainer(ranks, tmp_path, plain):
    for found, (said,), _ in ranks(2, compiled, tmp_path, {"torch_compile_backend": "aot_eager"}):
        assert_same(found, plain)
        assert "2 x LlamaDecoderLayer" in said
    with pytest.raises(zero3d.ConfigError, match="reduce-overhead replays CUDA graphs"):
        compiled(tmp_path, {"torch_compile_backend": "eager", "torch_compile_mode": "reduce-overhead"})


def test_evaluation_alone_needs_no_engine(ranks, tmp_path):
    def evaluated(kind):
        import transformers

        from zero3d.ways.huggingface.transformers import Trainer

        made = transformers.Trainer if kind == "plain" else Trainer
        trainer = made(hf("llama"), arguments(tmp_path), eval_dataset=Rows(8, seed=1))
        return trainer.evaluate()["eval_loss"], getattr(trainer.accelerator, "engine", None)

    assert evaluated("ours") == (evaluated("plain")[0], None)


def searched(kind, folder):
    """Two trainings of one trainer, whose model is made anew for each."""
    trainer, first = train(kind, folder, {"max_steps": 4}, model=None, given={"model_init": lambda: hf("llama")})
    with launched():
        trainer.args.learning_rate = 3e-3
        trainer.train()
    return first, losses_of(trainer)


@pytest.mark.long
def test_a_trainer_trains_again_from_a_new_model(ranks, tmp_path):
    wanted = ranks(1, searched, "plain", tmp_path / "plain")[0]
    for found in ranks(2, searched, 2, tmp_path / "ours"):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    assert wanted[0] != wanted[1]


def longer(kind, folder):
    """A trainer that is asked to train on, to more steps."""
    trainer, first = train(kind, folder, {"max_steps": 4})
    with launched():
        trainer.args.max_steps = 3
        trainer.train()
    return first, losses_of(trainer)


@pytest.mark.long
def test_a_trainer_trains_on_with_its_engine(ranks, tmp_path):
    wanted = ranks(1, longer, "plain", tmp_path / "plain")[0]
    for found in ranks(2, longer, 3, tmp_path / "ours"):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


def classifier(kind="classes"):
    """A model that gives each sequence a class, or one number: a reward."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, pad_token_id=0,
                         num_attention_heads=2, num_labels=3 if kind == "classes" else 1)  # fmt: skip
    return LlamaForSequenceClassification(config)


class Judged(Rows):
    """Sequences with a class, or with a score."""

    def __init__(self, scores=False, **options):
        super().__init__(**options)
        self.scores = scores

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row | {"labels": float(index % 7) / 7 if self.scores else index % 3}


def judging(kind, folder, scores):
    given = {"train_dataset": Judged(scores, rows=16), "eval_dataset": Judged(scores, rows=8, seed=1)}
    return logged(kind, folder, {"eval_strategy": "steps", "eval_steps": 6}, given,
                  partial(classifier, "reward" if scores else "classes"))  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("scores", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sequence_classification_and_reward_models(ranks, tmp_path, scores):
    wanted = ranks(2, judging, "plain", tmp_path / "plain", scores)[0]  # the Trainer's factors differ on one process
    for found in ranks(2, judging, 3, tmp_path / "ours", scores):
        assert_same(found, wanted)


def half(kind, folder, full_eval="bf16_full_eval"):
    options = {"bf16": True, full_eval: True, "eval_strategy": "steps", "eval_steps": 3}
    trainer, found = train(kind, folder, options)
    with launched():
        after = trainer.evaluate()["eval_loss"]
    return found, after, next(trainer.model.parameters()).dtype


def test_bf16_has_masters_and_stays_close_to_autocast(ranks, tmp_path):
    (wanted, held_out), *_ = ranks(1, half, "plain", tmp_path / "plain")[0]
    (steps, found), after, dtype = ranks(2, half, 3, tmp_path / "ours")[0]
    assert dtype == torch.float32  # masters, and autocast
    assert [step[0] for step in steps] == pytest.approx([step[0] for step in wanted], rel=5e-3)
    assert found == pytest.approx(held_out, rel=5e-3)
    assert after == pytest.approx(found[-1], rel=5e-3)


def logits_in(kind, folder, given):
    """Dtypes of the logits that a trainer's loss has, in training and in an evaluation."""
    import transformers

    from zero3d.ways.huggingface.transformers import Trainer

    seen = []

    class Noting(transformers.Trainer if kind == "plain" else Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **options):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
            seen.append(outputs.logits.dtype)
            return (loss, outputs) if return_outputs else loss

    with launched():
        args = arguments(folder, bf16=True, max_steps=1)
        trainer = Noting(hf("llama"), args, train_dataset=Rows(8), eval_dataset=Rows(8), **given)
        trainer.train()
        trainer.evaluate()
    return set(seen)


@pytest.mark.parametrize(("given", "dtypes"), [
    ({"stage": 2}, {torch.float32}),
    ({"stage": 2, "options": {"autocast": False}}, {torch.bfloat16}),
])  # fmt: skip
def test_bf16_computes_in_autocast_as_a_plain_trainer_unless_options_say_otherwise(alone, tmp_path, given, dtypes):
    assert alone(logits_in, "ours", tmp_path, given) == dtypes


def test_logits_of_a_plain_trainer_in_bf16_are_fp32_which_those_of_ours_are(alone, tmp_path):
    assert alone(logits_in, "plain", tmp_path, {}) == {torch.float32}


def test_weights_of_an_engine_are_not_cast_for_an_evaluation_in_fp16(ranks, tmp_path):
    ((_, found), after, dtype), *_ = ranks(2, half, 3, tmp_path, "fp16_full_eval")
    assert dtype == torch.float32
    assert after == pytest.approx(found[-1], rel=5e-3)


def short_of_memory(kind, folder):
    """A trainer that finds its batch size: above one sequence it runs out of memory, in the middle of a window."""
    import transformers

    from zero3d.ways.huggingface.transformers import Trainer

    class Short(transformers.Trainer if kind == "plain" else Trainer):
        def compute_loss(self, model, inputs, *given, **options):
            loss = super().compute_loss(model, inputs, *given, **options)
            if len(inputs["input_ids"]) > 1 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return loss

    with launched():
        options = {} if kind == "plain" else {"stage": kind}
        args = arguments(folder, auto_find_batch_size=True, max_steps=6)
        trainer = Short(hf("llama"), args, train_dataset=Rows(), **options)
        trainer.train()
        return trainer._train_batch_size, losses_of(trainer)


@pytest.mark.long
def test_a_smaller_batch_is_found_after_running_out_of_memory(ranks, tmp_path):
    size, wanted = ranks(2, short_of_memory, "plain", tmp_path / "plain")[0]
    for found, curve in ranks(2, short_of_memory, 3, tmp_path / "ours"):
        assert found == size == 1
        assert_same(curve, wanted)


def used_after_training(folder):
    """A trained model at stage 3: read in a callback at the end, and afterwards as people do."""
    import copy
    import pickle

    from transformers import TrainerCallback

    from zero3d.ways.huggingface.transformers import Trainer

    seen = []

    class Reads(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **others):
            seen.append({name: float(p.double().sum()) for name, p in model.named_parameters()})

    with launched():
        model = hf("llama")
        trainer = Trainer(model, arguments(folder), stage=3, train_dataset=Rows(16), callbacks=[Reads()])
        trainer.train()
        trainer.save_model()
        assert model.lm_head.weight[0, 0].item() == model.state_dict()["lm_head.weight"][0, 0].item()
        with pytest.raises(zero3d.ReleasedParameterError, match=r"engine\.close\(\) when training is over"):
            copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.add_(1)  # kept, and trained on from
        trainer.accelerator.close_engine()
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        seen.append({name: float(p.double().sum()) for name, p in twin.named_parameters()})
        return seen, twin.lm_head.weight.numel()


def test_after_training_a_model_can_be_read_saved_and_used(ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    (of_callback, of_twin), elements = ranks(2, used_after_training, tmp_path)[1]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert of_callback == {name: float(p.double().sum()) for name, p in saved.named_parameters()}
    assert of_twin.pop("lm_head.weight") == pytest.approx(of_callback.pop("lm_head.weight") + elements)
    assert of_twin == of_callback


def stages_of_training(kind, folder, fails):
    """Losses of two Trainers of one model, one after the other; the first may be interrupted at its third step."""
    import transformers

    from zero3d.ways.huggingface.transformers import Trainer

    class Interrupts(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if fails and state.global_step == 3:
                raise KeyboardInterrupt

    with launched():
        model, found = hf("llama"), []
        for number in range(2):
            made = transformers.Trainer if kind == "plain" else functools.partial(Trainer, stage=kind)
            trainer = made(
                model, arguments(folder, learning_rate=1e-2 / (number + 1)), train_dataset=Rows(16),
                callbacks=[] if number else [Interrupts()],
            )  # fmt: skip
            try:
                trainer.train()
            except KeyboardInterrupt:
                assert fails
            found.append(losses_of(trainer))
        return found


@pytest.mark.long
@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.long), True], ids=["in-stages", "interrupted"])
def test_a_second_trainer_trains_the_model_of_the_first(ranks, tmp_path, fails):
    wanted = ranks(1, stages_of_training, "plain", tmp_path / "plain", fails)[0]
    for found in ranks(2, stages_of_training, 3, tmp_path / "ours", fails):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


def bytes_after(folder, trainers):
    """Bytes of all tensors, and process groups, after each of several Trainers of one model."""
    import gc

    from torch._subclasses.fake_tensor import is_fake  # tensors without data, of graphs that a test before has compiled
    from torch.distributed.distributed_c10d import _world

    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        model, found = hf("llama"), []
        for _ in range(trainers):
            Trainer(model, arguments(folder, max_steps=2), stage=3, train_dataset=Rows(16)).train()
            gc.collect()
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects()
                        if isinstance(t, torch.Tensor) and not is_fake(t) and t.device.type == "cpu"}  # fmt: skip
            found.append((sum(storages.values()), len(_world.pg_map)))
        return found


@pytest.mark.long
def test_memory_after_several_trainers_is_that_after_one(ranks, tmp_path):
    for found in ranks(2, bytes_after, tmp_path, 4):
        one, last = found[1], found[-1]  # the first one's has less: torch and transformers make some things once
        assert last[1:] == one[1:]
        assert last[0] == pytest.approx(one[0], abs=1000)  # some numbers: a model's weights take 160 kB


def without_room(folder):
    from unittest import mock

    from zero3d.blueprint.auto import Room
    from zero3d.engine import unshard
    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        model = hf("llama")
        trainer = Trainer(model, arguments(folder, max_steps=2), stage=3, train_dataset=Rows(16))
        with (
            mock.patch.object(unshard, "room_of", return_value=Room(1000, None, False)),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            trainer.train()
        words = [str(one.message) for one in said if "stays sharded" in str(one.message)]
        with pytest.raises(zero3d.ReleasedParameterError, match="full_params"):
            model.state_dict()
        trainer.save_model()
        return words


def test_a_model_without_room_stays_sharded_and_says_so(ranks, tmp_path):
    said, silent = ranks(2, without_room, tmp_path)
    assert len(said) == 1
    assert "takes" in said[0]
    assert "has room for 1.00 kB" in said[0]
    assert silent == []


def changed_between(folder, how):
    """A model whose head is replaced, that gets more tokens, or adapters that are merged, between two Trainers."""
    from peft import LoraConfig, get_peft_model

    from zero3d.ways.huggingface.transformers import Trainer

    def train_on(module, steps=2):
        trainer = Trainer(module, arguments(folder, max_steps=steps), stage=3, train_dataset=Rows(16))
        trainer.train()
        return trainer

    with launched():
        model = hf("llama")
        trainer = train_on(model)
        trainer.accelerator.save_state(f"{folder}/state")
        trainer.accelerator.load_state(f"{folder}/state")
        body = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        if how == "head":
            model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB, bias=False)
            head = model.lm_head.weight.detach().clone()
            trainer.accelerator.close_engine()
            return torch.equal(model.lm_head.weight, head), torch.equal(model.model.layers[0].mlp.up_proj.weight, body)
        if how == "tokens":
            model.resize_token_embeddings(VOCAB + 3)
            rows = model.get_input_embeddings().weight.detach().clone()
            trainer.accelerator.close_engine()
            kept = torch.equal(model.get_input_embeddings().weight, rows)
            train_on(model)
            return kept, model.get_input_embeddings().weight.shape[0] == model.lm_head.weight.shape[0] == VOCAB + 3
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
        trainer = train_on(adapted)
        frozen = torch.equal(adapted.base_model.model.model.layers[0].mlp.up_proj.weight, body)
        merged = adapted.merge_and_unload(safe_merge=True)
        whole = merged.model.layers[0].self_attn.q_proj.weight.detach().clone()
        trainer.accelerator.close_engine()
        frozen &= torch.equal(merged.model.layers[0].self_attn.q_proj.weight, whole)
        merged.requires_grad_(True)
        train_on(merged)
        return frozen, not torch.equal(merged.model.layers[0].mlp.up_proj.weight, body)


@pytest.mark.parametrize(
    "how", [pytest.param("head", marks=pytest.mark.long), "tokens", pytest.param("adapters", marks=pytest.mark.long)]
)
def test_a_model_may_change_between_two_trainers(ranks, tmp_path, how):
    assert ranks(2, changed_between, tmp_path, how) == [(True, True)] * 2


def groups_after(folder, trainings):
    """Process groups after each training of one Trainer, whose model is made anew for each."""
    from torch.distributed.distributed_c10d import _world

    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        args, found = arguments(folder, max_steps=2), []
        trainer = Trainer(model_init=lambda: hf("llama"), args=args, stage=3, train_dataset=Rows(16))
        for _ in range(trainings):
            trainer.train()
            found.append(len(_world.pg_map))
        return found


@pytest.mark.long
def test_trainings_of_new_models_leave_no_groups(ranks, tmp_path):
    for found in ranks(2, groups_after, tmp_path, 3):
        assert len(set(found)) == 1
