"""Training with model states off the device: places, optimizers, and what a run of some steps leaves behind."""

import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from buckets import buckets_of
from models import adamw, batch, bits, build, loss_of

import zero3d
from zero3d.memory.arena import STATES
from zero3d.precision import LossScaling, Precision

RESIDENT = "resident"
PLACES = {
    RESIDENT: {},
    "host": {"optimizer": "host"},
    "host, device updates": {"optimizer": "host", "executor": "device"},
    "disk": {"optimizer": "disk"},
    "disk, device updates": {"optimizer": "disk", "executor": "device"},
    "part on host": {"optimizer": "host", "fraction": 0.5},
    "part on disk": {"optimizer": "disk", "fraction": 0.3, "executor": "device"},
    "weights on host": {"params": "host"},
    "weights on disk": {"params": "disk"},
    "all on host": {"optimizer": "host", "params": "host"},
    "all on disk": {"optimizer": "disk", "params": "disk"},
    "states on disk, weights on host": {"optimizer": "disk", "params": "host", "executor": "device"},
    "part of states on host, weights on disk": {"optimizer": "host", "params": "disk", "fraction": 0.3},
    "gradients on host": {"optimizer": "host", "gradients": "host"},
    "gradients on host, states on disk": {"optimizer": "disk", "gradients": "host", "executor": "device"},
}
STEPS = 8
CLIP = {"net": 0.3, "tied": 2.0}
FACTORS = (1.0, 0.05, 0.3)  # of losses: gradients of some steps are clipped, of others not
INFINITE = 4  # the step whose loss is
WAITS = (False, True, None)  # for `train_batch`; None: a backward and a bare `step()`


class Counting(torch.optim.Optimizer):
    """Adds the mean of all gradients so far, as it counts them in its group, like some optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-1, "k": 0, "total": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["total"] = group["total"] + group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "sum" not in state:
                    state["sum"] = torch.zeros_like(p)
                state["sum"].add_(p.grad)
                p.sub_(state["sum"], alpha=group["lr"] * group["total"] / group["k"])


OPTIMIZERS = {
    "fused AdamW": adamw,
    "fused Adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, fused=True),
    "foreach Adam": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=True),
    "AdamW one by one": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False, fused=False),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-1),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1, lr_decay=0.01),
    "counting": Counting,
}
GROUPS = [{"match": "*norm*|*.bias", "weight_decay": 0.0, "lr": 3e-2}]


def decaying(optimizer):
    """Another learning rate after each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1.0 + 0.1 * k))


class Case(NamedTuple):
    """All but the place of states. moments: micro-batches of a step, and when gradients are reduced."""

    dp: int = 1
    stage: int = 3
    release: str = "auto"
    moments: tuple[int, str] = (1, "auto")
    precision: str = "bf16"
    master: str = "fp32"
    optimizer: str = "fused AdamW"
    grouped: bool = False
    exact: bool = False
    model: str = "net"
    frozen: bool = False


def is_possible(case, place=RESIDENT):
    offload = PLACES[place]
    return (
        (case.master == "fp32" or case.precision == "bf16")
        and ("params" not in offload or (case.stage == 3 and case.release != "every_step"))
        and (case.release == "auto" or case.stage == 3)
        and not (case.grouped and case.optimizer == "counting")
        and not (case.exact and case.moments == (1, "every_step"))
        and (offload.get("gradients") != "host" or (case.stage > 1 and case.moments[1] == "auto" and not case.exact))
    )


def model_of(case):
    model = build(case.model, width=40)
    if case.frozen:  # half of the blocks as an adapter leaves them, and all of one
        for name, p in model.named_parameters():
            p.requires_grad_(not (name.startswith("layers.1") or (name.startswith("layers.0") and p.dim() > 1)))
    return model


def sum_of(output, given):
    return loss_of(lambda _: output, given["ids"]) * given["factor"] * 3.0, 3.0


def precision_of(name):
    """fp16 with a loss scale that overflows now and then."""
    return Precision(name, LossScaling(initial=2.0**19, window=3, hysteresis=1)) if name == "fp16" else name


