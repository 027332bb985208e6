"""Settings of a plan: each has one place, the section that declares it, whatever way it is written."""

import json
from dataclasses import fields, replace

import pytest

from zero3d.config import load
from zero3d.errors import ConfigError, MeshError
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.sections import SECTIONS, planned
from zero3d.spec.zero import Zero
from zero3d.tools.plan.emit import plan_of, train_config
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ORDER, PLAN_KEYWORDS, ParallelPlan
from zero3d.tools.plan.spec_json import from_json, to_json

MODEL = gpt(8, 64, 8, 128, 32)
KEYS = [(name, *place) for name, place in PLAN_KEYWORDS.items() if place[1]]
NUMBERS = {"stage": [0, 1, 2], "fraction": [0.25], "dp": [4], "tp": [2], "pp": [2], "ep": [2], "sp": [2], "shard": [1],
           "second_shard": [2], "communicators": [1]}  # fmt: skip
PIPELINE = ParallelPlan(dp=2, tp=2, pp=2, accumulate=4, activations="full")
BASES = (
    *(
        PIPELINE,
        PIPELINE.replace(offload="host"),
        PIPELINE.replace(pp=1),
        PIPELINE.replace(tp=1, pp=1, offload="host", gradients="host"),
        PIPELINE.replace(ep=2),
        PIPELINE.replace(sp=2),
        PIPELINE.replace(shard=1),
        PIPELINE.replace(shard=1, slow_wire="int8"),
    ),
    *(PIPELINE.replace(precision=name) for name in ("fp16", "fp64")),
)


def others(name, section, key):
    """The values that a key may have beside that of a plan which says nothing."""
    field, plain = SECTIONS[section].__dataclass_fields__[key], ParallelPlan().as_dict()[name]
    if isinstance(plain, bool):
        return [not plain]
    choices = [each for each in field.metadata["choices"] if each != plain and (name, each) != ("offload", "auto")]
    return NUMBERS.get(name) or choices


@pytest.mark.parametrize(("name", "section", "key"), KEYS)
def test_a_keyword_and_a_key_of_a_file_set_the_same_key_and_no_other(name, section, key):
    plain = ParallelPlan()
    assert others(name, section, key)
    for value in others(name, section, key):
        plan = ParallelPlan(**{name: value})
        assert getattr(getattr(plan, section), key) == value
        assert plan.as_dict() == plain.as_dict() | {name: value}
        assert plan == plain.replace(**{name: value}) == plain.replace(**{f"{section}.{key}": value})
        assert hash(plan) == hash(plain.replace(**{name: value}))
        assert plan != plain


def test_what_no_section_has_is_a_field_by_either_name():
    plan = ParallelPlan(micro_batch=2, optimizer="muon", ema=0.9, replay=5)
    again = ParallelPlan(**{"train.micro_batch": 2, "optimizer.name": "muon", "train.ema": 0.9, "health.replay": 5})
    assert plan == again
    assert (plan.micro_batch, plan.optimizer, plan.averages, plan.replay) == (2, "muon", 1, 5)


def test_a_key_changes_the_section_beside_it_and_leaves_its_other_keys():
    plan = ParallelPlan(offload=Offload("host", fraction=0.5), moments="bf16", zero=Zero(2))
    assert plan.offload == Offload("host", fraction=0.5, moments="bf16")
    assert plan.replace(offload="disk").offload == Offload("disk", fraction=0.5, moments="bf16")
    assert plan.replace(offload=Offload()).offload == Offload()
    assert plan.replace(offload="disk").zero is plan.zero


def test_degrees_and_schedule_of_a_plan_are_known():
    plan = ParallelPlan(mesh=Mesh(dp=8, experts="fast"))
    assert plan == ParallelPlan(dp=8, experts="fast")
    assert (plan.dp, plan.tp, plan.pp, plan.ep, plan.schedule) == (8, 1, 1, 1, "1f1b")
    assert None not in {plan.as_dict()[name] for name in ("dp", "tp", "pp", "ep", "schedule")}


@pytest.mark.parametrize("name", ["stge", "zero.stge", "train.stage", "offload.optimiser"])
def test_a_setting_that_a_plan_does_not_have_is_refused_with_the_nearest(name):
    with pytest.raises(
        ConfigError, match=rf"^a plan has no setting '{name}': it has .*Did you mean '.*(stage|optimizer)'\?$"
    ):
        ParallelPlan(**{name: 3})


def test_a_part_of_a_section_is_refused_where_the_rest_would_be_lost():
    plan = ParallelPlan(offload="host", params="host")
    assert replace(plan, offload=Offload("disk")).offload == Offload("disk")
    with pytest.raises(ConfigError, match=r"^dataclasses.replace\(plan, ...\) takes whole sections: plan.replace"):
        replace(plan, offload="disk")
    with pytest.raises(ConfigError, match=r"is a mapping: pass a zero3d\.spec record, or each key by itself"):
        ParallelPlan(offload={"optimizer": "host"})


def test_what_no_plan_prices_is_no_setting_of_one():
    unpriced = {key.name for kind in SECTIONS.values() for key in fields(kind) if not key.metadata["in_plan"]}
    assert unpriced > {"gather_budget", "directory", "tp_plan"}
    for name in unpriced:
        with pytest.raises(ConfigError, match=f"no setting '{name}'"):
            ParallelPlan(**{name: "64MB"})
    assert planned(Offload("host", directory="somewhere", host_budget="1GB")) == Offload("host")
    assert planned(Mesh(dp=2, tp_plan={"*": "colwise"}, blocks="layers")) == Mesh(dp=2)


def test_a_plan_of_a_file_has_what_is_priced_and_is_a_key_of_tables():
    file = {"mesh": {"dp": 2, "tp": 2, "tp_plan": {"*": "colwise"}}, "zero": {"stage": 2, "gather_budget": "64MB"},
            "offload": {"optimizer": "host", "directory": "here", "host_budget": "1GB"},
            "train": {"batch": 4, "micro_batch": 1}}  # fmt: skip
    plan = plan_of(load(file), None)
    assert plan == ParallelPlan(dp=2, tp=2, stage=2, offload="host", accumulate=2, tiled_loss="auto")
    assert {plan: 1}[ParallelPlan(dp=2, tp=2, stage=2, offload="host", accumulate=2, tiled_loss="auto")] == 1


@pytest.mark.parametrize(("name", "section", "key"), KEYS)
def test_an_emitted_file_says_every_key_and_means_the_plan(name, section, key):
    """Where rules refuse a file, another base has it."""
    meant = set()
    for base in BASES:
        for value in others(name, section, key):
            plan = base.replace(**{name: value})
            plan = plan.replace(virtual=1 + (plan.schedule != "1f1b" and plan.schedule != "gpipe"))
            tree = train_config(MODEL, plan, "demo", None)
            try:
                found = plan_of(load(tree), plan.world)
            except (ConfigError, MeshError):
                continue
            if tree.get(section, {}).get(key) == value:
                assert found == plan
                meant.add(value)
    assert meant == set(others(name, section, key))


def test_json_has_a_plan_s_keywords_in_their_order_and_comes_back():
    plan = PIPELINE.replace(offload="host", sequence_parallel=True, ema=0.9)
    tree = json.loads(json.dumps(to_json(plan)))
    assert tree == plan.as_dict()
    assert [name for name in tree if name in ORDER] == list(ORDER)
    assert list(tree)[: len(ORDER)] == list(ORDER)
    assert list(tree) == list(PLAN_KEYWORDS)
    assert from_json(ParallelPlan, tree) == plan
