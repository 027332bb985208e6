"""Saves behind training: the bytes of a save that is waited for, who waits for what, and what a failure leaves."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import adamw, batch, bits, build, hf, loss_of
from training import save_model, save_rows, train, tree

import zero3d
from zero3d.checkpoint import background, save as checkpoint
from zero3d.checkpoint.folders import complete_steps
from zero3d.checkpoint.integrity import verify
from zero3d.engine.engine import Engine
from zero3d.train.evaluations import Evaluations

LONG = 60.0  # seconds in which what is waited for must come


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("behind")
    save_model(made / "model")
    save_rows(made / "rows.npy")
    return made


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


UNHEARD = """
import sys, torch, zero3d
from zero3d.checkpoint import background
from zero3d.errors import CheckpointError

def fail(target, *_):
    raise CheckpointError(f"cannot write {target.temporary}: no space")

background.write_all = fail
engine = zero3d.Engine(torch.nn.Linear(4, 4), stage=1)
for told in (True, False)[: int(sys.argv[2])]:
    engine.save(sys.argv[1], wait=False)
    if told:
        try:
            engine.saved()
        except CheckpointError:
            pass
"""


@pytest.mark.long
@pytest.mark.parametrize("saves", [1, 2], ids=["heard of", "unheard of"])
def test_a_failed_save_that_nobody_asked_about_is_said_at_the_end_of_the_process(tmp_path, saves):
    done = subprocess.run(
        [sys.executable, "-c", UNHEARD, str(tmp_path), str(saves)], capture_output=True, text=True, timeout=300
    )
    said = f"the checkpoint {tmp_path}/step-0 was not written: cannot write {tmp_path}/.step-0.tmp: no space\n"
    assert done.stderr.count(said) == saves - 1, done.stderr


OPTIONS = {
    "plain": {},
    "fp32": {"precision": "fp32"},
    "split": {"master": "split"},
    "momentum": {"optimizer": sgd},
    "frozen": {},
    "host": {"offload": {"optimizer": "host"}},
    "disk": {"offload": {"optimizer": "disk", "params": "host", "fraction": 0.5}},
}


def make(stage=2, kind="plain", folder=None):
    options = {"optimizer": adamw, "precision": "bf16", **OPTIONS[kind]}
    if kind == "disk":
        options["offload"] = {**options["offload"], "directory": str(folder)}
    model = build("net", layers=1, width=96)
    model.embed.requires_grad_(kind != "frozen")
    return Engine(model, stage=stage, **options)


def step(engine, number):
    engine.backward(loss_of(engine, batch(number, dist.get_rank())))
    engine.step()


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --- the same bytes -----------------------------------------------------------------------------


def both_ways(folder, stage, kind):
    """What a save behind training has in common with one that is waited for, and how training went on."""
    straight, engine = (make(stage, kind, f"{folder}/{name}") for name in ("straight", "engine"))
    for number in range(2):
        step(straight, number)
        step(engine, number)
    torch.manual_seed(5)
    expected = straight.save(f"{folder}/expected", {"epoch": 1})
    torch.manual_seed(5)
    promised = engine.save(f"{folder}/behind", {"epoch": 1}, wait=False)
    torch.manual_seed(6)
    for number in range(2, 4):
        step(straight, number)
        step(engine, number)
    saved = engine.saved()
    with straight.full_params(), engine.full_params():
        same = bits(straight.module.parameters()) == bits(engine.module.parameters())
    (copy,) = [entry for entry in engine.memory if entry.category == "checkpoint"]
    figures, file = engine.save_figures, saved / f"rank-{dist.get_rank():05d}.safetensors"
    return {
        "its folder, once": saved == promised and engine.saved() is None,
        "its bytes": content(saved) == content(expected),
        "training": same,
        "planned bytes": copy.place == "host" and copy.planned == copy.measured > 0,
        "figures": figures.seconds > 0 and 0 < figures.nbytes < file.stat().st_size,
    }


@pytest.mark.parametrize(("world", "stage", "kind"), [
    (2, 2, "split"), (1, 3, "disk"), (2, 1, "momentum"),
    *(pytest.param(2, *case, marks=pytest.mark.long) for case in ((0, "plain"), (3, "fp32"), (3, "host"), (3, "frozen"))),
])  # fmt: skip
def test_it_has_the_bytes_of_a_save_that_is_waited_for_and_training_goes_on_with_its_own(
    ranks, tmp_path, world, stage, kind
):
    for answer in ranks(world, both_ways, str(tmp_path), stage, kind):
        assert set(answer.values()) == {True}, answer


# --- who waits for what -------------------------------------------------------------------------


@contextmanager
def held(name, until, seen=None):
    """Let the thread come to a function of a save, and go on when the event has come."""
    module, original = (background, background.fill) if name == "fill" else (checkpoint, checkpoint.write_tensors)

    def waits(*args):
        if seen is not None:
            seen.set()
        until.wait(LONG)
        return original(*args)

    with mock.patch.object(module, name, waits):
        yield


def test_only_the_next_update_waits_for_the_copy(tmp_path):
    engine, may_copy = make(), threading.Event()
    step(engine, 0)
    expected = content(engine.save(tmp_path / "expected"))
    release = background._UnderWay.release

    def asked(under_way):
        may_copy.set()  # an update that does not ask comes before the copy
        release(under_way)

    with held("fill", may_copy), mock.patch.object(background._UnderWay, "release", asked):
        engine.save(tmp_path / "behind", wait=False)
        engine.backward(loss_of(engine, batch(1)))
        assert not may_copy.is_set()
        engine.step()
        assert may_copy.is_set()
    assert content(engine.saved()) == expected


@pytest.mark.parametrize("leave", [False, True])
def test_who_writes_weights_waits_for_the_copy_too(tmp_path, leave):
    engine, may_copy = make(), threading.Event()
    step(engine, 0)
    expected = engine.save(tmp_path / "expected")
    with held("fill", may_copy):
        engine.save(tmp_path / "behind", wait=False)
        threading.Timer(0.1, may_copy.set).start()
        if leave:
            with engine.full_params(), torch.no_grad():
                engine.module.head.weight.zero_()
        else:
            engine.load(expected)
    assert content(engine.saved()) == content(expected)


def test_nobody_waits_for_the_disk_but_the_next_save(tmp_path):
    engine, may_write, writes = make(), threading.Event(), threading.Event()
    step(engine, 0)
    with held("write_tensors", may_write, writes):
        first = engine.save(tmp_path, wait=False)
        assert writes.wait(LONG)
        step(engine, 1)
        step(engine, 2)
        assert not engine.save_is_over
        assert not first.exists()
        threading.Timer(0.1, may_write.set).start()
        second = engine.save(tmp_path)
    assert complete_steps(tmp_path) == [1, 3]
    verify(first)
    verify(second)


def test_the_copy_uses_its_memory_again(tmp_path):
    engine = make()
    engine.reserve_saves()
    (reserved,) = [entry for entry in engine.memory if entry.category == "checkpoint"]
    addresses = set()
    fill = background.fill
    with mock.patch.object(
        background,
        "fill",
        lambda places, states: (addresses.add(min(p.data_ptr() for p in places.values())), fill(places, states)),
    ):
        for number in range(3):
            step(engine, number)
            engine.save(tmp_path, wait=False)
        engine.saved()
    assert len(addresses) == 1
    assert [entry for entry in engine.memory if entry.category == "checkpoint"] == [reserved]


def test_a_host_without_room_for_the_copy_is_named_before_anything_is_written(tmp_path):
    from zero3d.memory.budget import Bound, HostBudget

    engine = make()
    engine.checkpoints._saves._copy._budget = lambda: HostBudget((Bound(4096, "of available memory"),), 1)
    with pytest.raises(zero3d.Zero3dError, match=r"may take 4\.10 kB.*checkpoint\.asynchronous=false"):
        engine.save(tmp_path, wait=False)
    assert list(tmp_path.iterdir()) == []
    assert engine.save(tmp_path).name == "step-0"


def planned_and_held(stage, options):
    from zero3d.tools.plan.memory import memory
    from zero3d.tools.plan.saves import copy_bytes
    from zero3d.tools.plan.spec import ParallelPlan
    from zero3d.tools.sim.model_spec import trace

    plan = ParallelPlan(dp=2, stage=stage, precision="bf16", asynchronous_saves=True, **options)
    model = hf("qwen3", inner=192)
    spec = trace(model, 8, "a tiny one")
    groups = [{"match": "*norm*|*.bias", "weight_decay": 0.0}]  # as in a run
    rule = {"adamw": adamw, "muon": zero3d.optim.muon(), "adamw8bit": zero3d.optim.adamw8bit()}[plan.optimizer]
    engine = Engine(model, stage=stage, optimizer=rule, precision="bf16", master=plan.zero.master, param_groups=groups)
    engine.reserve_saves()
    (copy,) = [entry for entry in engine.memory if entry.category == "checkpoint"]
    return copy.measured, copy_bytes(spec, plan, dp_rank=engine.dp.rank), memory(spec, plan).on_host["saves"]


@pytest.mark.parametrize(("stage", "options"), [
    (1, {"optimizer": "muon"}),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in ((0, {}), (3, {"master": "split"}), (3, {"optimizer": "adamw8bit"}))),
])  # fmt: skip
def test_the_plan_has_the_bytes_of_the_copy(ranks, stage, options):
    rows = ranks(2, planned_and_held, stage, options)
    assert all(held == planned for held, planned, _ in rows)
    assert rows[0][2] == rows[0][0] > rows[1][0] > 0


ENDS = """
import sys
import torch
import zero3d
from zero3d.checkpoint import background

