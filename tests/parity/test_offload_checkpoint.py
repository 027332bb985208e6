"""Checkpoints of states off the device: any place loads what any other has saved, bit for bit, and holds little memory."""

import ctypes
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from buckets import buckets_of
from damage import joined
from safetensors import safe_open
from tiers import PLACES, RESIDENT, Case, engine_of, step
from training import field, save_model, save_rows, train, tree

import zero3d

FEW_STEPS, STEPS = (1, 3), (3, 6)  # before a checkpoint, and in all
BASE = Case(moments=(2, "auto"))
BF16 = {"moments": "bf16"}


def made(case, place, folder, **options):
    """An engine whose folder on the disk, if any, is one of its own."""
    offload = PLACES[place] if isinstance(place, str) else place
    return engine_of(case, {**offload, "directory": tempfile.mkdtemp(dir=folder)}, **options)


def trained(case, steps, folder, place=RESIDENT):
    with buckets_of(1024):
        engine = made(case, place, folder)
        losses = [step(engine, case, number) for number in range(steps)]
        return losses, engine.fingerprint()


# --- from place to place --------------------------------------------------------------------------


def handed_on(case, pairs, folder, steps):
    """Train at one place, save, train on; load at another that has trained elsewhere, and then at the first again."""
    middle, end = steps
    losses, expected = trained(case, end, folder)
    for number, (one, other) in enumerate(pairs):
        first, second = (case._replace(**changes) for changes in ({}, {"master": "split"})[:: 1 if number % 2 else -1])
        with buckets_of(1024):
            before = made(first, one, folder)
            found = [step(before, first, n) for n in range(middle)]
            saved = before.save(Path(folder) / f"{number}")
            assert found == losses[:middle]
            step(before, first, middle)
            after = made(second, other, folder)
            step(after, second, 0)
            for engine, of in ((after, second), (before, first)):
                engine.load(saved)
                assert engine.resumed.startswith("bitwise"), (one, other, engine.resumed)
                assert [step(engine, of, n) for n in range(middle, end)] == losses[middle:], (one, other)
                assert engine.fingerprint() == expected, (one, other)
            again = made(case, RESIDENT, folder)
            again.load(after.save(Path(folder) / f"{number} again"))
            assert again.fingerprint() == expected


NAMES = list(PLACES)
FEW = [("part on host", "all on disk")]


def test_what_one_place_has_saved_goes_on_at_another(alone, tmp_path):
    alone(handed_on, BASE, FEW, str(tmp_path), FEW_STEPS)


@pytest.mark.long
@pytest.mark.parametrize(("frozen", "apart"), [(False, 1), (True, 5)])
def test_what_any_place_has_saved_goes_on_at_others(alone, tmp_path, frozen, apart):
    """Each place saves for another one, and loads what another one has saved."""
    pairs = list(zip(NAMES, NAMES[apart:] + NAMES[:apart], strict=True))
    alone(handed_on, BASE._replace(frozen=frozen), pairs, str(tmp_path), STEPS)


EXACT = Case(exact=True, master="split")
LEGS = [  # dp, place, stage, reduce; two steps each
    (1, RESIDENT, 3, "every_micro_batch"), (2, "all on disk", 3, "every_micro_batch"), (1, "part on host", 1, "every_step"),
    (2, "disk, device updates", 2, "every_step"), (1, "weights on disk", 3, "every_micro_batch"),
    (4, "all on host", 3, "every_step"), (1, RESIDENT, 0, "every_step"),
]  # fmt: skip


