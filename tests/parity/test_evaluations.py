"""Values and classes of one's own in a run: what they are told, what they decide, and that training does not notice."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from training import field, metrics, save_model, save_rows, train, tree

import zero3d
from zero3d.train.own_calls import own_call
from zero3d.train.stop import PressedAgain

SAME = ("step", "loss", "grad_norm", "lr", "tokens", "epoch", "applied")
RUN = {"train": {"steps": 4, "batch": 4}, "checkpoint": {"every": 2, "export": False}}


@pytest.fixture
def folder(tmp_path):
    """GPT-2 with dropout, whose loss would show every random number that somebody else draws."""
    save_model(tmp_path / "model", "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    save_rows(tmp_path / "rows.npy")
    save_rows(tmp_path / "held_out.npy", rows=4, seed=1)
    return tmp_path


def run(folder, output, **sections):
    return tree(folder, output, **(RUN | sections))


def told(records):
    return [{name: record[name] for name in SAME} for record in records]


def logged(folder, made, resume=None):
    """One rank's part of a run whose events `own_code.Recorder` writes into `folder`."""
    os.environ["OWN_CODE_LOG"] = str(folder)
    try:
        return train(made, resume)
    finally:
        del os.environ["OWN_CODE_LOG"]


def events(folder, rank):
    return [json.loads(line) for line in (Path(folder) / f"rank-{rank}").read_text().splitlines()]


def test_values_and_events_reach_every_rank_and_change_no_bit_of_training(ranks, folder):
    plain = ranks(2, train, run(folder, "plain"))[0]
    own = run(
        folder, "own", callbacks=["own_code:Recorder"], evaluate={"every": 2, "function": "own_code:rank_and_step"},
        data={"validation": [str(folder / "held_out.npy")]},
    )  # fmt: skip
    records = ranks(2, logged, str(folder), own)
    assert told(records[0]) == told(plain)
    assert [record.get("quality") for record in metrics(own)] == [None, 0.5, None, 1.0]
    for of_rank in records:
        assert {record["rank"] for record in of_rank if "rank" in record} == {0.0}, "rank 0's count"
    evaluated = [["on_evaluate", [step, ["quality", "validation_loss"]]] for step in (2, 4)]
    saved = [["on_save", f"step-{step}"] for step in (2, 4)]
    steps = [["on_step", step] for step in range(1, 5)]
    expected = [["on_start", [4, 0]], steps[0], evaluated[0], steps[1], saved[0], steps[2], evaluated[1], steps[3],
                saved[1], ["on_end", 4]]  # fmt: skip
    assert events(folder, 0) == expected
    assert events(folder, 1) == expected


def test_a_run_ends_early_as_complete_and_a_resume_knows_it(ranks, folder):
    early = run(
        folder, "early", train={"steps": 12, "batch": 4},
        evaluate={"every": 1, "function": "own_code:turns", "best": "quality", "highest": True, "patience": 2},
    )  # fmt: skip
    records = ranks(1, train, early)[0]
    assert field(records, "quality") == [1.0, 2.0, 3.0, 3.0, 3.0]
    checkpoints = Path(early["output"]) / "checkpoints"
    assert os.readlink(checkpoints / "best") == "step-3"
    assert sorted(entry.name for entry in checkpoints.glob("step-*")) == ["step-3", "step-4", "step-5"]
    assert field(ranks(1, train, early, "auto")[0], "step") == [1, 2, 3, 4, 5], "nothing is left to train"
    early["evaluate"] |= {"patience": 4}
    assert field(ranks(1, train, early, "auto")[0], "step") == [1, 2, 3, 4, 5, 6, 7], "a longer patience goes on"


def test_a_value_of_collectives_is_the_same_on_all_ranks(ranks, folder):
    made = run(folder, "sums", train={"steps": 1, "batch": 4}, evaluate={"function": "own_code:with_collectives"})
    assert [(record["sum"], record["length"]) for (record,) in ranks(2, train, made)] == [(3.0, 5.0)] * 2


