"""Pipelines of vision-language models: the tower is on the first stage, and they train as one process does."""

import pytest
import torch
from models import adamw
from vision import EVERY, micro_batch, model, text_alone

import zero3d
from zero3d.errors import ConfigError
from zero3d.models.chain import find_chain

REFUSED = {
    "gemma4": "block 0 takes a second tensor with a gradient",
    "llava_next": "image_newline is a parameter of LlavaNextModel itself",
    "qwen2_vl": "its blocks get different masks or positions",
    "qwen2_5_vl": "its blocks get different masks or positions",
    "qwen3_5": "its blocks get different masks or positions",
    "qwen3_vl": "something happens to the hidden state between blocks 0 and 1",
    "qwen3_vl_moe": "something happens to the hidden state between blocks 0 and 1",
}
CUT = [name for name in EVERY if name not in REFUSED]
IMAGES = [[True] * 4, [True, False, False, True], [False] * 4]  # by step, of each micro-batch


def batches(name):
    """Three steps of four micro-batches; some are of text alone."""
    generator = torch.Generator().manual_seed(1)
    drawn = [[micro_batch(name, generator) for _ in step] for step in IMAGES]
    return [
        [batch if has else text_alone(batch) for batch, has in zip(step, which, strict=True)]
        for step, which in zip(drawn, IMAGES, strict=True)
    ]


def train_plain(name):
    """Returns losses and norms of the loop that everyone writes."""
    plain, losses, norms = model(name), [], []
    optimizer = adamw(plain.parameters())
    for step in batches(name):
        values = [plain(**batch, use_cache=False).loss for batch in step]
        (sum(values) / len(step)).backward()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(value.item() for value in values) / len(step))
    return losses, norms


def train(name, cases):
    """The same on this rank of a pipeline of two stages, for every stage of ZeRO: losses, norms, unequal memory."""
    mesh = zero3d.Mesh(pp=2)
    dp, found = mesh.dp, []
    for stage in cases:
        engine = zero3d.Engine(
            model(name), mesh=mesh, stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw, accumulate=4 // dp
        )
        losses, norms = [], []
        for step in batches(name):
            losses.append(float(engine.train_batch(step[mesh.place.dp :: dp])))
            norms.append(float(engine.last_step.grad_norm))
        unequal = [entry for entry in engine.memory if entry.planned is not None and entry.planned != entry.measured]
        found.append((losses, norms, unequal, engine.evaluate(batches(name)[1][mesh.place.dp :: dp])))
    return found


@pytest.mark.parametrize(("world", "name", "stages"), [
    (2, "llava", (3,)),
    *(
        pytest.param(world, name, ((0, 3), (2, 3))[(number + world // 2) % 2], marks=pytest.mark.long)
        for world in (2, 4) for number, name in enumerate(CUT)
    ),
])  # fmt: skip
def test_a_pipeline_trains_as_one_process(ranks, world, name, stages):
    losses, norms = train_plain(name)
    for runs in ranks(world, train, name, stages):
        for found in runs:
            assert found[0] == pytest.approx(losses, rel=1e-5)
            assert found[1] == pytest.approx(norms, rel=1e-4)
            assert found[2] == []
        assert [found[:2] for found in runs] == [runs[0][:2]] * len(runs)  # the same bits at every stage
        assert len({str(found[3]) for found in runs}) == 1


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_whose_later_stages_would_miss_something_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{REFUSED[name]}.*pass pp=1\.|{REFUSED[name]}.*Pass pp=1\."):
        find_chain(model(name))


def test_a_tower_that_cannot_run_an_image_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"the vision tower of Gemma3ForConditionalGeneration, called with pixel_values "
                       r"\[2, 3, 28, 28\], raises RuntimeError: stride should not be zero\. Pass pp=1\."):  # fmt: skip
        find_chain(model("gemma3", mm_tokens_per_image=256))


def test_the_tower_runs_before_the_blocks_and_is_not_run_to_find_that_out(monkeypatch):
    from transformers.models.clip import modeling_clip

    made = model("llava")
    seen = []
    forward = modeling_clip.CLIPVisionModel.forward

    def spied(self, *args, **options):
        output = forward(self, *args, **options)
        seen.append(type(output.last_hidden_state).__name__)
        return output

    monkeypatch.setattr(modeling_clip.CLIPVisionModel, "forward", spied)
    chain = find_chain(made)
    assert chain.blocks == "model.language_model.layers"
    assert {"model.vision_tower", "model.multi_modal_projector"} < set(chain.before)
    assert set(seen) == {"FakeTensor"}
