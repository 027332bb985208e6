"""`zero3d train` before a worker starts: whose values hold below the overrides, and what is refused at once."""

import argparse
import json
import os
import sys
import warnings

import pytest
from lock_holder import locked_by_another

from zero3d.cli import compare, plan_explain, simulate, train as verb
from zero3d.cli.main import main
from zero3d.config import Config, load
from zero3d.errors import ConfigError
from zero3d.train.lock import FolderLock

DEMO = load(verb.config_source(None, [])[1])


def read(*words):
    """What the verb would run, and its name."""
    return verb.read(argparse.Namespace(words=list(words), stage=None, steps=None, precision=None, deepspeed=None))


# --- the demo's values are the demo's -------------------------------------------------------------


def test_without_a_file_and_a_model_a_run_is_the_demo_with_what_is_overridden(tmp_path):
    assert DEMO.data.tokenizer == "bytes" != Config().data.tokenizer
    assert read() == ("demo", DEMO) == read("model.path=demo")
    for word in ("data.train=mytext", "optimizer.lr=1e-3", "model.init=random"):
        name, config = read(word)
        assert name == "demo"
        assert (config.data.length, config.optimizer.eps) == (DEMO.data.length, DEMO.optimizer.eps)
        assert (config.model.path, config.data.tokenizer, config.train.steps) == ("demo", "bytes", 500)


@pytest.mark.parametrize(("path", "name"), [
    ("models/llama", "llama"), ("gpt2", "gpt2"), ("my.model:build", "my.model-build"), ("..", "run"), ("a" * 99, "a" * 40),
    (" x/y z/ ", "y-z"),
])  # fmt: skip
def test_a_model_of_ones_own_starts_from_the_defaults(path, name):
    actual, config = read("data.train=a.txt", f"model.path={path}", "seed=3")
    assert config == load(None, ["data.train=a.txt", f"model.path={path}", "seed=3"])
    assert (config.data.tokenizer, config.optimizer.lr, config.train.steps, config.data.length) == (
        None,
        3e-4,
        None,
        1024,
    )
    assert actual == name


def test_the_last_model_counts_and_a_file_is_its_own_base(tmp_path):
    assert read("model.path=gpt2", "model.path=demo")[1] == DEMO
    (tmp_path / "mine.yaml").write_text("seed: 4")
    assert read(str(tmp_path / "mine.yaml"), "model.path=demo") == ("mine", load(None, ["seed=4"]))


def test_all_verbs_have_the_same_base(tmp_path, monkeypatch, capsys):
    for words in ([], ["seed=3"], ["model.path=gpt2"]):
        assert main(["config", "show", *words, "--json"]) == 0
        assert load(json.loads(capsys.readouterr().out)) == read(*words)[1]
    seen = []
    monkeypatch.setattr(simulate, "check_ranks", lambda _: seen.append("stop") or 1 / 0)
    for module, call in ((simulate, simulate.run), (plan_explain, lambda words: plan_explain.run(words, words.words))):
        monkeypatch.setattr(module, "load", lambda source, words: seen.append(load(source, words)) or 1 / 0)
        for words in (["seed=3"], ["model.path=gpt2"]):
            with pytest.raises(ZeroDivisionError):
                call(argparse.Namespace(words=words, ranks=None))
            assert seen.pop() == read(*words)[1]


def test_every_run_of_a_comparison_has_its_own_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(compare, "check_runs", lambda runs, configs, ranks: seen.extend(configs))
    with FolderLock() as lock:
        plan = compare.read(argparse.Namespace(words=["model.path=demo,gpt2"], ranks=2), lock)
    words = [[*plan.common, *variant.words] for variant in plan.variants]
    assert seen == [read(*item)[1] for item in words]
    assert [config.data.tokenizer for config in seen] == ["bytes", None]


# --- refused before a worker starts ---------------------------------------------------------------

