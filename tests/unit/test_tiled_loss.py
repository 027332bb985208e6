"""The loss of the next token computed tile by tile is the model's own, and no logits of the whole vocabulary are made."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from families import family
from models import LiftCasts, batch, net
from tensors import tiny
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import zero3d
from zero3d.account.transients import LOGITS_BUDGET, logits_bytes
from zero3d.config import load
from zero3d.errors import ConfigError, TokenError
from zero3d.models.tiled_loss import defer_logits
from zero3d.train.setup.losses import choose_loss

WAYS = {"logits_scaling": 3.0, "logit_scale": 0.3, "final_logit_softcapping": 2.0}  # of granite, cohere, gemma2


def model_of(name):
    if name in ("granite", "cohere"):
        import transformers as t

        torch.manual_seed(7)
        sizes = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
        config = t.AutoConfig.for_model(name, **sizes, **{k: WAYS[k] for k in ("logits_scaling", "logit_scale")})
        return t.AutoModelForCausalLM.from_config(config).train()
    return (
        family(name) if name == "gptj" else tiny(name, **({"final_logit_softcapping": 2.0} if name == "gemma2" else {}))
    )


def given(step=0):
    """A micro-batch some of whose labels do not count."""
    ids = batch(step, size=3, length=7) % 64
    labels = ids.clone()
    labels[0, 3:] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def loss_and_gradients(model, **options):
    loss = model(**given(), **options).loss
    (2 * loss).backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# llama: a head of its own; gptj: one with a bias; qwen3, gpt2: tied; moe: an auxiliary loss is added;
# granite, cohere: scaled logits; gemma2: a soft cap, behind a cast in no model that is here
@pytest.mark.parametrize("name", ["llama", "gptj", "qwen3", "gpt2", "moe", "granite", "cohere", "gemma2"])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 11}], ids=["mean", "sum"])
def test_loss_and_gradients_are_the_models_own_in_float64(name, options):
    plain = model_of(name).double()
    tiled = copy.deepcopy(plain)
    defer_logits(tiled)
    with LiftCasts():
        expected, found = loss_and_gradients(plain, **options), loss_and_gradients(tiled, **options)
    assert len(found) == len(expected) > 5
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm().clamp_min(1e-8)) < 1e-10


def test_a_frozen_head_and_bf16_follow_the_models_own():
    plain = tiny("llama", lora=True).bfloat16()
    tiled = copy.deepcopy(plain)
    defer_logits(tiled.get_base_model())
    for a, b in zip(loss_and_gradients(tiled), loss_and_gradients(plain), strict=True):
        assert float((a - b).float().norm() / b.float().norm()) < 0.02  # both are rounded to 8 bits on the way


def test_logits_in_bf16_are_summed_in_fp32():
    model = tiny("llama").bfloat16()
    expected = model(**given()).logits.detach()[:, :-1].double().flatten(0, 1)
    targets = given()["labels"][:, 1:].flatten()
    defer_logits(model)
    loss = model(**given()).loss.detach()
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(F.cross_entropy(expected, targets)), rel=1e-4)


class Largest(TorchDispatchMode):
    """Notes the most elements of a floating tensor of so many rows."""

    def __init__(self, rows):
        self.rows, self.numel = rows, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() and t.numel() % self.rows == 0:
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("defer", [False, True])
def test_no_tensor_is_as_large_as_logits(defer):
    model = tiny("llama", vocab_size=640)
    if defer:
        defer_logits(model)
    ids = batch(0, size=13, length=7)  # 91 tokens: of no other size
    with Largest(91) as largest:
        model(input_ids=ids, labels=ids).loss.backward()
    logits = 91 * 640
    assert largest.numel >= logits if not defer else largest.numel <= 91 * 48  # an MLP's width


def test_without_labels_a_model_returns_its_logits_and_generates():
    plain = tiny("llama").eval()
    tiled = copy.deepcopy(plain)
    defer_logits(tiled)
    ids = batch(0)
    tiled(input_ids=ids, labels=ids)
    assert torch.equal(tiled(input_ids=ids).logits, plain(input_ids=ids).logits)
    answers = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (plain, tiled)]
    assert torch.equal(*answers)
    assert tiled.get_output_embeddings().weight is tiled.lm_head.weight


def test_logits_that_were_not_made_are_refused_by_name():
    model = tiny("llama")
    defer_logits(model)
    ids = batch(0)
    logits = model(input_ids=ids, labels=ids).logits
    assert logits.shape == (2, 9, 64)
    for read in (lambda: logits[..., 0], lambda: logits.argmax(-1), lambda: torch.exp(logits),
                 lambda: logits * torch.ones(64), lambda: 1 - logits):  # fmt: skip
        with pytest.raises(ConfigError, match="call the model without labels for logits"):
            read()


def test_a_label_outside_of_the_vocabulary_is_an_error():
    model = tiny("llama")
    defer_logits(model)
    ids = batch(0)
    for label in (64, -1):
        with pytest.raises(TokenError, match=f"label {label} is not a token of a vocabulary of 64"):
            model(input_ids=ids, labels=torch.full_like(ids, label))


def adapted_head():
    return tiny("llama", lora={"target_modules": ["q_proj", "lm_head"]})


@pytest.mark.parametrize(("model", "options", "match"), [
    (lambda: tiny("llama"), {"loss": lambda output, batch: None}, "leave one of them out"),
    (net, {}, "Net has no loss or another one"),
    (adapted_head, {}, "leave adapters off the head"),
])  # fmt: skip
def test_an_engine_refuses_tiled_loss_where_there_is_no_such_loss(model, options, match):
    with pytest.raises(ConfigError, match=match):
        zero3d.Engine(model(), precision="fp32", tiled_loss=True, **options)


# --- chosen by the bytes of logits ---------------------------------------------------------------


def chosen(model, length, tiled_loss="auto", tp=1, vocab=100_000):
    model.config = copy.copy(getattr(model, "config", SimpleNamespace()))
    model.config.vocab_size = vocab
    train = {"steps": 1, "micro_batch": 2, "tiled_loss": tiled_loss}
    config = load({"data": {"length": length}, "train": train, "precision": "bf16"})
    return choose_loss(config, model, SimpleNamespace(dp=1, tp=tp))


def test_a_loss_is_in_tiles_where_logits_take_more_than_the_budget_and_a_line_says_the_bytes():
    most = LOGITS_BUDGET // logits_bytes(2, 100_000, 2)
    assert logits_bytes(2, 100_000, 2) == 2 * 100_000 * (2 + 4 + 8)
    assert chosen(tiny("llama"), most) == (False, "")
    tiled, why = chosen(tiny("llama"), most + 1)
    assert tiled
    assert why == (
        f"train.tiled_loss=auto: in tiles: {2 * most + 2:,} tokens x 100,000 logits take 4.00 GB, more than 4.00 GB; "
        "equal to a whole loss up to rounding"
    )
    assert chosen(tiny("llama"), most, True) == (True, "")
    assert chosen(tiny("llama"), most + 1, False) == (False, "")
    assert chosen(tiny("llama"), 2 * most, tp=2) == (False, "")


@pytest.mark.parametrize(("model", "tp", "why"), [
    (net, 1, "not in tiles: .* but .*Net has no loss or another one"), (adapted_head, 1, "leave adapters off the head"),
    (lambda: tiny("llama"), 2, "but mesh.tp is 2: type train.tiled_loss=true"),
])  # fmt: skip
def test_a_loss_that_cannot_be_in_tiles_stays_whole_and_a_line_says_why(model, tp, why):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero3d.train.setup.losses.LOGITS_BUDGET", 1)
        tiled, said = chosen(model(), 64, tp=tp)
    assert not tiled
    assert re.search(why, said)
