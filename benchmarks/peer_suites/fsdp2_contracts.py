"""FSDP2's contracts on our engine: what tests of torch assert about `fully_shard`, in our own words.

    PyTorch, test/distributed/_composable/fsdp/FILE::CLASS::TEST      @contract("FILE::CLASS::TEST")

Those tests call `fully_shard` and look into DTensors, so they cannot run here. Each function below asserts on `Engine`
what the test that it is named after asserts on FSDP2. `Pair` is what most of them use: a plain model that sees the
batches of all ranks, and an engine that sees those of its own; after some steps their weights are the same.
"""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes
from torch.utils.checkpoint import checkpoint

from zero3d import Engine

WIDTH, ROWS, RANKS = 16, 4, 2
TIMEOUT_S, LINES = 120, 6
CONTRACTS: dict[str, Callable[[], None]] = {}


def contract(test: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Name a function after the test of torch's that it stands for."""

    def keep(function: Callable[[], None]) -> Callable[[], None]:
        CONTRACTS[test] = function
        return function

    return keep


def run() -> dict[str, tuple[str, str]]:
    """Return (outcome, last lines) of every contract, each on ranks of its own."""
    found: dict[str, tuple[str, str]] = {}
    for test in CONTRACTS:
        found[test] = _outcome(test)
        print(f"{found[test][0]} {test}\n{found[test][1]}".rstrip(), flush=True)
    return found


def _outcome(test: str) -> tuple[str, str]:
    with TemporaryDirectory(prefix="zero3d-contracts-") as folder:
        context = start_processes(_on_rank, (folder, test), nprocs=RANKS, join=False, start_method="fork")
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while not context.join(timeout=5):
                if time.monotonic() > deadline:
                    return "failed", f"took over {TIMEOUT_S} s"
        except ProcessRaisedException as error:
            return "failed", "\n".join(str(error).rstrip().splitlines()[-LINES:])
        except ProcessExitedException as error:
            return "failed", str(error)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
    return "passed", ""


def _on_rank(rank: int, folder: str, test: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    CONTRACTS[test]()
    dist.barrier()
    dist.destroy_process_group()


# --- models ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two layers and a norm around a residual."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        """The block itself."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, and a head; `times` runs the blocks over and over."""

    def __init__(self, blocks: int = 3, recompute: bool = False, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(recompute) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """What the head is given."""
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return x


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(32, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, length] to logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Partial(Net):
    """Uses blocks 0 and 1 only, and returns what nobody back-propagates through beside what counts."""

    def forward(self, x: Tensor, unused: bool = False) -> tuple[Tensor, Tensor]:
        """(what counts, what does not)."""
        first = self.layers[0](x)
        second = self.layers[1](first)
        return (first if unused else second), second


@dataclass
class Both:
    """A dataclass that goes into a module and comes out."""

    x: Tensor
    name: str


class Dataclasses(nn.Module):
    """Takes a `Both`, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wrapping() for _ in range(2))

    def forward(self, both: Both) -> Both:
        """The blocks in turn."""
        for layer in self.layers:
            both = layer(both)
        return both


class Wrapping(nn.Module):
    """A block for dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, both: Both) -> Both:
        """The same with another x."""
        return Both(self.block(both.x), both.name)


# --- a plain model and an engine ------------------------------------------------------------------


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Both sides' optimizer.

    Without weight decay a parameter without a gradient stays as one with zeros does; the large eps keeps updates from
    gradients that are nothing but rounding small.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, eps=1e-3)


def mine(batch: Tensor) -> Tensor:
    """Return this rank's rows of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def batches(count: int, rows: int = ROWS) -> list[Tensor]:
    """Return inputs for all ranks, the same on each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


class Pair:
    """plain: sees whole batches; engine: this rank's rows."""

    def __init__(self, model: nn.Module, precision: str = "fp32", **options: Any) -> None:
        self.plain = model
        self.optimizer = adam([p for p in model.parameters() if p.requires_grad])
        settings = {"precision": precision, "clip_norm": None, "optimizer": adam} | options
        self.engine = Engine(copy.deepcopy(model), **settings)

    def step(self, batch: Tensor, loss: Callable[[Any], Tensor] | None = None, **how: Any) -> None:
        """One step on both sides."""
        loss = loss or (lambda out: out.square().mean())
        self.optimizer.zero_grad(set_to_none=False)  # to the engine, no gradient is one of zeros
        loss(self.plain(batch, **how)).backward()
        self.optimizer.step()
        self.engine.backward(loss(self.engine(mine(batch), **how)))
        self.engine.step()

    def compare(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Compare all weights."""
        plain = dict(self.plain.named_parameters())
        with self.engine.full_params():
            ours = dict(self.engine.module.named_parameters())
            assert list(ours) == list(plain)
            for name, p in ours.items():
                torch.testing.assert_close(p.detach().float(), plain[name].detach(), rtol=rtol, atol=atol, msg=name)


# --- init -----------------------------------------------------------------------------------------


@contract("test_fully_shard_init.py::TestFullyShardShardedParameterTensor::test_shard_tensor_parameters")
def parameters_are_sharded() -> None:
    """Each rank owns about its share of the parameters, together they own all, and gathered these are whole."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))  # of a size at which padding does not matter
    before, total = copy.deepcopy(model.state_dict()), sum(p.numel() for p in model.parameters())
    engine = Engine(model, precision="fp32")
    owned = torch.tensor(sum(p.numel() for group in engine.optimizer.torch.param_groups for p in group["params"]))
    assert owned < 0.6 * total, (owned, total)
    dist.all_reduce(owned)
    assert owned == total
    with engine.full_params():
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value, before[name]), name


@contract("test_fully_shard_init.py::TestFullyShardMetaDeviceInit::test_rank0_broadcast_meta_device_init")
def rank_0_wins_where_models_differ() -> None:
    """Ranks that are given other weights train those of rank 0."""
    torch.manual_seed(dist.get_rank())
    engine = Engine(Net(), precision="fp32")
    torch.manual_seed(0)
    expected = Net().state_dict()
    with engine.full_params():
        assert all(torch.equal(value, expected[name]) for name, value in engine.module.state_dict().items())


# --- training -------------------------------------------------------------------------------------


@contract("test_fully_shard_training.py::TestFullyShardRegisteredParams::test_param_registration_after_forward")
def parameters_stay_registered() -> None:
    """named_parameters() has the same names and objects before and after a forward."""
    engine = Engine(Net(), precision="fp32")
    before = dict(engine.module.named_parameters())
    engine(mine(batches(1)[0]))
    after = dict(engine.module.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is p and isinstance(p, nn.Parameter) for name, p in before.items())


@contract("test_fully_shard_training.py::TestFullyShardRegisteredParams::test_param_registration_after_backward")
def parameters_stay_registered_after_backward() -> None:
    """And after a backward; what is not gathered takes no memory."""
    engine = Engine(Net(), precision="fp32", release="every_use")
    before = dict(engine.module.named_parameters())
    engine.backward(engine(mine(batches(1)[0])).sum())
    assert all(dict(engine.module.named_parameters())[name] is p for name, p in before.items())


@contract("test_fully_shard_training.py::TestFullyShardCastAfterInit::test_to_float64_after_init")
def trains_in_float64() -> None:
    """Weights, gradients and states may be float64."""
    pair = Pair(Net().double(), precision="fp64")
    for batch in batches(4):
        pair.step(batch.double())
    with pair.engine.full_params():
        for (name, p), q in zip(pair.engine.module.named_parameters(), pair.plain.parameters(), strict=True):
            assert p.dtype == torch.float64
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-12, msg=name)