engine = zero3d.Engine(torch.nn.Sequential(torch.nn.Linear(64, 64)), stage=1)
fill = background.fill
background.fill = lambda *given: (ends.wait(), fill(*given))
import threading
ends = threading.Event()
folder = engine.save(sys.argv[1], wait=False)
threading.Thread(target=lambda: (threading.main_thread().join(), ends.set())).start()  # when the last line has run
print(folder.exists())
"""


@pytest.mark.long
def test_a_process_that_ends_waits_for_its_save(tmp_path):
    ended = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
    verify(tmp_path / "step-0")


# --- failures -----------------------------------------------------------------------------------


def full_disk(step_, rank):
    """Writing of tensors that finds no room for one step on one rank."""
    original = checkpoint.write_tensors

    def write(path, *args):
        if dist.get_rank() == rank and f".step-{step_}.tmp" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, *args)

    return mock.patch.object(checkpoint, "write_tensors", write)


def fails_once(folder):
    engine = make(3)
    step(engine, 0)
    engine.save(folder, wait=False)
    step(engine, 1)
    told = []
    with full_disk(2, rank=1):
        engine.save(folder, wait=False)
        step(engine, 2)
        for ask in (engine.saved, engine.saved):
            try:
                told.append(ask())
            except zero3d.CheckpointError as error:
                told.append(str(error))
    left = sorted(path.name for path in Path(folder).iterdir()) if dist.get_rank() == 0 else None
    engine.save(folder, wait=False)
    return told, left, engine.saved().name


def test_a_save_that_fails_on_one_rank_is_told_on_all_and_the_next_one_is_written(ranks, tmp_path):
    for rank, (told, left, then) in enumerate(ranks(2, fails_once, str(tmp_path))):
        assert "No space left on device" in told[0]
        assert told[1] is None
        assert left == (["step-1"] if rank == 0 else None)
        assert then == "step-3"


# --- a run --------------------------------------------------------------------------------------

BEHIND = {"every": 1, "keep": 9, "asynchronous": True}


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder):
    return [record["loss"] for record in metrics(folder)]


def a_run(made, stop_in=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = train(made, "auto", stop_in)
    assert caught == []
    return records if isinstance(records, str) else [record["loss"] for record in records]


def test_a_run_has_the_bits_of_one_without_and_goes_on_from_any_checkpoint(ranks, folder, tmp_path):
    plain = {**tree(folder), "output": str(tmp_path / "plain" / "out")}
    made = {**tree(folder, checkpoint=BEHIND), "output": str(tmp_path / "out")}
    expected, *_ = ranks(2, a_run, plain)
    stopped, *_ = ranks(2, a_run, made, 3)
    assert stopped.startswith("step 3 of 5 is saved in ")
    assert complete_steps(tmp_path / "out" / "checkpoints") == [1, 2, 3]
    actual, *_ = ranks(2, a_run, made)
    assert actual == expected
    saved = {record["step"]: record["save_bytes"] for record in metrics(tmp_path) if "save_seconds" in record}
    assert sorted(saved) == [2, 3, 5]  # the step after each save tells of it; the one after a stop is another session's
    assert len(set(saved.values())) == 1
    for number in complete_steps(tmp_path / "out" / "checkpoints"):
        verify(tmp_path / "out" / "checkpoints" / f"step-{number}")


def a_run_on_a_full_disk(made, full_at):
    with full_disk(full_at, rank=1), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(made)
    return [str(warning.message) for warning in caught]


def test_a_checkpoint_that_is_not_written_is_a_warning_and_the_run_goes_on(ranks, folder, tmp_path):
    made = {**tree(folder, checkpoint=BEHIND), "output": str(tmp_path / "out")}
    (warning,), others = ranks(2, a_run_on_a_full_disk, made, 3)
    assert warning.startswith("the checkpoint of step 3 was not written, training goes on, and ")
    assert warning.count("step-2 is the newest: ") == 1
    assert "No space left on device" in warning
    assert others == []
    assert complete_steps(tmp_path / "out" / "checkpoints") == [1, 2, 4, 5]


@pytest.mark.long
@pytest.mark.parametrize(("changes", "full_at", "left"), [
    ({"on_error": "stop"}, 3, [1, 2]),
    pytest.param({}, 5, [1, 2, 3, 4], marks=pytest.mark.long),  # the last one must be written
])  # fmt: skip
def test_it_ends_the_run_where_that_is_asked_for_and_where_nothing_comes_after_it(
    ranks, folder, tmp_path, changes, full_at, left
):
    made = {**tree(folder, checkpoint={**BEHIND, **changes}), "output": str(tmp_path / "out")}
    for _, error in ranks(2, a_run_on_a_full_disk, made, full_at, check=False):
        assert "No space left on device" in error
    assert [step for step in complete_steps(tmp_path / "out" / "checkpoints") if step <= 3] == left[:3]


def a_run_with_the_best_on_a_full_disk(made):
    held_out = [3.0, 2.0, 2.5, 2.4, 2.2]
    with mock.patch.object(
        Evaluations, "held_out", side_effect=({"validation_loss": loss, "perplexity": 1.0} for loss in held_out)
    ):
        told = a_run_on_a_full_disk(made, 2)
    return told, os.readlink(Path(made["output"]) / "checkpoints" / "best")


@pytest.mark.long
def test_the_best_is_one_that_was_committed(ranks, folder, tmp_path):
    made = tree(folder, data={"validation": str(folder / "rows.npy")}, evaluate={"every": 1},
                checkpoint={**BEHIND, "keep": 1})  # fmt: skip
    (told, best), _ = ranks(2, a_run_with_the_best_on_a_full_disk, {**made, "output": str(tmp_path / "out")})
    assert len(told) == 1
    assert best == "step-5"  # step 2 had the lowest loss, and never was
    assert complete_steps(tmp_path / "out" / "checkpoints") == [5]


# --- SIGKILL ------------------------------------------------------------------------------------


def killed_at(call, made):
    """Train in a forked child that is killed at a call of the saves' own; whether it was."""
    child = os.fork()
    if child == 0:
        left = [call]

        def counted(original):
            def dies(*args, **options):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **options)

            return dies

        for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (background, "fill")):
            setattr(module, name, counted(getattr(module, name)))
        Engine.train_batch = counted(Engine.train_batch)
        code = 1
        try:
            train(made, "auto", planned=False)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def kills(made, seed, most):
    """Run, and go on, with a kill at a random call each time; what was killed, and how many checkpoints are damaged."""
    draw, found = Random(seed), []
    for _ in range(most):
        found.append(killed_at(draw.randrange(1, 30), made))
        for number in complete_steps(folder := Path(made["output"]) / "checkpoints"):
            verify(folder / f"step-{number}")
    killed_at(10**9, made)
    return found


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_has_the_curve_of_one_that_is_not(alone, ranks, folder, tmp_path):
    changes = {"train": {"steps": 8}, "checkpoint": {**BEHIND, "keep": 2}}
    expected, *_ = ranks(1, a_run, {**tree(folder, **changes), "output": str(tmp_path / "plain" / "out")})
    made = {**tree(folder, **changes), "output": str(tmp_path / "out")}
    assert sum(alone(kills, made, 18, 5)) >= 3
    assert losses_of(tmp_path) == expected
