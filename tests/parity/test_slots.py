"""Restarts from the slots of a disk: after a SIGKILL anywhere a run ends with the bits of one that was not killed."""

import json
import mmap
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from disk_steps import die_at
from pool import RankFailure
from tiers import INFINITE, PLACES, Case, engine_of, step
from training import metrics, save_model, save_rows, steady, train, tree

import zero3d
from zero3d.checkpoint import slots
from zero3d.errors import CheckpointError
from zero3d.offload import commit_file
from zero3d.offload.disk_slab import DiskSlab
from zero3d.spec.offload import Offload
from zero3d.train.folder import Folder
from zero3d.train.offload import drop_leftovers

STEPS = 7


def forked(case, *args):
    """The result of case(*args) in a process of its own; None where it was killed."""
    with tempfile.NamedTemporaryFile("r") as answer:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                Path(answer.name).write_text(json.dumps(case(*args)))
                code = 0
            except BaseException as error:
                Path(answer.name).write_text(f"{type(error).__name__}: {error}")
            os._exit(code)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            return None
        assert status == 0, answer.read()
        return json.load(answer)


# --- engines --------------------------------------------------------------------------------------


def go_on(folder, case, offload, die=None):
    """Train from where slots are, or from the beginning; die: the step after whose note the process is killed."""
    engine = engine_of(case, {**offload, "directory": folder})
    first, losses = 0, []
    if engine.slots is not None:
        first = engine.load_slots()["number"] + 1
        assert engine.resumed.startswith("bitwise")
        assert engine.slots is None or engine.steps == engine.slots.step
    for number in range(first, STEPS):
        losses.append(step(engine, case, number))
        if engine.last_step.reason == "applied":
            engine.note({"number": number})
        if number == die:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"first": first, "losses": losses, "hash": engine.fingerprint(), "steps": engine.steps}


def killed(case, offload, dies):
    """Kill processes after these steps and let one end; all of it is as if there had been one."""
    with tempfile.TemporaryDirectory() as folder:
        alone = forked(go_on, f"{folder}/alone", case, offload)
        assert alone["first"] == 0
        firsts = []
        for die in dies:
            assert forked(go_on, f"{folder}/killed", case, offload, die) is None
        last = forked(go_on, f"{folder}/killed", case, offload)
        assert last["losses"] == alone["losses"][last["first"] :]
        assert (last["hash"], last["steps"]) == (alone["hash"], alone["steps"])
        firsts.append(last["first"])
    return firsts


FULL = Case()
CASES = [
    (FULL, PLACES["disk"], (1, 2, 5)),
    (FULL._replace(master="split", stage=1), PLACES["disk, device updates"], (INFINITE,)),
    (FULL._replace(master="split"), PLACES["all on disk"], (2,)),
    (FULL._replace(precision="fp32", exact=True, moments=(2, "auto")), PLACES["all on disk"], (1, 2)),
    (FULL._replace(precision="fp16", stage=2, grouped=True, moments=(2, "auto")), PLACES["disk"], (5,)),
    (FULL._replace(stage=0), {**PLACES["disk"], "moments": "bf16"}, (3,)),
    (FULL._replace(optimizer="foreach Adam"), PLACES["states on disk, weights on host"], (3, 4)),
]  # fmt: skip


def check_killed(cases):
    for case, offload, dies in cases:
        (first,) = killed(case, offload, dies)
        assert dies[-1] - 1 <= first <= dies[-1] + 1, (case, offload)


def test_a_process_goes_on_from_what_another_has_left_in_slots(alone):
    alone(check_killed, CASES[1:2])


@pytest.mark.long
def test_processes_go_on_from_slots_in_all_settings(alone):
    alone(check_killed, CASES)


def restartable(case, place):
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(case, {**PLACES[place], "directory": folder})
        step(engine, case, 0)
        engine.note({"number": 0})
        engine.optimizer.flush()
        noted = any(Path(folder).glob("*.note-*"))
        del engine
        assert engine_of(case, {**PLACES[place], "directory": folder}).slots is not None or not noted
        return noted


