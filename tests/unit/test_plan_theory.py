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


GPT2 = ["--layers", "48", "--hidden", "1600", "--batch", "32", "--seq", "1024"]  # 1.5B
LARGE = ["--layers", "125", "--hidden", "8192", "--batch", "32", "--tp", "16"]  # 100B


def test_activations_are_the_sources_to_the_digit(capsys):
    found = json.loads(theory(capsys, *GPT2, "--heads", "25", "--json"))["activations"]
    assert [round(found[name] / 1e9, 1) for name in ("all_bytes", "inputs_bytes")] == [60.4, 5.0]
    assert round(found["recomputed_per_layer_bytes"] / 1e9, 1) == 6.3
    assert round(found["recomputed_sqrt_bytes"] / 1e9, 1) == 9.5
    assert found["more_compute"] == 1 / 3
    large = json.loads(theory(capsys, *LARGE, "--json"))
    assert (round(large["params"] / 1e9), round(large["activations"]["inputs_bytes"] / 1e9, 1)) == (101, 67.1)
    assert round(large["activations"]["inputs_over_tp_bytes"] / 1e9, 1) == 4.2
    assert large["activations"]["seq"] == 1024


def test_activations_by_technique_are_korthikantis(capsys):
    """22B on TP 8, figure 1 of the paper: 59.25 and 9.56 GiB."""
    words = ["--layers", "48", "--hidden", "6144", "--batch", "4", "--seq", "2k", "--heads", "64"]
    kept = json.loads(theory(capsys, *words, "--json"))["activations"]["by_technique_bytes"]
    assert [value / 2**30 for value in kept.values()] == pytest.approx([59.25, 39.5625, 29.25, 9.5625, 4.5])
    alone = json.loads(theory(capsys, *words, "--tp", "1", "--json"))["activations"]["by_technique_bytes"]
    assert alone["TP baseline"] == alone["TP+SP"] == 48 * 2048 * 4 * (34 * 6144 + 5 * 64 * 2048)


@pytest.mark.parametrize(("heads", "tp"), [("30", 6), ("25", 5), ("64", 8), ("7", 7), ("11", 1), ("12", 6)])
def test_heads_are_cut_over_as_many_ranks_of_a_node_as_divide_them(capsys, heads, tp):
    words = [*GPT2, "--heads", heads]
    assert json.loads(theory(capsys, *words, "--json"))["activations"]["tp"] == tp
    assert f"a = {heads} heads on one of t = {tp} TP ranks" in theory(capsys, *words)


def test_the_text_has_both_tables_of_activations(capsys):
    text = theory(capsys, *GPT2)
    assert theory(capsys).count("\n\n") + 2 == text.count("\n\n")
    assert text.startswith("Psi = 1.475B parameters")
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert {
        "all 60.4 GB 12 b s h l x 2 bytes",
        "recomputed by layer 6.3 GB all inputs, the inside of one layer",
        "recomputed by sqrt(l) = 7 layers 9.5 GB 7 inputs, the inside of 7 layers",
        "recomputed by sqrt(l/12) = 2 layers 5 GB 24 inputs, the inside of 2: the fewest",
        "TP+SP+selective 10.7 GB s b h l x 34 / t",
        "TP baseline needs --heads s b h l x (10 + 24/t + 5 a s/(h t))",
        "Recomputation is one more forward: a third of a step's compute.",
    } <= lines
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(("words", "said"), [
    (["--theory", "--layers", "48"], "--layers asks for activations, which need --hidden and --batch, too: zero3d plan"),
    (["--theory", "--heads", "25", "--hidden", "1600"], "which need --layers and --batch, too"),
    (["--theory", *GPT2, "--tp", "0"], "--tp '0' is not a number of ranks: type a whole number from 1"),
    (["--theory", *GPT2, "--heads", "30", "--tp", "8"], "--tp 8 cannot cut --heads 30: 30 / 8 is not a whole number. Type a --tp that divides it, such as 6."),
    (["gpt2", "--layers", "48"], "--layers is for --theory, and a plan takes it from its MODEL"),
])  # fmt: skip
def test_what_activations_need_is_said(capsys, words, said):
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


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


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["plan", "--theory", *GPT2]], ids=" ".join)
def test_help_and_theory_import_no_torch(words):
    run = [sys.executable, "-X", "importtime", "-m", "zero3d.tools.cli.main", *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "zero3d.tools.cli" in imported
    assert not {"torch", "numpy", "rich", "transformers"} & imported


@pytest.mark.parametrize(
    "words", [["--compile"], ["--no-compile"], ["--gpu", "h100"], ["--lora", "r=8"], ["--top", "3"]]
)
def test_options_of_plans_are_refused(capsys, words):
    assert main(["plan", "--theory", "--params", "7e9", *words]) == 2
    name = words[0].replace("--no-", "--")
    assert f"{name} is for plans, and --theory is formulas alone: leave it out." in capsys.readouterr().err
