"""Kernels of mixers by formula, worked by hand, and their stand-ins where a model is traced; what torch counts of their code."""

from dataclasses import replace

import pytest
import torch
from hybrids import hybrid
from tensors import tiny
from torch.utils.flop_counter import FlopCounterMode

from zero3d.models.mixing import CONVOLUTION, FUSED
from zero3d.tools.plan import mixers
from zero3d.tools.plan.estimate import KERNELS, ONE_DOCUMENT, evaluate
from zero3d.tools.plan.footprint import run_of
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.kernels import KERNELS as RATES, works
from zero3d.tools.plan.mixers import DeltaHeads, Kernel, SsdHeads
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim import mixer_kernels
from zero3d.tools.sim.figures import RunAs, measure
from zero3d.tools.sim.live import StorageTracker
from zero3d.tools.sim.mixer_kernels import ALL, as_kernels
from zero3d.tools.sim.model_spec import trace
from zero3d.tools.sim.units import find_part_names

LENGTH = 64


def on_meta(name, **options):
    with torch.device("meta"):
        return hybrid(name, **options)


# --- by hand ------------------------------------------------------------------------------------------------------


def test_a_gated_delta_rule():
    # 4 tokens in 2 chunks of 2; 1 head of keys of width 3, 2 heads of values of width 5; numbers of 2 bytes
    found = mixers.delta_rule(1, 4, DeltaHeads(1, 2, 3, 5), width=2, chunk=2)
    kept = 2 * 4 * (3 * 2 + 4) + 8 * (4 + 2 * 2)  # q and k with their norms; a sum of gates, 2 numbers of the inverse
    states = 2 * (2 * 2) * (3 * 5)  # 2 bytes, of 2 chunks and 2 heads
    w, u, new = 8 * 3 * 2, 8 * 5 * 2, 8 * 5 * 2
    dw, dk, by_head, du, dv = 8 * 3 * 2, 8 * 3 * 2, 4 * 3 * 2, 8 * 5 * 2, 0
    # K K^T, Q K^T, W: 2 x 2 x 2 x 3; U, (Q K^T) V: 2 x 2 x 2 x 5; W S, Q S, K^T V: 2 x 2 x 3 x 5; the triangle's inverse: 2
    products = 3 * 24 + 2 * 40 + 3 * 60 + 2
    again = 10 * 24 + 5 * 40 + 8 * 60 + 2 * 16
    assert found == Kernel(kept, w + u + new + states, w + u + new + dw + dk + by_head + du + dv + 2 * states,
                           4 * products, 4 * again)  # fmt: skip
    assert found == Kernel(144, 328, 648, 1336, 3808)


def test_kimis_delta_rule_keeps_gates_by_channel():
    found = mixers.delta_rule(1, 4, DeltaHeads(2, 2, 3, 5), width=2, chunk=2, by_channel=True)
    kept = 2 * 8 * (3 * 2 + 4) + 8 * (3 * 4 + 2 * 2 * 2)  # fp32 sums of gates for every channel; two squares of a chunk
    forward = 8 * (2 * 3 + 2 * 5) * 2 + 8 * 16 * 4 + 120  # W and gated K, U and new V; fp32 blocks of 16; states
    backward = 8 * (3 * 3 + 2 * 5) * 2 + 8 * 4 * (6 * 3 + 2 * 2) + 2 * 120  # gradients of q, k, g twice in fp32
    again = 7 * 24 + 5 * 40 + 8 * 60 + 2 * 16
    assert found == Kernel(kept, forward, backward, 1336, 4 * again) == Kernel(320, 888, 1248, 1336, 3520)


def test_keys_that_are_not_normed_are_their_own_inputs():
    normed, plain = (mixers.delta_rule(1, 4, DeltaHeads(1, 2, 3, 5), 2, 2, normed=normed) for normed in (True, False))
    assert normed.kept - plain.kept == 2 * 4 * (3 * 2 + 4)
    assert normed.products == plain.products


