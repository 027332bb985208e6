"""Two-level dp: states cut over some neighbours and repeated over the others give what one dp axis does."""

import copy

import meshes
import mixtures
import pytest
import torch
from deep import deep
from models import LiftCasts, adamw, batch, bits, hf, loss_of, train_plain
from pipelines import covering
from tensors import assert_near
from torch.utils.checkpoint import checkpoint

import zero3d
from zero3d.account.traffic import Levels, Moved, step_traffic
from zero3d.activations.recomputation import recompute
from zero3d.checkpoint.state import state_pieces
from zero3d.config import Lora
from zero3d.distributed.unit_order import IN_FLIGHT
from zero3d.engine.state import engine_state
from zero3d.models.adapters import add_adapters
from zero3d.models.open import Opened
from zero3d.zero.tokens import count_gathers

WORLD, STEPS = 4, 2
SHARDS = (1, 2, 4)
STAGES = ((0, "every_step"), (1, "every_step"), (2, "every_micro_batch"), (3, "every_micro_batch"), (3, "every_step"))
SETTINGS = (SHARDS, STAGES, (1, 2), (0.05, None), ("none", "full"))  # micro-batches of a rank, clipping, recomputation
CASES = covering(SETTINGS, lambda case: True)


def curve(shard, stage, accumulate=1, clip=None, activations="none", precision="fp64", **options):
    """Losses, norms and a hash of the weights of a few steps of one engine on all ranks."""
    (number, reduce), rank = stage, torch.distributed.get_rank()
    model = hf("llama")
    recompute(model, activations)
    engine = zero3d.Engine(
        model, mesh=zero3d.Mesh(shard=shard), stage=number, reduce=reduce, accumulate=accumulate, clip_norm=clip,
        precision=precision, optimizer=adamw, **options,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        for k in range(accumulate):
            loss = loss_of(engine, batch(step, accumulate * rank + k))
            engine.backward(loss)
            losses.append(float(loss.detach()))
        norms.append(float(engine.step().grad_norm))
    with engine.full_params():
        weights = bits(engine.module.parameters())
        values = torch.cat([p.detach().double().flatten() for p in engine.module.parameters()])
    return losses, norms, weights, values


def curves(cases, precision="fp64"):
    with LiftCasts():
        return [curve(*case, precision=precision) for case in cases]


def reference(accumulate, clip):
    """The same of one process that has all micro-batches."""
    model = hf("llama")
    for p in model.parameters():
        p.data = p.data.double()
    with LiftCasts():
        given = [[batch(step, k) for k in range(WORLD * accumulate)] for step in range(STEPS)]
        _, norms = train_plain(model, given, clip)
    return norms, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "cases", [CASES[2:3], pytest.param(CASES[:2] + CASES[3:], marks=pytest.mark.long)], ids=["some", "rest"]
)
def test_all_shards_train_as_one_process_does_in_float64(ranks, cases):
    found = ranks(WORLD, curves, cases)
    known = {}
    for number, (shard, stage, accumulate, clip, _) in enumerate(cases):
        wanted = known.setdefault((accumulate, clip), reference(accumulate, clip))
        for of_rank in found:
            _, norms, weights, values = of_rank[number]
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(wanted[0]), rtol=1e-10, atol=0)
            torch.testing.assert_close(values, wanted[1], rtol=1e-8, atol=1e-10)
            assert weights == found[0][number][2], (shard, stage, "ranks differ")


# --- sums over copies, and gradients that come behind them ---------------------------------------


def behind(engine, step, way):
    """A step whose sums over copies have begun when more gradients come."""
    rank = torch.distributed.get_rank()
    if way == "twice through one forward":
        half = loss_of(engine, batch(step, rank)) / 2
        half.backward(retain_graph=True)
        half.backward()
        return
    for k in range(3 if way == "put off" else 2):
        loss = loss_of(engine, batch(step, (3 if way == "put off" else 2) * rank + k))
        if way == "put off" and k:
            engine.backward(loss, last=k == 2)
        else:
            loss.backward()


