"""Plans whose states leave the device: bytes of every place by hand, seconds by rates, and how they are found and told."""

import json
from dataclasses import replace

import pytest
import yaml
from blueprints import unit_plan
from by_hand import BLOCK, DOWN, ENDS, HIDDEN, LENGTH, VOCAB, model_of

from zero3d.blueprint.places import UnitStates, placed_records
from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.offload.rounding import TILE
from zero3d.spec.offload import Offload
from zero3d.spec.tiers import tiers_of
from zero3d.tools.cli.main import main
from zero3d.tools.page import plan_json, plan_text
from zero3d.tools.page.plan_page import plan_page
from zero3d.tools.plan.emit import deepspeed_config, plan_of, train_config
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.ladder import RULE, ladder
from zero3d.tools.plan.memory import NOISE, memory
from zero3d.tools.plan.search import Row, Target, search
from zero3d.tools.plan.shapes import gpt, of_params
from zero3d.tools.plan.spec import ModelSpec, Operations, ParallelPlan, Part, Unit, Weight
from zero3d.tools.plan.states import check_rules, states
from zero3d.tools.plan.tier_time import (
    chosen_executor,
    executor_seconds,
    gradient_seconds,
    read_seconds,
    update_seconds,
)
from zero3d.tools.plan.time import step_seconds
from zero3d.tools.plan.what_if import what_if

PARAMS = 4 * BLOCK + 2 * ENDS
A100 = cluster("a100-80", 8)
P = ParallelPlan


def one_unit(numel, trainable=True):
    part = Part("block", (Unit("block", (Weight("block.weight", (numel,), trainable=trainable),)),), Operations(1.0))
    return ModelSpec("one unit", (part,), LENGTH, HIDDEN, VOCAB, heads=4, kv_heads=4)