NOT_ALL = [
    (FULL, "part on disk"), (FULL, "weights on disk"), (FULL._replace(precision="fp32"), "disk"),
    (FULL._replace(master="split"), "states on disk, weights on host"), (FULL._replace(optimizer="amsgrad"), "disk"),
    (FULL._replace(optimizer="momentum"), "disk"), (FULL._replace(frozen=True), "all on disk"),
]  # fmt: skip


def which_are_restartable(pairs):
    return [restartable(*pair) for pair in pairs]


@pytest.mark.long
def test_slots_that_lack_something_of_a_run_are_no_place_to_go_on_from(alone):
    assert alone(which_are_restartable, [(FULL, "disk"), *NOT_ALL]) == [True] + [False] * len(NOT_ALL)


def voided(folder):
    """Slots after training from elsewhere: a load, a write by hand, or a first step."""
    found = []
    case, offload = FULL, {**PLACES["disk"], "directory": f"{folder}/slots"}
    engine = engine_of(case, offload)
    step(engine, case, 0)
    engine.note({"number": 0})
    saved = engine.save(f"{folder}/saved")
    found.append(engine.steps)
    del engine
    for how in ("load", "read", "write", "train"):
        engine = engine_of(case, offload)
        found.append(None if engine.slots is None else engine.slots.step)
        if how == "load":
            engine.load(saved)
            step(engine, case, 1)
            engine.note({"number": 1})
            engine.optimizer.flush()
        elif how in ("read", "write"):
            engine.load_slots()
            with engine.full_params():
                if how == "write":
                    next(engine.module.parameters()).data.mul_(1.5)
            found.append(len(list(Path(folder).glob("slots/*.commit"))))
            step(engine, case, 2)
            if how == "read":
                engine.note({"number": 2})
            engine.optimizer.flush()
        else:
            step(engine, case, 3)
            found.append(engine.slots)
        del engine
    return found


def test_what_is_loaded_or_written_beside_steps_voids_slots(alone, tmp_path):
    assert alone(voided, str(tmp_path)) == [1, 1, 2, 1, 3, 0, None, None]


# --- what is lost ---------------------------------------------------------------------------------


def slots_of(folder, place="disk", case=FULL):
    return engine_of(case, {**PLACES[place], "directory": str(folder)})


def two_steps(folder):
    """An engine that has committed two steps and written notes of both."""
    engine = slots_of(folder)
    for number in range(2):
        step(engine, FULL, number)
        engine.note({"number": number})
    engine.optimizer.flush()
    return engine


def half_overwritten(folder):
    """Step 2 is committed, the slot of step 1 has a record of step 3, and there is a note of step 1 alone."""
    engine = two_steps(folder)
    slab = engine._parts.tiers.store._slab
    slab.confirm(2)
    slab.write(0, memoryview(mmap.mmap(-1, slab.nbytes)))
    del engine, slab
    (Path(folder) / "rank-00000.note-0.json").unlink()
    engine = slots_of(folder)
    with pytest.raises(CheckpointError, match="no step in slots"):
        engine.load_slots()
    return engine.slots is None


def test_a_step_before_the_last_is_no_place_to_go_back_to_for_want_of_a_note(alone, tmp_path):
    assert alone(half_overwritten, str(tmp_path))


def warned(folder, place):
    """What is said where another placement finds these slots, and then its own."""
    two_steps(folder)
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = slots_of(folder, place)
        found.append([str(each.message) for each in caught if folder in str(each.message)])
        step(engine, FULL, 0)
        engine.optimizer.flush()
        del engine
    return found


def test_slots_of_another_placement_are_not_lost_without_a_word(alone, tmp_path):
    (line,), after = alone(warned, str(tmp_path), "part on disk")
    assert line.startswith(
        f"{tmp_path} had step 2 of another model, mesh or placement, or a damaged one: its files are"
    )
    assert after == []