BEHIND = {"twice through one forward": 1, "one micro-batch more": 2, "put off": 3}  # micro-batches of a rank


def come_late(shard, stage, options, ways):
    """Norms and weights of steps by way, and how often units were summed over copies in one of them."""
    found = {}
    for way in ways:
        with LiftCasts():
            engine = zero3d.Engine(
                hf("llama"), mesh=zero3d.Mesh(shard=shard), stage=stage[0], reduce=stage[1], precision="fp64",
                optimizer=adamw, clip_norm=0.05, **copy.deepcopy(options),
            )  # fmt: skip
            norms = []
            for step in range(STEPS):
                behind(engine, step, way)
                norms.append(float(engine.step().grad_norm))
        with engine.full_params():
            values = torch.cat([p.detach().double().flatten() for p in engine.module.parameters()])
        sums = sum(e.calls for e in engine.traffic if e.op == "all_reduce") / len(engine.units) / STEPS
        left = [engine.arena.live(category) for category in ("bucket", "wire")]
        found[way] = norms, values, sums, left
        engine.close()
    return found


HOST = {"offload": {"optimizer": "host", "gradients": "host"}}
LATE = [
    *((shard, stage, {}) for shard, stage in [(1, STAGES[0]), (1, STAGES[1]), (1, STAGES[2]), (2, STAGES[0]),
                                              (2, STAGES[1]), (2, STAGES[3]), (2, STAGES[4])]),
    (1, STAGES[3], HOST), (2, STAGES[2], HOST),
]  # fmt: skip


@pytest.mark.parametrize(("shard", "stage", "options", "ways"), [
    (2, STAGES[3], {}, ["twice through one forward"]), (1, (2, "every_step"), {}, ["put off"]),
    *(pytest.param(*case, list(BEHIND), marks=pytest.mark.long) for case in LATE),
], ids=str)  # fmt: skip
def test_gradients_behind_the_sums_over_copies_give_the_step_of_one_process(ranks, shard, stage, options, ways):
    for of_rank in ranks(WORLD, come_late, shard, stage, options, ways):
        for way, (norms, values, sums, left) in of_rank.items():
            wanted, whole = reference(BEHIND[way], 0.05)
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(wanted), rtol=1e-10, atol=0)
            torch.testing.assert_close(values, whole, rtol=1e-8, atol=1e-10)
            assert sums == 2, "once, and the late ones once more"
            assert left == [0, 0]


