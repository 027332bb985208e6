"""On the stand-in accelerator an engine trains as on the CPU, and its host waits for the device once a step."""

import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from models import batch, bits, loss_of, net
from training import save_model, save_rows, start, tree

from zero3d.memory.arena import Arena

WORLD = 8


def engine_on(device, stage, micro_batches=1, exact=False, precision="bf16", loss=None):
    import zero3d

    return zero3d.Engine(
        net(), stage=stage, mesh=zero3d.Mesh(device=device), precision=precision, clip_norm=0.5,
        accumulate=micro_batches, exact=exact, loss=loss or sum_of,
    )  # fmt: skip


def sum_of(output, ids):
    """A loss that makes no tensor of its number of targets."""
    total = torch.nn.functional.cross_entropy(
        output[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
    return total, float(ids.shape[0] * (ids.shape[1] - 1))


# --- the same training --------------------------------------------------------------------------


def train_on(device, how):
    """Losses and norms of three steps, of an evaluation; all parameters."""
    engine, found = engine_on(device, *how), []
    count = how[1]
    for step in range(3):
        given = [batch(10 * step + i).to(device) for i in range(count)]
        found += [float(engine.train_batch(given)), float(engine.last_step.grad_norm)]
    for i in range(count):
        engine.backward(loss_of(engine, batch(i).to(device)))
        result = engine.step()
    found += [float(result.grad_norm), float(engine.evaluate([batch(99).to(device)]))]
    with engine.full_params():
        return found, bits([p.detach().cpu() for p in engine.module.parameters()])


def train_on_both(hows):
    from instruments import accelerator, groups

    device = accelerator.register()
    runs = []
    for name in ("cpu", accelerator.NAME):
        with groups.alike(1, device=name):
            runs.append([train_on(torch.device("cpu") if name == "cpu" else device, how) for how in hows])
    return runs


@pytest.mark.parametrize("hows", [
    [(3, 2), (2, 2, True)], pytest.param([(0, 1), (1, 2), (2, 1)], marks=pytest.mark.long)
], ids=["stage 3 and exact", "others"])  # fmt: skip
def test_training_has_the_bits_of_the_cpu_at_every_stage_accumulated_and_exact(alone, hows):
    on_cpu, on_device = alone(train_on_both, [(*how, *[False] * (3 - len(how)), "fp32") for how in hows])
    assert all(all(torch.tensor(found).isfinite()) for found, _ in on_cpu)
    assert on_device == on_cpu


def test_bf16_is_that_of_the_cpu_but_for_its_matrix_products(alone):
    (on_cpu, _), (on_device, _) = (runs[0] for runs in alone(train_on_both, [(3, 1)]))
    assert on_device == pytest.approx(on_cpu, rel=0.01)


def train_on_weights_of_the_host():
    from instruments import accelerator, groups

    device = accelerator.register()
    losses = []
    for here in (torch.device("cpu"), device):
        with groups.alike(1, device=here.type):
            engine = engine_on(here, 3, 1, False, "fp32", loss=lambda *given: (sum_of(*given)[0], torch.tensor(3.0)))
            losses.append([float(engine.train_batch([batch(step).to(here)])) for step in range(2)])
    return losses


def test_a_weight_may_be_a_tensor_of_the_host(alone):
    on_cpu, on_device = alone(train_on_weights_of_the_host)
    assert on_device == on_cpu


# --- what is refused, and what is counted -------------------------------------------------------


def refusals():
    import torch.distributed as dist
    from instruments import accelerator, groups

    device = accelerator.register()
    found = []
    here, there = torch.ones(4), torch.ones(4).to(device)
    with groups.alike(2, device=accelerator.NAME):
        collectives = (
            lambda t: dist.all_reduce(t), lambda t: dist.broadcast(t, 0),
            lambda t: dist.all_gather(list(t.view(2, -1)), t[:2]), lambda t: dist.isend(t, 1), lambda t: dist.irecv(t, 1),
        )  # fmt: skip
        for call in (*collectives, lambda t: t + there, lambda t: torch.cat([t, there])):
            try:
                call(here)
            except RuntimeError as error:
                found.append(type(error).__name__)
            else:
                found.append(None)
        for call in (*collectives[:2], *collectives[3:], lambda t: t * torch.tensor(2.0)):  # a number may be anywhere
            call(there)
    return found


def test_a_group_of_the_device_refuses_tensors_of_the_host_and_so_do_kernels(alone):
    found = alone(refusals)
    assert found == ["WrongDevice"] * 2 + [found[2]] + ["WrongDevice"] * 2 + ["RuntimeError"] * 2
    assert found[2] is not None


def waits_of_calls():
    from instruments import accelerator, host_traffic

    device = accelerator.register()
    t, pinned, pageable = torch.arange(4.0).to(device), torch.empty(4, pin_memory=True), torch.empty(4)
    stream, event = torch.Stream(device), torch.Event(device)

    def polled():
        pinned.copy_(t, non_blocking=True)
        event.record()
        while not event.query():
            pass
        event.query()
        return pinned.tolist()

    calls = {
        "item": lambda: t[0].item(), "float": lambda: float(t[1]), "bool": lambda: bool((t > 0).any()),
        "tolist": t.tolist, "cpu": t.cpu, "to": lambda: pageable.to(device), "tensor": lambda: torch.tensor(1.0, device=device),
        "from pageable": lambda: t.copy_(pageable, non_blocking=True), "nonzero": lambda: t.nonzero(),
        "equal": lambda: torch.equal(t, t), "mask": lambda: t[t > 1], "stream": stream.synchronize,
        "all": torch.accelerator.synchronize, "polled": polled,
        "arithmetic": lambda: (t * 2 + 1).sum().sqrt().clamp(max=1.0), "zeros": lambda: torch.zeros(3, device=device),
        "full": lambda: torch.full((), 2.0, device=device), "to pinned": lambda: pinned.copy_(t, non_blocking=True),
        "from pinned": lambda: t.copy_(pinned, non_blocking=True), "lanes": lambda: stream.wait_stream(stream),
        "to cpu later": lambda: t.to("cpu", non_blocking=True), "pin": lambda: pageable.pin_memory().to(device, non_blocking=True),
    }  # fmt: skip
    early = torch.empty(4, pin_memory=True)
    assert early.copy_(t, non_blocking=True).isnan().all()
    assert polled() == early.tolist() == [0.0, 1.0, 2.0, 3.0]
    found = {}
    with host_traffic.counted() as traffic:
        for name, call in calls.items():
            traffic.clear()
            call()
            found[name] = sum(traffic.waits.values()), sum(traffic.copies.values())
    return found


def test_what_waits_for_the_device_is_counted_and_nothing_else(alone):
    found = alone(waits_of_calls)
    copies = {"tolist", "cpu", "to", "tensor", "from pageable"}
    waits = {"item", "float", "bool", "nonzero", "equal", "mask", "stream", "all"} | copies
    assert {name for name, (count, _) in found.items() if count == 1} == waits | {"polled"}
    asynchronous = {"polled", "to pinned", "from pinned", "to cpu later", "pin"}
    assert {name for name, (_, count) in found.items() if count == 1} == copies | asynchronous
    assert all(max(counts) <= 1 for counts in found.values())


# --- the contract: one read a step --------------------------------------------------------------


def waits_of_steps(hows):
    """For every engine: waits by line in the third step, phase by phase."""
    from instruments import accelerator, groups, host_traffic

    device = accelerator.register()
    with groups.alike(WORLD, device=accelerator.NAME), host_traffic.counted() as traffic, gradients_from_zero():
        return [waits_of_step(traffic, device, *how) for how in hows]


@contextmanager
def gradients_from_zero():
    """Have gaps of gradients be zero inside: what stands for other ranks' parts of a sum is this rank's, gaps included."""
    fill = Arena.fill

    def zeroed(arena, category, buffer, used=None):
        fill(arena, category, buffer, used)
        if category == "gradients":
            buffer.zero_()

    with mock.patch.object(Arena, "fill", zeroed):
        yield


def waits_of_step(traffic, device, stage, count, exact):
    engine, phases = engine_on(device, stage, count, exact), {}
    given = [batch(i).to(device) for i in range(count)]

    def during(name, call, *args):
        traffic.clear()
        result = call(*args)
        phases.setdefault(name, []).extend(f"{what} {line}" for what, line in traffic.waits.elements())
        return result

    for call in (engine.train_batch, engine.train_batch, engine.evaluate):
        call(given)
    during("train_batch", engine.train_batch, given)
    during("evaluate", engine.evaluate, given)
    for k in range(0 if exact else count):
        loss = during("forward", loss_of, engine, given[k])
        during("backward", engine.backward, loss)
        during("step" if k == count - 1 else "off the boundary", engine.step)
    return phases


HOWS = [(0, 1, False), (1, 2, False), (2, 1, False), (3, 3, False), (3, 2, True)]


@pytest.mark.parametrize("hows", [HOWS[3:4], pytest.param(HOWS, marks=pytest.mark.long)], ids=["few", "all"])
def test_a_step_reads_one_value_and_waits_for_nothing_else(alone, hows):
    for how, phases in zip(hows, alone(waits_of_steps, hows), strict=True):
        for name, waits in phases.items():
            expected = 1 if name in ("step", "train_batch") else 0
            assert len(waits) == expected, (how, name, waits)
            assert all("memory/arena.py" in wait for wait in waits), (how, name, waits)


def waits_of_a_run(folder):
    """Waits by line between the beginnings of a run's last two steps."""
    from instruments import accelerator, groups, host_traffic
    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    accelerator.register()
    steps = []
    with groups.alike(1, device=accelerator.NAME), host_traffic.counted() as traffic:

        class Counted(Progress):
            def track(self, first, last):
                for step in super().track(first, last):
                    traffic.clear()
                    yield step
                    steps.append([f"{what} {line}" for what, line in traffic.waits.elements()])

        settings = {"train": {"steps": 4, "batch": 2, "accumulate": 2}, "checkpoint": {"every": 0, "export": False}}
        run(load(tree(folder, **settings)), start("test", None, False), Counted(Console(quiet=True)))
    return steps[2]


@pytest.mark.long
def test_a_run_reads_one_value_a_step_and_waits_for_nothing_else_of_ours(alone, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    waits = alone(waits_of_a_run, tmp_path)
    ours = [wait for wait in waits if "transformers/" not in wait]
    assert len(ours) == 1, waits
    assert "memory/arena.py" in ours[0], waits


# --- gradients on the host ----------------------------------------------------------------------


def gradients_on_host(count, dtype):
    """Copies by place, and waits, of the backwards and of the step; units, and losses beside those with all resident."""
    from unittest import mock

    from instruments import accelerator, groups, host_traffic

    import zero3d
    from zero3d.offload import tiers

    device = accelerator.register()

    class Pinned(tiers.HostSlab):
        def __init__(self, *given):
            super().__init__(*given)
            for memory in self.memory.values():
                for each in memory:
                    accelerator.pin(each)

    def engine_of(**offload):
        return zero3d.Engine(
            net(), stage=2, mesh=zero3d.Mesh(device=device), precision="bf16", clip_norm=0.5, accumulate=count,
            loss=sum_of, offload={"optimizer": "host", "executor": "device", **offload},
        )  # fmt: skip

    with (
        groups.alike(2, device=accelerator.NAME), host_traffic.counted() as traffic,
        mock.patch.object(tiers, "HostSlab", Pinned),
    ):  # fmt: skip
        engine, resident, on_host = (
            engine_of(gradients="host", gradient_dtype=dtype),
            engine_of(),
            engine_of(gradients="host", gradient_dtype=dtype, executor="host"),
        )
        found = {}
        for step in range(3):
            given = [batch(10 * step + number).to(device) for number in range(count)]
            losses = [float(each.train_batch(given)) for each in (engine, resident, on_host)]
            norms = [float(each.last_step.grad_norm) for each in (engine, resident, on_host)]
            for found_there in (losses, norms):
                if dtype == "fp32":
                    assert len(set(found_there)) == 1
                assert found_there == pytest.approx([found_there[1]] * 3, rel=2**-8)
            assert min(norms) > 0.5, "nothing was clipped"
        for number in range(count):
            loss = loss_of(engine, batch(number).to(device))
            traffic.clear()
            engine.backward(loss)
            for (what, line), copies in traffic.copies.items():
                key = what, line.partition(":")[0].rpartition("/")[2]
                found[key] = found.get(key, 0) + copies
            assert not traffic.waits, traffic.table()
        engine.step()
        engine.optimizer.flush()
        return found, sum(unit.grads is not None for unit in engine.units)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [pytest.param(1, "fp32", marks=pytest.mark.long), pytest.param(3, "fp32", marks=pytest.mark.long), (3, "bf16")],
)
def test_a_reduced_shard_goes_to_the_host_once_a_backward_and_nobody_waits(alone, count, dtype):
    found, units = alone(gradients_on_host, count, dtype)
    assert units > 2
    assert found.pop(("device to host", "streams.py")) == count * units
    assert found.pop(("host to device", "gradient_shards.py"), 0) == (count - 1) * units
    assert sum(found.values()) <= 4 * units, found  # records of the next step, brought ahead
