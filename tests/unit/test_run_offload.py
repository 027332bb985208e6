"""What leaves the device in a run: chosen by its plan, kept in checkpoints, said in lines, and cleaned up."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import adamw, build

import zero3d
from zero3d.account.transients import passing_bytes
from zero3d.blueprint.auto import Room, auto_place
from zero3d.checkpoint.fields import Field
from zero3d.config import load
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import update_bucket
from zero3d.spec.offload import Offload
from zero3d.tools.advice.planned_run import PlannedRun
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster as hardware
from zero3d.tools.plan.shapes import fused, gpt, llama
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.train import offload
from zero3d.train.folder import Folder
from zero3d.train.loop_state import LoopState, check_choice

GB = 10**9
PARTS = {"parameters": 20 * GB, "gradients": 10 * GB, "optimizer": 60 * GB, "activations": 6 * GB}


def plan():
    """A plan whose fullest instant has these bytes."""
    return PlannedRun(None, None, None, SimpleNamespace(memory=SimpleNamespace(parts=dict(PARTS), instant="logits")))


def chosen(words, monkeypatch, room=None, checkpoint=None, planned=None, kept=None):
    """What a run of one rank chooses: its section, and the lines that it says."""
    mesh = zero3d.Mesh()
    monkeypatch.setattr(offload, "room_of", lambda mesh, settings: room)
    monkeypatch.setattr(offload, "saved_choice", lambda path: kept or {})
    with mesh.waiting_room() as axis:
        comm = Comm(axis, Arena(torch.device("cpu")), Ledger())
        config, lines = offload.choose(load({}, words), mesh, comm, checkpoint, planned)
    return config.offload, lines


# --- chosen -------------------------------------------------------------------------------------


def test_where_nothing_is_open_nothing_is_asked(monkeypatch):
    for words in ([], ["offload.params=host"], ["offload.optimizer=host", "offload.executor=device"]):
        section, lines = chosen(words, monkeypatch, kept={"optimizer": "disk"}, checkpoint=Path("c"))
        assert section == load({}, words).offload
        assert lines == []


def test_rank_0s_plan_decides_activations_included(monkeypatch):
    auto = ["offload.optimizer=auto", "offload.executor=host"]
    section, lines = chosen(auto, monkeypatch, Room(66 * GB, 40 * GB, False), planned=plan())
    assert (section.optimizer, section.fraction, section.executor) == ("host", 0.5, "host")
    assert "gradients 10.00 GB + activations 6.00 GB = 96.00 GB (logits)" in lines[0]
    section, _ = chosen(auto, monkeypatch, Room(66 * GB, None, False), planned=plan())
    assert section.optimizer == "disk"  # whose folder is the output's
    section, _ = chosen(auto, monkeypatch, Room(99 * GB, None, False), planned=plan())
    assert (section.optimizer, section.executor) == ("none", "device")


def test_buffers_on_the_device_are_counted_where_it_updates(monkeypatch):
    section, _ = chosen(["offload.optimizer=auto"], monkeypatch, Room(66 * GB, 40 * GB, False), planned=plan())
    assert 0.5 < section.fraction < 0.51


@pytest.mark.parametrize(("words", "width"), [
    ([], 12), (["precision=fp32"], 8), (["precision=fp64"], 16), (["zero.master=split"], 10), (["optimizer.name=muon"], 12),
])  # fmt: skip
def test_what_passes_through_the_device_is_as_wide_as_an_engines_records(words, width):
    need = plan().need(load({}, words), zero3d.Mesh())
    assert need.record == width * update_bucket("cpu")
    assert need.passing == passing_bytes("auto", need.record, "cpu", splits="zero.master=split" in words)


def test_gradients_count_beside_logits_where_a_step_has_several_micro_batches():
    """A model of 4 blocks with many words: its fullest instant is that of the loss, which with one has no gradients."""
    model, cluster = fused(llama(4, 1024, 8, 8, 2816, 64_000, 4096)), hardware("h100", 1)
    gradients = 4 * model.params
    need = {}
    for count in (1, 4):
        plan = ParallelPlan(stage=2, accumulate=count, activations="full")
        run = PlannedRun(model, cluster, plan, evaluate(model, cluster, plan))
        need[count] = run.need(load({}, [f"train.accumulate={count}"]), zero3d.Mesh())
        assert need[count].fullest == "logits and loss"
        held = run.estimate.memory
        assert need[count].states + sum(need[count].others.values()) == pytest.approx(
            held.allocated, abs=len(held.parts)
        )
    assert need[1].others.get("gradients", 0) == 0
    assert need[4].others["gradients"] == gradients
    rooms = {count: need[count].states + sum(need[count].others.values()) for count in need}
    fits = Room(rooms[1], 10**12, False)
    assert [auto_place(need[count], fits).optimizer for count in need] == ["none", "host"]
    assert rooms[4] - rooms[1] == pytest.approx(gradients, rel=0.01)


def test_a_plan_that_is_made_again_is_of_the_configuration_given():
    model, cluster, plan = gpt(2, 64, 4, 256, 32), hardware("h100", 1), ParallelPlan()
    run = PlannedRun(model, cluster, plan, evaluate(model, cluster, plan))
    again = run.again(load({}, ["offload.optimizer=host"]), zero3d.Mesh())
    assert again.plan.offload.optimizer == "host"
    assert again.estimate.memory.host > run.estimate.memory.host


@pytest.mark.parametrize("planned", [None, "no plan to compare this run with: it is short"])
def test_without_a_plan_it_is_left_to_the_engine(monkeypatch, planned):
    section, lines = chosen(["offload.optimizer=auto"], monkeypatch, Room(0, None, False), planned=planned)
    assert (section.optimizer, lines) == ("auto", [])


@pytest.mark.parametrize(("memory", "executor"), [(8e9, "device"), (8e12, "host")])
def test_the_clusters_rates_choose_the_executor_of_states_on_a_disk(monkeypatch, memory, executor):
    cluster = replace(hardware("h100", 8), host_bandwidth=memory)
    planned = replace(plan(), cluster=cluster)
    on_card = SimpleNamespace(device=torch.device("cuda"), world=1)
    monkeypatch.setattr(offload, "room_of", lambda mesh, settings: Room(66 * GB, 40 * GB, False))
    with zero3d.Mesh().waiting_room() as axis:
        comm = Comm(axis, Arena(torch.device("cpu")), Ledger())
        chosen = {
            asked: offload.choose(load({}, [f"offload.optimizer={asked}"]), on_card, comm, None, planned)
            for asked in ("disk",)
        }
    for config, lines in chosen.values():
        assert (config.offload.optimizer, config.offload.executor) == ("disk", executor)
        assert lines[-1].startswith("offload.executor=auto: ")
        assert f"on the {executor}" in lines[-1]


@pytest.mark.parametrize("words", [["optimizer.name=muon"], ["precision=fp64"]])
def test_what_the_host_cannot_update_is_updated_on_the_device_whatever_is_faster(monkeypatch, words):
    planned = replace(plan(), cluster=replace(hardware("h100", 8), host_bandwidth=8e12))
    on_card = SimpleNamespace(device=torch.device("cuda"), world=1)
    with zero3d.Mesh().waiting_room() as axis:
        comm = Comm(axis, Arena(torch.device("cpu")), Ledger())
        monkeypatch.setattr(offload, "room_of", lambda mesh, settings: Room(66 * GB, 40 * GB, False))
        config, lines = offload.choose(load({}, ["offload.optimizer=disk", *words]), on_card, comm, None, planned)
    assert config.offload.executor == "device"
    assert "the host updates fp32 states of AdamW alone" in lines[-1]


def test_what_an_engine_has_measured_is_in_the_configuration_of_its_plan():
    for device, words, executor in (
        ("cuda", ["offload.optimizer=host"], "device"), ("cuda", ["offload.optimizer=host", "offload.executor=host"], "host"),
        ("cpu", ["offload.optimizer=host"], "auto"), ("cuda", [], "auto"),
    ):  # fmt: skip
        engine = SimpleNamespace(mesh=SimpleNamespace(device=torch.device(device)), offload=Offload(executor="device"))
        assert offload.as_measured(load({}, words), engine).offload.executor == executor


# --- kept ---------------------------------------------------------------------------------------


KEPT = {"optimizer": "host", "fraction": 0.5, "executor": "device"}


def test_what_was_chosen_before_is_chosen_again_and_a_value_in_the_file_wins(monkeypatch):
    given = {"checkpoint": Path("out/step-3"), "kept": KEPT, "planned": plan()}
    section, lines = chosen(["offload.optimizer=auto"], monkeypatch, Room(0, None, False), **given)
    assert (section.optimizer, section.fraction, section.executor) == ("host", 0.5, "device")
    assert len(lines) == 1
    assert "optimizer host, fraction 0.5, executor device: as auto chose before out/step-3" in lines[0]
    section, _ = chosen(["offload.optimizer=disk"], monkeypatch, **given)
    assert (section.optimizer, section.fraction, section.executor) == ("disk", 1.0, "device")
    explicit = ["offload.optimizer=disk", "offload.executor=host"]
    assert chosen(explicit, monkeypatch, **given) == (load({}, explicit).offload, [])


def test_a_kept_place_of_nothing_needs_no_executor(monkeypatch):
    kept = {"optimizer": "none", "fraction": 1.0}
    words = ["offload.optimizer=auto", "offload.executor=host"]
    section, _ = chosen(words, monkeypatch, checkpoint=Path("c"), kept=kept)
    assert (section.optimizer, section.executor) == ("none", "device")


@pytest.mark.parametrize(("words", "kept"), [
    ([], None),
    (["offload.optimizer=host", "offload.executor=device"], None),
    (["offload.optimizer=host"], {"executor": "host"}),
    (["offload.optimizer=auto"], {"optimizer": "none", "fraction": 1.0, "executor": "device"}),
    (["offload.optimizer=auto", "offload.executor=device"], {"optimizer": "none", "fraction": 1.0}),
])  # fmt: skip
def test_a_checkpoint_keeps_what_was_open_and_nothing_else(words, kept):
    config = load({}, words)
    engine = zero3d.Engine(build("net"), precision="bf16", optimizer=adamw, offload=vars(config.offload))
    assert offload.choice_of(config, engine) == kept
    if kept is not None:
        check_choice(Field("manifest.json", "loop.offload", kept))


@pytest.mark.parametrize("choice", [
    {"optimizer": "host", "fraction": 0}, {"optimizer": "cpu"}, {"executor": "auto"}, {"params": "host"}, ["host"],
])  # fmt: skip
def test_a_choice_that_no_run_has_kept_is_refused(choice):
    with pytest.raises(zero3d.CheckpointError, match=r"manifest\.json: loop\.offload"):
        check_choice(Field("manifest.json", "loop.offload", choice))


def test_a_choice_is_read_from_a_checkpoint_and_one_that_is_damaged_or_older_has_none(tmp_path):
    engine = zero3d.Engine(build("net"), precision="bf16", optimizer=adamw)
    state = vars(replace(LoopState(), offload=KEPT))
    saved = engine.save(tmp_path / "new", state)
    assert offload.saved_choice(saved) == KEPT
    assert offload.saved_choice(engine.save(tmp_path / "old", {"step": 0})) == {}
    assert offload.saved_choice(engine.save(tmp_path / "engine")) == {}
    (saved / "manifest.json").write_text("{")
    assert offload.saved_choice(saved) == {}


# --- said, and cleaned up -----------------------------------------------------------------------


def test_a_line_says_what_is_where(tmp_path):
    engine = zero3d.Engine(build("net"), precision="bf16", optimizer=adamw)
    assert offload.described(engine) is None
    away = {"optimizer": "disk", "params": "host", "directory": tmp_path, "fraction": 0.5}
    line = offload.described(zero3d.Engine(build("net"), precision="bf16", optimizer=adamw, offload=away))
    assert line.startswith("offload: optimizer states (0.5 of them) on the disk, weights on the host, updated on the ")
    assert line.endswith(f" on the disk in {tmp_path}")


@pytest.mark.parametrize(("directory", "ended", "left"), [
    ("offload", False, True), ("offload", True, False), ("elsewhere", False, False), (None, False, False),
])  # fmt: skip
def test_what_lies_on_a_disk_goes_with_the_run_that_needs_it(tmp_path, directory, ended, left):
    folder = Folder(tmp_path)
    folder.offload.mkdir()
    given = Offload() if directory is None else Offload("disk", directory=tmp_path / directory)
    offload.drop_leftovers(folder, SimpleNamespace(offload=given), ended)
    assert folder.offload.exists() is left


def test_a_folder_with_nothing_but_that_is_not_used(tmp_path):
    folder = Folder(tmp_path)
    folder.offload.mkdir()
    assert not folder.used
    (tmp_path / "mine.txt").write_text("")
    assert folder.used


def test_a_folder_gets_its_name_before_an_engine_that_may_write_into_it():
    for words, early in (
        ([], False), (["offload.optimizer=host"], False), (["offload.optimizer=disk"], True),
        (["offload.params=disk"], True), (["offload.optimizer=auto"], True),
        (["offload.optimizer=disk", "offload.directory=/local"], False),
    ):  # fmt: skip
        assert offload.may_use_folder(load({}, words)) is early
