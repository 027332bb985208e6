"""Checkpoints and exports of parameters that the tp axis cuts: any (dp, tp, pp) to any other, bit for bit.

No forward runs here: parameters are replaced by their slices and states are filled with known values, so
that every byte of a file and of a rank can be compared with `Cut.extract` of the logical tensor.
"""

from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import pytest
import torch
from damage import joined
from models import Net, adamw, hf
from safetensors import safe_open
from torch import nn

import zero3d
from zero3d.engine.state import engine_state
from zero3d.pipeline.ties import names_of_copies
from zero3d.precision import to_compute
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.parallelize import Sharded

NET = {"embed.weight": (0, 1), "layers.*.up.*": (0, 2), "layers.0.down.weight": (1, 1), "layers.*.down.weight": (1, 3)}
STYLES = {  # name pattern -> (dim, blocks); the first that fits
    "net": NET | {"head.weight": (0, 1)},
    "tied": NET,
    "llama": {"*.[qkvgu]*_proj.weight": (0, 1), "*.[od]*_proj.weight": (1, 1), "*embed_tokens.weight": (1, 1)},
    "gpt2": {"*.c_attn.weight": (1, 3), "*.c_attn.bias": (0, 3), "*.c_fc.*": (-1, 1), "*.c_proj.weight": (0, 1)},
    "qwen3_moe": {"*.gate_up_proj": (1, 2), "*.down_proj": (2, 1), "*.[qkv]_proj.weight": (0, 1)},
}
MOMENTS = ("exp_avg", "exp_avg_sq")


class Lm(Net):
    """The plain net with a keyword for token ids."""

    def forward(self, input_ids):
        return super().forward(input_ids)


def make(family):
    torch.manual_seed(7)
    model = Lm(width=96, layers=4, vocab=64, tied=family == "tied") if family in ("net", "tied") else hf(family)
    if family in ("net", "tied"):
        model.layers[2].requires_grad_(False)
    return model


def cuts_of(family, shapes, mesh):
    """The family's cuts for this rank, by parameter name."""
    cuts = {}
    for name, shape in shapes.items():
        found = next((style for pattern, style in STYLES[family].items() if fnmatch(name, pattern)), None)
        if found is not None:
            cuts[name] = Cut(found[0] % len(shape), mesh.tp, mesh.place.tp, found[1])
    return cuts


def slice_parameters(module, cuts):
    """Replace parameters by their slices; tied ones stay tied."""
    local = {p: cuts[name].extract(p) for name, p in module.named_parameters() if name in cuts}
    made = {p: nn.Parameter(values, requires_grad=p.requires_grad) for p, values in local.items()}
    for inner in module.modules():
        for name, p in inner._parameters.items():
            inner._parameters[name] = made.get(p, p)


def engine_on(family, shape, stage, precision="bf16"):
    """An engine on (dp, tp, pp) = shape."""
    dp, tp, pp = shape
    mesh = zero3d.Mesh(dp=dp, tp=tp, pp=pp)
    model = make(family)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    cuts = cuts_of(family, shapes, mesh)

    def cut_in_test(part, *_, **__):
        copies = names_of_copies({0: part})
        own = cuts | {copy: cuts[owner] for copy, owner in copies.items()}
        slice_parameters(part, own)
        return Sharded({name: own[name] for name, _ in part.named_parameters() if name in own}, frozenset())

    with mock.patch.multiple("zero3d.engine.partition", parallelize=cut_in_test):
        return zero3d.Engine(model, mesh=mesh, stage=stage, precision=precision, optimizer=adamw)


def logical(family):
    """The value of every state of the whole model: masters or frozen weights, and moments by (name, state)."""
    values = {}
    for i, (name, p) in enumerate(make(family).named_parameters()):
        values[name, "master" if p.requires_grad else "weight"] = p.detach()
        for j, state in enumerate(MOMENTS if p.requires_grad else ()):
            values[name, state] = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i + j))
    return values


def held(engine):
    """Every state this rank holds, as (name, state, flat range of its local parameter, values)."""
    saved = engine_state(engine._parts)
    for owned in saved.optimizer.pieces:
        states = {"master": owned.master} | saved.optimizer.torch.state[owned.master]
        for state in ("master", *MOMENTS):
            yield saved.full_model.owner(owned.name), state, slice(owned.piece.start, owned.piece.stop), states[state]
    for unit in saved.units:
        if unit.grads is None:
            for piece in unit.layout.pieces(saved.dp.rank):
                values = unit.weights.shard[piece.offset : piece.offset + piece.stop - piece.start]
                yield (
                    saved.full_model.owner(unit.layout.slots[piece.slot].name),
                    "weight",
                    slice(piece.start, piece.stop),
                    values,
                )


