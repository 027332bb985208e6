"""Contract 7: with exact=True a curve is the same bit for bit at any number of data-parallel ranks."""

import pytest
import torch
from models import Net, adamw, hf
from pipelines import covering
from summands import SUMMANDS, Given, loss, summand

import zero3d
from zero3d.account.traffic import Moved, step_traffic
from zero3d.activations.recomputation import recompute
from zero3d.distributed import choice
from zero3d.errors import ConfigError
from zero3d.zero.exact.summands import Summands
from zero3d.zero.tokens import count_gathers

STEPS, LONG = 2, 6
STAGES = ((0, "every_step"), (1, "every_step"), (2, "every_micro_batch"), (3, "every_micro_batch"), (2, "every_step"),
          (3, "every_step"))  # fmt: skip
SETTINGS = (STAGES, ("fp32", "bf16"), (0.05, None), ("none", "full"), (0.0, 0.2))  # clip, recomputation, dropout
FIRST = (STAGES[0], "fp32", 0.05, "none", 0.0)


def build(dropout=0.0, tied=False):
    torch.manual_seed(7)
    return Net(width=96, layers=2, dropout=dropout, tied=tied)  # units that four ranks share


def engine_of(model=None, *, stage=3, reduce="auto", summands=SUMMANDS, exact=True, **options):
    torch.manual_seed(torch.distributed.get_rank() + 100)  # ranks' own seeds count for nothing
    made = {"precision": "fp32", "optimizer": adamw, "clip_norm": 0.05, "loss": loss} | options
    accumulate = summands // torch.distributed.get_world_size()
    model = Given(build()) if model is None else model
    return zero3d.Engine(model, stage=stage, reduce=reduce, accumulate=accumulate, exact=exact, **made)


def micro_batches_of(engine, step, summands=SUMMANDS):
    """This rank's micro-batches of the global list."""
    n, rank = engine.dp.size, engine.dp.rank
    of_rank = summands // n
    every = engine.policy.reduce == "every_micro_batch"
    return [summand(step, k * n + rank if every else rank * of_rank + k) for k in range(of_rank)]


def train(engine, steps, summands=SUMMANDS):
    """Losses and norms, all digits."""
    curve = []
    for step in steps:
        value = engine.train_batch(micro_batches_of(engine, step, summands))
        curve.append((float(value).hex(), float(engine.last_step.grad_norm).hex(), bool(engine.last_step.applied)))
    return curve


def run(cases, exact=True, steps=STEPS):
    """On each rank, for every case of SETTINGS: the curve and a hash of parameters and moments."""
    outcome = []
    for (stage, reduce), precision, clip, activations, dropout in cases:
        model = Given(build(dropout))
        recompute(model, activations)
        engine = engine_of(model, stage=stage, reduce=reduce, precision=precision, clip_norm=clip, exact=exact)
        outcome.append((train(engine, range(steps)), engine.fingerprint()))
    return outcome


def at_every_dp(ranks, case, *args, dps=(1, 2, 4)):
    """Results by dp, which agree within each; all of them are the first if the curve is exact."""
    outcome = {}
    for dp in dps:
        results = ranks(dp, case, *args)
        assert all(result == results[0] for result in results), dp
        outcome[dp] = results[0]
    return outcome


def check_one_curve(outcome):
    assert len(outcome) > 1
    assert all(result == outcome[1] for result in outcome.values())


AT_MOST = pytest.mark.parametrize("dps", [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.long)], ids=str)


SOME = [(STAGES[3], "bf16", 0.05, "full", 0.2)]


def check_cases(ranks, cases, *options):
    outcome = at_every_dp(ranks, run, cases, *options)
    for case, *runs in zip(cases, *(outcome[dp] for dp in (1, 2, 4)), strict=True):
        assert runs[1] == runs[0], case
        assert runs[2] == runs[0], case
    return outcome[1]


def test_a_curve_is_the_same_at_dp_1_2_and_4(ranks):
    first, _ = check_cases(ranks, SOME)[0]
    assert min(float.fromhex(norm) for _, norm, _ in first) > 0.05  # clipping is active


