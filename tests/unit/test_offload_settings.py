"""What may leave the device, as settings: of an Engine, in a mapping, and refused where nothing could be done."""

import pytest
import torch
from models import build

import zero3d
from zero3d.engine.checks import check_moments
from zero3d.memory.offload import Offload


def test_a_mapping_a_record_and_none_are_the_same_settings():
    assert Offload.of(None) == Offload.of({}) == Offload() == zero3d.Offload()
    asked = Offload.of({"optimizer": "disk", "directory": "/scratch", "host_budget": "64GB"})
    assert asked == Offload(optimizer="disk", directory="/scratch", host_budget=64 * 10**9)
    assert Offload.of(asked) == asked


@pytest.mark.parametrize(("given", "message"), [
    ({"optimiser": "host"}, r"offload has no key 'optimiser': it has optimizer, .*Did you mean 'optimizer'\?"),
    ({"optimizer": "cpu"}, r"offload\.optimizer='cpu' is unknown: type one of none, host, disk, auto\."),
    ({"fraction": 0}, r"offload\.fraction='0': type a number above 0, up to 1"),
    ({"fraction": True}, r"offload\.fraction='True': type a number above 0"),
    ({"directory": 5}, r"offload\.directory='5' is no folder: pass a path"),
    ({"host_budget": "64 gigabytes"}, r"offload\.host_budget '64 gigabytes' is no size"),
    ("host", r"offload='host': pass a mapping such as \{'optimizer': 'host'\}"),
])  # fmt: skip
def test_what_no_setting_can_be_is_refused(given, message):
    with pytest.raises(zero3d.ConfigError, match=message):
        Offload.of(given)


@pytest.mark.parametrize(("given", "stage", "message"), [
    ({"params": "host"}, 2, "keeps all parameters gathered on the device: type stage 3, or offload.params=none"),
    ({"gradients": "host", "optimizer": "host"}, 1, "type stage 2 or 3, or offload.gradients=device"),
    ({"optimizer": "disk"}, 3, "offload.optimizer=disk needs a folder: pass offload.directory=FOLDER"),
    ({"params": "disk"}, 3, "offload.params=disk needs a folder: pass offload.directory=FOLDER"),
    ({"moments": "bf16"}, 3, "offload.optimizer is none: type offload.optimizer=host, or leave offload.moments out"),
    ({"moments": "bf16", "params": "host"}, 3, "or leave offload.moments out"),
    ({"executor": "host"}, 3, "offload.optimizer is none: type offload.optimizer=host, or leave offload.executor out"),
    ({"moments": "bf16", "optimizer": "auto"}, 3, "type offload.optimizer=host, or offload.moments=fp32"),
    ({"fraction": 0.5, "optimizer": "auto"}, 3, "which finds the fraction itself: leave it out"),
])  # fmt: skip
def test_an_engine_refuses_what_it_could_not_do_and_leaves_the_model_alone(given, stage, message):
    model = build("net")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(zero3d.ConfigError, match=message):
        zero3d.Engine(model, stage=stage, precision="fp32", offload=given)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("given", "stage"), [
    ({"executor": "host", "optimizer": "auto"}, 0),
    ({"moments": "bf16", "optimizer": "host"}, 0),
    ({"executor": "device"}, 0),
    ({"gradients": "host", "optimizer": "host"}, 2),
    ({"params": "disk", "directory": "/scratch"}, 3),
])  # fmt: skip
def test_what_can_be_done_is_not_refused(given, stage):
    Offload.of(given).check(stage)


@pytest.mark.parametrize(("make", "named"), [
    (lambda params: torch.optim.SGD(params, lr=0.1), "SGD"),
    (lambda params: torch.optim.AdamW(params, amsgrad=True), r"AdamW\(amsgrad=True\)"),
])  # fmt: skip
def test_bf16_moments_are_those_of_adam(make, named):
    offload = Offload(optimizer="host", moments="bf16")
    with pytest.raises(zero3d.ConfigError, match=f"the optimizer is {named}: use one of them without amsgrad"):
        check_moments(offload, make([torch.zeros(4)]))
    check_moments(Offload(optimizer="host"), make([torch.zeros(4)]))
    check_moments(offload, torch.optim.Adam([torch.zeros(4)]))


def test_an_engine_refuses_bf16_moments_of_an_optimizer_that_is_there_already():
    model = build("net")
    with pytest.raises(zero3d.ConfigError, match="the optimizer is SGD"):
        zero3d.Engine(
            model,
            precision="fp32",
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            offload=Offload(optimizer="host", moments="bf16"),
        )
