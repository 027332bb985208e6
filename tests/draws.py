"""The differential net: one seed draws a model, its data and settings, and a way in; the plain library says what is right.

    draw(way, seed)      what is drawn; a function of both, so that a failure is told by its name
    plain, ours          losses, norms and weights of a few steps by transformers, PEFT, Accelerate or PyTorch alone, and
                         by zero3d, each on every rank of a group of two

    python tests/draws.py --ways trainer loop --seeds 100:140     (more of them, beside the tests; prints what differs)

What zero3d refuses is no difference: its error says so, before a step.
"""

import argparse
import random
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

VOCAB, LENGTH, STEPS = 64, 12, 2
IGNORED = -100
PAD, EOS = 2, 1
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 0,
    "eos_token_id": EOS,
}  # fmt: skip
ENCODER = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


# --- models: what their loss is a mean over -----------------------------------------------------

SHIFTED, TOKENS, ROWS = "labels of the next token", "labels of each token", "a label of each row"


def _llama(t):
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES))


def _gpt2(t):
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=EOS,
                     pad_token_id=PAD, **off)
    )  # fmt: skip


def _opt(t):
    given = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
    return t.OPTForCausalLM(t.OPTConfig(**SIZES, **given))


def _experts(t):
    given = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SIZES, **given))


def _masked(t):
    return t.BertForMaskedLM(t.BertConfig(**ENCODER))


def _tagged(t):
    return t.BertForTokenClassification(t.BertConfig(**ENCODER, num_labels=5))


def _translated(t):
    return t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                   decoder_start_token_id=0, pad_token_id=PAD, eos_token_id=EOS)
    )  # fmt: skip


def _classified(t):
    return t.LlamaForSequenceClassification(t.LlamaConfig(**SIZES, num_labels=3))


def _rewarded(t):
    return t.LlamaForSequenceClassification(t.LlamaConfig(**SIZES, num_labels=1))


def _encoded(t):
    return t.BertForSequenceClassification(t.BertConfig(**ENCODER, num_labels=3))


def _questioned(t):
    return t.BertForQuestionAnswering(t.BertConfig(**ENCODER))


def _many_labels(t):
    return t.BertForSequenceClassification(
        t.BertConfig(**ENCODER, num_labels=3, problem_type="multi_label_classification")
    )


def _numbers(t):
    return t.LlamaForSequenceClassification(t.LlamaConfig(**SIZES, num_labels=2, problem_type="regression"))


MODELS = {  # name -> (what makes it, what its loss is a mean over, its labels: one of so many classes, 0 or a shape: numbers)
    "llama": (_llama, SHIFTED, VOCAB), "gpt2": (_gpt2, SHIFTED, VOCAB), "opt": (_opt, SHIFTED, VOCAB),
    "qwen3_moe": (_experts, SHIFTED, VOCAB), "bert_masked": (_masked, TOKENS, VOCAB), "bert_tags": (_tagged, TOKENS, 5),
    "t5": (_translated, TOKENS, VOCAB), "llama_classes": (_classified, ROWS, 3), "llama_reward": (_rewarded, ROWS, 0),
    "bert_classes": (_encoded, ROWS, 3), "bert_questions": (_questioned, ROWS, LENGTH),
    "bert_many": (_many_labels, ROWS, (3,)), "llama_numbers": (_numbers, ROWS, (2,)),
}  # fmt: skip
CAUSAL = ("llama", "gpt2", "opt", "qwen3_moe")
LORA = {
    "llama": ["q_proj", "down_proj"], "opt": ["q_proj", "fc1"], "gpt2": ["c_attn"], "bert_masked": ["query", "value"],
    "llama_classes": ["q_proj", "v_proj"], "t5": ["q", "v"], "qwen3_moe": ["q_proj", "o_proj"],
}  # fmt: skip


# --- draws --------------------------------------------------------------------------------------

WAYS = ("train_batch", "loop", "deepspeed", "accelerate", "trainer", "files", "generate")


