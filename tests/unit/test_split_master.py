"""Masters in halves on one rank: their bits, whoever updates, reads or writes them, their bytes, and what is refused."""

import math

import pytest
import torch
from buckets import buckets_of
from by_hand import model_of
from models import adamw, batch, build, loss_of
from torch import nn

import zero3d
from zero3d.account.states import engine_bytes, paper_bytes
from zero3d.blueprint.layout import Piece
from zero3d.memory.scratch import update_bucket, update_scratch
from zero3d.precision import joined
from zero3d.tools.plan.emit import plan_of, train_config
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.memory import Ranks
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.states import states
from zero3d.tools.plan.time import Pace, step_seconds
from zero3d.zero.masters import Masters

BOTH = ("fp32", "split")
OPTIMIZERS = {
    "AdamW, fused": adamw,
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False, fused=False),
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=True),
    **{
        name: lambda params, name=name: getattr(torch.optim, name)(params, lr=1e-2)
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
    },
}


class Counting(torch.optim.SGD):
    """Counts its steps where its options are, as some optimizers do, and takes smaller ones the longer it runs."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


def trained(optimizer, master, steps=3, **options):
    engine = zero3d.Engine(
        build("net", width=40), precision="bf16", optimizer=optimizer, master=master, clip_norm=0.5, **options
    )
    for number in range(steps):
        engine.backward(loss_of(engine, batch(number)))
        assert engine.step().applied
    return engine


@pytest.mark.parametrize("optimizer", [
    pytest.param(name, marks=() if name in ("AdamW, amsgrad", "NAdam", "Rprop", "SGD") else pytest.mark.long)
    for name in OPTIMIZERS
])  # fmt: skip
def test_every_elementwise_optimizer_of_torch_gives_the_same_bits(optimizer):
    with buckets_of(1024):
        stored, split = (trained(OPTIMIZERS[optimizer], master) for master in BOTH)
    assert split.fingerprint() == stored.fingerprint()
    assert len(split.optimizer.pieces) > len(stored.optimizer.pieces), "pieces were cut"


def test_an_optimizer_that_counts_its_steps_in_its_options_counts_steps_and_not_buckets():
    with buckets_of(1024):
        stored, split = (trained(Counting, master) for master in BOTH)
    assert [group["steps"] for group in split.optimizer.torch.param_groups] == [3]
    assert split.fingerprint() == stored.fingerprint()


def test_each_part_of_a_piece_has_had_as_many_steps_and_no_gradient_is_left():
    with buckets_of(48):
        engine = trained(adamw, "split")
    states = engine.optimizer.torch.state
    assert {float(states[owned.master]["step"]) for owned in engine.optimizer.pieces} == {3.0}
    for owned in engine.optimizer.pieces:
        assert owned.master.grad is None
        assert owned.master.isnan().all(), "a master exists during its update only"
    given = engine.optimizer.torch.param_groups[0]["params"]
    assert [id(p) for p in given] == [id(owned.master) for owned in engine.optimizer.pieces]


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "numel", "parts"), [
    (0, 64, [(0, 64)]), (0, 65, [(0, 64), (64, 65)]), (60, 1, [(60, 61)]), (63, 2, [(63, 64), (64, 65)]),
    (64, 64, [(64, 128)]), (100, 100, [(100, 128), (128, 192), (192, 200)]), (199, 1, [(199, 200)]),
])  # fmt: skip
def test_a_piece_is_cut_at_the_borders_of_buckets(offset, numel, parts):
    with buckets_of(64):
        remainder = torch.zeros(200, dtype=torch.int16)
        masters = Masters.on_device(torch.zeros(200, dtype=torch.bfloat16), torch.float32, remainder)
        found = list(masters.parts(Piece(3, 1000, 1000 + numel, offset)))
    assert [(part.offset, part.offset + len(tensor)) for part, tensor in found] == parts
    assert [(part.slot, part.start - 1000, part.stop - 1000) for part, _ in found] == [
        (3, low - offset, high - offset) for low, high in parts
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_buckets_are_cut_where_vectors_of_kernels_end(device):
    assert update_bucket(device) % 256 == 0
    assert update_bucket(device) <= 1 << 24


class Odd(nn.Module):
    """Parameters of one element, of more than a bucket, many small ones, and one that no gradient reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.one = nn.Parameter(torch.randn(1))
        self.large = nn.Parameter(torch.randn(3, 1111))
        self.small = nn.ParameterList(nn.Parameter(torch.randn(1 + i % 3)) for i in range(120))
        self.unused = nn.Parameter(torch.randn(17))

    def forward(self, x):
        return x * self.one + self.large.square().mean() + sum(p.sum() for p in self.small).cos()