@pytest.mark.long
def test_a_longer_curve_is_the_same_for_all_values_of_settings(ranks):
    check_cases(ranks, covering(SETTINGS, together=1), True, LONG)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_a_curve_is_the_same_for_all_triples_of_settings(ranks, stage):
    check_cases(ranks, [case for case in covering(SETTINGS, together=3) if case[0] == stage])


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_stages_and_moments_of_reduction_give_one_curve(ranks, precision):
    outcome = ranks(2, run, [(stage, precision, *FIRST[2:]) for stage in STAGES])[0]
    assert all(result == outcome[0] for result in outcome)


def hashes(summands, stages):
    """Curves and states of two steps over the same global list, at these stages and moments of reduction."""
    engines = [engine_of(stage=stage, reduce=reduce, summands=summands) for stage, reduce in stages]
    return [(train(engine, range(STEPS), summands), engine.fingerprint()) for engine in engines]


@pytest.mark.parametrize("stages", [  # at dp 1, 2 and 4: 4, 2 and 1 micro-batches of a rank
    {1: STAGES[:1], 2: STAGES[1:], 4: STAGES[3:4]},
    pytest.param(dict.fromkeys((1, 2, 4), STAGES), marks=pytest.mark.long),
], ids=["some", "all"])  # fmt: skip
def test_one_list_gives_one_hash_at_any_stage_moment_and_number_of_micro_batches(ranks, stages):
    found = [of_rank for dp, some in stages.items() for of_rank in ranks(dp, hashes, 4, some)]
    assert len({str(result) for of_rank in found for result in of_rank}) == 1


@pytest.mark.parametrize(("stage", "dps"), [
    ((3, "every_micro_batch"), (1, 2)),
    *(pytest.param(stage, (1, 2, 4), marks=pytest.mark.long) for stage in ((1, "every_step"), (3, "every_micro_batch"))),
], ids=str)  # fmt: skip
def test_plain_states_are_not_the_same(ranks, stage, dps):
    """Nor are losses in the end; those of two steps may be, on one CPU or another."""
    runs = [ranks(dp, run, [(stage, *FIRST[1:])], False)[0][0] for dp in dps]
    assert len({states for _, states in runs}) == len(dps)


# --- the tree -------------------------------------------------------------------------------------


