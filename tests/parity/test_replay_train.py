"""A training run whose replay finds a fault: how it ends, and which checkpoints are beyond doubt. Notes of spikes."""

import io

import pytest
import torch
from test_replay import break_down
from training import metrics, save_model, save_rows, start, train, tree

from zero3d.errors import ConfigError, CorruptionError


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


def broken_run(made, rank, backwards, resume=None):
    """A run with a fault on one rank; its error, as that rank has it."""
    import zero3d.train.loop as loop

    class Broken(loop.Loop):
        def __init__(self, config, engine, *rest):
            super().__init__(config, engine, *rest)
            break_down(engine, rank, backwards, "model.layers.0.mlp.up_proj.weight")

    before, loop.Loop = loop.Loop, Broken
    import zero3d.train.run as run

    run.Loop = Broken
    try:
        train(made, resume)
    except CorruptionError as error:
        return str(error), error.exit_code, error.from_rank
    finally:
        loop.Loop = run.Loop = before
    return None


@pytest.mark.long
def test_an_alarm_ends_the_run_and_says_which_checkpoint_is_older_than_the_last_clean_replay(ranks, folder):
    made = tree(folder, health={"replay": 2}, checkpoint={"every": 1, "keep": 9}, train={"steps": 5})
    # Steps have two backwards, and one more where there is a replay: in steps 2 and 4. The 10th is the last of those.
    told = ranks(2, broken_run, made, 1, (10,))
    assert {code for _, code, _ in told} == {1}
    (message,) = [message for message, _, from_rank in told if from_rank is None]
    assert message.startswith("health.replay: in step 4 rank 1 (")
    assert "The step is not applied. The last clean replay was in step 2" in message
    assert "what was saved since may hold the fault: step-2, step-3; step-1 is older." in message
    assert f"zero3d train {folder}/out/config.yaml --resume {folder}/out/checkpoints/step-1" in message
    assert [line["step"] for line in metrics(made)] == [1, 2, 3]
    losses = [line["loss"] for line in ranks(2, train, made | {"output": str(folder / "again"), "health": {}})[0]]
    assert [line["loss"] for line in metrics(made)] == losses[:3]


@pytest.mark.long
def test_without_a_clean_replay_all_that_this_session_saved_is_in_doubt(ranks, folder):
    made = tree(folder, health={"replay": 3}, checkpoint={"every": 1})
    told = ranks(2, broken_run, made, 0, (6,))
    (message,) = [message for message, _, from_rank in told if from_rank is None]
    assert "No replay was clean before; what was saved since may hold the fault: step-1, step-2" in message
    assert "start anew with --overwrite" in message


def test_the_key_is_refused_where_bits_may_differ(folder):
    made = tree(folder, health={"replay": -1})
    with pytest.raises(ConfigError, match="replay"):
        train(made)


def printed(made):
    """What a run prints, line by line."""
    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    out = io.StringIO()
    run(load(made), start("test"), Progress(Console(file=out, width=200)))
    return out.getvalue().splitlines()


@pytest.mark.long  # what is a spike: tests/unit/test_spikes.py
def test_a_loss_far_above_the_others_is_noted_with_its_place_in_the_data(folder, monkeypatch):
    from zero3d.engine.losses import Losses

    plain, seen = Losses.sum_and_weight, []

    def changed(self, output, batch):
        seen.append(None)
        total, weight = plain(self, output, batch)
        return total * (3.0 if len(seen) == 36 else 1.0), weight

    monkeypatch.setattr(Losses, "sum_and_weight", changed)
    made = tree(folder, train={"steps": 40, "batch": 2, "accumulate": 1})
    lines = [line for line in printed(made) if "far above" in line]
    assert len(lines) == 1
    assert lines[0].startswith("step 36: loss ")
    assert lines[0].endswith("its 2 sequences begin at number 0 of epoch 5")  # 35 x 2 = 5 x 14
    assert [line["step"] for line in metrics(made) if "usual_loss" in line] == [36]
    assert torch.isfinite(torch.tensor([line["loss"] for line in metrics(made)])).all()