def leg(dp, place, stage, reduce, number, folder):
    case = EXACT._replace(dp=dp, stage=stage, moments=(4 // dp, "auto" if dp == 4 and stage == 3 else reduce))
    with buckets_of(528):
        engine = made(case, place, folder)
        if number:
            engine.load(Path(folder) / "saved")
            assert engine.resumed.startswith("bitwise"), engine.resumed
        for each in range(2 * number, 2 * number + 2):
            step(engine, case, each)
        engine.save(Path(folder) / "saved")
        return engine.fingerprint()


def uninterrupted(steps, folder):
    _, _, stage, reduce = LEGS[0]
    return trained(EXACT._replace(stage=stage, moments=(4, reduce)), steps, folder)[1]


@pytest.mark.long
@pytest.mark.parametrize("legs", [LEGS[:3], LEGS])
def test_a_run_moves_over_places_meshes_and_stages_in_exact_mode(ranks, tmp_path, legs):
    hashes = [set(ranks(dp, leg, dp, *how, number, str(tmp_path))) for number, (dp, *how) in enumerate(legs)]
    (expected,) = ranks(1, uninterrupted, 2 * len(legs), str(tmp_path))
    assert hashes[-1] == {expected}


# --- moments in bf16 ------------------------------------------------------------------------------


def moments(folder):
    """Dtypes of moments in a checkpoint, and all states."""
    rows = joined(Path(folder))["tensors"]
    dtypes = {row["dtype"] for row in rows if row["state"].startswith("exp_avg")}
    (file,) = {row["file"] for row in rows}
    with safe_open(Path(folder) / file, framework="pt") as opened:
        return dtypes, {(row["name"], row["state"], str(row["box"])): opened.get_tensor(row["key"]) for row in rows}


def narrow(folder, kinds):
    """What becomes of moments of these kinds, loaded as either."""
    (middle, end), case, places = FEW_STEPS, BASE, {"bf16": {**PLACES["disk"], **BF16}, "fp32": PLACES["disk"]}
    losses, hashes = {}, {}
    for name, place in places.items():
        losses[name], hashes[name] = trained(case, end, folder, place)
    found = {}
    with buckets_of(1024):
        for saved in kinds:
            engine = made(case, places[saved], folder)
            for number in range(middle):
                step(engine, case, number)
            source = engine.save(Path(folder) / saved)
            others = {
                "bf16": {**PLACES["all on host"], **BF16, "executor": "device"},
                "fp32": PLACES["weights on host"],
            }
            for live, other in others.items():
                after = made(case, other, folder)
                after.load(source)
                copy = moments(after.save(Path(folder) / f"{saved} {live}"))
                same = [step(after, case, number) for number in range(middle, end)] == losses[saved][middle:]
                found[saved, live] = (
                    moments(source),
                    copy,
                    after.resumed,
                    same and after.fingerprint() == hashes[saved],
                )
    assert losses["bf16"] != losses["fp32"]
    return found


def check_narrow(folder, kinds):
    for (saved, live), ((before, states), (after, loaded), told, same) in narrow(folder, kinds).items():
        assert before == {"bfloat16" if saved == "bf16" else "float32"}
        assert after == {"bfloat16" if live == "bf16" else "float32"}
        for key, values in states.items():
            wanted = loaded[key].dtype
            assert torch.equal(loaded[key], values.to(wanted)), key  # torch rounds to nearest
        assert same == (saved == live)
        assert told.startswith(
            "bitwise" if saved == live else f"not bitwise: moments {saved} -> {live} (moments are rounded"
        )


@pytest.mark.long
@pytest.mark.parametrize("kinds", [["bf16"], pytest.param(["bf16", "fp32"], marks=pytest.mark.long)], ids=" ".join)
def test_moments_in_bf16_are_saved_as_they_are_and_load_as_either(alone, tmp_path, kinds):
    alone(check_narrow, str(tmp_path), kinds)


# --- memory ---------------------------------------------------------------------------------------

WIDTH, ANONYMOUS = 3000, 64e6
MMAP_THRESHOLD = -3  # of mallopt: from which size on the C library maps memory of its own for an allocation


def held():
    """Anonymous memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def most_held(action):
    """What `action` gives, and by how much anonymous memory grew at most meanwhile."""
    before, most, over = held(), 0, threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.002):
            most = max(most, held() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    result = action()
    over.set()
    thread.join()
    return result, most


def saved_and_loaded(folder, frozen):
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 17)  # what is freed goes back: pieces of it are not to be counted
    torch.manual_seed(0)
    layers = 6 if frozen else 3  # frozen ones have no moments
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model[1:] if frozen else ():
        layer.requires_grad_(False)
    offload = {**PLACES["all on disk"], "directory": f"{folder}/offload"}
    engine = zero3d.Engine(model, stage=3, units=["*"], offload=offload)
    nbytes = sum(row.measured for row in engine.memory if row.place == "disk" and row.category != "padding")
    source, saving = most_held(lambda: engine.save(f"{folder}/saved"))
    _, loading = most_held(lambda: engine.load(source))
    _, hashing = most_held(engine.fingerprint)
    return nbytes, saving, loading, hashing


@pytest.mark.long
@pytest.mark.parametrize("frozen", [False, True])
def test_states_on_a_disk_are_saved_and_loaded_without_being_held(alone, tmp_path, frozen):
    nbytes, *grown = alone(saved_and_loaded, str(tmp_path), frozen)
    assert nbytes > 2 * ANONYMOUS
    assert max(grown) < ANONYMOUS, grown


# --- zero3d train ---------------------------------------------------------------------------------

SECTIONS = [
    {"offload": {"optimizer": "host"}}, {"offload": {"optimizer": "disk"}}, {"offload": {"params": "host"}},
    {"offload": {"optimizer": "disk", "params": "disk"}, "zero": {"master": "split"}},
]  # fmt: skip


def prepared(folder):
    save_model(folder / "model")
    save_rows(folder / "rows.npy")
    return lambda output, **sections: tree(folder, output, precision="bf16", **sections)


@pytest.mark.long
def test_a_run_has_the_losses_of_states_on_the_device_wherever_they_are(ranks, tmp_path):
    made = prepared(tmp_path)
    expected = [field(records, "loss") for records in ranks(2, train, made("resident"))]
    for number, sections in enumerate(SECTIONS):
        assert [field(records, "loss") for records in ranks(2, train, made(str(number), **sections))] == expected


@pytest.mark.long
def test_a_run_goes_on_at_another_place(ranks, tmp_path):
    made = prepared(tmp_path)
    few = {"train": {"steps": 4}}
    expected = ranks(2, train, made("resident", **few))[0]
    for stop_in, sections in zip((1, 2, 3, None), SECTIONS, strict=True):
        records = ranks(2, train, made("moved", **few, **sections), "auto", stop_in)
    assert field(records[0], "loss") == field(expected, "loss")