# --- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "widths", "moments", "bytes_"), [
    ("host", (2, 4), 8, 12), ("host", (2, 2), 8, 10), ("host", (2, 2), 4, 6), ("host", (4, 0), 8, 8),
    ("disk", (2, 4), 8, 12), ("disk", (2, 2), 8, 12), ("disk", (2, 2), 4, 8), ("disk", (4, 0), 8, 8),
])  # fmt: skip
def test_bytes_of_an_element_in_records(place, widths, moments, bytes_):
    unit = UnitStates(1000, *widths, [(1000, moments)])
    records = list(placed_records([unit], Offload(place), bucket=400))
    assert [(record.elements, record.nbytes) for record in records] == [
        (400, 400 * bytes_), (400, 400 * bytes_), (200, 200 * bytes_),
    ]  # fmt: skip
    blocks = [-(-record.nbytes // 4096) * 4096 for record in records]
    assert [record.held for record in records] == [(2 if place == "disk" else 1) * size for size in blocks]


def test_weights_on_a_disk_are_records_of_their_own_and_frozen_ones_are_there_once():
    units = [UnitStates(100, 2, 2, [(100, 8)]), UnitStates(300, 2, 2, [(300, 8)], trainable=False)]
    found = list(placed_records(units, Offload("disk", "disk"), bucket=64))
    told = [(record.unit, record.kind, record.place, record.nbytes, record.slots) for record in found]
    assert told == [
        (0, "optimizer", "disk", 640, 2), (0, "optimizer", "disk", 360, 2),
        (0, "parameters", "disk", 200, 2), (1, "frozen", "disk", 600, 1),
    ]  # fmt: skip


def test_states_stay_on_the_device_where_weights_alone_leave():
    (states_, weights) = placed_records([UnitStates(100, 2, 4, [(100, 8)])], Offload(params="host"), bucket=128)
    assert (states_.kind, states_.place, states_.held) == ("optimizer", "device", 1200)
    assert (weights.kind, weights.place, weights.held) == ("parameters", "host", 4096)


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_what_is_needed_last_leaves_first(fraction):
    units = [UnitStates(100, 2, 4, [(100, 8)])] * 4
    found = placed_records(units, Offload("host", fraction=fraction), bucket=100)
    assert [record.place for record in found] == ["device", "device", "host", "host"]


def test_as_much_leaves_as_its_bytes_on_the_device_say():
    """Masters in halves are longer on a disk: the last unit has 800 of 1,800 bytes here, and 800 of 2,000 there."""
    units = [UnitStates(100, 2, 2, [(100, 8)]), UnitStates(100, 4, 0, [(100, 8)])]
    found = list(placed_records(units, Offload("disk", fraction=0.42), bucket=100))
    assert [(record.place, record.nbytes) for record in found] == [("device", 1000), ("disk", 800)]


def test_records_without_a_byte_stay():
    units = [UnitStates(100, 2, 4, [(100, 8)]), UnitStates(100, 4, 0, [(100, 0)])]
    found = list(placed_records(units, Offload("host"), bucket=100))
    assert [(record.place, record.nbytes) for record in found] == [("host", 1200), ("device", 0)]


def test_trained_units_have_gradients_off_the_device_as_wide_as_they_wait_there():
    asked = Offload("host", gradients="host", gradient_dtype="bf16")
    unit = unit_plan(2, offload=asked)
    trained = UnitStates.of(unit, 64, [(0, 16, ["a", "b"]), (16, 64, ["b"])], {"a": 4, "b": 2})
    assert trained == UnitStates(64, 2, 4, [(16, 6), (48, 2)], gradient=2, trainable=True)
    frozen = UnitStates.of(unit_plan(2, offload=asked, trainable=False), 64, [], {})
    found = [record for record in placed_records([frozen, trained], asked, 64) if record.kind == "gradients"]
    assert [(record.unit, record.place, record.nbytes) for record in found] == [(1, "host", 2 * 64)]


def test_records_are_cut_where_states_differ():
    (first, *rest) = placed_records([UnitStates(100, 2, 4, [(30, 8), (70, 4)])], Offload("host"), bucket=50)
    assert (first.elements, first.nbytes) == (30, 30 * 12)
    assert [(record.elements, record.nbytes) for record in rest] == [(50, 50 * 8), (20, 20 * 8)]
    assert [record.start for record in rest] == [30, 80]


# --- states of a rank -----------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "width", "slots"), [
    ({"offload": "host"}, 12, 1), ({"offload": "host", "master": "split"}, 10, 1),
    ({"offload": "host", "master": "split", "moments": "bf16"}, 6, 1), ({"offload": "host", "precision": "fp32"}, 8, 1),
    ({"offload": "host", "precision": "fp64"}, 16, 1),
    ({"offload": "disk", "master": "split"}, 12, 2), ({"offload": "disk", "master": "split", "moments": "bf16"}, 8, 2),
])  # fmt: skip
def test_optimizer_states_by_place(settings, width, slots):
    for stage, share in ((0, 1), (1, 4), (2, 4), (3, 4)):
        found = states(model_of(), P(dp=4, stage=stage, **settings))
        there = found.at(settings["offload"])
        assert there.states == (0, 0, slots * width * PARAMS / share)
        assert there.padding == 0  # shards of this model fill blocks
        here = states(model_of(), P(dp=4, stage=stage, precision=settings.get("precision", "bf16")))
        assert found.states == here.states._replace(optimizer=0)
        assert {held.total for held in found.away.values()} == {0, there.total}


def test_padding_is_what_shards_and_blocks_have_beyond_parameters():
    """10,000 parameters in a storage of 16,384, of which each of 5 ranks... 4 ranks have 4,096: 12 whole blocks."""
    found = states(one_unit(10_001), P(dp=4, stage=1, offload="host"))
    used = 12 * 4096 * 10_001 / 16_384
    assert found.at("host").states.optimizer == pytest.approx(used, abs=1e-6)
    assert found.at("host").total == 12 * 4096
    odd = states(one_unit(10_001), P(dp=4, stage=1, offload="disk", precision="fp32", moments="bf16"), dp_rank=3)
    assert odd.at("disk").total == 2 * 4 * 4096  # m and v of padding are in records, too


def test_weights_off_the_device_leave_none_of_them_there():
    for offload in ("none", "host"):
        found = states(model_of(), P(dp=4, stage=3, offload=offload, params="host"))
        assert found.device.states == (0, 4 * PARAMS / 4, 12 * PARAMS / 4 if offload == "none" else 0)
        assert found.at("host").states == (2 * PARAMS / 4, 0, 12 * PARAMS / 4 if offload == "host" else 0)
    frozen = states(one_unit(16_384, trainable=False), P(dp=2, stage=3, params="disk"))
    assert (frozen.device.total, frozen.at("disk").total) == (0, 2 * 8_192)


