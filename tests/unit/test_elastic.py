"""Attempts of a run on this machine: what starts another one, from where, on which slots."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from attempts import until
from torch.distributed import TCPStore

from zero3d.blueprint.layout import CANONICAL
from zero3d.config import EXACT_DP, asked_degrees, fitting_dp, fitting_ranks, load, zero_of
from zero3d.distributed.degrees import Degrees
from zero3d.distributed.mesh import _launched
from zero3d.errors import ConfigError, MeshError, Zero3dError
from zero3d.tools.cli import elastic, spare_ranks
from zero3d.tools.cli.elastic import Course, Job, Slots, is_fault, run_job
from zero3d.tools.cli.rank_environment import narrowed
from zero3d.tools.plan.emit import plan_of
from zero3d.train.setup.build import fitting_zero
from zero3d.train.start import Start

HERE = Path(__file__).parents[1]
SHRINKS = ("health.min_ranks=1", "train.batch=8", "train.micro_batch=1")
NEIGHBOURS = ("zero.stage=3", "health.min_ranks=1", "train.batch=72", "train.micro_batch=1")


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "micro_batch", "exact", "tp", "pp", "of_ranks"),
    [
        # ranks:                   0  1  2  3  4  5  6  7  8
        (12, 1, False, 1, 1, [0, 1, 2, 3, 4, 4, 6, 6, 6]),
        (12, 1, True, 1, 1, [0, 1, 2, 2, 4, 4, 4, 4, 4]),
        (8, 1, True, 1, 1, [0, 1, 2, 2, 4, 4, 4, 4, 8]),
        (8, 2, False, 1, 1, [0, 1, 2, 2, 4, 4, 4, 4, 4]),
        (7, 1, True, 1, 1, [0, 1, 1, 1, 1, 1, 1, 1, 1]),
        (7, 1, False, 1, 1, [0, 1, 1, 1, 1, 1, 1, 7, 7]),
        (8, 1, False, 2, 1, [0, 0, 1, 1, 2, 2, 2, 2, 4]),
        (12, 1, False, 1, 2, [0, 0, 1, 1, 2, 2, 3, 3, 4]),
        (12, 1, True, 2, 2, [0, 0, 0, 0, 1, 1, 1, 1, 2]),
    ],
)
def test_the_largest_dp_that_fits_the_ranks_that_are_left(batch, micro_batch, exact, tp, pp, of_ranks):
    assert [fitting_dp(ranks, batch, micro_batch, exact, tp, pp) for ranks in range(9)] == of_ranks
    for dp in of_ranks:  # a restarted rank that looks again finds the same
        assert dp == 0 or fitting_dp(dp * tp * pp, batch, micro_batch, exact, tp, pp) == dp


def test_a_spare_rank_looks_until_the_run_is_over(monkeypatch, capsys):
    store, looks = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(store.port)), ("RANK", "2")):
        monkeypatch.setenv(name, value)

    def look(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            spare_ranks.release()  # as rank 0 does

    monkeypatch.setattr(spare_ranks, "time", SimpleNamespace(sleep=look))
    monkeypatch.setattr(spare_ranks, "SIGNALS", ())
    spare_ranks.stand_by(3, 2)
    assert looks == [spare_ranks.LOOK] * 3
    assert capsys.readouterr().err.startswith("rank 2 of 3 is spare: 2 fit train.batch (health.min_ranks);")


def test_exact_has_a_largest_dp():
    assert EXACT_DP == CANONICAL
    assert fitting_dp(300, 256, 1, exact=True) == EXACT_DP
    assert fitting_dp(300, 256, 1, exact=False) == 256


def test_mesh_dp_is_the_most_and_min_ranks_the_least():
    shrinks = load(None, [*SHRINKS, "mesh.dp=4", "health.min_ranks=2"])
    assert [fitting_ranks(shrinks, ranks) for ranks in (2, 3, 4, 9)] == [2, 2, 4, 4]
    two = [*SHRINKS, "mesh.dp=2", "mesh.tp=2"]
    assert [fitting_ranks(load(None, two), ranks) for ranks in (2, 3, 4, 9)] == [2, 2, 4, 4]
    assert [fitting_ranks(load(None, [*two, "mesh.pp=2"]), ranks) for ranks in (4, 7, 8, 9)] == [4, 4, 8, 8]
    assert [fitting_ranks(load(None, [*SHRINKS, "mesh.ep=2"]), ranks) for ranks in (2, 3, 7, 8)] == [2, 2, 4, 8]
    assert fitting_ranks(load(None, []), 3) == 3
    said = (
        r"1 rank is there, .* dp 1 = 1 ranks, and health\.min_ranks=2 asks .*: start more .* type health\.min_ranks=1\."
    )
    with pytest.raises(MeshError, match=said) as refused:
        fitting_ranks(shrinks, 1)
    assert refused.value.exit_code == 2
    with pytest.raises(MeshError, match=r"1 rank is there, .* tp 2 x pp 1 = 2 make one dp\.$"):
        fitting_ranks(load(None, [*SHRINKS, "mesh.tp=2"]), 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give train.batch and train.micro_batch, and leave train.accumulate out"),
        (("train.batch=8",), "give train.batch and train.micro_batch"),
        (("train.batch=8", "train.micro_batch=2", "train.accumulate=1"), "leave train.accumulate out"),
        (
            ("train.batch=8", "train.micro_batch=3"),
            r"train.batch 8 / train.micro_batch 3 = 2.667 .* type train.batch=9",
        ),
    ],
)
def test_what_could_not_shrink_is_refused_before_a_start(words, told):
    with pytest.raises(ConfigError, match=told):
        load(None, ["health.min_ranks=1", *words])


@pytest.mark.parametrize(("asked", "more", "ranks", "kept", "together"), [
    (4, (), 8, 4, 4), (4, (), 4, 4, 1), (4, (), 2, 4, 1),  # all of dp 4 or 2: nobody keeps one
    (4, (), 6, 3, 3), (4, (), 9, 3, 3), (2, (), 9, None, 1), (4, ("mesh.shard=6",), 12, 3, 3),
])  # fmt: skip
def test_a_second_shard_shrinks_with_dp_to_the_largest_number_that_divides_it(asked, more, ranks, kept, together):
    config = load(None, [*NEIGHBOURS, f"zero.second_shard={asked}", *more])
    degrees = Degrees.resolve(ranks, **asked_degrees(config))
    assert zero_of(config, degrees) == replace(config.zero, second_shard=kept)
    assert degrees.second_shard(kept, None) == together
    assert plan_of(config, ranks).zero.second_shard == kept


def test_what_became_of_a_second_shard_is_said_once_and_without_min_ranks_it_is_refused():
    few, zero = SimpleNamespace(degrees=Degrees.resolve(6), rank=0), ["zero.stage=3", "zero.second_shard=4"]
    with pytest.warns(match=r"^zero\.second_shard=4 does not divide the 6 ranks of dp .*: it is 3\.$"):
        assert fitting_zero(load(None, [*NEIGHBOURS, *zero]), few).second_shard == 3
    silent = SimpleNamespace(degrees=few.degrees, rank=1)
    assert fitting_zero(load(None, [*NEIGHBOURS, *zero]), silent).second_shard == 3
    assert fitting_zero(load(None, zero), few).second_shard == 4
    with pytest.raises(MeshError, match=r"6 / 4 = 1\.5 is not whole"):
        few.degrees.second_shard(4, None)


def test_ranks_of_a_smaller_world_know_how_many_are_on_their_host():
    given = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert narrowed(given | {"RANK": "1", "LOCAL_RANK": "1"}, 6) == {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}
    assert narrowed(given | {"RANK": "5", "LOCAL_RANK": "1"}, 6) == {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
    assert narrowed({"RANK": "5", "WORLD_SIZE": "8"}, 6) == {"WORLD_SIZE": "6"}


# --- slots ----------------------------------------------------------------------------------------


def job(folder, *words, ranks=4, restarts=9, resume=None, overwrite=False, devices=0, named=True):
    """A run in FOLDER/out."""
    config = load(None, [*([f"output={folder / 'out'}"] if named else []), *words])
    given = ["train", str(folder), *(f"--{name}" for name in (f"resume={resume}",) if resume)]
    return Job(
        [*given, *["--overwrite"] * overwrite], config, Start("run", resume, overwrite), ranks, restarts, devices
    )


def taken(slots, course, devices=None):
    """The slots of the next attempt."""
    return slots.choose(course.folder, "COMMAND")


def test_slots_are_lost_and_come_back_by_the_runs_file(tmp_path):
    course, slots = Course(job(tmp_path, *SHRINKS)), Slots(job(tmp_path, *SHRINKS))
    assert taken(slots, course) == [0, 1, 2, 3]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lost-slots").write_text("1\n77\nnonsense\n")
    assert taken(slots, course) == [0, 2]
    assert slots.lines([0, 2]) == [
        f"slot 1 is lost: {tmp_path}/out/lost-slots names it",
        "idle: slot 3; 3 are left, and 2 fit",
    ]
    (tmp_path / "out" / "lost-slots").unlink()
    assert taken(slots, course) == [0, 1, 2, 3]


def test_a_slot_whose_process_dies_twice_before_a_step_is_lost(tmp_path):
    course, slots = Course(job(tmp_path, *SHRINKS)), Slots(job(tmp_path, *SHRINKS))
    slots.note_death(0, progressed=False)
    slots.note_death(2, progressed=True)  # a step between them: what was wrong before does not count
    slots.note_death(0, progressed=False)
    assert taken(slots, course) == [0, 1, 2, 3]
    slots.note_death(0, progressed=False)
    assert taken(slots, course) == [1, 2]
    assert slots.lines([1, 2])[0] == "slot 0 is lost: its process died twice before a step was reached"


def test_slots_go_with_their_accelerators(tmp_path, monkeypatch):
    there = iter([3, 8, 0])
    monkeypatch.setattr(elastic, "_count_devices", lambda: next(there))
    words = [*SHRINKS, "mesh.dp=4"]
    course, slots = Course(job(tmp_path, *words)), Slots(job(tmp_path, *words, devices=8))
    assert taken(slots, course) == [0, 1, 2, 3]
    assert taken(slots, course) == [0, 1]
    assert slots.lines([0, 1]) == [
        "slot 3 is lost: 3 accelerators are visible",
        "idle: slot 2; 3 are left, and 2 fit",
        "mesh.dp=4 is overridden by health.min_ranks: dp is 2",
    ]
    assert taken(slots, course) == [0, 1, 2, 3]
    with pytest.raises(Zero3dError, match=r"0 ranks are there.* slot 0 is lost: 0 accelerators are visible; slot 1 "):
        taken(slots, course)


def test_by_default_a_run_needs_all_slots_and_says_what_to_type(tmp_path):
    course, slots = Course(job(tmp_path, ranks=2)), Slots(job(tmp_path, ranks=2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lost-slots").write_text("1")
    with pytest.raises(Zero3dError) as caught:
        taken(slots, course)
    assert str(caught.value) == (
        f"slot 1 of this machine is lost ({tmp_path}/out/lost-slots names it): 1 of 2 ranks are left, and a run needs "
        "all. Type health.min_ranks=N (with train.batch and train.micro_batch) to go on with fewer, or mend it and go "
        "on with: COMMAND"
    )
    assert caught.value.exit_code == 1


def test_a_rank_computes_on_its_slots_device_whatever_its_number_is(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _launched().local_rank == 1
    monkeypatch.setenv("ZERO3D_SLOT", "3")
    assert _launched().local_rank == 3


# --- what an attempt begins with ------------------------------------------------------------------


def leave(folder, *steps, saved=()):
    """What an attempt leaves in the run's folder."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"output: {folder}")
    fresh = folder / "metrics.tmp"
    fresh.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    fresh.replace(folder / "metrics.jsonl")
    for step in saved:
        (folder / "checkpoints" / f"step-{step}").mkdir()
        (folder / "checkpoints" / f"step-{step}" / "manifest.json").touch()


