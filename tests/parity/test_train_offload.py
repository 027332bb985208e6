"""`zero3d train` with states off the device: the same losses, bytes by place, and a choice that a resume keeps."""

import json
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest
from training import field, metrics, run_in, save_model, save_rows, train, tree

from zero3d.blueprint.auto import Room
from zero3d.train import offload as of_run

SAME = ("step", "loss", "grad_norm", "lr", "applied")
PLACES = {
    "resident": {},
    "host": {"optimizer": "host"},
    "disk": {"optimizer": "disk"},
    "mixed": {"optimizer": "host", "fraction": 0.5, "params": "host", "executor": "device"},
}


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "plain", "llama")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


def made(folder, name, offload, **sections):
    """Configuration of a run in bf16 that holds rows out."""
    data = {"validation": 0.2}
    return tree(folder, name, saved="plain", precision="bf16", data=data, offload=offload, **sections)


def printed(ranks, folder, name, given):
    """What --json prints of a run."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(made(folder, name, given, train={"steps": 3})))
    return ranks(2, run_in, str(folder), [str(file)])[0]


@pytest.mark.long
@pytest.mark.parametrize("places", [
    ("resident", "mixed"), pytest.param(tuple(PLACES), marks=pytest.mark.long),
], ids=["few", "all"])  # fmt: skip
def test_a_run_has_the_same_losses_wherever_its_states_are(ranks, folder, places):
    results = {name: printed(ranks, folder, name, PLACES[name]) for name in places}
    kept = {name: (result["losses"], result["held_out_loss"]) for name, result in results.items()}
    assert kept == dict.fromkeys(places, kept["resident"])
    assert len(set(kept["resident"][0])) == 3
    for name, result in results.items():
        assert all(row["agrees"] is not False for row in result["memory"]), name
        assert not (folder / name / "offload").exists()
    held = {
        name: {row["place"]: row["measured"] for row in result["memory"] if row["consumer"] == "optimizer states"}
        for name, result in results.items()
    }
    resident = held["resident"]["device"]
    assert held["resident"] == {"device": resident}
    if len(places) > 2:
        assert (held["host"], held["disk"]) == ({"device": 0, "host": resident}, {"device": 0, "disk": 2 * resident})
    assert held["mixed"]["device"] + held["mixed"]["host"] == resident
    assert min(held["mixed"].values()) > 0


class Asked(AssertionError):
    """A run chose anew."""


def with_room(given, room, resume=None, stop_in=None):
    """A rank's part of a run that finds this room, or None: it must not look."""
    look = mock.Mock(return_value=room, side_effect=Asked if room is None else None)
    with mock.patch.object(of_run, "room_of", look):
        return train(given, resume, stop_in)


def saved_choice(given, step):
    manifest = json.loads((Path(given["output"]) / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    return manifest["loop"]["offload"]


@pytest.mark.long
def test_what_auto_chose_is_kept_when_a_run_goes_on_and_another_value_wins(ranks, folder):
    expected = ranks(1, train, made(folder, "whole", {}))[0]
    given = made(folder, "parted", {"optimizer": "auto"})
    little = Room(200_000, 10**9, False)
    ranks(1, with_room, given, little, None, 2)
    chosen = saved_choice(given, 2)
    assert chosen["optimizer"] == "host"
    assert 0 < chosen["fraction"] <= 1
    assert chosen["executor"] == "host"
    ranks(1, with_room, given, None, "auto", 4)
    assert saved_choice(given, 4) == chosen
    given["offload"]["optimizer"] = "none"
    records = ranks(1, with_room, given, None, "auto")[0]
    assert saved_choice(given, 5) is None
    for name in SAME:
        assert field(records, name) == field(metrics(given), name) == field(expected, name)


def in_folder(folder, given):
    """A rank's part of a run that finds its own output folder."""
    with chdir(folder):
        return train(given | {"output": None})


def test_what_the_host_has_no_room_for_ends_a_run_before_anything_is_written(ranks, folder):
    given = made(folder, "out", {"optimizer": "disk", "params": "host", "host_budget": "1kB"})
    for case in ((train, given), (in_folder, str(folder), given)):
        failed = [error for _, error in ranks(2, *case, check=False)]
        assert all("a rank's states on the host take" in error for error in failed)
    assert not (folder / "out" / "config.yaml").exists()
    assert list(folder.glob("zero3d-*")) == []
