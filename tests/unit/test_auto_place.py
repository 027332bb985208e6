"""What auto chooses, as arithmetic: the device is filled first, then the host, then a disk."""

import pytest

from zero3d.blueprint.auto import (
    GRADIENT,
    UPDATE,
    WEIGHT,
    MeasuredRates,
    Need,
    Placed,
    Rates,
    Room,
    auto_place,
    choose_by_measure,
    choose_executor,
    executor_of,
    furthest,
    gradients_place,
    gradients_short_of,
)
from zero3d.blueprint.places import leave_device
from zero3d.errors import OutOfBudget
from zero3d.spec.offload import Offload

GB = 10**9
OTHERS = {"weights": 20 * GB, "gradients": 10 * GB, "gathered units": 4 * GB, "activations": 6 * GB}
NEED = Need(states=60 * GB, record=GB // 5, passing=GB, instants={"logits": OTHERS})


def placed(device, host=200, disk=False, need=NEED):
    return auto_place(need, Room(int(device * GB), None if host is None else host * GB, disk))


def test_nothing_leaves_a_device_that_has_room():
    assert placed(100)[:2] == ("none", 1.0)
    assert placed(100, host=0)[:2] == ("none", 1.0)
    assert placed(99.9).optimizer == "host"


@pytest.mark.parametrize(("device", "leaves"), [(99.9, 1.1), (80, 21), (71, 30), (41, 60)])
def test_as_much_leaves_as_is_too_much_and_buffers_for_it(device, leaves):
    choice = placed(device)
    assert choice.optimizer == "host"
    assert leaves / 60 <= choice.fraction < leaves / 60 + 0.001
    records = [NEED.record] * 300
    stay = sum(n for n, at in zip(records, leave_device(records, choice.fraction, "host"), strict=True) if at != "host")
    assert stay + sum(OTHERS.values()) + NEED.passing <= device * GB


def test_what_is_held_at_different_times_is_not_added_up():
    """Logits are there while gradients are not: the fullest of both instants decides, and is named."""
    alternating = {
        "logits": {"weights": 20 * GB, "activations": 15 * GB},
        "end": {"weights": 20 * GB, "gradients": 19 * GB},
    }
    need = NEED._replace(instants=alternating)
    assert placed(99, need=need)[:2] == ("none", 1.0)
    choice = placed(98, need=need)
    assert choice.fraction == 0.034  # 2 GB of 60: 1 GB too much, and buffers
    assert "weights 20.00 GB + gradients 19.00 GB = 99.00 GB (end)" in choice.why
    both = {"logits": {**alternating["logits"], "gradients": 19 * GB}}  # of several micro-batches a step
    assert placed(98, need=NEED._replace(instants=both)).fraction == 0.284


def test_gradients_leave_by_the_instants_at_which_there_are_any():
    instants = {"logits": {"activations": 70 * GB}, "end": {"weights": 20 * GB, "gradients": 19 * GB}}
    need = NEED._replace(instants=instants)
    assert gradients_short_of(need, Room(40 * GB, None, False), 1.0) == 0


def test_the_host_comes_before_a_disk_and_a_disk_before_an_error():
    assert placed(80, host=22, disk=True)[:2] == placed(80, host=22)[:2] == ("host", 0.35)
    assert placed(80, host=21, disk=True)[:2] == ("disk", 0.35)  # whole records: 0.2 GB more
    with pytest.raises(OutOfBudget) as caught:
        placed(80, host=21)
    said = str(caught.value)
    assert "optimizer states 60.00 GB + weights 20.00 GB + gradients 10.00 GB" in said
    assert "= 100.00 GB (logits), and its device has 80.00 GB, the host 21.00 GB: 21.20 GB have no place" in said
    assert "offload.directory=FOLDER" in said


def test_no_more_leaves_than_there_is():
    assert placed(41, host=60)[:2] == ("host", 1.0)
    with pytest.raises(OutOfBudget, match=r"60\.00 GB have no place"):
        placed(41, host=59)


def test_all_ranks_go_as_far_as_one_of_them_must():
    here, some, disk = (Placed(*each) for each in (("none", 1.0, ""), ("host", 1.0, ""), ("disk", 0.1, "")))
    assert furthest([here, disk, some]) == disk
    assert furthest([here, some, some._replace(fraction=0.2)]) == some


def test_gradients_stay_where_all_else_that_stays_leaves_room_for_them():
    assert gradients_short_of(NEED, Room(80 * GB, 200 * GB, False), 0.25) == (40 + 1 + 45 - 80) * GB
    assert [gradients_place(short)[0] for short in (-1, 0, 1)] == ["device", "device", "host"]


def test_a_device_whose_memory_is_the_hosts_has_no_second_place_but_a_disk():
    assert placed(100, host=None)[:2] == ("none", 1.0)
    assert placed(80, host=None, disk=True)[:2] == ("disk", 0.35)
    with pytest.raises(OutOfBudget, match=r"its device has 80\.00 GB, which is the host's: 21\.20 GB have no place"):
        placed(80, host=None)


def test_what_does_not_fit_without_any_states_is_said():
    choice = placed(30)
    assert choice[:2] == ("host", 1.0)
    assert "11.00 GB more is needed than there is even so" in choice.why
    assert "even so" not in placed(41).why


def test_the_arithmetic_is_in_one_line():
    assert placed(80).why == (
        "a rank needs optimizer states 60.00 GB + weights 20.00 GB + gradients 10.00 GB + gathered units 4.00 GB + "
        "activations 6.00 GB = 100.00 GB (logits), and its device has 80.00 GB, the host 200.00 GB: 21.00 GB leave for the host "
        "(with 1.00 GB of buffers through which they pass)"
    )
    assert placed(120).why.endswith("= 100.00 GB (logits), and its device has 120.00 GB: nothing leaves it")


def test_a_rank_without_states_has_nothing_that_could_leave():
    empty = Need(0, 0, 0, {"rest": {"weights": 2 * GB}})
    assert auto_place(empty, Room(2 * GB, None, False))[:2] == ("none", 1.0)
    assert auto_place(empty, Room(GB, 10 * GB, False))[:2] == ("host", 1.0)
    with pytest.raises(OutOfBudget, match=r"which is the host's: 0 B have no place"):
        auto_place(empty, Room(GB, None, False))


@pytest.mark.parametrize(("width", "link", "memory", "name"), [
    (12, 50e9, 25e9, "device"), (12, 50e9, 400e9, "host"), (6, 50e9, 400e9, "host"), (6, 50e9, 100e9, "device"),
])  # fmt: skip
def test_the_faster_executor_is_chosen(width, link, memory, name):
    parameters = 10**9
    choice = choose_executor(width * parameters, parameters, Rates(link, memory))
    device = 2 * width / link
    host = UPDATE / memory + (GRADIENT + WEIGHT) / link
    assert choice.name == name == ("device" if device <= host else "host")
    assert f"{device * parameters:.3g} s a step" in choice.why
    assert f"{host * parameters:.3g} s" in choice.why


def test_what_was_measured_chooses_by_each_way_of_the_link():
    """Of a thousand million parameters in 12 bytes: 24 GB at 10; one of Adam, 4 GB down at 4 and 2 GB up at 1."""
    rates = MeasuredRates(down=4e9, up=1e9, both=10e9, adam=1e9)
    choice = choose_by_measure(12 * GB, GB, rates)
    assert choice.name == "device"
    assert choice.why.endswith("take 2.4 s a step on the device, 4 s on the host")
    assert choose_by_measure(12 * GB, GB, rates._replace(both=5e9)).name == "host"


def test_who_updates_is_asked_for_or_needs_states_that_leave_and_bits_that_the_host_has():
    def chosen(offload, cannot="", rates=None):
        return executor_of(offload, 12, cannot, lambda: rates).name

    assert chosen(Offload(executor="host")) == chosen(Offload("host", executor="device")) == "device"
    assert chosen(Offload("host"), "no bits") == "device"
    assert chosen(Offload("host")) == "host"
    assert chosen(Offload("host"), rates=MeasuredRates(4e9, 1e9, 10e9, 1e9)) == "device"
    assert chosen(Offload("host"), rates=Rates(50e9, 400e9)) == "host"