def written_before_going_back(folder):
    two_steps(folder)
    engine = slots_of(folder)
    assert engine.slots.step == 2
    with engine.full_params():
        next(engine.module.parameters()).data.mul_(1.5)
    before = engine.fingerprint()
    with pytest.raises(CheckpointError, match="no step in slots"):
        engine.load_slots()
    return engine.slots is None, engine.fingerprint() == before


def test_slots_are_not_offered_once_somebody_has_written(alone, tmp_path):
    assert alone(written_before_going_back, str(tmp_path)) == (True, True)


def unwritten_note(folder, name):
    """Notes before and after one that cannot be written, and what is said."""
    engine = two_steps(folder)
    read = lambda: {path.name: path.read_bytes() for path in Path(folder).iterdir() if "note" in path.name}  # noqa: E731
    before, original = read(), getattr(slots, name)

    def full(*given):
        original(*given)
        raise CheckpointError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, name, full)
        with pytest.warns(UserWarning, match="cannot go on from step 2 .* no room"):
            engine.note({"number": 7})
    return before == read(), len(before)


@pytest.mark.parametrize("name", ["write_tensors", "write_text"])
def test_a_note_that_cannot_be_written_leaves_the_one_before(alone, tmp_path, name):
    assert alone(unwritten_note, str(tmp_path), name) == (True, 4)


# --- two ranks ------------------------------------------------------------------------------------

TWO = FULL._replace(dp=2, stage=2, moments=(2, "auto"))


def one_dies(folder, number, rank):
    """Train; in the commit of this step one rank is killed, when the other has committed it."""
    engine = engine_of(TWO, {**PLACES["disk"], "directory": folder})
    begin = 0 if engine.slots is None else engine.load_slots()["number"] + 1
    committed = DiskSlab.commit

    def commit(slab, at):
        if at == number and dist.get_rank() == rank:
            while (Path(folder) / "other").exists() is False:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        committed(slab, at)
        if at == number:
            (Path(folder) / "other").touch()

    DiskSlab.commit = commit
    for each in range(begin, number):
        engine.train_batch(two_of(each), wait=False)
        engine.note({"number": each})
    engine.optimizer.updates.finish()


def two_of(number):
    from tiers import micro_batches_of

    return micro_batches_of(TWO, number if number < INFINITE else number + 1)


def both_go_on(folder, last):
    engine = engine_of(TWO, {**PLACES["disk"], "directory": folder})
    begin = 0 if engine.slots is None else engine.load_slots()["number"] + 1
    for each in range(begin, last):
        engine.train_batch(two_of(each), wait=False)
    return begin, engine.fingerprint()


@pytest.mark.long
@pytest.mark.parametrize("dies", [((3, 1),), pytest.param(((2, 0), (3, 1), (5, 0)), marks=pytest.mark.long)])
def test_a_rank_that_has_committed_a_step_which_another_has_not_goes_back(ranks, tmp_path, dies):
    ((_, expected), _) = ranks(2, both_go_on, str(tmp_path / "alone"), 6)
    for number, rank in dies:
        (tmp_path / "killed" / "other").unlink(missing_ok=True)
        with pytest.raises(RankFailure, match=f"rank {rank} of 2 gave no answer"):
            ranks(2, one_dies, str(tmp_path / "killed"), number, rank)
    assert ranks(2, both_go_on, str(tmp_path / "killed"), 6) == [(dies[-1][0] - 1, expected)] * 2


def mixed(folder):
    """The step that can be gone on from, of one run, and where rank 1 has the slots of another run, at the same step."""
    own = [{**PLACES["disk"], "directory": f"{folder}/{name}"} for name in ("one", "other")]
    for offload in own:
        engine = engine_of(TWO, offload)
        engine.train_batch(two_of(0))
        engine.note({"number": 0})
        engine.optimizer.flush()
        del engine
    steps = [engine_of(TWO, own[0]).slots.step]
    if dist.get_rank() == 1:
        for path in Path(folder, "other").glob("rank-00001.*"):
            path.replace(Path(folder, "one", path.name))
    return [*steps, engine_of(TWO, own[0]).slots]


