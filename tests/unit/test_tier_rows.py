"""Rows of tiers: what each says fits together, opens what it names, and is what records, plans and rules have of it."""

from dataclasses import fields, replace
from math import inf
from pkgutil import resolve_name

import pytest
from by_hand import model_of

from zero3d.blueprint.auto import Room
from zero3d.blueprint.places import FROZEN, UnitStates, placed_records
from zero3d.errors import ConfigError
from zero3d.offload.tiers import OpenTier
from zero3d.spec.offload import Offload
from zero3d.spec.rules import refusals
from zero3d.spec.sections import Spec
from zero3d.spec.tiers import ACTIVATIONS, GRADIENTS, HOST, OPTIMIZER, PARAMS, TIERS, TierRow, tiers_of
from zero3d.spec.zero import Zero
from zero3d.tools.plan import emit
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.search import ROUNDS
from zero3d.tools.plan.spec import ClusterSpec, ParallelPlan
from zero3d.tools.plan.tier_time import Rates

KEYS = (OPTIMIZER, PARAMS, GRADIENTS, ACTIVATIONS)
rows = pytest.mark.parametrize("row", TIERS.values(), ids=lambda row: row.name)


@rows
def test_a_row_names_the_class_that_opens_it_keys_of_the_section_and_fields_of_a_cluster(row):
    assert issubclass(resolve_name(row.call), OpenTier)
    assert row.keeps
    assert set(row.keeps) <= set(KEYS)
    assert row.addressed or not {GRADIENTS, ACTIVATIONS} & set(row.keeps)
    said = {figure for figure in (row.read, row.write, row.capacity) if isinstance(figure, str)}
    assert said <= {each.name for each in fields(ClusterSpec)}


def test_one_tier_commits_its_steps():
    """Another one's would have to be committed at the same moment."""
    assert len([row for row in TIERS.values() if row.slots > 1]) == 1


@pytest.mark.parametrize("key", KEYS)
def test_a_key_takes_the_tiers_whose_rows_keep_it(key):
    for row in TIERS.values():
        if key in row.keeps:
            assert Offload.of({key: row.name, "activations": row.name if key == ACTIVATIONS else "none"})
        else:
            with pytest.raises(ConfigError, match=f"offload.{key}={row.name} is unknown"):
                Offload.of({key: row.name})


@pytest.mark.parametrize("name", tiers_of(OPTIMIZER))
def test_records_have_the_slots_and_the_weights_that_their_tiers_row_says(name):
    row, offload = TIERS[name], Offload(name, params=name if PARAMS in TIERS[name].keeps else "none")
    units = [UnitStates(64, 2, 2, [(64, 8)]), UnitStates(64, 2, 2, [(64, 8)], trainable=False)]
    for record in placed_records(units, offload, 64):
        assert (record.place, record.slots) == (name, 1 if record.kind == FROZEN else row.slots)
    alone = next(iter(placed_records(units[:1], Offload(name), 64)))
    assert alone.nbytes == 64 * (2 + 8 + 2 * row.whole)  # remainder, states, and the weight


@pytest.mark.parametrize("name", tiers_of(OPTIMIZER))
def test_a_tier_with_files_asks_for_a_folder_and_others_do_not(name):
    spec = Spec(zero=Zero(stage=3), offload=Offload(name))
    found = [why for _, why in refusals(spec)]
    assert found == [f"offload.optimizer={name} needs a folder: type offload.directory=FOLDER on a local disk."] * (
        TIERS[name].folder
    )
    assert spec.offload.uses_folder is TIERS[name].folder


def test_a_rank_may_take_of_a_tier_what_bounds_it():
    """The budget of the host, nothing of a CPU's, whose device that is; a folder, or none; its part of a tier's own."""
    room, own = Room(10, 20, folder=False, ranks=4), {"where": "", "keeps": (OPTIMIZER,), "call": ""}
    on_host, files = TierRow("a", on_host=True, **own), TierRow("b", folder=True, **own)
    assert (room.at(on_host), room._replace(host=None).at(on_host)) == (20, -1)
    assert (room.at(files), room._replace(folder=True).at(files)) == (-1, inf)
    assert room.at(TierRow("c", capacity=100.0, **own)) == 25


def test_states_go_to_the_first_tier_and_weights_no_further():
    turns = ROUNDS["auto"]
    assert [{away.optimizer for away in turn} for turn in turns] == [
        {"none"},
        *({name} for name in tiers_of(OPTIMIZER)),
    ]
    names = list(TIERS)
    for number, name in enumerate(("none", *tiers_of(OPTIMIZER))):
        assert ROUNDS[name] == (sum(turns[: number + 1], ()),)
    for away in sum(turns[1:], ()):
        assert away.params == "none" or names.index(away.params) <= names.index(away.optimizer)


@pytest.mark.parametrize("name", tiers_of(OPTIMIZER))
def test_a_plan_has_bytes_and_seconds_of_a_tier_by_the_clusters_fields(name):
    row, place = TIERS[name], cluster("a100-80", 8)
    plan = ParallelPlan(dp=8, stage=3, offload=name)
    memory = evaluate(model_of(), place, plan).memory
    assert memory.away[name]["optimizer"] > 0
    assert row.on_host or memory.tiers[name] == 8 * sum(memory.away[name].values())
    rates = [place.figure(said) / 8 for said in (row.read, row.write)]
    assert list(Rates.of(place, name)[2:]) == rates
    if isinstance(row.capacity, str):
        less, counted = replace(place, **{row.capacity: 1.0}), HOST if row.on_host else name
        assert memory.lacks(less) == {counted: memory.by_tier()[counted] - 1}
        assert f"{counted} memory: " in " ".join(evaluate(model_of(), less, plan).notes)
    assert memory.lacks(place) == {}


def test_deepspeeds_json_refuses_a_tier_that_it_does_not_have(monkeypatch):
    monkeypatch.setattr(emit, "DEEPSPEED", {"disk": "nvme"})
    with pytest.raises(ConfigError, match="DeepSpeed's JSON has no states on the host: pass --offload disk"):
        emit.deepspeed_config(ParallelPlan(dp=8, stage=3, offload="host"))
