"""`zero3d train` equals the training loop that everyone writes, which is written out here once more."""

import math
from itertools import pairwise

import numpy
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F
from training import ROWS, field, save_model, save_rows, train, tree

STEPS, BATCH, MICRO, PEAK, WARMUP, FINAL = 5, 4, 2, 1e-3, 2, 0.1
PARTS = ("input_ids", "labels", "position_ids")
MODELS = ("llama", "qwen3", "gpt2", "qwen3_moe")
QUICK = {("qwen3", 3, 2), ("qwen3_moe", 3, 1)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.long)
    for case in ((model, stage, dp) for model in MODELS for stage in range(4) for dp in (1, 2))
]


def plain_loop(model, micro_batches_of):
    """Losses, gradient norms and learning rates of plain PyTorch in fp32; nothing here comes from zero3d.

    micro_batches_of  step -> [(input_ids, labels, options of the forward), ...]; labels are -100 where
                      nothing is learnt, and stand where their token stands
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        if step < WARMUP:
            rate = PEAK * ((step + 1) / WARMUP)
        else:
            done = (step + 1 - WARMUP) / (STEPS - WARMUP)
            rate = PEAK * (FINAL + (1 - FINAL) * (0.5 * (1 + math.cos(math.pi * done))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        micro_batches = micro_batches_of(step)
        targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels, _ in micro_batches)
        total = 0.0
        for ids, labels, options in micro_batches:
            logits = model(input_ids=ids, **options).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
            (loss / targets).backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / targets)
        rates.append(rate)
    return losses, norms, rates


def plain_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()


def rows_in_order(path):
    """Micro-batches of the file's rows one after another, again from the start when they are used up."""
    rows = torch.from_numpy(numpy.load(path))

    def micro_batches(step):
        taken = rows[[place % len(rows) for place in range(step * BATCH, (step + 1) * BATCH)]]
        return [(ids, ids, {}) for ids in taken.split(MICRO)]

    return micro_batches


def assert_same(records, losses, norms, rates):
    assert field(records, "loss") == pytest.approx(losses, rel=1e-6, abs=0)
    assert field(records, "grad_norm") == pytest.approx(norms, rel=1e-5, abs=0)
    assert field(records, "lr") == rates
    assert losses[-1] != losses[0]
    assert max(norms) > 1.0, "clipping is part of what is compared"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> a folder with model and rows, and what the plain loop makes of them."""
    made = {}

    def save(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save_model(folder / "model", name)
            save_rows(folder / "rows.npy")
            made[name] = folder, plain_loop(plain_model(folder), rows_in_order(folder / "rows.npy"))
        return made[name]

    return save


@pytest.mark.parametrize(("model", "stage", "dp"), CASES)
def test_losses_norms_and_rates_are_those_of_a_plain_loop(ranks, saved, tmp_path, model, stage, dp):
    folder, plain = saved(model)
    assert STEPS * BATCH > ROWS, "the run goes into a second epoch"
    made = tree(folder, zero={"stage": stage}, output=str(tmp_path / "out"))
    assert_same(ranks(dp, train, made)[0], *plain)
    for rank in range(dp):
        with safe_open(tmp_path / f"out/checkpoints/step-5/rank-{rank:05d}.safetensors", framework="pt") as file:
            assert any(key.startswith("master:") for key in file.keys()), "every rank updates something"  # noqa: SIM118


def documents_apart(made):
    """Micro-batches of one document each: the packed, shuffled rows that the run gets, taken to pieces."""
    from zero3d.config import Batch, load
    from zero3d.data.batches import BatchStream
    from zero3d.data.dataset import open_data

    stream = BatchStream(open_data(load(made).data, None).train, Batch(BATCH, BATCH, 1, 1), shuffle=True)
    steps = [next(stream)[0] for _ in range(STEPS)]

    def micro_batches(step):
        pieces = []
        for ids, labels, positions in zip(*(steps[step][name] for name in PARTS), strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            pieces += [(ids[a:b][None], labels[a:b][None], {}) for a, b in pairwise(starts)]
        return [piece for piece in pieces if (piece[1] != -100).any()]

    return micro_batches


@pytest.mark.parametrize(
    ("model", "stage", "dp"),
    [("llama", 3, 2), *(pytest.param(m, s, 2, marks=pytest.mark.long) for m, s in (("gpt2", 1), ("qwen3_moe", 2)))],
)
def test_packed_and_shuffled_documents_train_as_if_each_were_alone(ranks, tmp_path, model, stage, dp):
    save_model(tmp_path / "model", model)
    (tmp_path / "documents").mkdir()
    for number, length in enumerate((5, 40, 11, 3, 29, 17, 8, 51, 23, 13)):
        save_rows(tmp_path / "documents" / f"{number}.npy", rows=length, length=1, seed=number)
        numpy.save(tmp_path / f"documents/{number}.npy", numpy.load(tmp_path / f"documents/{number}.npy").flatten())
    made = tree(tmp_path, data={"train": str(tmp_path / "documents"), "shuffle": True}, zero={"stage": stage})
    plain = plain_loop(plain_model(tmp_path), documents_apart(made))
    assert_same(ranks(dp, train, made)[0], *plain)
