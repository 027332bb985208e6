"""Linear layers in tiles: their sizes, what stays whole and why, and what is refused before anything is built."""

import warnings

import pytest
import torch
from models import net
from tensors import tiny
from torch import nn

import zero3d
from zero3d import config
from zero3d.activations import compile_blocks, recompute
from zero3d.errors import ConfigError
from zero3d.models.tiles import cut_rows, describe_tiles, tile_embedding, tile_linear, tile_rows


@pytest.mark.parametrize(("rows", "row_bytes", "budget", "of_a_tile"), [
    (128, 4, 256, 64), (128, 4, 511, 64), (130, 4, 519, 128), (1000, 4, 1600, 384), (100, 4, 160, 34), (7, 10, 10, 1), (7, 10, 9, 0),
])  # fmt: skip
def test_tiles_are_few_even_and_within_the_budget(rows, row_bytes, budget, of_a_tile):
    found = tile_rows(rows, row_bytes, budget)
    assert found == of_a_tile
    assert found * row_bytes <= budget


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_layer_in_tiles_computes_what_it_did(bias, rows):
    torch.manual_seed(0)
    plain = nn.Linear(4, 7, bias=bias, dtype=torch.float64)
    tiled = nn.Linear(4, 7, bias=bias, dtype=torch.float64)
    tiled.load_state_dict(plain.state_dict())
    tile_linear(tiled, cut_rows(tiled.weight, rows))
    tiled.load_state_dict(plain.state_dict())
    assert tiled.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(tiled.state_dict()["weight"], plain.weight)
    names = [name for name, _ in tiled.named_parameters() if name != "bias"]
    assert [*describe_tiles("", (7, 4), rows)] == names
    assert [tile.start for tile in describe_tiles("", (7, 4), rows).values()] == list(range(0, 28, 4 * rows))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    inputs, gradients = [x.clone().requires_grad_() for _ in range(2)], []
    for layer, given in zip((plain, tiled), inputs, strict=True):
        (layer(given) ** 2).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    grad = torch.cat([p.grad for name, p in tiled.named_parameters() if name.startswith("tiles")])
    torch.testing.assert_close(grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_an_embedding_in_tiles_looks_up_what_it_did(rows):
    torch.manual_seed(0)
    plain, tiled = (nn.Embedding(7, 4, padding_idx=4) for _ in range(2))
    tiled.load_state_dict(plain.state_dict())
    tiled.forward = tile_embedding(tiled, cut_rows(tiled.weight, rows))
    ids = torch.randint(0, 7, (3, 8))
    assert torch.equal(tiled(ids), plain(ids))
    for layer in (plain, tiled):
        (layer(ids) ** 2).sum().backward()
    assert torch.equal(torch.cat([p.grad for p in tiled.parameters()]), plain.weight.grad)
    assert torch.equal(tiled.state_dict()["weight"], plain.weight)
    for absent in (7, -1):
        with pytest.raises(IndexError):
            tiled(torch.full_like(ids, absent))


def engine(model, budget, **options):
    return zero3d.Engine(model, precision="fp32", gather_budget=budget, **options)


def test_what_stays_whole_is_told_with_its_bytes_and_why():
    with pytest.warns(UserWarning, match=r"c_attn.weight \(12.29 kB, of Conv1D, neither a linear layer nor an emb"):
        engine(tiny("gpt2"), 10_000)
    scaled = net()
    scaled.embed.max_norm = 1.0
    with pytest.warns(UserWarning, match=r"above gather_budget: embed.weight \(5.86 kB, an embedding whose lookups"):
        engine(scaled, 5_000)


def test_tied_matrices_have_the_same_tiles():
    model = net(tied=True)
    made = engine(model, 2_000)
    assert [p for tile in model.head.tiles for p in tile.parameters()] == [*model.embed.parameters()]
    assert all(unit.deferred for unit in made.units if unit.name.startswith("embed."))
    assert not any(unit.name.startswith("head") for unit in made.units)


def test_nothing_is_told_where_nothing_is_gathered_or_everything_fits():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(tiny("llama"), 2000, stage=2)
        made = engine(tiny("llama"), "64MB")
    assert not any("tiles" in unit.name for unit in made.units)


@pytest.mark.parametrize(("budget", "options", "match"), [
    (90, {}, r"gather_budget=90 bytes is less than one row of embed.weight, 96 bytes \(24 numbers\): type 96 or"),
    ("64 pounds", {}, "gather_budget '64 pounds' is not a size: type bytes, or a number with kB, MB, GB or TB"),
    (True, {}, "gather_budget .True. is not a size"),
    (1000, {"release": "every_step"}, "keeps everything gathered until the step ends: leave one of them out"),
])  # fmt: skip
def test_a_budget_that_cannot_be_kept_is_refused(budget, options, match):
    with pytest.raises(ConfigError, match=match):
        engine(net(), budget, **options)


@pytest.mark.parametrize("activations", ["none", "full"])
def test_a_compiled_block_is_refused(activations):
    model = net()
    compile_blocks(model, backend="eager")
    recompute(model, activations)
    with pytest.raises(ConfigError, match=r"weight of layers.0.up in tiles, and the module is compiled"):
        engine(model, 3000)


def test_a_file_says_the_budget_as_a_number_or_a_text():
    for written, read in ((4096, 4096), ("64MB", "64MB"), ("1e6", 1_000_000), (None, None)):
        assert config.load({"zero": {"gather_budget": written}}).zero.gather_budget == read
    with pytest.raises(ConfigError, match=r"zero.gather_budget.* 'much' is not a size: type bytes"):
        config.load({"zero": {"gather_budget": "much"}})
