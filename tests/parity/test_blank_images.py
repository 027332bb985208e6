"""Micro-batches with and without images side by side: at stage 3 blank ones run the tower, without any effect."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from models import adamw
from vision import EVERY, WITH_VIDEOS, micro_batch, model, text_alone, videos_alone, with_videos

import zero3d
from zero3d.activations import recompute
from zero3d.engine.tower_calls import GENERATION, TowerCalls
from zero3d.errors import ConfigError
from zero3d.models import images
from zero3d.models.images import CALLS, BlankImages, tower_parameters
from zero3d.tools.vision.tiny import micro_batch as tiny_micro_batch, tiny_model

SHORT = ("llava", "qwen3_vl")  # the second reads features at its blocks, too
CASES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in EVERY]
# What each rank's micro-batch has in a step: images, videos, both, or neither. Some types run the tower for each.
IMAGES = [["i", "-"], ["-", "i"], ["-", "-"], ["i", "i"]]
VIDEOS = [["iv", "i"], ["-", "iv"], ["i", "v"], ["v", "-"]]


def batches(name):
    generator = torch.Generator().manual_seed(1)
    steps = IMAGES + (VIDEOS if name in WITH_VIDEOS else [])
    drawn = [[micro_batch(name, generator) for _ in step] for step in steps]
    return [
        [shown(batch, what, generator) for batch, what in zip(step, whats, strict=True)]
        for step, whats in zip(drawn, steps, strict=True)
    ]


def shown(batch, what, generator):
    if what in ("i", "-"):
        return batch if what == "i" else text_alone(batch)
    batch = with_videos(batch, generator)
    return batch if what == "iv" else videos_alone(batch)


def train_plain(name):
    """Returns means of losses, norms, and the weights' norms."""
    plain, losses, norms = model(name), [], []
    optimizer = adamw(plain.parameters())
    for step in batches(name):
        values = [plain(**batch, use_cache=False).loss for batch in step]
        (sum(values) / 2).backward()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(value.item() for value in values) / 2)
    return losses, norms, [float(p.detach().norm()) for p in plain.parameters()]


def train_engine(name, stage, activations):
    """The same of this rank, and what it evaluates and generates of text alone."""
    given, rank = model(name), torch.distributed.get_rank()
    recompute(given, activations)
    engine = zero3d.Engine(given, stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    losses, norms = [], []
    for step in batches(name):
        loss = engine(**step[rank], use_cache=False).loss
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))
        losses.append(loss.item())
    engine.evaluate([batches(name)[0][rank]])
    with engine.full_params():
        ids = {key: value for key, value in batches(name)[2][rank].items() if key != "labels"}
        engine.module.generate(**ids, max_new_tokens=2 + rank, do_sample=False)  # ranks may end apart
        return losses, norms, [float(p.detach().norm()) for p in engine.module.parameters()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stage", "activations"), [
    *(pytest.param(stage, "none", marks=pytest.mark.long) for stage in (2, 3)), (3, "full"),
])  # fmt: skip
def test_ranks_with_images_beside_ranks_without_equal_one_process(ranks, name, stage, activations):
    losses, norms, weights = train_plain(name)
    first, second = ranks(2, train_engine, name, stage, activations)
    assert [sum(both) / 2 for both in zip(first[0], second[0], strict=True)] == pytest.approx(losses, rel=1e-5)
    for found in (first, second):
        assert found[1] == pytest.approx(norms, rel=1e-4)
        assert found[2] == pytest.approx(weights, rel=1e-3)


def towers_of(engine):
    """Names of the units that have parameters of the tower alone; the root's has what is left of all."""
    tower = set(tower_parameters(engine.module))
    return {unit.name for unit in engine.units if tower.issuperset(unit.weights.params)}


def train_text_alone(name):
    """How often a unit of the tower was gathered in each of three steps of text, and in one with an image on a rank."""
    engine, rank = zero3d.Engine(model(name), stage=3, precision="fp32", optimizer=adamw), torch.distributed.get_rank()
    towers, gathered = towers_of(engine), []
    for step in [batches(name)[2]] * 3 + [batches(name)[0]]:
        engine.traffic.reset()
        engine.train_batch([step[rank]])
        gathered.append(sum(entry.op == "all_gather" and entry.unit in towers for entry in engine.traffic))
    return gathered, len(towers)


