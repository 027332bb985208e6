"""With and without pipeline the engine answers alike; the model that was cut refuses to be used as a whole."""

import copy

import pytest
import torch
from models import batch
from pipelines import build, engine_of, micro_batches

import zero3d
from zero3d.errors import ReleasedParameterError


def use_the_model(stage):
    """Refusals of the model that was cut, bytes that its parameters keep, and a step after all that."""
    model = build("llama", 4)
    engine = engine_of(model, zero3d.Mesh(pp=2), stage=stage)
    texts = []
    for use in (
        lambda: model(input_ids=batch(0)),
        lambda: model.generate(batch(0)),
        lambda: model.state_dict(),
        lambda: model.load_state_dict({}),
        lambda: copy.deepcopy(model),
    ):
        for block in (engine.full_params, torch.no_grad):
            with pytest.raises(ReleasedParameterError, match=r"engine\.export") as error, block():
                use()
            texts.append(str(error.value))
    kept = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
    own = {p.untyped_storage()._cdata for chunk in engine.chunks.values() for p in chunk.parameters()}
    return (
        texts,
        sum(size for key, size in kept.items() if key not in own),
        float(engine.train_batch(micro_batches(0, 0))),
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_was_cut_is_freed_and_refuses_to_be_used(ranks, stage):
    for texts, kept, loss in ranks(2, use_the_model, stage):
        assert all("cut into pipeline stages" in text for text in texts)
        assert kept < 100  # one element for each parameter of the other rank
        assert 3 < loss < 5


def packed(pp):
    """The mean loss of two documents in one sequence, told apart by position_ids alone."""
    engine = engine_of(build("llama", 4), zero3d.Mesh(pp=pp), stage=2, loss=None, accumulate=2)
    ids = batch(0, size=1, length=12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    given = {"input_ids": ids, "position_ids": positions, "labels": ids}
    return float(engine.evaluate([given])), float(engine.train_batch([given, given]))


def test_packed_documents_are_told_apart_with_and_without_pipeline(ranks):
    whole = ranks(1, packed, 1)[0]
    assert ranks(2, packed, 2) == [whole, whole]


def generate_to_an_end(pp, end, samples):
    model = build("llama", 4)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, 0
    model.generation_config.do_sample = samples
    engine = engine_of(model, zero3d.Mesh(pp=pp), stage=3)
    return [engine.generate(batch(3), max_new_tokens=6, keep_full=keep).tolist() for keep in (True, False)]


def test_generation_ends_where_the_model_says_with_and_without_pipeline(ranks):
    endless = ranks(1, generate_to_an_end, 1, None, True)[0]  # greedy all the same
    assert ranks(2, generate_to_an_end, 2, None, False) == [endless, endless]
    start = batch(3).shape[1]
    end = endless[0][0][start + 2]
    ended = ranks(1, generate_to_an_end, 1, end, False)[0]
    assert ended[0][0][start + 2 : start + 4] in ([end], [end, 0])
    assert ranks(2, generate_to_an_end, 2, end, True) == [ended, ended]