@pytest.mark.parametrize(("plan", "words"), [
    ({"stage": 2}, "needs stage 3, and zero.stage=2 keeps all weights gathered on the device: type zero.stage=3"),
    ({"stage": 3, "release": "every_step"}, "is for weights that are released after every use, .* type zero.release=every_use"),
])  # fmt: skip
def test_weights_that_stay_gathered_cannot_leave(plan, words):
    with pytest.raises(ConfigError, match=f"offload.params=host {words}"):
        states(model_of(), P(dp=2, params="host", **plan))


def test_gradients_on_the_host_are_one_record_a_unit():
    found = states(model_of(), P(dp=4, stage=2, offload="host", gradients="host"))
    assert found.device.states == (2 * PARAMS, 0, 0)
    assert found.at("host").states == (0, 4 * PARAMS / 4, 12 * PARAMS / 4)
    assert states(model_of(), P(dp=4, stage=2, offload="host", gradients="auto")).device.states.gradients == PARAMS
    with pytest.raises(ConfigError, match=r"offload\.gradients=host takes .* zero\.reduce=every_step keeps"):
        states(model_of(), P(dp=4, stage=2, offload="host", gradients="host", reduce="every_step"))
    slow = replace(A100, host_link=1e9)
    here, there = (executor_seconds(P(stage=2, offload="host", gradients=where), slow) for where in ("auto", "host"))
    assert there["device"] - here["device"] == pytest.approx(4 / 1e9)
    assert there["host"] - here["host"] == pytest.approx(-4 / 1e9)
    assert gradient_seconds(P(stage=2, offload="host", gradients="host", accumulate=3), slow, 1e9) == 20.0
    fp64 = P(stage=2, offload="host", gradients="host", precision="fp64", accumulate=3)
    assert gradient_seconds(fp64, slow, 1e9) == 40.0
    assert gradient_seconds(P(stage=2, offload="host"), slow, 1e9) == 0.0


def test_a_forward_needs_the_root_first_and_tied_weights_so_that_they_stay():
    model = model_of(tied=True, root=4096)
    whole = states(model, P(offload="host", stage=0))
    half = states(model, P(offload="host", stage=0, fraction=0.6))
    first = 12 * (16_384 + ENDS + BLOCK)  # root, the tied embedding, one of four blocks: 0.6 of all is 2.6 of them
    assert half.device.total - whole.device.total == first
    assert half.at("host").total == whole.at("host").total - first


def test_on_the_device_a_ring_and_a_bucket_s_scratch_are_left():
    longest = 12 * BLOCK // 4
    on_device = memory(model_of(), P(dp=4, stage=1, offload="host"))
    assert on_device.parts["ring"] == 3 * longest
    assert "ring" not in memory(model_of(), P(dp=4, stage=1, offload="host", executor="host")).parts
    assert "ring" not in memory(model_of(), P(dp=4, stage=3, params="host")).parts
    rounded = memory(model_of(), P(dp=4, stage=1, offload="host", moments="bf16"))
    assert rounded.parts["ring"] == 3 * 8 * BLOCK // 4 + NOISE
    assert NOISE == 4 * TILE


def test_a_node_s_host_and_disk():
    a = A100
    on_disk = memory(model_of(), P(dp=4, stage=1, offload="disk"), a)
    assert on_disk.tiers["disk"] == 4 * 2 * 12 * PARAMS / 4
    assert on_disk.away == {"disk": {"optimizer": 2 * 12 * PARAMS / 4}}
    longest = 12 * BLOCK // 4
    assert on_disk.on_host == {
        "process": 3e9,
        "slice": 4 * DOWN,
        "buffers": 3 * longest,
    }  # what a disk writes and reads
    assert on_disk.host == 4 * sum(on_disk.on_host.values())
    staged = memory(model_of(), P(dp=4, stage=1, offload="host", executor="host"), a)
    assert staged.on_host["buffers"] == (4 + 2) * BLOCK // 4  # a bucket's gradient and weights
    assert staged.on_host["records"] == 12 * PARAMS / 4
    read = memory(model_of(), P(dp=4, stage=3, params="disk"), a)
    assert read.on_host["buffers"] == 3 * 2 * BLOCK // 4


