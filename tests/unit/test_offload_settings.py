"""What may leave the device, as settings: of an Engine, of a file, and refused where nothing could be done."""

import pytest
import torch
from models import build

import zero3d
from zero3d.config import Config, Offload as Section, Zero, check, load, offload_of, to_yaml
from zero3d.offload.states import check_moments
from zero3d.spec.offload import Offload
from zero3d.spec.rules import refusals
from zero3d.spec.sections import Spec
from zero3d.spec.tiers import tiers_of
from zero3d.tools.cli.main import main
from zero3d.train.variants import check_variants, split_axes, variants


def test_a_mapping_a_record_and_none_are_the_same_settings():
    assert Offload.of(None) == Offload.of({}) == Offload() == zero3d.Offload()
    asked = Offload.of({"optimizer": "disk", "directory": "/scratch", "host_budget": "64GB"})
    assert asked == Offload(optimizer="disk", directory="/scratch", host_budget=64 * 10**9)
    assert Offload.of(asked) == asked


@pytest.mark.parametrize(("given", "message"), [
    ({"optimiser": "host"}, r"offload has no key 'optimiser': it has optimizer, .*Did you mean 'optimizer'\?"),
    ({"optimizer": "cpu"}, rf"offload\.optimizer=cpu is unknown: type one of none, {', '.join(tiers_of('optimizer'))}, auto\."),
    ({"fraction": 0}, r"offload\.fraction='0': type a number above 0, up to 1"),
    ({"fraction": True}, r"offload\.fraction='True': type a number above 0"),
    ({"directory": 5}, r"offload\.directory='5' is not a folder: pass a path"),
    ({"host_budget": "64 gigabytes"}, r"offload\.host_budget '64 gigabytes' is not a size"),
    ("host", r"offload='host': pass a mapping such as \{'optimizer': 'host'\}"),
])  # fmt: skip
def test_what_no_setting_can_be_is_refused(given, message):
    with pytest.raises(zero3d.ConfigError, match=message):
        Offload.of(given)


