"""Damaged checkpoints: each is refused and changes nothing of a live engine, or loads exactly what was saved."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from damage import EDITS, FLAWS
from damaged import Live, clean, damaged_load, make, saved_at, seed, train

from zero3d.checkpoint.examine import examine
from zero3d.errors import CheckpointError
from zero3d.tools.cli.main import main

CASES = 2000
FEW = range(80)  # of them in every run of the tests
PARTS = [range(first, first + 200) for first in range(0, CASES, 200)]
EACH = pytest.mark.parametrize(
    "cases",
    [FEW, *(pytest.param(part, marks=pytest.mark.long) for part in PARTS)],
    ids=["few", *map(str, range(len(PARTS)))],
)


@pytest.fixture(scope="module")
def sources(ranks, tmp_path_factory):
    """Saved by one rank, whose random states are restored here, and by two, whose boxes and files are several."""
    alone, both = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("both")
    actual = [saved_at(alone), ranks(2, saved_at, both)[0]]
    assert all(steps == 3 for *_, steps in actual)
    return [(Path(saved), Path(later)) for saved, later, _ in actual]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    return Live(tmp_path_factory.mktemp("live"))


@EACH
def test_damaged_checkpoints_change_nothing_or_load_what_was_saved(sources, live, tmp_path, cases):
    kept = [(saved, later, clean(live, saved)) for saved, later in sources]
    loaded, kinds = [], set()
    for case in cases:
        what, message = damaged_load(live, case, *kept[case % 2], tmp_path)
        kinds.add(what)
        if not message:
            loaded.append(what)
    assert len(kinds) > 30
    assert len(loaded) < len(cases) / 5, loaded


@EACH
def test_verify_finds_every_flaw_and_names_every_file_that_has_one(sources, tmp_path, cases):
    kinds = set()
    for case in cases:
        folder, random_ = tmp_path / str(case) / "step-2", random.Random(case)
        shutil.copytree(sources[case % 2][0], folder)
        (tmp_path / str(case) / "other").symlink_to(sources[case % 2][1])
        before = contents_of(folder)
        chosen = FLAWS[case % len(FLAWS)]
        chosen(folder, random_)
        changed = {name for name, content in before.items() if contents_of(folder).get(name) != content}
        found = examine(folder)
        named = {fault.file for fault in found.faults}
        assert all("\n" not in fault.message and str(folder) in fault.message for fault in found.faults)
        kinds.add(chosen.__name__)
        if not changed:
            assert chosen.__name__ == "foreign"
            assert found.whole, case
            assert found.foreign, case
        elif any(name.startswith("manifest") for name in changed):
            assert named == {"manifest.json"}, (case, chosen, found.faults)  # on which all else hangs
        else:
            parts = {name for name in changed if name.endswith(".json")}
            alone = {name for name in changed if name.replace(".safetensors", ".json") not in parts}
            assert parts | alone <= named <= changed, (case, chosen, found.faults)
        shutil.rmtree(tmp_path / str(case))
    assert len(kinds) == len({each.__name__ for each in FLAWS})


def contents_of(folder):
    """Every file by its name: bytes, or what else it is."""
    return {
        path.name: path.read_bytes() if path.is_file() and not path.is_symlink() else path.lstat().st_mode
        for path in folder.iterdir()
    }


@EACH
def test_every_action_meets_damage_with_one_of_our_errors(sources, tmp_path, cases, capsys):
    """Checkpoints that somebody wrote anew, checksums included: what no model can judge may stay, nothing else raises."""
    refused = 0
    for case in cases[::8]:
        folder = tmp_path / str(case) / "step-2"
        shutil.copytree(sources[0][0], folder)
        (tmp_path / str(case) / "other").symlink_to(sources[0][1])
        random.Random(case).choice(EDITS)(folder, random.Random(case))
        whole = main(["ckpt", "verify", str(folder)]) == 0
        codes = [
            main(["ckpt", *words])
            for words in (["ls", str(folder)], ["show", str(folder)], ["diff", str(folder), str(sources[0][0])])
        ]
        assert codes[0] == 0, case
        assert codes[1] == (0 if whole else codes[1]), case
        assert set(codes) <= {0, 1, 2}, case
        assert "Traceback" not in "".join(capsys.readouterr())
        refused += not whole
        shutil.rmtree(tmp_path / str(case))
    assert refused > len(cases) / 16


def test_a_step_goes_on_after_a_refused_load_as_if_nobody_had_tried(tmp_path):
    def curve(tries):
        seed()
        engine = make()
        train(engine, 1)
        saved = engine.save(tmp_path / str(tries))
        (saved / "manifest.sha256").write_text("x")
        for step in (2, 3):
            for i in range(2):
                engine.backward(engine(torch.tensor([step, i])))
                if tries:
                    with pytest.raises(CheckpointError):
                        engine.load(saved)
            assert engine.step().applied
        return (
            engine.fingerprint(),
            engine.scheduler.state_dict(),
            engine.loss_scale.state(),
            torch.get_rng_state().sum(),
        )

    assert curve(True) == curve(False)
