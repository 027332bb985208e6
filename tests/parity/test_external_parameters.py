"""A weight that is read outside its module's forward: a fused loss reads the head's, at stage 3 too."""

import pytest
import torch
from models import adamw, batch, bits, hf
from torch.nn import functional

import zero3d
from zero3d.account.traffic import step_traffic
from zero3d.activations import recompute
from zero3d.zero.tokens import count_gathers


class Fused(torch.nn.Module):
    """A causal language model whose loss is computed from its head's weight, without a call of the head."""

    def __init__(self, name):
        super().__init__()
        self.model = hf(name)

    def forward(self, ids):
        hidden = self.model.base_model(input_ids=ids).last_hidden_state[:, :-1]
        logits = functional.linear(hidden, self.model.get_output_embeddings().weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def loss_of(model, ids):
    return model(ids)


def trained(name, stage, recomputed=False, precision="fp32"):
    """Losses, an evaluation and weights; traffic is the formula's."""
    model = Fused(name)
    if recomputed:
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    engine = zero3d.Engine(model, stage=stage, precision=precision, optimizer=adamw, clip_norm=1.0)
    losses = []
    for step in range(3):
        engine.traffic.reset()
        engine.gathers.events = []
        loss = engine(batch(step, engine.mesh.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    planned = step_traffic(stage, engine.traffic_units, engine.dp.size, count_gathers(engine.gathers.events))
    moved = {(e.op, e.unit): (e.calls, e.elements, e.bytes) for e in engine.traffic}
    assert {key: tuple(value) for key, value in planned.items()} == moved
    with torch.no_grad():
        held_out = [float(engine(batch(step))) for step in range(2)]
    with engine.full_params():
        weights = bits(model.parameters())
    return losses, held_out, weights


@pytest.mark.parametrize(("name", "recomputed", "precision"), [
    ("qwen3", True, "bf16"), *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("llama", False, "fp32"), ("llama", True, "bf16"), ("gpt2", False, "bf16"), ("qwen3", True, "fp32"),
    )),
])  # fmt: skip
def test_a_fused_loss_trains_at_every_stage_with_the_same_bits(ranks, name, recomputed, precision):
    wanted = ranks(2, trained, name, 2, recomputed, precision)
    assert ranks(2, trained, name, 3, recomputed, precision) == wanted


class Inner(torch.nn.Module):
    """A block with modules and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 6), torch.nn.Sequential(torch.nn.Linear(6, 6))
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.down(self.up(x).tanh()) * self.scale


class Borrowing(torch.nn.Module):
    """Uses what its blocks have inside before it calls them."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.read = torch.nn.ModuleList([Inner(), Inner()]), read

    def forward(self, x):
        x = self.read(x, *self.blocks)
        for block in self.blocks:
            x = block(x)
        return x


READS = {
    "a weight of an inner module": lambda x, first, last: x @ last.up.weight,
    "one further inside": lambda x, first, last: x @ first.down[0].weight,
    "a parameter of its own": lambda x, first, last: x * last.scale,
    "a comparison": lambda x, first, last: x * 2 if first.up.weight.max() > 0 else x,
    "a forward without its hooks": lambda x, first, last: last.up.forward(x),
}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("read", list(READS))
def test_weights_inside_blocks_may_be_read_by_the_root(read, recomputed):
    found = set()
    for stage in (2, 3):
        model = Borrowing(READS[read])
        if recomputed:
            recompute(model, "full")
        engine = zero3d.Engine(model, stage=stage, precision="fp32", optimizer=adamw, units=[Inner])
        for step in range(2):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).square().mean())
            assert engine.step().applied
        found.add(engine.fingerprint())
    assert len(found) == 1
