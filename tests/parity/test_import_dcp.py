"""A checkpoint that FSDP2 writes with torch.distributed.checkpoint goes on here as it would have gone on there."""

import shutil

import pytest
import torch
import torch.distributed as dist
from models import adamw, batch, hf, loss_of
from training import save_rows, train as train_run, tree

import zero3d
from zero3d.tools.cli.main import main

STEPS, MORE = 3, 2


def steps_of_fsdp(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved_by_fsdp(folder):
    """Train with FSDP2, save after some steps in every form, each into a folder; the losses of those that follow."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = hf("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    steps_of_fsdp(model, optimizer, range(STEPS))
    weights, states = get_state_dict(model, optimizer)
    forms = {
        "nested": {"model": weights, "optim": states, "step": STEPS},
        "flat": {**weights, **states},  # as torchtitan: weights by their own names
        "apart/pytorch_model_fsdp_0": {"model": weights},  # as Accelerate
        "apart/optimizer_0": {"optimizer": states},
        "weights": {"model": weights},
    }
    for form, saved in forms.items():
        checkpoint.save(saved, checkpoint_id=folder / form)
    return steps_of_fsdp(model, optimizer, range(STEPS, STEPS + MORE))


@pytest.fixture(scope="module")
def fsdp(ranks, tmp_path_factory):
    """The folder with a checkpoint in every form, and on each rank the losses of the steps that follow."""
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, ranks(2, saved_by_fsdp, folder)


def gone_on(folder, stage):
    """Losses of the steps that follow, on ours."""
    model = hf("llama")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    engine = zero3d.Engine(model, stage=stage, precision="fp32", optimizer=adamw, clip_norm=1.0)
    engine.load(folder)
    assert engine.resumed.startswith("not bitwise: it was imported from torch.distributed.checkpoint")
    losses = []
    for step in range(engine.steps, engine.steps + MORE):
        loss = engine(**{"input_ids": batch(step, dist.get_rank()), "labels": batch(step, dist.get_rank())}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("form", "stage"), [
    ("nested", 3), *(pytest.param(*case, marks=pytest.mark.long) for case in (("flat", 1), ("apart", 2))),
])  # fmt: skip
def test_training_goes_on_from_what_fsdp_saved(ranks, fsdp, tmp_path, capsys, form, stage):
    folder, wanted = fsdp
    assert main(["ckpt", "import", str(folder / form), str(tmp_path / "ours")]) == 0
    assert "with Adam's moments" in capsys.readouterr().out
    for found, expected in zip(ranks(2, gone_on, tmp_path / "ours", stage), wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_weights_alone_begin_at_step_0(fsdp, tmp_path, capsys):
    assert main(["ckpt", "import", str(fsdp[0] / "weights"), str(tmp_path / "ours")]) == 0
    assert "without moments" in capsys.readouterr().out
    assert (tmp_path / "ours" / "step-0").is_dir()
    assert main(["ckpt", "export", str(tmp_path / "ours"), str(tmp_path / "hf"), "--config", "none"]) == 0


def test_a_folder_without_the_models_half_is_refused(fsdp, tmp_path, capsys):
    assert main(["ckpt", "import", str(fsdp[0] / "apart" / "optimizer_0"), str(tmp_path / "ours")]) == 2
    assert "copy the model's folder, too" in capsys.readouterr().err


def test_damaged_metadata_is_refused(fsdp, tmp_path, capsys):
    shutil.copytree(fsdp[0] / "nested", tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    path.write_bytes(path.read_bytes()[:200])
    assert main(["ckpt", "import", str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 2
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_of_a_file_goes_on_from_it(ranks, fsdp, tmp_path):
    """Three steps there, two here: the step's number goes on, the data begin anew."""
    assert main(["ckpt", "import", str(fsdp[0] / "nested"), str(tmp_path / "ours")]) == 0
    hf("llama").save_pretrained(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    made = tree(tmp_path)
    records = ranks(2, train_run, made, str(tmp_path / "ours" / "step-3"))[0]
    assert [record["step"] for record in records] == [4, 5]
    longer = tree(tmp_path, train={"steps": 6, "batch": 4, "accumulate": 2})
    assert [record["step"] for record in ranks(1, train_run, longer, "auto")[0]] == [4, 5, 6]
