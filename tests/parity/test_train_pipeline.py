"""`zero3d train` over pipeline stages: the run of the same replicas without a pipeline, bit for bit."""

import warnings

import pytest
from training import field, metrics, save_model, save_rows, train, tree
from transformers import AutoModelForCausalLM

LAST = 3  # steps of a run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    save_model(folder / "model")
    save_rows(folder / "rows.npy", rows=26)
    return folder


def run_of(folder, name, pp, stage=3, **sections):
    """With gradients reduced once a step, as in a pipeline: more often is another order of sums."""
    mesh = {"pp": pp, "schedule": "1f1b"}
    sections = {
        "train": {"steps": LAST},
        "data": {"validation": 0.2},
        "evaluate": {"every": 2},
        "zero": {"stage": stage, "reduce": "every_step"},
    } | sections
    return tree(folder, name, mesh=mesh, **sections)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids="dp{}".format)
def dp(request):
    return request.param


@pytest.fixture(scope="module")
def alone(ranks, folder, dp):
    """The run without a pipeline, whose checkpoints stay."""
    return ranks(dp, train, run_of(folder, f"one-{dp}", 1, checkpoint=KEPT))[0]


KEPT = {"export": False, "every": 2, "keep": 9}


@pytest.fixture(scope="module")
def split(ranks, folder, dp):
    """The run over two pipeline stages."""
    return ranks(2 * dp, train, run_of(folder, f"two-{dp}", 2, activations="full", checkpoint=KEPT | {"export": True}))[
        0
    ]


@pytest.mark.long
def test_a_run_over_pipeline_stages_is_the_run_without(folder, dp, alone, split):
    for name in ("loss", "grad_norm", "lr", "tokens", "epoch"):
        assert field(split, name) == field(alone, name)
    assert [r.get("validation_loss") for r in split] == [r.get("validation_loss") for r in alone]
    AutoModelForCausalLM.from_pretrained(folder / f"two-{dp}" / "hf")
    assert [line["step"] for line in metrics(run_of(folder, f"two-{dp}", 2))] == list(range(1, LAST + 1))


@pytest.mark.parametrize(("name", "pp"), [("two", 1), pytest.param("one", 2, marks=pytest.mark.long)])
def test_a_run_goes_on_over_other_axes(ranks, folder, dp, alone, split, name, pp):
    """Two steps on pp 2 x dp, the rest on dp alone, and the other way round."""
    whole = field(alone, "loss")
    made = run_of(folder, f"{name}-{dp}", pp, checkpoint=KEPT)
    again = ranks(dp * pp, train, made, str(folder / f"{name}-{dp}" / "checkpoints" / "step-2"))[0]
    assert len(whole) == LAST
    assert field(again, "loss")[2 - LAST :] == pytest.approx(whole[2 - LAST :], rel=1e-6)


def warned(made):
    """What a run warns of on this rank about the mesh."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(made)
    return [str(each.message) for each in found if "mesh." in str(each.message)]


def test_a_files_schedule_without_a_pipeline_is_said_once_to_have_no_effect(ranks, folder):
    one = run_of(folder, "unused", 1, train={"steps": 1, "batch": 4, "accumulate": 2})
    one["mesh"] |= {"schedule": "zbv", "blocks": "model.layers"}
    first, second = ranks(2, warned, one)
    assert [said.partition(" mesh.pp is 1")[0] for said in first] == [
        "mesh.schedule=zbv, mesh.blocks=model.layers have no effect:"
    ]
    assert second == []
