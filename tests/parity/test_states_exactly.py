"""Model states: what the planner computes from a model's outline, what the engine plans, what it holds. To the byte.

Random small configurations of stage, degrees, dtype, tied and frozen parameters, from a list with a seed; on a fake
group every rank class of a mesh up to 64 ranks, on gloo some of up to four ranks, after a step.
"""

import random

import pytest
import torch
import torch.distributed as dist
from models import adamw, fill_gradients, planned_bytes
from tensors import tiny
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero3d
from zero3d.config import Optimizer
from zero3d.memory.arena import STATES
from zero3d.optim import muon
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.states import states
from zero3d.tools.sim.model_spec import outline
from zero3d.train.setup.optimizer import parameter_groups

FAMILIES = ("llama", "qwen3", "gpt2", "moe")
MESHES = (
    (1, 1, 1),
    (2, 1, 1),
    (4, 2, 1),
    (8, 1, 4),
    (2, 4, 2),
    (3, 2, 2),
    (64, 1, 1),
    (16, 4, 1),
    (5, 1, 2),
)  # dp, tp, pp
SMALL = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 2), (3, 1, 1))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
FROZEN = ("nothing", "embedding", "half of the blocks", "all but adapters")


def cases(count, meshes, seed):
    """(family, frozen, plan), drawn."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        dp, tp, pp = draw.choice(meshes)
        stage = draw.choice((0, 1, 2, 3))
        plan = ParallelPlan(
            dp=dp, tp=tp, pp=pp, stage=stage, accumulate=draw.choice((1, 2)) if pp == 1 else pp,
            precision=draw.choice(("bf16", "bf16", "fp16", "fp32", "fp64")), schedule=draw.choice(SCHEDULES),
            release=draw.choice(("auto", "every_use", "every_step")),
            reduce=draw.choice(("auto", "every_step")),
        )  # fmt: skip
        family, frozen = draw.choice(FAMILIES), draw.choice(FROZEN)
        if (family, frozen) != ("moe", "all but adapters"):  # PEFT writes to fused experts, which the engine refuses
            found.append((family, frozen, plan))
    return found


def model_of(family, frozen, pp):
    """Blocks large enough that several ranks share one; frozen parameters beside trainable ones in one unit's owner."""
    sizes = {} if family == "gpt2" else {"intermediate_size": 1024}
    model = tiny(family, kv_heads=4, layers=max(4, 2 * pp), lora=frozen == "all but adapters", **sizes)
    for name, p in model.named_parameters():
        if frozen == "embedding" and ("embed_tokens" in name or "wte" in name):
            p.requires_grad_(False)
        if frozen == "half of the blocks" and any(f".{i}." in name for i in (0, 2, 4, 6)) and p.dim() > 1:
            p.requires_grad_(False)
    return model


def engine_of(family, frozen, plan):
    model = model_of(family, frozen, plan.pp)
    return zero3d.Engine(
        model, stage=plan.zero.stage, mesh=zero3d.Mesh(dp=plan.dp, tp=plan.tp, pp=plan.pp), precision=plan.precision,
        optimizer=adamw, param_groups=parameter_groups(model, Optimizer()), accumulate=plan.accumulate,
        release=plan.zero.release, reduce=plan.zero.reduce, schedule=plan.schedule if plan.pp > 1 else None, exact=plan.zero.exact, master=plan.zero.master,
    )  # fmt: skip


def held(engine):
    return [engine.arena.held(category) for category in STATES]


def computed(spec, plan, place):
    found = states(spec, plan, place.pp, place.dp)
    return [*found.states, found.padding]


def on_fake_ranks(family, frozen, plan, ranks):
    """[(place, held, planned without padding)] of some ranks of a mesh that is not there."""
    found = []
    for rank in ranks:
        if dist.is_initialized():  # another test's, of one process
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=plan.world, store=FakeStore())
        try:
            engine = engine_of(family, frozen, plan)
            fill_gradients(engine)
            found.append((engine.mesh.place, held(engine), list(planned_bytes(engine))))
        finally:
            dist.destroy_process_group()
    return found


def check_on_fake_ranks(family, frozen, plan):
    spec = outline(model_of(family, frozen, plan.pp), 8)
    drawn = {0, plan.world - 1, random.Random(plan.world).randrange(plan.world)}
    for place, arena, planned in on_fake_ranks(family, frozen, plan, sorted(drawn)):
        assert computed(spec, plan, place) == arena, (place, plan)
        if plan.dp - 1 > place.dp:  # the last ranks may have padding only, without m and v
            assert planned == arena[:3]


def often(count, chosen):
    """Cases of which those with these numbers run often."""
    return [case if n in chosen else pytest.param(*case, marks=pytest.mark.long) for n, case in enumerate(count)]