@dataclass(frozen=True)
class Draw:
    """What one seed has drawn for one way in."""

    way: str
    seed: int
    model: str
    stage: int
    size: int  # rows of a micro-batch
    accumulate: int  # micro-batches of a step on each rank
    padding: str  # none, left, right
    packed: bool  # several documents in a row, told apart by position_ids
    lora: bool
    frozen: str  # parameters whose names hold it, "" for none
    recompute: bool
    sgd: bool
    clip: float | None
    uneven: bool  # every second micro-batch has one row more
    hollow: bool  # the second micro-batch of a step has no target
    axis: str  # "" for dp alone, else an axis of two ranks
    options: tuple  # of the way itself: (name, value) pairs

    def __str__(self):
        shown = {name: value for name, value in vars(self).items() if value not in ("", False, None, ())}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def draw(way, seed):
    """What `seed` draws for `way`."""
    dice = random.Random(f"{way} {seed}")
    maybe = lambda chance: dice.random() < chance  # noqa: E731
    model = dice.choice(OF_WAY.get(way, [*MODELS, *CAUSAL]))
    causal = model in CAUSAL
    packed = way not in ("files", "generate") and causal and model != "opt" and maybe(0.25)
    lora = way not in ("files", "generate") and model in LORA and maybe(0.3)
    cuts = way == "generate" or (way == "train_batch" and causal and not lora)
    axis = (
        dice.choice(["", "tp", "pp", "pp", "sp"] if way == "generate" else ["", "", "", "tp", "pp", "sp"])
        if cuts
        else ""
    )
    return Draw(
        way=way, seed=seed, model=model, stage=dice.choice([0, 1, 2, 3, 3]), size=dice.choice([1, 2, 3]),
        accumulate=dice.choice([1, 1, 2, 3]), padding="none" if packed else dice.choice(["none", "left", "right"]),
        packed=packed, lora=lora, frozen=dice.choice(["", "", "layer.0.", "layers.0.", "norm", "embed"]),
        recompute=model != "t5" and maybe(0.25), sgd=maybe(0.5), clip=dice.choice([None, 0.05, 1e3]), axis=axis,
        uneven=way in ("train_batch", "loop") and axis != "pp" and maybe(0.4),
        hollow=way == "train_batch" and MODELS[model][1] != ROWS and maybe(0.4),
        options=tuple(sorted(OPTIONS.get(way, _nothing)(dice, model).items())),
    )  # fmt: skip


def _nothing(dice, model):
    return {}


def _of_trainer(dice, model):
    return {
        "label_smoothing_factor": dice.choice([0.0, 0.0, 0.1]) if MODELS[model][1] != ROWS else 0.0, "max_grad_norm": dice.choice([0.0, 0.05, 1.0]),
        "average_tokens_across_devices": dice.choice([True, False]), "weight_decay": dice.choice([0.0, 0.5]),
        "lr_scheduler_type": dice.choice(["constant", "linear", "cosine"]), "warmup_steps": dice.choice([0, 1]),
        "train_sampling_strategy": dice.choice(["random", "group_by_length"]),
        "gradient_checkpointing": dice.choice([False, False, True]), "dataloader_drop_last": dice.choice([True, False]),
        "optim": dice.choice(["adamw_torch", "adamw_torch_fused", "sgd"]),
        "prediction_loss_only": dice.choice([True, False]), "seed": dice.randrange(100),
    }  # fmt: skip


def _of_accelerate(dice, model):
    return {
        "split_batches": dice.choice([False, False, True]), "dispatch_batches": dice.choice([None, True]), "drop_last": dice.choice([False, True]),
        "rows": dice.choice([8, 11, 13]), "guard": dice.choice([False, True]), "skip": dice.choice([None, 1]),
    }  # fmt: skip


def _of_deepspeed(dice, model):
    return {"own_backward": dice.choice([False, True])}


def _of_files(dice, model):
    kind = dice.choice(["texts", "completions", "chats"])
    return {
        "kind": kind, "tokenizer": dice.choice(["bytes", "words", "pieces"]), "marked": dice.choice([False, True]),
        "packing": dice.choice([False, "best_fit", "best_fit"]), "documents": dice.choice([4, 6, 8]),
        "weight_decay": dice.choice([0.0, 20.0]), "starts": dice.choice([False, True]),
    }  # fmt: skip


