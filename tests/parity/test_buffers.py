"""Buffers that forwards write: once in spite of recomputation, and one set of running statistics on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import zero3d
from zero3d.activations import recompute
from zero3d.errors import CheckpointError

WIDTH = 6


class Average(nn.Module):
    """An average of its inputs, which its output depends on; in place, or by a new tensor."""

    def __init__(self, in_place):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.in_place = in_place

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.in_place:
            self.average.lerp_(mean, 0.5)
        else:
            self.average = 0.5 * self.average + 0.5 * mean
        return x - self.average.clone()


WRITERS = {
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), "in place": lambda: Average(True),
    "a new tensor": lambda: Average(False),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, writer):
        super().__init__()
        self.linear, self.writer = nn.Linear(WIDTH, WIDTH), writer

    def forward(self, x):
        return x + torch.tanh(self.writer(self.linear(x)))


def model_of(name, blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WRITERS[name]()) for _ in range(blocks)), nn.Linear(WIDTH, 1))


def batch(step, rank=0):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trained(model, stage, micro_batches=1):
    engine = zero3d.Engine(
        model, stage=stage, precision="fp32", optimizer=sgd, clip_norm=None, units=[Block], accumulate=micro_batches
    )
    for step in range(3):
        losses = [engine(batch(2 * step + m)).pow(2).mean() for m in range(micro_batches)]  # all forwards come first
        for loss in losses:
            engine.backward(loss)
        engine.step()
    with engine.full_params():
        return {name: t.detach().clone() for name, t in engine.module.state_dict().items()}


@pytest.mark.parametrize("policy", ["full", "every:2"])
@pytest.mark.parametrize("writer", WRITERS)
def test_recomputation_changes_no_bit_of_buffers_and_gradients(writer, policy):
    wanted = trained(model_of(writer), 3, micro_batches=2)
    model = model_of(writer)
    recompute(model, policy, blocks={str(i): block for i, block in enumerate(model[:3])})
    found = trained(model, 3, micro_batches=2)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def of_ranks(stage, folder):
    """Of each rank: statistics after two steps and a save, loss of one batch, and what a resumed engine has."""

    def make():
        return zero3d.Engine(
            model_of("BatchNorm"), stage=stage, precision="fp32", optimizer=sgd, clip_norm=None, units=[Block],
            loss=lambda output, given: (output.pow(2).sum(), float(len(output))),
        )  # fmt: skip

    def statistics(engine):
        return {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}

    engine, seen = make(), []
    for step in range(2):
        engine.backward(engine(batch(step, dist.get_rank())).pow(2).mean())
        seen.append(engine.module[0].writer.running_mean.tolist())
        engine.step()
    own = statistics(engine)
    other = make()
    other.load(engine.save(folder))
    return own, float(engine.evaluate([{"input": batch(9)}])), statistics(other), seen


@pytest.mark.parametrize("stage", [0, 3])
def test_all_ranks_have_the_first_ones_statistics(ranks, tmp_path, stage):
    first, second = ranks(2, of_ranks, stage, tmp_path)
    assert first[:3] == second[:3]
    assert first[0] == first[2]
    assert first[0]["0.writer.num_batches_tracked"] == 2
    assert first[3][0] != second[3][0]  # what each counts by itself
    alone = ranks(1, of_ranks, stage, tmp_path / "alone")[0]
    assert alone[0]["0.writer.running_mean"] != first[0]["0.writer.running_mean"]  # weights are of both ranks' batches
    assert alone[3][0] == first[3][0]


class Seen(nn.Module):
    """Notes the first numbers of what it sees: a buffer that grows."""

    def __init__(self, size=0):
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, 1), nn.Buffer(torch.zeros(size))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x[:, 0].detach()])
        return self.linear(x)


def test_a_buffer_that_grows_has_the_shape_of_the_checkpoint(tmp_path):
    def opened(size=0):
        torch.manual_seed(0)
        return zero3d.Engine(Seen(size), stage=3, precision="fp32", optimizer=sgd, units=[nn.Linear])

    def step(engine, number):
        engine.backward(engine(batch(number)).pow(2).mean())
        engine.step()
        return engine.module.seen

    first, second = opened(), opened()
    step(first, 0)
    first.save(tmp_path / "a")
    second.load(tmp_path / "a")
    assert torch.equal(step(second, 1), step(first, 1))
    assert second.module.seen.shape == (10,)
    with pytest.raises(CheckpointError, match=r"'seen' is float32 \(5,\) in the checkpoint, and float32 \(3,\)"):
        opened(3).load(tmp_path / "a")
