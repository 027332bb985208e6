"""AdamW with moments in 8 bits: one fingerprint at any stage and dp, formulas that are exact, checkpoints without loss."""

import re
from functools import cache

import meshes
import mixtures
import pytest
import torch
from muon import DECAY, LR, STAGES, build, check_going_on, engine_of, gradients_of, states_of, train
from summands import SUMMANDS, summand

import zero3d
from zero3d.errors import ConfigError
from zero3d.optim import adamw8bit
from zero3d.optim.blockwise import BLOCK, codes

RULE = {"lr": LR / 10, "betas": (0.9, 0.95), "weight_decay": DECAY}
STEPS = range(2)
CPU = torch.device("cpu")


def outcome(cases):
    """Of cases (stage, moment of reduction, options): curve, fingerprint, this rank's states."""
    found = []
    for stage, reduce, options in cases:
        engine = engine_of(stage=stage, reduce=reduce, rule=adamw8bit(**RULE), **options)
        curve = train(engine, STEPS)
        assert [e for e in engine.memory if e.planned not in (None, e.measured)] == []
        assert engine.optimizer.torch.state
        found.append((curve, engine.fingerprint(), states_of(engine)))
    return found


# --- written out ------------------------------------------------------------------------------------


def rounded(values, signed):
    """Values as 8 bits have them, code by code."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales, known = blocks.abs().amax(1, keepdim=True), codes(signed, CPU).values
    away = (blocks / torch.where(scales == 0, 1, scales)).double()[..., None] - known.double()
    nearest = away.abs().argmin(-1)
    if not signed:
        nearest = torch.where((nearest == 0) & (blocks > 0), 1, nearest)
    return (known[nearest] * scales).view(-1)[: len(values)]


def written_out(model, norms):
    """The loop with torch.optim.AdamW, whose moments are rounded after every step. Returns states by (name, state)."""
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), fused=True, **RULE)
    for step, norm in zip(STEPS, norms, strict=True):
        for name, grad in gradients_of(model, named, step, norm, 0.5).items():
            named[name].grad = grad
        optimizer.step()
        for p in named.values():
            for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                state = optimizer.state[p][key]
                state.copy_(rounded(state.flatten(), signed).view(state.shape))
        model.zero_grad()
    found = {(name, "master"): p.detach().flatten() for name, p in named.items()}
    return found | {(name, key): optimizer.state[p][key].flatten()
                    for name, p in named.items() for key in ("exp_avg", "exp_avg_sq")}  # fmt: skip


@pytest.fixture(scope="module")
def loop():
    """Norms of an engine's steps -> the states of the written-out loop; of the same norms, once."""
    return cache(lambda *norms: written_out(build(), norms))


@pytest.mark.parametrize(("dp", "stages"), [
    (2, STAGES[::3]), *(pytest.param(dp, STAGES if dp == 2 else STAGES[::3], marks=pytest.mark.long) for dp in (1, 2, 4)),
], ids=lambda given: len(given) if isinstance(given, tuple) else given)  # fmt: skip
def test_exact_training_has_the_bits_of_the_written_out_loop(ranks, loop, dp, stages):
    results = ranks(dp, outcome, [(*case, {}) for case in stages])
    norms = [float.fromhex(norm) for _, norm in results[0][0][0]]
    wanted = loop(*norms)
    for of_rank in results:
        for _, _, states in of_rank:
            assert {key for _, key, *_ in states} == {"master", "exp_avg", "exp_avg_sq"}
            for name, key, start, values in states:
                assert torch.equal(values, wanted[name, key][start : start + len(values)]), (name, key)
    assert len({(str(curve), states) for of_rank in results for curve, states, _ in of_rank}) == 1


BF16 = [(3, "auto", {"precision": "bf16"} | more) for more in ({}, {"master": "split"}, {"ema": 0.9})]


def test_halves_of_masters_and_averages_change_no_bit(ranks):
    usual, split, averaged = ranks(2, outcome, BF16)[0]
    assert split[:2] == usual[:2]
    assert averaged[0] == usual[0]
    assert averaged[1] != usual[1]  # an average is among the states


