"""Commands behind the figures that are no timings, run again: the same bytes, traffic and plans, and the same losses.

Losses are those of one key (Python's version, whose library is the text; torch's; the CPU's instructions); with another
key only that they agree with each other.
"""

import os
import platform
import sys
from pathlib import Path

import cpus
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from recorded import RECIPES, load, run, started

NEEDS_TABLES = "planner-accuracy"  # tests/unit/test_planner_accuracy.py runs it on the rows that are here
AGAIN = [name for name, recipe in RECIPES.items() if recipe.repeats and name != NEEDS_TABLES]
NOT_AGAIN = {
    "four-stages": (0, 1, 2),  # compare-stages has their bytes, and that their losses are stage 3's
    "meshes": (0, 1, 2),  # of one, two and four ranks: eight have all of their axes
}
LIKE = {"four-stages": 0, "meshes": 2e-6}  # how far losses of a recipe's runs may differ
FEWER = {"train.steps=20": "train.steps=3"}  # losses are compared with each other alone
VARIANTS = {"--dp 8": "--dp 8 --variants stage0,stage1,stage2,stage3", "--dp 1": "--dp 1 --variants stage0,stage3"}
SHORTER = {  # words of commands -> others, with which less is compared
    "compare-stages": FEWER,
    "compare-offload": FEWER,
    "launches": VARIANTS,  # the rest is torch's, or the same numbers of launches
}


def same_key(found):
    if os.environ.get(cpus.VARIABLE):  # as on another CPU, one that is not in the key
        return False
    now = platform.python_version(), torch.__version__, torch.backends.cpu.get_cpu_capability()
    return now == (found["python"], found["torch"], found["machine"]["cpu"])


def of_a_run(result, with_losses):
    """What must be the same of a training run."""
    kept = {name: result[name] for name in ("stage", "params", "steps", "traffic")}
    kept["memory"] = [row for row in result["memory"] if row["consumer"] != "activations" or with_losses]
    return kept | ({name: result[name] for name in ("losses", "held_out_loss")} if with_losses else {})


def shortened(name, command):
    """A command of a recipe with SHORTER's words."""
    for words, others in SHORTER.get(name, {}).items():
        command = command.replace(words, others)
    return command


def without_lines(waits):
    """What was waited for, and how often: lines of code move."""
    return [(what, n) for what, _, n in waits]


@pytest.mark.long
@pytest.mark.parametrize("name", AGAIN)
def test_the_command_gives_the_recorded_figures(zero3d_in_fork, name):
    def start(words, folder):
        return zero3d_in_fork(folder, *words[1:]) if words[0] == "zero3d" else started(words, folder)

    found = load(name)
    key = same_key(found)
    runs = [each for number, each in enumerate(found["runs"]) if number not in NOT_AGAIN.get(name, ())]
    commands = [shortened(name, each["command"]) for each in runs]
    again = [run(command, start=start)["result"] for command in commands]
    recorded = [each["result"] for each in runs]
    if name.startswith("compare-"):
        formulas = [[line for line in text.splitlines() if line.startswith("formula")] for text in (*again, *recorded)]
        assert formulas[0] == formulas[1]
        assert "bytes: equal to the formula in every run" in again[0]
        assert "losses: the same bits at every step of every run" in again[0]
    elif name == "launches":
        if key:
            for here, there in zip(again[:2], recorded[:2], strict=True):
                known = {variant: there["dispatches"][variant] for variant in here["dispatches"]}
                assert here == there | {"dispatches": known}
        assert again[2]["step_syncs"] == recorded[2]["step_syncs"]
        assert without_lines(again[2]["step"]["waits"]) == without_lines(recorded[2]["step"]["waits"])
    elif isinstance(recorded[0], dict) and "losses" in recorded[0]:
        assert [of_a_run(each, key) for each in again] == [of_a_run(each, key) for each in recorded]
    else:
        assert again == recorded
    if name in NOT_AGAIN:  # those that are not run again had the same losses as the one that is
        for each in found["runs"]:
            assert each["result"]["losses"] == pytest.approx(recorded[0]["losses"], rel=LIKE[name])
