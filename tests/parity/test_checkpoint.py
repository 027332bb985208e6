"""Contract 5: resume bit for bit on the same shape, equal states on any other; damage is refused."""

import errno
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from damage import as_retired, edit, edit_part, joined, seal
from models import Net, adamw, batch, bits, build, loss_of
from pipelines import covering
from safetensors import safe_open

import zero3d
from zero3d.checkpoint import save as checkpoint
from zero3d.checkpoint.folders import tidy
from zero3d.checkpoint.integrity import find_damage


class Drawing(Net):
    """Draws noise from Python's `random` and from numpy, and skips blocks, as models with stochastic depth do."""

    def forward(self, ids):
        x = self.embed(ids) * (1 + 0.1 * random.gauss(0, 1))
        for layer in self.layers:
            x = x + (layer(x) - x) * float(numpy.random.rand() < 0.7)
        return self.head(self.norm(x + 0.1 * float(numpy.random.standard_normal())))


def make(stage, model="net", precision="bf16", **options):
    torch.manual_seed(7) if model == "drawing" else None
    made = Drawing() if model == "drawing" else build(model, **({"dropout": 0.2} if model in ("net", "tied") else {}))
    return zero3d.Engine(
        made,
        stage=stage,
        precision=precision,
        clip_norm=0.5,
        optimizer=adamw,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        param_groups=[{"match": "*norm*|*.bias", "weight_decay": 0.0}],
        **options,
    )


def train(engine, steps):
    out = []
    for step in steps:
        loss = loss_of(engine, batch(step, dist.get_rank()))
        engine.backward(loss)
        result = engine.step()
        out.append((float(loss.detach()), float(result.grad_norm), float(result.loss_scale), float(result.lr)))
    return out


def whole_states(folder):
    manifest = joined(folder)
    whole = {}
    for row in manifest["tensors"]:
        shape = manifest["parameters"][row["name"]]["shape"]
        key = row["name"], row["state"]
        with safe_open(folder / row["file"], framework="pt") as file:
            values = file.get_tensor(row["key"])
        target = whole.setdefault(key, torch.full(shape, float("nan"), dtype=values.dtype))
        target[tuple(slice(a, b) for a, b in row["box"])] = values
    assert not any(value.isnan().any() for value in whole.values())
    return {key: bits([value]) for key, value in sorted(whole.items())}


def seeded(rank):
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    numpy.random.seed(100 + rank)


def interrupted_and_not(stage, model, precision, folder):
    half = 3 if precision == "fp16" else 2  # in fp16 the first scale may overflow
    seeded(dist.get_rank())
    straight = make(stage, model, precision)
    curve = train(straight, range(2 * half))
    applied = sum(math.isfinite(norm) for _, norm, *_ in curve)
    with straight.full_params():
        weights = bits(straight.module.parameters())
    seeded(dist.get_rank())
    first = make(stage, model, precision)
    train(first, range(half))
    saved = first.save(folder)
    second = make(stage, model, precision)
    seeded(0)
    second.load(saved.parent)
    actual = train(second, range(half, 2 * half))
    with second.full_params():
        return (
            actual == curve[half:],
            weights == bits(second.module.parameters()),
            second.steps == straight.steps == applied,
        )


@pytest.mark.parametrize(("world", "stage", "model", "precision"), [
    (2, 3, "tied", "fp16"), (2, 2, "drawing", "fp32"),
    *(pytest.param(*case, marks=pytest.mark.long)
      for case in [(2, 0, "net", "bf16"), (4, 2, "qwen3", "fp32"), (1, 3, "net", "bf16"), (4, 1, "net", "fp16")]),
])  # fmt: skip
def test_resume_on_the_same_shape_is_bitwise_dropout_and_loss_scale_included(
    ranks, tmp_path, world, stage, model, precision
):
    for answer in ranks(world, interrupted_and_not, stage, model, precision, str(tmp_path / "ck")):
        assert answer == (True, True, True)


def save_at(stage, model, folder):
    seeded(dist.get_rank())
    engine = make(stage, model)
    for step in range(2):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
    engine.module.eval()
    with torch.no_grad():
        loss = float(loss_of(engine, batch(9)))
    return str(engine.save(folder)), loss


def load_at(stage, model, source, folder):
    engine = make(stage, model)
    engine.load(source)
    engine.module.eval()
    with torch.no_grad():
        loss = float(loss_of(engine, batch(9)))
    return str(engine.save(folder)), loss, engine.steps