def _of_generate(dice, model):
    some = lambda chance, value: value if dice.random() < chance else None  # noqa: E731
    chosen = {
        "repetition_penalty": some(0.3, 2.5), "min_new_tokens": some(0.3, 5), "no_repeat_ngram_size": some(0.2, 1),
        "suppress_tokens": some(0.3, tuple(dice.sample(range(3, VOCAB), 9))), "eos_token_id": some(0.5, tuple(
            dice.sample(range(3, VOCAB), 6))), "bad_words_ids": some(0.2, ((dice.randrange(3, VOCAB),),)),
        "begin_suppress_tokens": some(0.2, tuple(dice.sample(range(3, VOCAB), 9))), "forced_eos_token_id": some(0.2, EOS),
        "exponential_decay_length_penalty": some(0.1, (2, 1.5)),
    }  # fmt: skip
    return {name: value for name, value in chosen.items() if value is not None} | {"mask": dice.choice([False, True])}


OPTIONS = {
    "trainer": _of_trainer, "accelerate": _of_accelerate, "deepspeed": _of_deepspeed, "files": _of_files,
    "generate": _of_generate,
}  # fmt: skip
OF_WAY = {"files": ["llama", "gpt2", "llava", "qwen2_5_vl", "qwen3"], "generate": ["llama", "gpt2", "opt"]}


# --- models and rows of a draw ------------------------------------------------------------------


def make(draw):
    """The model of a draw, the same weights at every call, in training mode."""
    import transformers as t

    torch.manual_seed(5)
    model = MODELS[draw.model][0](t)
    with torch.no_grad():  # biases and norms that matter; sharper attention
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1) if p.dim() == 1 else p.mul_(2.0)
    if draw.lora:
        from peft import LoraConfig, get_peft_model

        task = {"task_type": "SEQ_CLS"} if draw.model == "llama_classes" else {}
        model = get_peft_model(model, LoraConfig(r=2, target_modules=LORA[draw.model], init_lora_weights=False, **task))
    for name, p in model.named_parameters():
        if draw.frozen and draw.frozen in name:
            p.requires_grad_(False)
    if draw.recompute and draw.way != "trainer":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if draw.lora:
            model.enable_input_require_grads()
    return model.train()


def row(draw, number):
    """Row `number` of the data, [LENGTH] and labels; another length of text and of targets for each."""
    dice = torch.Generator().manual_seed(1000 * draw.seed + number)
    _, over, classes = MODELS[draw.model]
    ids = torch.randint(3, VOCAB, (LENGTH,), generator=dice)
    text = LENGTH if draw.padding == "none" else int(torch.randint(4, LENGTH + 1, (1,), generator=dice))
    is_text = torch.arange(LENGTH) < text if draw.padding != "left" else torch.arange(LENGTH) >= LENGTH - text
    made = {"input_ids": ids.where(is_text, torch.tensor(PAD)), "attention_mask": is_text.long()}
    if draw.packed:
        first = 3 + number % 5
        made["position_ids"] = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        del made["attention_mask"]
    if over == ROWS:
        return made | _labels_of_row(draw, classes, dice)
    labels = ids.clone() if over == SHIFTED else torch.randint(classes, (LENGTH,), generator=dice)
    hidden = torch.randint(0, text - 2, (1,), generator=dice).item()
    keep = is_text & (is_text.cumsum(0) > hidden)
    if over == TOKENS:
        keep &= torch.rand(LENGTH, generator=dice) < 0.6
        keep[is_text.nonzero()[-1]] = True
    if draw.packed:
        keep &= made["position_ids"] > 0
    return made | {"labels": labels.where(keep, torch.tensor(IGNORED))}


def _labels_of_row(draw, classes, dice):
    if isinstance(classes, tuple):
        return {"labels": (torch.rand(classes, generator=dice) < 0.5).float()}
    if draw.model == "bert_questions":
        places = torch.randint(classes, (2,), generator=dice)
        return {"start_positions": places.min(), "end_positions": places.max()}
    return {"labels": torch.randint(classes, (), generator=dice) if classes else torch.randn((), generator=dice)}


