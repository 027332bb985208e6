"""Compiled blocks of hybrids: graphs do not depend on where documents end, and kinds of blocks have graphs of their own."""

import pytest
import torch
from hybrids import hybrid
from models import adamw
from tensors import tiny
from torch import nn

import zero3d
from zero3d.activations.compilation import CompiledModules
from zero3d.activations.recomputation import prepare_blocks
from zero3d.models.wrappers import Compiled

LENGTH = 33
LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
DOCUMENTS = ((13, 1, 3, 16), (4, 8, 9, 12)), ((5, 28), (30, 3)), ((LENGTH,), (11, 22)), ((3,) * 11, (11,) * 3)


def batch(how, step):
    """Rows of documents that change from step to step, of one document, or with a mask of padding."""
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    made = {"input_ids": ids, "labels": ids}
    if how == "packed":
        rows = DOCUMENTS[step % len(DOCUMENTS)]
        made["position_ids"] = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    if how == "padded":
        made["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [20 + step]])).long()
    return made


def graphs(name, options):
    """How many graphs there are behind each step, of rows of these kinds in turn, and frames that were not compiled."""
    from torch._dynamo.utils import counters

    model = hybrid(name, **options)
    prepare_blocks(model, compile="eager")
    engine = zero3d.Engine(model, mesh=zero3d.Mesh(), stage=3, precision="fp32", clip_norm=None, optimizer=adamw)
    found = {}
    for how in ("packed", "one", "padded"):
        for train in (True, False):
            after = []
            for step in range(5):
                (engine.train_batch if train else engine.evaluate)([batch(how, step)])
                after.append(counters["frames"]["total"])
            found[how, train] = after
    return found, counters["frames"]["total"] - counters["frames"]["ok"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [("qwen3_5_text", LAYERS), ("nemotron_h", {}), ("lfm2", {})])
def test_nothing_is_compiled_again_from_step_to_step(alone, name, options):
    found, refused = alone(graphs, name, options)
    for how, after in found.items():
        assert len(set(after[1:])) == 1, (how, after)
    assert not refused  # beyond the most graphs that torch.compile keeps of a code


def test_a_run_says_what_is_outside_of_graphs():
    model = hybrid("lfm2")
    prepare_blocks(model, compile="eager")
    assert CompiledModules.of(model).note.endswith(
        "; in packed rows convolutions and scans of Lfm2ShortConv run between graphs"
    )
    attention = tiny("llama")
    prepare_blocks(attention, compile="eager")
    assert CompiledModules.of(attention).note.endswith("pack or pad to one length")


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *, scale=2.0):
        return self.inner(x) * scale


def test_modules_of_one_structure_share_a_code_and_others_do_not():
    codes = []

    def compile(forward):
        codes.append(forward.__code__)
        return forward

    blocks = [Block(inner) for inner in (nn.Identity(), nn.Tanh(), nn.Identity(), nn.Tanh())]
    x = torch.ones(2)
    for block in blocks:
        assert torch.equal(Compiled(block, compile)(x, scale=3.0), block(x, scale=3.0))
        assert torch.equal(Compiled(block, lambda forward: forward)(x), block(x))
    assert codes[0] is codes[2] is Block.forward.__code__
    assert codes[1] is codes[3] is not codes[0]
