"""Contracts 2 and 3: stages equal each other bit for bit, and any dp degree equals one process."""

import pytest
import torch
from models import LiftCasts, adamw, batch, bits, build, clone, loss_of, planned_bytes, train_engine

import zero3d
from zero3d.account.traffic import step_traffic
from zero3d.zero.tokens import count_gathers

STEPS = 2


def run_stages(model, precision, clip, reduce_dtype="fp32", stages=(0, 1, 2, 3)):
    """On each rank: train with every stage; returns losses, norms and weights' hash per stage."""
    rank = torch.distributed.get_rank()
    out = []
    for stage in stages:
        engine = zero3d.Engine(
            build(model), stage=stage, precision=precision, clip_norm=clip, reduce_dtype=reduce_dtype, optimizer=adamw
        )
        out.append(train_engine(engine, [batch(step, rank) for step in range(STEPS)], through_engine=True))
    return out


def check_stages_equal(results):
    for by_rank in results:
        assert all(result == by_rank[0] for result in by_rank), by_rank
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            assert a[1:] == b[1:]  # norms and weights agree between ranks, losses are each rank's own


LONG = [("net", 2, "fp32", 0.5), ("tied", 4, "bf16", 0.5), ("llama", 2, "bf16", None), ("net", 4, "fp32", None),
        ("gpt2", 2, "fp32", None)]  # fmt: skip
PAIRS = [("qwen3", 4, "bf16", 0.5), *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG)]


@pytest.mark.parametrize(("model", "world", "precision", "clip"), PAIRS)
def test_all_stages_give_the_same_bits(ranks, model, world, precision, clip):
    check_stages_equal(ranks(world, run_stages, model, precision, clip))


@pytest.mark.long
@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", ["net", "tied", "llama", "qwen3", "gpt2"])
def test_all_stages_give_the_same_bits_for_all_combinations(ranks, model, world, precision, clip):
    check_stages_equal(ranks(world, run_stages, model, precision, clip))


def test_bf16_on_the_wire_gives_the_same_bits_at_all_stages(ranks):
    check_stages_equal(ranks(2, run_stages, "net", "bf16", 0.5, "bf16"))


# --- accumulation ---------------------------------------------------------------------------------

MOMENTS = ((0, "every_step"), (1, "every_step"), (2, "every_step"), (3, "every_step"), (2, "every_micro_batch"),
           (3, "every_micro_batch"))  # fmt: skip


def accumulated(micro_batches, precision):
    """On each rank, for every stage and moment of reduction: losses, norms and a hash of weights of two steps."""
    rank, out = torch.distributed.get_rank(), []
    for stage, reduce in MOMENTS:
        engine = zero3d.Engine(
            build("net"), stage=stage, precision=precision, clip_norm=0.5, accumulate=micro_batches, reduce=reduce,
            optimizer=adamw, loss=lambda output, ids: (loss_of(lambda _: output, ids), 1.0),
        )  # fmt: skip
        losses, norms = [], []
        for step in range(2):
            losses.append(float(engine.train_batch([batch(10 * step + m, rank) for m in range(micro_batches)])))
            norms.append(float(engine.last_step.grad_norm))
        with engine.full_params():
            out.append((losses, norms, bits(engine.module.parameters())))
    return out


@pytest.mark.parametrize(("micro_batches", "precision"), [
    (3, "fp32"), *(pytest.param(*case, marks=pytest.mark.long) for case in [(1, "bf16"), (2, "fp32"), (3, "bf16")]),
])  # fmt: skip
def test_stages_that_reduce_at_the_same_moments_give_the_same_bits(ranks, micro_batches, precision):
    for found in ranks(2, accumulated, micro_batches, precision):
        per_step, per_micro_batch = found[:4], found[4:]
        assert all(each == per_step[0] for each in per_step)
        assert all(each == per_micro_batch[0] for each in per_micro_batch)
        assert micro_batches > 1 or per_micro_batch[0] == per_step[0]
        if micro_batches > 1 and precision == "fp32":  # what is said of the other order is not idle
            assert per_micro_batch[0] != per_step[0]


