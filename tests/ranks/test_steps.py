"""What a step does on several ranks: accumulation, weights, norms, skips, unused parameters."""

import pytest
import torch
import torch.distributed as dist
from models import VOCAB, Net, adamw, batch, bits, build, loss_of, train_masters
from torch import nn
from torch.nn import functional as F

import zero3d
from zero3d.precision import LossScaling, Precision

STAGES = [0, 1, 2, 3]
SOME = [(0, 3), pytest.param(STAGES, marks=pytest.mark.long)]  # stages that a case compares


def make(stage, model="net", **options):
    return zero3d.Engine(
        build(model) if isinstance(model, str) else model,
        **({"stage": stage, "precision": "fp32", "optimizer": adamw} | options),
    )


def weights_of(engine):
    with engine.full_params():
        return [p.detach().clone() for p in engine.module.parameters()]


# --- accumulation and weights ---------------------------------------------------------------------


def padded(step, rank):
    """Two sequences with different numbers of targets: padding is -100."""
    ids = batch(step, rank)
    labels = ids.clone()
    labels[0, 3 + (step + rank) % 4 :] = -100
    return ids, labels


def padded_loss(model, ids, labels):
    logits = model(ids)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def accumulate(stage, reduce):
    """Three weighted micro-batches per rank, two steps."""
    engine = make(stage, accumulate=3, reduce=reduce, clip_norm=0.5)
    norms = []
    for step in range(2):
        for m in range(3):
            ids, labels = padded(10 * step + m, dist.get_rank())
            engine.backward(padded_loss(engine, ids, labels), weight=int((labels[:, 1:] != -100).sum()))
            result = engine.step()
            assert bool(result.applied) == (m == 2)
        norms.append(float(result.grad_norm))
    return norms, weights_of(engine)


@pytest.mark.parametrize(("world", "stage", "reduce"), [
    (2, 1, "auto"), (2, 3, "auto"), (2, 2, "every_step"),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in ((2, 0, "auto"), (4, 1, "auto"), (2, 2, "auto"), (4, 3, "auto"), (2, 3, "every_step"))),
])  # fmt: skip
def test_accumulation_equals_the_big_batch_with_padding(ranks, world, stage, reduce):
    plain = build("net")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    norms = []
    for step in range(2):
        parts = [padded(10 * step + m, rank) for m in range(3) for rank in range(world)]
        ids, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        padded_loss(plain, ids, labels).backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for found, weights in ranks(world, accumulate, stage, reduce):
        assert found == pytest.approx(norms, rel=1e-5)
        difference = max(
            float((a - b).abs().max()) for a, b in zip(weights, map(torch.detach, plain.parameters()), strict=True)
        )
        assert difference < 2e-3  # Adam turns rounding noise into a fraction of lr = 1e-2


def varying_counts(stage):
    """Steps of 1, 3 and 2 micro-batches by last=; accumulate says 2."""
    rank, engine = dist.get_rank(), make(stage, accumulate=2)
    applied = []
    for count in (1, 3, 2):
        for m in range(count):
            engine.backward(loss_of(engine, batch(10 * count + m, rank)), last=m == count - 1)
            applied.append(bool(engine.step().applied))
    other = make(stage, accumulate=2)
    for count in (1, 3, 2):
        for m in range(count):
            other.backward(loss_of(other, batch(10 * count + m, rank)), last=m == count - 1)
        other.step()
    return applied, bits(weights_of(engine)) == bits(weights_of(other)), engine.steps


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
def test_last_overrides_accumulate_and_a_step_off_the_boundary_changes_nothing(ranks, stage):
    for applied, same, steps in ranks(2, varying_counts, stage):
        assert applied == [True, False, False, True, False, True]
        assert same
        assert steps == 3