@pytest.mark.long
def test_the_command_tells_once_what_one_rank_raised_while_the_other_waits_for_it(zero3d_in_fork, folder):
    made = run(folder, "out", train={"steps": 2, "batch": 4}, evaluate={"function": "mine:one_fails"})
    (folder / "run.yaml").write_text(json.dumps(made))
    (folder / "mine.py").write_text(
        "def one_fails(engine, step):\n"
        "    if engine.world.rank == 1:\n"
        "        raise RuntimeError('no answers')\n"
        "    engine.release()\n"
        "    engine.fingerprint()\n"
    )
    done = zero3d_in_fork(folder, "train", "run.yaml", "--ranks=2")
    assert done.returncode == 2, done.stderr
    line = "ConfigError: evaluate.function mine:one_fails at step 2 raised RuntimeError: no answers"
    assert done.stderr.count(f"{line} ({folder / 'mine.py'}:3)") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_run_of_wsd_that_is_resumed_on_another_number_of_ranks_has_the_rates_of_one_that_was_not(ranks, folder):
    sections = {"schedule": {"name": "wsd", "warmup": 2, "decay": 2, "final": 0.0}, "train": {"steps": 6, "batch": 4}}
    whole, parted = run(folder, "whole", **sections), run(folder, "parted", **sections)
    expected = field(ranks(2, train, whole)[0], "lr")
    assert expected == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 1e-3 * (1 - 0.5**0.5), 0.0])
    ranks(2, train, parted, None, 3)
    parted["train"] |= {"accumulate": 4}
    assert field(ranks(1, train, parted, "auto")[0], "lr") == expected
    longer = run(folder, "parted", **sections | {"train": {"steps": 8, "batch": 4}})
    resumed = ranks(2, train, longer, str(Path(longer["output"]) / "checkpoints" / "step-4"))[0]
    assert field(resumed, "lr")[:6] == [*expected[:4], 1e-3, 1e-3], "the peak lasts longer, as if it had been begun so"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"evaluate": {"function": "own_code:raises"}},
         "evaluate.function own_code:raises at step 1 raised LookupError: no answers for these questions ("),
        ({"evaluate": {"function": "own_code:returns_none"}},
         "evaluate.function own_code:returns_none returned nothing: it must return a dict of numbers by name"),
        ({"evaluate": {"function": "own_code:returns_text"}},
         "own_code:returns_text returned 'accuracy' as '0.5' (str): it must be a number."),
        ({"evaluate": {"function": "own_code:returns_loss"}}, "returned 'loss', which metrics have already"),
        ({"evaluate": {"function": "own_code:other_names"}},
         "own_code:other_names returned of_rank_0 on rank 0 and of_rank_1 on rank 1"),
        ({"evaluate": {"function": "own_code:turns", "best": "qualty"}}, "Type evaluate.best=quality."),
        ({"callbacks": ["own_code:Stumbles"]}, "callbacks own_code:Stumbles: on_step raised KeyError: 1 ("),
        ({"callbacks": ["own_code:Interrupts"]}, "callbacks own_code:Interrupts: on_step raised KeyboardInterrupt ("),
        ({"callbacks": ["own_code:Misspelled"]}, "on_evaluat is not an event"),
    ],
)  # fmt: skip
def test_nonsense_of_ones_own_code_is_one_line_that_names_it(ranks, folder, sections, said):
    made = run(folder, "refused", train={"steps": 1, "batch": 4}, **sections)
    for _, error in ranks(2 if "rank 1" in said else 1, train, made, check=False):
        assert said in error
        assert "\n" not in error


def interrupted():
    engine = zero3d.Engine(torch.nn.Linear(2, 2), precision="fp32")
    with pytest.raises(PressedAgain), own_call("callbacks mine", engine, "a callback"):
        raise PressedAgain
    with pytest.raises(zero3d.ConfigError, match="callbacks mine raised SystemExit: 3"):
        with own_call("callbacks mine", engine, "a callback"):
            sys.exit(3)


def test_an_exit_in_a_callback_is_named_and_a_second_ctrl_c_is_a_users(ranks):
    ranks(1, interrupted)
