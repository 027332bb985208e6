"""The numbers that a device computes: against the CPU, against themselves, and by two ranks on one device."""

from __future__ import annotations

from typing import Any

import torch
from peers import shared_mesh
from ranks import Start, run_ranks

from campaign.account import Account, Place
from campaign.training import (
    FP32_TOLERANCE,
    MIDDLE,
    SMALL,
    STAGES,
    Curve,
    Run,
    compare,
    engine_of,
    run_of,
    train,
    train_plainly,
)
from zero3d import make_deterministic
from zero3d.distributed.mesh import Mesh

CPU = torch.device("cpu")


def parity(place: Place, account: Account) -> None:
    """Every stage in fp32 on the device against a plain loop on the CPU."""
    run = run_of(place, account, SMALL)
    mesh, reference = Mesh(device=place.device), train_plainly(CPU, run)
    for stage in STAGES:
        compare(account, f"stage {stage}", train(engine_of(mesh, run, stage), run), reference, FP32_TOLERANCE)


def deterministic(place: Place, account: Account) -> None:
    """Repeat trainings with deterministic algorithms: equal bits are due."""
    make_deterministic(place.device)
    for what, first, second in repeated(place, account):
        compare(account, what, second, first, 0.0)


def default(place: Place, account: Account) -> None:
    """Repeat trainings as torch comes: whether the bits are equal is a finding, not a fault."""
    for what, first, second in repeated(place, account):
        account.ran(what, {"identical": first == second, "losses": [first["losses"], second["losses"]]})


def repeated(place: Place, account: Account) -> Any:
    """Yield the two curves of equal trainings, by what they are."""
    run = run_of(place, account, MIDDLE)
    mesh = Mesh(device=place.device)
    for precision in ("fp32", "bf16"):
        for stage in (0, 3):
            of_run = run._replace(precision=precision)
            first, second = (train(engine_of(mesh, of_run, stage), of_run) for _ in range(2))
            yield f"{precision} stage {stage}", first, second


def shared(place: Place, account: Account) -> None:
    """Two ranks over gloo on one device, every stage against one process with the same global batch."""
    run = run_of(place, account, SMALL)
    start = Start(2, "gloo", place.device, "default", place.limit_s)
    curves = run_ranks(start, stage_curves, run)
    reference = train_plainly(torch.device(place.device), run)
    for name, curve in curves.items():
        compare(account, name, curve, reference, FP32_TOLERANCE)


def stage_curves(device: torch.device, run: Run) -> dict[str, Curve]:
    """On a rank: every stage from the same weights on its share of the same batches."""
    return {f"stage {stage}": train(engine_of(shared_mesh(device), run, stage), run) for stage in STAGES}
