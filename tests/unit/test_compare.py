"""zero3d compare: words become runs, results become rows, and what cannot be is refused before a run starts."""

import argparse
import json
import re
import signal
import subprocess
import sys

import pytest
from lock_holder import locked_by_another
from rich.console import Console

from zero3d.errors import ConfigError
from zero3d.tools.cli import compare as verb, workers
from zero3d.tools.cli.main import main
from zero3d.train.comparison import as_json, rows, square_root
from zero3d.train.comparison_plot import draw
from zero3d.train.comparison_table import show
from zero3d.train.lock import FolderLock
from zero3d.train.variants import Axis, check_variants, split_axes, variants


def spanned(*words):
    """Labels of the runs, and the overrides of all."""
    axes, common = split_axes(words)
    return [variant.label for variant in variants(axes)], common


# --- words to runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "labels", "common"),
    [
        (["zero.stage=0,1"], ["zero.stage=0", "zero.stage=1"], []),
        (["zero.stage = 0 , 1"], ["zero.stage=0", "zero.stage=1"], []),
        (["zero.stage=0,3", "train.steps=5"], ["zero.stage=0", "zero.stage=3"], ["train.steps=5"]),
        (["precision=bf16,fp32", "zero.stage=0,3"],
         ["precision=bf16,zero.stage=0", "precision=bf16,zero.stage=3",
          "precision=fp32,zero.stage=0", "precision=fp32,zero.stage=3"], []),
        (["zero.stage=0,3", "data.train=a.txt,b.txt"], ["zero.stage=0", "zero.stage=3"], ["data.train=a.txt,b.txt"]),
        (["zero.stage=0,3", "data.validation=a.txt,b.txt"], ["zero.stage=0", "zero.stage=3"], ["data.validation=a.txt,b.txt"]),
        (["seed=0,1", "optimizer.betas=0.9,0.99"], ["seed=0", "seed=1"], ["optimizer.betas=0.9,0.99"]),
        (["evaluate.prompt=[a, b],c"], ["evaluate.prompt=[a, b]", "evaluate.prompt=c"], []),
    ],
    ids=lambda value: " ".join(value),
)  # fmt: skip
def test_a_key_with_several_values_makes_runs_and_axes_multiply(words, labels, common):
    assert spanned(*words) == (labels, common)


def test_every_run_has_a_folder_of_its_own_below_the_output():
    axes, _ = split_axes(["model.path=a/b,a_b,../c"])
    folders = [variant.folder for variant in variants(axes)]
    assert len(set(folders)) == 3
    assert not any("/" in folder for folder in folders)
    assert variants((Axis("zero.stage", ("0",)),))[0].folder == "zero.stage=0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "zero.stage=0,1,2,3"),
        (["zero.stage=2"], "zero.stage=0,1,2,3"),
        (["data.train=a,b"], "give a key several values"),
        (["zero.stage=0,7"], "zero.stage takes a whole number from 0 to 3; found the text '7'"),
        (["zero.stage=0,"], "zero.stage="),
        (["zero.stag=0,1"], "Did you mean zero.stage?"),
        (["zero.stage=1,2,1"], "zero.stage=1 and zero.stage=1 are the same run"),
        (["optimizer.lr=1,1.0"], "optimizer.lr=1 and optimizer.lr=1.0 are the same run"),
        (["zero.stage=0,1", "zero.stage=3"], "zero.stage is given twice, as zero.stage=0,1 and zero.stage=3"),
        (["zero.stage=3", "zero.stage=0,1"], "zero.stage is given twice, as zero.stage=3 and zero.stage=0,1"),
        (["zero.stage=0,1", "zero.stage=2,3"], "zero.stage is given twice"),
        (["train.batch=8,7", "train.micro_batch=2", "--ranks=2"],
         "train.batch=7: train.batch 7 is not a multiple of micro_batch 2 x dp 2"),
        (["mesh.dp=2,3", "--ranks=2"], "mesh.dp=3: 2 ranks cannot form"),
        (["data.length=64,1024"], "data.length=1024: data.length=1,024 is more than the model's 512 positions"),
        (["zero.stage=0,1,2,3", "seed=0,1,2", "precision=bf16,fp32,fp16"], "4 (zero.stage) x 3 (seed) x 3 (precision) = 36"),
        (["zero.stage=0,1", "train.steps=two"], "train.steps"),
        (["output=a,b"], "output takes one folder"),
        (["zero.stage=0,1", "--ranks", "0"], "--ranks 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_be_is_one_line_before_the_first_run(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "start_process", lambda *_, **__: pytest.fail("a run was started"))
    assert main(["compare", *words]) == 2
    report = capsys.readouterr().err
    assert report.startswith("ConfigError: ")
    assert report.count("\n") == 1
    assert message in report
    assert list(tmp_path.iterdir()) == []


def test_runs_with_groups_of_learning_rates_are_told_apart():
    runs = variants(split_axes(["zero.stage=2,3"])[0])
    groups = "optimizer.groups=[{match: head, lr: 1e-5}]"
    configs = check_variants(runs, [groups], lambda words: None)
    assert [config.zero.stage for config in configs] == [2, 3]
    with pytest.raises(ConfigError, match="are the same run"):
        check_variants([*runs, runs[0]], [groups], lambda words: None)


def test_a_launchers_worker_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="without torchrun"):
        verb.run(argparse.Namespace(words=["zero.stage=0,1"], ranks=None, json=False))


