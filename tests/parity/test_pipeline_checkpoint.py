"""Save, load and export of models over pipeline stages: any mesh to any mesh, bit for bit; resume with dropout."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from damage import joined
from models import Net, adamw, batch, bits, hf, planned_bytes
from pipelines import schedule_of
from safetensors import safe_open
from torch.nn import functional as F

import zero3d
from zero3d.checkpoint import writing

HOLDS = {"llama": "lm_head.weight", "qwen3": "model.embed_tokens.weight"}
OWNER = {"qwen3": "model.embed_tokens.weight", "tied": "embed.weight"}
COPY = {"qwen3": "lm_head.weight", "tied": "head.weight"}


class Lm(Net):
    """The plain net with a keyword for token ids, and dropout."""

    def forward(self, input_ids, labels=None):
        return super().forward(input_ids)


def sum_of_losses(output, micro_batch):
    logits, ids = getattr(output, "logits", output), micro_batch["labels"]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
    return loss, float(ids[:, 1:].numel())


def make(model, shape, stage, schedule="1f1b", **options):
    """An engine on (dp, pp) = shape."""
    dp, pp = shape
    torch.manual_seed(7)
    mesh = zero3d.Mesh(dp=dp, pp=pp)
    plain = model in ("net", "tied")
    made = Lm(layers=4, dropout=0.2, tied=model == "tied") if plain else hf(model, inner=96)
    return zero3d.Engine(
        made,
        stage=stage,
        mesh=mesh,
        schedule=schedule_of(mesh, schedule),
        clip_norm=0.5,
        optimizer=adamw,
        loss=sum_of_losses,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        param_groups=[{"match": "*norm*|*.bias", "weight_decay": 0.0}],
        **options,
    )


def train(engine, steps):
    losses = []
    for step in steps:
        ids = [batch(10 * step + i, engine.mesh.place.dp) for i in range(2)]
        losses.append(float(engine.train_batch([{"input_ids": x, "labels": x} for x in ids])))
    return losses


def weights(engine):
    with engine.full_params():
        return {name: bits([p]) for chunk in engine.chunks.values() for name, p in chunk.named_parameters()}


def states(folder):
    """Every saved state of the full model, put together from its boxes, as a hash."""
    manifest = joined(folder)
    whole = {}
    for row in manifest["tensors"]:
        with safe_open(folder / row["file"], framework="pt") as file:
            values = file.get_tensor(row["key"])
        shape = manifest["parameters"][row["name"]]["shape"]
        target = whole.setdefault((row["name"], row["state"]), torch.full(shape, float("nan"), dtype=values.dtype))
        target[tuple(slice(a, b) for a, b in row["box"])] = values
    assert not any(value.isnan().any() for value in whole.values())
    assert {name for name, _ in whole} == set(manifest["parameters"])
    return {key: bits([value]) for key, value in sorted(whole.items())}


def saved_at(model, shape, stage, folder):
    engine = make(model, shape, stage)
    train(engine, range(2))
    return str(engine.save(folder)), weights(engine)


def saved_again_at(model, shape, stage, source, folder):
    engine = make(model, shape, stage)
    engine.load(source)
    return str(engine.save(folder)), weights(engine), engine.steps


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("qwen3", ((2, 2), 3), [((1, 1), 0), ((1, 2), 2)]),
        pytest.param("qwen3", ((2, 2), 3), [((4, 1), 1)], marks=pytest.mark.long),
        pytest.param("llama", ((4, 1), 1), [((2, 2), 3), ((1, 2), 1)], marks=pytest.mark.long),
    ],
)
def test_a_save_on_one_mesh_loads_on_every_other_with_equal_states(ranks, tmp_path, model, before, after):
    (dp, pp), stage = before
    first = ranks(dp * pp, saved_at, model, (dp, pp), stage, str(tmp_path / "first"))
    expected, known = states(Path(first[0][0])), {}
    for _, owned in first:
        known |= owned
    assert all(key in expected for key in [(HOLDS[model], "master"), (HOLDS[model], "exp_avg_sq")])
    assert ("lm_head.weight", "master") in expected or model == "qwen3"
    for i, (shape, new_stage) in enumerate(after):
        again = ranks(shape[0] * shape[1], saved_again_at, model, shape, new_stage, first[0][0], str(tmp_path / str(i)))
        assert states(Path(again[0][0])) == expected
        for _, owned, steps in again:
            assert steps == 2
            owner = known["model.embed_tokens.weight"]
            assert all(value == known.get(name, owner) for name, value in owned.items())


def interrupted_and_not(model, shape, stage, schedule, folder):
    torch.manual_seed(100 + dist.get_rank())
    straight = make(model, shape, stage, schedule)
    torch.manual_seed(100 + dist.get_rank())
    expected = train(straight, range(3))[1:]
    first = make(model, shape, stage, schedule)
    torch.manual_seed(100 + dist.get_rank())
    train(first, range(1))
    saved = first.save(folder)
    second = make(model, shape, stage, schedule)
    second.load(saved.parent)
    losses = train(second, range(1, 3))
    return losses == expected, weights(second) == weights(straight), len(set(expected)) == 2


@pytest.mark.parametrize(
    ("shape", "stage", "schedule"),
    [
        pytest.param((2, 2), 3, "1f1b", marks=pytest.mark.long),
        pytest.param((1, 2), 3, "1f1b", marks=pytest.mark.long),
        pytest.param((1, 2), 1, "interleaved", marks=pytest.mark.long),
        ((1, 2), 2, "zbv"),
    ],
)
def test_resume_on_the_same_mesh_is_bitwise_with_dropout(ranks, tmp_path, shape, stage, schedule):
    model = "tied" if schedule == "zbv" else "net"
    for answer in ranks(shape[0] * shape[1], interrupted_and_not, model, shape, stage, schedule, str(tmp_path)):
        assert answer == (True, True, True)


def stream_stays(shape, source):
    """Whether the rank's random stream is after a load the one that it had."""
    engine = make("net", shape, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine.load(source)
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_random_streams_go_on_on_the_same_mesh_only(ranks, tmp_path, dp):
    world = 2 * dp
    source = Path(ranks(world, saved_at, "net", (dp, 2), 3, str(tmp_path / "new"))[0][0])
    assert json.loads((source / "manifest.json").read_text())["mesh"] == {"pp": 2, "dp": dp, "tp": 1}
    assert ranks(world, stream_stays, (dp, 2), source) == [False] * world
    assert ranks(world, stream_stays, (world, 1), source) == [True] * world  # as many files, other ranks


def with_buffers(shape, schedule, folder=None, source=None):
    """A net with counters: one of its own, one of each block; every rank fills its own with its number."""
    torch.manual_seed(7)
    made = Lm(layers=4)
    for i, module in enumerate([made, *made.layers]):
        module.register_buffer("counter", torch.zeros(2))
        module.register_buffer("hidden", torch.full((1,), float(i)), persistent=False)
    mesh = zero3d.Mesh(dp=shape[0], pp=shape[1])
    engine = zero3d.Engine(made, mesh=mesh, schedule=schedule_of(mesh, schedule), optimizer=adamw)
    buffers = {name: buffer for chunk in engine.chunks.values() for name, buffer in chunk.named_buffers()}
    if source is not None:
        engine.load(source)
        return {name: buffer.tolist()[0] for name, buffer in buffers.items() if "counter" in name}
    for name, buffer in buffers.items():
        if "counter" in name:
            buffer.fill_(float(dist.get_rank()))
    engine.export(f"{folder}/export")
    return str(engine.save(f"{folder}/states"))


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.long), "zbv"])
def test_buffers_come_back_on_any_mesh_and_are_exported_once(ranks, tmp_path, schedule):
    source = ranks(4, with_buffers, (2, 2), schedule, str(tmp_path))[0]
    for rank, values in enumerate(ranks(4, with_buffers, (2, 2), schedule, None, source)):
        assert set(values.values()) == {float(rank)}
    middle = 2.0  # first rank of the second pipeline stage, which has blocks 1 and 2 under zbv
    second = (
        ("layers.2.counter", "layers.3.counter") if schedule == "1f1b" else ("layers.1.counter", "layers.2.counter")
    )
    expected = {
        name: middle if name in second else 0.0 for name in ["counter", *(f"layers.{i}.counter" for i in range(4))]
    }
    assert ranks(4, with_buffers, (4, 1), schedule, None, source) == [expected] * 4
    files = list((tmp_path / "export").glob("*.safetensors"))
    keys = [key for file in files for key in safe_open(file, framework="pt").keys()]  # noqa: SIM118
    assert len(keys) == len(set(keys))
    assert {key for key in keys if key.split(".")[-1] in ("counter", "hidden")} == set(expected)