@contract("test_fully_shard_training.py::TestFullyShard1DTrainingCore::test_train_parity_single_group_shard_dim0")
def one_unit_trains_like_a_plain_model() -> None:
    """A model that is one unit; its sizes do not divide by the ranks."""
    pair = Pair(nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, 3)), units=[])
    for batch in batches(10):
        pair.step(batch)
    pair.compare()


@contract("test_fully_shard_training.py::TestFullyShard1DTrainingCore::test_train_parity_multi_group")
def units_train_like_a_plain_model() -> None:
    """At every stage, with units released after every use or kept until the step."""
    for options in ({"release": "every_use"}, {"release": "every_step"}, {"stage": 2}, {"stage": 1}, {"stage": 0}):
        pair = Pair(Net(), **options)
        for batch in batches(6):
            pair.step(batch)
        pair.compare()


@contract("test_fully_shard_training.py::TestFullyShard1DTrainingCore::test_train_parity_multi_group_cpu_offload_eager")
def offloaded_units_train_like_a_plain_model() -> None:
    """With weights and states in the host's memory."""
    pair = Pair(Net(), offload={"optimizer": "host", "params": "host"})
    for batch in batches(6):
        pair.step(batch)
    pair.compare()


@contract("test_fully_shard_training.py::TestFullyShard1DTrainingCore::test_non_root_forward_backward")
def a_block_runs_outside_the_model() -> None:
    """A forward and backward of a block alone count with those of the model."""
    pair = Pair(Net())
    for batch in batches(4):
        pair.optimizer.zero_grad()
        (pair.plain.layers[1](batch).square().mean() + pair.plain(batch).square().mean()).backward()
        pair.optimizer.step()
        alone = pair.engine.module.layers[1](mine(batch)).square().mean()
        pair.engine.backward(alone + pair.engine(mine(batch)).square().mean())
        pair.engine.step()
    pair.compare()