def test_mamba2():
    # 3 tokens in 2 chunks of 2, 2 heads of 4, a group, states of 5
    found = mixers.mamba2(1, 3, SsdHeads(2, 4, 1, 5), chunk=2, width=2)
    steps, states, scores = 4 * 4 * 2, 2 * 2 * 4 * 5, 4 * (2 * 2 * 2)  # fp32; numbers; fp32
    forward = steps + (4 + 2) * states  # states in fp32, and passed on in 2 bytes
    backward = 3 * 2 * 2 + 2 * steps + scores + (4 + 4 + 2 + 2) * states
    products = 40 + 2 * (32 + 2 * 80)  # C B^T of a group; (C B^T) x, and states and their outputs, of a head
    again = 3 * 40 + 2 * (3 * 32 + 5 * 80)
    assert found == Kernel(steps, forward, backward, 2 * products, 2 * again) == Kernel(32, 512, 1068, 848, 2224)
    gated = mixers.mamba2(1, 3, SsdHeads(2, 4, 1, 5), 2, 2, gated=True)
    assert gated == found._replace(kept=32 + 3 * 8 * 2)


def test_mamba2_with_small_states_is_fullest_with_its_scores():
    found = mixers.mamba2(1, 8, SsdHeads(1, 1, 2, 1), chunk=8, width=2)
    steps, states, scores = 4 * 8, 1, 4 * 8 * 2 * 8
    assert found.forward == steps + 2 * states + scores
    assert found.backward == 8 * 2 + 2 * steps + scores + 4 * states + 2 * 4 * 8 * 2 + scores


def test_mamba1_keeps_a_state_between_chunks_of_2048():
    # 3 channels, states of 2, 2,049 tokens: 2 chunks, of each channel and state a product and a state in fp32
    found = mixers.mamba1(1, 2049, channels=3, state=2, width=2)
    assert found == Kernel(3 * 2 * 2 * 2 * 4, 0, 2 * 2049 * 2 * 4, 6 * 2049 * 3 * 2, 18 * 2049 * 3 * 2)
    assert mixers.mamba1(1, 2049, 3, 2, 2, gated=True).kept == found.kept + 2049 * 3 * 2


def test_short_convolution():
    assert mixers.convolution(2, 5, 3, 4, active=False) == Kernel(0, 0, 0, 2 * 4 * 30, 4 * 4 * 30)
    assert mixers.convolution(2, 5, 3, 4, active=True).again == 6 * 4 * 30


def test_fused_mixers_keep_little_and_compute_it_again():
    scan, conv = mixers.mamba2(1, 2, SsdHeads(2, 4, 1, 3), 2, 2), mixers.convolution(1, 2, 8 + 6, 4, active=True)
    found = mixers.fused_mamba2(1, 2, SsdHeads(2, 4, 1, 3), chunk=2, width=2, taps=4)
    assert found.kept == 2 * (8 * 2 + 4)  # the scan's output, and a norm of a group
    assert found.forward == 2 * 14 * 2 + scan.kept + scan.forward
    assert found.backward == 2 * (2 * 14 * 2) + 3 * (2 * 8 * 2) + scan.backward
    assert found == Kernel(40, 232, 552, 280 + 224, 744 + 672 + 224)
    assert (scan.products, conv.products) == (280, 224)
    found = mixers.fused_mamba1(1, 2, channels=4, state=3, rank=2, width=2, taps=4)
    assert found.kept == 4 * 3 * 2 * 4 + 2 * 4 * 2 + 2 * (2 + 6) * 2 + 2 * 6 * 2  # states; output; dt, B, C; B, C
    assert found == Kernel(168, 48, 176, 144 + 64, 432 + 192 + 64)


# --- stand-ins ----------------------------------------------------------------------------------------------------


def called(name, **given):
    """A kernel's stand-in: bytes alive behind its forward, its output's left out; operations of both directions."""
    live = StorageTracker()
    live.leave_out(*(t for t in given.values() if isinstance(t, torch.Tensor)))
    with live:
        output = mixer_kernels._STAND_INS[name](given)
        output = output[0] if isinstance(output, tuple) else output
        alive = sum(change for change, _ in live.events) - output.untyped_storage().nbytes()
        forward = sum(n for _, n, _ in live.flops)
        output.backward(torch.empty_like(output))
    return output, alive, forward, sum(n for _, n, _ in live.flops) - forward