def test_slots_of_one_step_that_two_runs_have_written_are_no_place_to_go_on_from(ranks, tmp_path):
    assert ranks(2, mixed, str(tmp_path)) == [[1, None]] * 2


def flip(states, commit):
    """Flip 64 bytes in the middle of the committed slot."""
    at = states.stat().st_size * (1 + 2 * json.loads(commit.read_text())["slot"]) // 4
    with states.open("r+b") as file:
        file.seek(at)
        data = file.read(64)
        file.seek(at)
        file.write(bytes(byte ^ 255 for byte in data))


def older(_, commit):
    """Make a commit what one of format 1 was, before records had checksums."""
    entries = json.loads(commit.read_text())
    entries = {k: v for k, v in entries.items() if k not in ("sha256", "sums", "sums_before")} | {"format": 1}
    commit.write_text(json.dumps(entries | {"sha256": commit_file.sha256_of(entries)}))


def spoilt(folder, damage):
    """Let rank 1's slots be damaged, try to go on from them, and go on from a checkpoint if that is refused."""
    slots, mine = Path(folder, "slots"), dist.get_rank() == 1
    engine = engine_of(TWO, {**PLACES["disk"], "directory": str(slots)})
    for number in range(2):
        engine.train_batch(two_of(number))
        engine.note({"number": number})
    saved, trained_so_far = engine.save(f"{folder}/saved"), engine.fingerprint()
    del engine
    if mine:
        damage(*(slots / f"rank-00001.{kind}" for kind in ("states", "commit")))
    engine = engine_of(TWO, {**PLACES["disk"], "directory": str(slots)})
    before, refused = engine.fingerprint(), None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            engine.load_slots()
        except CheckpointError as error:
            refused = error
            assert engine.fingerprint() == before != trained_so_far
            engine.load(saved)
    assert engine.fingerprint() == trained_so_far
    told = [str(each.message) for each in said if "without checksums" in str(each.message)]
    return None if refused is None else (str(refused), refused.exit_code), told


def test_a_damaged_record_of_one_rank_is_an_error_of_all_before_anything_is_changed(ranks, tmp_path):
    (first, second) = ranks(2, spoilt, str(tmp_path), flip)
    assert first == second
    (message, code), told = first
    assert (code, told) == (2, [])
    assert message.startswith(f"{tmp_path}/slots/rank-00001.states: record layers.")
    assert message.endswith(f"remove {tmp_path}/slots, and go on from the last checkpoint with --resume auto.")


def test_slots_of_a_version_that_had_no_checksums_are_gone_on_from_with_a_word(ranks, tmp_path):
    (refused, told), other = ranks(2, spoilt, str(tmp_path), older)
    assert refused is None
    assert other == (None, [])
    assert len(told) == 1
    assert f"step 2 in {tmp_path}/slots was written by an older zero3d, without checksums" in told[0]


# --- zero3d train ---------------------------------------------------------------------------------


def prepared(folder, steps, **sections):
    """A configuration of a model that is trained on a disk, and what its name is."""
    if not (folder / "model").exists():
        save_model(folder / "model")
        save_rows(folder / "rows.npy")
    offload = {"optimizer": "disk"} | sections.pop("offload", {})
    sections = {
        "train": {"steps": steps, "batch": 4, "accumulate": 2}, "data": {"validation": 0.2, "shuffle": True},
        "evaluate": {"every": 2}, "checkpoint": {"every": 3, "export": False}, "offload": offload, "precision": "bf16",
        "schedule": {"warmup": 2}, **sections,
    }  # fmt: skip
    return lambda output: tree(folder, output, **sections)


