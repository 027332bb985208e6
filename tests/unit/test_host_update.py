"""The update on the host in chunks: torch's own bits, whatever is cut where, by however many threads."""

import threading
from itertools import pairwise

import pytest
import torch

from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.offload.host_adam import AdamRule, BucketPiece, BucketStates, HostExecutor
from zero3d.offload.rounding import Draw, noise_table, round_to_bf16
from zero3d.precision import join_master, split_master, to_compute
from zero3d.zero.optimizer import multiply

SIZES = (1, 15, 16, 17, 333, 1, 2049, 4099)  # of parameters; each begins at a multiple of 16, the rest is padding
RULES = (AdamRule(lr=1e-2, weight_decay=0.1), AdamRule(lr=1e-3, beta2=0.95, eps=1e-6))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def executors():
    """By threads and chunk; those of one test file are few."""
    made = {}

    def executor(threads=2, chunk=1024):
        if (threads, chunk) not in made:
            made[threads, chunk] = HostExecutor(threads, Arena(CPU, "host"), seed=3, chunk=chunk)
        return made[threads, chunk]

    yield executor
    for each in made.values():
        each.close()


def pieces_of(sizes=SIZES, rules=RULES):
    pieces, start = [], 0
    for place, size in enumerate(sizes):
        pieces.append(BucketPiece(start, start + size, rules[place >= len(sizes) // 2]))
        start += -(-size // 16) * 16
    return pieces, start


def states_of(pieces, length, seed=0, special=False):
    """Master, exp_avg and exp_avg_sq in fp32, and gradients of three steps; padding is zeros."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(length, generator=generator) for _ in range(6)]
    tensors[2] = tensors[2].square()
    if special:
        values = [float("inf"), -float("inf"), float("nan"), 1e-42, -1e-45, 3.4e38, -3.4e38, 0.0, -0.0]
        for shift, tensor in enumerate(tensors):
            tensor[shift::7] = torch.tensor(values).repeat(length)[: len(tensor[shift::7])]
        tensors[2].abs_()
    used = torch.zeros(length, dtype=torch.bool)
    for piece in pieces:
        used[piece.start : piece.stop] = True
    return [tensor.where(used, 0.0) for tensor in tensors]


def by_torch(states, pieces, factors, steps=3):
    """Whole parameters by torch's optimizer, gradients multiplied as in a step; returns master, exp_avg, exp_avg_sq."""
    master, exp_avg, exp_avg_sq = (state.clone() for state in states[:3])
    for step in range(1, steps + 1):
        grads = states[2 + step].clone()
        for factor in factors:
            multiply([grads], factor)
        for piece in pieces:
            cut, rule = slice(piece.start, piece.stop), piece.rule
            values = master[cut].requires_grad_()
            kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
            optimizer = kind([values], lr=rule.lr, betas=(rule.beta1, rule.beta2), eps=rule.eps,
                             weight_decay=rule.weight_decay, maximize=rule.maximize, fused=True)  # fmt: skip
            optimizer.state[values] = {
                "step": torch.tensor(float(step - 1)), "exp_avg": exp_avg[cut], "exp_avg_sq": exp_avg_sq[cut]
            }  # fmt: skip
            values.grad = grads[cut]
            optimizer.step()
            master = master.detach()
    return master, exp_avg, exp_avg_sq


def bucket_of(form, states, moments=torch.float32, first=0):
    master, length = states[0].clone(), len(states[0])
    weights = None if form == "fp32" else to_compute(master, torch.float16 if form == "fp16" else torch.bfloat16)
    if form == "split":
        remainder = torch.empty(length, dtype=torch.int16)
        split_master(master, weights, remainder)
        master = remainder
    return BucketStates(
        master, weights, states[1].to(moments, copy=True), states[2].to(moments, copy=True), states[3], first
    )


def master_of(bucket):
    if bucket.master.dtype == torch.float32:
        return bucket.master
    return join_master(bucket.weights, bucket.master, torch.empty(len(bucket.master)))


def run(executor, bucket, pieces, grads, factors=()):
    for step, grad in enumerate(grads, 1):
        executor.update(bucket._replace(grad=grad), pieces, step, factors)
    return bucket


def same_bits(one, other):
    """Equal to the bit; a NaN is a NaN."""
    narrow = torch.int16 if one.dtype.itemsize == 2 else torch.int32
    return bool(((one.view(narrow) == other.view(narrow)) | (one.isnan() & other.isnan())).all())


FORMS = ("split", "bf16", "fp16", "fp32")
FACTORS = {"none": (), "unscaled": (1 / 3,), "clipped too": (1 / 3, 0.37), "exactly 1": (1.0, 1.0)}


@pytest.mark.parametrize("special", [False, True], ids=["numbers", "infinities, NaN and denormals"])
@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("form", FORMS)
def test_it_has_the_bits_of_torch_on_whole_parameters(executors, form, factors, special):
    pieces, length = pieces_of()
    states = states_of(pieces, length, special=special)
    if form == "split" and special:  # what arithmetic makes of NaN; a payload is for the test of the halves
        states[0].nan_to_num_(nan=1.0)
    bucket = run(executors(), bucket_of(form, states), pieces, states[3:], factors)
    master, exp_avg, exp_avg_sq = by_torch(states, pieces, factors)
    assert same_bits(master_of(bucket), master)
    assert same_bits(bucket.exp_avg, exp_avg)
    assert same_bits(bucket.exp_avg_sq, exp_avg_sq)
    if bucket.weights is not None:
        assert same_bits(bucket.weights, to_compute(master, bucket.weights.dtype))
    assert not same_bits(master, states[0])


@pytest.mark.parametrize("form", ["split", "bf16"])
def test_new_weights_round_ties_away_from_zero(executors, form):
    pieces, length = pieces_of(rules=(AdamRule(lr=0.0), AdamRule(lr=0.0)))
    states = states_of(pieces, length)
    states[0].view(torch.int32).bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    bucket = bucket_of(form, states)
    if form == "bf16":
        bucket.weights.zero_()  # what it was is not read there
    run(executors(), bucket, pieces, states[3:])
    assert same_bits(bucket.weights, to_compute(states[0], torch.bfloat16))
    assert not same_bits(bucket.weights, states[0].bfloat16())


@pytest.mark.parametrize(("form", "moments"), [
    pytest.param("split", torch.float32, id="split-fp32 moments", marks=pytest.mark.long),
    pytest.param("split", torch.bfloat16, id="split-bf16 moments"),
    pytest.param("bf16", torch.float32, id="bf16-fp32 moments"),
    pytest.param("bf16", torch.bfloat16, id="bf16-bf16 moments", marks=pytest.mark.long),
    pytest.param("fp32", torch.float32, id="fp32, in longer chunks"),
])  # fmt: skip
def test_chunks_and_threads_change_no_bit(executors, form, moments):
    pieces, length = pieces_of()
    states = states_of(pieces, length)
    runs = [
        run(executors(*cut), bucket_of(form, states, moments, first=1 << 33), pieces, states[3:], (0.1,))
        for cut in ((1, 1 << 14), (1, 1024), (2, 16), (2, 1024), (3, 2032))
    ]
    for bucket in runs[1:]:
        assert same_bits(master_of(bucket), master_of(runs[0]))
        if form != "fp32":
            assert same_bits(bucket.weights, runs[0].weights)
        assert same_bits(bucket.exp_avg, runs[0].exp_avg)
        assert same_bits(bucket.exp_avg_sq, runs[0].exp_avg_sq)


@pytest.mark.parametrize("factors", [(), (1 / 3, 0.37)], ids=["final gradients", "unscaled and clipped"])
@pytest.mark.parametrize("form", FORMS)
def test_1_2_and_3_threads_share_a_bucket_and_give_the_same_bits(executors, form, factors):
    pieces, length = pieces_of(sizes=(1, 20_001, 333, 40_000, 17, 5_000))
    states, found = states_of(pieces, length), []
    for threads in (1, 2, 3):
        executor, took = executors(threads, 1 << 18), set()
        cast_in = executor._cast_in
        executor._cast_in = lambda part, factors: took.add(part.first) or cast_in(part, factors)  # noqa: B023
        found.append(run(executor, bucket_of(form, states), pieces, states[3:], factors))
        del executor._cast_in
        assert len(took) >= threads
    master, exp_avg, exp_avg_sq = by_torch(states, pieces, factors)
    for bucket in found:
        assert same_bits(master_of(bucket), master)
        assert same_bits(bucket.exp_avg, exp_avg)
        assert same_bits(bucket.exp_avg_sq, exp_avg_sq)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32 moments", "bf16 moments"])
def test_a_bucket_may_be_cut_at_any_multiple_of_16(executors, moments):
    """Also inside a parameter: each part has the bits of its elements in the whole."""
    pieces, length = pieces_of()
    states = states_of(pieces, length)
    whole = run(executors(), bucket_of("split", states, moments, first=64), pieces, states[3:])
    parts = bucket_of("split", states, moments, first=64)
    cuts = [0, 16, 48, 400, 2048, length]
    for start, stop in pairwise(cuts):
        inside = [
            BucketPiece(max(a, start) - start, min(b, stop) - start, rule)
            for a, b, rule in pieces
            if a < stop and b > start
        ]
        run(executors(), parts.cut(start, stop), inside, [grad[start:stop] for grad in states[3:]])
    assert same_bits(master_of(parts), master_of(whole))
    assert same_bits(parts.exp_avg, whole.exp_avg)
    assert same_bits(parts.exp_avg_sq, whole.exp_avg_sq)


@pytest.mark.parametrize("form", ["split", "bf16"])
def test_bf16_moments_are_those_of_the_whole_rounded_by_step_moment_and_index(executors, form):
    pieces, length = pieces_of()
    states, first = states_of(pieces, length), (1 << 18) - 160
    bucket = bucket_of(form, states, torch.bfloat16, first)
    run(executors(), bucket, pieces, states[3:])
    master, moments = states[0], [state.bfloat16() for state in states[1:3]]
    table = noise_table(CPU)
    for step in range(1, 4):
        wide = [moment.float() for moment in moments]
        grads = states[2 + step]
        for piece in pieces:
            cut = slice(piece.start, piece.stop)
            piece.rule.update(torch.tensor(float(step)), [[each[cut]] for each in (master, grads, *wide)])
        for moment in (0, 1):
            round_to_bf16(wide[moment], moments[moment], Draw(3, step, moment), first, table, torch.empty(length))
    assert same_bits(master_of(bucket), master)
    assert same_bits(bucket.exp_avg, moments[0])
    assert same_bits(bucket.exp_avg_sq, moments[1])
    assert same_bits(bucket.weights, to_compute(master, torch.bfloat16))


@pytest.mark.parametrize("rule", [
    AdamRule(lr=1e-2, weight_decay=0.1, decoupled=False), AdamRule(lr=1e-2, maximize=True), AdamRule(lr=0.0),
    AdamRule(lr=3e-4, beta1=0.0, beta2=0.5, eps=1e-12, weight_decay=0.01),
])  # fmt: skip
def test_every_hyperparameter_is_torchs(executors, rule):
    pieces, length = pieces_of(rules=(rule, rule))
    states = states_of(pieces, length)
    bucket = run(executors(), bucket_of("split", states), pieces, states[3:])
    master, *moments = by_torch(states, pieces, ())
    assert same_bits(master_of(bucket), master)
    assert same_bits(bucket.exp_avg, moments[0])
    assert same_bits(bucket.exp_avg_sq, moments[1])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_16_bits_are_those_of_32_with_the_same_values_and_none_are_written(executors, form):
    pieces, length = pieces_of()
    states = states_of(pieces, length)
    narrow = [grad.bfloat16() for grad in states[3:]]
    before = [grad.clone() for grad in narrow]
    one = run(executors(), bucket_of(form, states), pieces, narrow, (0.3, 0.7))
    other = run(executors(), bucket_of(form, states), pieces, [grad.float() for grad in narrow], (0.3, 0.7))
    assert same_bits(master_of(one), master_of(other))
    assert all(map(torch.equal, narrow, before))


def test_padding_stays_zero_and_a_bucket_without_pieces_is_left_alone(executors):
    pieces, length = pieces_of()
    bucket = run(executors(), bucket_of("split", states_of(pieces, length)), pieces, states_of(pieces, length)[3:])
    padding = torch.ones(length, dtype=torch.bool)
    for piece in pieces:
        padding[piece.start : piece.stop] = False
    for tensor in (bucket.master, bucket.weights, bucket.exp_avg, bucket.exp_avg_sq):
        assert not tensor[padding].any()
    for empty in (0, 32):
        states = [torch.zeros(empty) for _ in range(4)]
        run(executors(), bucket_of("split", states), [], states[3:])


def test_5000_small_tensors_are_updated_like_each_alone(executors):
    pieces, length = pieces_of(sizes=[1 + place % 7 for place in range(5000)])
    states = states_of(pieces, length)
    bucket = run(executors(), bucket_of("split", states), pieces, states[3:4])
    picked = pieces[::613]
    master, *_ = by_torch(states, picked, (), steps=1)
    for piece in picked:
        assert torch.equal(master_of(bucket)[piece.start : piece.stop], master[piece.start : piece.stop])


def test_its_threads_run_kernels_alone_and_nobody_elses_number_of_threads_changes():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        executor = HostExecutor(2, Arena(CPU, "host"), chunk=16)
        asked = [executor._threads.submit(torch.get_num_threads) for _ in range(8)]
        assert {future.result() for future in asked} == {1}
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (torch.get_num_threads(), later) == (3, [3])
        executor.close()
    finally:
        torch.set_num_threads(before)


def test_scratch_is_on_the_arenas_account_and_given_back():
    arena = Arena(CPU, "host")
    executor = HostExecutor(2, arena, chunk=256)
    assert arena.live("wire") == 2 * 256 * 16 + 256 * 4 + (1 << 20)
    executor.close()
    assert arena.live("wire") == 0


def test_what_fails_in_a_thread_is_raised(executors):
    pieces, length = pieces_of()
    bucket = bucket_of("split", states_of(pieces, length))
    with pytest.raises(TypeError, match="lr"):
        executors().update(bucket, [piece._replace(rule=AdamRule(lr="high")) for piece in pieces], 1)


def test_tensors_that_are_no_bucket_are_refused(executors):
    """Torch's kernel would read beyond the end of the shorter ones."""
    pieces, length = pieces_of()
    bucket = bucket_of("split", states_of(pieces, length))
    for others in ({"exp_avg": bucket.exp_avg[:-16]}, {"exp_avg": bucket.exp_avg.double()}):
        with pytest.raises(AssertionError, match="bucket"):
            executors().update(bucket._replace(**others), pieces, 1)


def test_a_groups_hyperparameters_are_read_as_they_are_now():
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": torch.tensor(0.5), "maximize": True}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2)
    optimizer.param_groups[0]["lr"] = 7e-4
    rules = [AdamRule.of(optimizer, group) for group in optimizer.param_groups]
    assert rules == [AdamRule(7e-4, 0.8, 0.9, 1e-7, 0.2), AdamRule(0.5, 0.8, 0.9, 1e-7, 0.2, maximize=True)]
    adam = torch.optim.Adam([torch.zeros(1)], weight_decay=0.2)
    assert AdamRule.of(adam, adam.param_groups[0]) == AdamRule(1e-3, weight_decay=0.2, decoupled=False)


@pytest.mark.parametrize("build", [
    lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, amsgrad=True), torch.optim.Adamax,
])  # fmt: skip
def test_other_optimizers_are_refused_with_the_way_out(build):
    optimizer = build([torch.zeros(1)])
    with pytest.raises(ConfigError, match=r"(SGD|AdamW\(amsgrad=True\)|Adamax) .*offload.executor=device"):
        AdamRule.of(optimizer, optimizer.param_groups[0])