class Twice(torch.nn.Module):
    """Blocks that run twice each, in checkpoints whose backwards give all of a block's gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            for _ in range(2):
                x = x + torch.tanh(checkpoint(block, x, use_reentrant=True))
        return x.square().mean()


def given_to(rank):
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(rank)).double().requires_grad_()


def run_twice(shard, stage):
    rank, model = torch.distributed.get_rank(), Twice()
    engine = zero3d.Engine(
        model, mesh=zero3d.Mesh(shard=shard), stage=stage[0], reduce=stage[1], precision="fp64", units=["blocks.*"],
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0), clip_norm=None,
    )  # fmt: skip
    engine.backward(engine(given_to(rank)))
    engine.step()
    with engine.full_params():
        return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize(("shard", "stage"), [
    (2, STAGES[3]), *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, STAGES[1]), (1, STAGES[2])]),
], ids=str)  # fmt: skip
def test_blocks_whose_gradients_come_twice_in_the_last_backward_give_the_step_of_one_process(ranks, shard, stage):
    whole = Twice().double()
    for rank in range(WORLD):
        (whole(given_to(rank)) / WORLD).backward()
    wanted = [p.detach() - p.grad for p in whole.parameters()]
    for found in ranks(WORLD, run_twice, shard, stage):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def order_of_sums(stage, accumulate):
    """What is begun and waited for in each backward of a second step, and at its boundary."""
    rank, model = torch.distributed.get_rank(), deep("llama", layers=8)
    engine = zero3d.Engine(
        model, mesh=zero3d.Mesh(shard=2), stage=stage[0], reduce=stage[1], precision="fp32", accumulate=accumulate,
        optimizer=adamw,
    )  # fmt: skip
    log, parts = [], []
    for side in (engine.reductions._side, engine.reductions._across):
        side._log = log
    for step in range(STEPS):
        parts.clear()
        for k in range(accumulate):
            engine.backward(loss_of(engine, batch(step, accumulate * rank + k)))
            parts.append(list(log))
            log.clear()
        engine.step()
        parts.append([what for what in log if what[0].startswith("copies")])
        log.clear()
    return parts, len([unit for unit in engine.units if unit.grads is not None])


@pytest.mark.parametrize(("stage", "accumulate"), [
    (STAGES[3], 2), *(pytest.param(*case, marks=pytest.mark.long) for case in [(STAGES[1], 1), (STAGES[4], 2)])
], ids=str)  # fmt: skip
def test_all_but_the_last_sums_over_copies_begin_before_the_last_reduction_of_the_step(ranks, stage, accumulate):
    for parts, units in ranks(WORLD, order_of_sums, stage, accumulate):
        *earlier, last, boundary = parts
        assert not any(what.startswith("copies") for part in earlier for what, _ in part)
        assert boundary == []
        reduced = [unit for what, unit in last if what == "reduce.join"]
        summed = [unit for what, unit in last if what == "copies.join"]
        assert summed == reduced
        assert len(summed) == units
        before = last[: max(place for place, (what, _) in enumerate(last) if what == "reduce.issue")]
        assert len([unit for what, unit in before if what == "reduce.join"]) == units - IN_FLIGHT
        assert len([unit for what, unit in before if what == "copies.join"]) == units - 2 * IN_FLIGHT


# --- bits -----------------------------------------------------------------------------------------


def by_stage(shard, moments):
    return [curve(shard, stage, 2, 0.05, precision="fp32")[:3] for stage in moments]


SOME = (STAGES[0], STAGES[4], STAGES[3])  # two that reduce once a step, and one that does so more often


@pytest.mark.parametrize(("shard", "moments"), [
    (2, SOME), *(pytest.param(shard, [*STAGES, (2, "every_step")], marks=pytest.mark.long) for shard in (1, 2)),
], ids=str)  # fmt: skip
def test_stages_that_reduce_at_the_same_moments_have_the_same_bits(ranks, shard, moments):
    per_step = [place for place, (_, reduce) in enumerate(moments) if reduce == "every_step"]
    found = ranks(WORLD, by_stage, shard, moments)
    for of_rank in found:
        once, each = ([of_rank[i] for i in range(len(moments)) if (i in per_step) is often] for often in (True, False))
        assert all(result == once[0] for result in once)
        assert all(result == each[0] for result in each)
        assert (once[0] != each[0]) == (shard > 1), "one rank's shard adds up as it does"
    assert len({of_rank[0][2] for of_rank in found}) == 1


def engine_of(stage, exact=True, **degrees):
    options = {"ep": 1} | degrees
    reduce, mesh = stage[1], zero3d.Mesh(**options)
    return zero3d.Engine(
        mixtures.mixture(), mesh=mesh, stage=stage[0], reduce=reduce, exact=exact, precision="fp32",
        optimizer=mixtures.adamw, clip_norm=0.05, accumulate=mixtures.SUMMANDS // mesh.dp,
    )  # fmt: skip


def exactly(cases):
    return [mixtures.curve(engine_of(stage, **degrees), range(2)) for stage, degrees in cases]


SHAPES = [(stage, {"shard": shard}) for stage in STAGES for shard in (1, 2)]
OF_EXPERTS = [
    (STAGES[3], {"shard": 2, "ep": 2}),
    (STAGES[0], {"shard": 2, "ep": 2}),
    (STAGES[2], {"shard": 4, "ep": 2}),
]


@pytest.mark.long
@pytest.mark.parametrize("cases", [
    OF_EXPERTS[:1], pytest.param(SHAPES + OF_EXPERTS, marks=pytest.mark.long)
], ids=["some", "all"])  # fmt: skip
def test_exact_curves_are_those_of_one_rank(ranks, cases):
    alone = ranks(1, exactly, [((3, "auto"), {})])[0][0]
    for of_rank in ranks(WORLD, exactly, cases):
        for case, found in zip(cases, of_rank, strict=True):
            assert found == alone, case


def beside(shard, setting):
    """Losses, norms and weights of two steps at stage 3 with a setting beside shards, in fp32."""
    rank, model, options = torch.distributed.get_rank(), hf("llama"), {"optimizer": adamw}
    if setting == "muon":
        options["optimizer"] = zero3d.optim.muon()
    elif setting == "lora":
        opened = add_adapters(Opened(model, None), Lora(rank=4), 0)
        model = opened.module
    else:
        options["offload"] = zero3d.Offload(setting)
    engine = zero3d.Engine(model, mesh=zero3d.Mesh(shard=shard), stage=3, precision="fp32", clip_norm=0.05, **options)
    seen = []
    for step in range(STEPS):
        loss = loss_of(engine, batch(step, rank))
        engine.backward(loss)
        seen += [float(loss.detach()), float(engine.step().grad_norm)]
    with engine.full_params():
        return seen, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("setting", ["muon", "lora", "host"])
def test_settings_beside_shards_train_as_over_all_of_dp(ranks, setting):
    flat = ranks(WORLD, beside, WORLD, setting)
    for (seen, values), (wanted, whole) in zip(ranks(WORLD, beside, 2, setting), flat, strict=True):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-5, atol=0)
        # Muon's update is made in bf16, where rounding moves an element by 2**-8.
        assert_near(values, whole, 1e-3 if setting == "muon" else 1e-4, rate=1e-2)


def kept(place):
    """A course whose optimizer states are there."""
    options = {} if place is None else {"offload": zero3d.Offload(place)}
    return curve(2, STAGES[3], precision="fp32", **options)[:3]


@pytest.mark.long
def test_states_of_shards_on_the_host_have_the_bits_of_resident_ones(ranks):
    assert ranks(WORLD, kept, None) == ranks(WORLD, kept, "host")


# --- accounts -------------------------------------------------------------------------------------


def account(case, exact):
    """Formula and ledger of a second step, and of every state what is planned and held."""
    stage, degrees = case
    engine, m = engine_of(stage, exact, **degrees), mixtures.SUMMANDS // WORLD
    mesh = engine.mesh
    engine.train_batch(mixtures.own_part(engine, 0))
    engine.traffic.reset()
    engine.gathers.events = []
    engine.train_batch(mixtures.own_part(engine, 1))
    planned = step_traffic(
        stage[0], engine.traffic_units, Levels(mesh.shard, mesh.degrees.replicate), count_gathers(engine.gathers.events),
        m, engine.policy.reduce, exact, engine.experts.anywhere,
    )  # fmt: skip
    values = 2 * (mesh.dp - 1) * (m if exact else 1)
    planned["exchange", "-"] = Moved.total([planned["exchange", "-"], Moved(1, values, 8 * values)])
    measured = {
        (e.op, e.unit): Moved(e.calls, e.elements, e.bytes)
        for e in engine.traffic if e.axis not in ("ep", "world") and e.op != "pass_rows"
    }  # fmt: skip
    axes = {(e.op, e.axis) for e in engine.traffic if e.op != "exchange"}
    held = [(e.category, e.planned, e.measured) for e in engine.memory if e.planned is not None]
    left = [engine.arena.live(category) for category in ("bucket", "wire")]
    return planned, measured, axes, held, left


@pytest.mark.parametrize(("case", "exact"), [
    ((STAGES[3], {"shard": 2, "ep": 2}), True), *(pytest.param((stage, {"shard": shard, "ep": ep}), exact, marks=pytest.mark.long)
                 for stage in STAGES for shard, ep in ((2, 1), (2, 2), (1, 1)) for exact in (False, True)),
], ids=str)  # fmt: skip
def test_ledger_and_arena_equal_the_formulas_of_both_levels(ranks, case, exact):
    for planned, measured, axes, held, left in ranks(WORLD, account, case, exact):
        assert measured == planned
        assert all(formula == found for _, formula, found in held), held
        assert left == [0, 0]
        levels = {axis for op, axis in axes if op == "all_reduce"}
        assert levels == {"dp" if case[1]["shard"] == 1 else "replicate"}
        assert ("all_gather", "shard") in axes or case[1]["shard"] == 1


# --- with other axes --------------------------------------------------------------------------------


def on_mesh(degrees, options, model):
    """Losses and norms of a few steps, of a list of micro-batches that depends on no degree."""
    with LiftCasts():
        engine = meshes.engine_of(
            meshes.model_of(model, (1, 1, 2)), zero3d.Mesh(**degrees), loss=meshes.sum_of, **options
        )
        given = [meshes.step(engine, number, 8) for number in range(STEPS)]
        return given, float(engine.evaluate(meshes.share_of(engine, 7, 8)))


@pytest.mark.long
@pytest.mark.parametrize(("degrees", "options"), [
    ({"dp": 4, "tp": 2, "shard": 2}, {"stage": 3}),
    ({"dp": 4, "pp": 2, "shard": 2}, {"stage": 1}),
    ({"dp": 2, "tp": 2, "pp": 2, "shard": 1}, {"stage": 2}),
    ({"dp": 4, "tp": 2, "shard": 1}, {"stage": 0}),
    ({"dp": 4, "pp": 2, "shard": 2}, {"stage": 3, "schedule": "zbv"}),
], ids=str)  # fmt: skip
def test_shards_go_with_tensor_and_pipeline_axes(ranks, degrees, options):
    flat = {axis: degree for axis, degree in degrees.items() if axis != "shard"}
    wanted = ranks(8, on_mesh, flat, options, "qwen3")[0]
    for found in ranks(8, on_mesh, degrees, options, "qwen3"):
        for a, b in zip(found[0], wanted[0], strict=True):
            assert a == pytest.approx(b, rel=1e-10, abs=0)
        assert found[1] == pytest.approx(wanted[1], rel=1e-10, abs=0)


def over_sequences(degrees):
    """Losses and norms of a model whose sequences sp shares out."""
    found = []
    with LiftCasts():
        engine = meshes.engine_of(hf("llama", inner=96), zero3d.Mesh(**degrees), accumulate=1)
        for step in range(STEPS):
            ids = batch(step, engine.mesh.row, length=12)
            found.append(
                (float(engine.train_batch([{"input_ids": ids, "labels": ids}])), float(engine.last_step.grad_norm))
            )
    return found


@pytest.mark.long
@pytest.mark.parametrize("shard", [1, 2])
def test_shards_and_shares_of_sequences_nest(ranks, shard):
    wanted = ranks(WORLD, over_sequences, {"sp": 2})[0]
    for found in ranks(WORLD, over_sequences, {"sp": 2, "shard": shard}):
        for a, b in zip(found, wanted, strict=True):
            assert a == pytest.approx(b, rel=1e-10, abs=0)


# --- what is kept, and what comes back -----------------------------------------------------------------


def begun(folder, stage, degrees):
    engine = engine_of(stage, **degrees)
    mixtures.curve(engine, range(1))
    engine.save(folder)
    engine.export(folder + ".hf")
    return mixtures.curve(engine, range(1, 2))


def gone_on(folder, stage, degrees):
    engine = engine_of(stage, **degrees)
    engine.load(folder)
    return mixtures.curve(engine, range(1, 2)), engine.resumed


RESUMED = [
    (STAGES[3], {"shard": 2}, STAGES[0], {}), (STAGES[1], {}, STAGES[3], {"shard": 2, "ep": 2}),
    (STAGES[3], {"shard": 1}, STAGES[2], {"shard": 4}), (STAGES[0], {"shard": 2, "ep": 2}, STAGES[4], {"shard": 2}),
]  # fmt: skip


@pytest.mark.parametrize("case", [RESUMED[0], *(pytest.param(case, marks=pytest.mark.long) for case in RESUMED[1:])])
def test_a_checkpoint_of_any_shape_goes_on_at_any_other_with_the_same_bits(ranks, tmp_path, case):
    stage, degrees, other, others = case
    wanted = ranks(WORLD, begun, str(tmp_path / "ck"), stage, degrees)
    for found, said in ranks(WORLD, gone_on, str(tmp_path / "ck"), other, others):
        assert found == wanted[0]
        assert said.startswith("bitwise: as if it had not been interrupted")
        before, after = (some.get("shard", 4) for some in (degrees, others))
        names = {4: "all of dp"}
        assert (before == after) != (f"shard {names.get(before, before)} -> {names.get(after, after)}" in said)
    assert transformers_loads(str(tmp_path / "ck.hf"))


def transformers_loads(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def copies_save(folder, shard):
    """Elements of states in this rank's file, and of masters and both moments of the model."""
    engine = engine_of(STAGES[3], exact=False, shard=shard)
    engine.train_batch(mixtures.own_part(engine, 0))
    engine.save(folder)
    held = sum(piece.values.numel() for piece in state_pieces(engine_state(engine._parts)))
    return held, 3 * sum(slot.numel for unit in engine.units for slot in unit.layout.slots)