# --- seconds --------------------------------------------------------------------------------------

SPEC = replace(A100, host_link=10e9, host_bandwidth=80e9, disk=8e9)  # of a GPU's: 10, 10 and 1 GB/s


def test_records_go_there_and_back_or_the_host_updates_them():
    found = executor_seconds(P(offload="host"), SPEC)
    assert found == {"device": pytest.approx(24 / 10e9), "host": pytest.approx(28 / 10e9 + 6 / 10e9)}
    split = executor_seconds(P(offload="host", master="split", moments="bf16"), SPEC)
    assert split == {"device": pytest.approx(12 / 10e9), "host": found["host"]}
    disk = executor_seconds(P(offload="disk"), SPEC)
    assert disk == {"device": pytest.approx(24 / 1e9), "host": pytest.approx(24 / 1e9)}
    with_weights = executor_seconds(P(offload="host", params="host", stage=3), SPEC)
    assert with_weights["device"] == pytest.approx((24 + 4) / 10e9)


def test_the_faster_executor_is_chosen_unless_one_is_asked_for():
    slow = replace(SPEC, host_link=1e9)
    assert chosen_executor(P(offload="host"), SPEC).offload.executor == "device"
    assert chosen_executor(P(offload="host"), slow).offload.executor == "host"
    assert chosen_executor(P(offload="host", executor="device"), slow).offload.executor == "device"
    assert chosen_executor(P(), slow).offload.executor == "auto"
    notes = evaluate(gpt(2, 256, 4, 512, 64), slow, P(offload="host")).notes
    assert any("are updated on the host: on the device 2 x 12.00 GB at 1.00 GB/s" in note for note in notes)


def test_on_a_cpu_a_plan_updates_on_the_host_as_an_engine_does_whatever_the_rates():
    slow = replace(cluster("cpu", 2), host_bandwidth=1e6)
    assert chosen_executor(P(offload="host"), slow).offload.executor == "host"
    assert chosen_executor(P(offload="host", optimizer="muon"), slow).offload.executor == "device"


@pytest.mark.parametrize("words", [[], ["offload.gradients=host"], ["offload.executor=host"]])
def test_a_plan_of_a_file_whose_place_is_open_has_states_gradients_and_updates_on_the_device(words):
    plan = plan_of(load({}, ["offload.optimizer=auto", *words]), 1)
    check_rules(plan)
    assert (plan.offload.optimizer, plan.offload.gradients_leave) == ("none", False)
    assert plan.offload.executor != "host"


def test_seconds_of_updates_follow_the_elements_and_the_fraction():
    plan = P(offload="host", executor="device")
    assert update_seconds(plan, SPEC, 1e9) == pytest.approx(2.4)
    assert update_seconds(plan.replace(fraction=0.25), SPEC, 1e9) == pytest.approx(0.6)
    assert update_seconds(P(), SPEC, 1e9) == 0.0
    assert update_seconds(P(stage=3, params="host"), SPEC, 1e9) == pytest.approx(0.4)  # weights there and back
    assert update_seconds(replace(plan, optimizer="muon"), SPEC, 1e9) == pytest.approx(1.6)  # one state of matrices


def test_weights_are_read_for_every_gather_at_the_slower_rate():
    assert read_seconds(P(stage=3, params="host"), SPEC, 1e9, gathers=4) == pytest.approx(0.4)
    assert read_seconds(P(stage=3, params="disk"), SPEC, 1e9, gathers=4) == pytest.approx(4.0)
    assert read_seconds(P(stage=3), SPEC, 1e9, gathers=4) == 0.0


def test_what_the_next_forward_hides_is_not_seen():
    from zero3d.tools.plan.profiles import profile

    pace, model = profile("zero3d").pace, gpt(24, 2048, 16, 50304, 2048)

    def offload(micro=1, **rates):
        plan = P(dp=8, stage=2, micro_batch=micro, offload="host", executor="device")
        return step_seconds(model, plan, replace(A100, **rates), pace).parts["offload"]

    assert offload(host_link=1e12) == 0.0
    slow, slower = offload(host_link=1e9), offload(host_link=0.5e9)
    moved = 2 * 12 * model.params / 8
    assert slower - slow == pytest.approx(moved / 1e9, rel=1e-6)  # all that is added is seen
    assert 0 < offload(micro=4, host_link=1e9) < slow < moved / 1e9  # a longer forward hides more
    assert "offload" not in step_seconds(model, P(dp=8, stage=2), A100, pace).parts


