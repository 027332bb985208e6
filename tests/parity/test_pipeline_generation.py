"""A pipeline generates what transformers' generate does in one process, whatever the options are."""

import random
from functools import cache

import pytest
import torch
from families import family
from pipelines import engine_of
from tensors import tiny

import zero3d
from zero3d.errors import ConfigError

PAD, NEW = 2, 5
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


@cache
def prompts():
    """Token ids without padding, and padded on the left with a mask of that."""
    ids = torch.randint(4, 64, (2, 6), generator=torch.Generator().manual_seed(3))
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :3], mask[1, :3] = PAD, 0
    return ids, padded, mask


def model_of(name="llama"):
    """A model whose tokens depend on positions and on what is attended to, and that never ends by itself."""
    model = (
        tiny("llama", layers=2) if name == "llama" else family(name, **NO_DROPOUT, ffn_dim=48, word_embed_proj_dim=32)
    )
    torch.manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.4)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model.eval()


def one_process(model, ids, seed=5, **options):
    torch.manual_seed(seed)
    return model.generate(ids, max_new_tokens=NEW, **{"do_sample": False} | options).tolist()


def drawn(seed):
    """A prompt and options that nobody chose."""
    draw = random.Random(seed)
    ids, padded, mask = prompts()
    known = one_process(model_of(), ids)
    ends = sorted({known[0][-2], known[1][-3]})
    options = {
        "repetition_penalty": [1.5, 3.0], "no_repeat_ngram_size": [1, 2], "suppress_tokens": [[known[0][6]]],
        "begin_suppress_tokens": [[known[1][6]]], "bad_words_ids": [[[known[0][7]], known[1][6:8]]],
        "eos_token_id": [ends, ends[:1]], "min_new_tokens": [3], "min_length": [9], "forced_eos_token_id": [ends[0]],
        "exponential_decay_length_penalty": [(1, 1.5)], "renormalize_logits": [True], "num_return_sequences": [2],
        "sequence_bias": [[[[known[0][6]], -9.0]]],
    }  # fmt: skip
    given = {name: draw.choice(options[name]) for name in draw.sample(list(options), draw.randint(1, 4))}
    if draw.random() < 0.5 or "num_return_sequences" in given:
        given |= {"do_sample": True, "temperature": draw.choice([0.5, 1.3])}
        given |= draw.choice(
            [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"typical_p": 0.7}, {"epsilon_cutoff": 0.01}]
        )
    prompt = draw.choice([{"ids": ids}, {"ids": padded}, {"ids": padded, "attention_mask": mask}])
    if "forced_eos_token_id" in given or "exponential_decay_length_penalty" in given:
        given.setdefault("eos_token_id", ends[0])
    return prompt | given


def chosen():
    ids, padded, mask = prompts()
    yield {"ids": ids, "use_cache": True}
    yield {"ids": padded}
    yield {"ids": padded, "attention_mask": mask}
    yield {"ids": ids, "num_beams": 3, "num_return_sequences": 2}
    yield {"ids": ids, "do_sample": True}


def generated(cases):
    """What a pipeline generates in each case, and whether ranks draw from states of their own before and after."""
    engine = engine_of(model_of(), zero3d.Mesh(pp=2), stage=3)
    rank, found, untouched = engine.mesh.place.pp, [], True
    for case in cases:
        options = dict(case)
        torch.manual_seed(5 if rank == 1 else 77)
        before = torch.get_rng_state()
        found.append(engine.generate(options.pop("ids"), NEW, **options).tolist())
        untouched &= rank == 1 or torch.equal(torch.get_rng_state(), before)
    return found, untouched


def assert_equal_one_process(ranks, cases):
    wanted = [one_process(model_of(), **{"ids": case["ids"]} | case) for case in map(dict, cases)]
    for found, untouched in ranks(2, generated, cases):
        for case, tokens, want in zip(cases, found, wanted, strict=True):
            assert tokens == want, {name: value for name, value in case.items() if name != "ids"}
        assert untouched


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 60), marks=pytest.mark.long)], ids=str)
def test_tokens_are_those_of_one_process_with_options_that_are_drawn(ranks, seeds):
    cases = [*chosen(), *map(drawn, seeds)]
    plain = one_process(model_of(), prompts()[0])
    assert any(one_process(model_of(), **case) != plain for case in cases[5:])
    assert_equal_one_process(ranks, cases)


def by_the_models_own_settings(name):
    model = model_of(name)
    ids, padded, _ = prompts()
    end = one_process(model, ids)[0][8]
    config = model.generation_config
    config.eos_token_id, config.repetition_penalty, config.min_new_tokens = [end], 2.0, 2
    wanted = one_process(model, padded)
    engine = engine_of(model, zero3d.Mesh(pp=2))
    return engine.generate(padded, NEW).tolist(), wanted


@pytest.mark.parametrize("name", ["llama", pytest.param("opt", marks=pytest.mark.long)])
def test_a_models_generation_config_is_followed(ranks, name):
    for found, wanted in ranks(2, by_the_models_own_settings, name):
        assert found == wanted


REFUSED = {"penalty_alpha": 0.6, "guidance_scale": 2.0, "prompt_lookup_num_tokens": 3, "output_hidden_states": True}


def refused():
    engine, said = engine_of(model_of(), zero3d.Mesh(pp=2)), []
    for name, value in REFUSED.items():
        with pytest.raises(ConfigError) as error:
            engine.generate(prompts()[0], NEW, **{name: value})
        said.append(str(error.value))
    from transformers import GenerationConfig

    with pytest.raises(ConfigError, match="cannot do 'penalty_alpha'"):
        engine.generate(prompts()[0], NEW, generation_config=GenerationConfig(penalty_alpha=0.6))
    return said, engine.generate(prompts()[0], NEW).tolist()


def test_what_needs_a_cache_or_the_inside_of_a_model_is_refused_by_name(ranks):
    wanted = one_process(model_of(), prompts()[0])
    for said, after in ranks(2, refused):
        assert [f"cannot do {name!r}" in text for name, text in zip(REFUSED, said, strict=True)] == [True] * len(
            REFUSED
        )
        assert after == wanted
