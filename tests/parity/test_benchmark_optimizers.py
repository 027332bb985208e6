"""What the benchmarks of optimizers compare is the same training; what the demo learns with each."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
def test_losses_of_an_optimizer_agree_at_both_stages_and_with_torchs_muon(benchmark_in_fork):
    small = ["--ranks", "2", "--rounds", "2", "--model", "layers=2,d=64,vocab=256", "--seq", "32"]
    losses = benchmark_in_fork("optimizers", *small)["losses"]
    for name in ("adamw", "adamw8bit", "muon"):
        assert losses[f"{name}-1"] == losses[f"{name}-3"]
        assert len(set(losses[f"{name}-1"])) == len(losses[f"{name}-1"]) == 4
    assert losses["adamw8bit-1"] == pytest.approx(losses["adamw-1"], rel=1e-3)
    assert losses["fsdp2-muon"] == pytest.approx(losses["muon-1"], rel=1e-3)


def check_curves(found, steps):
    """Moments in 8 bits end within 0.01 of AdamW's held-out loss; Muon has AdamW's last loss before the last tenth."""
    last = found["adamw"]["losses"][-1]
    assert found["adamw"]["steps"][-1] == steps
    assert found["adamw8bit"]["losses"][-1] == pytest.approx(last, abs=0.01)
    muon = found["muon"]
    assert any(loss <= last and step < 0.9 * steps for step, loss in zip(muon["steps"], muon["losses"], strict=True))
    states = {name: run["bytes_per_parameter"] for name, run in found.items()}
    assert states["adamw8bit"] < states["muon"] < states["adamw"]


def test_the_demo_learned_as_well_with_8_bits_and_sooner_with_muon_when_it_was_recorded():
    (run,) = json.loads((BENCHMARKS / "results" / "demo-curves.json").read_text())["runs"]
    check_curves(run["result"], 500)


@pytest.mark.long
def test_the_demo_does_so_in_fewer_steps_on_one_rank(benchmark_in_fork):
    check_curves(benchmark_in_fork("demo_curves", "--ranks", "1", "--steps", "30"), 30)
