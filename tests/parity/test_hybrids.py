"""Models with recurrences and convolutions train on packed rows as one process trains on their documents apart."""

import pytest
import torch
from hybrids import HYBRIDS, hybrid
from models import adamw

import zero3d
from zero3d.activations.recomputation import recompute

ROWS = ((13, 1, 3, 16), (4, 8, 9, 12)), ((5, 28), (30, 3)), ((33,), (11, 22)), ((33,), (33,))  # of four micro-batches
NAMES = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2", "granitemoehybrid")
STEPS, RATE = 2, 1e-2
NEAR = 2e-5  # what is summed in other orders, in fp32


def some(values, short):
    return [value if value in short else pytest.param(value, marks=pytest.mark.long) for value in values]


def micro_batches(step, rank=0):
    """Packed rows, and the same documents in rows of their own."""
    packed, apart = [], []
    for number, rows in enumerate(ROWS):
        generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
        ids = torch.randint(3, 60, (2, 33), generator=generator)
        positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
        packed.append({"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)})
        apart.append([part[None] for row, lengths in zip(ids, rows, strict=True) for part in row.split(lengths)])
    return packed, apart


def build(name, activations="none"):
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    options = layers if name in ("qwen3_5_text", "kimi_linear") else {}
    model = hybrid(name, **options)
    recompute(model, activations)
    return model


def plain(name, ranks):
    """Losses of steps over documents apart, without zero3d."""
    model = build(name)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        documents = [ids for rank in range(ranks) for some in micro_batches(step, rank)[1] for ids in some]
        targets = sum(ids.shape[1] - 1 for ids in documents)
        optimizer.zero_grad()
        total = 0.0
        for ids in documents:
            if ids.shape[1] > 1:
                loss = model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) / targets
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def train(name, degrees, stage, options, activations="none"):
    mesh = zero3d.Mesh(**degrees)
    model = build(name, activations)
    engine = zero3d.Engine(
        model,
        mesh=mesh,
        stage=stage,
        precision="fp32",
        clip_norm=None,
        accumulate=len(ROWS),
        optimizer=adamw,
        **options,
    )
    return [float(engine.train_batch(micro_batches(step, mesh.place.dp // mesh.sp)[0])) for step in range(STEPS)]


@pytest.mark.parametrize("name", some(NAMES, ("lfm2",)))
def test_packed_rows_at_stage_3(ranks, name):
    wanted = plain(name, 2)
    for options in ({}, {"reduce": "every_micro_batch"}):
        for losses in ranks(2, train, name, {"dp": 2}, 3, options):
            assert losses == pytest.approx(wanted, rel=NEAR)


PIPELINES = [({"pp": 2}, {"schedule": "1f1b"}, "full"), ({"pp": 2}, {"schedule": "interleaved"}, "none"),
             ({"pp": 2}, {"schedule": "zero-bubble"}, "every:2")]  # fmt: skip


@pytest.mark.parametrize("name", some(NAMES, ("qwen3_5_text",)))
@pytest.mark.parametrize(("degrees", "options", "activations"), [
    PIPELINES[0], *(pytest.param(*each, marks=pytest.mark.long) for each in PIPELINES[1:]),
])  # fmt: skip
def test_packed_rows_in_a_pipeline(ranks, name, degrees, options, activations):
    if name not in ("qwen3_5_text", "kimi_linear") and options["schedule"] != "1f1b":
        pytest.skip("two blocks are not four chunks")
    wanted = plain(name, 1)
    stage = 1 if options["schedule"] == "1f1b" else 2
    for losses in ranks(2, train, name, degrees, stage, options, activations):
        assert losses == pytest.approx(wanted, rel=NEAR)


def told_by(name, kind):
    """The loss of one step in a pipeline whose second stage attends alone, told where documents are by one name."""
    engine = zero3d.Engine(hybrid(name), mesh=zero3d.Mesh(pp=2), precision="fp32", stage=1, accumulate=2)
    batches = micro_batches(0)[0][:2]
    for batch in batches:
        begins = batch.pop("position_ids") == 0
        numbers = begins.cumsum(1).int()
        ends = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([begins.numel()])]).int()
        given = {"position_ids": torch.arange(33) - torch.where(begins, torch.arange(33), 0).cummax(1).values}
        batch |= {"seq_idx": {"seq_idx": numbers}, "cu_seq_lens_q": {"cu_seq_lens_q": ends}}.get(kind, given)
    return float(engine.train_batch(batches))


def test_a_stage_without_mixers_is_told_by_other_names_than_positions(ranks):
    by_positions, by_numbers, by_ends = (
        ranks(2, told_by, "qwen3_5_text", kind)[0] for kind in ("position_ids", "seq_idx", "cu_seq_lens_q")
    )
    assert by_positions == by_numbers == by_ends


@pytest.mark.long
@pytest.mark.parametrize(("name", "degrees", "stage"), [
    *((name, {"tp": 2}, 1) for name in NAMES), ("qwen3_5_text", {"tp": 2, "pp": 2}, 1), ("nemotron_h", {"dp": 2, "tp": 2}, 3),
])  # fmt: skip
def test_packed_rows_of_mixers_that_are_cut(ranks, name, degrees, stage):
    wanted = plain(name, degrees.get("dp", 1))
    for losses in ranks(2 * len(degrees), train, name, degrees, stage, {}, "full"):
        assert losses == pytest.approx(wanted, rel=NEAR)


@pytest.mark.long
@pytest.mark.parametrize(("degrees", "stage"), [({"sp": 2, "tp": 2, "pp": 2}, 1), ({"sp": 2, "tp": 2}, 3)])
def test_packed_rows_on_every_axis(ranks, degrees, stage):
    wanted = plain("qwen3_5_text", 1)
    for losses in ranks(2 ** len(degrees), train, "qwen3_5_text", degrees, stage, {}, "full"):
        assert losses == pytest.approx(wanted, rel=NEAR)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name not in NAMES])
def test_packed_rows_of_every_other_type(ranks, name):
    wanted = plain(name, 2)
    for losses in ranks(2, train, name, {"dp": 2}, 3, {}, "full"):
        assert losses == pytest.approx(wanted, rel=NEAR)