def test_the_output_is_the_typed_one_or_the_first_free_one_beside_the_files_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def claimed(output, default, requested):
        with FolderLock() as lock:
            return str(verb.claim(output, default, requested, lock))

    assert claimed("here", "default", requested=True) == "here"
    assert claimed("runs/llama", "default", requested=False) == "runs/llama-compare"
    assert claimed("runs/llama", "default", requested=False) == "runs/llama-compare-2"
    assert claimed(None, "zero3d-compare-demo", requested=False) == "zero3d-compare-demo"
    (tmp_path / "here" / "file").touch()
    with pytest.raises(ConfigError, match="output here is used already"):
        claimed("here", "default", requested=True)


def test_a_second_comparison_in_a_folder_is_refused_while_the_first_one_runs(tmp_path):
    with locked_by_another(tmp_path) as pid, pytest.raises(ConfigError, match=f"is in use by process {pid} on host"):
        verb.claim(str(tmp_path), "default", True, FolderLock())


def test_a_runs_command_has_its_own_output_and_leaves_out_what_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = verb.read(
        argparse.Namespace(words=["zero.stage=0,1", "output=out", "checkpoint.export=true"], ranks=2), FolderLock()
    )
    words = plan.arguments(plan.variants[1])
    assert words[:3] == ["train", "--json", "--ranks=2"]
    assert words[3:] == ["checkpoint.export=false", "checkpoint.verify=false", "checkpoint.to=null", "evaluate.prompt=null",
                         "checkpoint.export=true", "zero.stage=1", "output=out/zero.stage=1"]  # fmt: skip


# --- results to rows ----------------------------------------------------------------------------


