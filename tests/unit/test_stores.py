"""Object stores: what a URL is, what a store says when it fails, and files that come to this host once, within a limit."""

import os
import threading
from importlib import import_module
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from zero3d.config import load
from zero3d.data.fetched import fetch_data
from zero3d.errors import BAD_INPUT, ConfigError, DataError
from zero3d.stores import cache
from zero3d.stores.cache import fetch, fetch_all, hold, make_room, origin, place_of, shown
from zero3d.stores.store import Store
from zero3d.stores.urls import check_shared, check_url, is_url
from zero3d.tools.cli.main import main


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    yield f"{request.param}://{tmp_path}/bucket/run"
    MemoryFileSystem.store.clear()


def filled(url, objects):
    made = Store(url)
    for name, data in objects.items():
        made.write(name, data)
    return made


# --- URLs -----------------------------------------------------------------------------------------


def test_urls_are_told_from_paths():
    assert all(map(is_url, ("s3://bucket/run", "gs://b", "HF://datasets/a/b", "memory://x", "file:///tmp/x")))
    assert not any(map(is_url, ("run", "/tmp/s3:/x", "module:function", "C:/data", "s3:/bucket", "")))


def test_a_protocol_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match=r"^checkpoint\.to=s4://bucket: there is no store of the kind s4://: type s3"):
        check_url("s4://bucket", "checkpoint.to")


@pytest.mark.parametrize(
    ("protocol", "what"),
    [
        ("s3", r"s3://x/y needs s3fs: pip install 'zero3d\[s3\]'"),
        ("gs", r"gs://x/y needs gcsfs: pip install gcsfs"),
        ("rare", r"rare://x/y needs a package: Install rare\."),
    ],
)
def test_a_protocol_whose_package_is_missing_is_refused_with_what_to_install(monkeypatch, protocol, what):
    row = {"class": "no_such_package_of_stores.FileSystem", "err": "Install rare"}
    registry = import_module("fsspec.registry")  # fsspec.registry is a table in it
    monkeypatch.setitem(registry.known_implementations, protocol, row)
    monkeypatch.setattr(registry, "registry", {})
    with pytest.raises(ConfigError, match=f"^{what}"):
        check_url(f"{protocol}://x/y")


def test_memory_of_a_process_is_refused_where_others_need_it():
    check_shared("file:///tmp/x", "checkpoint.to")
    with pytest.raises(ConfigError, match="is memory of one process, which other ranks do not see"):
        check_shared("memory://x", "checkpoint.to")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("output=s3://b/run", "type output=FOLDER checkpoint.to=s3://b/run"),
        ("model.path=s3://b/m", "copy the folder to this host"),
        ("data.tokenizer=gs://b/t", "copy the folder to this host"),
        ("data.images=s3://b/i", "copy them to this host"),
        ("data.cache=s3://b/c", "name a folder of this host"),
        ("offload.directory=s3://b/o", "name a folder on a disk"),
        ("plan.cluster=s3://b/c.yaml", "copy the file to this host"),
    ],
)
def test_keys_that_take_no_url_are_refused_with_what_to_type(word, remedy, capsys):
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError) as refusal:
        load(None, [word])
    assert f"{key}={value} is in an object store; " in str(refusal.value)
    assert remedy in str(refusal.value)