def numbers(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)


def test_the_stand_in_of_a_delta_rule_copies_what_is_not_contiguous_and_has_its_formulas_bytes():
    mixed = numbers(1, 4, 2 * 3 + 2 * 5)
    q, k, v = (
        part.unflatten(-1, (-1, width)) for part, width in zip(mixed.split([3, 3, 10], -1), (3, 3, 5), strict=True)
    )
    g, beta = torch.zeros(1, 4, 2, requires_grad=True), numbers(1, 4, 2)
    output, alive, forward, backward = called(
        "torch_chunk_gated_delta_rule",
        query=q,
        key=k,
        value=v,
        g=g,
        beta=beta,
        chunk_size=2,
        use_qk_l2norm_in_kernel=True,
    )
    assert output.shape == (1, 4, 2, 5)
    assert output.dtype == torch.bfloat16
    assert alive == 144 + 4 * 10 * 2  # and a copy of the values
    assert (forward, backward) == (1336, 3808)
    assert mixed.grad.shape == mixed.shape
    assert g.grad.dtype == torch.float32
    assert beta.grad is not None


def test_the_stand_in_of_mamba2_keeps_views_of_its_inputs():
    x, dt, b = numbers(1, 3, 2, 4), numbers(1, 3, 2), numbers(1, 3, 1, 5)
    a = torch.zeros(2, requires_grad=True)
    output, alive, *operations = called("mamba2_chunk_scan", hidden_states=x, dt=dt, A=a, B=b, C=b, chunk_size=2, D=a)
    assert output.shape == x.shape
    assert alive == 32
    assert operations == [848, 2224]


def test_the_stand_in_of_mamba1_copies_what_lies_by_channel():
    x = numbers(1, 5, 3).transpose(1, 2)
    a, b = torch.zeros(3, 2, requires_grad=True), numbers(1, 2, 5)
    output, alive, *operations = called(
        "mamba_selective_scan", hidden_states=x, dt=numbers(1, 3, 5), A=a, B=b, C=b, z=x
    )
    kernel = mixers.mamba1(1, 5, 3, 2, 2, gated=True)
    assert output.shape == x.shape
    assert alive == kernel.kept + 2 * 5 * 3 * 2
    assert operations == [kernel.products, kernel.again]


def test_a_fused_kernel_multiplies_by_out_proj_and_keeps_no_input_of_it():
    mixed, filters, weight = numbers(1, 2, 8 + 14 + 2), numbers(14, 4), numbers(6, 8)
    heads = torch.zeros(2, requires_grad=True)
    output, alive, forward, backward = called(
        FUSED[0], zxbcdt=mixed, conv1d_weight=filters, conv1d_bias=None, dt_bias=heads, A=heads, D=heads, chunk_size=2,
        rmsnorm_weight=numbers(8), outproj_weight=weight, outproj_bias=None, headdim=4, ngroups=1,
    )  # fmt: skip
    assert output.shape == (1, 2, 6)
    assert alive == 40
    assert (forward, backward) == (504 + 2 * 2 * 6 * 8, 1640 + 2 * 2 * 2 * 6 * 8)
    assert weight.grad.shape == weight.shape
    assert filters.grad is not None


@pytest.mark.long
def test_names_are_given_back_and_fused_kernels_give_way_to_pieces():
    from transformers.models.mamba2 import modeling_mamba2 as file

    model, before = on_meta("mamba2"), {name: vars(file)[name] for name in (CONVOLUTION, FUSED[0])}
    with as_kernels(model, ALL, in_pieces=True):
        assert vars(file)[CONVOLUTION] is not before[CONVOLUTION]
        assert vars(file)[FUSED[0]](None) is None
    assert {name: vars(file)[name] for name in before} == before
    with as_kernels(model, ALL, in_pieces=False):
        assert kernel_runs(vars(file)[FUSED[0]])
        model.backbone.layers[0].mixer.out_proj.register_forward_hook(lambda *_: None)
    with as_kernels(model, ALL, in_pieces=False):
        assert vars(file)[FUSED[0]](None) is None


