"""`zero3d train` on LLaVA's layout: the same losses at every dp, with adapters, workers and a resume."""

import pytest
from pictures import save_data, save_model
from training import field, refused, told, train, tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaVA, images, and records of them and of texts alone."""
    folder = tmp_path_factory.mktemp("llava")
    save_model(folder / "model")
    save_data(folder, pictured=20, plain=12)
    return folder


def run(folder, output, **sections):
    data = {"train": [str(folder / "data.json")], "images": str(folder / "images"), "packing": False, "length": 48,
            "cache": str(folder / "cache"), "validation": 0.1} | sections.pop("data", {})  # fmt: skip
    train_section = {"steps": 5, "batch": 4, "micro_batch": 2} | sections.pop("train", {})
    made = tree(folder, output, data=data, train=train_section, **sections)
    made["train"].pop("accumulate")
    made["data"].pop("shuffle")
    return made


@pytest.fixture(scope="module")
def one(ranks, folder):
    """The records of a run in one process."""
    return ranks(1, train, run(folder, "one", schedule={"name": "constant"}))[0]


def test_losses_are_the_same_at_every_dp_and_a_run_goes_on_at_another(ranks, folder, one):
    ranks(2, train, run(folder, "two", train={"steps": 3}, schedule={"name": "constant"}))
    two = ranks(1, train, run(folder, "two", schedule={"name": "constant"}), "auto")[0]
    assert field(two, "loss") == pytest.approx(field(one, "loss"), rel=1e-4)
    assert two[-1]["validation_loss"] == pytest.approx(one[-1]["validation_loss"], rel=1e-4)
    assert one[-1]["loss"] < one[0]["loss"]


def told_without_asking(made):
    """The same of a rank that may not ask the others whether they have images."""
    return told(made, zero3d__engine__tower_calls__TowerCalls__agree=None)


def test_ranks_of_which_some_have_images_know_it_from_the_order_of_the_data(ranks, folder):
    mixed = {"group_by_modality": False, "validation": 0}
    wanted = field(ranks(1, train, run(folder, "mixed-one", data=mixed, zero={"stage": 3}))[0], "loss")
    made = run(folder, "mixed-two", data=mixed, zero={"stage": 3}, train={"micro_batch": 1})
    (losses, lines), other = ranks(2, told_without_asking, made)
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert other[0] == losses
    assert sum("images give 18 of 43 parameters outside the language model no gradient" in line for line in lines) == 1


def test_a_pipeline_takes_micro_batches_of_unlike_lengths_with_images_and_without(ranks, folder, one):
    cut = ranks(2, train, run(folder, "cut", mesh={"pp": 2}, train={"steps": 3}, schedule={"name": "constant"}))[0]
    assert field(cut, "loss") == pytest.approx(field(one, "loss")[:3], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_adapters_beside_a_projector_with_a_rate_of_its_own_learn_from_images(ranks, folder, world):
    made = run(
        folder, f"lora-{world}", data={"packing": True}, lora={"rank": 4, "train_also": ["multi_modal_projector"]},
        optimizer={"lr": 1e-2, "groups": [{"match": "multi_modal_projector", "lr": 1e-3}]},
    )  # fmt: skip
    records = ranks(world, train, made)[0]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[1]["lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize(("sections", "why"), [
    ({"data": {"images": "nowhere"}}, "does not exist: set data.images to the folder of the images"),
])  # fmt: skip
def test_what_images_cannot_be_trained_with_is_one_line(ranks, folder, sections, why):
    assert why in refused(ranks, run(folder, "refused", **sections))