def gone_on(folder):
    """Stage 1, stage 3 once a step, stage 3 by default: what the resume line says, and weights after a second step."""
    rank, found = torch.distributed.get_rank(), []
    for stage, reduce in ((1, "auto"), (3, "every_step"), (3, "auto")):
        engine = zero3d.Engine(
            build("net"), stage=stage, precision="fp32", accumulate=2, reduce=reduce, optimizer=adamw
        )
        for step in range(2):
            if step == 1 and found:
                engine.load(folder)
            if step == 0 and found:
                continue
            for m in range(2):
                engine.backward(loss_of(engine, batch(10 * step + m, rank)))
                engine.step()
            if step == 0:
                engine.save(folder)
        with engine.full_params():
            found.append((engine.resumed, bits(engine.module.parameters())))
    return found


def test_a_resume_at_another_stage_is_bitwise_at_the_same_moments_and_says_so(ranks, tmp_path):
    for (_, wanted), (same, found), (other, apart) in ranks(2, gone_on, str(tmp_path / "ck")):
        assert same.startswith("bitwise: as if it had not been interrupted, stage 1 -> 3,")
        assert found == wanted
        assert other == (
            "not bitwise: reduce every_step -> every_micro_batch (2 micro-batches a step are summed in another order)"
        )
        assert apart != wanted


# --- against one process --------------------------------------------------------------------------