def halves(values):
    """(v0 + v1) + (v2 + v3), written down."""
    return values[0] if len(values) == 1 else halves(values[: len(values) // 2]) + halves(values[len(values) // 2 :])


def gradients(exact, stage, reduce):
    """Of one step, this rank's pieces before they are divided by the weight."""
    engine = engine_of(Given(build()), stage=stage, reduce=reduce, exact=exact)
    for k, batch in enumerate(micro := micro_batches_of(engine, 0)):
        total, weight = loss(engine(*batch), batch)
        engine._parts.execution.backward_sum(total, weight, last=k == len(micro) - 1)
    engine.reductions.catch_up()
    outcome = []
    for owned, grad in engine.optimizer.shard_grads():
        pieces = {p.slot: p for p in owned.unit.layout.pieces(engine.dp.rank)}
        outcome.append((owned.name, pieces[owned.piece.slot].start, grad.clone()))
    return outcome


@pytest.mark.parametrize(
    ("world", "stage", "reduce"), [(1, 3, "auto"), (2, 3, "auto"), (4, 1, "auto"), (2, 2, "every_step")]
)
def test_gradients_are_summed_in_the_written_out_tree(ranks, world, stage, reduce):
    model, summands = Given(build()), []
    for number in range(SUMMANDS):
        batch = summand(0, number)
        loss(model(*batch), batch)[0].backward()
        summands.append({name: p.grad.flatten().clone() for name, p in model.named_parameters()})
        model.zero_grad()
    of_ranks = ranks(world, gradients, True, stage, reduce)
    elements = sum(outcome.numel() for pieces in of_ranks for *_, outcome in pieces)
    assert elements == sum(p.numel() for p in model.parameters())
    for pieces in of_ranks:
        for name, start, outcome in pieces:
            wanted = halves([summand[name] for summand in summands])[start : start + outcome.numel()]
            assert torch.equal(outcome, wanted), name


@AT_MOST
def test_a_list_that_is_no_power_of_two_long_is_filled_up_with_zeros(ranks, dps):
    check_one_curve(at_every_dp(ranks, uneven, dps=dps))


def uneven():
    engine = engine_of(summands=12)
    return train(engine, range(STEPS), 12), engine.fingerprint()


# --- going on -------------------------------------------------------------------------------------


def go_on(folder, stage, reduce, precision, steps):
    """Load if there is something, train some steps, save; what it says of the bits."""
    engine = engine_of(Given(build(dropout=0.2)), stage=stage, reduce=reduce, precision=precision)
    message = ""
    if steps.start:
        engine.load(folder)
        message = engine.resumed
    curve = train(engine, steps)
    engine.save(folder)
    return curve, engine.fingerprint(), message


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_going_on_at_dp_4_then_2_then_1_then_4_is_the_uninterrupted_run(ranks, tmp_path, precision):
    straight, states, _ = ranks(2, go_on, str(tmp_path / "straight"), 3, "auto", precision, range(4))[0]
    parts = [(4, 3, "auto"), (2, 1, "auto"), (1, 0, "auto"), (4, 2, "every_step")]
    curve = []
    for first, (dp, stage, reduce) in enumerate(parts):  # a step each
        outcome = ranks(dp, go_on, str(tmp_path / "cut"), stage, reduce, precision, range(first, first + 1))[0]
        curve += outcome[0]
        assert outcome[2].startswith("bitwise") or not first
    assert curve == straight
    assert outcome[1] == states


# --- what models and precisions bring -------------------------------------------------------------


class Choosing(torch.nn.Module):
    """Tied ends, a frozen block, one that every fourth micro-batch uses and one that none does."""

    def __init__(self):
        super().__init__()
        self.net = build(tied=True)
        self.net.layers[0].requires_grad_(False)
        self.sometimes, self.never = torch.nn.Linear(96, 96), torch.nn.Linear(96, 96)

    def forward(self, ids, labels=None):
        x = self.net.embed(ids)
        for layer in self.net.layers:
            x = layer(x)
        if int(ids[0, 0]) % 4 == 0:
            x = x + self.sometimes(x)
        return self.net.head(self.net.norm(x))


def choosing(stage, precision):
    engine = engine_of(Choosing(), stage=stage, precision=precision)
    return train(engine, range(STEPS)), engine.fingerprint()


@pytest.mark.parametrize(("stage", "precision", "dps"), [
    (2, "bf16", (1, 2)),
    *(pytest.param(*case, (1, 2, 4), marks=pytest.mark.long) for case in ((2, "bf16"), (1, "fp32"))),
], ids=str)  # fmt: skip
def test_frozen_tied_and_sometimes_unused_parameters(ranks, stage, precision, dps):
    check_one_curve(at_every_dp(ranks, choosing, stage, precision, dps=dps))


def scaled(stage, skipped):
    scaling = zero3d.precision.LossScaling(initial=2.0 ** (13 + skipped), hysteresis=1)
    precision = zero3d.precision.Precision("fp16", scaling)
    engine = engine_of(Given(build(dropout=0.2)), stage=stage, precision=precision)
    return train(engine, range(2 * skipped + 1)), engine.fingerprint(), engine.loss_scale.state()


@pytest.mark.parametrize(("skipped", "dps"), [(1, (1, 2)), pytest.param(2, (1, 2, 4), marks=pytest.mark.long)])
def test_steps_that_fp16_skips_are_skipped_alike(ranks, skipped, dps):
    outcome = at_every_dp(ranks, scaled, 3, skipped, dps=dps)
    check_one_curve(outcome)
    applied = [applied for *_, applied in outcome[1][0]]
    assert applied == [False] * skipped + [True] * (skipped + 1)


def by_hand():
    """The loop that people write; the second half of it evaluates, too."""
    engine = engine_of(Given(build(dropout=0.2)))
    seen = []
    for step in range(STEPS):
        for batch in micro_batches_of(engine, step):
            total, weight = loss(engine(*batch), batch)
            engine.backward(total / weight, weight=weight)
        seen.append(float(engine.step().grad_norm).hex())
    rank, n = engine.dp.rank, engine.dp.size
    held_out = [summand(99, k * n + rank) for k in range(SUMMANDS // n)]
    return seen, float(engine.evaluate(held_out)).hex(), engine.fingerprint()


@AT_MOST
def test_a_loop_written_by_hand_and_evaluations(ranks, dps):
    check_one_curve(at_every_dp(ranks, by_hand, dps=dps))


def pipelined(dp, schedule, tied):
    class Lm(Net):
        def forward(self, input_ids):
            return super().forward(input_ids)

    torch.manual_seed(7)
    model = Lm(width=96, layers=4, dropout=0.2, tied=tied)
    torch.manual_seed(torch.distributed.get_rank())
    return zero3d.Engine(
        model, mesh=zero3d.Mesh(dp=dp, pp=2), stage=3, precision="bf16", optimizer=adamw, accumulate=SUMMANDS // dp,
        exact=True, clip_norm=0.05, schedule=schedule,
        loss=lambda output, batch: loss(output, (batch["input_ids"], batch["labels"])),
    )  # fmt: skip


def through_stages(dp, schedule, tied):
    engine, curve = pipelined(dp, schedule, tied), []
    for step in range(STEPS):
        summands = [summand(step, engine.mesh.place.dp * SUMMANDS // dp + k) for k in range(SUMMANDS // dp)]
        value = engine.train_batch([{"input_ids": ids, "labels": labels} for ids, labels in summands])
        curve.append((float(value).hex(), float(engine.last_step.grad_norm).hex()))
    return curve, engine.fingerprint()


@pytest.mark.parametrize(("schedule", "tied"), [
    ("1f1b", True), pytest.param("zero-bubble", False, marks=pytest.mark.long),
])  # fmt: skip
def test_pipelines_of_one_degree(ranks, schedule, tied):
    one, two = (ranks(2 * dp, through_stages, dp, schedule, tied) for dp in (1, 2))
    assert all(outcome == one[0] for outcome in (*one, *two))


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "tied"), [("gpipe", False), ("interleaved", False), ("zbv", True)])
def test_pipelines_of_one_degree_in_other_schedules(ranks, schedule, tied):
    one, two = (ranks(2 * dp, through_stages, dp, schedule, tied) for dp in (1, 2))
    assert all(outcome == one[0] for outcome in (*one, *two))


def drawn(schedule):
    """(micro-batch, part) of every forward that begins on this rank in a step, and its parts."""
    seen, draw = [], Summands.draw
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Summands, "draw", lambda self, k, part=0: seen.append((k, part)) or draw(self, k, part))
        engine = pipelined(1, schedule, False)
        seen.clear()
        engine.train_batch([{"input_ids": ids, "labels": labels} for ids, labels in (summand(0, k) for k in range(4))])
    return sorted(seen), sorted(engine.chunks)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_every_part_of_a_pipeline_is_seeded_by_its_own_number(ranks, schedule):
    outcome = ranks(2, drawn, schedule)
    assert [parts for _, parts in outcome] == ([[0], [1]] if schedule == "1f1b" else [[0, 3], [1, 2]])
    assert all(seen == [(k, part) for k in range(4) for part in parts] for seen, parts in outcome)


def over_tp(dp):
    mesh = zero3d.Mesh(dp=dp, tp=2)
    model = hf("llama", inner=96, vocab=64)
    model.config.attention_dropout = 0.1
    torch.manual_seed(torch.distributed.get_rank())
    engine = zero3d.Engine(
        model, mesh=mesh, stage=3, precision="fp32", optimizer=adamw, accumulate=4 // dp, exact=True, clip_norm=0.05,
        sequence_parallel=True,
    )  # fmt: skip
    curve = []
    for step in range(STEPS):
        ids = [summand(step, k * dp + mesh.place.dp)[0][:, :8] for k in range(4 // dp)]
        value = engine.train_batch([{"input_ids": row, "labels": row} for row in ids])
        curve.append((float(value).hex(), float(engine.last_step.grad_norm).hex()))
    return curve, engine.fingerprint()


def test_a_tp_axis_of_one_degree(ranks):
    one, two = (ranks(2 * dp, over_tp, dp) for dp in (1, 2))
    assert all(outcome == one[0] for outcome in (*one, *two))


def by_native_collectives():
    choice.PAIRWISE_MAX_RANKS = 0
    try:
        engine = engine_of(precision="bf16")
        assert engine.dp.algorithm == "native"
        return train(engine, range(STEPS)), engine.fingerprint()
    finally:
        choice.PAIRWISE_MAX_RANKS = 8


def by_messages():
    engine = engine_of(precision="bf16")
    return train(engine, range(STEPS)), engine.fingerprint()


def test_native_collectives_give_the_bits_of_pairwise_messages(ranks):
    assert ranks(2, by_native_collectives) == ranks(2, by_messages)


# --- accounts -------------------------------------------------------------------------------------


def account(stage, reduce, precision):
    """Formula and measurement of a step, after a first one; both by operation and unit, then by category."""
    engine = engine_of(stage=stage, reduce=reduce, precision=precision)
    train(engine, range(1))
    engine.traffic.reset()
    engine.gathers.events = []
    train(engine, range(1, 2))
    n, m = engine.dp.size, SUMMANDS // engine.dp.size
    gathers = count_gathers(engine.gathers.events)
    planned = step_traffic(stage, engine.traffic_units, n, gathers, m, engine.policy.reduce, exact=True)
    loss_values = 2 * m * (n - 1)
    calls, elements, size = planned["exchange", "-"]
    planned["exchange", "-"] = Moved(calls + 1, elements + loss_values, size + 8 * loss_values)
    measured = {(e.op, e.unit): Moved(e.calls, e.elements, e.bytes) for e in engine.traffic}
    states = [(e.planned, e.measured) for e in engine.memory if e.planned is not None]
    left = [engine.arena.live(category) for category in ("bucket", "wire")]
    return planned, measured, states, left


@pytest.mark.parametrize(("world", "stage", "reduce", "precision"), [
    (4, 3, "auto", "bf16"), (2, 0, "auto", "bf16"),
    *(pytest.param(2, *case, marks=pytest.mark.long) for case in ((2, "every_step", "bf16"), (1, "auto", "fp32"))),
])  # fmt: skip
def test_ledger_and_arena_equal_the_formulas(ranks, world, stage, reduce, precision):
    for planned, measured, states, left in ranks(world, account, stage, reduce, precision):
        assert measured == planned
        assert all(formula == held for formula, held in states)
        assert left == [0, 0]


# --- what is refused ------------------------------------------------------------------------------


def odd():
    with pytest.raises(ConfigError) as caught:
        engine_of(summands=9)
    return str(caught.value)


def test_three_ranks_are_refused_with_the_arithmetic(ranks):
    for message in ranks(3, odd):
        assert "dp=3 must be a power of two that divides 64, and 64 / 3 = 21.33. Pass dp=2 or dp=4" in message


def test_a_second_backward_and_another_number_of_micro_batches_are_refused(ranks):
    ranks(1, refused_in_steps)


def refused_in_steps():
    engine = engine_of(summands=2)
    value = loss(engine(*summand(0, 0)), summand(0, 0))[0]
    value.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="one backward per micro-batch"):
        value.backward()
    engine = engine_of(stage=1, summands=4)
    engine.backward(loss(engine(*summand(0, 0)), summand(0, 0))[0], last=True)
    with pytest.raises(ConfigError, match=r"had 1, and was to have 4. Pass Engine\(accumulate=1\)"):
        engine.step()
    with pytest.raises(ConfigError, match=r"3 per rank and step is not a power of two\. Pass 2 or 4"):
        engine.train_batch([summand(0, i) for i in range(3)])