def test_parameters_of_any_size_are_updated_alike():
    found = []
    for master in BOTH:
        with buckets_of(1024):
            engine = zero3d.Engine(Odd(), stage=2, optimizer=adamw, master=master, clip_norm=0.01)
            for number in range(2):
                engine.backward(engine(torch.full((2,), 1.0 + number, dtype=torch.bfloat16)).float().sum())
                assert engine.step().applied
        found.append(engine.fingerprint())
    assert found[0] == found[1]


# --- whoever reads and writes ---------------------------------------------------------------------

KEPT = [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "release": "every_step"}]


@pytest.mark.parametrize("options", KEPT, ids=str)
def test_reading_whole_parameters_changes_no_bit_and_costs_a_copy_of_the_weights_while_it_lasts(options):
    engine = trained(adamw, "split", **options)
    before = engine.fingerprint()
    with engine.full_params(), torch.no_grad():
        assert engine.arena.live("gathered") == sum(2 * unit.layout.total for unit in engine.units)
        for p in engine.module.parameters():
            p.mul_(1)
    assert engine.fingerprint() == before
    assert engine.arena.live("gathered") == 0


@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=pytest.mark.long if options["stage"] < 3 else ()) for options in KEPT],
    ids=str,
)
def test_what_is_written_into_parameters_changes_the_masters_that_differ_and_no_other(options, tmp_path):
    found = []
    for master in BOTH:
        engine = trained(adamw, master, **options)
        with engine.full_params(), torch.no_grad():
            head = engine.module.head.weight
            head[0].fill_(0.125)
            head[1].mul_(1)
            head[2, 3] = math.nan
            engine.module.norm.weight.copy_(engine.module.norm.weight.clone())
            inside = engine.fingerprint()
        found.append((inside, engine.fingerprint()))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_checkpoint_written_inside_full_params_has_the_masters_of_before(tmp_path):
    engine = trained(adamw, "split", stage=1)
    before = engine.fingerprint()
    with engine.full_params(), torch.no_grad():
        engine.module.head.weight.fill_(0.125)
        saved = engine.save(tmp_path)
    engine.load(saved)
    assert engine.fingerprint() == before


def test_a_master_that_is_nan_stays_one_and_so_does_its_weight():
    losses = []
    for master in BOTH:
        engine = zero3d.Engine(build("net"), stage=2, optimizer=adamw, master=master)
        with engine.full_params(), torch.no_grad():
            engine.module.embed.weight[60] = math.nan
        before = engine.fingerprint()
        losses.append([float(loss_of(engine, ids).detach()) for ids in (batch(0) % 50 + 3, torch.full((1, 5), 60))])
        owned = next(owned for owned in engine.optimizer.pieces if owned.name == "embed.weight")
        assert joined(owned.read()).view(61, -1).isnan().any(1).nonzero().tolist() == [[60]]
        with engine.full_params():
            pass
        assert engine.fingerprint() == before
    assert losses[0][0] == losses[1][0]
    assert math.isnan(losses[0][1])
    assert math.isnan(losses[1][1])


def test_weights_are_the_casts_of_masters():
    engine = trained(adamw, "split", stage=3)
    weights = [unit.weights for unit in engine.units]
    assert all(each.masters.split for each in weights)
    for each in weights:
        masters = joined(each.masters.read(0, each.shard.numel()))
        assert torch.equal(each.shard, zero3d.precision.to_compute(masters, torch.bfloat16))
        assert not torch.equal(each.shard.float(), masters)


