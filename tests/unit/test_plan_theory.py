"""`zero3d plan --theory`: the paper's figures, in JSON and text, without torch."""

import json
import subprocess
import sys

import pytest

from zero3d.tools.cli.main import main

PAPER = {  # Rajbhandari et al. (2020), figure 1: 7.5B parameters, 64 GPUs, K = 12
    "0": ("120 GB", 120e9, "100 %"),
    "1": ("31.4 GB", 31.40625e9, "26.2 %"),
    "2": ("16.6 GB", 16.640625e9, "13.9 %"),
    "3": ("1.9 GB", 1.875e9, "1.56 %"),
}


def theory(capsys, *words):
    assert main(["plan", "--theory", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("stage", PAPER)
def test_bytes_per_gpu_are_those_of_the_papers_figure_1(capsys, stage):
    row = json.loads(theory(capsys, "--params", "7.5e9", "--gpus", "64", "--json"))["stages"][stage]
    assert row["paper_bytes"] == PAPER[stage][1]
    assert sum(row["paper"].values()) == row["paper_bytes"]
    assert sum(row["engine"].values()) == row["engine_bytes"]


def test_the_text_prints_them_as_the_paper_does(capsys):
    table = theory(capsys, "--params", "7.5B", "--gpus", "64").split("\n\n")[1].splitlines()
    for line, (gigabytes, _, percent) in zip(table[2:6], PAPER.values(), strict=True):
        assert gigabytes in line
        assert percent in line


def test_the_engines_bytes_are_18_psi_cut_by_its_own_rules(capsys):
    stages = json.loads(theory(capsys, "--params", "64", "--gpus", "64", "--json"))["stages"]
    found = [stages[stage]["engine_bytes"] for stage in "0123"]
    assert found == [18 * 64, 4 * 64 + 4 + 12, 2 * 64 + 4 + 12, 2 + 4 + 12]


def test_gradients_are_not_there_at_rest(capsys):
    words = ["--params", "7.5e9", "--gpus", "64"]
    found = json.loads(theory(capsys, *words, "--json"))["stage_3"]
    psi = 7.5e9 / 64
    assert found["paper"] == {"at_rest_bytes": 14 * psi, "end_of_backward_bytes": 16 * psi}
    assert found["weights kept"] == {"at_rest_bytes": 14 * psi, "end_of_backward_bytes": 18 * psi}
    assert found["weights cast"] == {"at_rest_bytes": 12 * psi, "end_of_backward_bytes": 16 * psi}
    lines = (line.split("  ") for line in theory(capsys, *words).splitlines()[-6:-3])
    shown = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert shown == [
        ["paper", "1.6 GB", "(2 + 12) Psi/N", "1.9 GB", "(2 + 2 + 12) Psi/N"],
        ["weights kept", "1.6 GB", "(2 + 12) Psi/N", "2.1 GB", "(2 + 4 + 12) Psi/N"],
        ["weights cast", "1.4 GB", "12 Psi/N", "1.9 GB", "(4 + 12) Psi/N"],
    ]


def test_sixteen_bytes_per_parameter_term_by_term(capsys):
    report = json.loads(theory(capsys, "--json"))
    parts = report["examples"]["7B"]
    assert (parts["weights"], parts["gradients"], parts["optimizer"], parts["total"]) == (14e9, 14e9, 84e9, 112e9)
    assert parts["master"] == parts["m"] == parts["v"] == 28e9
    assert (report["examples"]["1.5B"]["total"], report["examples"]["1.5B"]["weights"]) == (24e9, 3e9)
    assert report["mixed_precision"]["total"] == report["stages"]["0"]["paper_bytes"]
    text = theory(capsys)
    assert "14 + 14 + 84 = 112 GB" in text
    assert "24 GB to train what takes 3 GB" in text


def test_stages_0_to_2_send_two_psi_and_stage_3_half_as_much_again(capsys):
    stages = json.loads(theory(capsys, "--params", "6400", "--gpus", "64", "--json"))["stages"]
    assert [stages[s]["traffic_elements"] for s in "0123"] == [2 * 6300, 2 * 6300, 2 * 6300, 3 * 6300]
    assert [stages[s]["reduce_scatter_elements"] for s in "0123"] == [6300] * 4
    assert [stages[s]["traffic_psi"] for s in "0123"] == [2, 2, 2, 3]
    text = theory(capsys)
    assert "1.5x" in text
    assert "Optimizer states never travel" in text


def test_whole_numbers_are_ints_and_others_are_not_rounded(capsys):
    stages = json.loads(theory(capsys, "--params", "100", "--gpus", "3", "--json"))["stages"]
    assert isinstance(stages["0"]["paper_bytes"], int)
    assert stages["3"]["paper_bytes"] == pytest.approx(1600 / 3, rel=1e-15)


@pytest.mark.parametrize(("text", "params"), [("7.5e9", 7.5e9), ("7.5B", 7.5e9), ("1500M", 1.5e9), ("125k", 125e3)])
def test_parameters_can_be_written_in_three_ways(capsys, text, params):
    assert json.loads(theory(capsys, "--params", text, "--json"))["params"] == params


def test_one_gpu_sends_nothing(capsys):
    report = json.loads(theory(capsys, "--gpus", "1", "--json"))
    assert [row["traffic_elements"] for row in report["stages"].values()] == [0, 0, 0, 0]
    assert "N = 1 GPU," in theory(capsys, "--gpus", "1")


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "gpt2", "--params", "7.5e9"],
        ["plan", "--theory", "--params", "-1"],
        ["plan", "--theory", "--params", "0"],
        ["plan", "--theory", "--params", "1.5"],
        ["plan", "--theory", "--params", "many"],
        ["plan", "--theory", "--params", "nan"],
        ["plan", "--theory", "--params", "1e999999999"],
        ["plan", "--theory", "--params"],
        ["plan", "--theory", "--gpus", "0"],
        ["plan", "--theory", "--gpus", "-4"],
        ["plan", "--theory", "--gpus", "1.5"],
        ["plan", "--theory", "--gpus", "9" * 5000],
        ["plan", "--theory", "--frobnicate"],
        ["frobnicate"],
        [],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, words):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: ")
    assert err.count("\n") == 1


def test_the_refusal_says_what_to_type(capsys):
    main(["plan"])
    assert "Type zero3d plan qwen2.5-72b --gpus 128 --gpu a100-80, or zero3d plan --theory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["plan", "--theory"]], ids=" ".join)
def test_help_and_theory_import_no_torch(words):
    run = [sys.executable, "-X", "importtime", "-m", "zero3d.tools.cli.main", *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "zero3d.tools.cli" in imported
    assert not {"torch", "numpy", "rich", "transformers"} & imported
