"""Published formulas and tables, to the printed digit. The facts lie in tests/data/planner, each with its source."""

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from zero3d.account.states import paper_bytes
from zero3d.errors import ConfigError
from zero3d.tools.plan import formulas

DATA = Path(__file__).parents[1] / "data" / "planner"
GIB, TIB = 2**30, 2**40
STAGES = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
RUNS = {"22B": (48, 6144, 64, 8, 1, 1, 4), "175B": (96, 12288, 96, 8, 8, 3, 1),
        "530B": (105, 20480, 128, 8, 35, 3, 1), "1T": (128, 25600, 160, 8, 64, 1, 1)}  # l, h, a, t, p, v, b  # fmt: skip


def rows(name):
    with (DATA / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def unit_of_last_digit(text):
    return Fraction(1, 10 ** len(text.partition(".")[2]))


def test_every_cell_of_zero_table_1_within_a_unit_of_its_last_digit():
    table = rows("zero_table1_model_states")
    assert len(table) == 54
    for row in table:
        params = int(Fraction(row["params_b"]) * 10**9)
        found = paper_bytes(STAGES[row["stage"]], params, int(row["dp"])).total / 10**9
        assert abs(found - Fraction(row["paper_gb"])) <= unit_of_last_digit(row["paper_gb"]), row["id"]


def test_zero_infinity_figure_2a_within_a_unit_of_its_last_digit():
    table = rows("zero_infinity_fig2a_memory")
    assert len(table) == 5
    for row in table:
        found = formulas.infinity_memory(int(row["layers"]), int(row["hidden"]), int(row["heads"]))
        cells = (("model_states_tb", TIB), ("act_tb", TIB), ("act_ckpt_tb", TIB), ("mswm_gb", GIB), ("awm_gb", GIB))
        for (column, unit), value in zip(cells, found, strict=True):
            off = abs(Fraction(value, unit) - Fraction(row[column]))
            assert off <= max(unit_of_last_digit(row[column]), Fraction(1, 100)), (row["id"], column)


def test_korthikanti_figure_1_to_the_digit():
    table = rows("korthikanti2022_fig1_memory")
    assert len(table) == 4
    for row in table:
        layers, h, a, t, p, v, b = RUNS[row["model"]]
        found = {
            "par_opt_gib_fig": formulas.megatron_states(layers, h, t, p),
            "act_none_gib_fig": formulas.model_activations(
                formulas.layer_activations("TP baseline", 2048, b, h, a, t), layers, p, v
            ),
            "act_seqsel_gib_fig": formulas.model_activations(
                formulas.layer_activations("TP+SP+selective", 2048, b, h, a, t), layers, p, v
            ),
        }
        for column, value in found.items():
            assert float(value / GIB) == pytest.approx(float(row[column]), rel=1e-7), (row["id"], column)


def test_korthikanti_figure_7_as_far_as_the_chart_can_be_read():
    table = rows("korthikanti2022_fig7_act_pct")
    assert len(table) == 20
    for row in table:
        _, h, a, t, _, _, b = RUNS[row["model"]]
        share = formulas.layer_activations(row["technique"], 2048, b, h, a, t)
        share /= formulas.layer_activations("TP baseline", 2048, b, h, a, t)
        assert float(100 * share) == pytest.approx(float(row["pct_of_tp_baseline"]), abs=0.14), row["id"]


def test_parameters_and_operations_are_those_of_megatrons_table_1():
    table = rows("megatron2021_table1_weak_scaling")
    assert len(table) == 6
    for row in table:
        layers, h, vocab, s = (int(row[name]) for name in ("layers", "hidden", "vocab", "seq"))
        params = formulas.parameters(layers, h, vocab, s)
        assert abs(params / 1e9 - float(row["params_formula_eq2_b"])) <= 0.011, row["id"]
        flops = formulas.step_flops(int(row["gbs"]), s, layers, h, vocab, recompute=True)
        seconds = flops / int(row["gpus"]) / float(row["tflops_per_gpu"]) / 1e12
        assert seconds == pytest.approx(float(row["iter_s_derived"]), rel=1e-3), row["id"]


def test_operations_without_recomputation_are_three_quarters_but_for_the_logits():
    whole = formulas.step_flops(8, 2048, 96, 12288, 51200, recompute=True)
    kept = formulas.step_flops(8, 2048, 96, 12288, 51200, recompute=False)
    logits = 6 * 8 * 2048 * 12288 * 51200
    assert 4 * (kept - logits) == 3 * (whole - logits)


def test_activation_examples_of_the_sources():
    assert formulas.zero_activations(48, 1600, 1024, 32) / 1e9 == pytest.approx(60.4, abs=0.05)
    assert formulas.checkpoints(48, 1600, 1024, 32) / 1e9 == pytest.approx(5.0, abs=0.05)
    per_layer, root = formulas.recomputed(48, 1600, 1024, 32)
    assert (round(per_layer / 1e9, 1), round(root / 1e9, 1)) == (6.3, 9.5)
    kept = formulas.checkpoints(125, 8192, 1024, 32)
    assert (round(kept / 1e9, 1), kept / GIB) == (67.1, 62.5)


def test_models_of_the_sources_have_their_bytes():
    assert paper_bytes(0, 7 * 10**9, 1) == (14e9, 14e9, 84e9)
    assert paper_bytes(0, 15 * 10**8, 1).total == 24e9
    ladder = [float(paper_bytes(stage, 75 * 10**8, 64).total) / 1e9 for stage in range(4)]
    assert [round(value, 1) for value in ladder] == [120, 31.4, 16.6, 1.9]
    assert [round(100 * value / 120, 2) for value in ladder[1:]] == [26.17, 13.87, 1.56]


def test_interleaving_keeps_more_layers_alive():
    assert formulas.interleave_factor(8, 3) == Fraction(31, 24)
    assert formulas.interleave_factor(8, 1) == 1


def test_half_the_peak_when_bandwidth_times_intensity_equals_it():
    assert formulas.infinity_efficiency(intensity=1000, bandwidth=70e9, peak=70e12) == 0.5


def test_an_unknown_technique_is_refused_with_those_known():
    with pytest.raises(ConfigError, match="TP baseline"):
        formulas.layer_activations("TP+magic", 1, 1, 1, 1, 1)