@pytest.mark.parametrize(
    "words",
    [
        ["output=s3://b/run"],
        ["checkpoint.to=bucket/run"],
        ["checkpoint.to=s4://b/run"],
        ["checkpoint.to=memory://run"],
        ["data.train=s4://b/a.jsonl"],
        ["--resume=s4://b/run"],
        ["data.cache_limit=much"],
    ],
)
def test_a_run_is_refused_before_a_worker_starts(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zero3d.tools.cli.train.run_job", lambda *_: pytest.fail("workers were started"))
    assert main(["train", *words]) == BAD_INPUT
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert words[0].removeprefix("--").partition("=")[0] in said[0]


# --- objects --------------------------------------------------------------------------------------


def test_objects_are_written_listed_read_copied_and_removed(url, tmp_path):
    made = Store(url)
    assert made.objects() == {}
    (tmp_path / "file").write_bytes(b"12345")
    made.upload(tmp_path / "file", "step-1/a")
    made.write("best", b"step-1")
    assert {name: stored.size for name, stored in made.objects().items()} == {"step-1/a": 5, "best": 6}
    made.copy("step-1/a", "step-1/b")
    made.remove(["step-1/a", "step-1/none", "none"])
    assert sorted(made.objects()) == ["best", "step-1/b"]
    assert made.read("best") == b"step-1"
    made.download("step-1/b", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == b"12345"
    assert {name: stored.size for name, stored in Store(f"{url}/best/").objects().items()} == {"": 6}


def test_a_folder_goes_with_its_last_object_and_the_url_itself_stays(tmp_path):
    made = filled(f"file://{tmp_path}/run", {"step-1/a/x": b"1", "step-1/y": b"2", "step-2/x": b"3"})
    made.remove(["step-1/a/x"])
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["step-1", "step-2", "x", "y"]
    made.remove(["step-1/y", "step-2/x", "step-3/never"])
    assert list((tmp_path / "run").iterdir()) == []
    filled(f"file://{tmp_path}/run", {"step-4/a/x": b"1"}).remove(["step-4/a/x"])
    assert list((tmp_path / "run").iterdir()) == []


def test_an_object_arrives_whose_folder_another_process_removes_on_the_way(tmp_path, monkeypatch):
    made, makedirs, removed = filled(f"file://{tmp_path}/run", {}), os.makedirs, []

    def makes(path, *given, **named):
        makedirs(path, *given, **named)
        if not removed:
            removed.append(path)
            os.rmdir(path)

    monkeypatch.setattr(os, "makedirs", makes)
    made.write("step-1/x", b"1")
    assert removed
    assert made.read("step-1/x") == b"1"


def test_an_object_whose_folder_is_removed_again_and_again_is_an_error(tmp_path, monkeypatch):
    made, makedirs = filled(f"file://{tmp_path}/run", {}), os.makedirs
    monkeypatch.setattr(os, "makedirs", lambda path, *given, **named: (makedirs(path, *given, **named), os.rmdir(path)))
    with pytest.raises(FileNotFoundError):
        made.write("step-1/x", b"1")


def test_an_object_that_was_written_again_is_told_from_the_one_before(url):
    made = filled(url, {"a": b"1"})
    before = made.objects()["a"]
    made.write("a", b"22")
    assert made.objects()["a"] != before
    assert before.tag


def test_an_object_that_another_process_wrote_is_listed_where_listings_are_remembered(monkeypatch):
    finds = MemoryFileSystem.find

    def remembers(self, path, **options):  # as file systems of object stores do
        if path not in self.dircache:
            self.dircache[path] = finds(self, path, **options)
        return self.dircache[path]

    monkeypatch.setattr(MemoryFileSystem, "find", remembers)
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: self.dircache.clear())
    monkeypatch.setattr(MemoryFileSystem, "cachable", False)  # each process has a file system of its own
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    one, other = Store("memory://bucket/run"), Store("memory://bucket/run")
    one.write("a", b"1")
    assert sorted(one.objects()) == ["a"]
    other.write("b", b"22")
    other.remove(["a"])
    assert sorted(one.objects()) == ["b"]


class NoCredentialsError(Exception):
    """What clients of S3 raise, which is no OSError."""


@pytest.mark.parametrize(
    ("raised", "kind", "number"),
    [
        (FileNotFoundError("bucket/x"), FileNotFoundError, 2),
        (PermissionError("Access Denied"), PermissionError, 13),
        (NoCredentialsError("Unable to locate credentials"), PermissionError, 13),
        (RuntimeError("odd\nanswer"), ConnectionError, None),
        (OSError("[Errno 5] slow down"), ConnectionError, None),
        (OSError(28, "No space left on device"), OSError, 28),
    ],
)
def test_whatever_a_file_system_raises_is_an_error_of_the_system(monkeypatch, raised, kind, number):
    def fails(*_, **__):
        raise raised

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fails)
    with pytest.raises(OSError) as error:
        Store("memory://bucket").read("x")
    assert (error.type, error.value.errno) == (kind, number)
    assert "\n" not in str(error.value)
    assert kind is OSError or "memory://bucket/x" in str(error.value)


