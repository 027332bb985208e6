"""Which modules are experts: transformers' plans as data, and a user's map."""

import pytest
from mixtures import FAMILIES, mixture
from models import hf

from zero3d.errors import ConfigError
from zero3d.expert_parallel.plan import find_experts
from zero3d.expert_parallel.traffic import Busiest


@pytest.mark.parametrize("family", FAMILIES)
def test_families_name_their_experts(family):
    model = mixture(family)
    if family == "granitemoe" and model.config.base_model_ep_plan is None:
        pytest.skip("this transformers has no plan for GraniteMoe's experts, as 5.20 and older")
    layers = find_experts(model)
    assert len(layers) == 2 - (family in ("deepseek_v3", "glm4_moe"))  # the first layer of these is dense
    stacked = {name for name, p in model.named_parameters() if ".experts." in name}
    assert {f"{layer.name}.{key}" for layer in layers for key in layer.parameters} == stacked
    assert {layer.experts for layer in layers} == {8}


def test_models_without_a_plan_have_none_and_a_map_takes_names_out():
    assert find_experts(hf("llama")) == []
    layers = find_experts(mixture(), {"layers.0.mlp.experts": "none"})
    assert [layer.name for layer in layers] == ["model.layers.1.mlp.experts"]


@pytest.mark.parametrize(("plan", "says"), [
    ({"layers.*.mlp.experts": "colwise"}, "unknown style 'colwise'. Known are"),
    ({"layers.*.mlp.export": "grouped_gemm"}, "gives 'layers.*.mlp.export' a style, but nothing"),
])  # fmt: skip
def test_a_map_that_means_nothing_is_refused(plan, says):
    with pytest.raises(ConfigError) as caught:
        find_experts(mixture(), plan)
    assert says in str(caught.value)


def test_the_busiest_expert_is_that_of_the_least_even_layer():
    load = {"a": [4, 4, 4, 4], "b": [1, 6, 1, 0], "c": [0, 0]}
    found = Busiest.of(load)
    assert (found.layer, found.tokens, found.mean, found.ratio) == ("b", 6, 2.0, 3.0)
    assert Busiest.of({"c": [0, 0]}) is Busiest.of({}) is None
