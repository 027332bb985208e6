"""What engines.py compares is the same training, in micro-batches, with recomputation and adapters, too."""

import sys
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import engines
import peers
import ranks as ranks_of_benchmarks
import report
from llama import build_llama
from memory import Gauge, points_of
from model import Shape, add_adapters, batch
from peers import Setting, build_variant

SHAPE = Shape(layers=2, d=64, vocab=64)
NAMES = ("zero3d-3", "zero3d-cast-3", "fsdp2-reshard")
CASES = {"micro-batches": {"accumulate": 2}, "recomputation": {"recompute": True}, "adapters": {"accumulate": 2}}


def tokens():
    return batch(torch.distributed.get_rank(), 2, 16, SHAPE.vocab, torch.device("cpu"))


def fast(params):
    return torch.optim.AdamW(params, lr=1e-2)


def trained(case):
    """Losses of steps by each engine, and of those with all of a batch at once and all kept.

    Also the dtypes of FSDP2's frozen parameters, and what zero3d's engine counts.
    """
    peers.shared_mesh.cache_clear()  # of an earlier case's ranks
    build = lambda: add_adapters(build_llama(SHAPE), 4 if case == "adapters" else 0)  # noqa: E731
    once = Setting(build, torch.device("cpu"))
    settings = {name: replace(once, **CASES[case]) for name in NAMES} | {"zero3d-0": once}
    found = {}
    for name, setting in settings.items():
        with mock.patch.object(peers, "adamw", fast):
            variant = build_variant(name, setting)
        found[name] = [float(variant.step(*tokens())) for _ in range(5)]
        if name == "fsdp2-reshard":
            frozen = {p.dtype for p in variant.module.parameters() if not p.requires_grad}
        else:
            counted = {entry.category for entry in variant.engine.memory}
    return found, frozen, counted


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "adapters" else pytest.mark.long) for case in CASES]
)
def test_zero3d_and_fsdp2_take_the_same_steps(ranks, case):
    for found, frozen, counted in ranks(2, trained, case):
        once = found.pop("zero3d-0")
        assert found["zero3d-cast-3"] == found["zero3d-3"]
        assert once[-1] < once[0] - 0.2
        for losses in found.values():
            assert losses == pytest.approx(once, abs=0.05)
        assert frozen == ({torch.bfloat16} if case == "adapters" else set())
        assert "frozen originals" not in counted  # which hold an fp32 base


def looked_at():
    """The points of a step by each engine, by a gauge that counts how often it was asked."""
    peers.shared_mesh.cache_clear()
    found = {}
    for name in NAMES:
        asked = iter(range(1_000_000))
        gauge = Gauge(now=int, peak=partial(next, asked), reset=lambda: None, trim=lambda: None)
        variant = build_variant(name, Setting(partial(build_llama, SHAPE), torch.device("cpu")))
        found[name] = points_of(variant, tokens(), gauge)
    return found


def test_memory_over_a_step_is_looked_at_at_the_same_points_of_each_engine(ranks):
    found = ranks(1, looked_at)[0]
    assert found["zero3d-3"] == found["zero3d-cast-3"] == found["fsdp2-reshard"]
    peaks, ends = found["zero3d-3"]
    layers = 1 + 2 * 9 + 2  # embedding; norms, matrices of each block; norm, head
    assert ends == {"forward": 2 * layers, "backward": 3 * layers + 1, "update": 3 * layers + 2}
    assert len(peaks) == ends["update"]