@pytest.mark.parametrize(
    ("resume", "overwrite", "before", "begun", "again"),
    [
        (None, False, (), 0, "--resume=auto"),
        (None, True, (1, 2, 3), 0, "--overwrite"),
        ("auto", False, (), 0, "--resume=auto"),
        ("auto", False, (3,), 3, "--resume=auto"),
        ("INSIDE", False, (3, 9), 3, "--resume=INSIDE"),
    ],
)
def test_what_was_given_counts_until_a_checkpoint_is_saved(tmp_path, resume, overwrite, before, begun, again):
    out = tmp_path / "out"
    if before:
        leave(out, *range(1, max(before) + 1), saved=before)
    inside = str(out / "checkpoints" / "step-3")
    resume, again = (text and text.replace("INSIDE", inside) for text in (resume, again))
    course = Course(job(tmp_path, resume=resume, overwrite=overwrite))
    assert course.begin()[2:] == ([f"--resume={resume}"] if resume else ["--overwrite"] * overwrite)
    assert not course.progressed, "what was there before is not of this attempt"
    leave(out, *range(1, begun + 1))
    assert not course.progressed
    assert course.begin()[2:] == [again]
    leave(out, *range(1, 12), saved=[11])
    assert course.progressed
    assert course.begin()[2:] == ["--resume=auto"]
    assert course.lines(4) == [f"restart 2 of 9: 4 ranks, dp 4, from {out}/checkpoints/step-11"]


