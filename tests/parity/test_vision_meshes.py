"""Image-text models whose sequences and blocks are shared out, together and on packed rows, train as one process does."""

import pytest
import torch
import vision
from models import adamw

import zero3d
from zero3d.engine.traffic_formulas import SessionCounts
from zero3d.models.document_masks import TOLD_APART, DocumentMasks
from zero3d.models.document_positions import DocumentPositions
from zero3d.tools.vision.tiny import micro_batch, tiny_model
from zero3d.train.traffic import TrainingTraffic, traffic_rows

MESHES = {"sp": {"sp": 2}, "pp": {"pp": 2}, "sp and pp": {"sp": 2, "pp": 2}}


def packed_row(model, generator):
    """A row of three documents: two with an image at unlike places, and one of text between them."""
    documents = [micro_batch(model, generator, (images,), text) for images, text in ((1, 7), (0, 6), (1, 11))]
    make = DocumentPositions.of(model)
    places = []
    for document in documents:
        document["labels"][:, 0] = -100
        kinds = {name: document[name][0] for name in TOLD_APART if name in document}
        images = {name: t for name, t in document.items() if name not in ("input_ids", "labels", *TOLD_APART)}
        length = document["input_ids"].shape[1]
        places.append(torch.arange(length) if make is None else make(document["input_ids"][0], kinds, images))
    row = {name: torch.cat([d[name] for d in documents], 1) for name in ("input_ids", "labels")}
    for name in TOLD_APART:
        if name in documents[0]:
            row[name] = torch.cat([d.get(name, torch.zeros_like(d["input_ids"])) for d in documents], 1)
    row |= {name: torch.cat([d[name] for d in documents if name in d]) for name in documents[0] if name not in row}
    row["position_ids"] = torch.cat(places, -1)[..., None, :]
    masks = DocumentMasks.of(model)
    return row if masks is None else masks.of_documents(row)


def batches(model, packed):
    """Two steps of two micro-batches, each with images."""
    generator = torch.Generator().manual_seed(5)
    make = packed_row if packed else micro_batch
    return [[make(model, generator) for _ in range(2)] for _ in range(2)]


def train(kind, packed, degrees, stage):
    """On this rank: losses and norms of two steps, and a loss without a step; what a pipeline sends is as by formula."""
    model = tiny_model(kind)
    steps = batches(model, packed)
    degrees = degrees if torch.distributed.get_world_size() > 1 else {}
    engine = zero3d.Engine(
        model, mesh=zero3d.Mesh(**degrees), stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw, accumulate=2
    )
    found = []
    for step in steps:
        found += [float(engine.train_batch(step)), float(engine.last_step.grad_norm)]
    found.append(float(engine.evaluate(steps[0])))
    if "pp" in degrees:
        sent = {(e.op, e.unit): (e.calls, e.bytes) for e in engine.traffic if e.op in ("send_forward", "send_backward")}
        assert sent == {key: (2 * m.calls, 2 * m.bytes) for key, m in engine.pipeline.traffic(2).items()}
    return found


@pytest.mark.parametrize(("kind", "mesh", "packed", "stage"), [
    ("qwen3_vl", "pp", True, 3),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("qwen3_vl", "sp and pp", True, 2),
            ("qwen3_vl", "sp and pp", False, 3),
            *((kind, "sp and pp", packed, 2) for kind in ("qwen2_5_vl", "glm4v") for packed in (False, True)),
            *((kind, mesh, True, 3) for kind in ("gemma3", "llava", "qwen2_5_vl", "internvl") for mesh in ("sp", "pp")),
            *((kind, "sp and pp", True, 3) for kind in ("gemma3", "llava")),
            *(("granite4_vision", "sp", packed, 3) for packed in (False, True)),
        )
    ),
])  # fmt: skip
def test_it_trains_as_one_process(ranks, kind, mesh, packed, stage):
    degrees = MESHES[mesh]
    [wanted] = ranks(1, train, kind, packed, degrees, stage)
    for found in ranks(4 if len(degrees) > 1 else 2, train, kind, packed, degrees, stage):
        assert found == pytest.approx(wanted, rel=1e-5)


def sent_by_steps(images, degrees, options):
    """Rows of a session's traffic that are not the formula's, where steps differ in whether they have images; gathers."""
    generator = torch.Generator().manual_seed(1)
    made = {"stage": 3, "precision": "fp32", "clip_norm": None} | options
    engine = zero3d.Engine(vision.model("qwen2_5_vl"), mesh=zero3d.Mesh(**degrees), **made)
    counted = TrainingTraffic(engine)
    for has in images:
        batch = vision.micro_batch("qwen2_5_vl", generator)
        engine.train_batch([batch if has else vision.text_alone(batch)])
        counted.last_step()
    rows = traffic_rows(counted, SessionCounts(len(images), 0, 1, 0))
    gathers = sum(row.measured.calls for row in rows if row.op.startswith("all_gather"))
    return [row.op for row in rows if not row.equal], gathers


@pytest.mark.long
@pytest.mark.parametrize(("degrees", "options"), [({"dp": 2}, {}), ({"dp": 4}, {"second_shard": 2})])
def test_what_is_sent_is_the_formulas_where_some_steps_have_no_image(ranks, degrees, options):
    calls = set()
    for images in ([True] * 3, [True, False, True], [False, True, False], [False] * 3):
        for wrong, gathers in ranks(degrees["dp"], sent_by_steps, images, degrees, options):
            assert wrong == []
            calls.add(gathers)
    assert len(calls) == 4  # a tower is gathered in steps with images alone
