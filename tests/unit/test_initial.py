"""First weights of units whose parameters the tp axis cuts: only this rank's slices are read, and none is missed."""

from types import SimpleNamespace

import pytest
import torch
from models import hf

from zero3d.blueprint.layout import UnitLayout
from zero3d.models.build import build
from zero3d.models.load import FileWeights
from zero3d.precision import to_compute
from zero3d.shards.boxes import box_shape, slices
from zero3d.shards.cuts import Cut
from zero3d.zero.initial_weights import from_source

SHAPES = {"norm": (96,), "column": (96, 200), "row": (160, 192), "packed": (120, 144), "experts": (4, 48, 40)}
TP = 4


def whole_tensors():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cuts_of(rank):
    return {
        "column": Cut(0, TP, rank),
        "row": Cut(1, TP, rank),
        "packed": Cut(1, TP, rank, 3),
        "experts": Cut(1, TP, rank, 2),
    }


def layout_and_slices(rank, n):
    """The unit of a tp rank, and its storage put together by hand."""
    cuts = cuts_of(rank)
    local = {name: cuts[name].extract(value) if name in cuts else value for name, value in whole_tensors().items()}
    layout = UnitLayout([(name, tuple(value.shape), 0) for name, value in local.items()], n)
    storage = torch.zeros(layout.total)
    for slot in layout.slots:
        storage[slot.start : slot.start + slot.numel] = local[slot.name].flatten()
    return layout, storage


@pytest.mark.parametrize("n", [1, 2, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dp_and_tp_rank_reads_its_slices_and_nothing_else(n, dtype):
    tensors, asked = whole_tensors(), []

    def source(name, box):
        asked.append(torch.Size(box_shape(box)).numel())
        return tensors[name][slices(box)]

    for tp_rank in range(TP):
        layout, expected = layout_and_slices(tp_rank, n)
        asked.clear()
        for rank in range(n):
            comm = SimpleNamespace(rank=rank, size=n, device=torch.device("cpu"))
            out = torch.zeros(layout.shard, dtype=dtype)
            from_source(source, layout, comm, torch.float32, cuts_of(tp_rank), {})(out)
            assert torch.equal(out, to_compute(expected.view(n, -1)[rank], dtype))
        assert sum(asked) == layout.numel


def test_columns_of_a_file_are_read_without_the_others(tmp_path):
    model = hf("llama")
    model.save_pretrained(tmp_path)
    weights, read = FileWeights(tmp_path, build(model.config)), []
    open_file = weights._files._handle
    weights._files._handle = lambda key: SimpleNamespace(
        get_slice=lambda _: Recorded(open_file(key).get_slice(key), read)
    )
    name = "model.layers.0.mlp.down_proj.weight"
    cut, logical = Cut(1, 2, 1), model.get_parameter(name)
    layout = UnitLayout([(name, cut.local_shape(tuple(logical.shape)), 0)], 1)
    out = torch.zeros(layout.shard)
    comm = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    from_source(weights, layout, comm, torch.float32, {name: cut}, {})(out)
    assert torch.equal(out[: layout.numel], cut.extract(logical).flatten())
    assert read == [(32, 24)]


class Recorded:
    """A tensor of a file that remembers the shapes that were read of it."""

    def __init__(self, stored, read):
        self.stored, self.read, self.get_shape = stored, read, stored.get_shape

    def __getitem__(self, index):
        part = self.stored[index]
        self.read.append(tuple(part.shape))
        return part