@contract("test_fully_shard_training.py::TestFullyShard1DTrainingCore::test_multi_forward_module")
def a_block_runs_several_times_in_a_forward() -> None:
    """Gradients of all uses are added up."""
    pair = Pair(Net(times=3))
    for batch in batches(5):
        pair.step(batch)
    pair.compare()


@contract(
    "test_fully_shard_training.py::TestFullyShard1DTrainingCompose::test_train_parity_with_activation_checkpointing"
)
def recomputed_blocks_train_like_a_plain_model() -> None:
    """With torch.utils.checkpoint inside the blocks."""
    pair = Pair(Net(recompute=True))
    for batch in batches(5):
        pair.step(batch)
    pair.compare()


@contract("test_fully_shard_training.py::TestFullyShardSharedParams::test_train_parity_with_shared_params")
def tied_weights_train_like_a_plain_model() -> None:
    """The embedding is the head, before and after."""
    pair = Pair(Tied())
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        pair.step(torch.randint(0, 32, (ROWS, 6), generator=generator))
    pair.compare()
    assert pair.engine.module.head.weight is pair.engine.module.embedding.weight


@contract("test_fully_shard_training.py::TestFullyShardGradientAccumulation::test_gradient_accumulation")
def micro_batches_equal_the_big_batch() -> None:
    """Reduced in every micro-batch, or in the last one alone."""
    for options in ({}, {"reduce": "every_step"}, {"release": "every_step"}, {"stage": 2}, {"stage": 1}):
        pair = Pair(Net(), accumulate=4, **options)
        for batch in batches(3, 4 * ROWS):
            pair.optimizer.zero_grad()
            pair.plain(batch).square().mean().backward()
            pair.optimizer.step()
            for micro in batch.chunk(4):
                pair.engine.backward(pair.engine(mine(micro)).square().mean())
            pair.engine.step()
        pair.compare()


@contract("test_fully_shard_training.py::TestFullyShardGradientAccumulation::test_1f1b_microbatching")
def forwards_run_ahead_of_their_backwards() -> None:
    """Two forwards, then in turn a backward and a forward, as one stage of a pipeline does it."""
    pair = Pair(Net(), accumulate=4)
    for batch in batches(3, 4 * ROWS):
        pair.optimizer.zero_grad()
        pair.plain(batch).square().mean().backward()
        pair.optimizer.step()
        waiting: list[Tensor] = []
        for micro in batch.chunk(4):
            waiting.append(pair.engine(mine(micro)).square().mean())
            if len(waiting) == 2:
                pair.engine.backward(waiting.pop(0))
        pair.engine.backward(waiting.pop(0))
        pair.engine.step()
    pair.compare()