def result(
    *,
    losses=(3.0, 2.5),
    held_out=2.6,
    sent=100,
    off=0,
    activations="none",
    seconds=0.5,
    kept=800,
    accumulate=2,
    pp=None,
    **zero,
):
    """What `zero3d train --json` prints, with round figures. off: what memory differs by from its formula."""

    def held(consumer, measured, formula, at_most=False):
        agrees = None if formula is None else measured <= formula if at_most else measured == formula
        return {
            "consumer": consumer,
            "dtype": "bf16",
            "measured": measured,
            "formula": formula,
            "at_most": at_most,
            "agrees": agrees,
        }

    def moved(size):
        return {"calls": 1, "elements": size // 2, "bytes": size}

    states = [
        held("parameters", 200 + off, 200),
        held("gradients", 400, 400),
        held("optimizer states", 1200, 1200),
        held("padding", 0, 0),
    ]
    temporary = [held("temporary: bucket", 30, 50, at_most=True), held("temporary: wire", 10, 10, at_most=True)]
    ops = (("all_gather", sent), ("reduce_scatter", 2 * sent), ("broadcast", 7))
    return {
        "ranks": 2, "layers": 4, "steps": 2, "losses": list(losses), "held_out_loss": held_out, "peak_memory": 9000,
        "peak_host": 17_000,
        "batch": {"batch": 8, "micro_batch": 2, "accumulate": accumulate, "dp": 2},
        "step_seconds": seconds, "samples_per_s": 8 / seconds,
        "config": {
            "activations": activations, "mesh": {"pp": pp},
            "zero": {"stage": 1, "release": "auto", "reduce": "auto", "exact": False} | zero,
        },
        "memory": [*states, *temporary, held("activations", kept, None)],
        "traffic": [{"op": op, "measured": moved(size), "formula": moved(size), "equal": True} for op, size in ops],
    }  # fmt: skip


def moved_to(place, optimizer=1200, padding=40, off=0):
    """A run whose optimizer states are at a place."""
    run = result()
    states = {row["consumer"]: row for row in run["memory"]}
    slots = 2 if place == "disk" else 1
    for consumer, size in (("optimizer states", slots * optimizer), ("padding", slots * padding)):
        there = {"consumer": consumer, "place": place, "measured": size + off, "formula": size, "agrees": not off}
        run["memory"].append(states["padding"] | there)
    states["optimizer states"] |= {"measured": 0, "formula": 0}
    run["memory"].append(states["activations"] | {"consumer": "temporary: wire", "place": place, "measured": 77})
    return run


def test_states_move_from_place_to_place_by_the_planned_bytes():
    runs = compared("offload.optimizer=none,host,disk", result(), moved_to("host"), moved_to("disk"))
    assert [set(row.places) for row in runs] == [{"device"}, {"device", "host"}, {"device", "disk"}]
    optimizer = [{place: here["optimizer"].measured for place, here in row.places.items()} for row in runs]
    assert optimizer == [{"device": 1200}, {"device": 0, "host": 1200}, {"device": 0, "disk": 2400}]
    assert runs[2].places["disk"]["together"] == (2480, 2480, False, True)
    assert runs[1].memory["optimizer states"].measured == 0  # that table is of the device
    text = printed("offload.optimizer=none,host,disk", runs)
    assert "model states of rank 0 by place, in kB" in text
    assert "bytes: equal to the formula in every run" in text
    (line,) = [line for line in text.splitlines() if line.startswith("disk") and "2.480" in line]
    assert line.split() == ["disk", "0.000", "0.000", "2.400", "0.600", "0.000", "2.480"]
    told = as_json(variants(split_axes(["offload.optimizer=none,host"])[0]), [result(), moved_to("host")])
    assert json.loads(json.dumps(told))[1]["figures"]["places"]["host"]["optimizer"]["formula"] == 1200


def test_a_place_that_holds_other_bytes_than_planned_is_told():
    runs = compared("offload.optimizer=none,host", result(), moved_to("host", off=1))
    assert not runs[1].agrees
    assert "UNEQUAL to the formula: offload.optimizer=host" in printed("offload.optimizer=none,host", runs)


def test_without_a_place_off_the_device_there_is_no_table_of_places():
    assert "by place" not in printed("zero.stage=0,1", compared("zero.stage=0,1", result(), result()))


def compared(word, *results):
    axes, _ = split_axes(word.split())
    return rows(variants(axes), results)


def printed(word, actual):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(split_axes(word.split())[0], actual, {}, console)
    return console.export_text()


def test_exact_runs_show_all_digits_and_say_whether_they_are_one_curve():
    exact = [result() | {"fingerprint": "00ff"} for _ in range(2)]
    text = printed("mesh.dp=1,2", compared("mesh.dp=1,2", *exact))
    assert text.count("0x1.4000000000000p+1") == 2
    assert "exact: all runs have the same losses and the same states, 00ff" in text
    for changed in ({"fingerprint": "00fe"}, {"losses": [3.5, 2.5]}):
        text = printed("mesh.dp=1,2", compared("mesh.dp=1,2", exact[0], exact[1] | changed))
        assert "exact: runs DIFFER in their losses or states" in text
    assert "exact:" not in printed("mesh.dp=1,2", compared("mesh.dp=1,2", result(), result()))


def test_memory_and_traffic_are_summed_by_category_and_per_step():
    row = compared("zero.stage=0,1", result(), result())[0]
    assert row.memory["optimizer states"] == (1200, 1200, False, True)
    assert row.memory["temporary"] == (40, 60, True, True)
    assert row.memory["activations"] == (800, None, False, None)
    assert row.traffic == {"all_gather": (50, 50, False, True), "reduce_scatter": (100, 100, False, True)}
    assert row.sent == 150
    assert row.agrees


def test_ranks_batch_peaks_and_samples_stand_side_by_side():
    word = "zero.stage=2,3 mesh.dp=1,2"
    line = next(line for line in printed(word, compared(word, *[result()] * 4)).splitlines() if "17.0 kB" in line)
    assert line.split() == ["2,", "1", "2", "2", "x", "2", "9.0", "kB", "17.0", "kB", "0.500", "16.0"]


def test_equal_losses_are_the_same_bits():
    word = "zero.stage=0,1"
    first, second = compared(word, result(), result())
    assert first.same_bits
    assert second.same_bits
    assert (second.loss_difference, second.held_out_difference) == (0.0, 0.0)
    text = printed(word, [first, second])
    assert text.count("same bits") == 3  # two cells and the line below
    assert "bytes: equal to the formula" in text


@pytest.mark.parametrize(
    ("other", "loss", "held_out", "shown"),
    [
        (result(losses=(3.0, 2.25), held_out=2.6), -0.25, 0.0, "-2.5e-01"),
        (result(losses=(3.0, 2.5), held_out=2.85), 0.0, 0.25, "+2.5e-01"),
        (result(losses=(3.5, 2.5)), 0.0, 0.0, "     0  2.600000"),
        (result(losses=(3.0, None), held_out=None), None, None, ""),
    ],
    ids=["last loss", "held-out loss", "a loss on the way", "not finite"],
)
def test_another_loss_at_any_step_is_not_the_same_bits(other, loss, held_out, shown):
    actual = compared("precision=bf16,fp32", result(), other)
    assert not actual[1].same_bits
    assert actual[1].loss_difference == pytest.approx(loss)
    assert actual[1].held_out_difference == pytest.approx(held_out)
    text = printed("precision=bf16,fp32", actual)
    assert "same bits" not in text
    assert shown in text


@pytest.mark.parametrize(("first", "other", "apart"), [
    ({"stage": 1}, {"stage": 2}, True),
    ({"stage": 3}, {"stage": 0}, True),
    ({"stage": 1}, {"stage": 2, "accumulate": 1}, False),  # one micro-batch: one moment
    ({"stage": 1}, {"stage": 3, "reduce": "every_step"}, False),
    ({"stage": 2}, {"stage": 3}, False),
    ({"stage": 1}, {"stage": 3, "pp": 2}, False),  # pipelines reduce once a step
    ({"stage": 1, "exact": True}, {"stage": 3, "exact": True}, False),
])  # fmt: skip
def test_runs_that_reduce_at_different_moments_say_so_beside_the_difference(first, other, apart):
    word = "zero.stage=1,2"
    actual = compared(word, result(**first), result(losses=(3.0, 2.25), **other))
    assert actual[1].apart is apart
    text = printed(word, actual)
    assert ("-2.5e-01 r" in text) is apart
    text = " ".join(text.split())
    assert ("r: reduces gradients at other moments than the first run" in text) is apart
    assert ("Sums in another order round differently" in text) is apart
    assert "-2.5e-01" in text
    assert not compared(word, result(**first), result(**other))[1].apart  # nothing to explain


def test_another_moment_explains_no_difference_of_runs_that_differ_in_more():
    word = "zero.stage=1,2 optimizer.lr=1e-3,1e-2"
    results = [result(losses=(3.0, last), stage=stage) for stage, last in ((1, 2.5), (1, 2.4), (2, 2.3), (2, 2.2))]
    actual = compared(word, *results)
    assert [row.apart for row in actual] == [False, False, True, False]
    assert printed(word, actual).count("e-01 r") == 1
    assert compared("zero.stage=1,2 zero.reduce=auto,every_step", *results)[2].apart


def test_a_contradicted_formula_is_said():
    word = "zero.stage=0,1"
    actual = compared(word, result(), result(off=1))
    assert [row.agrees for row in actual] == [True, False]
    text = printed(word, actual)
    assert "UNEQUAL to the formula: zero.stage=1" in text
    assert "measured = formula" not in text


def test_one_rank_sends_nothing_and_has_no_traffic_table():
    alone = {**result(), "traffic": []}
    text = printed("zero.stage=0,1", compared("zero.stage=0,1", alone, alone))
    assert "memory of rank 0" in text
    assert "traffic" not in text


def test_policies_are_shown_with_their_arithmetic():
    word = "activations=none,full,every:2,selective"
    results = [result(activations=name, seconds=s, kept=k)
               for name, s, k in (("none", 0.5, 800), ("full", 0.7, 80), ("every:2", 0.7, 40), ("selective", 0.5, 500))]  # fmt: skip
    actual = [row.recompute for row in compared(word, *results)]
    assert [row.kept_inputs for row in actual] == [0, 4, 2, 4]
    assert [row.interiors for row in actual] == [4, 1, 2, 4]
    assert [row.attentions for row in actual] == [4, 1, 2, 1]
    assert [row.extra for row in actual] == [0, pytest.approx(1 / 3), pytest.approx(1 / 3), None]
    assert [row.predicted for row in actual] == [1, pytest.approx(4 / 3), pytest.approx(4 / 3), None]
    assert [row.measured for row in actual] == pytest.approx([1, 1.4, 1.4, 1])
    text = printed(word, compared(word, *results))
    assert "recomputation of 4 blocks" in text
    assert "of 4 blocks, every:2 keeps 2 inputs + 2 interiors = 4" in " ".join(text.split())


def test_a_policy_is_held_against_the_first_run_with_the_same_other_values():
    axes, _ = split_axes(["activations=none,full", "zero.stage=0,3"])
    results = [
        result(activations=a, seconds=s) for a, s in (("none", 1.0), ("none", 2.0), ("full", 1.5), ("full", 3.0))
    ]
    actual = [row.recompute for row in rows(variants(axes), results)]
    assert [row.measured for row in actual] == [1, 1, 1.5, 1.5]
    assert actual[3].against == "activations=none,zero.stage=3"


@pytest.mark.parametrize(("layers", "message"), [(1, "every:1"), (9, "every:3"), (100, "every:10")])
def test_the_square_root_is_the_best_segment(layers, message):
    assert message in square_root(layers)


def test_the_tables_of_one_axis_fit_80_columns():
    for word, results in (("zero.stage=0,1", [result(), result()]),
                          ("activations=none,full", [result(), result(activations="full")])):  # fmt: skip
        big = [
            {**item, "memory": [{**row, "measured": row["measured"] * 10**8} for row in item["memory"]]}
            for item in results
        ]
        lines = printed(word, compared(word, *big)).splitlines()
        table = [line for line in lines if "─" in line]
        assert len(table) >= 3
        assert all(len(line.rstrip()) <= 80 for line in table)
        assert not any("…" in line for line in lines)


def test_figures_are_plain_json_and_the_picture_is_a_png(tmp_path):
    axes, _ = split_axes(["zero.stage=0,1"])
    results = [result(), result(losses=(3.0, None))]
    plain = json.loads(json.dumps(as_json(variants(axes), results)))
    assert plain[0]["figures"]["memory"]["parameters"] == {
        "measured": 200,
        "formula": 200,
        "at_most": False,
        "agrees": True,
    }
    assert plain[1]["overrides"] == ["zero.stage=1"]
    assert plain[1]["figures"]["loss_difference"] is None
    draw(rows(variants(axes), results), results, "a title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --- runs that end early ------------------------------------------------------------------------


def scripted(monkeypatch, script):
    """Every run is this Python script; sys.argv[1] is its overrides."""

    def start(words, stdout, stderr):
        label = words[-2]  # the variant's only override, before its output
        return subprocess.Popen(
            [sys.executable, "-c", script, label], stdout=stdout, stderr=stderr, start_new_session=True
        )

    monkeypatch.setattr(workers, "start_process", start)


FAILING = f"""
import os, sys
if sys.argv[1] in os.environ["FAIL"]:
    print("step 1/2", file=sys.stderr)
    print("OutOfMemoryError: 80 GiB", file=sys.stderr)
    sys.exit(int(os.environ["CODE"]))
print({json.dumps(json.dumps(result()))})"""


@pytest.mark.parametrize(("fail", "code"), [
    ("zero.stage=0", "1"), *(pytest.param("zero.stage=1", code, marks=pytest.mark.long) for code in "12"),
])  # fmt: skip
def test_a_run_that_fails_is_a_row_and_the_others_run(tmp_path, monkeypatch, capfd, fail, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIL", fail)
    monkeypatch.setenv("CODE", code)
    scripted(monkeypatch, FAILING)
    assert main(["compare", "zero.stage=0,1,2", "output=out"]) == 1
    out = capfd.readouterr().out
    assert re.search(rf"^{fail[-1]} +failed", out, re.MULTILINE)
    assert out.count(f"{fail} failed: OutOfMemoryError: 80 GiB") == 2  # when it did, and below the tables
    assert "step 1/2" not in out
    report = json.loads((tmp_path / "out" / "compare.json").read_text())
    rest = [f"zero.stage={stage}" for stage in range(3) if not fail.endswith(str(stage))]
    assert [run["variant"] for run in report["runs"]] == rest
    assert report["failed"] == [
        {
            "variant": fail,
            "overrides": [fail],
            "why": "OutOfMemoryError: 80 GiB",
            "log": str(tmp_path / "out" / f"{fail}.log"),
        }
    ]
    assert (tmp_path / "out" / "compare.png").exists()


def test_runs_that_all_fail_leave_their_reasons(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    scripted(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert main(["compare", "zero.stage=0,1", "output=out", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["runs"] == []
    assert [item["why"] for item in report["failed"]] == ["killed by SIGKILL", "killed by SIGKILL"]


def test_bad_input_of_the_first_run_ends_it_with_its_line_and_code(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    scripted(monkeypatch, "import sys; print('DataError: no such file', file=sys.stderr); sys.exit(2)")
    assert main(["compare", "zero.stage=0,1", "output=out"]) == 2
    report = capfd.readouterr().err
    assert report.count("DataError: no such file") == 1
    assert "zero.stage=0 failed" in report
    assert not (tmp_path / "out" / "zero.stage=1.log").exists()


@pytest.mark.parametrize("name", ["compare.json.tmp", pytest.param("compare.png", marks=pytest.mark.long)])
def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    scripted(monkeypatch, f"""
import os
os.makedirs("out/{name}", exist_ok=True)
print({json.dumps(json.dumps(result()))})""")  # fmt: skip
    code = main(["compare", "zero.stage=0,1", "output=out"])
    out, err = capfd.readouterr()
    if name.endswith("png"):
        assert code == 0
        assert "no picture: out/compare.png cannot be written (Is a directory)" in out
    else:
        assert code == 1
        assert err == "Zero3dError: cannot write out/compare.json (Is a directory): move away what else has this name, or choose another output " \
                      "with output=FOLDER; each run's own folder is kept.\n"  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1])
def test_a_signal_goes_to_the_run_and_ends_the_comparison_with_the_runs_that_are_done(
    tmp_path, monkeypatch, capfd, stage
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "draw", lambda *_: None)
    scripted(
        monkeypatch,
        f"""
import os, signal, sys
if sys.argv[1] == "zero.stage={stage}":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
print({json.dumps(json.dumps(result()))})""",
    )
    assert main(["compare", "zero.stage=0,1,2", "output=out"]) == 128 + signal.SIGTERM
    out, err = capfd.readouterr()
    assert f"stopped by SIGTERM in zero.stage={stage}" in err
    logs = [f"zero.stage={each}.log" for each in range(stage + 1)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*["compare.json"] * stage, *logs]
    assert ("losses: " in out) == bool(stage), "the table"
