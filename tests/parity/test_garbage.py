"""Python's collector runs between the steps of `zero3d train`, on all ranks alike, and finds no tensor there."""

import gc
import weakref

import pytest
import torch
from pictures import save_data, save_model as save_pictured_model
from training import save_model, save_rows, train, tree

from zero3d.train import garbage
from zero3d.train.loop import Loop

STEPS, EVERY = 5, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with rows of tokens, and a LLaVA with images."""
    folder = tmp_path_factory.mktemp("garbage")
    save_model(folder / "model", num_hidden_layers=4)  # weights of two, which nothing reads
    save_rows(folder / "rows.npy")
    save_pictured_model(folder / "llava")
    save_data(folder, pictured=16)
    return folder


def collections(made):
    """When the collector ran from the first step to the last, as (steps that were over, within one); if it was on."""
    found, now, on = [], [], []
    run, step, thresholds = Loop.run, Loop.step, gc.get_threshold()

    def noted_run(loop, *args):
        now[:] = [loop, False]
        on.append(gc.isenabled())
        gc.set_threshold(700)  # left to itself, it would run some times a step
        try:
            return run(loop, *args)
        finally:
            gc.set_threshold(*thresholds)
            on.append(gc.isenabled())
            now.clear()

    def noted_step(loop, *args):
        now[1] = True
        try:
            return step(loop, *args)
        finally:
            now[1] = False

    def collection(phase, info):
        if phase == "start" and now and (now[1] or 0 < now[0].state.step < STEPS):
            found.append((now[0].state.step, now[1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "run", noted_run)
        patch.setattr(Loop, "step", noted_step)
        patch.setattr(garbage, "EVERY", EVERY)
        gc.callbacks.append(collection)
        try:
            train(made)
        finally:
            gc.callbacks.remove(collection)
    return found, on


@pytest.mark.long
def test_the_collector_runs_after_the_same_steps_on_all_ranks_and_never_in_one(ranks, folder):
    made = tree(
        folder, model={"init": "random"}, evaluate={"every": 1}, data={"validation": 0.3}, checkpoint={"every": 2}
    )
    for found, on in ranks(2, collections, made):
        assert found == [(2, False), (4, False)]
        assert on == [True, True]


def states_around(enabled, frozen):
    """(automatic, any frozen) before, in and after a block that fails, and how often a collection ran in it."""
    if not frozen:
        gc.unfreeze()
    (gc.enable if enabled else gc.disable)()
    ran, states = [], []

    def state():
        states.append((gc.isenabled(), gc.get_freeze_count() > 0))

    gc.callbacks.append(lambda phase, info: ran.append(phase) if phase == "stop" else None)
    state()
    try:
        with garbage.collected_between_steps() as after:
            state()
            ran.clear()
            for step in range(1, 2 * garbage.EVERY + 1):
                after(step)
            times = len(ran)
            raise KeyError
    except KeyError:
        pass
    state()
    return states, times


@pytest.mark.parametrize(("enabled", "frozen", "inside", "times"), [
    (True, False, (False, True), 2), (False, True, (False, True), 0),  # a caller's choice
    *(pytest.param(*case, marks=pytest.mark.long) for case in [
        (True, True, (False, True), 2), (False, False, (False, False), 0),
    ]),
])  # fmt: skip
def test_what_a_caller_had_chosen_is_there_again(alone, enabled, frozen, inside, times):
    (before, within, after), ran = alone(states_around, enabled, frozen)
    assert before == after == (enabled, frozen)
    assert within == inside
    assert ran == times


class Knot:
    """An object that refers to itself."""

    def __init__(self):
        self.own = self


def knots_left():
    """Whether a knot is left when it was made before the first, second or third collection, and two later ones ran."""
    gc.unfreeze()
    left = []
    for first in range(3):
        with garbage.collected_between_steps() as after:
            for number in range(4):
                if number == first:
                    knot = Knot()
                    known = weakref.ref(knot)
                after(number * garbage.EVERY)
                if number == first:
                    del knot
            left.append(known() is not None)
    return left


def test_what_was_made_before_the_first_collection_stays_and_later_cycles_go(alone):
    assert alone(knots_left) == [True, False, False]


def tensors_left(made):
    """Bytes of tensors that only the collector could free, after each of a run's steps."""
    found, step = [], Loop.step

    def watched(loop, request):
        record = step(loop, request)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        left = [each for each in gc.garbage if issubclass(type(each), torch.Tensor) and each.device.type != "meta"]
        found.append(sum(each.untyped_storage().nbytes() for each in left))
        gc.garbage.clear()
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", watched)
        train(made, overwrite=True)
    return found


@pytest.mark.parametrize(("world", "sections"), [
    (2, {"zero": {"stage": 3}, "activations": "full"}),
    (2, {"zero": {"stage": 2}, "mesh": {"pp": 2, "schedule": "zbv"}}),
    *(pytest.param(2, {"zero": {"stage": stage}}, marks=pytest.mark.long) for stage in (0, 1, 2)),
    *(pytest.param(2, {"mesh": {"pp": 2, "schedule": name}}, marks=pytest.mark.long)
      for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")),
    pytest.param(2, {"zero": {"stage": 2, "exact": True}}, marks=pytest.mark.long),
    pytest.param(1, {"lora": {"rank": 2}, "offload": {"optimizer": "host"}}, marks=pytest.mark.long),
])  # fmt: skip
def test_a_step_leaves_no_tensor_to_the_collector(ranks, folder, world, sections):
    made = tree(folder, "left", model={"init": "random"}, train={"steps": 3}, **sections)
    assert ranks(world, tensors_left, made) == [[0] * 3] * world


@pytest.mark.long
def test_a_step_with_images_leaves_no_tensor_to_the_collector(ranks, folder):
    data = {"train": [str(folder / "data.json")], "images": str(folder / "images"), "packing": False, "length": 48}
    made = tree(folder, "pictured", "llava", data=data, train={"steps": 3}, zero={"stage": 3})
    made["data"].pop("shuffle")
    assert ranks(1, tensors_left, made) == [[0] * 3]
