"""The section `optimizer`: which optimizer it builds, and what it refuses."""

import pytest
import torch

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.optim.eight_bit import AdamW8bit
from zero3d.optim.muon_optimizer import MuonRule
from zero3d.setup.optimizer import optimizer_of

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
