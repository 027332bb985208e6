"""Checkpoints and exports in object stores: copies that a kill between any two objects leaves whole, and what reads them."""

import json
import shutil
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from models import adamw, batch, bits, build, loss_of
from training import field, metrics, save_model, save_rows, train, tree

import zero3d
from zero3d.checkpoint.copies import Copies, copy_export, is_whole, located
from zero3d.checkpoint.examine import examine
from zero3d.checkpoint.folders import complete_steps
from zero3d.config import load
from zero3d.errors import BAD_INPUT, FAULT, CheckpointError, ConfigError, CopyError
from zero3d.stores.cache import shown
from zero3d.stores.store import Store
from zero3d.tools.cli.main import main
from zero3d.train.folder import Folder
from zero3d.train.resume_hints import ResumeHints

WRITES = ("put_file", "cp_file", "rm_file", "pipe_file")  # of a file system, each of one object


class Killed(BaseException):
    """Stands for a process that ends: nothing catches it."""


@contextmanager
def dying(kind, after):
    """Let a file system die before its next write once it has made so many; yields what it has written."""
    done = []

    def dies(original):
        def write(self, *args, **options):
            if len(done) == after:
                raise Killed
            done.append(str(args[-1] if original.__name__ in ("put_file", "cp_file") else args[0]))
            return original(self, *args, **options)

        return write

    with mock.patch.multiple(kind, **{name: dies(getattr(kind, name)) for name in WRITES}):
        yield done


@pytest.fixture(autouse=True)
def empty_memory():
    yield
    MemoryFileSystem.store.clear()


def make(stage=1):
    return zero3d.Engine(build("net"), stage=stage, precision="fp32", optimizer=adamw)