def stack(rows):
    return {name: torch.stack([one[name] for one in rows]) for name in rows[0]}


def micro_batch(draw, step, number):
    """Micro-batch `number` of a step: of all ranks, one after the other."""
    first = (draw.size + 1) * (step * 100 + number)
    made = stack([row(draw, first + k) for k in range(draw.size + (draw.uneven and number % 2))])
    if draw.hollow and number == 1:
        made["labels"] = torch.full_like(made["labels"], IGNORED)
    return made


def targets(draw, batch):
    """How many losses the model's own mean is over."""
    _, over, _ = MODELS[draw.model]
    return len(batch["input_ids"]) if over == ROWS else int((batch["labels"][..., over == SHIFTED :] != IGNORED).sum())


def optimizer(draw, params):
    return torch.optim.SGD(params, lr=0.05) if draw.sgd else torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def weights_of(model):
    return {name: p.detach().float().clone() for name, p in model.named_parameters() if p.requires_grad}


@dataclass
class Outcome:
    """Losses and norms by step, evaluations, and the trained weights in the end (None where they are not compared)."""

    losses: list
    norms: list
    evaluated: list
    weights: dict | None = None


class Refused(Exception):
    """zero3d refuses what was drawn."""


# --- plain PyTorch, and the engine --------------------------------------------------------------


def plain_steps(draw, weigh):
    """Steps over all ranks' micro-batches in one process; weigh: by targets, or each alike."""
    model = make(draw)
    params = [p for p in model.parameters() if p.requires_grad]
    own, found = optimizer(draw, params), Outcome([], [], [])
    for step in range(STEPS):
        batches = [micro_batch(draw, step, k) for k in range(2 * draw.accumulate)]
        counts = [targets(draw, batch) if weigh else 1 for batch in batches]
        with torch.no_grad():
            model.eval()
            found.evaluated.append(_mean(model, batches, counts).item())
            model.train()
        loss = _mean(model, batches, counts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, draw.clip or 1e9)
        own.step()
        own.zero_grad()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    return _with_weights(found, draw, model)


def _mean(model, batches, counts):
    options = {"use_cache": False} if _caches(model) else {}
    terms = [model(**batch, **options).loss * count for batch, count in zip(batches, counts, strict=True) if count]
    return sum(terms) / sum(counts)


def _caches(model):
    return hasattr(model.config, "use_cache")


def _with_weights(found, draw, model):
    if draw.sgd:
        found.weights = weights_of(model)
    return found


def _engine(draw):
    import zero3d

    model = make(draw)
    mesh = zero3d.Mesh(**({draw.axis: 2} if draw.axis else {}))
    make_optimizer = lambda params: optimizer(draw, params)  # noqa: E731
    return zero3d.Engine(model, mesh=mesh, stage=draw.stage, precision="fp32", clip_norm=draw.clip or 1e9,
                         optimizer=make_optimizer, accumulate=draw.accumulate)  # fmt: skip


def _mine(draw, step):
    """This rank's micro-batches of a step: every second one, or all where ranks share each."""
    rank = dist.get_rank()
    numbers = range(2 * draw.accumulate) if draw.axis else range(rank, 2 * draw.accumulate, 2)
    return [micro_batch(draw, step, k) for k in numbers]


def by_train_batch(draw):
    """Engine.train_batch and evaluate."""
    engine, found = _engine(draw), Outcome([], [], [])
    for step in range(STEPS):
        found.evaluated.append(engine.evaluate(_mine(draw, step)).item())
        found.losses.append(engine.train_batch(_mine(draw, step)).item())
        found.norms.append(float(engine.last_step.grad_norm))
    return _whole(found, draw, engine)


def by_loop(draw):
    """A loop of the program's own: forward, backward, step."""
    engine, found = _engine(draw), Outcome([], [], [])
    for step in range(STEPS):
        losses = []
        for batch in _mine(draw, step):
            loss = engine(**batch, use_cache=False).loss if _caches(engine.module) else engine(**batch).loss
            engine.backward(loss)
            losses.append(loss.detach())
            result = engine.step()
        found.losses.append(_over_ranks(losses))
        found.norms.append(float(result.grad_norm))
    return _whole(found, draw, engine)


