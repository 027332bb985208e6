"""Damaged checkpoints: each is refused and changes nothing of a live engine, or loads exactly what was saved."""

from pathlib import Path

import pytest
import torch
from damaged import Live, clean, damaged_load, make, saved_at, seed, train

from zero3d.errors import CheckpointError

CASES = 2000
SHORT = 200  # of them in every run of the tests
PARTS = 10


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


@pytest.mark.parametrize("part", [
    0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS)),
])  # fmt: skip
def test_damaged_checkpoints_change_nothing_or_load_what_was_saved(sources, live, tmp_path, part):
    kept = [(saved, later, clean(live, saved)) for saved, later in sources]
    loaded, kinds = [], set()
    for case in range(part * SHORT, (part + 1) * SHORT):
        what, message = damaged_load(live, case, *kept[case % 2], tmp_path)
        kinds.add(what)
        if not message:
            loaded.append(what)
    assert len(kinds) > 30
    assert len(loaded) < SHORT / 5, loaded


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