# --- the cache ------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """The names of what is downloaded."""
    names, download = [], Store.download

    def counts(self, name, path):
        names.append(name)
        download(self, name, path)

    monkeypatch.setattr(Store, "download", counts)
    return names


def cached(url, tmp_path, name="cache"):
    return place_of(url, Store(url).objects(), tmp_path / name / "stores")


def test_a_file_is_fetched_once_and_is_known_by_its_url(url, tmp_path, counted):
    filled(url, {"step-1/a": b"1234", "step-1/b": b"5"})
    place = cached(url, tmp_path)
    assert place.name == "run"
    assert not place.exists()
    assert not fetch(place / "step-1" / "c")
    assert not fetch(tmp_path / "elsewhere" / "a")
    assert fetch(place / "step-1" / "a")
    assert fetch(place / "step-1" / "a")
    assert counted == ["step-1/a"]
    assert (place / "step-1" / "a").read_bytes() == b"1234"
    assert shown(place / "step-1" / "a") == f"{url}/step-1/a"
    assert shown(tmp_path) == str(tmp_path)
    assert origin(place / ".." / "a") is None
    fetch_all(place)
    assert counted == ["step-1/a", "step-1/b"]
    assert cached(url, tmp_path) == place


def test_a_url_of_one_object_is_a_file(url, tmp_path):
    filled(url, {"corpus.jsonl": b"{}\n"})
    place = cached(f"{url}/corpus.jsonl", tmp_path)
    fetch_all(place)
    assert place.name == "corpus.jsonl"
    assert place.read_bytes() == b"{}\n"
    assert place.stat().st_mtime == 0


