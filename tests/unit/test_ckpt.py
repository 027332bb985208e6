"""`zero3d ckpt` on checkpoints of one process: what each action finds, refuses and leaves alone."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from damage import as_retired, edit, edit_part, list_file
from models import adamw, batch, hf, loss_of
from safetensors.torch import load_file, save_file
from torch import nn
from training import contents

import zero3d
import zero3d.checkpoint.export
from zero3d.checkpoint import offline_export, stored_states
from zero3d.checkpoint.difference import compare
from zero3d.checkpoint.inventory import plan_pruning
from zero3d.checkpoint.stored_states import StoredStates, statistics
from zero3d.distributed.degrees import Degrees
from zero3d.errors import BAD_INPUT, FAULT, CheckpointError, NonFiniteError, OutOfBudget
from zero3d.tools.cli.main import main
from zero3d.train.lock import FolderLock

STEPS = (1, 2, 3)


class Small(nn.Module):
    """Every kind of state: trained matrices, a scalar, a frozen table, buffers of which one is not saved with weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(11, 12).requires_grad_(False)
        self.first = nn.Linear(12, 40, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, ids):
        self.seen += 1
        return self.first(self.table(ids)).square().mean() * self.scale


def trained(engine, folder, steps=STEPS, inputs=lambda step: torch.tensor([step])):
    for step in steps:
        engine.backward(loss_of(engine, batch(step)) if isinstance(engine.module, hf_class()) else engine(inputs(step)))
        engine.step()
        engine.save(folder)
    return engine


def hf_class():
    from transformers import PreTrainedModel

    return PreTrainedModel


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run's folder with three checkpoints of Small, the second of which is the best."""
    output = tmp_path_factory.mktemp("small")
    engine = zero3d.Engine(Small(), stage=3, precision="bf16", optimizer=adamw)
    trained(engine, output / "checkpoints")
    (output / "checkpoints" / "best").symlink_to("step-2")
    (output / "engine").write_text(engine.fingerprint())
    engine.export(output / "hf")
    return output