@pytest.mark.parametrize(("family", "frozen", "plan"), often(cases(6, MESHES, 1), (0, 1, 3)))
def test_states_of_fake_ranks(family, frozen, plan):
    check_on_fake_ranks(family, frozen, plan)


@pytest.mark.long
@pytest.mark.parametrize(("family", "frozen", "plan"), cases(50, MESHES, 2))
def test_states_of_many_fake_ranks(family, frozen, plan):
    check_on_fake_ranks(family, frozen, plan)


def after_a_step(family, frozen, plan):
    """(place, held) of this rank."""
    engine = engine_of(family, frozen, plan)
    ids = torch.arange(2 * 8).view(2, 8) % 60
    engine.train_batch([{"input_ids": ids, "labels": ids}] * plan.accumulate)
    return engine.mesh.place, held(engine)


def check_on_gloo(ranks, family, frozen, plan):
    spec = outline(model_of(family, frozen, plan.pp), 8)
    for place, arena in ranks(plan.world, after_a_step, family, frozen, plan):
        assert computed(spec, plan, place) == arena, (place, plan)


@pytest.mark.parametrize(("family", "frozen", "plan"), often(cases(6, SMALL, 3), (0, 5)))
def test_states_of_gloo_ranks(ranks, family, frozen, plan):
    check_on_gloo(ranks, family, frozen, plan)


@pytest.mark.long
@pytest.mark.parametrize(("family", "frozen", "plan"), cases(20, SMALL, 4))
def test_states_of_many_gloo_ranks(ranks, family, frozen, plan):
    check_on_gloo(ranks, family, frozen, plan)


@pytest.mark.parametrize("dp", [4, pytest.param(16, marks=pytest.mark.long)])
def test_records_of_a_rank_whose_shards_are_padding_have_room_for_all_of_muons_states(dp):
    model = tiny("llama", kv_heads=4, layers=2)
    spec, plan = outline(model, 8), ParallelPlan(dp=dp, stage=2, optimizer="muon", offload="host")
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=dp - 1, world_size=dp, store=FakeStore())
    try:
        mesh = zero3d.Mesh(dp=dp)
        engine = zero3d.Engine(
            model, mesh=mesh, stage=2, precision="bf16", optimizer=muon(lr=0.1), offload={"optimizer": "host"}
        )
        assert not any(unit.layout.pieces(dp - 1) for unit in engine.units)
        held = {entry.category: entry.planned for entry in engine.memory if entry.place == "host" and entry.planned}
    finally:
        dist.destroy_process_group()
    found = states(spec, plan, dp_rank=dp - 1, device="cpu").at("host").by_category
    assert {category: size for category, size in found.items() if size} == held


EXACT = [
    pytest.param(ParallelPlan(dp=4, stage=3, accumulate=3, exact=True), marks=pytest.mark.long),
    ParallelPlan(dp=2, stage=2, accumulate=8, exact=True, reduce="every_step"),
    pytest.param(ParallelPlan(dp=2, stage=1, exact=True), marks=pytest.mark.long),
    pytest.param(ParallelPlan(dp=2, stage=0, accumulate=4, exact=True, precision="fp32"), marks=pytest.mark.long),
    ParallelPlan(dp=2, pp=2, stage=3, accumulate=2, exact=True),
]


@pytest.mark.parametrize("plan", EXACT, ids=lambda plan: f"dp{plan.dp}-pp{plan.pp}-stage{plan.zero.stage}")
def test_states_of_exact_mode_on_gloo_ranks(ranks, plan):
    check_on_gloo(ranks, "llama", "half of the blocks", plan)


def test_states_of_exact_mode_on_fake_ranks():
    check_on_fake_ranks("qwen3", "nothing", ParallelPlan(dp=64, stage=3, accumulate=7, exact=True))
    check_on_fake_ranks("llama", "embedding", ParallelPlan(dp=4, tp=2, pp=2, accumulate=8, exact=True))


SPLIT = [
    ("qwen3", "half of the blocks", ParallelPlan(dp=16, tp=4, stage=1, master="split")),
    ("gpt2", "nothing", ParallelPlan(dp=5, pp=2, stage=0, accumulate=4, schedule="zbv", master="split")),
]


@pytest.mark.parametrize(("family", "frozen", "plan"), SPLIT)
def test_states_with_split_masters_on_fake_ranks(family, frozen, plan):
    check_on_fake_ranks(family, frozen, plan)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_states_with_split_masters_on_gloo_ranks(ranks, tp):
    check_on_gloo(ranks, "llama", "embedding", ParallelPlan(dp=2, tp=tp, stage=3, accumulate=2, master="split"))