def mean_without_engine(engine, model, batches):
    """The mean loss over all targets of `batches` of a plain model, which gets the engine's weights."""
    total, targets = 0.0, 0
    with engine.full_params():
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    for name, p in model.named_parameters():
        p.data = weights[name]
    with torch.no_grad():
        for given in batches:
            count = int((given["labels"][:, 1:] != -100).sum())
            total += float(model(**given).loss) * count if count else 0.0
            targets += count
    return total / targets


def train_on_lists(stage):
    """(found, wanted) mean losses; whether the step without targets was applied or moved anything; the weights."""
    rank = dist.get_rank()
    engine, plain = make(stage, "llama", precision="bf16"), build("llama")
    everyone = [
        [{"input_ids": ids, "labels": labels} for ids, labels in (padded(m, r) for m in range(2))] for r in (0, 1)
    ]
    empty = [{"input_ids": each["input_ids"], "labels": torch.full_like(each["labels"], -100)} for each in everyone[0]]
    means = []
    for call, given in (
        (engine.evaluate, everyone), (engine.train_batch, everyone), (engine.train_batch, everyone),
        (engine.train_batch, [empty, everyone[1]]),
    ):  # fmt: skip
        wanted = mean_without_engine(engine, plain, given[0] + given[1])
        means.append((float(call(given[rank])), wanted))
    before = bits(weights_of(engine))
    engine.train_batch(empty)
    return means, bool(engine.last_step.applied) or before != bits(weights_of(engine)), before


def test_train_batch_returns_the_global_mean_and_skips_a_batch_without_targets(ranks):
    """Ranks have other numbers of targets, one of them none in the end: of all targets, not of ranks' means."""
    results = [result for stage in (1, 3) for result in ranks(2, train_on_lists, stage)]
    for means, moved, _ in results:
        assert [found for found, _ in means] == pytest.approx([wanted for _, wanted in means], rel=1e-6)
        (evaluated, _), (first, _), (second, _), _ = means
        assert first == evaluated
        assert second < first
        assert not moved
    assert len({(tuple(found for found, _ in means), weights) for means, _, weights in results}) == 1


