"""`zero3d train` over a tp axis: the run of one process, up to the order of sums."""

import pytest
from tensors import tiny
from training import field, metrics, save_rows, train, tree
from transformers import AutoModelForCausalLM

from zero3d.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor")
    tiny("llama").save_pretrained(folder / "model")
    save_rows(folder / "rows.npy", rows=26)
    return folder


def run_of(folder, name, tp, **sections):
    sections = {"data": {"validation": 0.2}, "evaluate": {"every": 2}, "mesh": {"tp": tp}} | sections
    return tree(folder, name, **sections)


@pytest.fixture(scope="module")
def alone(ranks, folder):
    """The run of one process."""
    return ranks(1, train, run_of(folder, "one", 1))[0]


@pytest.fixture(scope="module")
def split(ranks, folder):
    """The run over two tp ranks, whose checkpoints stay."""
    return ranks(2, train, run_of(folder, "two", 2, checkpoint={"export": True, "every": 2, "keep": 9}))[0]


def test_a_run_over_tp_ranks_is_the_run_of_one_process(folder, alone, split):
    for name in ("loss", "grad_norm"):
        assert field(split, name) == pytest.approx(field(alone, name), abs=1e-5)
    for name in ("lr", "tokens", "epoch"):
        assert field(split, name) == field(alone, name)
    held_out = [[r["validation_loss"] for r in run if "validation_loss" in r] for run in (split, alone)]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-5)
    AutoModelForCausalLM.from_pretrained(folder / "two" / "hf")
    assert [line["step"] for line in metrics(run_of(folder, "two", 2))] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_run_goes_on_over_another_axis(ranks, folder, alone, split):
    """Two steps on tp 2, the rest on dp 2."""
    made = run_of(folder, "two", 1, checkpoint={"export": False, "every": 2, "keep": 9})
    again = ranks(2, train, made, str(folder / "two" / "checkpoints" / "step-2"))[0]
    assert field(again, "loss")[-3:] == pytest.approx(field(alone, "loss")[-3:], abs=1e-5)


@pytest.mark.long
def test_documents_of_a_length_that_tp_does_not_divide_train_by_chunks(ranks, folder):
    data = {"train": str(save_rows(folder / "short.npy", rows=26, length=15)), "packing": False}
    steps = {"steps": 2, "batch": 4, "accumulate": 2}
    chunks = run_of(folder, "chunks", 2, data=data, train=steps, mesh={"tp": 2, "sequence_parallel": True})
    alone = ranks(1, train, run_of(folder, "short", 1, data=data, train=steps))[0]
    assert field(ranks(2, train, chunks)[0], "loss") == pytest.approx(field(alone, "loss"), abs=1e-5)


def test_a_length_that_tp_does_not_divide_is_refused_before_anything_is_made(ranks, folder):
    made = run_of(
        folder,
        "odd",
        2,
        data={"length": 15, "cache": str(folder / "odd-cache")},
        mesh={"tp": 2, "sequence_parallel": True},
    )
    first, second = ranks(2, refusal, made)
    assert first == second
    assert "data.length=15 / 2 is not whole: type data.length=14 or 16, or mesh.sequence_parallel=false" in first
    assert not (folder / "odd").exists()
    assert not (folder / "odd-cache").exists()


def refusal(made):
    with pytest.raises(ConfigError) as error:
        train(made)
    return str(error.value)
