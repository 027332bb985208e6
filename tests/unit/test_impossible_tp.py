"""A tp that a type of models cannot have: the same refusal by all verbs, before torch is imported."""

import json

import pytest

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.tools.cli.main import main
from zero3d.tools.cli.preflight import check_tp
from zero3d.tools.cli.unbuilt_types import UnbuiltType

VOCABULARY = "tp=4 cannot split vocab_size=50257: 50257 / 4 is not a whole number. Pad it before training: model.resize_token_embeddings(pad_to_multiple_of=4) makes them 50260"
HEADS = "tp=5 cannot split num_attention_heads=12: 12 / 5 is not a whole number. Pass a tp that divides it (1, 2, 3, 4, 6, 12)"
VERBS = {"train": ["train"], "launch": ["launch", "torchrun"], "explain": ["plan", "explain"], "simulate": ["simulate"]}


def refused(model, tp, **mesh):
    with pytest.raises(ConfigError) as caught:
        check_tp(load({"model": {"path": str(model)}, "mesh": {"tp": tp, **mesh}}))
    return str(caught.value)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("tp", "message"), [(4, VOCABULARY), (5, HEADS)])
def test_every_verb_refuses_it_with_the_same_advice(tmp_path, monkeypatch, capsys, verb, tp, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "output: runs/a\nmodel: {path: gpt2, init: random}\ndata: {train: a.txt, tokenizer: bytes}\n"
        f"mesh: {{dp: 1, tp: {tp}}}\n"
    )
    (tmp_path / "a.txt").write_text("some words\n")
    assert main([*VERBS[verb], "run.yaml"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(("given", "tp", "said"), [
    ({"model_type": "gpt2", "n_head": 10, "vocab_size": 6}, 4, "num_attention_heads=10"),  # by the type's own name
    ({"model_type": "gpt2", "num_attention_heads": 10, "vocab_size": 6}, 4, "num_attention_heads=10"),
    ({"model_type": "falcon", "num_attention_heads": 6, "multi_query": False, "vocab_size": 8}, 4, "num_attention_heads=6"),
    ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "num_key_value_heads": 2}}, 4, "num_key_value_heads=2"),
])  # fmt: skip
def test_heads_are_found_by_plans_of_any_type(tmp_path, given, tp, said):
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert f"tp={tp} cannot split {said}" in refused(tmp_path / "config.json", tp)


@pytest.mark.parametrize(("given", "tp"), [
    ({"model_type": "falcon", "num_attention_heads": 6, "multi_query": True, "vocab_size": 9}, 4),  # attention is whole
    ({"model_type": "gpt2", "vocab_size": 50260}, 4),
    ({"model_type": "nobodys", "num_attention_heads": 6, "vocab_size": 9}, 4),
    ({"model_type": "mamba2", "num_attention_heads": 6, "vocab_size": 9}, 4),
])  # fmt: skip
def test_what_a_plan_leaves_whole_or_nobody_knows_is_left_to_ranks(tmp_path, given, tp):
    (tmp_path / "config.json").write_text(json.dumps(given))
    check_tp(load({"model": {"path": str(tmp_path / "config.json")}, "mesh": {"tp": tp}}))


def test_a_plan_of_ones_own_is_left_to_ranks():
    check_tp(load({"model": {"path": "gpt2"}, "mesh": {"tp": 4, "tp_plan": {"h.*.mlp.c_fc": "colwise"}}}))


def test_a_types_usual_numbers_stand_below_those_that_are_given():
    assert UnbuiltType.of({"model_type": "gpt2"}).number("num_attention_heads") == 12
    assert UnbuiltType.of({"model_type": "gpt2", "n_head": 6}).number("num_attention_heads") == 6
    assert UnbuiltType.of({"model_type": "llama"}).number("num_key_value_heads") is None  # as many as heads