def test_steps_without_an_image_on_any_rank_gather_nothing_of_the_tower(ranks):
    for gathered, units in ranks(2, train_text_alone, "qwen3_vl"):
        assert gathered[1:3] == [0, 0]
        assert gathered[3] >= units > 2


def train_as_told(name):
    """Losses of ranks that are told how often towers run, and may not ask; of ranks that ask."""
    rank, found = torch.distributed.get_rank(), []
    ask = TowerCalls.agree
    for told in (True, False):
        TowerCalls.agree = None if told else ask
        engine = zero3d.Engine(model(name), stage=3, precision="fp32", clip_norm=0.5, optimizer=adamw)
        calls = [1, 1, 0, 1, 2, 2, 1, 1]
        steps = zip(batches(name), calls, strict=True)
        given = [[step[rank] | ({CALLS: count} if told else {})] for step, count in steps]
        found.append([float(engine.train_batch(step)) for step in given])
    return found


def test_ranks_that_are_told_how_often_towers_run_do_not_ask_each_other(ranks):
    for told, asked in ranks(2, train_as_told, "qwen3_vl"):
        assert told == asked


def train_frozen(name, stage):
    """Losses of a model whose tower is frozen, and what is reduced of it."""
    given, rank = model(name), torch.distributed.get_rank()
    for p in tower_parameters(given):
        p.requires_grad_(False)
    engine = zero3d.Engine(given, stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    losses = [float(engine.train_batch([step[rank]])) for step in batches(name)]
    towers = towers_of(engine)
    return losses, [entry for entry in engine.traffic if entry.op == "reduce_scatter" and entry.unit in towers]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in ("llava", *WITH_VIDEOS)])
def test_a_frozen_tower_runs_as_often_and_reduces_nothing(ranks, name):
    whole = ranks(2, train_frozen, name, 2)[0][0]
    for losses, reduced in ranks(2, train_frozen, name, 3):
        assert losses == pytest.approx(whole, rel=1e-6)
        assert reduced == []


def train_apart(name):
    """Losses and norms where each rank runs a tower that is gathered by its own images: inside full_params(), and behind
    an evaluation that leaves all gathered. Before these, those of stage 2."""
    rank, found = torch.distributed.get_rank(), []
    for stage, release in ((2, "auto"), (3, "auto"), (3, "every_step")):
        given = model(name)
        engine = zero3d.Engine(given, stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw, release=release)
        figures = []
        for step in batches(name)[:2]:
            with engine.full_params() if release == "auto" else nullcontext():
                with torch.no_grad():
                    engine(**step[rank], use_cache=False)
                loss = engine(**step[rank], use_cache=False).loss
                engine.backward(loss)
            figures += [loss.item(), float(engine.step().grad_norm)]
        found.append(figures)
    return found


@pytest.mark.long
def test_ranks_that_run_a_gathered_tower_apart_train_as_at_stage_2(ranks):
    for stage_2, *others in ranks(2, train_apart, "qwen3_vl"):
        assert others == [pytest.approx(stage_2, rel=1e-4)] * 2


