"""Recomputation under split backwards: each block runs forward again once, and what repeats more is said."""

import warnings

import pytest
import torch
from models import VOCAB
from pipelines import MICRO_BATCHES, SCHEDULES, build, engine_of, micro_batches

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.models.blocks import find_blocks


def count_forwards(schedules, policy):
    """Forwards of this rank's blocks in one step, under each schedule."""
    counts = []
    for schedule in schedules:
        model, calls = build("llama", 4), []
        for block in find_blocks(model).values():
            block.forward = counted(block.forward, calls)
        recompute(model, policy)
        engine = engine_of(model, zero3d.Mesh(pp=2), stage=3, schedule=schedule)
        engine.train_batch(micro_batches(0, 0))
        counts.append(len(calls))
    return counts


def counted(forward, calls):
    def run(*args, **kwargs):
        calls.append(None)
        return forward(*args, **kwargs)

    return run


@pytest.mark.long
@pytest.mark.parametrize(("policy", "forwards"), [
    *(pytest.param(*case, marks=pytest.mark.long) for case in (("none", 1), ("full", 2))), ("every:2", 2),
])  # fmt: skip
def test_a_block_runs_forward_again_once_per_micro_batch_under_every_schedule(ranks, policy, forwards):
    for counts in ranks(2, count_forwards, SCHEDULES, policy):
        assert counts == [2 * MICRO_BATCHES * forwards] * len(SCHEDULES)  # 2 blocks on each rank


def said_about_checkpointing(schedule):
    model = build("llama", 4)
    model.activation_checkpointing_enable()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engine_of(model, zero3d.Mesh(pp=2), schedule=schedule)
    return [(str(warning.message), warning.filename) for warning in warned]


@pytest.mark.parametrize(("schedule", "times"), [("zbv", 1), ("interleaved", 0)])
def test_checkpointing_that_repeats_the_forward_is_said_once(ranks, schedule, times):
    for warned in ranks(2, said_about_checkpointing, schedule):
        about_checkpointing = [(text, file) for text, file in warned if "runs a block's forward again" in text]
        assert len(about_checkpointing) == times
        for text, file in about_checkpointing:
            assert "zero3d.activations.recompute(model, 'full')" in text
            assert file.endswith("pipelines.py"), "it points to where the engine is built"


class Odd(torch.nn.Module):
    """Blocks of two classes, so that none is found, beside another list."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 16)
        self.steps = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)])
        self.head = torch.nn.Linear(16, VOCAB)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for step in self.steps:
            x = step(x)
        return self.head(x)


def name_the_blocks(pp):
    losses = []
    torch.manual_seed(3)
    model = Odd()
    if pp > 1:
        with pytest.raises(zero3d.ConfigError, match=r"Its lists: steps \(3\). Pass blocks='NAME'"):
            engine_of(model, zero3d.Mesh(pp=pp))
        with pytest.raises(zero3d.ConfigError, match="blocks='stepz' names no list of modules of Odd"):
            engine_of(model, zero3d.Mesh(pp=pp), blocks="stepz")
    engine = engine_of(model, zero3d.Mesh(pp=pp), blocks="steps" if pp > 1 else None)
    for step in range(3):
        losses.append(float(engine.train_batch(micro_batches(step, 0))))
    return losses


def test_blocks_that_are_not_found_can_be_named(ranks):
    whole = ranks(1, name_the_blocks, 1)[0]
    assert ranks(2, name_the_blocks, 2) == [whole, whole]
