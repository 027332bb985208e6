"""A run's own sequences in a plan: how long they are, by what a step is priced, and what stays as it was."""

import json
from dataclasses import replace
from functools import lru_cache
from itertools import product
from statistics import mean

import pytest
from corpora import opened, write_lines
from pictures import save_data, save_processor

from zero3d.config import load
from zero3d.tools.cli.main import main
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.lengths import Lengths, at_length, with_lengths
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import Operations, ParallelPlan, Part
from zero3d.tools.sim import file_lengths, model_spec
from zero3d.tools.sim.file_lengths import lengths_of

KNOWN = lru_cache(model_spec.open_spec)
PLACE = cluster("a6000", 4)
FOUND = Lengths((100, 200, 300, 600), 2048)


@pytest.fixture
def data(tmp_path):
    """Records of 4 to 97 bytes and their end, and completions; the configuration of a run on them."""
    write_lines(tmp_path / "a.jsonl", [{"text": "x" * n} for n in range(4, 98)])
    write_lines(tmp_path / "b.jsonl", [{"prompt": "y" * n, "completion": "z" * 9} for n in range(60)])
    run = {
        "model": {"path": "demo"}, "train": {"batch": 8, "micro_batch": 4, "steps": 10}, "mesh": {"dp": 2},
        "data": {"train": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "tokenizer": "bytes", "length": 64, "packing": False},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    return tmp_path / "run.yaml"


def test_a_micro_batch_is_padded_to_the_mean_of_its_longest():
    for size in (1, 2, 3):
        longest = mean(max(drawn) for drawn in product(FOUND.tokens, repeat=size))
        assert FOUND.padded(size) == pytest.approx(longest)
    assert FOUND._replace(grouped=True).padded(3) == FOUND.mean == 300
    assert Lengths(tuple(range(1, 1001)), 2048).high == 991


def test_a_step_is_priced_by_what_is_padded_and_memory_by_the_longest():
    model, plan = gpt(8, 1024, 16, 50304, 2048), ParallelPlan(dp=4, stage=2, micro_batch=2, accumulate=8)
    whole, real = evaluate(model, PLACE, plan), with_lengths(evaluate, FOUND)(model, PLACE, plan)
    assert real.memory == whole.memory
    padded = round(FOUND.padded(2))
    shorter = evaluate(gpt(8, 1024, 16, 50304, padded), PLACE, plan)  # with fewer positions to update
    assert real.seconds.mid == pytest.approx(shorter.seconds.mid, rel=0.01)
    assert real.seconds.parts["attention"] == pytest.approx(shorter.seconds.parts["attention"])
    assert real.tokens == 4 * 8 * 2 * FOUND.mean
    assert real.flops == pytest.approx(evaluate(at_length(model, padded), PLACE, plan).flops * FOUND.mean / padded)
    long = FOUND._replace(tokens=(100, *[2048] * 99))  # two of 100, of which one is short in one pair of 10,000
    padded = with_lengths(evaluate, long)(model, PLACE, plan)
    assert padded.seconds == whole.seconds
    assert padded.tokens == round(4 * 8 * 2 * long.mean) < whole.tokens
    assert padded.flops == pytest.approx(whole.flops * long.mean / 2048)
    parted = with_lengths(evaluate, FOUND._replace(tokens=(301,)))(model, PLACE, plan.replace(dp=1, tp=4))
    assert parted.seconds == evaluate(at_length(model, 304), PLACE, plan.replace(dp=1, tp=4)).seconds


def test_of_attention_that_keeps_its_scores_shorter_sequences_keep_fewer():
    long, short = (gpt(2, 256, 4, 1000, length, flash=False) for length in (1024, 256))
    for a, b in zip(at_length(long, 256).parts, short.parts, strict=True):
        for name in ("matrices", "scores", "kept_cut", "attention"):
            assert getattr(a.operations, name) == pytest.approx(getattr(b.operations, name)), name


def test_a_tower_works_on_a_sequence_however_long_that_is():
    model = gpt(2, 64, 4, 100, 1024)
    tower = Part("tower", (), Operations(8.0, 4.0, 2.0, passed=(6.0, 9.0), back=0.5, launches=(7.0, 7.0)))
    short = at_length(replace(model, parts=(model.parts[0], tower, *model.parts[1:])), 256).parts[1].operations
    assert 256 * short.matrices == 1024 * tower.operations.matrices
    assert short.passed == (4 * 6.0, 4 * 9.0)
    assert (short.back, short.launches) == (0.5, (7.0, 7.0))


def test_sampled_lengths_are_those_of_the_runs_own_sequences(data, tmp_path):
    config = load(data)
    found, why = lengths_of(config)
    trained = opened(tmp_path, *config.data.train, length=64, packing=False).train.lengths
    assert (why, found.limit) == ("", 64)
    assert list(found.tokens) == sorted(trained)
    assert lengths_of(load(data, ["data.packing=true"])) == (None, "")
    assert lengths_of(load(data, ["data.train=FILL-ME"])) == (None, "")
    assert lengths_of(load(data, ["data.group_by_length=true"]))[0].grouped
    none, why = lengths_of(load(data, ["data.train=c.jsonl"]))
    assert none is None
    assert "c.jsonl does not exist" in why


def test_of_many_records_a_sample_is_looked_at(data, monkeypatch):
    monkeypatch.setattr(file_lengths, "SAMPLE", 40)
    found, _ = lengths_of(load(data, ["data.length=256"]))
    again, _ = lengths_of(load(data, ["data.length=256"]))
    assert len(found.tokens) == 40
    assert found == again
    assert found.tokens[-1] > 60


def test_images_count_by_the_tokens_that_their_processor_makes_of_them(tmp_path):
    folder = tmp_path / "model"
    save_processor(folder, "llava")
    (folder / "config.json").write_text('{"model_type": "llava"}')
    file, images = save_data(tmp_path, pictured=6, plain=3)
    words = [
        f"model.path={folder}",
        f"data.train={file}",
        f"data.images={images}",
        "data.length=64",
        "data.packing=false",
    ]
    found, why = lengths_of(load(None, words))
    assert why == ""
    assert len(found.tokens) == 9
    texts, pictured = found.tokens[:3], found.tokens[3:]
    assert max(texts) < min(pictured)
    none, why = lengths_of(load(None, ["model.path=demo", "data.tokenizer=bytes", *words[1:]]))
    assert none is None
    assert "the data have images, and demo is no folder with a processor" in why


def test_a_file_is_planned_and_explained_by_its_own_data(data, capsys, monkeypatch):
    monkeypatch.setattr(model_spec, "open_spec", KNOWN)
    words = ["--gpus", "2", "--gpu", "a6000"]
    for verb in (["plan", "explain", str(data)], ["plan", str(data)]):
        assert main([*verb, *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["lengths"]["records"] == 187
        row = told.get("recommended", told)
        assert row["tokens"] == round(8 * told["lengths"]["mean"])
        assert told["cost"]["training"]["tokens"] == pytest.approx(10 * row["tokens"], abs=5)
    assert main(["plan", "explain", str(data), *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "187 records of its data: " in text
    assert "a step is priced by these, memory by 64" in text
    (data.parent / "a.jsonl").unlink()
    assert main(["plan", "explain", str(data), *words]) == 0
    assert "all sequences are priced as of the full length: its data could not be read" in " ".join(
        capsys.readouterr().out.split()
    )