def step(engine, *numbers):
    for number in numbers:
        engine.backward(loss_of(engine, batch(number)))
        engine.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of steps 1 and 2, and of another course of step 2."""
    folder, other = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("other")
    engine = make()
    step(engine, 1)
    first = engine.save(folder)
    step(engine, 2)
    second = engine.save(folder)
    engine.load(first)
    step(engine, 3)
    return first, second, engine.save(other)


def upload(url, folder):
    copies = Copies(url)
    copies.make_way(int(folder.name.removeprefix("step-")))
    copies.upload(folder, ["rank-00000.safetensors", "rank-00000.json"])
    copies.commit(folder)


def same(place, folder):
    """Whether the checkpoint of a store has the bytes of a folder, every one of which is looked at."""
    assert examine(place).faults == []
    return all((place / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())


def what_counts_is_all_there(url):
    return all(len(objects) == 4 for objects in Copies(url).look().objects.values() if is_whole(objects))


def killed_everywhere(url, act):
    """Yield after each kill of `act`: before its first write, between any two, and after its last."""
    for after in range(100):
        MemoryFileSystem.store.clear()
        yield None
        with dying(MemoryFileSystem, after) as done:
            try:
                act()
            except Killed:
                pass
            else:
                assert len(done) == after > 3
                yield "done"
                return
        yield "killed"
    pytest.fail("it never ends")


def test_a_kill_between_any_two_objects_leaves_the_newest_checkpoint_before(saved):
    first, second, _ = saved
    url, ends = "memory://bucket/run", Counter()
    for event in killed_everywhere(url, lambda: upload(url, second)):
        if event is None:
            upload(url, first)
            continue
        ends[event] += 1
        assert same(located(url), second if event == "done" else first)
    assert ends == {"killed": 4, "done": 1}


def test_a_kill_while_a_step_is_saved_again_leaves_one_of_both(saved):
    _, second, other = saved
    url, found = "memory://bucket/run", []
    for event in killed_everywhere(url, lambda: upload(url, other)):
        if event is None:
            upload(url, second)
        else:
            assert what_counts_is_all_there(url)
            place = located(url)
            found.append(same(place, other))
            assert found[-1] or same(place, second)
    assert found == sorted(found)
    assert (found.count(False), found[-1]) == (12, True)
    assert {name.partition("/")[0] for name in Store(url).objects()} == {"step-2"}


def test_a_kill_while_older_ones_are_pruned_leaves_those_that_stay(saved):
    first, second, _ = saved
    url = "memory://bucket/run"
    for event in killed_everywhere(url, lambda: Copies(url).prune(2, keep=1, best=None)):
        if event is None:
            upload(url, first)
            upload(url, second)
            continue
        look = Copies(url).look()
        assert what_counts_is_all_there(url)
        assert same(located(url), second)
        assert set(look.steps) in ({1, 2}, {2})
    assert list(look.objects) == ["step-2"]


def test_copies_of_a_run_that_went_further_are_none_of_those_that_stay(saved):
    first, second, _ = saved
    url = "memory://bucket/run"
    upload(url, first)
    upload(url, second)
    Copies(url).prune(1, keep=1, best=None)  # by a run that went on from the first, and has not saved again yet
    assert list(Copies(url).look().objects) == ["step-1"]
    assert same(located(url), first)


def test_leftovers_of_a_kill_count_for_nothing_and_go_with_the_next_pruning(saved):
    first, second, _ = saved
    url = "memory://bucket/run"
    upload(url, first)
    Copies(url).upload(second, ["rank-00000.safetensors"])
    assert (list(Copies(url).look().steps), Copies(url).look().leftovers) == ([1], ["step-2"])
    Copies(url).prune(1, keep=2, best=1)
    assert list(Copies(url).look().objects) == ["step-1"]
    assert Copies(url).best() == 1


def test_a_file_that_is_not_all_there_makes_no_checkpoint(saved):
    first, _, _ = saved
    url = "memory://bucket/run"
    with pytest.raises(OSError, match=r"step-1/rank-00000\.json has 0 bytes of"):
        Copies(url).commit(first)
    Copies(url).upload(first, ["rank-00000.safetensors", "rank-00000.json"])
    Store(url).write("step-1/rank-00000.safetensors", b"half")
    with pytest.raises(OSError, match="has 4 bytes of"):
        Copies(url).commit(first)
    assert Copies(url).look().steps == {}


# --- of an engine ---------------------------------------------------------------------------------


def test_an_engine_saves_to_a_store_and_goes_on_from_it(tmp_path):
    url = "memory://bucket/run"
    engine = make()
    step(engine, 1)
    engine.save(tmp_path / "ck", loop={"epoch": 3}, to=url)
    step(engine, 2)
    engine.save(tmp_path / "ck", wait=False, to=f"{url}/")
    assert engine.saved() == tmp_path / "ck" / "step-2"
    shutil.rmtree(tmp_path / "ck")
    other = make()
    assert other.load(f"{url}/step-1") == {"epoch": 3}
    assert other.steps == 1
    other.load(url)
    assert other.steps == 2
    assert other.fingerprint() == engine.fingerprint()


def test_what_is_not_there_or_damaged_is_refused_and_changes_nothing(tmp_path):
    url = "memory://bucket/run"
    engine = make()
    step(engine, 1)
    engine.save(tmp_path / "ck", to=url)
    before = engine.fingerprint()
    for given, why in (
        (f"{url}/step-2", "no checkpoint in memory://bucket/run/step-2"),
        ("s4://b", "no store of the kind s4://"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=why):
            engine.load(given)
    name = "step-1/rank-00000.safetensors"
    data = bytearray(Store(url).read(name))
    data[-1] ^= 1
    Store(url).write(name, bytes(data))
    with pytest.raises(CheckpointError, match=f"^{url}/{name} differs from what was saved"):
        engine.load(url)
    assert engine.fingerprint() == before


def test_a_file_that_is_damaged_on_this_host_alone_is_fetched_again(tmp_path):
    url = "memory://bucket/run"
    engine = make()
    step(engine, 1)
    engine.save(tmp_path / "ck", to=url)
    engine.load(url)
    path = located(url) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    engine.load(url)
    assert path.read_bytes() == (tmp_path / "ck" / "step-1" / path.name).read_bytes()


def test_places_that_cannot_be_are_refused_by_name(tmp_path):
    engine = make()
    with pytest.raises(
        ConfigError, match=r"save\('s3://b/run'\) writes a folder of this host first: type engine.save\(FOLDER, to="
    ):
        engine.save("s3://b/run")
    with pytest.raises(
        ConfigError, match=r"export\('s3://b/hf'\) writes a folder of this host first: type engine.export\(FOLDER, to="
    ):
        engine.export("s3://b/hf")
    with pytest.raises(ConfigError, match=r"save\(to='b/run'\) has no URL"):
        engine.save(tmp_path, to="b/run")
    with pytest.raises(ConfigError, match=r"export\(to='b/hf'\) has no URL"):
        engine.export(tmp_path / "hf", to="b/hf")
    assert not list(tmp_path.iterdir())


def test_a_store_that_fails_is_told_and_the_local_checkpoint_is_whole(tmp_path):
    def fails(*_, **__):
        raise RuntimeError("no route to host")

    engine = make()
    with mock.patch.object(MemoryFileSystem, "put_file", fails):
        with pytest.raises(
            CheckpointError, match=r"no route to host.*look at the network and try again; .*step-0 is whole"
        ) as error:
            engine.save(tmp_path, to="memory://bucket/run")
    assert error.value.exit_code == FAULT
    assert complete_steps(tmp_path) == [0]


def save_on_ranks(folder, url):
    engine = make(3)
    step(engine, 1, 2)
    engine.save(folder, to=url)
    with engine.full_params():
        return bits(engine.module.parameters())


def load_on_ranks(url):
    names, download = [], Store.download

    def counts(self, name, path):
        names.append(name)
        download(self, name, path)

    engine = make(2)
    with mock.patch.object(Store, "download", counts):
        engine.load(url)
    with engine.full_params():
        return bits(engine.module.parameters()), engine.steps, names


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long)])
def test_ranks_upload_their_own_files_and_each_is_fetched_once(ranks, tmp_path, world):
    url = f"file://{tmp_path}/bucket/run"
    weights = ranks(2, save_on_ranks, str(tmp_path / "ck"), url)
    shutil.rmtree(tmp_path / "ck")
    loaded = ranks(world, load_on_ranks, url)
    assert {(actual, steps) for actual, steps, _ in loaded} == {(weights[0], 2)}
    fetched = Counter(name for *_, names in loaded for name in names)
    files = {path.name for path in (tmp_path / "bucket" / "run" / "step-2").iterdir()}
    assert fetched == dict.fromkeys(files, 1)
    assert len(files) == 6


# --- of a run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    made = tmp_path_factory.mktemp("stores")
    ranks(1, save_inputs, made)
    return made


def save_inputs(folder):
    save_model(folder / "model")
    save_rows(folder / "rows.npy")


def in_store(folder, output, bucket, **sections):
    """A run whose data and copies are in a store."""
    made = tree(folder, output, **sections)
    (folder / bucket).mkdir()
    shutil.copy(folder / "rows.npy", folder / bucket)
    made["data"]["train"] = f"file://{folder}/{bucket}/rows.npy"
    made["checkpoint"] |= {"to": f"file://{folder}/{bucket}/run", "every": 2}
    return made


def test_a_run_reads_data_of_a_store_and_leaves_checkpoints_and_the_export_there(ranks, folder):
    made = in_store(folder, "whole", "whole-bucket", checkpoint={"export": True}, train={"steps": 3})
    assert field(ranks(1, train, made)[0], "step") == [1, 2, 3]
    output, url = Path(made["output"]), made["checkpoint"]["to"]
    assert list(Copies(url).look().steps) == [2, 3]
    exported = {path.name: path.read_bytes() for path in (output / "hf").iterdir()}
    assert {path.name: path.read_bytes() for path in (folder / "whole-bucket" / "run" / "hf").iterdir()} == exported
    assert "model.safetensors" in exported
    config = load(made)
    assert Folder.of(config).resume_from("auto") == output / "checkpoints" / "step-3"
    with pytest.raises(
        ConfigError, match=r"checkpoint\.to .* has checkpoints already \(step-3\): go on with --resume auto"
    ):
        Folder.of(config).refuse_copies(None, overwrite=False)
    shutil.rmtree(output / "checkpoints" / "step-3")
    found = Folder.of(config).resume_from("auto")  # the store's is newer
    assert shown(found) == f"{url}/step-3"
    assert ResumeHints(Folder.of(config), config, 1).command(found).endswith("--resume auto")
    elsewhere = ResumeHints(Folder(output), config, 1).command(found)
    assert elsewhere.endswith(f"--resume {url}/step-3 output=FOLDER")
    assert Folder.of(config).resume_from(f"{url}/step-2").name == "step-2"
    Folder.of(config).refuse_copies("auto", overwrite=False)


@pytest.mark.long
@pytest.mark.parametrize("behind", [False, True])
def test_two_ranks_go_on_from_the_store_behind_training_too(ranks, folder, behind):
    name = f"ranks-{behind}"
    expected = ranks(2, train, tree(folder, f"{name}-local"))[0]
    made = in_store(folder, name, f"{name}-bucket", checkpoint={"asynchronous": behind})
    ranks(2, train, made, None, 3)
    shutil.rmtree(made["output"])
    assert field(ranks(2, train, made, "auto")[0], "loss") == field(expected, "loss")[3:]
    assert list(Copies(made["checkpoint"]["to"]).look().steps) == [4, 5]
    assert field(metrics(made), "step") == [4, 5]


@pytest.mark.long
def test_a_store_that_has_checkpoints_is_not_written_over(ranks, folder):
    made = in_store(folder, "first", "used-bucket")
    ranks(1, train, made)
    other = made | {"output": f"{made['output']}-other"}
    ((_, error),) = ranks(1, train, other, check=False)
    assert "has checkpoints already (step-5): go on with --resume auto, give another URL, or start anew with" in error
    records = ranks(1, train, other, made["checkpoint"]["to"] + "/step-4")[0]
    assert field(records, "step") == [5]
    ranks(1, train, other, None, 1, True)
    assert list(Copies(made["checkpoint"]["to"]).look().steps) == [1]


@pytest.mark.long
@pytest.mark.parametrize("behind", [False, True])
def test_a_store_that_fails_on_the_way_is_a_warning_and_the_last_checkpoint_must_arrive(ranks, folder, behind):
    name = f"failing-{behind}"
    made = in_store(folder, name, f"{name}-bucket", checkpoint={"on_error": "warn", "asynchronous": behind})
    said, error = ranks(1, without_a_store_from_step_4_on, made)[0]
    assert len(said) == 1
    assert "the store has no checkpoint of step 4, and training goes on: " in said[0]
    assert "no route to host): look at the network and try again; " in said[0]
    assert f"{made['output']}/checkpoints/step-5 is whole." in error
    assert complete_steps(Path(made["output"]) / "checkpoints") == [4, 5]
    assert list(Copies(made["checkpoint"]["to"]).look().steps) == [2]


def without_a_store_from_step_4_on(made):
    """What is warned of, and the error with which the run ends."""
    put = LocalFileSystem.put_file

    def fails(self, path, *args, **options):
        if "step-2" not in path:
            raise RuntimeError("no route to host")
        return put(self, path, *args, **options)

    with mock.patch.object(LocalFileSystem, "put_file", fails), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        with pytest.raises(CopyError) as error:
            train(made)
    return [str(each.message) for each in caught if "store" in str(each.message)], str(error.value)


# --- exports --------------------------------------------------------------------------------------


def test_an_export_is_written_file_by_file_and_what_a_loader_opens_comes_last(tmp_path):
    for name in ("config.json", "model.safetensors.index.json", "model-1.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    url = "memory://bucket/hf"
    Store(url).write("model.safetensors", b"of an earlier one")
    Store(url).write("config.json", b"of an earlier one")
    Store(url).write("README.md", b"somebody's")
    with dying(MemoryFileSystem, 100) as written:
        copy_export(tmp_path, url)
    assert [name.removeprefix("/bucket/hf/") for name in written] == [
        "config.json",
        "model.safetensors",  # which go
        "model-1.safetensors",
        "tokenizer.json",
        "config.json",
        "model.safetensors.index.json",
    ]
    assert sorted(Store(url).objects()) == [
        "README.md",
        "config.json",
        "model-1.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_only_weights_of_an_earlier_export_make_way_for_one(tmp_path):
    (tmp_path / "model.safetensors").write_text("new")
    url = "memory://bucket/beside-others"
    others = ["other/model.safetensors", "other/model.safetensors.index.json", "mine.safetensors", "mine.index.json"]
    earlier = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
    for name in [*others, *earlier, "trained.safetensors"]:
        Store(url).write(name, b"x")
    copy_export(tmp_path, url)
    assert sorted(Store(url).objects()) == sorted(["model.safetensors", *others])


def test_an_export_is_not_copied_where_checkpoints_lie(tmp_path):
    url = "memory://bucket/run-with-checkpoints"
    Store(url).write("step-10/rank-00000.safetensors", b"x")
    for export in (partial(make().export, tmp_path / "hf", to=url), partial(copy_export, tmp_path, url)):
        with pytest.raises(ConfigError, match=rf"has checkpoints below it \(step-10\), .* give {url}/hf"):
            export()
    assert not list(tmp_path.iterdir())  # it was refused before anything was written
    assert list(Store(url).objects()) == ["step-10/rank-00000.safetensors"]


def test_an_engine_copies_its_export(tmp_path):
    folder = make().export(tmp_path / "hf", to="memory://bucket/hf")
    objects = Store("memory://bucket/hf").objects()
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == {n: o.size for n, o in objects.items()}
    assert any(name.endswith(".safetensors") for name in objects)


# --- zero3d ckpt ----------------------------------------------------------------------------------


def ckpt(capsys, *words):
    code = main(["ckpt", *words])
    said = capsys.readouterr()
    return code, said.out or said.err


def test_ckpt_lists_verifies_shows_exports_and_prunes_a_store(saved, tmp_path, capsys):
    first, second, _ = saved
    url = f"file://{tmp_path}/bucket/run"
    for each in (first, second):
        upload(url, each)
    Store(url).write("step-3/rank-00000.json", b"{}")
    Store(url).write("best", b"step-1\n")
    code, listed = ckpt(capsys, "ls", url, "--json")
    listed = json.loads(listed)
    assert code == 0
    assert [(each["path"], each["state"], each["best"]) for each in listed["checkpoints"]] == [
        (f"{url}/step-1", "whole", True),
        (f"{url}/step-2", "whole", False),
    ]
    assert listed["checkpoints"][0]["bytes"] == sum(path.stat().st_size for path in first.iterdir())
    assert [each["name"] for each in listed["leftovers"]] == ["step-3"]
    assert not list(located(url).glob("*.safetensors"))  # a list fetches no tensors
    code, verified = ckpt(capsys, "verify", url)
    assert code == 0
    assert [line.partition(" ")[0] for line in verified.splitlines()] == [f"{url}/step-1:", f"{url}/step-2:"]
    code, told_of_it = ckpt(capsys, "show", f"{url}/step-1")
    assert told_of_it.startswith(f"{url}/step-1: step 1,")
    code, refused = ckpt(capsys, "export", url, url, "--config", "none")
    assert code == 2
    assert "has checkpoints below it (step-1)" in refused
    code, _ = ckpt(capsys, "export", url, f"{url}/hf", "--config", "none")
    assert code == 0
    assert (tmp_path / "bucket" / "run" / "hf" / "model.safetensors").is_file()
    code, planned = ckpt(capsys, "prune", url, "--keep", "1", "--leftovers")
    assert list(Copies(url).look().objects) == ["step-1", "step-2", "step-3"]
    assert "step-1 (best)" in planned
    code, _ = ckpt(capsys, "prune", url, "--keep", "1", "--leftovers", "--yes")
    assert list(Copies(url).look().objects) == ["step-1", "step-2"]
    Store(url).remove(["best"])
    code, _ = ckpt(capsys, "prune", url, "--keep", "1", "--yes")
    assert list(Copies(url).look().objects) == ["step-2"]


def test_ckpt_finds_damage_in_a_store_and_refuses_urls_of_nothing(saved, tmp_path, capsys):
    url = f"file://{tmp_path}/bucket/run"
    upload(url, saved[0])
    torch.save({}, tmp_path / "bucket" / "run" / "step-1" / "rank-00000.safetensors")
    code, verified = ckpt(capsys, "verify", url)
    assert (code, "DAMAGED" in verified) == (1, True)
    for words, why in (
        (("ls", f"{url}/none"), "no checkpoint in"),
        (("verify", "s4://b"), "no store of the kind s4://"),
        (("prune", f"{url}/none", "--keep", "1"), "no checkpoint below"),
        (("prune", url), "nothing to remove was named"),
    ):
        code, said = ckpt(capsys, *words)
        assert code == BAD_INPUT
        assert why in said
