"""Engines on meshes with a tp axis beyond plain training: LoRA, overflow, logits, generation, files, optimizers."""

import pytest
import torch
from meshes import (
    CLIP,
    STEPS,
    engine_of,
    layers_of,
    mesh_of,
    micro_batches,
    model_of,
    oracle,
    run,
    step,
    sum_of,
    world_of,
)
from models import LiftCasts, batch, bits
from tensors import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import save_model, tree

import zero3d
from zero3d.config import Model
from zero3d.models.open import open_model
from zero3d.precision import LossScaling, Precision
from zero3d.train.setup.build import from_config

PLAIN, WHOLE = "model's", "given"  # the loss, as in meshes.LOSSES


# --- LoRA -------------------------------------------------------------------------------------------


def adapted(cases):
    with LiftCasts():
        return [run(case, "fp64", lora=True) for case in cases]


@pytest.mark.long
@pytest.mark.parametrize("cases", [
    pytest.param(
        [("llama", (1, 2, 1), 3, None, False, "none", PLAIN), ("llama", (1, 2, 1), 1, None, True, "full", WHOLE)],
        marks=pytest.mark.long,
    ),
    [("llama", (2, 2, 1), 3, None, True, "every:2", PLAIN)],
    pytest.param([("gpt2", (2, 2, 1), 3, None, False, "full", PLAIN)], marks=pytest.mark.long),
], ids=["(1, 2, 1)", "(2, 2, 1)", "gpt2"])  # fmt: skip
def test_lora_over_frozen_cut_matrices_equals_one_process(ranks, cases):
    everywhere = ranks(world_of(cases[0][1]), adapted, cases)
    assert all(runs == everywhere[0] for runs in everywhere)
    for case, found in zip(cases, everywhere[0], strict=True):
        wanted = oracle(case[0], case[1], case[-1], lora=True)
        assert wanted[0][1] > CLIP
        for here, there in zip(found, wanted, strict=True):
            assert here == pytest.approx(there, rel=1e-10), case


# --- overflow ---------------------------------------------------------------------------------------


def weights_of(engine):
    with engine.full_params():
        return bits(engine.module.parameters())


def overflow_on_one_rank(shape, name, sequence):
    """(scale, applied, norm, whether weights moved) of three steps; the last rank's gradient overflows in the second."""
    mesh, overflows = mesh_of(shape), [False]
    precision = Precision("fp16", LossScaling(initial=256.0, hysteresis=1))
    engine = engine_of(model_of("llama", shape), mesh, stage=3, precision=precision, sequence_parallel=sequence)
    weight = next((p for n, p in engine.module.named_parameters() if n.endswith(name)), None)
    if weight is not None and mesh.rank == mesh.world - 1:
        weight.register_hook(lambda grad: grad * float("inf") if overflows[0] else grad)
    found, before = [], weights_of(engine)
    for number in range(3):
        overflows[0] = number == 1
        step(engine, number, 2 * mesh.dp)
        last, after = engine.last_step, weights_of(engine)
        found.append((float(last.loss_scale), bool(last.applied), str(float(last.grad_norm)), after != before))
        before = after
    return found


@pytest.mark.parametrize(("shape", "name", "sequence"), [
    pytest.param((2, 2, 1), "layers.0.mlp.up_proj.weight", False, marks=pytest.mark.long),  # cut
    pytest.param((1, 2, 2), "layers.3.input_layernorm.weight", True, marks=pytest.mark.long),  # the rank's gradient is a part
    ((1, 2, 1), "model.norm.weight", False),  # all tp ranks have the same, and only the last one's overflows
])  # fmt: skip
def test_an_fp16_overflow_on_one_rank_skips_the_step_on_all(ranks, shape, name, sequence):
    first, *others = ranks(world_of(shape), overflow_on_one_rank, shape, name, sequence)
    assert all(found == first for found in others)
    assert [applied for _, applied, *_ in first] == [moved for *_, moved in first] == [True, False, True]
    assert [scale for scale, *_ in first] == [256.0, 128.0, 128.0]


# --- logits -----------------------------------------------------------------------------------------