@pytest.fixture
def copied(small, tmp_path):
    """A copy of it that a test may damage."""
    shutil.copytree(small, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def typed(capsys, *words):
    """The exit code, what --json prints, and what stands on stderr."""
    code = main(["ckpt", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def shown(capsys, *words):
    """The exit code and the text for people."""
    code = main(["ckpt", *map(str, words)])
    return code, capsys.readouterr().out


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# --- ls and verify --------------------------------------------------------------------------------


def test_ls_marks_the_best_one_damaged_ones_and_leftovers_and_says_how_it_looked(copied, capsys):
    checkpoints = copied / "checkpoints"
    (checkpoints / "step-3" / "rank-00000.safetensors").unlink()
    shutil.copytree(checkpoints / "step-1", checkpoints / ".step-9.tmp")
    for folder in (copied, checkpoints):
        code, data, _ = typed(capsys, "ls", folder)
        assert code == 0
        assert [(each["step"], each["state"], each["best"]) for each in data["checkpoints"]] == [
            (1, "whole", False), (2, "whole", True), (3, "damaged", False),
        ]  # fmt: skip
        assert "rank-00000.safetensors is missing" in data["checkpoints"][2]["fault"]
        assert data["checkpoints"][0]["mesh"] == Degrees(1, 1, 1)._asdict()
        assert data["checkpoints"][0]["bytes"] == sum(p.stat().st_size for p in (checkpoints / "step-1").iterdir())
        assert [each["name"] for each in data["leftovers"]] == [".step-9.tmp"]
    _, text = shown(capsys, "ls", copied)
    for said in ("whole, best", "DAMAGED", "leftover of a killed save", "by their sizes", "step-3 is damaged: "):
        assert said in text
    _, data, _ = typed(capsys, "ls", checkpoints / "step-2")
    assert [(each["step"], each["best"]) for each in data["checkpoints"]] == [(2, True)]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, -1])
def test_ls_finds_every_truncation_and_verify_names_the_tensors_that_were_lost(copied, capsys, size):
    path = copied / "checkpoints" / "step-1" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert typed(capsys, "ls", path.parent)[1]["checkpoints"][0]["state"] == "damaged"
    code, data, _ = typed(capsys, "verify", path.parent)
    assert code == FAULT
    ((fault,),) = (each["faults"] for each in data["checkpoints"])
    assert fault["file"] == path.name
    last = load_file(copied / "checkpoints" / "step-2" / path.name)
    lost = "Lost: 'rng:" if size == -1 else f"Lost: {len(last)} tensors ("
    assert lost in fault["fault"]


def test_a_changed_bit_that_ls_does_not_see_is_found_by_verify(copied, capsys):
    path = copied / "checkpoints" / "step-1" / "rank-00000.safetensors"
    flip(path)
    assert typed(capsys, "ls", copied)[1]["checkpoints"][0]["state"] == "whole"
    code, text = shown(capsys, "verify", copied)
    assert code == FAULT
    first, fault, *others = text.splitlines()
    assert "step-1: DAMAGED, 1 file" in first
    assert "rank-00000.safetensors: " in fault
    assert "its checksum is not the manifest's" in fault
    assert "Changed: 'rng:" in fault
    assert [": whole (" in line for line in others] == [True, True]


def test_every_tensor_with_a_changed_bit_is_named(copied, capsys):
    path = copied / "checkpoints" / "step-1" / "rank-00000.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    places = {k: v["data_offsets"] for k, v in json.loads(whole[8 : 8 + length]).items()}
    for key, (start, stop) in places.items():
        flip(path, 8 + length + (start + stop) // 2)
        fault = typed(capsys, "verify", path.parent)[1]["checkpoints"][0]["faults"][0]["fault"]
        assert fault.endswith(f"Changed: '{key}'.")
        path.write_bytes(whole)
    flip(path, 8 + whole[8 : 8 + length].index(b"F32") + 1)
    fault = typed(capsys, "verify", path.parent)[1]["checkpoints"][0]["faults"][0]["fault"]
    assert fault.endswith("Changed: its header, and no tensor by its checksum.")


def test_verify_counts_all_bytes_and_tensors(small, capsys):
    folder = small / "checkpoints" / "step-1"
    code, data, _ = typed(capsys, "verify", folder, small / "checkpoints" / "step-2")
    assert code == 0
    found = data["checkpoints"][0]
    assert found["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert found["files"] == len(list(folder.iterdir()))
    assert found["tensors"] == len(load_file(folder / "rank-00000.safetensors"))
    assert found["parameters"] == 3
    assert [each["step"] for each in data["checkpoints"]] == [1, 2]


def test_a_checkpoint_under_the_name_of_another_step_and_a_foreign_file_are_told(copied, capsys):
    checkpoints = copied / "checkpoints"
    (checkpoints / "step-1").rename(checkpoints / "step-7")
    (checkpoints / "step-3" / "notes.txt").write_text("of somebody")
    code, data, _ = typed(capsys, "verify", copied)
    assert code == FAULT
    by_step = {Path(each["path"]).name: each for each in data["checkpoints"]}
    assert "has the name of step 7, and its manifest.json is of step 1" in by_step["step-7"]["faults"][0]["fault"]
    assert (by_step["step-3"]["faults"], by_step["step-3"]["foreign"]) == ([], ["notes.txt"])
    assert [each["state"] for each in typed(capsys, "ls", copied)[1]["checkpoints"]] == ["whole", "whole", "damaged"]


def test_random_states_that_no_generator_takes_are_found(copied, capsys):
    folder = copied / "checkpoints" / "step-1"
    file = folder / "rank-00000.safetensors"
    save_file({**load_file(file), "rng:torch": torch.zeros(7, dtype=torch.uint8)}, file)
    list_file(folder, file.name)
    edit_part(folder, "rank-00000.json", lambda part: part["own"]["rng:torch"].update(shape=[7]))
    code, data, _ = typed(capsys, "verify", folder)
    assert code == FAULT
    assert "rng:torch is not a random state" in data["checkpoints"][0]["faults"][0]["fault"]
    assert "Changed" not in data["checkpoints"][0]["faults"][0]["fault"]


@pytest.mark.parametrize("words", [
    ("ls", "nowhere"), ("verify", "nowhere"), ("show", "nowhere"), ("diff", "nowhere", "nowhere"), ("prune", "nowhere"),
    ("export", "nowhere", "hf"), ("ls", "empty"), ("verify", "empty"), ("show", "empty"), ("ls", "file"),
    ("prune", "empty", "--keep", "1"), ("prune", "empty", "--keep", "0"), ("prune", "empty"), ("ls", "x" * 5000),
    ("ls", "a\0b"), ("export", "empty", "hf"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["ckpt", *words]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert len(err) < 400


# --- show ---------------------------------------------------------------------------------------


def test_show_lists_parameters_states_and_what_is_beside_them(small, capsys):
    _, data, _ = typed(capsys, "show", small)
    assert data["step"] == 3
    assert {
        each["name"]: (each["shape"], each["trainable"], sorted(each["states"])) for each in data["parameters"]
    } == {
        "table.weight": ([11, 12], False, ["weight"]),
        "first.weight": ([40, 12], True, ["exp_avg", "exp_avg_sq", "master"]),
        "scale": ([], True, ["exp_avg", "exp_avg_sq", "master"]),
    }
    assert data["optimizer"]["class"] == "AdamW"
    assert data["optimizer"]["scalars"] == {"step": 3.0}
    assert data["about"]["precision"] == "bf16"
    assert data["ranks_own"][0]["buffers"].keys() == {"seen", "scratch"}
    assert data["ranks_own"][0]["random"] == ["numpy", "python", "torch"]
    _, text = shown(capsys, "show", small, "*weight")
    assert "40 x 12" in text
    assert "scale" not in text
    code, data, err = typed(capsys, "show", small, "frist*")
    assert (code, data) == (BAD_INPUT, None)
    assert "has no parameter 'frist*'" in err


def test_statistics_are_those_of_the_whole_tensor_however_it_is_cut(small, monkeypatch):
    monkeypatch.setattr(stored_states, "CHUNK", 7)
    monkeypatch.setattr(stored_states, "REOPEN_BYTES", 50)
    folder = small / "checkpoints" / "step-3"
    master = load_file(folder / "rank-00000.safetensors")["master:first.weight@0:40,0:12"].double()
    found = statistics(StoredStates(folder), "first.weight", "master")
    assert (found.elements, found.least, found.most) == (480, float(master.min()), float(master.max()))
    assert found.mean == pytest.approx(float(master.mean()), rel=1e-12)
    assert found.deviation == pytest.approx(float(master.std(correction=0)), rel=1e-12)
    assert found.norm == pytest.approx(float(master.norm()), rel=1e-12)


# --- diff ---------------------------------------------------------------------------------------


def test_diff_of_a_checkpoint_with_itself_is_equal_and_with_another_step_it_is_not(small, capsys):
    checkpoints = small / "checkpoints"
    code, data, _ = typed(capsys, "diff", checkpoints / "step-2", checkpoints / "best")
    assert (code, data["equal"], data["differences"], data["facts"]) == (0, True, [], {})
    assert data["a"]["states"] == data["b"]["states"]
    code, data, _ = typed(capsys, "diff", checkpoints / "step-2", checkpoints / "step-3")
    assert (code, data["equal"]) == (1, False)
    assert data["a"]["states"] != data["b"]["states"]
    assert {"step", "loss_scale.steps"} & data["facts"].keys() == {"step"}
    assert {each["name"] for each in data["differences"]} == {"first.weight", "scale", "seen of rank 0", "optimizer"}
    _, text = shown(capsys, "diff", checkpoints / "step-2", checkpoints / "step-3")
    assert "different: " in text


@pytest.mark.parametrize(("number", "action"), [(1, "verify"), (2, "show"), (3, "diff"), (2, "export")])
def test_a_retired_format_is_refused_in_one_line(copied, capsys, number, action):
    steps = copied / "checkpoints"
    as_retired(steps / "step-1", number)
    others = {"diff": [str(steps / "step-3")], "export": [str(steps / "hf"), "--config", "none"]}.get(action, [])
    assert main(["ckpt", action, str(steps / "step-1"), *others]) == BAD_INPUT
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"step-1 has format {number}, and this zero3d reads formats 4 and 5" in told
    assert "git checkout " in told


def test_a_retired_format_is_listed_as_such_and_never_pruned(copied, capsys):
    steps = copied / "checkpoints"
    as_retired(steps / "step-1", 3)
    states = [each["state"] for each in typed(capsys, "ls", copied)[1]["checkpoints"]]
    assert states == ["retired", "whole", "whole"]
    assert "step-1 is retired: " in shown(capsys, "ls", copied)[1]
    with pytest.raises(CheckpointError, match=r"nothing is removed while 1 of 3 cannot be read: .* has format 3"):
        plan_pruning(copied, 1, False)


def test_diff_names_the_element_and_the_largest_difference(copied, capsys, monkeypatch):
    monkeypatch.setattr(stored_states, "CHUNK", 7)
    before, after = copied / "checkpoints" / "step-1", copied / "changed" / "step-1"
    shutil.copytree(before, after)
    file = after / "rank-00000.safetensors"
    tensors = load_file(file)
    master = tensors["master:first.weight@0:40,0:12"]
    master[20, 3] += 0.5
    master[7, 1] -= 2.0
    tensors["weight:table.weight@0:11,0:12"][2, 5] = float("inf")
    tensors["buffer:seen"][1] = -0.0 if float(tensors["buffer:seen"][1]) == 0 else 9.0
    save_file(tensors, file)
    list_file(after, file.name)
    code, data, _ = typed(capsys, "diff", before, after)
    found = {(each["name"], each["state"]): each for each in data["differences"]}
    assert code == 1
    assert found.keys() == {("first.weight", "master"), ("table.weight", "weight"), ("seen of rank 0", "buffer")}
    changed = found["first.weight", "master"]
    assert (changed["differing"], changed["elements"], changed["at"]) == (2, 480, [7, 1])
    assert changed["largest"] == pytest.approx(2.0, rel=1e-6)
    assert (found["table.weight", "weight"]["largest"], found["table.weight", "weight"]["at"]) == ("inf", [2, 5])


def test_diff_tells_what_is_on_one_side_only_and_other_shapes(small, tmp_path):
    class Other(Small):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(12, 41, bias=False)
            self.more = nn.Parameter(torch.zeros(2))

        def forward(self, ids):
            return super().forward(ids) + self.more.sum()

    other = zero3d.Engine(Other(), stage=1, precision="bf16", optimizer=adamw).save(tmp_path)
    compared = compare(StoredStates(small / "checkpoints" / "step-1"), StoredStates(other))
    kinds = {(each.name, each.state): each.kind for each in compared.differences}
    assert kinds["first.weight", "master"] == "shape"
    assert kinds["more", "master"] == "only in b"
    assert compared.hashes[0] != compared.hashes[1]


# --- export ---------------------------------------------------------------------------------------


def test_the_export_of_a_model_of_ones_own_is_the_engines_bit_for_bit_but_for_what_only_the_model_knows(
    small, tmp_path
):
    stored = StoredStates(small / "checkpoints" / "step-3")
    written = offline_export.export_stored(stored, tmp_path / "hf", Small())
    assert contents_of(written) == contents_of(small / "hf")
    alone = offline_export.export_stored(stored, tmp_path / "alone", None)
    tensors, expected = load_file(alone / "model.safetensors"), load_file(written / "model.safetensors")
    assert tensors.keys() - expected.keys() == {"scratch"}
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


def contents_of(folder):
    return {path.name: data for path, data in contents(folder).items()}


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A run's folder of a mixture of experts, whose weights have other names and shapes in published folders."""
    output = tmp_path_factory.mktemp("moe")
    model = hf("qwen3_moe")
    model.generation_config.max_new_tokens = 9
    model.save_pretrained(output / "model")
    engine = trained(zero3d.Engine(model, stage=3, precision="bf16", optimizer=adamw), output / "checkpoints", (1, 2))
    engine.export(output / "hf")
    (output / "config.yaml").write_text(
        f"model: {{path: {output / 'model'}}}\ndata: {{train: [gone.npy], tokenizer: bytes}}\n"
    )
    return output


@pytest.mark.parametrize("limit", [10**9, 9_000])
def test_the_exported_folder_is_the_engines_bit_for_bit(moe, tmp_path, monkeypatch, capsys, limit):
    monkeypatch.setattr(zero3d.checkpoint.export, "FILE_BYTES", limit)
    monkeypatch.setattr(stored_states, "CHUNK", 1000)
    code, data, err = typed(capsys, "export", moe, tmp_path / "hf")
    assert code == 0, err
    assert data["model"] == "Qwen3MoeForCausalLM"
    written, expected = contents_of(tmp_path / "hf"), contents_of(moe / "hf")
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
    } <= written.keys()  # as the run's own export has, beside the weights
    cards = [files.pop("README.md").decode().splitlines()[:-2] for files in (written, expected)]
    assert set(cards[1]) < set(cards[0]), "of a run's file it says the data, too"
    if limit > 10**6:
        assert {name: written[name] for name in expected} == expected
        return
    assert len(data["files"]) > 3
    from transformers import AutoModelForCausalLM

    loaded, expected = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "hf", moe / "hf")
    )
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    for path in (tmp_path / "hf").glob("*.safetensors"):
        tensors = load_file(path)
        assert sum(t.nbytes for t in tensors.values()) <= limit or len(tensors) == 1


def test_without_a_config_the_error_says_what_to_type_and_it_works(moe, tmp_path, capsys):
    alone = tmp_path / "step-2"
    shutil.copytree(moe / "checkpoints" / "step-2", alone)
    code, _, err = typed(capsys, "export", alone, tmp_path / "hf")
    assert code == BAD_INPUT
    assert "--config PATH" in err
    assert "--config none" in err
    for config in (moe / "model", moe / "model" / "config.json", moe / "config.yaml"):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        code, _, err = typed(capsys, "export", alone, tmp_path / "hf", "--config", config)
        assert code == 0, err
        assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (moe / "hf" / "model.safetensors").read_bytes()
    code, _, err = typed(capsys, "export", alone, tmp_path / "hf", "--config", "none")
    assert (code, "exists and is not empty" in err) == (BAD_INPUT, True)


def test_code_of_the_model_is_not_run(moe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')\n")
    (tmp_path / "run.yaml").write_text("model: {path: 'mine:make'}\n")
    code, _, err = typed(capsys, "export", moe, tmp_path / "hf", "--config", tmp_path / "run.yaml")
    assert code == BAD_INPUT
    assert "code which ckpt does not run" in err


def test_exports_that_cannot_be_leave_nothing(small, moe, tmp_path, monkeypatch):
    stored = StoredStates(moe / "checkpoints" / "step-2")
    with pytest.raises(CheckpointError, match=r"of another model than the config's, Small .*--config PATH"):
        offline_export.export_stored(stored, tmp_path / "hf", Small())
    broken = tmp_path / "step-3"
    shutil.copytree(small / "checkpoints" / "step-3", broken)
    flip(broken / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="its checksum is not the manifest's"):
        offline_export.export_stored(StoredStates(broken), tmp_path / "hf", None)
    file = broken / "rank-00000.safetensors"
    tensors = load_file(small / "checkpoints" / "step-3" / file.name)
    tensors["master:scale@"].fill_(float("nan"))
    save_file(tensors, file)
    list_file(broken, file.name)
    with pytest.raises(NonFiniteError, match="scale has values that are NaN"):
        offline_export.export_stored(StoredStates(broken), tmp_path / "hf", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 7, 3))
    with pytest.raises(OutOfBudget, match=r"take [\d,]+ bytes, and the disk of .* has 3 free"):
        offline_export.export_stored(stored, tmp_path / "hf", None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


# --- prune --------------------------------------------------------------------------------------


def test_prune_shows_what_would_go_and_removes_it_with_yes(copied, capsys):
    checkpoints = copied / "checkpoints"
    shutil.copytree(checkpoints / "step-1", checkpoints / ".step-9.tmp")
    before = contents(copied)
    code, data, _ = typed(capsys, "prune", copied, "--keep", 1, "--leftovers")
    assert (code, data["removed"]) == (0, None)
    assert [each["name"] for each in (*data["doomed"], *data["leftovers"])] == ["step-1", ".step-9.tmp"]
    assert contents(copied) == before
    assert "add --yes" in shown(capsys, "prune", copied, "--keep", 1)[1]
    code, data, _ = typed(capsys, "prune", checkpoints, "--keep", 1, "--leftovers", "--yes")
    assert len(data["removed"]) == 2
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "step-2", "step-3"]
    assert not list(copied.glob(".lock"))


def test_prune_counts_whole_ones_only(copied, capsys):
    flip(copied / "checkpoints" / "step-3" / "manifest.json")
    (copied / "checkpoints" / "best").unlink()
    _, data, _ = typed(capsys, "prune", copied, "--keep", 1)
    assert [each["name"] for each in data["kept"]] == ["step-2"]
    assert [(each["name"], each["state"]) for each in data["doomed"]] == [("step-1", "whole"), ("step-3", "damaged")]
    for step in (1, 2):
        flip(copied / "checkpoints" / f"step-{step}" / "manifest.json")
    code, _, err = typed(capsys, "prune", copied, "--keep", 1, "--yes")
    assert code == BAD_INPUT
    assert "none of the 3 checkpoints" in err
    assert len(list((copied / "checkpoints").glob("step-*"))) == 3


def test_prune_leaves_links_alone_and_removes_nothing_while_one_cannot_be_read(copied, capsys, monkeypatch):
    checkpoints = copied / "checkpoints"
    (checkpoints / "step-8").symlink_to("step-1")
    _, data, _ = typed(capsys, "prune", copied, "--keep", 1)
    assert {each["name"] for each in (*data["kept"], *data["doomed"])} == {"step-1", "step-2", "step-3"}
    opened = os.open

    def stale(path, *given, **options):
        if str(path).endswith("step-3/manifest.json"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, *given, **options)

    monkeypatch.setattr(os, "open", stale)
    code, _, err = typed(capsys, "prune", copied, "--keep", 1, "--yes")
    assert code == BAD_INPUT
    assert "nothing is removed while 1 of 3 cannot be read: " in err
    assert len(list(checkpoints.glob("step-*"))) == 4


def test_export_to_a_place_that_cannot_be_one_is_bad_input(copied, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, why in (("/", "exists and is not empty"), (tmp_path / "file" / "x", "Not a directory"),
                       (tmp_path / "link", "which is not there")):  # fmt: skip
        code, _, err = typed(capsys, "export", copied, place, "--config", "none")
        assert code == BAD_INPUT
        assert why in err
    assert not (tmp_path / "nowhere").exists()


def hold(output, held, done):
    with FolderLock() as lock:
        lock.acquire(output)
        held.set()
        done.wait(60)


def test_a_running_runs_folder_is_refused_and_ls_says_that_it_runs(copied, capsys):
    import multiprocessing

    (copied / "checkpoints" / ".step-9.tmp").mkdir()
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(copied, held, done))
    process.start()
    try:
        assert held.wait(60)
        before = contents(copied)
        for words in (("--keep", 1), ("--keep", 1, "--yes"), ("--leftovers", "--yes")):
            code, _, err = typed(capsys, "prune", copied, *words)
            assert code == BAD_INPUT
            assert "is in use by process" in err
        assert contents(copied) == before
        assert typed(capsys, "ls", copied)[1]["running"]
        assert "being written" in shown(capsys, "ls", copied)[1]
    finally:
        done.set()
        process.join()


# --- hostile ones -------------------------------------------------------------------------------


def test_a_manifest_that_is_nested_deeply_is_refused_or_shown_and_never_a_callstack(copied, capsys):
    folder = copied / "checkpoints" / "step-1"
    deep = {}
    for _ in range(480):
        deep = {"x": deep}
    edit(folder, lambda manifest: manifest.update(loop=deep))
    for words in (("show", folder), ("diff", folder, copied / "checkpoints" / "step-2"), ("ls", folder)):
        assert main(["ckpt", *map(str, words)]) in (0, 1, BAD_INPUT)
    capsys.readouterr()


def test_names_that_a_terminal_would_act_on_are_quoted(copied, capsys):
    folder = copied / "checkpoints" / "step-1"
    edit(folder, lambda manifest: manifest.update(loop={"\x1b[2J": "\x1b[31m"}))
    (folder / "\x1b[2J").write_text("")
    for words in (("show", folder), ("verify", folder), ("diff", folder, copied / "checkpoints" / "step-2")):
        assert "\x1b" not in shown(capsys, *words)[1]