# --- the search -----------------------------------------------------------------------------------

LARGE = gpt(4, 4096, 32, 50304, 1024)  # 1.2 billion parameters: 22 GB of states


def found(memory=9e9, offload="auto", **fields):
    small = replace(A100.gpu, memory=memory)
    place = replace(cluster("a100-80", 2), gpu=small, **fields)
    return place, search(
        LARGE, place, Target(32, 0.95 * memory, "fastest", offload, margin=0.0, rounds=False), evaluate
    )


def test_states_leave_where_nothing_fits_otherwise():
    assert found(offload="none")[1].rows == []
    place, result = found()
    assert {row.plan.offload.optimizer for row in result.rows} == {"host"}
    assert all(row.estimate.memory.host <= place.host_memory for row in result.rows)
    assert any(row.plan.offload.params == "host" and row.plan.zero.stage == 3 for row in result.rows)
    roomy, both = found(12e9), found(12e9, "host")
    assert {row.plan.offload.optimizer for row in roomy[1].rows} == {"none"}
    assert {row.plan.offload.optimizer for row in both[1].rows} == {"none", "host"}


def test_what_the_host_has_no_room_for_goes_to_a_disk_and_is_refused_with_the_sum():
    place, result = found(host_memory=15e9)
    assert {row.plan.offload.optimizer for row in result.rows} == {"disk"}
    refused = next(each for each in result.rejected if each.reason == "the host's memory")
    assert refused.sum.startswith("2 x (process 3.00 + slice ")
    assert refused.sum.endswith("GB of 15.0 GB")
    _, nothing = found(offload="host", host_memory=15e9)
    target = Target(32, 8e9, "fastest", "host", margin=0.0)
    text = plan_text.nothing_fits(LARGE, place, target, nothing, None)
    assert "Nearest: the GPU's memory is short by" in text
    assert text.endswith("Pass a larger --gpu, a shorter --seq, or --lora.")
    text = plan_text.nothing_fits(LARGE, place, target, nothing._replace(rejected=[refused]), None)
    assert "Nearest: the host's memory is short by" in text
    assert text.endswith(
        f": {refused.sum}. Pass more --nodes, --offload disk, or a --cluster file with more host_memory."
    )


