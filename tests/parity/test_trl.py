"""TRL's SFT, DPO, reward, GRPO and RLOO trainers, unmodified, after one line: `patch(stage=...)`. Needs the extra trl."""

import json
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from bases import base_folder
from models import VOCAB, hf
from safetensors.torch import load_file
from tensors import assert_near
from trainers import arguments, launched, losses_of

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra trl")]
CLOSE = {"rel": 1e-5, "abs": 1e-7}
LETTERS = "abcdefghijklmnopqrstuvwxyz ?!."


def tokenizer():
    """One token per letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {letter: number for number, letter in enumerate(["<pad>", "<end>", *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<end>")


def sentences(rows):
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(6, 20, (rows,), generator=draw).tolist()
    return ["".join(LETTERS[i] for i in torch.randint(0, 26, (n,), generator=draw)) for n in lengths]


def script(words):
    """TRL's own script of supervised fine-tuning in short: parse, load, train, save."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import (
        ModelConfig,
        ScriptArguments,
        SFTConfig,
        SFTTrainer,
        TrlParser,
        get_peft_config,
        get_quantization_config,
    )

    sys.argv = ["sft.py", *words]
    script_args, training_args, model_args = TrlParser(
        (ScriptArguments, SFTConfig, ModelConfig)
    ).parse_args_and_config()
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, dtype=torch.float32, quantization_config=get_quantization_config(model_args)
    )
    dataset = load_dataset("json", data_files=script_args.dataset_name)
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        processing_class=AutoTokenizer.from_pretrained(model_args.model_name_or_path),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    return trainer


def fine_tuned(stage, folder, more=(), sp=1):
    """Losses of the script, in a process that is patched (stage None: not)."""
    import zero3d
    from zero3d.ways.huggingface.transformers import patch

    options = {"mesh": zero3d.Mesh(sp=sp)} if sp > 1 else {}
    undo = (lambda: None) if stage is None else patch(stage=stage, options=options)
    try:
        with launched():
            arguments(folder)  # takes torchrun's environment before the script asks for it
            torch.manual_seed(0)  # adapters are drawn before the Trainer seeds
            trainer = script([
                "--model_name_or_path", f"{folder}/model", "--dataset_name", f"{folder}/rows.jsonl",
                "--output_dir", f"{folder}/{stage}", "--use_cpu", "true", "--bf16", "false", "--report_to", "none",
                "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", "12",
                "--logging_steps", "1", "--learning_rate", "1e-2", "--max_length", "24", "--save_strategy", "no", *more,
            ])  # fmt: skip
            engine = getattr(trainer.accelerator, "engine", None)
            assert stage == (None if engine is None else engine.stage)
            return losses_of(trainer)[0]
    finally:
        undo()


@pytest.fixture
def folder(tmp_path):
    hf("llama", vocab=VOCAB).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences(48)))
    return tmp_path


@pytest.mark.parametrize("more", [(), ("--packing", "true", "--packing_strategy", "wrapped"), ("--use_peft", "true")])
def test_a_script_of_trls_fine_tunes_at_stage_3_by_one_line(ranks, folder, more):
    wanted = ranks(2, fine_tuned, None, folder, more)[0]
    for found in ranks(2, fine_tuned, 3, folder, more):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)
    assert wanted[-1][0] < wanted[0][0]


@pytest.fixture
def wide(tmp_path):
    """A model whose rows 64 divides: of others bitsandbytes' kernel decodes something else than it has quantised."""
    base_folder(tmp_path / "model", hidden_size=64, intermediate_size=64)
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences(48)))
    return tmp_path


FOUR_BITS = ("--use_peft", "true", "--lora_dropout", "0", "--load_in_4bit", "true")


@pytest.mark.parametrize("more", [
    (), ("--use_bnb_nested_quant", "true", "--bnb_4bit_quant_storage", "bfloat16"), ("--use_rslora", "true"),
])  # fmt: skip
def test_a_script_of_trls_fine_tunes_beside_four_bits(ranks, wide, more):
    wanted = ranks(2, fine_tuned, None, wide, (*FOUR_BITS, *more))[0]
    for found in ranks(2, fine_tuned, 3, wide, (*FOUR_BITS, *more)):
        assert found[0][0] == pytest.approx(wanted[0][0], **CLOSE)  # of the base alone: B is zero
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-2)  # whose adapters TRL has put into bf16
    assert wanted[-1][0] < wanted[0][0]
    saved, usual = (load_file(wide / stage / "adapter_model.safetensors") for stage in ("3", "None"))
    assert {name: values.shape for name, values in saved.items()} == {
        name: values.shape for name, values in usual.items()
    }
    assert all(values.isfinite().all() for values in saved.values())


@pytest.mark.parametrize("more", [(), ("--packing", "true"), ("--use_peft", "true", "--lora_dropout", "0")])
def test_a_script_of_trls_fine_tunes_on_shared_sequences(ranks, folder, more):
    """With packing documents are without padding, in one row: TRL hands their ends on, too."""
    wanted = ranks(2, fine_tuned, None, folder, more)[0]
    for found in ranks(2, fine_tuned, 3, folder, (*more, "--per_device_train_batch_size", "4"), 2):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)


