"""One rank of a configuration, dry: the engine that `zero3d train` builds, without data, weights, values and peers.

`python -m zero3d.tools.sim.rank` is a process of its own, since torch 2.13 dies of a second pipeline after a dry step:
a Request as JSON on stdin; a RankResult on stdout, or exit code 2 and {"error": name, "text": ...}.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from zero3d.config import Config, asked_degrees, load, resolve_batch
from zero3d.data.tokenizers import check_length
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, Zero3dError
from zero3d.models.bases import config_number
from zero3d.models.build import parameters_on_meta
from zero3d.models.open import Opened
from zero3d.models.packing import check_packing, forward_options
from zero3d.models.trained import open_trained
from zero3d.pipeline.schedules import Schedule
from zero3d.precision import DTYPES
from zero3d.sequence.group import check_sequence
from zero3d.shards.boxes import Box
from zero3d.tools.plan.spec import Patches
from zero3d.tools.sim.card_autocast import lists_of_cards
from zero3d.tools.sim.group import FakeMesh, fake_group
from zero3d.tools.sim.images import TEXT_ALONE, find_images, said_of
from zero3d.tools.sim.known import KnownValues
from zero3d.tools.sim.mixer_kernels import ALL, as_kernels
from zero3d.tools.sim.observe import Observation, blank_batches, observe
from zero3d.tools.sim.orders import orders
from zero3d.tools.sim.patches import dropout_of_cards, standing_in
from zero3d.tools.sim.peers import AbsentPeers, norms_of_group
from zero3d.tools.sim.repeats import micro_batches_to_run, traffic_of_all, work_of_all
from zero3d.tools.sim.replay import peak_of, timeline_of
from zero3d.tools.sim.request import Request
from zero3d.tools.sim.result import RankResult, to_json
from zero3d.tools.sim.tiers import DryStores
from zero3d.train.setup.build import build_engine
from zero3d.train.setup.recurrences import choose_mixers, with_mixers
from zero3d.train.setup.text_part import naming_text_part

STEPS = 1000  # of the learning rate's schedule, where the configuration counts epochs


def dry_run(
    config: Config,
    rank: int,
    world: int,
    backend: str = "nccl",
    whole: bool = False,
    per_host: int | None = None,
    patches: Patches | None = None,
) -> RankResult:
    """Build this rank's engine and return its second step. Once in a process. Raises ConfigError, MeshError.

    whole     run every micro-batch, though some repeat others (repeats.py)
    per_host  ranks on each host; None: on one
    patches   of a sequence's images; None: of one image
    """
    begun = time.monotonic()
    with fake_group(rank, world), standing_in(backend, bool(config.data.packing)):
        mesh = FakeMesh(**asked_degrees(config), backend=backend, per_host=per_host)
        mesh.make_stores = partial(DryStores, on_cpu=mesh.on_cpu)
        place, m = mesh.place, resolve_batch(config.train, mesh.dp, mesh.sp).accumulate
        schedule = Schedule.of(config.mesh.schedule)
        if mesh.pp > 1:
            schedule.check(m, mesh.pp)
        fewest = micro_batches_to_run(schedule.name, mesh.pp, m, config.zero.stage)
        ran = (m, m) if whole or config.zero.exact else fewest
        step, images = _observe(config, mesh, ran, patches)
        traffic = traffic_of_all(step.first, step.traffic, ran, m, step.engine.policy.reduce)
        alike = step.alike(place.dp)
        return RankResult(
            rank,
            *place,
            alike,
            len(alike) * mesh.tp,
            step.elements,
            step.states,
            peak_of(step.log),
            timeline_of(step.log),
            traffic,
            work_of_all(step.work, ran[1], m),
            step.actions,
            orders(step.engine, schedule.name, m),
            time.monotonic() - begun,
            most_resident(),
            step.away,
            images,
        )


def _observe(config: Config, mesh: Mesh, run: tuple[int, int], patches: Patches | None) -> tuple[Observation, str]:
    """Build the engine of a configuration without data, and watch a step of `run` micro-batches (observe.py).

    The text says whether its sequences had images. Raises ConfigError for a forward that reads values.
    """
    with naming_text_part(config):
        return _observed(config, mesh, run, patches)


def _observed(config: Config, mesh: Mesh, run: tuple[int, int], patches: Patches | None) -> tuple[Observation, str]:
    batch = resolve_batch(config.train, mesh.dp, mesh.sp)
    opened = open_without_weights(config)
    check_length(config.data.length, config_number(opened.module, "max_position_embeddings"))
    if config.data.packing:
        check_packing(opened.module)
    options = forward_options(opened.module)
    images = find_images(opened.module, config.data.length, bool(config.data.packing), patches)
    said = said_of(opened.module, images)
    shape = (batch.micro_batch, config.data.length)
    health = replace(config.health, replay=0)  # values that do not exist cannot be compared
    train = replace(config.train, compile=False)
    model = replace(config.model, linear=None)
    plain = replace(config, model=model, train=train, health=health, output=config.output or "simulated")

    rows, me = norms_of_group(config, mesh, opened.module), mesh.place.pp * mesh.tp + mesh.place.tp
    if mesh.sp > 1:  # while there are values to try it with
        plain = with_mixers(plain, choose_mixers(config, opened.module, mesh).kind)
        check_sequence(opened.module, mesh.sp, mesh.tp, plain.mesh.sp_kind, plain.mesh.sp_mixers)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _forget_buffers(opened.module, fake)
        models = [opened]
        del opened  # of a pipeline's model, what is not on this rank

        def build() -> Engine:
            engine = build_engine(plain, models.pop(), mesh, batch.accumulate, config.train.steps or STEPS)
            if rows:
                engine.model_group.peers = AbsentPeers(engine.model_group.peers, rows, me)
            return engine

        def make_batches() -> list[dict[str, Any]]:
            return blank_batches(batch.accumulate, shape, bool(config.data.packing), options, images)

        kernels = () if mesh.on_cpu else ALL
        lists = lists_of_cards() if config.autocast and not mesh.on_cpu else nullcontext()
        try:
            known: Any = nullcontext() if images is None else KnownValues()
            drops = nullcontext() if mesh.on_cpu else dropout_of_cards()
            with as_kernels(models[0].module, kernels, bool(config.data.packing)), lists, known, drops:
                return observe(mesh, build, make_batches, run), said
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            tower = said == TEXT_ALONE and config.zero.stage == 3
            who = "its vision tower, which runs at every step of stage 3," if tower else "its forward"
            raise ConfigError(
                f"{config.model.path} cannot be simulated: {who} reads values of tensors ({error.func}), and a "
                f"simulation has none{': pass zero.stage=2 for text alone' * tower}."
            ) from error


def open_without_weights(config: Config) -> Opened:
    """Build the module on the meta device; nothing but a config is read. Raises ConfigError."""
    with parameters_on_meta():
        module = open_trained(replace(config, model=replace(config.model, init="random"))).module
    shapes = {name: p.dtype for name, p in module.named_parameters()}

    def weights(name: str, box: Box) -> Tensor:
        dtype = shapes.get(name, DTYPES[config.precision])
        return torch.empty([stop - start for start, stop in box], dtype=dtype)

    return Opened(module, weights)


def _forget_buffers(module: nn.Module, fake: FakeTensorMode) -> None:
    """Leave buffers their shapes only."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = fake.from_tensor(buffer)


def main(lines: Sequence[str]) -> int:
    """Answer one request."""
    request = Request(**json.loads("".join(lines)))
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no part of the answer
    try:
        patches = None if request.patches is None else Patches(*request.patches)
        asked = request.rank, request.world, request.backend, request.whole, request.per_host, patches
        answer = to_json(dry_run(load(request.config), *asked))
    except Zero3dError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    with out:
        json.dump(answer, out)
    return 2 if "error" in answer else 0


def most_resident() -> int:
    """Return the most bytes this process has had in memory. getrusage counts what its parent had when it was forked."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    code = main(sys.stdin.readlines())
    sys.stdout.flush()
    os._exit(code)  # torch's teardown of fake tensors in pipelines is not our business