def trained(made, call=None, step=None, after=None):
    """Train, and write down where the run went on from.

    Be killed at a call of the system, after a step, or so many seconds after training has begun.
    """
    if call is not None:
        die_at(call)
    origins = []
    for name in ("load", "load_slots"):
        original = getattr(zero3d.Engine, name)
        setattr(
            zero3d.Engine,
            name,
            lambda *given, name=name, original=original: (origins.append(name), original(*given))[1],
        )
    origin = Path(made["output"]).parent / "origins"
    original = zero3d.Engine.train_batch

    def noting(*given, **named):
        nonlocal after
        if after is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, after)  # it ends a process as SIGKILL does
            after = None
        if origins:
            with origin.open("a") as file:
                file.write(f"{origins.pop()} {given[0].steps}\n")
        return original(*given, **named)

    zero3d.Engine.train_batch = noting
    note = zero3d.Engine.note

    def dying(engine, loop):
        note(engine, loop)
        if engine.steps == step:
            engine.optimizer.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    zero3d.Engine.note = dying
    train(made, "auto", planned=False)
    return True


def left(made):
    """All that a run leaves which must not depend on kills: its records, checkpoints and what these say of the loop."""
    records = [steady(record) for record in metrics(made)]
    folders = sorted((Path(made["output"]) / "checkpoints").glob("step-*"))
    files = {f"{f.name}": (f / "rank-00000.safetensors").read_bytes() for f in folders}
    loops = {f.name: json.loads((f / "manifest.json").read_text())["loop"] for f in folders}
    best = (Path(made["output"]) / "checkpoints" / "best").resolve().name
    return records, files, loops, best


def many_kills(folder, seed, kills, steps, calls, longest=None, sections=None):
    """Kill a run at random calls of the system, or after some time, until it has been killed so often; then let it end.

    longest    of that time, as a share of what the run takes that is not killed

    Returns from where its lives went on.
    """
    folder, draw = Path(folder), random.Random(seed)
    named = prepared(folder, steps, **(sections or {}))
    began = time.monotonic()
    assert forked(trained, named("alone"))
    took = time.monotonic() - began
    (folder / "origins").unlink(missing_ok=True)
    made, count = named("killed"), 0
    for number in range(kills):
        how = (None, None, draw.uniform(0, longest * took)) if longest and number % 2 else (draw.randrange(1, calls),)
        count += forked(trained, made, *how) is None
    assert forked(trained, made)
    for found, expected in zip(left(made), left(named("alone")), strict=True):
        assert found == expected
    origins = (folder / "origins").read_text().split() if (folder / "origins").exists() else []
    return count, {name: origins.count(name) for name in ("load", "load_slots")}


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(alone, tmp_path):
    kills, origins = alone(many_kills, str(tmp_path), 4, 4, 6, 70)
    assert kills == 4
    assert origins["load_slots"]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "sections"), [
    (1, {}), (2, {"offload": {"params": "disk"}, "zero": {"master": "split"}}),
    (3, {"offload": {"moments": "bf16", "executor": "device"}, "zero": {"stage": 1}}),
])  # fmt: skip
def test_many_kills_of_a_run_change_no_bit(alone, tmp_path, seed, sections):
    kills, origins = alone(many_kills, str(tmp_path), seed, 25, 94, 150, 0.08, sections)
    assert kills == 25
    assert min(origins.values()) >= 3


# --- damage ---------------------------------------------------------------------------------------


