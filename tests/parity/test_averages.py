"""Averages of weights (ema): a plain loop's bits on one rank, the same at every stage and after every resume, to the byte."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from buckets import buckets_of
from meshes import engine_of, mesh_of, model_of, step, world_of
from models import adamw, batch, bits, build, clone, loss_of, train_engine, train_plain
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from training import metrics, run_in, save_model, save_rows, train, tree
from transformers import AutoModelForCausalLM

import zero3d
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.errors import CheckpointError, ConfigError
from zero3d.tools.cli.main import main

BATCHES = [batch(step) for step in range(4)]
DECAY = 0.75


class Averaging:
    """Plain AdamW, and after each of its steps average += (1 - decay) x (weight - average) in the loop everyone writes."""

    def __init__(self, params):
        self.params = list(params)
        self.averages = [p.detach().clone() for p in self.params]
        self.adamw = adamw(self.params)

    def step(self):
        self.adamw.step()
        with torch.no_grad():
            for average, p in zip(self.averages, self.params, strict=True):
                average += (p - average) * (1 - DECAY)

    def zero_grad(self):
        self.adamw.zero_grad()


def averages_of(engine):
    with engine.averaged(), engine.full_params():
        return bits(engine.module.parameters())


@pytest.mark.parametrize(("model", "stage"), [("net", 3), ("tied", 0), ("llama", 2)])
def test_averages_are_those_of_a_plain_loop_and_training_does_not_notice(model, stage):
    plain, loops = build(model), []
    engine = zero3d.Engine(clone(plain), stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw, ema=DECAY)
    assert averages_of(engine) == bits(plain.parameters()), "they begin with the weights"
    losses, norms = train_plain(
        plain, [[ids] for ids in BATCHES], clip=0.5, make=lambda params: loops.append(Averaging(params)) or loops[0]
    )
    assert train_engine(engine, BATCHES) == (losses, norms, bits(plain.parameters()))
    assert averages_of(engine) == bits(loops[0].averages) != bits(plain.parameters())
    with engine.full_params():
        assert bits(engine.module.parameters()) == bits(plain.parameters()), "weights have their own bits again"


# --- two ranks --------------------------------------------------------------------------------------


def steps(engine, numbers, shows=False):
    for number in numbers:
        engine.backward(loss_of(engine, batch(number, engine.dp.rank)))
        engine.step()
        if shows:
            averages_of(engine)


def trained(stage, master, shows, ema=DECAY):
    """States, averages and weights after three steps of bf16, and what the arena says of them."""
    with buckets_of(1024):
        engine = zero3d.Engine(build("net", width=40), stage=stage, optimizer=adamw, master=master, ema=ema)
        steps(engine, range(3), shows)
        averages = None if ema is None else averages_of(engine)
    with engine.full_params():
        weights = bits(engine.module.parameters())
    planned = {e.category: (e.planned, e.measured) for e in engine.memory if e.planned is not None}
    return (engine.fingerprint(), averages, weights), planned


def all_of(cases):
    return [trained(*case) for case in cases]


@pytest.mark.long
@pytest.mark.parametrize("cases", [
    [(0, "fp32", False), (1, "split", True), (3, "fp32", True)],
    pytest.param([(2, "fp32", True), (3, "split", False), (3, "fp32", True)], marks=pytest.mark.long),
], ids=["0, 1, 3", "2, 3"])  # fmt: skip
def test_stages_and_ways_to_store_masters_give_the_same_averages_and_planned_bytes(ranks, cases):
    both = ranks(2, all_of, [*cases, (3, "fp32", False, None)])
    bytes_of_first = [planned["optimizer"][0] for _, planned in both[0]]
    assert bytes_of_first[-2] * 12 == bytes_of_first[-1] * 16, "4 bytes a parameter beside 12"
    for found in both:
        *averaged, without = found
        assert len({states for states, _ in averaged}) == 1
        (fingerprint, _, weights), _ = averaged[-1]
        assert weights == without[0][2], "training is the same"
        assert fingerprint != without[0][0]
        for _, bytes_ in found:
            assert all(planned == measured for planned, measured in bytes_.values())


def sum_of(output, ids):
    """The sum of losses and the number of targets of a micro-batch."""
    return cross_entropy(output[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"), ids[
        :, 1:
    ].numel()


def leg(folder, stage, first, last, ema=DECAY):
    """Go on from the newest checkpoint, if there is one, up to step `last`, and save."""
    mesh = zero3d.Mesh()
    engine = zero3d.Engine(
        build("net", width=40), mesh=mesh, stage=stage, optimizer=adamw, exact=True, accumulate=2 // mesh.dp, ema=ema,
        loss=sum_of,
    )  # fmt: skip
    loaded = ""
    if first:
        engine.load(folder)
        loaded = engine.fingerprint()
    for number in range(first, last):
        engine.train_batch([batch(number, row) for row in range(mesh.rank, 2, mesh.dp)])
    saved = engine.fingerprint()
    engine.save(folder)
    return loaded, saved, engine.resumed


@pytest.mark.long
def test_averages_go_on_exactly_on_any_shape(ranks, tmp_path):
    whole = ranks(1, leg, str(tmp_path / "whole"), 0, 0, 3)[0]
    folder = str(tmp_path / "parted")
    first = ranks(2, leg, folder, 3, 0, 1)[0]
    second = ranks(1, leg, folder, 1, 1, 2)[0]
    third = ranks(2, leg, folder, 2, 2, 3)[0]
    assert (second[0], third[0], third[1]) == (first[1], second[1], whole[1])
    assert third[2].startswith("bitwise")
    assert "ema" not in third[2]


def test_a_resume_is_told_where_averages_begin_end_or_change(ranks, tmp_path):
    folder = str(tmp_path)
    assert ranks(1, leg, folder, 3, 0, 1, None)[0][2] == ""
    begins = ranks(1, leg, folder, 3, 1, 2, DECAY)[0]
    assert begins[2].startswith("bitwise")
    assert begins[2].endswith("averages of weights (ema) begin with the weights of this step: the checkpoint has none")
    assert ranks(1, leg, folder, 3, 2, 3, 0.5)[0][2].endswith("; ema 0.75 -> 0.5 from here on")
    assert ranks(1, leg, folder, 3, 3, 4, None)[0][2].endswith("; its averages of weights (ema) are left out")
    with pytest.raises(CheckpointError, match=r"it was saved without train\.ema\. Leave --ema out\."):
        StoredStates(tmp_path, averages=True)


def on_mesh(folder, shape, saved=None, family="llama", stage=1):
    """Three steps on a mesh, or those of `saved`, loaded: export averages into `folder`; return what memory says."""
    engine = engine_of(
        model_of(family, (1, 2, 2)), mesh_of(shape), precision="bf16", stage=stage, optimizer=adamw, ema=DECAY
    )
    if saved is None:
        for number in range(3):
            step(engine, number, count=4)
        engine.save(Path(folder) / "saved")
    else:
        engine.load(saved)
    with engine.averaged():
        engine.export(Path(folder) / "averages")
    engine.export(Path(folder) / "weights")
    return [(entry.category, entry.planned, entry.measured) for entry in engine.memory if entry.planned is not None]


def exported(folder, name):
    files = (Path(folder) / name).glob("*.safetensors")  # of each pipeline stage
    return {key: bits([tensor]) for file in files for key, tensor in load_file(file).items()}


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2), (2, 1, 2)])  # dp, tp, pp
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # which is tied
def test_averages_of_a_mesh_are_saved_and_loaded_on_one_rank(ranks, tmp_path, shape, family):
    there, here = str(tmp_path / "there"), str(tmp_path / "here")
    for found in ranks(world_of(shape), on_mesh, there, shape, None, family):
        assert all(planned == measured for _, planned, measured in found)
    ranks(1, on_mesh, here, (1, 1, 1), str(tmp_path / "there" / "saved"), family, 3)
    for name in ("weights", "averages"):
        assert exported(there, name) == exported(here, name)
    assert exported(there, "weights") != exported(there, "averages")


@pytest.mark.long
def test_adapters_are_averaged_and_exported_so(ranks, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    held_out = save_rows(tmp_path / "held_out.npy", rows=4, seed=1)
    made = tree(
        tmp_path, lora={"rank": 2}, data={"validation": [str(held_out)]}, optimizer={"lr": 1e-2},
        train={"steps": 3, "batch": 4, "ema": DECAY}, checkpoint={"export": True},
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(made))
    told = ranks(2, run_in, str(tmp_path), ["run.yaml"])[0]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = PeftModel.from_pretrained(base, Path(made["output"]) / "adapter")
    ids = torch.from_numpy(numpy.load(held_out))
    with torch.no_grad():
        loss = float(adapted(input_ids=ids, labels=ids).loss)
    assert loss == pytest.approx(told["averaged_loss"], rel=1e-6)
    assert abs(loss - told["held_out_loss"]) > 1e-5


@pytest.mark.long
def test_saves_behind_training_have_the_averages_of_their_step(ranks, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    save_rows(tmp_path / "held_out.npy", rows=4, seed=1)
    for output, behind in (("waits", False), ("behind", True)):
        made = tree(
            tmp_path, output, data={"validation": [str(tmp_path / "held_out.npy")]}, evaluate={"every": 1},
            train={"steps": 4, "batch": 4, "ema": DECAY},
            checkpoint={"every": 1, "keep": 9, "asynchronous": behind, "export": False},
        )  # fmt: skip
        (tmp_path / "run.yaml").write_text(json.dumps(made))
        told = ranks(2, run_in, str(tmp_path), ["run.yaml"])[0]
        assert [row for row in told["memory"] if row["agrees"] is False] == []
    for number in (1, 2, 3, 4):
        waits, behind = (
            {path.name: path.read_bytes() for path in (tmp_path / output / "checkpoints" / f"step-{number}").glob("*.safetensors")}
            for output in ("waits", "behind")
        )  # fmt: skip
        assert len(waits) == 2
        assert waits == behind


# --- refusals ---------------------------------------------------------------------------------------


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ema": 1.5}, "lies between 0 and 1: pass ema=0.999"),
        ({"ema": DECAY, "offload": {"optimizer": "host"}}, "states leave it: type offload.optimizer=none"),
        ({"ema": DECAY, "optimizer": momentum}, "and this is SGD: pass ema=None"),
    ],
)
def test_averages_that_cannot_be_kept_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        zero3d.Engine(build("net"), **{"optimizer": adamw, **options})


def test_what_belongs_outside_of_the_averages_is_refused_inside(tmp_path):
    engine = zero3d.Engine(build("net"), precision="fp32", optimizer=adamw, ema=DECAY)
    steps(engine, range(1))
    with engine.averaged():
        for call in (lambda: engine.save(tmp_path), lambda: engine.load(tmp_path), lambda: steps(engine, range(1)),
                     lambda: engine.averaged().__enter__()):  # fmt: skip
            with pytest.raises(ConfigError, match=r"inside averaged\(\)"):
                call()
        engine.gathers.drop(lambda token: True)
    with pytest.raises(ConfigError, match=r"build the engine with ema=0\.999"):
        zero3d.Engine(build("net"), optimizer=adamw).averaged().__enter__()


# --- a run ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_evaluates_averages_beside_weights_exports_them_and_goes_on_with_them(ranks, tmp_path, world):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    save_rows(tmp_path / "held_out.npy", rows=4, seed=1)
    sections = {
        "data": {"validation": [str(tmp_path / "held_out.npy")]}, "train": {"steps": 3, "batch": 4, "ema": DECAY},
        "optimizer": {"lr": 1e-2}, "evaluate": {"every": 2}, "checkpoint": {"export": True, "verify": True},
    }  # fmt: skip
    whole, parted = tree(tmp_path, "whole", **sections), tree(tmp_path, "parted", **sections)
    records = ranks(world, train, whole)[0]
    averaged = [record["ema_validation_loss"] for record in records if "ema_validation_loss" in record]
    assert len(averaged) == 2
    assert averaged[1] != records[2]["validation_loss"]
    ranks(world, train, parted, None, 1)
    (tmp_path / "run.yaml").write_text(json.dumps(parted))
    told = ranks(world, run_in, str(tmp_path), ["run.yaml"], "auto")[0]
    assert told["averaged_loss"] == averaged[1]
    assert told["reloaded_loss"] == pytest.approx(averaged[1], rel=1e-6), "what is exported are the averages"
    assert [record.get("ema_validation_loss") for record in metrics(parted)][1:] == averaged
    last = [(Path(made["output"]) / "hf" / "model.safetensors").read_bytes() for made in (whole, parted)]
    assert last[0] == last[1]
    for options, same in (["--ema"], True), ([], False):
        folder = tmp_path / f"hf{len(options)}"
        assert main(["ckpt", "export", str(Path(whole["output"]) / "checkpoints"), str(folder), *options]) == 0
        assert ((folder / "model.safetensors").read_bytes() == last[0]) == same