def memory(options):
    """Bytes per parameter of optimizer states, by formula and as they are."""
    engine = engine_of(rule=adamw8bit(**RULE), exact=False, **options)
    engine.train_batch([summand(0, number) for number in range(SUMMANDS // engine.dp.size)])
    (states,) = [entry for entry in engine.memory if entry.category == "optimizer"]
    return states.planned, states.measured, engine.units[0].layout.shard


@pytest.mark.parametrize("dp", [2, 3])
def test_moments_take_two_bytes_and_no_shard_cuts_a_block(ranks, dp):
    share = sum(p.numel() for p in build().parameters()) / dp
    of_ranks = ranks(dp, memory, {"precision": "bf16"})
    assert of_ranks[0][0] == pytest.approx(share * (4 + 65 / 32), rel=1e-3)  # others may have units of padding alone
    for planned, measured, shard in of_ranks:
        assert share * 4 < planned == measured
        assert shard % BLOCK == 0


# --- other axes -------------------------------------------------------------------------------------


def on_meshes(cases):
    """Losses of cases (family, shape, of which shape the list is, stage), in fp32: of steps, then of an evaluation."""
    found = []
    for family, shape, like, stage in cases:
        count = meshes.count_of(like)
        engine = meshes.engine_of(
            meshes.model_of(family, like), meshes.mesh_of(shape), stage=stage, accumulate=count // shape[0],
            optimizer=adamw8bit(1e-3), precision="fp32",
        )  # fmt: skip
        losses = [meshes.step(engine, number, count)[0] for number in STEPS]
        found.append([*losses, meshes.evaluated(engine, len(STEPS), count)])
        assert [e for e in engine.memory if e.planned not in (None, e.measured)] == []
    return found


@pytest.mark.parametrize("cases", [
    [("llama", (2, 2, 1), 3)], pytest.param([("gpt2", (2, 1, 2), 1), ("moe", (1, 2, 2), 0)], marks=pytest.mark.long),
], ids=len)  # fmt: skip
def test_on_meshes_losses_stay_near(ranks, cases):
    alone = ranks(1, on_meshes, [(family, (1, 1, 1), shape, stage) for family, shape, stage in cases])[0]
    together = ranks(4, on_meshes, [(family, shape, shape, stage) for family, shape, stage in cases])[0]
    for case, wanted, losses in zip(cases, alone, together, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-4), case  # a noisy bit may take the next code


def with_experts(cases):
    found = []
    for ep, stage in cases:
        engine = mixtures.engine_of(
            mixtures.mixture("qwen3_moe"), ep=ep, stage=stage, accumulate=4 // torch.distributed.get_world_size(),
            exact=True, precision="bf16", optimizer=adamw8bit(1e-3), clip_norm=0.05,
        )  # fmt: skip
        assert [e for e in engine.memory if e.planned not in (None, e.measured)] == []
        found.append(mixtures.curve(engine, STEPS, summands=4))
    return found


@pytest.mark.parametrize(("world", "cases"), [
    (2, [(2, 3)]), pytest.param(4, [(1, 3), (2, 1), (4, 3)], marks=pytest.mark.long),
], ids=lambda given: len(given) if isinstance(given, list) else given)  # fmt: skip
def test_experts_have_their_own_blocks_at_any_ep(ranks, world, cases):
    of_one = ranks(1, with_experts, [(1, 3)])[0]
    assert ranks(world, with_experts, cases)[0] == of_one * len(cases)


# --- going on ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_going_on_at_another_dp_is_the_uninterrupted_run(ranks, tmp_path):
    check_going_on(ranks, tmp_path, adamw8bit(**RULE))


def adamw(groups):
    return torch.optim.AdamW(groups, fused=True, **RULE)


def changed(folder, first, second):
    """Curves after two steps and a save, of the same engine and of one with another rule, and what that one says."""
    engine = engine_of(precision="bf16", rule=first, summands=4)
    train(engine, range(2), 4)
    engine.save(folder)
    straight = train(engine, range(2, 4), 4)
    other = engine_of(precision="bf16", rule=second, summands=4)
    other.load(folder)
    return straight, train(other, range(2, 4), 4), other.resumed


@pytest.mark.parametrize("rules", [
    pytest.param((adamw, None), id="into 8 bits"), pytest.param((None, adamw), id="out of 8 bits", marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_goes_on_with_moments_of_another_width(ranks, tmp_path, rules):
    straight, curve, resumed = ranks(2, changed, str(tmp_path), *(rule or adamw8bit(**RULE) for rule in rules))[0]
    assert resumed.startswith("not bitwise")
    assert "moments" in resumed
    near = [pytest.approx(float.fromhex(loss), rel=2e-3) for loss, _ in straight]
    assert [float.fromhex(loss) for loss, _ in curve] == near


# --- refused ----------------------------------------------------------------------------------------


def refused(options):
    with pytest.raises(ConfigError) as caught:
        engine_of(**options)
    return str(caught.value)


def hidden(groups):
    """An optimizer whose blocks no layout knows of."""
    return adamw8bit()(groups)


def test_what_cannot_be_is_one_line(ranks):
    rule = adamw8bit()
    for options, words in (
        (
            {"rule": rule, "offload": {"optimizer": "host"}},
            "on the device, and with offload.optimizer=host .* type offload.optimizer=none",
        ),
        ({"rule": rule, "precision": "fp64"}, "updates fp32 masters, and precision='fp64' has none"),
    ):
        assert re.search(words, ranks(1, refused, options)[0])
    assert "ends inside one: pass zero3d.optim.adamw8bit" in ranks(3, refused, {"rule": hidden, "exact": False})[0]
    assert zero3d.optim.adamw8bit is adamw8bit