@contract("test_fully_shard_training.py::TestFullyShardCustomForwardMethod::test_register_fsdp_forward_method")
def another_method_runs_the_blocks() -> None:
    """A model is trained through a method that is not its forward, whose blocks it calls; `last` ends the step."""
    pair = Pair(Net())
    for batch in batches(4):
        pair.optimizer.zero_grad()
        pair.plain.features(batch).square().mean().backward()
        pair.optimizer.step()
        pair.engine.backward(pair.engine.module.features(mine(batch)).square().mean(), last=True)
        pair.engine.step()
    pair.compare()


# --- frozen parameters ----------------------------------------------------------------------------


@contract("test_fully_shard_frozen.py::TestFullyShardFrozen::test_train_mixed_requires_grad_per_group")
def frozen_and_trained_in_one_unit() -> None:
    """Biases are frozen, weights are trained."""
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith("bias"))
    pair = Pair(model)
    for batch in batches(5):
        pair.step(batch)
    pair.compare()


@contract("test_fully_shard_frozen.py::TestFullyShardFrozen::test_train_mixed_requires_grad_across_groups")
def whole_units_are_frozen_and_thawed() -> None:
    """Blocks in turn; frozen ones stay as they are."""
    model = Net()
    model.layers[1].requires_grad_(False)
    pair = Pair(model)
    for batch in batches(3):
        pair.step(batch)
    pair.compare()
    model.layers[1].requires_grad_(True)
    pair.optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    pair.engine.unfreeze("layers.1.*")
    for batch in batches(3):
        pair.step(batch)
    pair.compare()


@contract("test_fully_shard_frozen.py::TestFullyShardFrozen::test_multi_forward_mixed_requires_grad")
def frozen_parameters_run_several_times() -> None:
    """A unit with frozen parameters is used three times in a forward."""
    model = Net(times=3)
    for layer in model.layers:
        layer.up.requires_grad_(False)
    pair = Pair(model)
    for batch in batches(4):
        pair.step(batch)
    pair.compare()


# --- mixed precision ------------------------------------------------------------------------------


@contract("test_fully_shard_mixed_precision.py::TestFullyShardMixedPrecisionTraining::test_compute_dtype")
def computes_in_bf16_with_fp32_masters() -> None:
    """A forward sees bf16 weights, and the update is of fp32 masters."""
    seen = set()
    pair = Pair(Net(), precision="bf16")
    handle = pair.engine.module.layers[0].up.register_forward_hook(
        lambda module, given, out: seen.update({module.weight.dtype, given[0].dtype, out.dtype})
    )
    for batch in batches(4):
        pair.step(batch, lambda out: out.float().square().mean())
    handle.remove()
    assert seen == {torch.bfloat16}
    assert {p.dtype for group in pair.engine.optimizer.torch.param_groups for p in group["params"]} == {torch.float32}
    pair.compare(rtol=0.1, atol=3e-2)


@contract("test_fully_shard_mixed_precision.py::TestFullyShardMixedPrecisionTraining::test_reduce_dtype")
def gradients_are_summed_in_fp32() -> None:
    """1 of rank 0 and 2^-9 of rank 1 are both in the sum, which bf16 could not hold."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = Engine(
        model, precision="bf16", clip_norm=None, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )
    factor = 1.0 if dist.get_rank() == 0 else 2.0**-9
    engine.backward(engine(torch.full((1, 1), factor)).float().sum())
    engine.step()
    owned = torch.cat([p.detach().flatten() for g in engine.optimizer.torch.param_groups for p in g["params"]])
    total = owned.sum()
    dist.all_reduce(total)
    assert total.item() == -(1.0 + 2.0**-9) / 2


@contract("test_fully_shard_mixed_precision.py::TestFullyShardMixedPrecisionTraining::test_grad_acc_with_reduce_dtype")
def gradients_are_accumulated_in_fp32() -> None:
    """256 micro-batches of 1 with one of 2^-1 beside them, which bf16 would lose."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine = Engine(
        model, precision="bf16", clip_norm=None, accumulate=257, reduce="every_step",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )  # fmt: skip
    for micro in range(257):
        engine.backward(engine(torch.full((1, 1), 1.0 if micro else 0.5)).float().sum())
    engine.step()
    owned = torch.cat([p.detach().flatten() for g in engine.optimizer.torch.param_groups for p in g["params"]])
    total = owned.sum()
    dist.all_reduce(total)
    assert abs(total.item() + 256.5 / 257) < 1e-6, total.item()