SHAPES = [
    ((3, 3), (2, 1)),
    ((1, 0), (3, 2)),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in [
            ((3, 2), (4, 3)),
            ((4, 3), (2, 1)),
            ((2, 0), (4, 3)),
            ((4, 1), (1, 0)),
            ((4, 3), (3, 3)),
            ((1, 2), (4, 2)),
        ]
    ),
]


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_states_are_equal_on_another_dp_degree_and_stage(ranks, tmp_path, before, after):
    (world, stage), (new_world, new_stage) = before, after
    saved = ranks(world, save_at, stage, "tied", str(tmp_path / "a"))
    again = ranks(new_world, load_at, new_stage, "tied", saved[0][0], str(tmp_path / "b"))
    assert whole_states(Path(saved[0][0])) == whole_states(Path(again[0][0]))
    assert {loss for _, loss in saved} == {loss for _, loss, _ in again}
    assert again[0][2] == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "stage", "new_stage", "worlds"),
    covering((("net", "llama", "qwen3", "gpt2"), range(4), range(4), ((1, 4), (4, 2), (2, 1)))),
)
def test_states_are_equal_for_all_shapes(ranks, tmp_path, model, stage, new_stage, worlds):
    saved = ranks(worlds[0], save_at, stage, model, str(tmp_path / "a"))
    again = ranks(worlds[1], load_at, new_stage, model, saved[0][0], str(tmp_path / "b"))
    assert whole_states(Path(saved[0][0])) == whole_states(Path(again[0][0]))


def export_at(stage, model, folder):
    engine = zero3d.Engine(build(model), stage=stage, precision="bf16", optimizer=adamw)
    for step in range(2):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
    engine.module.eval()
    with torch.no_grad():
        loss = float(loss_of(engine, batch(9)))
    return str(engine.export(folder)), loss