class HeadFirst(nn.Module):
    """Reads its head's matrix before the head is called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.head = nn.Linear(256, VOCAB, bias=False)

    def forward(self, ids):
        x = F.embedding(ids, self.head.weight)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def lists_of_engines_that_are_dropped(stage):
    found = []
    for _ in range(2):
        engine = make(stage, HeadFirst(), loss=lambda output, _: (output.float().square().sum(), float(output.numel())))
        found.append([engine.train_batch([batch(step, dist.get_rank())]) for step in range(2)])
        found.append([p.detach().clone() for p in engine.module.parameters()])
        del engine
    return [bits(values) for values in found]


def test_new_weights_are_there_when_train_batch_returns_whoever_reads_them(ranks):
    """Also for a forward that reads a matrix before its module is called, and for the next engine on these ranks."""
    results = [result for stage in (0, 1, 2) for result in ranks(2, lists_of_engines_that_are_dropped, stage)]
    assert len(set(map(tuple, results))) == 1
    assert results[0][:2] == results[0][2:]


def custom_loss(stage):
    rank = dist.get_rank()

    def sum_and_weight(output, ids):
        return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), float(
            ids[:, 1:].numel()
        )

    engine = make(stage, loss=sum_and_weight)
    return float(engine.train_batch([batch(0, rank), batch(1, rank)])), bits(weights_of(engine))


def test_a_custom_loss_gives_the_global_mean(ranks):
    results = ranks(2, custom_loss, 3)
    model = build("net")
    expected = sum(float(loss_of(model, batch(m, r)).detach()) for m in range(2) for r in range(2)) / 4
    assert all(loss == pytest.approx(expected, rel=1e-6) for loss, _ in results)


# --- norm -----------------------------------------------------------------------------------------


def norm_and_gradients(stage, precision):
    """A model with a root unit, two param groups and tied weights; gradients gathered by hand."""
    rank = dist.get_rank()
    groups = [{"match": "*norm*|*.bias", "weight_decay": 0.0}]
    engine = make(stage, "tied", precision=precision, clip_norm=1e-3, param_groups=groups)
    engine.backward(loss_of(engine, batch(0, rank)))
    squares = sum(float((g.double() / dist.get_world_size()).square().sum()) for _, g in engine.optimizer.shard_grads())
    total = torch.tensor([squares], dtype=torch.float64)
    dist.all_reduce(total)
    result = engine.step()
    assert result.grad_norm.dtype == torch.float32
    assert result.grad_norm.shape == ()
    return float(result.grad_norm), float(total.sqrt()), bits(weights_of(engine))


@pytest.mark.parametrize(("world", "precision"), [(2, "fp32"), pytest.param(4, "bf16", marks=pytest.mark.long)])
def test_the_norm_is_pre_clip_and_equal_on_all_ranks_and_stages(ranks, world, precision):
    results = [ranks(world, norm_and_gradients, stage, precision) for stage in STAGES]
    norms = {norm for stage in results for norm, _, _ in stage}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(results[0][0][1], rel=1e-6)
    assert len({weights for stage in results for *_, weights in stage}) == 1


# --- skips ----------------------------------------------------------------------------------------


def nan_on_one_rank(stage, precision):
    rank = dist.get_rank()
    engine = make(stage, precision=precision, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    out, before = [], bits(weights_of(engine))
    for step in range(3):
        loss = loss_of(engine, batch(step, rank))
        engine.backward(loss * float("inf") if step == 1 and rank == 1 else loss)
        result, after = engine.step(), bits(weights_of(engine))
        out.append((bool(result.applied), float(result.loss_scale), float(result.lr), before != after))
        before = after
    return out, engine.steps


@pytest.mark.parametrize(("stage", "precision"), [
    (0, "fp32"), (3, "fp16"), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, "bf16"), (2, "fp16"), (3, "bf16"))),
])  # fmt: skip
def test_a_bad_gradient_on_one_rank_skips_on_all_and_does_not_advance_the_schedule(ranks, stage, precision):
    for out, steps in ranks(2, nan_on_one_rank, stage, precision):
        assert [applied for applied, *_ in out] == [True, False, True]
        assert [changed for *_, changed in out] == [True, False, True]
        assert [lr for *_, lr, _ in out] == [1e-2, 5e-3, 5e-3]
        assert steps == 2


def scale_sequence(stage):
    rank = dist.get_rank()
    precision = Precision("fp16", LossScaling(initial=64.0, window=3, hysteresis=2, minimum=16.0))
    engine = make(stage, precision=precision)
    scales = []
    for step in range(14):
        loss = loss_of(engine, batch(step, rank))
        engine.backward(loss * float("inf") if step in (4, 5, 6) and rank == 1 else loss)
        scales.append(float(engine.step().loss_scale))
    return scales


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_the_loss_scale_follows_deepspeeds_rule(ranks, stage):
    # Grows after 3 clean boundaries (counted from -1), spends one hysteresis, then halves twice.
    expected = [64, 64, 128, 128, 128, 64, 32, 32, 32, 64, 64, 64, 128, 128]
    assert ranks(2, scale_sequence, stage) == [expected, expected]


# --- unused parameters and branches ---------------------------------------------------------------


class Branches(nn.Module):
    """Two experts of one size; a rank may use one only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(VOCAB, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids, use):
        x = self.embed(ids)
        for side in use:
            x = x + torch.tanh(getattr(self, side)(x))
        return self.head(x)


def one_sided(stage, units, uses):
    rank = dist.get_rank()
    engine = make(stage, Branches(), units=units)
    for step in range(2):
        out = engine(batch(step, rank), uses[rank])
        engine.backward(out.float().square().mean())
        assert engine.step().applied
    return bits(weights_of(engine))


USES = [["left"], ["left", "right"]]


@pytest.fixture(scope="module")
def one_sided_at_stage_0(ranks):
    return ranks(2, one_sided, 0, [], USES)