def _over_ranks(losses):
    mean = torch.stack([loss.float() for loss in losses]).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def _whole(found, draw, engine):
    if draw.sgd and not draw.axis:
        with engine.full_params():
            found.weights = weights_of(engine.module)
    return found


def by_deepspeed(draw):
    """A loop that is written for DeepSpeed."""
    from zero3d.ways import deepspeed

    options = dict(draw.options)
    kind = {"type": "SGD", "params": {"lr": 0.05}}
    if not draw.sgd:
        kind = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.999]}}
    config = {
        "train_micro_batch_size_per_gpu": draw.size, "gradient_accumulation_steps": draw.accumulate,
        "gradient_clipping": draw.clip or 1e9, "optimizer": kind, "zero_optimization": {"stage": draw.stage},
    }  # fmt: skip
    model = make(draw)
    params = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, config=config, model_parameters=params)[0]
    found = Outcome([], [], [])
    for step in range(STEPS):
        losses = []
        for batch in _mine(draw, step):
            loss = engine(**batch, use_cache=False).loss if _caches(engine.module) else engine(**batch).loss
            losses.append(loss.detach().clone())
            loss.backward() if options["own_backward"] else engine.backward(loss)
            engine.step()
        found.losses.append(_over_ranks(losses))
        found.norms.append(float(engine.get_global_grad_norm()))
    if draw.sgd:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            found.weights = weights_of(engine.module)
    return found


# --- Accelerate's loop --------------------------------------------------------------------------


class Data(torch.utils.data.Dataset):
    """Rows of a draw."""

    def __init__(self, draw, rows, first=0):
        self.draw, self.rows, self.first = draw, rows, first

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if index >= self.rows:
            raise IndexError(index)
        return row(self.draw, self.first + index)


def _logits(output):
    return output.logits if hasattr(output, "logits") else output.start_logits


