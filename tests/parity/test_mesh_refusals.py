"""What cannot be cut over tp is refused on all ranks before anything is cut, with the arithmetic and what to type."""

import warnings

import pytest
import torch
from meshes import engine_of, mesh_of, model_of, step, world_of
from models import batch, net
from tensors import tiny

from zero3d.errors import ConfigError

CASES = {  # how the model differs, how the engine, words of the refusal
    "heads": ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 36}, {}, ["tp=2", "3 / 2"]),
    "kv_heads": ({"num_key_value_heads": 1}, {}, ["tp=2", "num_key_value_heads=1: 1 / 2"]),
    "intermediate": ({"intermediate_size": 49}, {}, ["mlp.", "49", "tp 2"]),
    "vocabulary": ({"vocab_size": 65}, {}, ["65 / 2", "model.resize_token_embeddings(pad_to_multiple_of=2)", "66"]),
    "no such module": ({}, {"tp_plan": {"layers.*.self_attn.qkv": "colwise"}}, ["'layers.*.self_attn.qkv'", "For example"]),
    "style": ({}, {"tp_plan": {"layers.*.mlp.up_proj": "columnwise"}}, ["'columnwise'", "colwise, rowwise"]),
}  # fmt: skip


def told(attempt):
    """The error of an attempt."""
    with pytest.raises(ConfigError) as error:
        attempt()
    return str(error.value)


def refusals():
    """What every rank is told, case by case; the ranks go on together after each."""
    mesh, found = mesh_of((1, 2, 1)), {}
    for case, (sizes, options, _) in CASES.items():
        model = tiny("llama", kv_heads=sizes.get("num_key_value_heads", 4), **sizes)
        before = {name: p.shape for name, p in model.named_parameters()}
        found[case] = told(lambda model=model, options=options: engine_of(model, mesh, **options))
        assert before == {name: p.shape for name, p in model.named_parameters()}, case  # it was not cut
    found["no plan"] = told(lambda: engine_of(net(vocab=64), mesh))
    engine = engine_of(model_of("llama", (1, 2, 1)), mesh, sequence_parallel=True, precision="fp32")
    ids = batch(0, length=9)
    with warnings.catch_warnings(record=True) as heard:
        found["length"] = told(lambda: engine.train_batch([{"input_ids": ids, "labels": ids}]))
    assert [str(w.message) for w in heard if "silenced" in str(w.message)] == []  # a hook's own error on the way
    even = {"input_ids": ids[:, :8], "labels": ids[:, :8]}
    assert torch.isfinite(engine.train_batch([even]))
    return found


def test_every_rank_refuses_what_tp_cannot_cut(ranks):
    first, second = ranks(2, refusals)
    assert first == second
    words = {case: wanted for case, (*_, wanted) in CASES.items()}
    words["no plan"] = ["Net comes without", "'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'"]
    words["length"] = ["9 tokens / 2", "8 or 10 tokens"]
    for case, wanted in words.items():
        assert "\n" not in first[case]
        assert all(word in first[case] for word in wanted), (case, first[case])


def uneven(shape, stage):
    """What a rank is told in the first step by a plan that forgets what lies between cut matrices."""
    engine = engine_of(
        model_of("qwen3", shape), mesh_of(shape), stage=stage, tp_plan={"layers.1.self_attn.q_norm": "none"}
    )
    return told(lambda: step(engine, 0))


@pytest.mark.parametrize(("shape", "stage"), [
    ((1, 2, 1), 0), pytest.param((2, 2, 1), 3, marks=pytest.mark.long), pytest.param((1, 2, 2), 1, marks=pytest.mark.long),
])  # fmt: skip
def test_every_rank_refuses_gradients_that_differ_where_they_should_be_common(ranks, shape, stage):
    first, *others = ranks(world_of(shape), uneven, shape, stage)
    assert all(found == first for found in others)
    assert "model.layers.1.self_attn.q_norm.weight is whole on all tp ranks" in first
    assert "'model.layers.1.self_attn.q_norm': 'replicated_with_grad_allreduce'" in first