VOCABULARY = 104  # no other number of these models


class Widths(TorchDispatchMode):
    """Last dimensions of all tensors that operators take or make, with the most rows of such a one."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        tensors = (t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and t.dim() > 1)
        for t in tensors:
            self.seen[t.shape[-1]] = max(self.seen.get(t.shape[-1], 0), t.shape[:-1].numel())
        return out


def widths(family, shape, loss, sequence):
    """Which of V and V / tp is the last dimension of a tensor of a step."""
    mesh = mesh_of(shape)
    model = model_of(family, shape, vocab_size=VOCABULARY)
    engine = engine_of(model, mesh, stage=2, loss=None if loss == PLAIN else sum_of, sequence_parallel=sequence)
    with Widths() as found:
        step(engine, 0, 2)
    return [width in found.seen for width in (VOCABULARY, VOCABULARY // mesh.tp)]


@pytest.mark.parametrize(("family", "shape", "sequence"), [
    ("qwen3", (1, 2, 1), True),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in (("llama", (1, 2, 1), False), ("moe", (1, 2, 1), False), ("qwen3", (1, 2, 2), False))),
])  # fmt: skip
def test_no_rank_ever_has_logits_of_the_whole_vocabulary(ranks, family, shape, sequence):
    found = ranks(world_of(shape), widths, family, shape, PLAIN, sequence)
    assert not any(whole for whole, _ in found)
    assert [own for _, own in found][-shape[1] :] == [True] * shape[1]  # the last pipeline stage


def rows_of_logits(shape):
    """The most rows of whole logits in an evaluation, and while tokens are generated; 2 sequences of 7."""
    engine = engine_of(model_of("llama", shape, vocab_size=VOCABULARY), mesh_of(shape))
    found = []
    for act in (lambda: engine.evaluate(micro_batches(3, 1)), lambda: engine.generate(batch(5, length=7), 2)):
        with Widths() as seen:
            act()
        found.append(seen.seen.get(VOCABULARY, 0))
    return found


@pytest.mark.parametrize("shape", [(1, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.long)], ids=str)
def test_whole_logits_are_made_of_the_next_token_alone(ranks, shape):
    rows = ranks(world_of(shape), rows_of_logits, shape)
    assert rows == [[0, 2]] * len(rows)  # every rank of a pipeline chooses tokens


def test_a_loss_of_ones_own_gets_logits_of_the_whole_vocabulary(ranks):
    assert ranks(2, widths, "llama", (1, 2, 1), WHOLE, False) == [[True, True]] * 2


# --- generation, evaluation -------------------------------------------------------------------------


def answers(family, shape, sequence):
    """Tokens, evaluated loss, and the first step's loss after both; every rank has another random state."""
    mesh = mesh_of(shape)
    with LiftCasts():
        model = model_of(family, shape)
        model.generation_config.eos_token_id = None
        engine = engine_of(model, mesh, stage=3, sequence_parallel=sequence)
        torch.manual_seed(mesh.rank)
        tokens = [engine.generate(batch(5, length=7), 3, keep_full=keep) for keep in (True, False)]
        loss = engine.evaluate(micro_batches(3, 3))
        return [t.tolist() for t in tokens], float(loss), step(engine, 0, 2)[0]


@pytest.mark.long
@pytest.mark.parametrize(("family", "shape", "sequence"), [
    *(pytest.param(*case, marks=pytest.mark.long) for case in (("qwen3", (1, 2, 1), True), ("gpt2", (1, 2, 1), False))),
    ("llama", (1, 2, 2), True),
])  # fmt: skip
def test_generation_and_evaluation_equal_one_process(ranks, family, shape, sequence):
    layers = {"layers": layers_of(shape)}
    tokens, loss, first = ranks(1, alone, family, layers)[0]
    for here in ranks(world_of(shape), answers, family, shape, sequence):
        assert here[0] == [tokens, tokens]
        assert here[1:] == pytest.approx((loss, first), rel=1e-10)