REFUSED = {
    "batch": (["train.batch=5"], "train.batch 5 is not a multiple of"),
    "degrees": (["mesh.tp=3"], "2 ranks cannot form"),
    "a pipeline without micro-batches": (["mesh.pp=2", "train.micro_batch=1", "train.accumulate=1"], "1f1b"),
    "restarts below none": (["--max-restarts=-1"], "--max-restarts -1: type a whole number from 0"),
    "what cannot shrink": (["health.min_ranks=1"], "give train.batch and train.micro_batch"),
    "a used output": (["output=used"], "output used is used already (thesis.tex)"),
    "an output that is a file": (
        ["output=file.txt"],
        "output file.txt is a file, and a run writes a folder: choose one with output=FOLDER.",
    ),
    "an output that is a file, anew": (["output=file.txt", "--overwrite"], "file.txt is a file, and a run"),
    "an output that is a file, on": (["output=file.txt", "--resume=auto"], "file.txt is a file, and a run"),
    "an output below a file": (["output=file.txt/out"], "cannot be created (Not a directory)"),
    "an output far below a file": (["output=file.txt/a/b/out"], "cannot be created (Not a directory)"),
    "an output of a long name": ([f"output={'n' * 300}"], "cannot be created (File name too long)"),
    "resume of nothing": (["--resume", "nowhere"], "no checkpoint in nowhere"),
    "resume without a folder": (["--resume", "auto"], "name it with output=FOLDER"),
    "data that are not there": (["data.train=file.tx"], "file.tx does not exist. Did you mean file.txt?"),
    "held-out data that are not there": (["data.validation=nowhere/a.txt"], "Neither does its folder nowhere"),
    "a dangling link": (["data.train=link.txt"], "link.txt is a link to gone.txt, which does not exist"),
    "a pipe": (["data.train=pipe.txt"], "pipe.txt is a pipe, and a regular file is wanted"),
    "a device": (["data.train=/dev/zero", "data.format=text"], "/dev/zero is a device"),
    "a model that is not there": (["model.path=gpt-2"], "Did you mean 'gpt2'?"),
    "a tokenizer that is not there": (["data.tokenizer=byte"], "data.tokenizer=byte: no folder of that name"),
    "a cluster file that is none": (["plan.cluster=file.txt"], "cluster file file.txt holds the text 'text'"),
    "a long name": ([f"data.train={'n' * 300}"], "cannot be read: File name too long"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "run_job", lambda *_: pytest.fail("workers were started"))
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").touch()
    (tmp_path / "link.txt").symlink_to("gone.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_be_seen_is_refused_before_workers_start(folder, capsys, case):
    words, message = REFUSED[case]
    before = sorted(folder.rglob("*"))
    assert main(["train", "--ranks", "2", "data.validation=0", *words]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_who_has_started_the_ranks_starts_them_again():
    with pytest.raises(ConfigError, match=r"--max-restarts 1: who has started these 2 ranks .* leave it out"):
        verb.check_restarts(1, world=2)


def test_a_folder_that_a_run_writes_to_is_refused_before_workers_start(folder, capsys):
    with locked_by_another(folder / "used") as pid:
        for how in ([], ["--resume=auto"], ["--overwrite"]):
            assert main(["train", "--ranks", "2", "output=used", *how]) == 2
            assert f"in use by process {pid}" in capsys.readouterr().err


# --- warnings -------------------------------------------------------------------------------------


def test_a_warning_to_the_user_is_what_it_says_without_a_line_of_source(monkeypatch, capsys):
    def run(arguments):
        warnings.warn("nothing is saved yet", stacklevel=1)
        warnings.warn("this name goes", DeprecationWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(simulate, "run", run)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back after the test
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *shown, **_: sys.stderr.write(warnings.formatwarning(*shown[:4]))
        assert main(["simulate", "demo"]) == 0
    ours, *others = capsys.readouterr().err.splitlines()
    assert ours == "warning: nothing is saved yet"
    assert "test_before_workers.py" in others[0]
