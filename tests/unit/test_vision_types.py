"""Types of images and text: one of each way in which images enter is tried; what the package carries of all."""

import json
import multiprocessing
import time

import pytest
import torch

import zero3d
from zero3d.models.images import tower_parameters
from zero3d.tools.cli import models
from zero3d.tools.cli.main import main
from zero3d.tools.vision import trial as trials
from zero3d.tools.vision.table import read
from zero3d.tools.vision.tiny import IMAGE, image_tokens, micro_batch, tiny_model, types
from zero3d.tools.vision.trial import FAILED, REFUSED, TRAINED, UNTRIED, Found, Step, on_this_rank

KINDS = {  # how images enter -> a type
    "patches beside a grid": "kimi_k25",
    "tiles": "vipllava",
    "tiles beside sizes": "llava_onevision",
    "images of a row": "idefics2",
    "patches beside their places": "lfm2_vl",
    "two resolutions": "deepseek_vl_hybrid",
}
OTHERS = {
    "images at blocks alone": "granite4_vision",
    "images at an encoder": "t5gemma2",
    "codes of images": "chameleon",
}


@pytest.mark.parametrize(
    "kind",
    [*KINDS.values(), *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS.values())],
    ids=[*KINDS, *OTHERS],
)
def test_a_type_of_each_way_trains_with_a_rank_that_has_no_image(ranks, kind):
    assert ranks(2, on_this_rank, kind) == [Found(TRAINED)] * 2


@pytest.mark.parametrize("kind", [pytest.param("gemma3", marks=pytest.mark.long), "minicpmv4_6", "molmo2"])
def test_each_image_of_a_micro_batch_has_an_influence_on_its_own_row_alone(kind):
    model = tiny_model(kind).eval()
    batch = micro_batch(model, torch.Generator().manual_seed(1), images=(1, 0, 1))
    assert (batch["input_ids"] == IMAGE).sum(1).tolist()[1] == 0
    other = micro_batch(model, torch.Generator().manual_seed(2), images=(1, 0, 1))["pixel_values"]
    dim = -1 if kind == "minicpmv4_6" else 0  # along which images are beside each other
    first, second = batch["pixel_values"].chunk(2, dim)[0], other.chunk(2, dim)[1]
    changed = batch | {"pixel_values": torch.cat([first, second], dim)}
    with torch.no_grad():
        moved = (model(**batch, use_cache=False).logits - model(**changed, use_cache=False).logits).abs()
    assert moved[:2].max() == 0
    assert moved[2].max() > 1e-6


def test_all_zero_matrices_are_drawn_and_the_same_at_every_call():
    first, second = tiny_model("gemma3"), tiny_model("gemma3")
    assert first.model.multi_modal_projector.mm_input_projection_weight.any()
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = tiny_model("gemma3", seed=4)
    assert not all(a.equal(b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "why"), [("fast_vlm", "timm"), ("blip", "get_image_features"), ("udop", "parameters")]
)
def test_what_is_not_tried_says_why(kind, why):
    found = on_this_rank(kind)
    assert found.verdict == UNTRIED
    assert why in found.why


def test_a_loss_a_norm_or_a_gradient_that_differs_is_said():
    def step(loss=1.0, norm=2.0, weight=0.5):
        return Step(loss, norm, {"tower": torch.tensor([weight])})

    before = {"tower": torch.tensor([1.0])}
    difference = trials._difference
    assert difference(before, [step()], [step()]) == ""
    assert difference(before, [step()], [step(loss=1.001)]) == "in step 1 the loss is 1.001, and 1 in plain PyTorch"
    assert difference(before, [step()], [step(norm=2.1)]) == "in step 1 the norm is 2.1, and 2 in plain PyTorch"
    assert (
        difference(before, [step()], [step(weight=0.501)])
        == "after step 1 tower is off by 1.0e-03, and has moved by 5.0e-01"
    )
    assert difference(before, [step()], [step(loss=float("nan"))])


def test_ranks_that_do_not_come_back_or_die_have_failed():
    ours, theirs = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(2)), strict=True)
    theirs[0].send((TRAINED, ""))
    assert trials._first(ours, time.monotonic() + 0.01) is None
    theirs[0].send((REFUSED, "no"))
    theirs[1].close()
    assert trials._first(ours, time.monotonic() + 10) in (Found(REFUSED, "no"), Found(FAILED, "a process of it died"))


def test_the_package_carries_a_row_of_every_type_and_every_type_that_builds_is_trained(capsys):
    table = read()
    assert [row.type for row in table.types] == list(types())
    assert main(["models", "--vision"]) == 0
    said = capsys.readouterr().out
    assert f"transformers {table.transformers}, on {table.date}" in said
    for row in table.types:
        assert f"   {row.type}" in said
        assert (row.trained == TRAINED) == (row.why == "")
    assert main(["models", "--vision", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["types"]) == len(table.types)


@pytest.mark.long
def test_a_type_is_tried_where_it_is_asked_for(capsys):
    assert main(["models", "lfm2_vl", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][-1]
    assert (row["name"], row["supported"]) == ("trained", True)


@pytest.mark.parametrize(("verdict", "answer"), [(TRAINED, True), (REFUSED, False), (FAILED, False), (UNTRIED, None)])
def test_what_a_trial_finds_is_a_row_of_models(verdict, answer, monkeypatch):
    monkeypatch.setattr(trials, "trial", lambda kind: Found(verdict, "" if answer else "words"))
    row = models._trained("lfm2_vl")
    assert (row.name, row.supported) == ("trained", answer)
    assert row.refusal == ("" if answer else f"{verdict}: words")


def test_modules_that_run_once_an_image_are_gathered_with_the_root(ranks):
    """Ranks have one, two and no images of their own."""
    for found in ranks(3, norms, "lfm2_vl"):
        assert found == pytest.approx(plain_norms("lfm2_vl"), rel=1e-5)


def batches(model):
    generator = torch.Generator().manual_seed(1)
    return [micro_batch(model, generator, images) for images in ((1, 0), (1, 1), (0, 0))]


def norms(kind):
    model = tiny_model(kind)
    engine = zero3d.Engine(model, stage=3, precision="fp32", clip_norm=None, optimizer=trials._sgd)
    own = batches(tiny_model(kind))[torch.distributed.get_rank()]
    engine.backward(engine(**own, use_cache=False).loss)
    return float(engine.step().grad_norm)


def plain_norms(kind):
    model = tiny_model(kind)
    (sum(model(**batch, use_cache=False).loss for batch in batches(model)) / 3).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def test_an_image_has_as_many_tokens_as_its_features():
    model = tiny_model("qwen3_vl")
    batch = micro_batch(model, torch.Generator(), images=(2, 1))
    one = {"pixel_values": torch.ones(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    assert (batch["input_ids"] == IMAGE).sum(1).tolist() == [2 * image_tokens(model, one), image_tokens(model, one)]


def test_a_tower_beside_blocks_in_the_model_itself_is_found():
    assert {name.split(".")[1] for name in tower_parameters(tiny_model("chameleon")).values()} == {"vqmodel"}
