"""The side streams: in what order they are used, and what a late or an unordered one would spoil.

order      what the side streams are asked for: issue, join, free of every unit, and gathers that run ahead
slow       one stream at a time is late by milliseconds wherever it begins something; whoever does not wait reads
           what is not there yet, and the losses are no longer those of stage 0. Where compute is late while a side
           stream is open, torch fills fresh memory with NaN, as its deterministic algorithms do by default: nobody
           may allocate there on compute's stream and write on another
sanitizer  torch's CUDA sanitizer: two accesses of which nothing says which is first, whether or not they met
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from instruments import races
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from campaign.account import Account, Place
from campaign.loopback import Loopback
from campaign.training import MIDDLE, STAGES, Curve, Run, compare, engine_of, one_loss, own_batch, run_of, train
from zero3d import Engine, make_deterministic
from zero3d.distributed.mesh import Mesh
from zero3d.tools.sim.patches import replaced
from zero3d.zero import streams as zero_streams
from zero3d.zero.streams import SideStream

Event = tuple[str, str]
Issue = Callable[..., AbstractContextManager[None]]  # of the unit, and of others for which something is enqueued
LATE_CYCLES = 5_000_000  # about 3 ms at 1.7 GHz: longer than any unit of MIDDLE computes
LANES_OPEN = "compute, lanes open"
LATE = ("gathers", "reductions", "compute", LANES_OPEN)
ALLOCATES = ("aten::empty", "aten::empty_strided")


# --- order and lateness ---------------------------------------------------------------------------


def late(place: Place, account: Account) -> None:
    """Train stage 3 with side streams that log, then every stage with one stream late at a time."""
    make_deterministic(place.device)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    run = run_of(place, account, MIDDLE._replace(precision="bf16"))  # side streams then borrow for what travels
    mesh = Loopback(place.device)
    if place.on_cpu:
        account.skipped("lateness", "the CPU has no streams: what a side stream is asked for is done at once")
    with sdpa_kernel(SDPBackend.MATH):
        reference = train(engine_of(Mesh(device=place.device), run, 0), run)
        compare(account, "stage 3, lanes that log", logged(account, mesh, run), reference, 0.0)
        for stage in STAGES:
            for what in LATE:
                engine = engine_of(mesh, run, stage)
                delay(engine, what, sleep_on(mesh.device))
                compare(account, f"stage {stage}, late {what}", train(engine, run), reference, 0.0)
        if not place.on_cpu:
            with replaced(zero_streams, "Pool", lambda stream: stream):
                engine = engine_of(mesh, run, 3)
                delay(engine, LANES_OPEN, sleep_on(mesh.device))
                found = train(engine, run) != reference
            account.ran("fresh memory filled on compute's stream", found, "" if found else "the fault was not found")


def logged(account: Account, mesh: Mesh, run: Run) -> Curve:
    """Train stage 3; the account has what its side streams were asked for."""
    engine, log = engine_of(mesh, run, 3), list[Event]()
    for side in side_streams(engine).values():
        side._log = log
    curve = train(engine, run)
    faults, ahead = order_faults(log), count_ahead(log)
    account.ran("events", len(log), f"{len(faults)} out of order, first: {faults[0]}" if faults else "")
    account.ran("gathers ahead", ahead, "" if ahead else "no gather ran ahead of the unit in use: there is no prefetch")
    return curve


def side_streams(engine: Engine) -> dict[str, SideStream]:
    """Return the side streams of an engine."""
    return {"gathers": engine.gathers._side, "reductions": engine.reductions._side}


def order_faults(log: list[Event]) -> list[str]:
    """Return what breaks issue -> join -> free, by unit; a reduction is not freed, a cancelled gather neither."""
    allowed = {
        "gather.issue": (None, "gather.free", "gather.join"),
        "gather.join": ("gather.issue", "gather.join"),
        "gather.free": ("gather.join",),
        "reduce.issue": (None, "reduce.issue", "reduce.join"),  # to begin, and to add up what has come
        "reduce.join": ("reduce.issue",),
    }
    last: dict[Event, str] = {}
    faults = []
    for position, (event, unit) in enumerate(log):
        side = event.partition(".")[0]
        before = last.get((side, unit))
        if before not in allowed[event]:
            faults.append(f"event {position}: {event} of {unit} after {before or 'nothing'}")
        last[side, unit] = event
    open_reductions = [unit for (_, unit), event in last.items() if event == "reduce.issue"]
    return faults + [f"reduction of {unit} was never joined" for unit in open_reductions]


def count_ahead(log: list[Event]) -> int:
    """Count gathers that were issued before another unit was joined, and joined after it."""
    waiting: dict[str, bool] = {}
    ahead = 0
    for event, unit in log:
        if event == "gather.issue":
            waiting[unit] = False
        elif event == "gather.join":
            ahead += waiting.pop(unit, False)
            waiting = dict.fromkeys(waiting, True)
    return ahead


def sleep_on(device: torch.device) -> Callable[[], None]:
    """Return what makes the current stream late."""
    return (lambda: torch.cuda._sleep(LATE_CYCLES)) if device.type == "cuda" else (lambda: None)


def delay(engine: Engine, what: str, sleep: Callable[[], None]) -> None:
    """Make one of an engine's streams late: a side stream where it is entered, compute there or around each module."""
    compute = (
        torch.accelerator.current_stream(engine.mesh.device) if engine.mesh.device.type == "cuda" else nullcontext()
    )
    for name, side in side_streams(engine).items():
        if what == name:
            side.issue = opened(side.issue, sleep, nullcontext())  # type: ignore[method-assign]
        elif what == LANES_OPEN:
            side.issue = opened(side.issue, sleep, compute)  # type: ignore[method-assign]
    if what != "compute":
        return

    def before(module: Any, inputs: Any) -> None:
        sleep()

    def after(module: Any, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: sleep())

    for unit in engine.module.blocks:
        unit.register_forward_pre_hook(before)
        unit.register_forward_hook(after)