@pytest.mark.parametrize(("stage", "units"), [
    (0, ["left", "right"]), (1, ["left", "right"]), (2, ["left", "right"]), (2, []), (3, []),
])  # fmt: skip
def test_ranks_may_use_different_branches(ranks, one_sided_at_stage_0, stage, units):
    hashes = ranks(2, one_sided, stage, units, USES)
    assert {*hashes, *one_sided_at_stage_0} == {hashes[0]}


def uneven_contributions(stage, reduce):
    """Two micro-batches by last=; rank 0 uses the branch in both, rank 1 in the second only; then a single one."""
    rank = dist.get_rank()
    engine = make(stage, Branches(), units=["left", "right"] if stage < 3 else [], precision="bf16", reduce=reduce)
    for step in range(3):
        for m in range(2 if step < 2 else 1):
            use = ["left"] if rank == 1 and m == 0 and step < 2 else ["left", "right"]
            engine.backward(engine(batch(10 * step + m, rank), use).float().square().mean(), last=m == 1 or step == 2)
        assert engine.step().applied
    return bits(weights_of(engine))


def test_ranks_may_accumulate_different_parameters(ranks):
    cases = [(0, "auto"), (1, "auto"), (2, "every_step"), (3, "every_step")]
    assert len({h for stage, reduce in cases for h in ranks(2, uneven_contributions, stage, reduce)}) == 1


# --- sizes ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of 1, 3 and a prime number of elements, and one larger than all others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.one = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.three = nn.Parameter(torch.randn(3))
        self.prime = nn.Parameter(torch.randn(997))
        self.large = nn.Parameter(torch.randn(300, 131) / 10)

    def forward(self, x):
        return (x[:, :131] @ self.large.T).mean(1) * self.one + self.three.sum() * self.prime.mean() * self.scalar


def odd_sizes(stage):
    engine = make(
        stage, Odd(), param_groups=[{"match": "nothing*", "lr": 1.0}, {"match": "three", "weight_decay": 0.0}]
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 200, generator=generator)).square().mean())
        assert engine.step().applied
    return bits(weights_of(engine))


@pytest.mark.parametrize(("world", "stages"), [(3, (0, 3)), pytest.param(4, STAGES, marks=pytest.mark.long)])
def test_odd_sizes_and_empty_groups(ranks, world, stages):
    assert len({h for stage in stages for h in ranks(world, odd_sizes, stage)}) == 1


# --- several engines, generation, evaluation ------------------------------------------------------


def two_engines():
    rank = dist.get_rank()
    engines = [make(3, "net"), make(2, "tied")]
    for step in range(2):
        losses = [loss_of(engine, batch(step, rank)) for engine in engines]
        for engine, loss in zip(reversed(engines), reversed(losses), strict=True):
            engine.backward(loss)
            engine.step()
    alone = [make(3, "net"), make(2, "tied")]
    for engine in alone:
        for step in range(2):
            engine.backward(loss_of(engine, batch(step, rank)))
            engine.step()
    return [bits(weights_of(e)) for e in engines], [bits(weights_of(e)) for e in alone]


def test_two_engines_in_one_process(ranks):
    for together, alone in ranks(2, two_engines):
        assert together == alone


def generate(stage, model):
    rank = dist.get_rank()
    engine = make(stage, model, precision="bf16")
    engine.backward(loss_of(engine, batch(0, rank)))
    engine.step()
    text = engine.generate(batch(0, 0)[:1, :4], max_new_tokens=3 + 4 * rank)  # other lengths per rank
    again = [
        engine.generate(batch(0, 0)[:1, :4], max_new_tokens=3 + 4 * rank) for _ in range(2 * rank)
    ]  # how often, too
    assert all(text.equal(each) for each in again)
    kept = engine.arena.live("gathered")
    engine.module.train()
    engine.backward(loss_of(engine, batch(1, rank)))
    engine.step()
    lockstep = engine.generate(batch(0, 0)[:1, :4], max_new_tokens=3, keep_full=False)
    return text[0].tolist(), lockstep[0].tolist(), float(kept), float(engine.arena.live("gathered"))


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.long), "net"])
def test_generation_with_different_lengths_per_rank(ranks, model):
    for stage in (0, 3):
        (short, same, kept, after), (long, other, _, _) = ranks(2, generate, stage, model)
        assert long[: len(short)] == short
        assert len(long) == len(short) + 4
        assert same == other
        assert (kept > 0) == (stage == 3)
        assert after == 0