def told_of_gradients(name, stage):
    """What a rank warns of in steps of text, of images on the second rank, and of images on both."""
    engine, rank = (
        zero3d.Engine(model(name), stage=stage, precision="fp32", optimizer=adamw),
        torch.distributed.get_rank(),
    )
    said = []
    engine.evaluate([batches(name)[3][rank]])  # which gives no gradient, and is not spoken of
    for step in (2, 1, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.backward(engine(**batches(name)[step][rank], use_cache=False).loss)
            engine.step()
        said.append([str(warning.message) for warning in caught if "images give" in str(warning.message)])
    return said


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_parameters_that_no_image_reaches_are_named_once(ranks, stage):
    """The last layer of LLaVA's tower. At stage 2 ranks do not tell each other of their images."""
    first, second = ranks(2, told_of_gradients, "llava", stage)
    assert [len(step) for step in first] == ([0, 1, 0] if stage == 3 else [0, 0, 1])
    assert [len(step) for step in second] == [0, 0, 0]
    (line,) = [line for step in first for line in step]
    assert "images give 18 of 43 parameters outside the language model no gradient, on any rank: model.vision" in line
    assert "and 15 others" in line


def test_a_tower_all_of_which_images_reach_is_not_spoken_of(ranks):
    assert ranks(2, told_of_gradients, "qwen3_vl", 3) == [[[], [], []]] * 2


def reached(given, batch):
    """Names of the parameters that have a gradient after a micro-batch, and its loss."""
    given.zero_grad(set_to_none=True)
    loss = given(**batch, use_cache=False).loss
    loss.backward()
    return {name for name, p in given.named_parameters() if p.grad is not None}, loss.item()


@pytest.mark.parametrize(
    "name", [name if name in (*SHORT, "llama4") else pytest.param(name, marks=pytest.mark.long) for name in EVERY]
)
def test_a_blank_image_gives_gradients_to_the_parameters_that_images_give_them_to_and_to_no_others(name):
    given, generator = model(name), torch.Generator().manual_seed(1)
    shown, text = micro_batch(name, generator), text_alone(micro_batch(name, generator))
    wanted, _ = reached(given, shown)
    without, loss = reached(given, text)
    BlankImages(given)
    assert reached(given, text) == (wanted, loss)
    assert without < wanted
    assert reached(given, shown)[0] == wanted


def generate(engine_or_model, shown, **options):
    ids, others = shown["input_ids"], {key: value for key, value in shown.items() if key not in ("input_ids", "labels")}
    return engine_or_model.generate(ids, max_new_tokens=4, do_sample=False, **others, **options).tolist()


def generate_on_a_rank(name, stage):
    """What this rank's sequences go on with, units gathered for all tokens and for each: with images on both ranks or on
    one, and videos on one; after a step again with images on both."""
    rank = torch.distributed.get_rank()
    engine = zero3d.Engine(model(name), stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    found = []
    for keep in (False, True):
        for step in batches(name):
            found.append(generate(engine, step[rank], keep_full=keep))
            engine.release()
    shown = batches(name)[3][rank]
    engine.train_batch([shown])
    return [*found, generate(engine, shown)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_images_are_answered_as_by_the_model_itself(ranks, name, stage):
    plain = model(name)
    optimizer = adamw(plain.parameters())
    wanted = [[generate(plain.eval(), step[rank]) for step in batches(name)] for rank in (0, 1)]
    (sum(plain.train()(**shown, use_cache=False).loss for shown in batches(name)[3]) / 2).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    trained = [generate(plain.eval(), shown) for shown in batches(name)[3]]
    found = ranks(2, generate_on_a_rank, name, stage)
    assert found == [[*each, *each, after] for each, after in zip(wanted, trained, strict=True)]


def generate_in_bf16(name):
    engine = zero3d.Engine(model(name), stage=3, precision="bf16", optimizer=adamw)
    return len(generate(engine, batches(name)[0][0])[0])


def test_images_in_fp32_are_answered_in_bf16(ranks):
    """By Llama 4, too, whose tower casts nothing."""
    assert ranks(1, generate_in_bf16, "llama4") == [24 + 4]


def test_what_a_rank_of_text_owes_a_generation_is_run_once_and_not_behind_one_that_fails(monkeypatch):
    """Of a model that takes no encoded images: its tower runs in the first forward that has a cache."""
    monkeypatch.setattr(images, "ENCODED", "none")
    given, runs = model("llava").eval(), []
    blanks = BlankImages(given)
    given.model.vision_tower.register_forward_pre_hook(lambda *_: runs.append(1))
    ids = torch.arange(3, 9).view(1, 6)
    with blanks.generating({}):
        given.generate(ids, max_new_tokens=3, do_sample=False)
    assert len(runs) == 1
    with pytest.raises(KeyError), blanks.generating({}):
        raise KeyError
    given.generate(ids, max_new_tokens=3, do_sample=False)
    assert len(runs) == 1


def train_behind_a_refused_generation(name):
    """Losses of two steps, of each behind a generation without an unknown keyword and behind one with it."""
    rank, found = torch.distributed.get_rank(), []
    for unknown in ({}, {"temperature_of_mine": 3}):
        engine = zero3d.Engine(model(name), stage=3, precision="fp32", optimizer=adamw)
        losses = []
        for step in batches(name)[:2]:  # with images on the first rank alone, and on the second
            with pytest.raises(ValueError, match="temperature_of_mine") if unknown else nullcontext():
                generate(engine, step[rank], **unknown)
            losses.append(float(engine.train_batch([step[rank]])))
        found.append((losses, engine.blanks.ran))
    return found


def test_a_generation_that_refuses_an_argument_leaves_ranks_in_step(ranks):
    for plain, behind in ranks(2, train_behind_a_refused_generation, "qwen3_vl"):
        assert behind == plain


def held_behind_a_generation(name):
    """Units that are still held for a generation behind it, and behind one that fails; how many are held inside."""
    engine, rank = zero3d.Engine(model(name), stage=3, precision="fp32", optimizer=adamw), torch.distributed.get_rank()

    def held():
        return [unit.name for unit in engine.units if GENERATION in unit.users]

    generate(engine, batches(name)[0][rank], keep_full=False)
    behind = held()
    with pytest.raises(KeyError), engine.blanks.generating({}):
        inside = len(held())
        raise KeyError
    return behind, inside, held()


def test_line_ends_of_images_are_released_behind_a_generation(ranks):
    assert ranks(2, held_behind_a_generation, "llava_next") == [([], 1, [])] * 2


def train_without_tower():
    """Losses of text alone at stage 3, and of a model whose config has no tower that it names no images."""
    engine = zero3d.Engine(model("gemma4", vision_config=None), stage=3, precision="fp32", optimizer=adamw)
    ids = torch.arange(3, 23).view(2, 10) + torch.distributed.get_rank()
    return [float(engine.train_batch([{"input_ids": ids, "labels": ids}])) for _ in range(2)]


def test_a_model_without_a_tower_is_given_no_blank_image(ranks):
    first, second = ranks(2, train_without_tower)
    assert first == second
    assert first[1] < first[0]


def refusal_of_blank_images():
    with pytest.raises(ConfigError) as refused:
        zero3d.Engine(model("gemma3", mm_tokens_per_image=256), stage=3, precision="fp32", optimizer=adamw)
    return str(refused.value)


def test_a_tower_that_cannot_run_a_blank_image_is_refused_before_training(ranks):
    for message in ranks(2, refusal_of_blank_images):
        assert message == (
            "Gemma3ForConditionalGeneration cannot process a blank image (RuntimeError: stride should not be zero), "
            "which stage 3 needs where a micro-batch has none: pass zero.stage=2, or a config without vision_config."
        )


NOT_READ = {"a block twice": [1, 1, 0, 1], "blocks that are not there": [1, 2, 7, 9]}


def granite(layers):
    """Loss of this rank and norm of a step of which rank 0 alone has images; in one process of both micro-batches."""
    made = tiny_model("granite4_vision", spatial_target_layers=layers)
    given = [tiny_micro_batch(made, torch.Generator().manual_seed(1), images) for images in ((1, 1), (0, 0))]
    mine = given[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    engine = zero3d.Engine(made, stage=3, precision="fp32", optimizer=adamw, accumulate=len(mine))
    return [float(engine.train_batch(mine)), float(engine.last_step.grad_norm)]


@pytest.mark.long
@pytest.mark.parametrize("layers", NOT_READ.values(), ids=NOT_READ)
def test_features_that_no_block_reads_make_no_rank_wait(ranks, layers):
    [one] = ranks(1, granite, layers)
    for found in ranks(2, granite, layers):
        assert found == pytest.approx(one, rel=1e-5)