def expected_of(engine, values, name, state, span):
    cut = engine_state(engine._parts).cut(name)
    whole = values[name, state]
    local = whole if cut is None else cut.extract(whole)
    return local.reshape(-1)[span]


def save_on(family, shape, stage, folder):
    engine, values = engine_on(family, shape, stage), logical(family)
    for name, state, span, mine in held(engine):
        if state in MOMENTS:
            mine.copy_(expected_of(engine, values, name, state, span))
    return str(engine.save(folder))


def load_on(family, shape, stage, source):
    """The states of this rank that then are not its slices; everything was something else before."""
    engine, values = engine_on(family, shape, stage), logical(family)
    with torch.no_grad():
        for *_, mine in held(engine):
            mine.fill_(7.0)
    engine.load(source)
    states = [
        (name, state, mine, expected_of(engine, values, name, state, span)) for name, state, span, mine in held(engine)
    ]
    assert states
    return [
        (name, state) for name, state, mine, wanted in states if not torch.equal(mine, to_compute(wanted, mine.dtype))
    ]


def check_files(folder, values):
    """Each element of each state is in exactly one file, with its value and the whole parameter's shape."""
    manifest = joined(folder)
    assert manifest["parameters"].keys() == {name for name, _ in values}
    assert {row["state"] for row in manifest["tensors"]} == {"master", "weight", *MOMENTS}
    seen = {key: torch.zeros_like(value) for key, value in values.items()}
    for row in manifest["tensors"]:
        key = row["name"], row["state"]
        assert manifest["parameters"][row["name"]]["shape"] == list(values[key].shape)
        box = tuple(slice(a, b) for a, b in row["box"])
        with safe_open(folder / row["file"], framework="pt") as file:
            part = file.get_tensor(row["key"])
        assert torch.equal(part, to_compute(values[key], part.dtype)[box]), row
        seen[key][box] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


def world_of(shape):
    dp, tp, pp = shape
    return dp * tp * pp


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("net", ((1, 2, 1), 3), [((1, 1, 1), 0), ((2, 1, 1), 1)]),
        ("tied", ((1, 2, 2), 0), [((1, 2, 1), 3)]),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("tied", ((2, 1, 1), 2), [((1, 2, 1), 3), ((1, 2, 1), 0)]),
                ("tied", ((2, 2, 1), 3), [((1, 2, 2), 1), ((1, 1, 1), 3)]),
                ("tied", ((1, 2, 2), 0), [((2, 1, 1), 3), ((1, 4, 1), 1)]),
            )
        ),
    ],
)
def test_cut_states_of_one_mesh_load_on_every_other(ranks, tmp_path, family, before, after):
    shape, stage = before
    saved = ranks(world_of(shape), save_on, family, shape, stage, str(tmp_path / "ck"))
    check_files(Path(saved[0]), logical(family))
    for new_shape, new_stage in after:
        wrong = ranks(world_of(new_shape), load_on, family, new_shape, new_stage, saved[0])
        assert wrong == [[]] * world_of(new_shape)


def export_on(family, shape, stage, folder):
    return str(engine_on(family, shape, stage, "fp32").export(folder))


@pytest.mark.parametrize(
    ("family", "shape", "stage"),
    [
        ("gpt2", (1, 2, 1), 1),
        ("qwen3_moe", (1, 2, 1), 3),
        *(pytest.param("llama", *case, marks=pytest.mark.long) for case in (((2, 2, 1), 3), ((1, 2, 2), 2))),
    ],
)
def test_an_export_of_cut_parameters_is_the_whole_model(ranks, tmp_path, family, shape, stage):
    from transformers import AutoModelForCausalLM

    ranks(world_of(shape), export_on, family, shape, stage, str(tmp_path / "hf"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).named_parameters())
    expected = dict(make(family).named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], p) for name, p in expected.items())


def export_badly(shape, folder):
    """Only the writer's disk is full."""
    engine = engine_on("net", shape, 3)
    with mock.patch("zero3d.checkpoint.export.write_tensors", side_effect=OSError("No space left on device")):
        with mock.patch("zero3d.checkpoint.export.FILE_BYTES", 1000):
            engine.export(folder)


def test_all_ranks_stop_when_the_writer_of_an_export_fails(ranks, tmp_path):
    results = ranks(4, export_badly, (2, 2, 1), str(tmp_path / "out"), check=False)
    assert all("No space left" in error for _, error in results)
    assert list(tmp_path.iterdir()) == []
