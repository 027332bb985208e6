"""Linear layers in fp8 over two ranks: the same bits at every stage, and what a run says and writes."""

from functools import partial

import pytest
from fp8 import torchao
from models import batch
from tensors import tiny
from training import save_model, save_rows, told, tree

import zero3d


def trained(stages, **options):
    """Losses and fingerprint of three steps at each stage."""
    found = []
    with torchao():
        for stage in stages:
            engine = zero3d.Engine(tiny("llama"), stage=stage, precision="bf16", linear="fp8", **options)
            losses = []
            for step in range(3):
                ids = batch(step, size=4)[2 * engine.dp.rank :][:2] % 64
                losses.append(engine.train_batch([{"input_ids": ids, "labels": ids, "use_cache": False}]))
                engine.step()
            found.append(([float(loss) for loss in losses], engine.fingerprint()))
    return found


def test_two_ranks_have_the_same_bits_at_every_stage_and_with_states_off_the_device(ranks):
    found = ranks(2, trained, (0, 1, 2, 3))[0]
    (away,) = ranks(2, partial(trained, offload={"optimizer": "host", "params": "host"}), (3,))[0]
    assert all(each == found[0] for each in (*found, away))


def test_in_autocast_too(ranks):
    one, other = ranks(2, partial(trained, autocast=True), (1, 3))[0]
    assert one == other
    assert one[0][-1] < one[0][0]


def in_fp8(made):
    with torchao():
        return told(made)


@pytest.mark.long
def test_a_run_says_which_layers_are_in_fp8_and_leaves_a_model_in_bf16(ranks, tmp_path):
    save_model(tmp_path / "model", inner=96)
    save_rows(tmp_path / "rows.npy")
    settings = {"precision": "bf16", "checkpoint": {"export": True}}
    plain, _ = ranks(2, told, tree(tmp_path, "plain", **settings))[0]
    losses, said = ranks(2, in_fp8, tree(tmp_path, "fp8", model={"linear": "fp8"}, **settings))[0]
    assert any(line.startswith("linear layers in fp8: ") for line in said)
    assert losses != plain
    assert losses == pytest.approx(plain, rel=2e-2)
    sizes = [
        {file.name: file.stat().st_size for file in (tmp_path / name).rglob("model.safetensors")}
        for name in ("plain", "fp8")
    ]
    assert sizes[0] == sizes[1] != {}