def exported_at(model, shape, folder):
    engine = make(model, shape, 3, precision="fp32")
    train(engine, range(1))
    return str(engine.export(folder)), weights(engine)


@pytest.mark.parametrize(("model", "shape"), [
    pytest.param("llama", (1, 2), marks=pytest.mark.long), pytest.param("qwen3", (2, 2), marks=pytest.mark.long),
    ("qwen3", (1, 2)), ("qwen3_moe", (1, 2)),
])  # fmt: skip
def test_the_export_of_a_pipeline_loads_with_from_pretrained(ranks, tmp_path, model, shape):
    from transformers import AutoModelForCausalLM

    results = ranks(shape[0] * shape[1], exported_at, model, shape, str(tmp_path / "hf"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    saved = {name: value for _, owned in results for name, value in owned.items()}
    assert {name: bits([p]) for name, p in loaded.named_parameters(remove_duplicate=False)} == saved
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert config["architectures"] == [type(loaded).__name__]
    if model != "qwen3_moe":  # published experts are not fused
        assert set(index["weight_map"]) == {name for name, _ in loaded.named_parameters()}
    assert sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors")) == sorted(set(index["weight_map"].values()))


def refused_and_not(shape, source):
    engine = make("llama", shape, 3)
    try:
        engine.load(source)
    except zero3d.CheckpointError as error:
        return str(error)


def test_every_rank_of_a_pipeline_refuses_another_model(ranks, tmp_path):
    source = ranks(1, saved_at, "qwen3", (1, 1), 1, str(tmp_path))[0][0]
    answers = ranks(2, refused_and_not, (1, 2), source)
    assert answers[0] == answers[1]
    assert "another model (24 parameters, this model 21)" in answers[0]


def frozen_embedding(shape, stage, source, folder):
    torch.manual_seed(7)
    made = hf("qwen3", inner=96)
    made.model.embed_tokens.weight.requires_grad_(False)
    if source is not None:
        with torch.no_grad():
            made.model.embed_tokens.weight.zero_()
    engine = zero3d.Engine(made, stage=stage, mesh=zero3d.Mesh(dp=shape[0], pp=shape[1]), loss=sum_of_losses)
    if source is not None:
        engine.load(source)
    train(engine, range(1))
    return str(engine.save(folder)), weights(engine)


def test_a_frozen_tied_embedding_is_saved_once_and_restored_on_both_ends(ranks, tmp_path):
    source, first = ranks(4, frozen_embedding, (2, 2), 3, None, str(tmp_path / "a"))[0]
    again = ranks(2, frozen_embedding, (1, 2), 1, source, str(tmp_path / "b"))
    assert ("lm_head.weight", "weight") not in states(Path(source))
    expected = first["model.embed_tokens.weight"]
    assert [owned.get("model.embed_tokens.weight", owned.get("lm_head.weight")) for _, owned in again] == [expected] * 2


def written(model, shape, stage, precision, where):
    engine = make(model, shape, stage, "zbv" if model == "tied" else "1f1b", precision=precision)
    names = {name: p for chunk in engine.chunks.values() for name, p in chunk.named_parameters()}
    before = weights(engine)
    unwritten = [m for chunk in engine.chunks.values() for m in chunk.modules() if "Norm" in type(m).__name__][:1]
    with engine.full_params(unwritten), torch.no_grad():
        for i, end in enumerate(where):
            if end[model] in names:
                names[end[model]].fill_(0.125 + i)
    after, ends = weights(engine), {OWNER[model], COPY[model]} & set(names)
    kept = all(after[name] == value for name, value in before.items() if name not in ends)
    with engine.full_params():
        values = {value for name in ends for value in names[name].flatten().tolist()}
    train(engine, range(1))
    trained = weights(engine)
    return kept, values, {trained[name] for name in ends}


@pytest.mark.parametrize(
    ("model", "shape", "stage", "precision", "where"),
    [
        pytest.param("qwen3", (2, 2), 3, "bf16", [COPY], marks=pytest.mark.long),
        ("qwen3", (1, 2), 1, "fp32", [OWNER]),
        ("qwen3", (2, 2), 2, "bf16", [OWNER, COPY]),
        pytest.param("qwen3", (1, 2), 0, "bf16", [COPY], marks=pytest.mark.long),
        ("tied", (1, 2), 3, "bf16", [COPY]),
        pytest.param("tied", (2, 2), 1, "bf16", [OWNER, COPY], marks=pytest.mark.long),
    ],
)
def test_a_write_to_a_tied_parameter_reaches_its_copy(ranks, model, shape, stage, precision, where):
    answers = ranks(shape[0] * shape[1], written, model, shape, stage, precision, where)
    assert all(kept and values <= {0.125} for kept, values, _ in answers)
    assert any(values for _, values, _ in answers)
    assert len(set().union(*(trained for _, _, trained in answers))) == 1


def planned_and_measured(shape, stage, schedule):
    engine = make("net", shape, stage, schedule, precision="bf16")
    train(engine, range(2))
    entries = [(e.category, e.planned, e.measured) for e in engine.memory if e.planned is not None]
    return (
        entries,
        sum(p.numel() for chunk in engine.chunks.values() for p in chunk.parameters()),
        planned_bytes(engine),
    )


@pytest.mark.parametrize(("shape", "stage", "schedule"), [
    pytest.param((2, 2), 3, "1f1b", marks=pytest.mark.long), ((1, 2), 2, "zbv"),
])  # fmt: skip
def test_planned_bytes_of_a_pipeline_stage_equal_what_its_arena_holds(ranks, shape, stage, schedule):
    answers = ranks(shape[0] * shape[1], planned_and_measured, shape, stage, schedule)
    for entries, elements, planned in answers:
        assert len(entries) == 4
        assert all(planned == measured for _, planned, measured in entries)
        assert planned.parameters == 2 * elements  # held whole, and the shard in it


def full_disk(folder, broken):
    """Only one rank cannot write."""
    engine = make("llama", (2, 2), 3)

    def refuses(*_, **__):
        raise OSError("No space left on device")

    original = writing._staged
    writing._staged = refuses if dist.get_rank() == broken else original
    texts = []
    try:
        for write in (engine.save, engine.export):
            with pytest.raises(zero3d.CheckpointError) as caught:
                write(f"{folder}/{write.__name__}")
            texts.append(str(caught.value))
    finally:
        writing._staged = original
    return texts


def test_a_pipeline_stage_that_cannot_write_stops_all_ranks_and_leaves_nothing(ranks, tmp_path):
    for texts in ranks(4, full_disk, str(tmp_path), 2):
        assert all("No space left on device" in text for text in texts)
    assert [p.name for p in tmp_path.rglob("*")] == ["save"]


def frozen_first_half(shape, source, folder):
    torch.manual_seed(7)
    made = hf("llama", inner=96)
    for name, p in made.named_parameters():
        p.requires_grad_(not name.startswith(("model.embed", "model.layers.0.")))
    engine = zero3d.Engine(made, stage=1, mesh=zero3d.Mesh(dp=1, pp=shape), optimizer=adamw, loss=sum_of_losses)
    if source is not None:
        engine.load(source)
    train(engine, range(2))
    return str(engine.save(folder))


def test_a_pipeline_stage_that_trains_nothing_saves_what_one_rank_does(ranks, tmp_path):
    alone = ranks(1, frozen_first_half, 1, None, str(tmp_path / "a"))[0]
    piped = ranks(2, frozen_first_half, 2, None, str(tmp_path / "b"))[0]
    assert states(Path(alone)) == states(Path(piped))
    optimizer = [json.loads((Path(folder) / "manifest.json").read_text())["optimizer"] for folder in (alone, piped)]
    assert optimizer[0] == optimizer[1]
    assert optimizer[0]["scalars"] == {"step": 2.0}  # the first rank has none of its own
    ahead = ranks(2, frozen_first_half, 2, alone, str(tmp_path / "c"))[0]
    back = ranks(1, frozen_first_half, 1, piped, str(tmp_path / "d"))[0]
    assert states(Path(ahead)) == states(Path(back))