def accelerated(draw, ours):
    """A loop by the book, with Accelerate's Accelerator or ours: accumulation, clipping, a guard, an evaluation."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration
    from trainers import launched

    options = dict(draw.options)
    with launched():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(0)
        loading = DataLoaderConfiguration(
            split_batches=options["split_batches"], dispatch_batches=options["dispatch_batches"]
        )  # fmt: skip
        given = {"cpu": True, "gradient_accumulation_steps": draw.accumulate, "dataloader_config": loading}
        if ours:
            from zero3d.ways.huggingface.accelerate import Accelerator

            accelerator = Accelerator(**given, stage=draw.stage)
        else:
            accelerator = accelerate.Accelerator(**given)
        model = make(draw)
        own = optimizer(draw, [p for p in model.parameters() if p.requires_grad])
        schedule = torch.optim.lr_scheduler.LinearLR(own, 0.5, 1.0, total_iters=6)
        size = draw.size * (2 if options["split_batches"] else 1)
        data = torch.utils.data.DataLoader(
            Data(draw, options["rows"]), size, collate_fn=stack, drop_last=options["drop_last"]
        )
        held_out = torch.utils.data.DataLoader(Data(draw, 5, 500), size, collate_fn=stack)
        model, own, data, held_out, schedule = accelerator.prepare(model, own, data, held_out, schedule)
        found, window = Outcome([], [], []), 0
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                found.losses.append(_over_ranks([loss.detach()]))
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), draw.clip or 1e9)
                    window += 1
                    if options["guard"]:
                        found.norms.append(float(norm))
                if not (options["guard"] and norm is not None and options["skip"] == window):
                    own.step()
                    schedule.step()
                if norm is not None and not options["guard"]:
                    found.norms.append(float(norm))
                own.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs = [accelerator.gather_for_metrics(_logits(model(**batch)).float()) for batch in held_out]
        found.evaluated = [float(output.double().abs().sum()) for output in outputs]
        if draw.sgd:
            whole = accelerator.get_state_dict(model)  # of DistributedDataParallel with its prefix
            state = {name.removeprefix("module."): tensor for name, tensor in whole.items()}
            names = [name for name, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad]
            if state:  # on rank 0 alone, of ours
                found.weights = {name: state[name].float().clone() for name in names}
        return found


# --- Trainer ------------------------------------------------------------------------------------


def trained(draw, ours, folder):
    """A Trainer of transformers, or ours."""
    import transformers
    from trainers import arguments, launched

    with launched():
        options = dict(draw.options)
        args = arguments(
            folder, per_device_train_batch_size=draw.size, per_device_eval_batch_size=2,
            gradient_accumulation_steps=draw.accumulate, max_steps=STEPS + 1, eval_strategy="steps", eval_steps=STEPS,
            learning_rate=1e-3, **options,
        )  # fmt: skip
        given = {"train_dataset": Data(draw, 6 * draw.size * draw.accumulate + 1), "eval_dataset": Data(draw, 5, 500)}
        if ours:
            from zero3d.ways.huggingface.transformers import Trainer

            trainer = Trainer(make(draw), args, data_collator=stack, stage=draw.stage, **given)
        else:
            trainer = transformers.Trainer(make(draw), args, data_collator=stack, **given)
        trainer.train()
        logs = trainer.state.log_history
        steps = [log for log in logs if "loss" in log]
        return Outcome(
            [log["loss"] for log in steps], [float(log["grad_norm"]) for log in steps],
            [log["eval_loss"] for log in logs if "eval_loss" in log],
        )  # fmt: skip


# --- files, by `zero3d train` -------------------------------------------------------------------

WORDS = [
    "the",
    "king",
    "was",
    "in",
    "his",
    "counting",
    "house",
    "a",
    "mouse",
    "ran",
    "up",
    "the",
    "clock",
    "and",
    "down",
    "it",
    "came",
    "again",
    "one",
    "two",
    "three",
    "é",
]
TURNS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{BEGIN} {{ m.content }}[end]{END}{% else %} "
    "{{ m.content }}[end]{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN = TURNS.replace("{BEGIN}", "").replace("{END}", "")
MARKED = TURNS.replace("{BEGIN}", "{% generation %}").replace("{END}", "{% endgeneration %}")
TABLE = 320  # rows of the embedding
CONTEXT = 512


def tokenizer_of(draw):
    """A fast tokenizer of bytes, of words with a mark at their beginning, or of pieces of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    options, specials = (
        dict(draw.options),
        ["<s>", "</s>", "<pad>", "<unk>", "[user]", "[assistant]", "[system]", "[end]"],
    )
    if options["tokenizer"] == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(
            ["x"],
            trainers.BpeTrainer(
                vocab_size=266, special_tokens=specials, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
            ),
        )
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Metaspace(prepend_scheme="always")
        size = {"words": 300, "pieces": 60}[options["tokenizer"]]
        made.train_from_iterator([" ".join(WORDS)], trainers.BpeTrainer(vocab_size=size, special_tokens=specials))
    if options["starts"]:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = MARKED if options["marked"] else PLAIN
    return fast


def documents_of(draw):
    """Records of a file."""
    dice, options = random.Random(f"documents {draw.seed}"), dict(draw.options)
    words = lambda most: " ".join(dice.choices(WORDS, k=dice.randint(1, most)))  # noqa: E731
    made = []
    for _ in range(options["documents"]):
        if options["kind"] == "texts":
            made.append({"text": words(9) + " " + words(4)})
        elif options["kind"] == "completions":
            made.append(
                {"prompt": words(6) + dice.choice(["", " ", ": "]), "completion": dice.choice(["", " "]) + words(5)}
            )
        else:
            turns = [{"role": "system", "content": words(3)}] if dice.random() < 0.3 else []
            for _ in range(dice.randint(1, 2)):
                turns += [{"role": "user", "content": words(5)}, {"role": "assistant", "content": words(5)}]
            made.append({"messages": turns})
    return made