def test_a_run_from_another_runs_checkpoint_begins_anew_in_a_folder_of_which_nothing_is_left(tmp_path):
    leave(tmp_path / "other", *range(1, 6), saved=[5])
    checkpoint = tmp_path / "other" / "checkpoints" / "step-5"
    course = Course(job(tmp_path, resume=str(checkpoint)))
    course.begin()
    leave(tmp_path / "out", 6, 7)
    assert course.begin()[2:] == [f"--resume={checkpoint}"]
    assert course.lines(2) == [f"restart 1 of 9: 2 ranks, dp 2, from {checkpoint}"]
    assert not list((tmp_path / "out").iterdir())
    assert (checkpoint / "manifest.json").exists()


def test_a_run_goes_on_in_the_folder_that_it_has_chosen(tmp_path):
    course = Course(job(tmp_path, named=False))
    assert course.begin()[2:] == []
    assert course.begin()[2:] == [], "it has died before it chose"
    course.note_output("zero3d-run-2")
    assert course.begin()[2:] == ["output=zero3d-run-2", "--resume=auto"]
    assert course.command == "zero3d train zero3d-run-2/config.yaml --resume auto"


# --- through processes ----------------------------------------------------------------------------


@pytest.fixture
def attempts(tmp_path, monkeypatch, capfd):
    """attempts(plan, *words, ...) -> the exit code, what workers of each attempt were given, and stderr."""
    monkeypatch.setattr("zero3d.tools.cli.workers.LAST_WORDS", 0.0)
    monkeypatch.setattr("zero3d.tools.cli.workers.POLL", 0.01)
    monkeypatch.setattr(
        "zero3d.tools.cli.workers.describe_kill", lambda number, _: f"killed by {signal.Signals(number).name}"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))

    def made(plan, *words, **options):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        try:
            code = run_job(job(tmp_path, *words, **options), module="attempts")
        except Zero3dError as error:
            code = error
        given = [
            [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{number}-*.json"))]
            for number in range(len(list((tmp_path / "attempts").iterdir())))
        ]
        return code, given, capfd.readouterr().err

    return made


KILLED = "rank {} died without an exception: killed by SIGKILL\n"


@pytest.mark.long
def test_killed_ranks_are_started_again_on_the_slots_that_are_there(attempts, tmp_path):
    plan = [
        {"metrics": [1, 2, 3], "save": 2, "lost": "0", "rank": 3, "end": "killed"},
        {"metrics": [1, 2, 3, 4], "save": 4, "lost": "", "rank": 1, "end": "killed"},
        {"metrics": [1, 2, 3, 4, 5], "save": 5},
    ]
    code, given, told = attempts(plan, *SHRINKS, restarts=2)
    assert code == 0
    assert [[worker["ZERO3D_SLOT"] for worker in workers] for workers in given] == [[0, 1, 2, 3], [1, 2], [0, 1, 2, 3]]
    assert [{worker["WORLD_SIZE"] for worker in workers} for workers in given] == [{4}, {2}, {4}]
    assert [{tuple(worker["words"]) for worker in workers} for workers in given] == [
        {()}, {("--resume=auto",)}, {("--resume=auto",)}
    ]  # fmt: skip
    out = tmp_path / "out"
    first, second = (  # after the watchdog's blocks
        f"{KILLED.format(3)}slot 0 is lost: {out}/lost-slots names it\nidle: slot 3; 3 are left, and 2 fit\n"
        f"restart 1 of 2: 2 ranks, dp 2, from {out}/checkpoints/step-2\n",
        f"{KILLED.format(1)}restart 2 of 2: 4 ranks, dp 4, from {out}/checkpoints/step-4\n",
    )
    assert 0 <= told.find(first) < told.find(second)


@pytest.mark.parametrize(
    ("end", "restarts", "code", "number", "told"),
    [
        ("bad input", 9, 2, 1, "DataError: of a bad input\n"),
        ("nan", 9, 1, 1, "NonFiniteError: of a nan\n"),
        ("flip", 9, 1, 1, "CorruptionError: of a flip\n"),
        ("bug", 1, 1, 2, "ValueError: of a bug\n"),
        ("killed", 0, 1, 1, KILLED.format(0)),
    ],
)
def test_what_no_attempt_may_follow(attempts, end, restarts, code, number, told):
    found, given, said = attempts([{"rank": 0, "end": end}] * 2, ranks=1, restarts=restarts)
    assert (found, len(given)) == (code, number)
    assert told in said
    assert said.count("restart 1 of 1: 1 rank, dp 1, from the beginning: no checkpoint was saved\n") == number - 1


def test_a_rank_that_dies_twice_before_a_step_ends_the_restarts(attempts):
    code, given, told = attempts([{"rank": 1, "end": "killed"}] * 3, ranks=2)
    assert len(given) == 2
    assert "slot 1 of this machine is lost (its process died twice before a step was reached)" in str(code)
    assert told.count(KILLED.format(1)) == 2


def test_a_stall_that_names_nobody_costs_nobody_a_slot(attempts, tmp_path, monkeypatch):
    from zero3d.tools.cli import workers

    supervise, calls = workers.supervise, []

    def stalled(workers, request, monitor):
        number = len(calls)
        calls.append(number)
        if number == 2:
            return supervise(workers, request, monitor)
        until(lambda: len(list(tmp_path.glob(f"{number}-*.json"))) == 2)
        for worker in workers:
            worker.blamed = "the network"
        return list(workers)

    monkeypatch.setattr(workers, "supervise", stalled)
    code, given, told = attempts([{"end": "never"}, {"end": "never"}, {}], ranks=2)
    assert (code, len(given)) == (0, 3)
    assert "is lost" not in told


def test_no_attempt_follows_a_signal_that_asks_to_stop(attempts, tmp_path):
    def stop():
        until((tmp_path / "0-0.json").exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = Thread(target=stop)
    thread.start()
    code, given, told = attempts([{"end": "never"}] * 2, ranks=1)
    thread.join()
    assert (code, len(given)) == (128 + signal.SIGUSR1, 1)
    assert told == "stopped by SIGUSR1 outside of training; what was saved before is still there\n"


def test_a_worker_that_was_asked_to_stop_before_it_trained_is_no_fault(tmp_path):
    def died(number):
        return [SimpleNamespace(rank=0, code=-number, folder=tmp_path)]

    assert not is_fault(died(signal.SIGTERM))
    assert is_fault(died(signal.SIGKILL))