@pytest.mark.parametrize(
    ("model", "world", "stage"),
    [("qwen3", 2, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in (("llama", 2, 3), ("gpt2", 4, 3)))],
)
def test_the_export_loads_with_from_pretrained_and_gives_the_same_loss(ranks, tmp_path, model, world, stage):
    from transformers import AutoModelForCausalLM

    results = ranks(world, export_at, stage, model, str(tmp_path / "hf"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    with torch.no_grad():
        assert float(loss_of(loaded.eval(), batch(9))) == results[0][1]
    again = ranks(world, export_at, stage, model, str(tmp_path / "hf"), check=False)
    assert all("not empty" in error for _, error in again)


def test_large_exports_are_split_into_indexed_files(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    import zero3d.checkpoint.export

    monkeypatch.setattr(zero3d.checkpoint.export, "FILE_BYTES", 10_000)
    engine = zero3d.Engine(build("llama"), stage=3, precision="fp32")
    engine.export(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with engine.full_params():
        local = dict(engine.module.named_parameters())
        assert all(torch.equal(p, local[name]) for name, p in loaded.named_parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_an_export_says_of_itself_what_transformers_would(tmp_path, monkeypatch, name):
    """Every key of config.json and generation_config.json, dtype and settings of the user's among them; total_size."""
    import zero3d.checkpoint.export

    model = build(name)
    model.generation_config.max_new_tokens = 9
    build(name).to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    model.generation_config.save_pretrained(tmp_path / "theirs")
    monkeypatch.setattr(zero3d.checkpoint.export, "FILE_BYTES", 20_000)
    zero3d.Engine(model, stage=3, precision="bf16").export(tmp_path / "ours")

    def read(folder, file):
        return json.loads((tmp_path / folder / file).read_text())

    for file in ("config.json", "generation_config.json"):
        assert read("ours", file) == read("theirs", file)
    assert read("ours", "config.json")["dtype"] == "bfloat16"
    assert read("ours", "generation_config.json")["max_new_tokens"] == 9
    index, expected = (read(folder, "model.safetensors.index.json") for folder in ("ours", "theirs"))
    assert index["metadata"]["total_size"] == expected["metadata"]["total_size"] > 20_000
    assert index["weight_map"].keys() == expected["weight_map"].keys()


def test_generation_settings_that_transformers_refuses_to_save_do_not_cost_the_export(tmp_path):
    model = build("llama")
    model.generation_config.temperature = 0.5  # without do_sample, as in published folders
    folder = zero3d.Engine(model, stage=3, precision="fp32").export(tmp_path / "hf")
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5


# --- refusals (one process) -----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    engine = make(2)
    train(engine, range(2))
    return engine.save(tmp_path / "ck")


def refused(engine, source, *words):
    with engine.full_params():
        before = bits(engine.module.parameters())
    with pytest.raises(zero3d.CheckpointError) as caught:
        engine.load(source)
    with engine.full_params():
        assert bits(engine.module.parameters()) == before
    for word in words:
        assert word in str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(saved):
    wide = zero3d.Engine(build("net", width=32), stage=2, optimizer=adamw)
    refused(wide, saved, "another model", "embed.weight: checkpoint (61, 24), model (61, 32)")
    deep = zero3d.Engine(build("net", layers=4), stage=2, optimizer=adamw)
    refused(deep, saved, "layers.3.norm.weight is only in the model")


def test_other_frozen_parameters_and_optimizers_are_refused(saved):
    model = build("net")
    model.embed.weight.requires_grad_(False)
    refused(zero3d.Engine(model, stage=2, optimizer=adamw), saved, "frozen in one run", "embed.weight")
    sgd = zero3d.Engine(build("net"), stage=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0))
    refused(sgd, saved, "AdamW", "SGD")


def test_damaged_missing_and_foreign_files_are_refused(saved, tmp_path):
    engine = make(3)
    refused(engine, tmp_path / "nothing", "no checkpoint in")
    file = saved / "rank-00000.safetensors"
    good = file.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    file.write_bytes(bad)
    refused(engine, saved, "rank-00000.safetensors", "damaged")
    file.unlink()
    refused(engine, saved, "rank-00000.safetensors", "missing")
    file.write_bytes(good)
    part = saved / "rank-00000.json"
    text = part.read_text()
    part.write_text(text.replace("master", "Master"))
    refused(engine, saved, "rank-00000.json differs from what was saved: its SHA-256 is not the manifest's")
    part.unlink()
    refused(engine, saved, "rank-00000.json is missing")
    part.symlink_to(file)
    refused(engine, saved, "rank-00000.json is a link")
    part.unlink()
    part.write_text(text)
    edit_part(saved, part.name, lambda p: p.update(file="../rank-00000.safetensors"))
    refused(
        engine, saved, "rank-00000.json: file is '../rank-00000.safetensors', but should be 'rank-00000.safetensors'"
    )
    edit_part(saved, part.name, lambda p: p.update(file=file.name))
    manifest = saved / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace("rank-00000.json", "../rank-00000.json"))
    refused(engine, saved, "manifest.json or manifest.sha256 differs from what was saved")
    seal(saved)
    refused(engine, saved, "parts should be rank-00000.json")
    manifest.write_text(text[: len(text) // 2])
    seal(saved)
    refused(engine, saved, "is not JSON")
    manifest.write_text(text)
    (saved / "manifest.sha256").unlink()
    refused(engine, saved, "manifest.sha256 is missing")
    seal(saved)
    engine.load(saved)


def test_every_bit_of_the_checksum_counts(saved):
    engine, path = make(3), saved / "manifest.sha256"
    good = path.read_bytes()
    for place in range(0, 8 * len(good), 7):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(zero3d.CheckpointError, match=r"manifest\.sha256"):
            engine.load(saved)


def test_a_row_that_is_missing_is_named(saved):
    edit_part(
        saved,
        "rank-00000.json",
        lambda p: p["tensors"].remove(next(r for r in p["tensors"] if r["name"] == "layers.1.up.weight")),
    )
    refused(make(3), saved, "manifest.json", "nothing at (0:48, 0:24) of", "'layers.1.up.weight'")


def test_the_manifest_and_its_parts_must_say_the_same_even_where_no_model_is_at_hand(saved):
    assert find_damage(saved) is None
    edit(saved, lambda m: m["parameters"].update(more={"shape": [0], "trainable": False, "dtype": "float32"}))
    assert "manifest.json: parameters describe 'more' differently than the ranks' parts" in str(find_damage(saved))
    edit(saved, lambda m: (m["parameters"].pop("more"), m["optimizer"]["scalars"].update(step=1.0)))
    assert "manifest.json: optimizer.scalars is a mapping of 1" in str(find_damage(saved))


def test_a_newer_format_says_what_to_do(saved):
    edit(saved, lambda m: m.update(format=6))
    refused(make(3), saved, "format 6", "reads formats 4 and 5", "upgrade zero3d")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_retired_format_says_who_reads_it_and_what_to_do(saved, number):
    as_retired(saved, number)
    refused(make(3), saved, f"{saved} has format {number}, and this zero3d reads formats 4 and 5", "git checkout ")


def test_a_scheduler_that_does_not_take_its_state_leaves_the_engine_as_it_was(saved):
    engine = make(2)
    train(engine, range(1))
    before, rates = engine.fingerprint(), engine.scheduler.state_dict()
    count = iter(range(9))

    class Picky(type(engine.scheduler)):
        def load_state_dict(self, state):
            self.T_max = -1
            if next(count) == 0:
                raise KeyError("wanted")
            super().load_state_dict(state)

    engine.scheduler.__class__ = Picky
    refused(engine, saved, "scheduler is not taken by Picky (KeyError: \"'wanted'\")")
    assert (engine.fingerprint(), engine.scheduler.state_dict()) == (before, rates)


def flipped_in_rank_1(folder, file, place):
    seeded(dist.get_rank())
    engine = make(3, "net")
    train(engine, range(1))
    saved = engine.save(folder)
    before = engine.fingerprint()
    dist.barrier()
    if dist.get_rank() == 0:
        path = saved / file
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 16
        path.write_bytes(content)
    dist.barrier()
    try:
        engine.load(saved)
    except zero3d.CheckpointError as error:
        return str(error), engine.fingerprint() == before, str(saved)
    return "", False, str(saved)


@pytest.mark.parametrize(("file", "place"), [
    ("rank-00001.safetensors", 0.5), ("rank-00001.safetensors", 1.0), ("rank-00001.json", 0.5),
])  # fmt: skip
def test_a_flipped_byte_in_rank_1s_file_alone_is_found_by_all(ranks, tmp_path, file, place):
    answers = ranks(2, flipped_in_rank_1, str(tmp_path), file, place)
    for message, unchanged, _ in answers:
        assert f"{file} differs from what was saved" in message
        assert unchanged
    refused(make(3), Path(answers[0][2]), file)  # one rank alone reads what two wrote


def test_a_folder_of_other_things_is_not_written_into(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    engine = make(3)
    with pytest.raises(zero3d.CheckpointError, match=r"thesis\.tex"):
        engine.save(tmp_path)
    with pytest.raises(zero3d.CheckpointError, match="not empty"):
        engine.export(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_save_that_dies_leaves_the_last_one_whole(saved, monkeypatch):
    engine = make(2)
    engine.load(saved)
    train(engine, range(2, 4))

    def dies(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "_complete", dies)
    with pytest.raises(zero3d.CheckpointError, match="No space left"):
        engine.save(saved.parent)
    monkeypatch.undo()
    fresh = make(2)
    fresh.load(saved.parent)
    assert fresh.steps == 2
    assert engine.save(saved.parent).name == "step-4"
    assert sorted(p.name for p in saved.parent.iterdir()) == ["step-2", "step-4"]


def test_the_disk_has_all_of_a_checkpoint_before_it_has_its_name(saved, monkeypatch):
    engine, synced, named = make(2), set(), []
    sync, rename = os.fsync, os.rename

    def noted_sync(handle):
        sync(handle)
        synced.add((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    def noted_rename(source, target):
        named.append({(each.stat().st_ino, each.stat().st_size) for each in (Path(source), *Path(source).iterdir())})
        assert named[-1] <= synced, "all files, as long as they are now, and the folder that lists them"
        rename(source, target)

    engine.load(saved)
    train(engine, range(2, 3))
    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    folder = engine.save(saved.parent)
    assert [len(each) for each in named] == [5]
    assert (folder.parent.stat().st_ino, folder.parent.stat().st_size) in synced


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_a_disk_that_does_not_take_a_file_in_the_end_is_told_with_its_name(saved, monkeypatch, name):
    engine, sync = make(2), os.fsync
    engine.load(saved)
    train(engine, range(2, 3))

    def full(handle):
        if os.readlink(f"/proc/self/fd/{handle}").endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        zero3d.CheckpointError,
        match=rf"cannot write .*step-3\.tmp/{name} \(No space.*; it takes [\d,]+ bytes, and [\d,]+ are free\): make room",
    ):
        engine.save(saved.parent)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_saving_twice_at_one_step_keeps_the_newer(saved):
    engine = make(2)
    engine.load(saved)
    with engine.full_params(), torch.no_grad():
        engine.module.head.weight.fill_(0.125)
    engine.save(saved.parent)
    fresh = make(2)
    fresh.load(saved.parent)
    with fresh.full_params():
        assert (fresh.module.head.weight == 0.125).all()
    assert [p.name for p in saved.parent.iterdir()] == ["step-2"]


def test_no_pickle_is_read(saved, monkeypatch):
    import _pickle

    read = []

    def noted(name, original):
        def note(*given, **options):
            read.append(name)
            return original(*given, **options)

        return note

    engine, content = make(2), pickle.dumps([1])
    for module in (pickle, _pickle):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    monkeypatch.setattr(torch, "load", noted("torch.load", torch.load))
    engine.load(saved)
    assert engine.steps == 2
    assert read == []
    assert pickle.loads(content) == [1]
    assert read == ["loads"], "the test would have seen one"


# --- a process that dies --------------------------------------------------------------------------


def save_and_die(folder, at, events):
    """Save anew in `folder`, and die before the operation number `at` on what belongs to step-2; its name stays there."""
    engine = make(2)
    engine.load(folder)
    with engine.full_params(), torch.no_grad():
        engine.module.head.weight.fill_(0.125)
    seen = 0

    def note(event, given):
        nonlocal seen
        if event in events and "step-2" in str(given[0]):
            seen += 1
            if seen == at:
                (folder.parent / f"event-{at}").write_text(event)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    engine.save(folder)


def die_at(folder, places, events):
    """What processes that save died before, one after the other until one lives."""
    died = []
    for at in places:
        child = os.fork()
        if not child:
            try:
                save_and_die(folder / str(at), at, events)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return died
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        died.append((folder / f"event-{at}").read_text())
    raise AssertionError("every save died")


RENAMES = ("os.rename", "shutil.rmtree")
OTHERS = ("os.mkdir", "os.remove", "open")


@pytest.mark.parametrize(("events", "places"), [
    (RENAMES, range(1, 9)), pytest.param(RENAMES + OTHERS, range(1, 40), marks=pytest.mark.long),
], ids=["renames", "all"])  # fmt: skip
def test_a_kill_at_any_file_operation_of_a_save_leaves_one_whole_checkpoint(alone, tmp_path, events, places):
    """Saved anew at the same step, so that there are two renames; a kill comes before each operation in turn."""
    engine = make(2)
    train(engine, range(2))
    old = engine.fingerprint()
    engine.save(tmp_path / "first")
    for at in places:
        shutil.copytree(tmp_path / "first", tmp_path / str(at))
    events = alone(die_at, tmp_path, places, events)
    assert events.count("os.rename") == 2
    second = len(events) - events[::-1].index("os.rename")  # a kill there is one in the gap between the two
    for at in range(1, len(events) + 1):
        directory = tmp_path / str(at)
        assert (directory / "step-2").exists() == (at != second)
        assert (directory / ".step-2.old").exists() == (at >= second)
        engine.load(directory)
        assert (engine.fingerprint() == old) == (at <= second), "the old one until the new one stands"
        tidy(directory)
        assert [path.name for path in directory.iterdir()] == ["step-2"]
        engine.load(directory)
        assert (engine.fingerprint() == old) == (at <= second)


def test_a_checkpoint_of_an_adam_with_amsgrad_that_has_no_moments_yet_loads(tmp_path):
    def amsgrad():
        return zero3d.Engine(
            build("net"), stage=2, precision="fp32", optimizer=lambda params: torch.optim.AdamW(params, amsgrad=True)
        )

    saved = amsgrad().save(tmp_path)
    engine = amsgrad()
    engine.load(saved)
    assert engine.steps == 0


def test_a_link_to_a_best_checkpoint_that_is_gone_is_no_obstacle(tmp_path):
    (tmp_path / "best").symlink_to("step-3")
    assert make(2).save(tmp_path).name == "step-0"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("of somebody else")
    with pytest.raises(zero3d.CheckpointError, match="holds no checkpoints"):
        make(2).save(tmp_path / "other")


def test_a_buffer_that_is_no_number_is_not_exported(tmp_path):
    model = build("net")
    model.register_buffer("running", torch.tensor([1.0, float("nan")]))
    engine = zero3d.Engine(model, stage=2)
    with pytest.raises(zero3d.Zero3dError, match="buffer running"):
        engine.export(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