def shard_gradients(model, stage, precision, micro_batches):
    """On each rank: gradients before the update, as this rank's pieces, and the step's mean loss."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    engine = zero3d.Engine(
        build(model), stage=stage, precision=precision, clip_norm=None, accumulate=micro_batches, optimizer=adamw
    )
    losses = []
    for m in range(micro_batches):
        loss = loss_of(engine, batch(m, rank))
        engine.backward(loss)
        losses.append(float(loss.detach()))
    pieces = [
        (owned.name, piece_start(owned, engine), (grad / (world * micro_batches)).clone())
        for owned, grad in engine.optimizer.shard_grads()
    ]
    norm = engine.step().grad_norm
    with engine.full_params():
        weights = {name: p.detach().double().clone() for name, p in engine.module.named_parameters()}
    return losses, pieces, float(norm), weights


def piece_start(owned, engine):
    mine = {p.slot: p for p in owned.unit.layout.pieces(engine.dp.rank)}
    return mine[owned.piece.slot].start


def one_process(model, dtype, world, micro_batches):
    plain = build(model)
    for p in plain.parameters():  # buffers keep their dtype, as in an engine
        p.data = p.data.to(dtype)
    losses = []
    for m in range(micro_batches):
        for rank in range(world):
            loss = loss_of(plain, batch(m, rank))
            (loss / (world * micro_batches)).backward()
            losses.append(float(loss.detach()))
    grads = {name: p.grad.clone() for name, p in plain.named_parameters()}
    return sum(losses) / len(losses), grads, plain


def joined(results, grads):
    """Every parameter's gradient put together from the ranks' pieces."""
    whole = {name: torch.full_like(g, float("nan")).flatten() for name, g in grads.items()}
    for _, pieces, _, _ in results:
        for name, start, values in pieces:
            whole[name][start : start + values.numel()] = values.to(whole[name].dtype)
    return {name: flat.view_as(grads[name]) for name, flat in whole.items()}


def worst_difference(found, wanted):
    total = torch.sqrt(sum(g.double().square().sum() for g in wanted.values()))
    return max(
        float((found[n] - wanted[n]).double().norm() / torch.maximum(wanted[n].double().norm(), 1e-6 * total))
        for n in wanted
    )


@pytest.mark.parametrize(("model", "world", "stage", "micro_batches"), [
    ("qwen3", 4, 3, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in [
        ("llama", 2, 3, 1), ("qwen3", 4, 2, 2), ("gpt2", 2, 1, 2), ("tied", 4, 0, 1), ("net", 4, 3, 2),
    ]),
])  # fmt: skip
def test_gradients_and_losses_equal_one_process_in_fp32(ranks, model, world, stage, micro_batches):
    results = ranks(world, shard_gradients, model, stage, "fp32", micro_batches)
    loss, grads, _ = one_process(model, torch.float32, world, micro_batches)
    assert worst_difference(joined(results, grads), grads) < 1e-5
    losses = [value for result in results for value in result[0]]
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-6)
    norm = float(torch.sqrt(sum(g.double().square().sum() for g in grads.values())))
    assert all(result[2] == pytest.approx(norm, rel=1e-6) for result in results)


def oracle_gradients(model, stage, micro_batches):
    with LiftCasts():
        return shard_gradients(model, stage, "fp64", micro_batches)


@pytest.mark.parametrize(("model", "world", "stage", "micro_batches"), [
    ("gpt2", 4, 2, 1), ("tied", 2, 0, 2), ("llama", 2, 1, 1),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [("llama", 4, 3, 2), ("qwen3", 2, 3, 1)]),
])  # fmt: skip
def test_gradients_equal_one_process_in_float64_to_1e_10(ranks, model, world, stage, micro_batches):
    results = ranks(world, oracle_gradients, model, stage, micro_batches)
    with LiftCasts():
        _, grads, plain = one_process(model, torch.float64, world, micro_batches)
        optimizer = adamw(plain.parameters())
    found = joined(results, grads)
    assert worst_difference(found, grads) < 1e-10
    optimizer.step()
    assert all((results[0][3][n] - p).abs().max() < 1e-4 for n, p in plain.named_parameters())


# --- accounting -----------------------------------------------------------------------------------


def account(model, stage, precision, micro_batches, reduce, release="auto"):
    """Ledger and memory of one step after a first one."""
    rank = torch.distributed.get_rank()
    engine = zero3d.Engine(
        build(model), stage=stage, precision=precision, accumulate=micro_batches, reduce=reduce, release=release
    )
    for step in range(2):
        engine.traffic.reset()
        engine.gathers.events = []
        for m in range(micro_batches):
            engine.backward(loss_of(engine, batch(step * 10 + m, rank)))
        engine.step()
    gathers = count_gathers(engine.gathers.events)
    planned = step_traffic(stage, engine.traffic_units, engine.dp.size, gathers, micro_batches, reduce)
    measured = {(e.op, e.unit): (e.calls, e.elements, e.bytes) for e in engine.traffic}
    held = {e.category: e for e in engine.memory}
    arena = {
        c: engine.arena.held(c)
        for c in ("parameters", "gradients", "optimizer", "padding", "gathered", "bucket", "wire")
    }
    return planned, measured, held, arena, planned_bytes(engine), dict(gathers)


@pytest.mark.parametrize(("model", "world", "stage", "precision", "micro_batches", "reduce"), [
    ("tied", 2, 0, "fp32", 2, "auto"), ("net", 2, 1, "bf16", 2, "auto"), ("gpt2", 4, 2, "fp32", 1, "every_step"),
    ("tied", 4, 3, "fp32", 2, "auto"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [
        ("net", 2, 3, "bf16", 2, "every_step"), ("net", 1, 3, "fp64", 1, "auto"),
        ("net", 2, 0, "bf16", 1, "auto"), ("llama", 4, 1, "bf16", 1, "auto"), ("qwen3", 2, 2, "bf16", 2, "auto"),
        ("llama", 2, 3, "bf16", 1, "auto"), ("net", 4, 3, "bf16", 2, "auto"),
    ]),
])  # fmt: skip
def test_ledger_and_arena_equal_the_formulas(ranks, model, world, stage, precision, micro_batches, reduce):
    for planned, measured, held, arena, states, _ in ranks(
        world, account, model, stage, precision, micro_batches, reduce
    ):
        expected = {key: tuple(value) for key, value in planned.items()} if world > 1 else {}
        assert measured == expected
        for category, wanted in zip(("parameters", "gradients", "optimizer"), states, strict=True):
            assert arena[category] == wanted, category
        assert held["padding"].measured == held["padding"].planned
        assert arena["bucket"] == 0
        assert arena["wire"] == 0
        assert arena["gathered"] == 0


def test_release_every_step_gathers_once_and_holds_weights(ranks):
    for planned, measured, _, arena, states, gathers in ranks(2, account, "net", 3, "bf16", 2, "auto", "every_step"):
        assert set(gathers.values()) == {1}
        assert measured == {key: tuple(value) for key, value in planned.items()}
        assert arena["parameters"] == states.parameters


def test_gather_counts_are_those_of_the_textbook(ranks):
    *_, gathers = ranks(2, account, "net", 3, "bf16", 2, "auto")[0]
    assert gathers == {"embed": 2, "layers.0": 4, "layers.1": 4, "layers.2": 4, "root": 2, "head": 2}
    *_, gathers = ranks(2, account, "tied", 3, "bf16", 1, "auto")[0]
    assert gathers == {"embed": 2, "layers.0": 2, "layers.1": 2, "layers.2": 2, "root": 1}


def test_hashes_notice_a_changed_bit():
    model = build("net")
    before, other = bits(model.parameters()), clone(model)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-7
    assert bits(other.parameters()) != before