def read_and_write(stage):
    engine = make(stage, "tied", precision="bf16")
    engine.backward(loss_of(engine, batch(0)))
    engine.step()
    before = bits(weights_of(engine))
    reference = bits([owned.master for owned in engine.optimizer.pieces])
    with engine.full_params():
        pass
    unchanged = reference == bits([owned.master for owned in engine.optimizer.pieces])
    with engine.full_params(engine.module.layers[1]), torch.no_grad():
        engine.module.layers[1].up.weight.fill_(0.25)
    with engine.full_params():
        seen = bool((engine.module.layers[1].up.weight == 0.25).all())
    engine.backward(loss_of(engine, batch(1)))
    assert engine.step().applied
    return before, unchanged, seen, bits(weights_of(engine))


@pytest.mark.parametrize("stages", SOME)
def test_full_params_reads_cost_no_bit_and_writes_are_kept(ranks, stages):
    results = [result for stage in stages for result in ranks(2, read_and_write, stage)]
    assert all(unchanged and seen for _, unchanged, seen, _ in results)
    assert len({after for *_, after in results}) == 1


def written_by_rank_0_only(stage):
    engine = make(stage, "net", precision="bf16")
    with engine.full_params(), torch.no_grad():
        if dist.get_rank() == 0:
            engine.module.head.weight.fill_(0.5)
    return bits(weights_of(engine))


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_agree_after_a_write_on_one_rank(ranks, stage):
    assert len(set(ranks(2, written_by_rank_0_only, stage))) == 1


def different_seeds(stage):
    torch.manual_seed(dist.get_rank())
    engine = make(stage, Net())
    return bits(weights_of(engine))


def test_rank_0s_weights_win_at_construction(ranks):
    torch.manual_seed(0)
    assert set(ranks(2, different_seeds, 3)) == {bits(Net().parameters())}


def mixed_dtypes(stage):
    """Frozen bf16 base, fp32 norms by the model's wish, one integer parameter."""
    model = build("net")
    model._keep_in_fp32_modules = ["norm"]
    model.layers[0].up.weight.requires_grad_(False)
    model.steps = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
    engine = make(stage, model, precision="bf16", clip_norm=None)
    for step in range(2):
        engine.backward(loss_of(engine, batch(step, dist.get_rank())))
        assert engine.step().applied
    with engine.full_params():
        kinds = {name: str(p.dtype) for name, p in model.named_parameters()}
        frozen = bits([model.layers[0].up.weight])
    return kinds["norm.weight"], kinds["head.weight"], kinds["steps"], frozen, bits(weights_of(engine))


@pytest.mark.parametrize("stages", SOME)
def test_mixed_dtypes_and_frozen_parameters(ranks, stages):
    results = [r for stage in stages for r in ranks(2, mixed_dtypes, stage)]
    assert {r[:3] for r in results} == {("torch.float32", "torch.bfloat16", "torch.int64")}
    assert {r[3] for r in results} == {bits([build("net").layers[0].up.weight.bfloat16()])}
    assert len({r[4] for r in results}) == 1


def test_masters_of_one_rank_match_the_written_out_loop():
    model = build("net")
    engine = make(3, build("net"), precision="bf16", clip_norm=0.5)
    train_masters(model, [batch(0)], torch.bfloat16, 0.5)
    engine.backward(loss_of(engine, batch(0)))
    engine.step()
    assert bits(weights_of(engine)) == bits(model.parameters())