@pytest.mark.parametrize(("given", "stage", "message"), [
    ({"params": "host"}, 2, "needs stage 3, and stage=2 keeps all weights gathered on the device: type stage=3, or offload.params=none"),
    ({"gradients": "host", "optimizer": "host"}, 1, "type stage=2 or 3, or offload.gradients=device"),
    ({"optimizer": "disk"}, 3, "offload.optimizer=disk needs a folder: type offload.directory=FOLDER"),
    ({"params": "disk"}, 3, "offload.params=disk needs a folder: type offload.directory=FOLDER"),
    ({"moments": "bf16"}, 3, "offload.optimizer is none: type offload.optimizer=host, or leave offload.moments out"),
    ({"moments": "bf16", "params": "host"}, 3, "or leave offload.moments out"),
    ({"executor": "host"}, 3, "offload.optimizer is none: type offload.optimizer=host, or leave offload.executor out"),
    ({"moments": "bf16", "optimizer": "auto"}, 3, "Type offload.optimizer=host, or offload.moments=fp32"),
    ({"fraction": 0.5, "optimizer": "auto"}, 3, "which chooses the fraction itself: leave offload.fraction=0.5 out"),
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
    assert not list(refusals(Spec(Zero(stage), Offload.of(given))))


@pytest.mark.parametrize(("make", "named"), [
    (lambda params: torch.optim.SGD(params, lr=0.1), "SGD"),
    (lambda params: torch.optim.AdamW(params, amsgrad=True), r"AdamW\(amsgrad=True\)"),
])  # fmt: skip
def test_bf16_moments_are_those_of_adam(make, named):
    offload = Offload(optimizer="host", moments="bf16")
    with pytest.raises(zero3d.ConfigError, match=f"the optimizer is {named}: use one of them without amsgrad"):
        check_moments(offload.moments, make([torch.zeros(4)]))
    check_moments(Offload(optimizer="host").moments, make([torch.zeros(4)]))
    check_moments(offload.moments, torch.optim.Adam([torch.zeros(4)]))


def test_an_engine_refuses_bf16_moments_of_an_optimizer_that_is_there_already():
    model = build("net")
    with pytest.raises(zero3d.ConfigError, match="the optimizer is SGD"):
        zero3d.Engine(
            model,
            precision="fp32",
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            offload=Offload(optimizer="host", moments="bf16"),
        )


# --- the section of a file ----------------------------------------------------------------------


def test_a_section_of_a_file_is_what_an_engine_takes():
    assert isinstance(Config().offload, Offload)


def test_a_file_and_overrides_become_what_an_engine_takes(tmp_path):
    words = ["offload.optimizer=disk", "offload.fraction=0.5", "offload.host_budget=1.5GB", "zero.stage=2"]
    config = load({"output": "runs/a", "offload": {"optimizer": "host", "executor": "device"}}, words)
    settings = Offload("disk", fraction=0.5, directory="runs/a/offload", executor="device", host_budget=15 * 10**8)
    assert offload_of(config) == settings
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "run.yaml") == config
    assert offload_of(load({}, ["offload.host_budget=64e9"])).host_budget == 64 * 10**9


def test_the_folder_is_that_of_the_output_unless_it_is_named():
    assert offload_of(Config()).directory is None
    assert offload_of(load({"output": "a"})).directory == "a/offload"
    assert offload_of(load({"output": "a", "offload": {"directory": "/local"}})).directory == "/local"


REFUSED = [  # overrides, the key that is named, what to type
    (["offload.params=host", "zero.stage=2"], "offload.params=host needs stage 3, and zero.stage=2", "zero.stage=3"),
    (["offload.gradients=host", "zero.stage=1"], "offload.gradients=host needs stage 2 or 3, and zero.stage=1", "zero.stage=2 or 3"),
    (["offload.moments=bf16"], "offload.moments=bf16", "offload.optimizer=host"),
    (["offload.executor=host"], "offload.executor=host", "offload.optimizer=host"),
    (["offload.moments=bf16", "offload.optimizer=auto"], "offload.moments=bf16", "offload.moments=fp32"),
    (["offload.fraction=.5", "offload.optimizer=auto"], "offload.fraction=0.5", "leave offload.fraction=0.5 out"),
    (["offload.host_budget=64 gigs"], "offload.host_budget '64 gigs'", "a number with kB, MB, GB or TB"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "named", "remedy"), REFUSED)
def test_a_run_is_refused_in_one_line_before_it_starts(words, named, remedy, monkeypatch, capsys):
    monkeypatch.setattr("zero3d.tools.cli.train.run_job", lambda *_: pytest.fail("ranks were started"))
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert named in said
    assert remedy in said


def test_what_needs_a_folder_gets_the_outputs():
    config = load({}, ["offload.optimizer=disk", "offload.params=disk"])
    check(config)
    assert config.offload.directory is None


def test_a_configuration_built_in_python_is_checked_alike():
    with pytest.raises(zero3d.ConfigError, match=r"offload\.params=host needs stage 3, and zero\.stage=1"):
        check(Config(zero=Zero(stage=1), offload=Section(params="host")))
    with pytest.raises(zero3d.ConfigError, match="write 2 instead of '2'"):
        check(Config(zero=Zero(stage="2"), offload=Section(optimizer="host", gradients="host")))


def test_places_are_axes_of_a_comparison():
    axes, common = split_axes(["offload.optimizer=none,host,disk", "offload.params=none,host", "train.steps=2"])
    configs = check_variants(variants(axes), common, lambda _: None)
    places = [(config.offload.optimizer, config.offload.params) for config in configs]
    assert places == [(a, b) for a in ("none", "host", "disk") for b in ("none", "host")]


@pytest.mark.parametrize("words", [("offload.activations=host",), ("mesh.partition_activations=true", "mesh.tp=2")])
def test_inputs_of_blocks_that_nothing_recomputes_are_refused_before_a_run_starts(words):
    with pytest.raises(zero3d.ConfigError, match="is about the inputs of recomputed blocks, and none is recom"):
        load(None, words)
    assert load(None, (*words, "activations=full")).activations == "full"