def test_copies_of_a_shard_save_a_part_of_it_each(ranks, tmp_path):
    found = ranks(WORLD, copies_save, str(tmp_path / "ck"), 2)
    assert sum(held for held, _ in found) == found[0][1]
    assert min(held for held, _ in found) > 0


def written(stage):
    """The last rank alone writes into a parameter, a rank of each shard group into another."""
    rank, engine = torch.distributed.get_rank(), zero3d.Engine(
        hf("llama"), mesh=zero3d.Mesh(shard=2), stage=stage, precision="bf16", optimizer=adamw
    )  # fmt: skip
    with engine.full_params(), torch.no_grad():
        for number, p in enumerate(engine.module.parameters()):
            p.fill_(number + rank / 8)
    with engine.full_params():
        found = bits(engine.module.parameters())
    for step in range(STEPS):
        engine.backward(loss_of(engine, batch(step, rank)))
        engine.step()
    ids = engine.generate(batch(9)[:1, :4], max_new_tokens=3)
    with engine.full_params():
        return found, bits(engine.module.parameters()), ids.tolist()


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2, 3))])
def test_ranks_that_write_differently_agree_afterwards(ranks, stage):
    found = ranks(WORLD, written, stage)
    assert all(result == found[0] for result in found)


def one_is_not_finite(stage):
    """Whether a step is skipped on all ranks, and states stay, where the last rank's gradients are NaN."""
    rank = torch.distributed.get_rank()
    engine = zero3d.Engine(hf("llama"), mesh=zero3d.Mesh(shard=2), stage=stage, precision="fp32", optimizer=adamw)
    before = engine.fingerprint()
    loss = loss_of(engine, batch(0, rank))
    engine.backward(loss * float("nan") if rank == WORLD - 1 else loss)
    applied = bool(engine.step().applied)
    return applied, engine.fingerprint() == before


@pytest.mark.long
def test_a_gradient_of_one_copy_that_is_not_finite_skips_the_step_everywhere(ranks):
    assert ranks(WORLD, one_is_not_finite, 3) == [(False, True)] * WORLD
