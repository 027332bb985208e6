"""Pipelines of vision-language models: the tower is on the first stage, and they train as one process does."""

import pytest
import torch
from models import adamw
from vision import EVERY, micro_batch, model, text_alone

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.errors import ConfigError
from zero3d.models import image_trial
from zero3d.models.chain import find_chain
from zero3d.models.images import patches, tower_parameters
from zero3d.pipeline.balance import Tower
from zero3d.pipeline.split import chain_of, tower_of
from zero3d.tools.vision.tiny import tiny_model

IMAGES = [[True] * 4, [True, False, False, True], [False] * 4]  # by step, of each micro-batch

TAKEN = [
    "aria",
    "aya_vision",
    "cohere2_vision",
    "cosmos3_edge",
    "cosmos3_omni",
    "deepseek_vl",
    "exaone4_5",
    "gemma3",
    "gemma4",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "glmga",
    "got_ocr2",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "lfm3_vl",
    "lighton_ocr",
    "llama4",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "minimax_m3_vl",
    "mistral3",
    "mistral_large4",
    "ovis2",
    "paddleocr_vl",
    "paligemma",
    "pp_chart2table",
    "qianfan_ocr",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen4_exp",
    "shieldgemma2",
    "smolvlm",
    "video_llama_3",
    "vipllava",
]  # types of images and text, tiny, whose stages give what the whole does


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
    (2, "llava", (3,)), (2, "qwen3_vl", (2,)),
    *(
        pytest.param(world, name, ((0, 3), (2, 3))[(number + world // 2) % 2], marks=pytest.mark.long)
        for world in (2, 4) for number, name in enumerate(EVERY)
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


def test_a_tower_that_cannot_run_an_image_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"the vision tower of Gemma3ForConditionalGeneration, called with pixel_values "
                       r"\[2, 3, 28, 28\], raises RuntimeError: stride should not be zero\. Pass pp=1\."):  # fmt: skip
        find_chain(model("gemma3", mm_tokens_per_image=256))


def test_the_tower_runs_before_the_blocks_and_is_not_run_to_find_that_out(monkeypatch):
    from transformers.models.clip import modeling_clip

    monkeypatch.setattr(image_trial, "SMALL", 0)  # which is run, for that takes less
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
    tower = Tower(sum(p.numel() for p in tower_parameters(made)), patches(made))
    assert tower_of(made, chain.before) == tower
    assert min(tower.parameters, tower.patches) > 0


DEEP = "qwen3_vl"  # two levels of DeepStack, behind blocks 0 and 1
SHAPES = {
    "packed": {"packed": True},
    "tied": {"tied": True},
    "recomputed": {"activations": "full"},
    "segments": {"activations": "every:2", "blocks": 6},
    "three stages": {"pp": 3, "blocks": 3},
    "interleaved": {"schedule": "interleaved", "blocks": 5},
    "zero-bubble": {"schedule": "zero-bubble", "blocks": 4, "packed": True},
    "zbv": {"schedule": "zbv", "blocks": 4, "activations": "full"},
    "gpipe": {"schedule": "gpipe", "stage": 3, "blocks": 4},
    "every use": {"stage": 3, "release": "every_use", "blocks": 3},
    "first stage": {"stage": 1, "blocks": 3},
}


def test_what_stages_need_is_found_for_every_cut():
    made = model(DEEP, blocks=3)
    entries = [chain_of(made, None, counts)[1] for counts in ([1, 2], [2, 1], [1, 2])]
    last = [max(leaf.until for leaf in entry.leaves if leaf.dtype is None) for entry in entries]
    assert last == [1, 2, 1]  # the first block of the last stage that adds features of images


def deep_model(name, blocks=2, tied=False, activations="none", **_):
    made = model(name, blocks=blocks)
    if tied:
        made.config.tie_word_embeddings = made.config.get_text_config().tie_word_embeddings = True
        made.get_output_embeddings().weight = made.get_input_embeddings().weight
    recompute(made, activations)
    return made


def deep_batches(name, packed=False, **_):
    """A step of four micro-batches, one of them of text alone; packed: of two documents a row, with their positions."""
    generator = torch.Generator().manual_seed(2)
    made = [micro_batch(name, generator, length=20) for _ in range(4)]
    made[2] = text_alone(made[2])
    if packed:
        for batch in made:
            documents = torch.cat([torch.arange(12), torch.arange(8)])
            batch["position_ids"] = documents.expand(4, 2, -1)
    return made


def deep_run(name, options):
    """On each rank of a pipeline, or on one without: losses and norms of two steps. Sends are as by formula."""
    pp = options.get("pp", 2)
    mesh = zero3d.Mesh(pp=pp if torch.distributed.get_world_size() > 1 else 1)
    schedule = options.get("schedule") if mesh.pp > 1 else None
    engine = zero3d.Engine(
        deep_model(name, **options), mesh=mesh, stage=options.get("stage", 2), precision="fp32", clip_norm=0.5,
        optimizer=adamw, accumulate=4, schedule=schedule, release=options.get("release", "auto"),
    )  # fmt: skip
    found = []
    for _ in range(2):
        found += [float(engine.train_batch(deep_batches(name, **options))), float(engine.last_step.grad_norm)]
    found.append(float(engine.evaluate(deep_batches(name, **options))))
    if mesh.pp > 1:
        sent = {(e.op, e.unit): (e.calls, e.bytes) for e in engine.traffic if e.op in ("send_forward", "send_backward")}
        assert sent == {key: (2 * m.calls, 2 * m.bytes) for key, m in engine.pipeline.traffic(4).items()}
    return found


@pytest.mark.parametrize("case", [
    name if name == "interleaved" else pytest.param(name, marks=pytest.mark.long) for name in SHAPES
])  # fmt: skip
def test_deepstack_is_cut_anywhere_under_every_schedule(ranks, case):
    options = SHAPES[case]
    [wanted] = ranks(1, deep_run, DEEP, options)
    for found in ranks(options.get("pp", 2), deep_run, DEEP, options):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", TAKEN)
def test_stages_of_a_type_give_what_the_whole_does(kind):
    chain, entry = chain_of(tiny_model(kind), None)
    assert chain.length >= 2
    assert all(leaf.dtype is not None or leaf.until > 0 for leaf in entry.leaves)