@contract("test_fully_shard_mixed_precision.py::TestFullyShardMixedPrecisionCasts::test_dataclass_input")
def tensors_in_dataclasses_are_cast() -> None:
    """An fp32 tensor inside a dataclass comes to a bf16 model as bf16."""
    engine = Engine(Dataclasses(), precision="bf16", optimizer=adam)
    out = engine(Both(mine(batches(1)[0]), "x"))
    assert out.x.dtype == torch.bfloat16
    assert out.name == "x"
    engine.backward(out.x.float().sum())
    engine.step()


@contract("test_fully_shard_mixed_precision.py::TestFullyShardMixedPrecisionCasts::test_norm_modules_bf16")
def norms_run_in_bf16() -> None:
    """Norms run forward and backward with bf16 weights. A batch norm's fp32 buffers would need a GPU's kernels."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    engine = Engine(model, precision="bf16", optimizer=adam)
    out = engine(mine(batches(1)[0]))
    assert out.dtype == torch.bfloat16
    engine.backward(out.float().sum())
    assert engine.step().applied


# --- clipping and scaling -------------------------------------------------------------------------


@contract("test_fully_shard_clip_grad_norm_.py::TestClipGradNormWorldSize2::test_clip_grad_norm_1d")
def the_norm_is_that_of_all_shards() -> None:
    """The norm before clipping is the plain model's, and the clipped steps are."""
    pair = Pair(Net(), clip_norm=0.05)
    for batch in batches(4):
        pair.optimizer.zero_grad()
        pair.plain(batch).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        pair.optimizer.step()
        pair.engine.backward(pair.engine(mine(batch)).square().mean())
        torch.testing.assert_close(torch.as_tensor(pair.engine.step().grad_norm).float(), norm, rtol=1e-5, atol=0.0)
    pair.compare()


@contract("test_fully_shard_grad_scaler.py::TestFullyShardGradientScaler::test_gradient_scaler")
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """Weights stay, and the loss scale goes down on every rank."""
    engine = Engine(Net(), precision="fp16", optimizer=adam, clip_norm=None)
    before, scale = engine.whole_state_dict(), float(engine.loss_scale.value)
    for _ in range(4):  # by then the hysteresis is used up
        out = engine(mine(batches(1)[0])).float().square().mean()
        engine.backward(out * (float("inf") if dist.get_rank() == 1 else 1.0))
        assert not engine.step().applied
    after = engine.whole_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    scales = torch.tensor([float(engine.loss_scale.value)] * 2)
    dist.all_reduce(scales[1:])
    assert scales[0] < scale
    assert scales[1] == RANKS * scales[0]


# --- state dicts ----------------------------------------------------------------------------------


@contract("test_fully_shard_state_dict.py::TestFullyShardStateDictMultiProcess::test_dp_state_dict_save_load")
def a_checkpoint_goes_on_to_the_bit() -> None:
    """Save, train on; load in a new engine, train on: the same weights."""
    with _shared_folder() as folder:
        pair = Pair(Net())
        first, second, third = batches(3)
        pair.step(first)
        pair.engine.save(folder)
        again = Engine(Net(), precision="fp32", clip_norm=None, optimizer=adam)
        again.load(folder)
        for engine in (pair.engine, again):
            for batch in (second, third):
                engine.backward(engine(mine(batch)).square().mean())
                engine.step()
        ours, theirs = pair.engine.whole_state_dict(), again.whole_state_dict()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@contract("test_fully_shard_state_dict.py::TestFullyShardStateDictMultiProcess::test_cached_state_dict")