class Kept(nn.Module):
    """A model one of whose parts stays in fp32."""

    _keep_in_fp32_modules = ("gate",)

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.up, self.gate = nn.Linear(24, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.gate(self.up(x).float()).square().mean()


def test_units_that_stay_in_fp32_are_their_own_masters():
    found = []
    for master in BOTH:
        engine = zero3d.Engine(Kept(), stage=2, optimizer=adamw, master=master)
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 24)))
            assert engine.step().applied
        found.append(engine.fingerprint())
    assert found[0] == found[1]
    assert {unit.dtype: unit.weights.masters.stored for unit in engine.units}[torch.float32] is None
    assert {unit.dtype: unit.weights.masters.stored.dtype for unit in engine.units if unit.dtype != torch.float32} == {
        torch.bfloat16: torch.int16
    }


# --- bytes ----------------------------------------------------------------------------------------


def test_a_parameter_has_two_bytes_less():
    assert paper_bytes(0, 10**9, 1, k=2 + 8).total == 14 * 10**9
    for stage in range(4):
        assert engine_bytes(stage, 1).total - engine_bytes(stage, 1, optimizer=2 + 8).total == 2
    assert engine_bytes(3, 1, optimizer=2 + 8).total == 16


@pytest.mark.parametrize("stage", [0, 3])
def test_the_arena_holds_what_the_formula_says_and_a_bucket_of_scratch(stage):
    with buckets_of(1024):
        engine = trained(adamw, "split", stage=stage)
    held = {entry.category: entry for entry in engine.memory}
    params = sum(unit.layout.numel for unit in engine.units)
    assert held["optimizer"].measured == held["optimizer"].planned == 10 * params
    assert held["padding"].measured == held["padding"].planned
    assert held["wire"].peak == 4 * 1024
    engine.arena.reset_peaks()
    assert {entry.category: entry.peak for entry in engine.memory} == {
        category: entry.now for category, entry in held.items()
    }
    gradients = held["gradients"]
    assert (gradients.now, gradients.measured, gradients.peak) == (0, gradients.planned, gradients.planned)


def test_the_planner_counts_it_and_a_bucket_instead_of_the_scratch_of_casts():
    given = {"zero": {"master": "split", "stage": 1}, "train": {"batch": 2, "micro_batch": 1}, "mesh": {"dp": 2}}
    plan = plan_of(zero3d.config.load(given), None)
    assert plan.zero.master == "split"
    assert train_config(model_of(), plan, "model", None)["zero"]["master"] == "split"
    stored = plan.replace(master="fp32")
    assert "master" not in train_config(model_of(), stored, "model", None)["zero"]
    share = model_of().trainable / 2
    assert states(model_of(), stored).states.optimizer - states(model_of(), plan).states.optimizer == 2 * share
    assert [Ranks(model_of(), each, (0,))._holding.step.wire for each in (stored, plan)] == [2 * 4 * share, 4 * share]
    assert update_scratch(10**9, "cuda") == update_bucket("cuda")
    seconds = [
        step_seconds(model_of(), each, cluster("a100-80", 2), Pace({})).parts["optimizer"] for each in (stored, plan)
    ]
    assert seconds[0] < seconds[1] < 2 * seconds[0]


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"precision": "fp32"}, r"master='split' stores .* and precision='fp32' has no bf16 weights: type precision='bf16', or master='fp32'\."),
    ({"precision": "fp64"}, r"master='split' stores .* and precision='fp64' has no bf16 weights"),
    ({"precision": "fp16"}, r"master='split' stores .* and precision='fp16' has no bf16 weights"),
    ({"master": "halves"}, r"master='halves' is unknown: type one of fp32, split\."),
])  # fmt: skip
def test_what_cannot_be_split_is_refused_before_anything_is_allocated(options, message):
    model = build("net")
    with pytest.raises(zero3d.ConfigError, match=message):
        zero3d.Engine(model, **{"master": "split"} | options)
    zero3d.Engine(model, precision="fp32")  # it was not touched


def test_a_plan_that_cannot_be_split_is_refused():
    with pytest.raises(zero3d.ConfigError, match=r"zero\.master=split stores .* and precision=fp16"):
        states(model_of(), ParallelPlan(master="split", precision="fp16"))


def test_a_configuration_that_cannot_be_split_is_refused_before_workers_start():
    with pytest.raises(
        zero3d.ConfigError,
        match=r"zero\.master=split stores .* precision=fp16 has no bf16 weights: type precision=bf16, or",
    ):
        zero3d.config.load(None, ["zero.master=split", "precision=fp16"])
