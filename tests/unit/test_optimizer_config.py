"""The section `optimizer`: which optimizer it builds, and what it refuses."""

import pytest
import torch
from families import CONFIGS, family
from torch import nn

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.models.recurrences import own_of_recurrences
from zero3d.optim.eight_bit import AdamW8bit
from zero3d.optim.muon_optimizer import MuonRule
from zero3d.train.setup.optimizer import norms_and_biases, of_one_dimension, optimizer_of, parameter_groups

RUN = {"model": {"path": "demo"}, "data": {"train": "stdlib", "tokenizer": "bytes"}}


def section(**keys):
    return load(RUN | {"optimizer": keys}).optimizer


def test_adamw_is_torchs_fused_one():
    built = optimizer_of(section(lr=0.5))([torch.zeros(4)])
    assert type(built) is torch.optim.AdamW
    assert built.defaults["fused"]
    assert built.defaults["lr"] == 0.5


def test_muon_takes_its_options_and_a_learning_rate_of_its_own():
    rule = optimizer_of(section(name="muon", lr=0.5, muon={"momentum": 0.9, "ns_steps": 4, "nesterov": False}))
    assert isinstance(rule, MuonRule)
    assert {"lr": 0.5, "momentum": 0.9, "ns_steps": 4, "nesterov": False, "adjust_lr": "match_rms_adamw"}.items() <= (
        rule.options.items()
    )
    own = optimizer_of(section(name="muon", lr=0.5, weight_decay=0.25, muon={"lr": 0.125}))
    assert (own.options["lr"], own.adamw["lr"]) == (0.125, 0.5)
    assert own.options["weight_decay"] == own.adamw["weight_decay"] == 0.25


def test_options_of_muon_do_not_hinder_another_optimizer():
    """So that one file may be compared with both."""
    assert type(optimizer_of(section(muon={"lr": 0.125}, split={"*.q_proj.weight": "equal:2"}))([torch.zeros(4)])) is (
        torch.optim.AdamW
    )


def test_moments_in_8_bits():
    built = optimizer_of(section(name="adamw8bit", lr=0.5, betas=[0.8, 0.9], weight_decay=0.25))([torch.zeros(4)])
    assert type(built) is AdamW8bit
    assert {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.25}.items() <= built.defaults.items()


REFUSED = {
    "a name": ({"name": "adamw_8bit"}, "Did you mean adamw8bit"),
    "an option": ({"name": "muon", "muon": {"steps": 5}}, "optimizer.muon has no 'steps': it takes lr, momentum"),
    "momentum": ({"name": "muon", "muon": {"momentum": 1.0}}, "momentum takes a number from 0 and below 1; found 1.0"),
    "its lr": ({"muon": {"lr": 0}}, "lr takes a number above 0; found 0"),
    "steps": ({"name": "muon", "muon": {"ns_steps": 0}}, "ns_steps takes a whole number from 1 to 99"),
    "scaling": ({"name": "muon", "muon": {"adjust_lr": "rms"}}, "adjust_lr takes match_rms_adamw or original"),
    "a group": ({"groups": [{"match": "*", "name": "muon"}]}, "asks for Muon for '.*', and optimizer.name is adamw"),
    "a group's name": ({"name": "muon", "groups": [{"match": "*", "name": "sgd"}]}, "optimizer.groups"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_is_one_line(case):
    keys, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        section(**keys)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"offload": {"optimizer": "host"}}, "offload.optimizer=host and .* leave it: type offload.optimizer=none"),
        ({"offload": {"optimizer": "auto"}}, "offload.optimizer=auto and .* leave it"),
        ({"precision": "fp64"}, "updates fp32 masters, and precision=fp64 has none"),
    ],
)
def test_moments_in_8_bits_are_on_the_device_and_of_fp32_masters(more, words):
    with pytest.raises(ConfigError, match=words):
        load(RUN | {"optimizer": {"name": "adamw8bit"}} | more)


# --- weight decay ---------------------------------------------------------------------------------

# Beside those of tests/families.py: norms per head, marked relative positions, a base named like a norm.
MORE = {
    "cohere": {"use_qk_norm": True},
    "stablelm": {"qk_layernorm": True},
    "roberta-prelayernorm": {"is_decoder": True},
}
WITH_TWO = {
    "gpt_oss": ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"],
    "cohere": ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],
}


def of_trainer(model):
    """The parameters that transformers' Trainer does not decay."""
    from transformers import Trainer

    return {name for name, _ in model.named_parameters()} - set(Trainer.get_decay_parameter_names(None, model))


@pytest.mark.parametrize("name", sorted(CONFIGS | MORE))
def test_what_transformers_does_not_decay_has_no_decay_by_default(name):
    with torch.device("meta"):
        model = family(name, **MORE.get(name, {}))
    named, theirs, ours = dict(model.named_parameters()), of_trainer(model), norms_and_biases(model)
    if name == "roberta-prelayernorm":
        assert named.keys() - theirs == {"lm_head.dense.weight"}, "all of the base is named so"
        assert ours == of_one_dimension(model)
        return
    assert theirs <= ours
    recurrent = own_of_recurrences(model)
    assert all(named[each].dim() < 2 for each in ours - theirs - recurrent)
    own = {each.split(".", 3)[-1] for each in ours - recurrent if named[each].dim() == 2}
    assert sorted(WITH_TWO.get(name, [])) == sorted(own)


def test_relative_positions_are_biases():
    import transformers as t

    config = t.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with torch.device("meta"):
        model = t.T5ForConditionalGeneration(config)
    relative = {name for name, p in model.named_parameters() if p.dim() == 2 and name in norms_and_biases(model)}
    assert relative == {
        f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for part in ("encoder", "decoder")
    }


class HeadNorm(nn.Module):
    """A norm of a user's own, with a weight for each head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


class NormedLinear(nn.Linear):
    """A matrix, whatever it is called."""


def test_the_class_of_a_module_and_its_own_mark_tell_norms_from_matrices():
    model = nn.ModuleDict({"scale": HeadNorm(), "up": NormedLinear(4, 4), "marked": nn.Linear(4, 4, bias=False)})
    model["marked"].weight._no_weight_decay = True
    model["mixer"] = nn.ParameterDict({"A_log": torch.ones(4, 2), "mix": torch.ones(4, 2), "gate": torch.ones(4)})
    assert norms_and_biases(model) == {"scale.weight", "up.bias", "marked.weight", "mixer.A_log", "mixer.gate"}


@pytest.mark.parametrize(("no_decay", "groups"), [
    ("auto", [["scale.weight", "up.bias"]]), (None, [["up.bias"]]), ("*.weight", [["scale.weight", "up.weight"]]),
    ("scale.* | up.weight", [["scale.weight", "up.weight"]]),
])  # fmt: skip
def test_the_default_a_pattern_and_dimensions_alone_choose_what_has_no_decay(no_decay, groups):
    model = nn.ModuleDict({"scale": HeadNorm(), "up": NormedLinear(4, 4)})
    assert section().no_decay == "auto"
    found = parameter_groups(model, section(no_decay=no_decay))
    assert [group["match"].split("|") for group in found] == groups
    assert [group["weight_decay"] for group in found] == [0.0]