def engine_of(case, offload, **options):
    micro_batches, reduce = case.moments
    made = {
        "stage": case.stage, "release": case.release, "reduce": reduce, "accumulate": micro_batches,
        "precision": precision_of(case.precision), "master": case.master, "exact": case.exact, "clip_norm": CLIP[case.model],
        "optimizer": OPTIMIZERS[case.optimizer], "param_groups": GROUPS if case.grouped else None,
        "scheduler": decaying, "loss": sum_of, "offload": offload,
    }  # fmt: skip
    return zero3d.Engine(model_of(case), **made | options)


def micro_batches_of(case, number):
    """Those of this rank. In exact mode every dp sees the same ones: four a step over all ranks."""
    rank = dist.get_rank()
    factor = float("inf") if number == INFINITE else FACTORS[number % len(FACTORS)]
    count = case.moments[0]
    found = []
    for m in range(count):
        if case.exact:
            per_step = case.moments[1] == "every_step" or (case.moments[1] == "auto" and case.stage < 2)
            ids = batch(100 * number + (rank * count + m if per_step else m * case.dp + rank))
        else:
            ids = batch(100 * number + m, rank)
        found.append({"ids": ids, "factor": torch.tensor(factor if m == 0 or factor < 2 else 1.0)})
    return found


def step(engine, case, number):
    """One step, in one of three ways; its losses."""
    given, wait = micro_batches_of(case, number), WAITS[number % len(WAITS)]
    if wait is not None:
        return [float(engine.train_batch(given, wait=wait))]
    losses = []
    for each in given:
        loss, weight = sum_of(engine(each["ids"]), each)
        losses.append(float(loss.detach()))
        engine.backward(loss / weight, weight=weight)
        engine.last_step = engine.step()
    return losses


def unplanned(engine):
    """Rows of an engine's memory whose planned bytes are not those that it holds."""
    return [row for row in engine.memory if row.planned is not None and row.planned != row.measured]


def places_of(engine):
    """Where it holds model states."""
    return {row.place for row in engine.memory if row.measured and row.category in STATES}


class Run(NamedTuple):
    """What some steps leave behind; `bits` must not depend on the place."""

    bits: dict[str, Any]
    unplanned: list[Any]
    places: set[str]


def trained(case, place, steps=STEPS, bucket=1024, **options):
    """Train for some steps, or those of these numbers, and return what came of it."""
    with tempfile.TemporaryDirectory() as folder, buckets_of(bucket):
        offload = PLACES[place] if isinstance(place, str) else place
        uses_disk = "disk" in (offload.get("optimizer"), offload.get("params"))
        engine = engine_of(case, {**offload, **({"directory": folder} if uses_disk else {})}, **options)
        losses, norms, reasons = [], [], []
        for number in range(steps) if isinstance(steps, int) else steps:
            losses.append(step(engine, case, number))
            norms.append(float(engine.last_step.grad_norm))
            reasons.append(engine.last_step.reason)
        found = {"losses": repr(losses), "norms": repr(norms), "reasons": reasons, "hash": engine.fingerprint()}
        with engine.full_params():
            found["weights"] = bits(engine.module.parameters())
        return Run(found, unplanned(engine), places_of(engine))


def check_run(run, case, place):
    """What must hold of a run, whatever came of it."""
    assert not run.unplanned, (case, place, run.unplanned)
    wanted = {"device"} | {PLACES[place].get(key, "device") for key in ("optimizer", "params", "gradients")}
    if case.optimizer != "SGD" or case.precision in ("bf16", "fp16"):  # else there is nothing but the weights
        assert run.places == wanted, (case, place, run.places)
    assert {"applied", "overflow"} <= set(run.bits["reasons"]), case
    norms = [norm for norm in map(float, run.bits["norms"][1:-1].split(", ")) if norm < float("inf")]
    assert min(norms) < CLIP[case.model] < max(norms), (case, norms)


def compare(pairs, steps=STEPS):
    """Train each (case, place) and, once for each case, with everything on the device. Raises AssertionError."""
    resident = {}
    for case, place in pairs:
        if case not in resident:
            resident[case] = trained(case, RESIDENT, steps)
            check_run(resident[case], case, RESIDENT)
        run = trained(case, place, steps)
        assert run.bits == resident[case].bits, (case, place)
        check_run(run, case, place)
    return [(case, run.bits) for case, run in resident.items()]