def damages(folder):
    """What may become of a rank's files, and where the next process goes on from: 5 steps are done, 3 are saved."""
    commit, states = folder / "rank-00000.commit", folder / "rank-00000.states"
    notes = [folder / f"rank-00000.note-{odd}.json" for odd in (0, 1)]

    def cut(*paths):
        for path in paths:
            os.truncate(path, path.stat().st_size // 2)

    def copy():
        shutil.copy(states, folder / "copy").replace(states)

    return {
        "nothing": (lambda: None, "load_slots", 5),
        "a cut commit": (lambda: cut(commit), "load", 3),
        "a commit of another step": (lambda: commit.write_text(commit.read_text().replace('"step": 5', '"step": 4')), "load", 3),
        "no commit": (commit.unlink, "load", 3),
        "cut states": (lambda: cut(states), "load", 3),
        "no states": (states.unlink, "load", 3),
        "copied states": (copy, "load", 3),
        "a cut note": (lambda: cut(notes[1]), "load", 3),
        "a note of other tensors": (lambda: cut(notes[1].with_suffix(".safetensors")), "load", 3),
        "no notes": (lambda: [path.unlink() for path in notes], "load", 3),
        "another run": (lambda: (folder.parent / ".run").write_text("0123456789abcdef"), "load", 3),
        "no folder": (lambda: shutil.rmtree(folder), "load", 3),
    }  # fmt: skip


def damaged(folder, names):
    """Kill a run of 6 steps in the sixth, damage what it has left, and go on."""
    folder, found = Path(folder), {}
    named = prepared(folder, 6, evaluate={"every": 0})
    assert forked(trained, named("alone"))
    for name in names:
        (folder / "origins").unlink(missing_ok=True)
        made = named(name)
        assert forked(trained, made, None, 5) is None
        damage, *expected = damages(Path(made["output"]) / "offload")[name]
        damage()
        assert forked(trained, made)
        same = [a == b for a, b in zip(left(made), left(named("alone")), strict=True)]
        found[name] = same, (folder / "origins").read_text().split(), [expected[0], str(expected[1])]
    return found


def check_damaged(ranks_or_alone, folder, names):
    for name, (same, origin, expected) in ranks_or_alone(damaged, str(folder), names).items():
        assert all(same), name
        assert origin == expected, name


def refused(made):
    try:
        trained(made)
    except CheckpointError as error:
        return [str(error), error.exit_code]
    return None


def spoilt_run(folder):
    """Kill a run of 6 steps in the sixth, flip bytes of what it has left, and do what it says."""
    folder = Path(folder)
    named = prepared(folder, 6, evaluate={"every": 0})
    assert forked(trained, named("alone"))
    (folder / "origins").unlink(missing_ok=True)
    made = named("spoilt")
    assert forked(trained, made, None, 5) is None
    slots = Path(made["output"]) / "offload"
    flip(*(slots / f"rank-00000.{kind}" for kind in ("states", "commit")))
    said = [forked(refused, made) for _ in range(2)]
    shutil.rmtree(slots)
    assert forked(trained, made)
    same = [a == b for a, b in zip(left(made), left(named("alone")), strict=True)]
    return said, same, (folder / "origins").read_text().split()


@pytest.mark.long
def test_a_run_whose_slots_have_a_damaged_record_says_so_until_they_are_removed(alone, tmp_path):
    said, same, origin = alone(spoilt_run, str(tmp_path))
    for message, code in said:
        assert f"{tmp_path}/spoilt/offload/rank-00000.states: record " in message
        assert f"remove {tmp_path}/spoilt/offload, and go on from the last checkpoint" in message
        assert code == 2
    assert all(same)
    assert origin == ["load", "3"]


DAMAGES = tuple(damages(Path()))


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_from_its_slots(alone, tmp_path):
    check_damaged(alone, tmp_path, ("nothing",))


@pytest.mark.long
def test_slots_damaged_in_any_way_are_passed_over(alone, tmp_path):
    check_damaged(alone, tmp_path, DAMAGES)


def test_a_folder_that_is_named_as_it_would_be_anyway_is_in_use(tmp_path):
    folder, offload = Folder(tmp_path), Offload("disk", directory=f"{tmp_path}/./offload")
    engine = SimpleNamespace(offload=offload)
    (tmp_path / "offload").mkdir()
    drop_leftovers(folder, engine, ended=False)
    assert folder.offload.exists()
    drop_leftovers(folder, engine, ended=True)
    assert not folder.offload.exists()