def test_who_comes_second_waits_and_downloads_nothing(url, tmp_path, monkeypatch, counted):
    filled(url, {"a": b"1234"})
    place, begun, may_end = cached(url, tmp_path), threading.Event(), threading.Event()
    download = Store.download

    def slow(self, name, path):
        begun.set()
        assert may_end.wait(60)
        download(self, name, path)

    monkeypatch.setattr(Store, "download", slow)
    threads = [threading.Thread(target=fetch, args=(place / "a",)) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert counted == ["a"]
    assert (place / "a").read_bytes() == b"1234"
    assert [path.name for path in place.iterdir()] == ["a"]


def test_a_file_that_is_not_as_long_as_listed_is_fetched_again_or_refused(url, tmp_path, counted):
    made = filled(url, {"a": b"1234"})
    place = cached(url, tmp_path)
    fetch(place / "a")
    (place / "a").write_bytes(b"12")
    fetch(place / "a")
    assert counted == ["a", "a"]
    assert (place / "a").read_bytes() == b"1234"
    made.write("a", b"12345")
    (place / "a").unlink()
    with pytest.raises(OSError, match="has 5 bytes now, and had 4 when it was listed"):
        fetch(place / "a")
    assert not (place / "a").exists()
    assert cached(url, tmp_path) != place


def test_files_used_longest_ago_make_room_but_not_those_that_are_held(url, tmp_path, counted):
    made = Store(url)
    for name in "abcd":
        made.write(f"{name}/x", b"12345678")
    places = [cached(f"{url}/{name}", tmp_path) for name in "abcd"]
    for number, place in enumerate(places[:3]):
        fetch(place / "x", limit=24)
        os.utime(place.parent / cache.LISTING, (number, number))
    with hold(places[0].parent):
        os.utime(places[0].parent / cache.LISTING, (0, 0))
        fetch(places[3] / "x", limit=24)
        assert [place.exists() for place in places] == [True, False, True, True]
    fetch(places[1] / "x", limit=24)  # which was missed
    assert counted == ["x"] * 5
    assert sum(place.exists() for place in places) == 3
    assert places[1].exists()


def test_a_file_that_is_there_already_is_used_when_it_is_asked_for(url, tmp_path, counted):
    filled(url, {f"{name}/x": b"12345678" for name in "abc"})
    places = [cached(f"{url}/{name}", tmp_path) for name in "abc"]
    for number, place in enumerate(places[:2], 1):
        fetch(place / "x")
        os.utime(place.parent / cache.LISTING, (number, number))
    fetch(places[0] / "x")
    fetch(places[2] / "x", limit=16)
    assert [place.exists() for place in places] == [True, False, True]
    assert counted == ["x"] * 3


def test_room_is_made_of_what_others_use_alone(url, tmp_path):
    filled(url, {"a": b"12345678"})
    place = cached(url, tmp_path)
    fetch(place / "a")
    make_room(place.parent, 100, limit=10)
    assert (place / "a").exists()


# --- data -----------------------------------------------------------------------------------------


def test_data_of_stores_become_files_of_this_host_and_others_stay(url, tmp_path):
    filled(url, {"corpus/a.jsonl": b"{}\n", "corpus/sub/b.jsonl": b"{}\n", "corpus/.git/x": b"1", "c.txt": b"text"})
    sources = [
        {"path": f"{url}/corpus", "weight": 1.0},
        {"path": f"{url}/c.txt", "weight": 2.0},
        {"path": "d.txt", "weight": 1.0},
    ]
    given = {"train": sources, "validation": [f"{url}/c.txt"], "cache": str(tmp_path / "cache")}
    fetched = fetch_data(load({"data": given}).data)
    paths = [source.path for source in fetched.data.train]
    assert paths[2] == "d.txt"
    assert [source.weight for source in fetched.data.train] == [1.0, 2.0, 1.0]
    assert fetched.data.validation == (paths[1],)
    found = sorted(
        os.path.relpath(os.path.join(place, name), paths[0]) for place, _, names in os.walk(paths[0]) for name in names
    )
    assert found == ["a.jsonl", "sub/b.jsonl"]
    assert fetch_data(load({"data": given}).data).digest == fetched.digest
    filled(url, {"c.txt": b"other text"})
    assert fetch_data(load({"data": given}).data).digest != fetched.digest
    assert fetch_data(load(None).data) == fetch_data(load(None).data)


def test_data_that_a_run_is_trained_on_stay_in_the_cache_until_it_lets_go_of_them(url, tmp_path):
    filled(url, {"a.txt": b"12345678", "b.txt": b"12345678", "other": b"1"})
    kept = tmp_path / "cache"
    fetched = fetch_data(load({"data": {"train": [f"{url}/a.txt", f"{url}/b.txt"], "cache": str(kept)}}).data)
    paths, other = [Path(path) for path in fetched.data.train], cached(f"{url}/other", tmp_path)
    make_room(other.parent, 1, limit=1)
    assert [path.read_bytes() for path in paths] == [b"12345678"] * 2
    for file in fetched.held:
        file.close()
    make_room(other.parent, 1, limit=1)
    assert not any(path.exists() for path in paths)


def test_data_that_are_not_there_or_larger_than_the_cache_are_refused(url, tmp_path):
    filled(url, {"a.txt": b"12345678"})
    for name in ("b.txt", "a"):
        with pytest.raises(DataError, match="does not exist: check the URL"):
            fetch_data(load({"data": {"train": [f"{url}/{name}"]}}).data)
    small = {"train": [f"{url}/a.txt"], "cache_limit": "7B", "cache": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match=r"data in object stores are 8 B, and data\.cache_limit is 7B"):
        fetch_data(load({"data": small}).data)
    assert not (tmp_path / "cache").exists()


def test_a_store_that_does_not_answer_is_told_as_such(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "find", fails)
    with pytest.raises(DataError, match=r"cannot be read: memory://b/a\.txt: RuntimeError: no route") as error:
        fetch_data(load({"data": {"train": ["memory://b/a.txt"]}}).data)
    assert error.value.exit_code == 1
    assert isinstance(error.value.__cause__, ConnectionError)