def tokens_of(draw, tokenizer, record):
    """Ids and labels of a record, by transformers."""
    if "messages" in record:
        found = tokenizer.apply_chat_template(
            record["messages"], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learnt = found["input_ids"], found["assistant_masks"]
    else:
        text = record.get("text", "") + record.get("prompt", "") + record.get("completion", "")
        found = tokenizer(text, return_offsets_mapping=True)
        border = len(record.get("prompt", ""))
        ids = [*found["input_ids"], tokenizer.eos_token_id]
        learnt = [
            *(
                int((first >= border and (first, last) != (0, 0)) or "text" in record)
                for first, last in found["offset_mapping"]
            ),
            1,
        ]
    ids, learnt = torch.tensor([ids]), torch.tensor([learnt])
    return {"input_ids": ids, "labels": ids.where(learnt > 0, torch.tensor(IGNORED))}


def model_of_files(draw):
    """A model with room for these tokenizers' ids."""
    import transformers as t
    import vision

    torch.manual_seed(5)
    sizes = SIZES | {"vocab_size": TABLE, "max_position_embeddings": CONTEXT}
    if draw.model in ("llava", "qwen2_5_vl"):
        config = vision.config(draw.model)
        config.text_config.vocab_size, config.text_config.max_position_embeddings = TABLE, CONTEXT
        for place, name in enumerate(
            ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ):
            if hasattr(config, name):
                setattr(config, name, TABLE - 1 - max(place - 1, 0))
        model = t.AutoModelForImageTextToText.from_config(config)
    elif draw.model == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=TABLE,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=CONTEXT,
                bos_token_id=0,
                eos_token_id=EOS,
                **off,
            )
        )
    elif draw.model == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=8))
    else:
        model = t.LlamaForCausalLM(t.LlamaConfig(**sizes, attention_bias=True))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1) if p.dim() == 1 else p.mul_(2.0)
    return model.train()


def files_plainly(draw):
    """Two steps over all records, each in a row of its own, with transformers' own list of what decays."""
    from transformers import Trainer

    options, model, tokenizer = dict(draw.options), model_of_files(draw), tokenizer_of(draw)
    batches = [tokens_of(draw, tokenizer, record) for record in documents_of(draw)]
    counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches]
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) is decays], "weight_decay": rate}
        for decays, rate in ((True, options["weight_decay"]), (False, 0.0))
    ]
    own, found = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8), Outcome([], [], [])
    for _ in range(STEPS):
        loss = sum(model(**b, use_cache=False).loss * n for b, n in zip(batches, counts, strict=True) if n) / sum(
            counts
        )
        loss.backward()
        found.losses.append(loss.item())
        found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        own.step()
        own.zero_grad()
    return found


def length_of(draw):
    """A length of sequences that packs the documents into two of them: the shortest one alone finds no room in the first."""
    if not dict(draw.options)["packing"]:
        return CONTEXT // 2
    tokenizer = tokenizer_of(draw)
    sizes = [tokens_of(draw, tokenizer, record)["input_ids"].numel() for record in documents_of(draw)]
    return sum(sizes) - min(sizes)


def by_files(draw, folder):
    """The same records as a file, by a run of `zero3d train`."""
    import json
    import shutil
    from pathlib import Path

    from training import train

    options, folder = dict(draw.options), Path(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model_of_files(draw).save_pretrained(folder / "model")
        tokenizer_of(draw).save_pretrained(folder / "model")
        (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in documents_of(draw)))
    dist.barrier()
    made = {
        "output": str(folder / "run"), "precision": "fp32", "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl"), "length": length_of(draw), "shuffle": False, "packing": options["packing"],
                 "validation": 0, "cache": str(folder / "cache")},
        "optimizer": {"lr": 1e-2, "weight_decay": options["weight_decay"], "clip_norm": 1e9, "betas": [0.9, 0.95]},
        "schedule": {"name": "constant", "warmup": 0}, "checkpoint": {"export": False}, "zero": {"stage": draw.stage},
        "train": {"steps": STEPS, "batch": 2 if options["packing"] else options["documents"]},
    }  # fmt: skip
    records = train(made)
    return Outcome([r["loss"] for r in records], [r["grad_norm"] for r in records], [])


# --- generation ---------------------------------------------------------------------------------