def opened(issue: Issue, sleep: Callable[[], None], stream: AbstractContextManager[Any]) -> Issue:
    """Return `issue` of a side stream with `stream` late from when the side stream is entered."""

    @contextmanager
    def late_issue(unit: str, *others: str) -> Iterator[None]:
        with issue(unit, *others):
            with stream:
                sleep()
            yield

    return late_issue


# --- sanitizer ----------------------------------------------------------------------------------


def sanitizer(place: Place, account: Account) -> None:
    """Train every stage under the CUDA sanitizer: as torch has it, then with whole storages for tensors."""
    run = run_of(place, account, MIDDLE)._replace(steps=3, precision="bf16")
    if place.on_cpu:
        account.skipped("sanitizer", "it follows CUDA's streams, events and allocations; a model of them stands in")
        model_streams(account, run)
        return
    import torch.cuda._sanitizer as csan  # traces from here on

    csan.enable_cuda_sanitizer()
    mesh, reader = Loopback(place.device), allocating(csan.ArgumentHandler)
    for granularity, handler in (("tensors", reader), ("storages", by_storage(reader))):
        csan.ArgumentHandler = handler  # type: ignore[misc]
        for stage in STAGES:
            watch(account, f"stage {stage}, by {granularity}", mesh, run, stage)


def model_streams(account: Account, run: Run) -> None:
    """Train one of 8 ranks with modelled streams; planted faults must be found. A rank that is alone copies nothing."""
    alone = (1, 3, "")
    for ranks, stage, fault in (
        alone,
        *((8, stage, "") for stage in STAGES),
        *((8, 3, fault) for fault in races.FAULTS),
    ):
        with races.alone_in(ranks), races.collectives_of(races.Model()):
            engine = engine_of(races.lonely_mesh(dp=ranks), run, stage)
            with races.modelled(engine, fault) as model:
                for step in range(run.steps):
                    one_loss(engine, *own_batch(engine.mesh.device, run, step))
                    engine.step()
            found = len(model.races)
            if fault:
                account.ran(f"races at stage {stage} without {fault}", found, "" if found else "none was found")
            else:
                what = f"stage {stage}" + (", one rank" if ranks == 1 else "")
                account.ran(f"races at {what}", found, f"first: {next(iter(model.races))}" if found else "")
                if stage == 3:
                    vain = model.timeline.superfluous
                    account.ran(f"waits in vain at {what}", len(vain), f"first: {vain[0]}" if vain else "")


def watch(account: Account, what: str, mesh: Mesh, run: Run, stage: int) -> None:
    """Train; the sanitizer raises at the first operation that is not ordered, and prints both on stderr."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    try:
        curve: Curve | None = train(engine_of(mesh, run, stage), run)
    except CUDASanitizerErrors as errors:
        account.ran(what, [str(error) for error in errors.errors], f"{len(errors.errors)} accesses are not ordered")
    else:
        account.ran(what, curve)


def allocating(handler: type) -> type:
    """Return the sanitizer's reader of arguments for which allocating is no access to what is allocated.

    torch's own knows that of `new_empty` and `empty_like`, and takes `empty` for a kernel that writes on the current
    stream. Nothing runs there; a side stream takes memory of compute's pool so (`zero3d.zero.streams`).
    """

    class Allocating(handler):  # type: ignore[misc, valid-type]
        def parse_outputs(self, schema: Any, outputs: Any, *, is_factory: bool) -> None:
            super().parse_outputs(schema, outputs, is_factory=is_factory or schema.name in ALLOCATES)

    return Allocating


def by_storage(handler: type) -> type:
    """Return the sanitizer's reader of arguments with whole storages for tensors.

    torch's own takes two tensors for the same where they begin at the same byte, and so does not see that a
    parameter is a view into what a gather writes.
    """

    class ByStorage(handler):  # type: ignore[misc, valid-type]
        def _handle_argument(self, value: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(value, Tensor) and value.is_cuda and value.untyped_storage().data_ptr():
                value = value.new_empty(0).set_(value.untyped_storage())
            super()._handle_argument(value, *arguments, **options)

    return ByStorage
