"""What the benchmarks of optimizers compare is the same training; what the demo learns with each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def figures(tmp_path, script, *words):
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, BENCHMARKS / script, *words, "--json", out], check=True)
    return json.loads(out.read_text())


@pytest.mark.long
def test_losses_of_an_optimizer_agree_at_both_stages_and_with_torchs_muon(tmp_path):
    small = ["--ranks", "2", "--rounds", "2", "--model", "layers=2,d=64,vocab=256", "--seq", "32"]
    losses = figures(tmp_path, "optimizers.py", *small)["losses"]
    for name in ("adamw", "adamw8bit", "muon"):
        assert losses[f"{name}-1"] == losses[f"{name}-3"]
        assert len(set(losses[f"{name}-1"])) == len(losses[f"{name}-1"]) == 4
    assert losses["adamw8bit-1"] == pytest.approx(losses["adamw-1"], rel=1e-3)
    assert losses["fsdp2-muon"] == pytest.approx(losses["muon-1"], rel=1e-3)


@pytest.mark.long
def test_the_demo_learns_as_well_with_8_bits_and_sooner_with_muon(tmp_path):
    """500 steps: moments in 8 bits within 0.01 of AdamW's held-out loss; with Muon AdamW's last loss in fewer steps."""
    found = figures(tmp_path, "demo_curves.py")
    last = found["adamw"]["losses"][-1]
    assert found["adamw"]["steps"][-1] == 500
    assert found["adamw8bit"]["losses"][-1] == pytest.approx(last, abs=0.01)
    muon = found["muon"]
    assert any(loss <= last and step < 450 for step, loss in zip(muon["steps"], muon["losses"], strict=True))
    states = {name: run["bytes_per_parameter"] for name, run in found.items()}
    assert states["adamw8bit"] < states["muon"] < states["adamw"]