def four_bits():
    """What `from_pretrained` is given for a base in 4 bits."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")


def preferring(stage, folder, adapters, bits=32, averages=False, **more):
    """Losses of DPO, whose reference is a model of its own, or the base below the adapters."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import BEMACallback, DPOConfig, DPOTrainer

    from zero3d.ways.huggingface.transformers import patch

    undo = (lambda: None) if stage is None else patch(stage=stage)
    try:
        with launched():
            texts = sentences(48)
            rows = {"prompt": texts[:16], "chosen": texts[16:32], "rejected": texts[32:]}
            args = arguments(
                folder / str(stage),
                DPOConfig,
                max_steps=6,
                learning_rate=1e-3,
                bf16=False,
                max_length=48,
                model_init_kwargs={"dtype": "float32", "quantization_config": four_bits() if bits == 4 else None},
                **more,
            )
            trainer = DPOTrainer(
                str(folder / "model"), args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer(),
                ref_model=None, peft_config=LoraConfig(r=4, target_modules=["q_proj"]) if adapters else None,
                callbacks=[BEMACallback(update_freq=2, update_after=1)] if averages else None,
            )  # fmt: skip
            trainer.train()
            return losses_of(trainer)[0]
    finally:
        undo()


@pytest.mark.parametrize("adapters", [False, True])
def test_preferences_are_learned_with_a_reference_model(ranks, folder, adapters):
    wanted = ranks(2, preferring, None, folder, adapters)[0]
    assert len(wanted) == 6
    for found in ranks(2, preferring, 3, folder, adapters):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)


def test_a_reference_model_follows_the_model_in_training_and_weights_are_averaged(ranks, folder):
    more = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    wanted = ranks(2, partial(preferring, averages=True, **more), None, folder, False)[0]
    averaged = load_file(folder / "None" / "bema" / "model.safetensors")
    for found in ranks(2, partial(preferring, averages=True, **more), 3, folder, False):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)
    assert_near(load_file(folder / "3" / "bema" / "model.safetensors"), averaged, 1e-4, 1e-3)
    assert wanted != ranks(2, preferring, None, folder, False)[0]


def test_preferences_are_learned_beside_four_bits(ranks, wide):
    wanted = ranks(2, preferring, None, wide, True, 4)[0]
    for found in ranks(2, preferring, 3, wide, True, 4):
        assert found[0][0] == pytest.approx(wanted[0][0], **CLOSE)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-2)


def rewarding(stage, folder):
    """Losses of a reward model, which learns to prefer."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    from zero3d.ways.huggingface.transformers import patch

    undo = (lambda: None) if stage is None else patch(stage=stage)
    try:
        with launched():
            texts = sentences(32)
            rows = Dataset.from_dict({"chosen": texts[:16], "rejected": texts[16:]})
            args = arguments(folder / str(stage), RewardConfig, bf16=False, max_length=24, max_steps=4)
            torch.manual_seed(0)
            model = LlamaForSequenceClassification(LlamaConfig(
                vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                pad_token_id=0, num_labels=1,
            ))  # fmt: skip
            trainer = RewardTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer())
            trainer.train()
            return losses_of(trainer)[0]
    finally:
        undo()


def test_a_reward_model_is_learned(ranks, folder):
    wanted = ranks(2, rewarding, None, folder)[0]
    assert len(wanted) == 4
    for found in ranks(2, rewarding, 3, folder):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)


def grouped(stage, folder, adapters=False, bits=32, kind="GRPO", gather=True):
    """Losses and rewards of GRPO or RLOO, whose completions the model in training writes: more of the letter e is better.

    Its reference is a model of its own, or the base below the adapters. gather: TRL's ds3_gather_for_generation.
    """
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    from zero3d.ways.huggingface.transformers import patch

    def reward(completions, **others):
        return [text.count("e") / (1 + len(text)) for text in completions]

    undo = (lambda: None) if stage is None else patch(stage=stage)
    try:
        with launched():
            args = arguments(
                folder / str(stage), getattr(trl, f"{kind}Config"), bf16=False, max_steps=4, num_generations=4,
                max_completion_length=8, per_device_train_batch_size=4, learning_rate=1e-3, beta=0.1,
                model_init_kwargs={"dtype": "float32"}, ds3_gather_for_generation=gather,
            )  # fmt: skip
            beside = {"quantization_config": four_bits()} if bits == 4 else {}
            beside |= {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"])} if adapters else {}
            torch.manual_seed(0)  # adapters are drawn before the Trainer seeds
            trainer = getattr(trl, f"{kind}Trainer")(
                str(folder / "model"), reward_funcs=reward, args=args, processing_class=tokenizer(),
                train_dataset=Dataset.from_dict({"prompt": sentences(16)}), **beside,
            )  # fmt: skip
            trainer.train()
            rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
            return losses_of(trainer)[0], rewards
    finally:
        undo()


@pytest.mark.parametrize("adapters", [False, True])
def test_groups_of_completions_come_from_the_weights_in_training(ranks, folder, adapters):
    wanted, rewards = ranks(2, grouped, None, folder, adapters)[0]
    assert len(set(rewards)) > 1
    for found, rewarded in ranks(2, grouped, 3, folder, adapters):
        assert rewarded == pytest.approx(rewards, **CLOSE)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, **CLOSE)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_whole_weights_or_units_by_use_write_the_completions_of_stage_2(ranks, folder, kind, gather):
    wanted = ranks(2, grouped, 2, folder, False, 32, kind)
    assert ranks(2, grouped, 3, folder, False, 32, kind, gather) == wanted
    assert len(set(wanted[0][1])) > 1


def test_completions_are_sampled_from_adapters_beside_four_bits(ranks, wide):
    _, wanted = ranks(2, grouped, None, wide, True, 4)[0]
    for losses, rewards in ranks(2, grouped, 3, wide, True, 4):
        assert rewards[0] == wanted[0]  # later ones are of adapters that TRL itself has put into bf16
        assert len(losses) == 4
        assert len(set(rewards)) > 1
