"""Closed-form models: parameters as published, activations as in the papers."""

import pytest

from zero3d.errors import ConfigError
from zero3d.tools.plan.formulas import layer_activations, parameters, step_flops
from zero3d.tools.plan.shapes import gpt, llama, of_params


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (gpt(12, 768, 12, 50257, 1024), 124_439_808),  # GPT-2
        (gpt(24, 1024, 16, 50257, 1024), 354_823_168),
        (gpt(36, 1280, 20, 50257, 1024), 774_030_080),
        (gpt(48, 1600, 25, 50257, 1024), 1_557_611_200),
        (llama(32, 4096, 32, 32, 11008, 32000, 4096), 6_738_415_616),  # Llama 2
        (llama(40, 5120, 40, 40, 13824, 32000, 4096), 13_015_864_320),
        (llama(80, 8192, 64, 8, 28672, 32000, 4096), 68_976_648_192),
        (llama(32, 4096, 32, 8, 14336, 128256, 8192), 8_030_261_248),  # Llama 3
        (llama(80, 8192, 64, 8, 28672, 128256, 8192), 70_553_706_496),
        (llama(16, 2048, 32, 8, 8192, 128256, 8192, tied=True), 1_235_814_400),  # Llama 3.2
        (llama(32, 4096, 32, 8, 14336, 32000, 8192), 7_241_732_096),  # Mistral
    ],
)
def test_parameters_are_the_published_ones(model, published):
    assert model.params == model.trainable == published


def test_a_gpt_has_the_formulas_parameters_and_operations():
    model = gpt(96, 12288, 96, 51200, 2048)
    assert model.params == parameters(96, 12288, 51200, 2048) + 2 * 12288  # the last norm
    per_token = sum(part.operations.matrices + part.operations.scores for part in model.parts)
    assert 3 * 2048 * per_token == step_flops(1, 2048, 96, 12288, 51200, recompute=False)


def test_a_gpt_block_keeps_what_korthikanti_counts():
    operations = gpt(1, 6144, 64, 51200, 2048, flash=False).blocks[0].operations
    for t in (1, 8):
        kept = 2048 * 4 * (operations.kept_whole + operations.kept_cut / t)
        assert kept == layer_activations("TP baseline", 2048, 4, 6144, 64, t)
    flash = gpt(1, 6144, 64, 51200, 2048).blocks[0].operations
    assert (flash.kept_cut + flash.kept_whole, flash.attention) == (34 * 6144, 0)


def test_a_llama_block_keeps_64_of_its_input_in_eager_mode():
    operations = llama(1, 4096, 32, 32, 11008, 32000, 2048).blocks[0].operations
    assert (operations.kept_cut + operations.kept_whole) / 4096 == 64


@pytest.mark.parametrize("psi", [10**8, 15 * 10**8, 75 * 10**8, 72 * 10**9, 10**12])
def test_a_bare_count_gets_a_shape_near_it_and_says_which(psi):
    model = of_params(psi, 2048)
    assert model.params == pytest.approx(psi, rel=0.02 if psi > 10**9 else 0.04)
    assert str(model.hidden) in model.provenance
    assert "assumed" in model.provenance
    assert psi < 10**10 or model.heads % 8 == 0


def test_nonsense_sizes_are_refused():
    for call in (
        lambda: gpt(0, 64, 4, 100, 32),
        lambda: gpt(2, 65, 4, 100, 32),
        lambda: llama(2, 64, 4, 3, 128, 100, 32),
        lambda: of_params(10, 32),
    ):
        with pytest.raises(ConfigError):
            call()
