"""Which units there are: an engine and the planner find the same ones, and both know of each what it is."""

import pytest
import torch.distributed as dist
from models import adamw
from tensors import tiny
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero3d
from zero3d.blueprint.policy import Group, Policy, Ranks
from zero3d.blueprint.unit import Kind, decide
from zero3d.blueprint.units import Member, group_parameters, in_turn, lay_out
from zero3d.config import Optimizer
from zero3d.distributed.choice import NATIVE
from zero3d.distributed.unit_order import ROOT
from zero3d.optim import adamw8bit
from zero3d.spec.dtypes import BF16, FP32
from zero3d.spec.sections import Spec
from zero3d.spec.zero import Zero
from zero3d.tools.plan.rank_model import rank_model
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.model_spec import outline
from zero3d.train.setup.optimizer import parameter_groups


def model_of(name):
    """Some parameters are frozen, in adapters' model all others; some are kept in fp32 by 16-bit runs."""
    if name == "adapters":
        return tiny("llama", lora=True)
    model = tiny("moe" if name == "experts" else "qwen3" if name == "tied" else "llama")
    if name == "kept in fp32":
        model._keep_in_fp32_modules = ["norm", "post_attention_layernorm"]
    if name == "frozen":
        for name, p in model.named_parameters():
            p.requires_grad_("embed" not in name and "layers.1.mlp" not in name)
    return model


def on_a_backend(plan):
    """What a unit is where ranks that are not there are others, and their backend sums."""
    sizes = [group._replace(algorithm=NATIVE) for group in plan.ranks[:3]]
    return decide(plan.kind, plan.policy, Ranks(*sizes, *plan.ranks[3:]))


def laid_out(layout, names=None):
    """names: of its slots, where these have numbers instead."""
    names = names or [slot.name for slot in layout.slots]
    slots = [slot._replace(name=name) for slot, name in zip(layout.slots, names, strict=True)]
    return slots, layout.n, layout.copies, layout.ep, layout.shard


def of_the_engine(model, plan, rank=0):
    """Its place on the pp axis, and units in order: name, whether deferred, what the unit is, and its layout."""
    if dist.is_initialized():  # another test's, of one process
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=plan.world, store=FakeStore())
    try:
        mesh = zero3d.Mesh(dp=plan.dp, tp=plan.tp, pp=plan.pp, ep=plan.ep, shard=plan.shard)
        engine = zero3d.Engine(
            model, mesh=mesh, stage=plan.zero.stage, precision=plan.precision, accumulate=plan.accumulate,
            optimizer=adamw8bit() if plan.optimizer == "adamw8bit" else adamw, exact=plan.zero.exact,
            param_groups=parameter_groups(model, Optimizer()), gather_wire=plan.zero.gather_wire,
            slow_wire=plan.zero.slow_wire, reduce_scatter=plan.zero.reduce_scatter,
        )  # fmt: skip
        return mesh.place.pp, [(u.name, u.deferred, on_a_backend(u.plan), laid_out(u.layout)) for u in engine.units]
    finally:
        dist.destroy_process_group()


def of_the_planner(spec, plan, stage):
    units = [unit for units in rank_model(spec, plan, stage).units.values() for unit in units]
    return [(unit.name, unit.deferred, unit.plan(plan), laid_out(unit.layout, unit.names)) for unit in units]


@pytest.mark.parametrize(("name", "settings"), [
    ("llama", {"stage": 1, "precision": "fp32"}),
    ("tied", {"dp": 4, "tp": 2}),
    ("frozen", {"dp": 8, "shard": 2, "slow_wire": "int8", "stage": 2}),
    ("adapters", {"dp": 2, "optimizer": "adamw8bit", "accumulate": 2}),
    ("kept in fp32", {"dp": 4, "gather_wire": "int8"}),
    ("kept in fp32", {"stage": 2, "precision": "fp32"}),
    ("experts", {"dp": 8, "ep": 2, "tp": 2}),
    ("experts", {"dp": 2, "exact": True, "accumulate": 2}),
    ("tied", {"dp": 2, "pp": 2, "accumulate": 2}),
])  # fmt: skip
def test_an_engine_and_a_plan_have_the_same_units(name, settings):
    plan = ParallelPlan(**{"reduce_scatter": "native"} | settings)
    spec = outline(model_of(name), 8)
    for rank in {0, plan.world - 1}:
        stage, found = of_the_engine(model_of(name), plan, rank)
        assert found == of_the_planner(spec, plan, stage)


def test_units_of_a_module_are_named_by_what_they_differ_in():
    trained, frozen, wide = Kind(BF16), Kind(BF16, trainable=False), Kind(FP32)
    members = [Member(n, owner, kind) for n, (owner, kind) in enumerate([
        ("one", trained), ("one", trained._replace(experts=True)), ("one", trained), ("two", frozen), ("two", wide),
        ("three", trained._replace(experts=True)), ("three", frozen._replace(experts=True)), ("three", frozen),
    ])]  # fmt: skip
    assert [(unit.name, unit.parameters) for unit in group_parameters(members)] == [
        ("one", [0, 2]), ("one/experts", [1]), ("two/frozen-bf16", [3]), ("two/trainable-fp32", [4]),
        ("three/experts/trainable-bf16", [5]), ("three/experts/frozen-bf16", [6]), ("three", [7]),
    ]  # fmt: skip


def test_what_token_ids_are_looked_up_in_is_the_first_unit_wherever_it_is():
    members = [
        Member("tower", "vision", Kind(BF16)),
        Member("table", "embed", Kind(BF16), first=True),
        Member("norm", "embed", Kind(BF16)),
    ]
    assert [unit.owner for unit in group_parameters(members)] == ["embed", "vision"]


def test_the_roots_units_and_those_with_tied_parameters_are_deferred_and_needed_first():
    members = [
        Member("norm", "block", Kind(BF16)),
        Member("table", "embed", Kind(BF16), tied=True),
        Member("bias", "embed", Kind(BF16)),
        Member("adapter", "embed", Kind(FP32)),
        Member("scale", ROOT, Kind(BF16)),
    ]
    units = group_parameters(members)
    assert [unit.deferred for unit in units] == [False, True, False, True]
    assert [unit.parameters for unit in in_turn(units)] == [["table", "bias"], ["scale"], ["norm"], ["adapter"]]


def test_a_layout_has_shards_for_all_ranks_and_copies_and_cuts_no_block_of_optimizer_or_message():
    """1,000 parameters in 1,024 elements: the next multiple of 3 or 6 x 16 is 1,056, and of 3 x 256 is 1,536."""
    plain, coded = (Policy.of(Spec(Zero(3, gather_wire=wire))) for wire in ("same", "int8"))
    three = Ranks(Group(3))

    def laid(policy, ranks, block=16):
        layout = lay_out([("weight", (1000,), 0)], Kind(BF16), policy, ranks, block)
        return layout.total, layout.n, layout.copies

    assert laid(plain, three) == (1056, 3, 1)
    assert laid(plain, three._replace(copies=Group(2))) == (1056, 3, 2)
    assert laid(plain, three, 256) == laid(coded, three) == (1536, 3, 1)
    ranks = Ranks(Group(4), Group(2), Group(2), ep=2)
    experts = lay_out([("up", (8, 64, 64), 0)], Kind(BF16, experts=True), plain, ranks, 16)
    assert (experts.n, experts.copies, experts.ep) == (2, 2, 2)
    assert [experts.rank_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