def kernel_runs(function):
    """Whether a stand-in asks for its inputs, as one that gives way does not."""
    with pytest.raises(KeyError, match="zxbcdt"):
        function()
    return True


# --- plans --------------------------------------------------------------------------------------------------------


def test_a_traced_block_has_its_kernels_operations():
    model = on_meta("qwen3_5_text")
    by_part = measure(model, find_part_names(model), LENGTH, 1, run_as=RunAs(kernels=ALL))
    delta = mixers.delta_rule(1, LENGTH, DeltaHeads(2, 4, 8, 8), 2)
    conv = mixers.convolution(1, LENGTH, 2 * 16 + 32, 4, active=True)
    assert by_part[0].scores == delta.products + conv.products
    assert by_part[0].moved > 0 == by_part[1].moved


@pytest.mark.long
def test_a_traced_hybrid_has_its_kernels_operations_by_heads_and_plans_say_so():
    model = on_meta("qwen3_5_text")
    spec, in_torch = trace(model, LENGTH, packed=True, kernels=ALL), trace(model, LENGTH, packed=True)
    delta = mixers.delta_rule(1, LENGTH, DeltaHeads(2, 4, 8, 8), 2)
    conv = mixers.convolution(1, LENGTH, 2 * 16 + 32, 4, active=True)
    block = spec.parts[1].operations
    assert block.scores * LENGTH == pytest.approx(delta.products + conv.products, rel=1e-12)
    assert block.over_tp.scores == pytest.approx(block.scores, rel=1e-12)  # of all ranks together
    assert (
        block.kept_cut + block.kept_whole
        < in_torch.parts[1].operations.kept_cut + in_torch.parts[1].operations.kept_whole
    )
    assert block.moved > 0 == in_torch.parts[1].operations.moved == spec.parts[2].operations.moved
    plan, card = ParallelPlan(dp=2), cluster("h100", 2)
    slow = replace(spec, parts=tuple(replace(p, operations=replace(p.operations, moved=0.0)) for p in spec.parts))
    with_bytes, without = (works(each, plan, card, 1.0, RATES)[1].attention for each in (spec, slow))
    seconds = block.moved * LENGTH / (0.8 * card.gpu.bandwidth)
    assert with_bytes.forward - without.forward == pytest.approx(seconds)
    assert with_bytes.backward - without.backward == pytest.approx(2 * seconds)
    assert KERNELS in evaluate(spec, card, plan).notes
    assert ONE_DOCUMENT in evaluate(in_torch, cluster("cpu", 2), plan).notes


@pytest.mark.long
def test_plans_have_fused_kernels_where_they_run():
    spec = trace(on_meta("mamba2"), LENGTH, kernels=ALL)
    block, fused = spec.parts[1], spec.parts[1].operations.fused
    assert fused.kept_cut + fused.kept_whole < block.operations.kept_cut + block.operations.kept_whole
    for plan, runs in (
        (ParallelPlan(dp=2), True),
        (ParallelPlan(dp=1, tp=2), False),
        (ParallelPlan(dp=2, sp=2), False),
    ):
        assert (run_of(spec, plan).operations(block) is fused) == runs
    assert trace(on_meta("mamba2"), LENGTH, packed=True, kernels=ALL).parts[1].operations.fused is None


@pytest.mark.long
def test_a_model_without_mixers_is_traced_as_before():
    model = tiny("llama")
    assert trace(model, 16, kernels=ALL) == trace(model, 16)


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2", "lfm2"])
def test_on_a_cpu_the_products_of_torchs_own_code_are_counted(name):
    """All blocks of a real forward by torch's counter, which knows no flash attention of CPUs."""
    model = hybrid(name, attn_implementation="eager")
    spec = trace(model, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, LENGTH, dtype=torch.int64))
    planned = sum(part.operations.matrices + part.operations.scores for part in spec.parts)
    assert counter.get_total_flops() == pytest.approx(2 * LENGTH * planned, rel=1e-9)