def generated(draw, ours):
    """Tokens of two prompts, one of them padded on the left as the draw says, as numbers to compare."""
    from transformers import GenerationConfig

    import zero3d

    options = {name: list(map(_lists, value)) if isinstance(value, tuple) else value for name, value in draw.options}
    masked = options.pop("mask")
    model = make(draw).eval()
    with torch.no_grad():
        dice = torch.Generator().manual_seed(draw.seed)
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=dice) * 0.4)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=0, **options)
    dice = torch.Generator().manual_seed(draw.seed)
    prompts = torch.randint(3, VOCAB, (2, 6), generator=dice)
    given = {}
    if draw.padding == "left":
        prompts[1, :3] = PAD
        given = {"attention_mask": (prompts != PAD).long()} if masked else {}
    if not ours:
        tokens = model.generate(prompts, max_new_tokens=8, do_sample=False, **given)
    else:
        mesh = zero3d.Mesh(**({draw.axis: 2} if draw.axis else {}))
        engine = zero3d.Engine(model, mesh=mesh, stage=draw.stage, precision="fp32", optimizer=_sgd)
        tokens = engine.generate(prompts, max_new_tokens=8, **given)
    return Outcome([float(token) for token in tokens.flatten()], [], [])


def _lists(value):
    return list(value) if isinstance(value, tuple) else value


def _sgd(params):
    return torch.optim.SGD(params, lr=0.05)


# --- both sides ---------------------------------------------------------------------------------


def plain(draw, folder):
    match draw.way:
        case "accelerate":
            return accelerated(draw, False)
        case "trainer":
            return trained(draw, False, folder)
        case "files":
            return files_plainly(draw)
        case "generate":
            return generated(draw, False)
        case _:
            return plain_steps(draw, weigh=draw.way == "train_batch")


def ours(draw, folder):
    from zero3d.errors import Zero3dError

    try:
        match draw.way:
            case "train_batch":
                return by_train_batch(draw)
            case "loop":
                return by_loop(draw)
            case "deepspeed":
                return by_deepspeed(draw)
            case "accelerate":
                return accelerated(draw, True)
            case "trainer":
                return trained(draw, True, folder)
            case "files":
                return by_files(draw, folder)
            case "generate":
                return generated(draw, True)
    except Zero3dError as error:
        return f"refused: {error}"


def difference(found, wanted):
    """What differs between two outcomes, in words; "" where nothing does."""
    for name, relative in (("losses", 1e-4), ("norms", 2e-3), ("evaluated", 2e-4)):
        one, other = getattr(found, name), getattr(wanted, name)
        if name == "evaluated" and not one:
            continue
        if len(one) != len(other) or any(
            not abs(a - b) <= relative * (abs(b) + 1e-3) for a, b in zip(one, other, strict=True)
        ):
            return f"{name} {one}, plain {other}"
    if wanted.weights is not None and found.weights is not None:
        if found.weights.keys() != wanted.weights.keys():
            return f"weights of {sorted(found.weights.keys() ^ wanted.weights.keys())[:3]}"
        far = {name: float((found.weights[name] - wanted.weights[name]).abs().max()) for name in wanted.weights}
        if far and not max(far.values()) <= 2e-5:
            return f"weights off by {max(far.values()):.1e} in {max(far, key=far.get)}"
    return ""


def judge(draws, folder):
    """One line for each draw, on this rank: "same", "refused: ...", or what differs."""
    said = []
    for one in draws:
        try:
            wanted = plain(one, f"{folder}/plain")
        except Exception as error:  # what the plain library does not run is no judge
            said.append(f"not run by the plain library: {type(error).__name__}: {error}")
            continue
        found = ours(one, f"{folder}/ours")
        said.append(found if isinstance(found, str) else difference(found, wanted) or "same")
    return said


def main():
    import tempfile

    sys.path.insert(0, str(__import__("pathlib").Path(__file__).parent))
    from pool import RankPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--seeds", default="0:10")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split(":"))
    import draws

    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for way in given.ways:
            for seed in range(first, last):
                one = draws.draw(way, seed)
                try:
                    said = pool.run(2, draws.judge, [one], folder)[0][0]
                except Exception as error:
                    said = f"FAILED {' '.join(str(error).split())[-400:]}"
                print(f"{way} {seed}: {said}" + ("" if said == "same" else f"   [{one}]"), flush=True)


if __name__ == "__main__":
    main()
