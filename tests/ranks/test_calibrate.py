"""`zero3d calibrate` on two ranks with small sweeps: the file it writes is one that `zero3d plan` reads."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import zero3d
from zero3d.tools.advice.small_runs import Small, timed_runs
from zero3d.tools.cli.calibrate import lines, work
from zero3d.tools.cli.main import main
from zero3d.tools.plan.calibrate import MEASURED, Sizes, calibrate
from zero3d.tools.plan.corrected import fitted
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.spec_json import to_json

SMALL = Sizes(side=256, copied=1 << 20, disk=1 << 20, messages=(1 << 16, 1 << 18, 1 << 20))
SWEPT = ("gpu.matrix", "gpu.half", "gpu.flash", "gpu.bandwidth", "gpu.memory", "host_memory", "host_link", "disk", "host_bandwidth",
         "inside")  # fmt: skip


def measure(folder):
    return calibrate(zero3d.Mesh(), Path(folder), SMALL)


def fit(folder):
    """Rates, the steps of one small run, and the cluster that both make."""
    mesh = zero3d.Mesh()
    rates = calibrate(mesh, Path(folder), SMALL)
    runs = timed_runs(mesh, [Small(hidden=64, length=16, vocab=64, micro_batch=1, stage=3)], rounds=1)
    return rates, runs, fitted(rates, runs, "by hand")


def test_two_ranks_measure_one_cluster_that_plan_reads(ranks, tmp_path, capsys):
    (first, runs, whole), other = ranks(2, fit, str(tmp_path))
    assert (first, runs, whole) == other
    (run,) = runs
    assert (run.plan.dp, run.plan.zero.stage, len(run.model.blocks), run.model.length) == (2, 3, 2, 16)
    assert run.seconds > 0
    assert (first.nodes, first.per_node, first.gpu.name) == (1, 2, "cpu")
    rates = (
        first.gpu.flops,
        first.gpu.bandwidth,
        first.inside.bandwidth,
        first.host_link,
        first.disk,
        first.host_bandwidth,
    )
    assert all(rate > 0 for rate in rates)
    assert first.gpu.matrix == 1.0  # on a CPU the best product is the peak
    assert {key for key, told in first.provenance.items() if told == MEASURED} == set(SWEPT)
    assert list(tmp_path.iterdir()) == []  # the file that the disk was measured with is gone

    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(to_json(whole)))
    read = cluster("cpu", 2, 1, file)
    assert replace(read, provenance={}) == replace(whole, provenance={})
    assert {key: read.provenance[key] for key in whole.provenance} == whole.provenance
    words = ["--params", "1e6", "--seq", "64", "--tokens-per-batch", "256", "--cluster", str(file), "--json"]
    assert main(["plan", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["gpus"], told["gpu"]) == (2, "cpu")
    assert told["plans"]
    text = "\n".join(lines(whole, file, off=0.034))
    assert "within 3.4 % of each small run" in text
    assert "(measured)" in text
    assert "between nodes       1.25 GB/s, 12 us (datasheet)" in text


def test_a_profile_takes_the_place_of_the_one_before_when_it_is_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "zero3d.distributed.mesh.Mesh", lambda: SimpleNamespace(world=2, device=SimpleNamespace(type="cpu"))
    )
    monkeypatch.setattr(
        "zero3d.tools.plan.calibrate.calibrate", lambda *_: replace(cluster("cpu", 2, 1), provenance={})
    )
    monkeypatch.setattr("zero3d.tools.advice.small_runs.timed_runs", lambda *_: [])
    monkeypatch.setattr("zero3d.tools.plan.corrected.fitted", lambda spec, *_: spec)
    monkeypatch.setenv("RANK", "0")
    file, link = tmp_path / "cluster.json", tmp_path / "link.json"
    file.write_text("before")
    link.symlink_to(file)
    with file.open() as reader:
        work(argparse.Namespace(out=str(link), json=True))
        assert reader.read() == "before"
    assert json.loads(file.read_text()) == json.loads(capsys.readouterr().out)
    assert link.is_symlink()


def test_a_folder_that_takes_no_file_is_said(ranks, tmp_path):
    ((_, error),) = ranks(1, measure, str(tmp_path / "none"), check=False)
    assert "calibrate writes a file of 1 MB in" in error


def test_bad_words_are_refused_in_a_line(capsys):
    for words in (["--ranks", "0"], ["--out", "nowhere/cluster.json"], ["--out", "/dev/null"], ["--out", "/dev"]):
        assert main(["calibrate", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
