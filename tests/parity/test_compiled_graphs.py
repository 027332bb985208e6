"""Compiled blocks share a graph: not one more for a model of more blocks than torch.compile makes graphs for."""

import pytest
import torch
from bases import base_folder
from models import batch
from tensors import tiny

import zero3d
from zero3d.config import load
from zero3d.models.trained import open_trained

BLOCKS = 10  # torch's limit of graphs for one function is 8
BATCHES = [batch(step) for step in range(3)]


def graphs_of(model, fullgraph=True, mesh=None, **options):
    """How many graphs there are after each of three steps, in a loop that asks for no cache and refuses none."""
    torch._dynamo.reset()
    made = []

    def backend(module, inputs):
        made.append(module)
        return module.forward

    mesh = zero3d.Mesh(device="cpu", **mesh) if mesh else None
    engine = zero3d.Engine(model, mesh=mesh, compile={"backend": backend, "fullgraph": fullgraph}, **options)
    found = []
    assert engine.compiled.graphs == 0
    for ids in BATCHES:
        engine.backward(engine(ids, labels=ids, use_cache=True).loss)
        engine.step()
        found.append(len(made))
        assert engine.compiled.graphs == len(made)  # which is what a run says
        assert f" in {len(made)} graph{'s' * (len(made) > 1)};" in engine.notes[-1]
    engine.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
def test_all_blocks_are_one_graph_with_the_default_cache(stage):
    assert graphs_of(tiny("llama", layers=BLOCKS), stage=stage) == [1, 1, 1]


@pytest.mark.long
def test_blocks_with_adapters_are_two_graphs():
    """The first block's input has no gradient where the embedding is frozen, the others' has one."""
    assert graphs_of(tiny("llama", layers=BLOCKS, lora=True)) == [2, 2, 2]


@pytest.mark.long
def test_quantised_blocks_are_two_graphs(tmp_path):
    base = base_folder(tmp_path / "llama", num_hidden_layers=BLOCKS)
    opened = open_trained(load({"model": {"path": str(base), "quantize": "nf4"}, "lora": {"rank": 4}}))
    assert graphs_of(opened.module, weights=opened.weights, precision="bf16") == [2, 2, 2]


def on_ranks(layers, mesh):
    return graphs_of(tiny("llama", layers=layers), fullgraph=False, mesh=mesh, stage=2)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"sp": 2}])
def test_the_number_of_graphs_does_not_grow_with_blocks(ranks, mesh):
    found, more = ranks(2, on_ranks, 3, mesh)[0], ranks(2, on_ranks, BLOCKS, mesh)[0]
    assert found == more
    assert len(set(found)) == 1
    assert mesh or found[0] == 1