@pytest.mark.parametrize(("ranks", "count", "limits"), [
    (2, 1, {"peak of a step": 0.97, "at rest": 1.0, "process memory": 0.95}),
    (2, 4, {"peak of a step": 1.0, "at rest": 1.0, "process memory": 0.95}),
    (1, 1, {"peak of a step": 1.0, "at rest": 1.0, "process memory": 1.0}),
])  # fmt: skip
def test_memory_is_judged_by_its_ratio_to_fsdp2s(ranks, count, limits):
    variants = {
        "zero3d-3": {"memory": {"step": 98, "held": 50, "process": 96}},
        "fsdp2-reshard": {"memory": {"step": 100, "held": 40, "process": 100}},
    }
    rows = {row["kind"]: row for row in report.compare(ranks, "bf16", variants, count)}
    assert {kind: row["limit"] for kind, row in rows.items()} == limits
    ratios = {"peak of a step": 0.98, "at rest": 1.25, "process memory": 0.96}
    assert {kind: row["ratio"] for kind, row in rows.items()} == ratios
    assert {kind: row["met"] for kind, row in rows.items()} == {kind: ratios[kind] <= limits[kind] for kind in limits}
    cast = {"zero3d-cast-3": variants["zero3d-3"], "fsdp2-reshard": variants["fsdp2-reshard"]}
    assert {row["kind"]: row["limit"] for row in report.compare(ranks, "bf16", cast, count)} == limits


def test_weights_that_are_cast_are_a_variant_of_stage_3_alone():
    assert report.variant_names(["zero3d"], [2, 3], weights="both") == ["zero3d-2", "zero3d-3", "zero3d-cast-3"]
    assert report.variant_names(["zero3d"], [2, 3], weights="cast") == ["zero3d-2", "zero3d-cast-3"]
    assert report.variant_names(["zero3d"], [2, 3]) == ["zero3d-2", "zero3d-3"]
    both = report.variant_names(["zero3d"], [2], autocast="both")
    assert both == ["zero3d-2", "zero3d-autocast-2"]


@pytest.mark.parametrize(("words", "why"), [
    ("--accumulate 2", "for zero3d and fsdp2, not for ddp: pass --engines zero3d,fsdp2"),
    ("--recompute --engines plain", "not for plain"),
    ("--lora 8 --engines zero3d,plain", "not for plain"),
    ("--lora -1", "--lora -1 is negative: 0 leaves adapters out"),
    ("--rounds 0 --memory-steps 0", "measures nothing"),
    ("--weights cast --stages 2", "--weights cast is for 16-bit weights at stage 3"),
    ("--weights both --precision fp32", "--weights both is for 16-bit weights at stage 3"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(words, why, capsys):
    with pytest.raises(SystemExit):
        engines.parse(words.split())
    assert why in capsys.readouterr().err


def end_of_a_rank(folder):
    """What a rank of a measurement gives, and whether its interpreter was torn down."""
    torn_down, start = Path(folder) / "torn down", ranks_of_benchmarks.start_processes
    forked = lambda *given, **options: start(*given, **options | {"start_method": "fork"})  # noqa: E731
    with mock.patch.object(ranks_of_benchmarks, "start_processes", forked):
        found = ranks_of_benchmarks.run_ranks(ranks_of_benchmarks.Start(1), notes_its_end, str(torn_down))
    return found, torn_down.exists()


def notes_its_end(device, file):
    Finalize(None, Path(file).touch, exitpriority=0)
    return device.type


def test_a_rank_that_has_measured_leaves_without_ending_what_threads_may_use(alone, tmp_path):
    assert alone(end_of_a_rank, str(tmp_path)) == ("cpu", False)


@pytest.mark.long
def test_memory_is_measured_where_nothing_is_timed(benchmark_in_fork):
    small = ["--engines", "zero3d,fsdp2", "--stages", "3", "--rounds", "0", "--model", "layers=2,d=64,vocab=64"]
    found = benchmark_in_fork("engines", *small, "--seq", "16", "--timeline", "--accumulate", "2")
    assert found["losses"]["met"]
    assert {row["kind"]: row["limit"] for row in found["ratios"]} == {
        "process memory": 0.95, "peak of a step": 1.0, "at rest": 1.0,
    }  # fmt: skip
    timelines = [variant["memory"]["timeline"] for variant in found["variants"].values()]
    assert timelines[0]["ends"] == timelines[1]["ends"]
    assert {len(timeline["bytes"]) for timeline in timelines} == {timelines[0]["ends"]["update"]}