def a_state_dict_is_of_its_moment() -> None:
    """Weights that were copied out do not change with the next step, and a later copy has the new ones."""
    pair = Pair(Net())
    first, second = batches(2)
    pair.step(first)
    before = pair.engine.whole_state_dict()
    kept = copy.deepcopy(before)
    pair.step(second)
    after = pair.engine.whole_state_dict()
    assert all(torch.equal(before[name], value) for name, value in kept.items())
    if dist.get_rank() == 0:
        for name, value in pair.plain.state_dict().items():
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)


# --- autograd -------------------------------------------------------------------------------------


@contract("test_fully_shard_autograd.py::TestFullyShardAutograd::test_unused_forward_output")
def an_output_without_gradient_does_no_harm() -> None:
    """After three steps a later block's output is in the loss no more: its gradients are zero."""
    pair = Pair(Partial(blocks=2))
    for step, batch in enumerate(batches(6)):
        pair.step(batch, lambda out: out[0].square().mean(), unused=step >= 3)
    pair.compare()


@contract("test_fully_shard_autograd.py::TestFullyShardAutograd::test_unused_forward_module")
def a_module_that_is_not_called_does_no_harm() -> None:
    """A block and the head are not used at all."""
    pair = Pair(Partial(blocks=3))
    for batch in batches(5):
        pair.step(batch, lambda out: out[0].square().mean())
    pair.compare()


@contract("test_fully_shard_autograd.py::TestFullyShardAutograd::test_nontensor_activations")
def dataclasses_pass_between_blocks() -> None:
    """Blocks take and return a dataclass, and gradients are the plain model's."""
    pair = Pair(Dataclasses())
    for batch in batches(4):
        pair.optimizer.zero_grad()
        pair.plain(Both(batch, "x")).x.square().mean().backward()
        pair.optimizer.step()
        pair.engine.backward(pair.engine(Both(mine(batch), "x")).x.square().mean())
        pair.engine.step()
    pair.compare()


# --- gathering ------------------------------------------------------------------------------------


@contract("test_fully_shard_comm.py::TestFullyShardUnshardMultiProcess::test_unshard_async")
def parameters_can_be_gathered_by_hand() -> None:
    """Inside full_params a block is whole, what is written there stays, and a step goes on from it."""
    pair = Pair(Net())
    with torch.no_grad(), pair.engine.full_params(pair.engine.module.layers[0]):
        pair.engine.module.layers[0].up.weight.mul_(0.5)
        pair.plain.layers[0].up.weight.mul_(0.5)
    for batch in batches(3):
        pair.step(batch)
    pair.compare()


@contract("test_fully_shard_comm.py::TestFullyShardCommunication::test_manual_reshard_with_reshard_after_forward_false")
def units_that_stay_gathered_are_given_back() -> None:
    """Without grad units stay gathered until release(), after which their memory is gone."""
    engine = Engine(Net(), precision="fp32", release="every_step")
    weight = engine.module.layers[0].up.weight
    with torch.no_grad():
        engine(mine(batches(1)[0]))
    assert weight.untyped_storage().size() >= weight.nbytes
    engine.release()
    assert weight.untyped_storage().size() < weight.nbytes


@contract("test_fully_shard_memory.py::TestFullyShardMemory::test_fully_shard_del_memory")
def a_dropped_engine_leaves_nothing() -> None:
    """Parameters and states die with the engine and its model."""
    engine = Engine(Net(), precision="fp32", optimizer=adam)
    engine.backward(engine(mine(batches(1)[0])).sum())
    engine.step()
    alive = [weakref.ref(p) for p in engine.module.parameters()]
    alive += [weakref.ref(p) for group in engine.optimizer.torch.param_groups for p in group["params"]]
    del engine
    gc.collect()
    assert not [one for one in alive if one() is not None]


@contextmanager
def _shared_folder() -> Iterator[str]:
    """A folder of rank 0's that all ranks know."""
    with TemporaryDirectory(prefix="zero3d-contracts-") as own:
        name = [own]
        dist.broadcast_object_list(name)
        yield name[0]
        dist.barrier()


if __name__ == "__main__":
    run()