def test_an_unknown_place_is_refused_by_name(capsys):
    with pytest.raises(
        ConfigError, match=f"--offload 'cloud' is unknown: pass one of auto, none, {', '.join(tiers_of('optimizer'))}"
    ):
        found(offload="cloud")
    assert main(["plan", "--params", "1e9", "--gpus", "8", "--offload", "cloud"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_if_moves_states_one_place_further():
    plan = P(dp=8, stage=3, offload="host")
    knobs = {knob.change: knob for knob in what_if(Row(plan, evaluate(LARGE, A100, plan)), LARGE, A100, evaluate)}
    assert knobs["offload.optimizer: none"].memory > 0 > knobs["offload.params: host"].memory
    assert knobs["offload.moments: bf16"].plan.offload.moments == "bf16"
    assert knobs["offload.fraction: 0.5"].memory > 0
    host = {place: knobs[f"offload.optimizer: {place}"].estimate.memory.host for place in ("none", "disk")}
    assert host["disk"] < host["none"] + 8 * 3 * 12 * 2**24 + 1e6
    assert "offload.activations: host" not in knobs  # of blocks that are not recomputed
    again = plan.replace(activations="full", tp=2, dp=4)
    knobs_of_inputs = what_if(Row(again, evaluate(LARGE, A100, again)), LARGE, A100, evaluate)
    inputs = {knob.change: knob.plan for knob in knobs_of_inputs}
    on_host = plan_text.settings(inputs["offload.activations: host"])
    assert on_host.endswith("optimizer on host, inputs on host")
    assert on_host.count("inputs") == 1
    assert plan_text.settings(inputs["mesh.partition_activations: true"]).endswith("inputs over tp, optimizer on host")
    rows = plan_text.knob_rows(
        list(knobs.values()), Row(plan, evaluate(LARGE, A100, plan)), 1e15, replace(A100, host_memory=1.0)
    )
    assert {row[-1] for row in rows} == {"the host has less"}


# --- how they are told ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answer():
    place, result = found(host_memory=15e9)
    best = result.rows[0]
    rungs = ladder(LARGE, place, Target(32, 8e9, margin=0.0), evaluate)
    return plan_text.Answer(
        LARGE, place, Target(32, 8e9, margin=0.0, rounds=False), result, rungs, what_if(best, LARGE, place, evaluate)
    )


def test_the_text_and_the_page_show_every_place(answer):
    text, page = plan_text.as_text(answer, 5), plan_page(answer, 5)
    assert "not built" not in text + page
    assert "disk GB" in text
    assert "Disk GB" in page
    assert "optimizer on disk" in text
    assert "No plan fits with all states on the GPU" in text
    memory = answer.best.estimate.memory
    (line,) = [line for line in text.splitlines() if "states of a rank on the disk" in line]
    assert (answer.best.plan.tp, answer.best.plan.dp) == (1, 2)  # simpler than tp 2, and as fast
    assert LARGE.params == 1_015_767_040
    assert memory.away["disk"]["optimizer"] == 2 * 12 * LARGE.params / 2  # two slots of 12 bytes
    assert line.endswith("= 12.2 GB")
    told = json.loads(json.dumps(plan_json.as_json(answer)))["recommended"]
    assert told["plan"]["offload"] == "disk"
    assert told["memory"]["away"] == memory.away
    assert told["memory"]["disk"] == memory.tiers["disk"]


def test_the_ladder_s_rule_holds_from_built_things(answer):
    rungs = ladder(of_params(7.5e9, 1024), cluster("a100-80", 64), Target(64, 80e9, margin=0.0), evaluate)
    assert [rung.name for rung in rungs] == list(RULE)
    two, two_offloaded = rungs[1].estimate.memory, rungs[2].estimate.memory
    assert two.states - two_offloaded.states == pytest.approx(two_offloaded.away["host"]["optimizer"])
    assert [rung.plan.offload.executor for rung in rungs] == ["auto"] * 5  # evaluate chooses


def test_one_configuration_is_explained_with_its_places(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data.length=64", "mesh.dp=2", "zero.stage=3", "offload.optimizer=host", "offload.params=host"]
    words += ["train.tiled_loss=true", "zero.gather_budget=64MB"]
    assert main(["plan", "explain", "--gpu", "a100-80", *words]) == 0
    text = capsys.readouterr().out
    assert "States of a rank on the host: parameters" in text
    assert "optimizer on host, parameters on host" in text
    assert "loss in tiles" in text
    assert "zero.gather_budget is left out, and needs less memory than this" in text
    words = [word.replace("optimizer=host", "optimizer=auto") for word in words]
    assert main(["plan", "explain", "--gpu", "a100-80", "--assert-fits", "1MB", "--json", *words]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["offload"] == tiers_of("optimizer")[-1]  # nothing fits: what auto tries last
    assert told["plan"]["params"] == "host"
    assert set(told["memory"]["away"]) == {"host", "disk"}


def test_the_file_of_a_plan_starts_it(tmp_path):
    plan = P(dp=2, stage=3, offload="disk", params="host", master="split", moments="bf16", fraction=0.5)
    tree = train_config(LARGE, plan, "gpt2", "bytes")
    assert tree["offload"] == {"optimizer": "disk", "params": "host", "fraction": 0.5, "moments": "bf16"}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(tree))
    assert plan_of(load(tmp_path / "train.yaml"), None) == plan
    assert "offload" not in train_config(LARGE, P(), "gpt2", "bytes")


def test_deepspeed_is_told_what_it_has_a_word_for():
    both = deepspeed_config(P(dp=8, stage=3, offload="disk", params="host"))["zero_optimization"]
    assert both["offload_optimizer"] == {"device": "nvme", "pin_memory": True, "nvme_path": "offload"}
    assert both["offload_param"] == {"device": "cpu", "pin_memory": True}
    half = deepspeed_config(P(dp=8, stage=3, offload="host", fraction=0.5))["zero_optimization"]
    assert half["offload_optimizer"]["ratio"] == 0.5
    with pytest.raises(ConfigError, match="on a disk at stage 3 alone"):
        deepspeed_config(P(dp=8, stage=2, offload="disk"))