def alone(family, layers):
    with LiftCasts():
        model = tiny(family, kv_heads=4, **layers)
        model.generation_config.eos_token_id = None
        engine = engine_of(model, zero3d.Mesh(dp=1), stage=0)
        tokens = engine.generate(batch(5, length=7), 3).tolist()
        return tokens, float(engine.evaluate(micro_batches(3, 3))), step(engine, 0, 2)[0]


def samples(shape):
    """Two samples of tokens; every rank has another random state."""
    model = model_of("llama", shape)
    model.generation_config.eos_token_id = None
    engine = engine_of(model, mesh_of(shape), stage=3)
    torch.manual_seed(engine.mesh.rank)
    how = {"do_sample": True, "temperature": 2.0}
    return [engine.generate(batch(5, length=7), 4, keep_full=keep, **how).tolist() for keep in (True, False)]


@pytest.mark.parametrize("shape", [(1, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.long)], ids=str)
def test_sampled_tokens_are_the_same_on_all_ranks_of_a_replica(ranks, shape):
    everywhere = ranks(world_of(shape), samples, shape)
    assert all(tokens == everywhere[0] for tokens in everywhere)
    assert len({str(tokens) for tokens in everywhere[0]}) == 2  # these are samples


def drawn(made):
    """Numbers on a rank with a seed of its own, before an engine and after, and after the engine of a configuration."""
    mesh, model = mesh_of((2, 2, 1)), model_of("llama", (2, 2, 1))
    torch.manual_seed(mesh.rank)
    before = float(torch.rand(()))
    engine_of(model, mesh)
    after = float(torch.rand(()))
    from_config(made)
    return before, after, float(torch.rand(()))


def test_only_the_ranks_of_a_replica_draw_the_same_numbers(ranks, tmp_path):
    save_model(tmp_path / "model", vocab=64)
    before, *after = zip(*ranks(4, drawn, tree(tmp_path, mesh={"tp": 2})), strict=True)
    assert len(set(before)) == 4
    for found in after:
        assert found[0] == found[1] != found[2] == found[3]


# --- files ------------------------------------------------------------------------------------------


def train_both(folder, shape):
    """A step of a model loaded whole and of one whose slices are read from files, and the weights after it."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = open_model(Model(path=str(folder)))
    found = []
    for model, weights in ((whole, None), (opened.module, opened.weights)):
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        engine = engine_of(model, mesh_of(shape), stage=3, precision="fp32", weights=weights)
        found.append([step(engine, 0), weights_of(engine)])
    return found


@pytest.mark.parametrize(("family", "shape"), [
    ("qwen3", (1, 2, 1)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (("gpt2", (1, 2, 1)), ("moe", (1, 2, 2)))),
])  # fmt: skip
def test_slices_read_from_files_train_like_slices_of_the_whole_model(ranks, tmp_path, family, shape):
    tiny(family, kv_heads=4).save_pretrained(tmp_path, max_shard_size="20KB")
    for whole, slices in ranks(world_of(shape), train_both, tmp_path, shape):
        assert slices == whole


# --- optimizers -------------------------------------------------------------------------------------


def built_before(shape):
    """Losses, norms and rates; the optimizer has two groups, the scheduler is bound to it."""
    with LiftCasts():
        model = model_of("qwen3", shape)
        optimizer, scheduler = made(model)
        engine = engine_of(model, mesh_of(shape), stage=2, optimizer=optimizer, scheduler=scheduler)
        return [(*step(engine, number), float(engine.last_step.lr)) for number in range(STEPS)]


def made(model):
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": norms, "weight_decay": 0.0, "lr": 0.3}, {"params": rest, "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.parametrize("shape", [(1, 2, 1), pytest.param((2, 2, 1), marks=pytest.mark.long)], ids=str)
def test_an_optimizer_and_a_scheduler_built_before_keep_their_groups_over_tp(ranks, shape):
    wanted = oracle("qwen3", shape, PLAIN, made=made)
    for found in ranks(world_of(shape), built_before, shape):
        assert [rate for *_, rate in found] == [0.3, 0.15]
        for here, there in zip(found, wanted, strict=True):
            assert here[:2] == pytest.approx(there, rel=1e-10)
