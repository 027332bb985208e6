"""Which modules are blocks, in lists of one class and of several."""

import pytest
import torch
from families import family
from models import Block, Net, net
from torch import nn

from zero3d.models.blocks import find_all_units, find_blocks, find_units
from zero3d.pipeline.split import split


class Other(Block):
    """A block of another class, akin to the first by inheritance."""


class Apart(nn.Module):
    """A block that shares nothing with the others."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x)


class Encoder(Net):
    """Itself made of blocks."""


def listed(*modules):
    model = net(layers=0)
    model.layers = nn.ModuleList(modules)
    return model


def units_of(model):
    return {
        spec.name: sum(p.numel() for p in spec.params.values()) for spec in find_units(model, None, torch.float32)[0]
    }


def test_a_hybrids_layers_are_a_unit_each_whatever_their_class():
    found = units_of(family("jamba", num_hidden_layers=4))
    layers = [found[f"model.layers.{i}"] for i in range(4)]
    assert layers[0] == layers[2] != layers[1] == layers[3]
    assert found.keys() == {"model.embed_tokens", "lm_head", "root", *(f"model.layers.{i}" for i in range(4))}
    assert found["root"] == 32  # the last norm


@pytest.mark.parametrize("modules", [
    (Block(24), Other(24)), (Block(24), Apart(24), Block(24)), (Apart(24), Apart(24), Block(24)),
])  # fmt: skip
def test_lists_of_several_classes_hold_blocks_where_these_are_akin_or_come_again(modules):
    assert list(find_blocks(listed(*modules))) == [f"layers.{i}" for i in range(len(modules))]


@pytest.mark.parametrize("modules", [
    (Block(24), Apart(24)),  # nothing in common
    (Block(24), Block(24), nn.Linear(24, 24)),  # no parts of its own
    (Block(24), Block(24), nn.Sequential(nn.ReLU())),  # no parameters
])  # fmt: skip
def test_lists_of_unrelated_things_hold_none(modules):
    assert find_blocks(listed(*modules)) == {}


def test_what_is_made_of_blocks_is_none_itself():
    assert set(find_blocks(nn.ModuleDict({"both": nn.ModuleList([Net(layers=2), Encoder(layers=2)])}))) == {
        f"both.{i}.layers.{j}" for i in range(2) for j in range(2)
    }


def test_experts_and_projections_in_a_block_of_a_hybrid_stay_inside():
    def block(kind):
        made = kind(24)
        made.experts = nn.ModuleList(Apart(8) for _ in range(3))
        made.projections = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 8)])
        return made

    assert list(find_blocks(listed(block(Block), block(Other), block(Block)))) == ["layers.0", "layers.1", "layers.2"]


def test_a_sequence_of_unlike_modules_is_no_list_of_blocks():
    model = net(layers=0)
    model.layers = nn.Sequential(Block(24), Other(24), Block(24))
    assert find_blocks(model) == {}


@pytest.mark.parametrize(("bias", "names"), [(True, ["lm_head.weight", "lm_head"]), (False, ["lm_head"])])
def test_a_matrix_that_two_stages_have_is_a_unit_by_itself(bias, names):
    model = family("llama")
    model.lm_head = nn.Linear(32, 64, bias=bias)
    model.lm_head.weight = model.model.embed_tokens.weight
    first, last = (find_all_units([split(model, [1, 1], chunk)], None, torch.float32)[0] for chunk in (0, 1))
    assert [spec.name for spec in first] == ["model.embed_tokens", "model.layers.0"]
    assert [spec.name for spec in last] == ["model.layers.1", "root", *names]
    assert [spec.deferred for spec in last] == [False, True, *[False for _ in names]]
    assert [list(spec.params) for spec in last[2:]] == [["lm_head.weight"], ["lm_head.bias"]][: len(names)]
