"""`zero3d train` before a worker starts: whose values hold below the overrides, and what is refused at once."""

import argparse
import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
from lock_holder import locked_by_another

from zero3d.config import Config, load
from zero3d.data.tokenizers import check_template
from zero3d.errors import ConfigError
from zero3d.tools.cli import compare, plan_explain, simulate, train as verb
from zero3d.tools.cli.main import main
from zero3d.tools.cli.preflight import check_key
from zero3d.train.lock import FolderLock
from zero3d.train.setup.left_out import load_filled
from zero3d.train.setup.packages import is_installed

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
    assert config == load_filled(None, ["data.train=a.txt", f"model.path={path}", "seed=3"]).config
    assert (config.data.tokenizer, config.optimizer.lr, config.train.steps, config.data.length) == (
        "bytes" if path in ("gpt2", "my.model:build") else None,  # a folder brings its own
        3e-4,
        None,
        1024,
    )
    assert actual == name


def test_the_last_model_counts_and_a_file_is_its_own_base(tmp_path):
    assert read("model.path=gpt2", "model.path=demo")[1] == DEMO
    (tmp_path / "mine.yaml").write_text("seed: 4")
    assert read(str(tmp_path / "mine.yaml"), "model.path=demo") == ("mine", load_filled(None, ["seed=4"]).config)


def test_all_verbs_have_the_same_base(tmp_path, monkeypatch, capsys):
    for words in ([], ["seed=3"], ["model.path=gpt2"]):
        assert main(["config", "show", *words, "--json"]) == 0
        assert load(json.loads(capsys.readouterr().out)) == read(*words)[1]
    seen = []
    monkeypatch.setattr(simulate, "check_ranks", lambda _: seen.append("stop") or 1 / 0)
    for module, call in ((simulate, simulate.run), (plan_explain, lambda words: plan_explain.run(words, words.words))):
        monkeypatch.setattr(
            module, "load_filled", lambda source, words: seen.append(load_filled(source, words).config) or 1 / 0
        )
        for words in (["seed=3"], ["model.path=gpt2"]):
            with pytest.raises(ZeroDivisionError):
                call(argparse.Namespace(words=words, ranks=None, rl=None))
            assert seen.pop() == read(*words)[1]


def test_every_run_of_a_comparison_has_its_own_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(compare, "check_runs", lambda runs, configs, ranks: seen.extend(configs))
    with FolderLock() as lock:
        plan = compare.read(argparse.Namespace(words=["model.path=demo,gpt2"], ranks=2), lock)
    words = [[*plan.common, *variant.words] for variant in plan.variants]
    assert seen == [read(*item)[1] for item in words]
    assert [config.data.length for config in seen] == [128, 1024]


# --- refused before a worker starts ---------------------------------------------------------------

REFUSED = {
    "batch": (["train.batch=5"], "train.batch 5 is not a multiple of"),
    "degrees": (["mesh.dp=3"], "2 ranks cannot form"),
    "heads that tp does not divide": (["mesh.tp=4"], "tp=4 cannot split num_attention_heads=6: 6 / 4 is not a whole number"),
    "a vocabulary that tp does not divide": (["model.path=odd-words.json", "data.length=8", "mesh.tp=2"], "tp=2 cannot split vocab_size=257: 257 / 2 is not a whole number. Pad it before training: model.resize_token_embeddings(pad_to_multiple_of=2) makes them 258; or keep"),
    "heads of a folder": (["model.path=bare", "model.init=random", "data.tokenizer=bytes", "data.length=8", "mesh.tp=4"], "tp=4 cannot split num_key_value_heads=2"),
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
    "a pipe": (["data.train=pipe.txt"], "pipe.txt is a pipe, not a regular file"),
    "a device": (["data.train=/dev/zero", "data.format=text"], "/dev/zero is a device"),
    "a model that is not there": (["model.path=gpt-2"], "Did you mean 'gpt2'?"),
    "a tokenizer that is not there": (["data.tokenizer=byte"], "data.tokenizer=byte: no folder of that name"),
    "a cluster file that is none": (["plan.cluster=file.txt"], "cluster file file.txt holds the text 'text'"),
    "a long name": ([f"data.train={'n' * 300}"], "cannot be read: File name too long"),
    "a model of a hub": (["model.path=meta-llama/Llama-3.1-8B"], "zero3d downloads nothing: fetch a model (hf download NAME --local-dir FOLDER)"),
    "a folder that is not there": (["model.path=./nofolder"], "model.path './nofolder' is not a folder, a config.json"),
    "a model without config": (["model.path=used"], "used has no config.json (it has thesis.tex): give a folder written"),
    "a model without weights": (["model.path=bare"], "bare has no weights (it has none): save it with save_pretrained"),
    "a config that is cut off": (["model.path=cut.json"], "cut.json is not a config that transformers knows: it is not JSON"),
    "a model of no known type": (["model.path=odd.json", "data.length=8"], "odd.json: the installed transformers does not know the model_type 'llama9'"),
    "attention nobody knows": (["model.attn=quick"], "model.attn=quick: the installed transformers does not know it: type eager, sdpa"),
    "a folder without data": (["data.train=used"], "the folder used holds 1 files, none of which ends in .txt .md"),
    "a folder without data of its format": (["data.train=bare", "data.format=npy"], "none of which ends in .npy"),
    "a function of no module": (["model.path=no_module:build"], "model.path 'no_module:build' cannot be imported from"),
    "values of no module": (["evaluate.function=no_module:f"], "evaluate.function 'no_module:f' cannot be imported from"),
    "a class of no module": (["callbacks=no_module:C"], "No module named 'no_module'"),
    "data of no module": (["data.train=no_module:rows"], "data.train 'no_module:rows' cannot be imported from"),
    "no tokenizer in the model": (["model.path=bare", "model.init=random", "data.train=file.txt", "data.length=8"], "bare holds no tokenizer that can be loaded (it has no tokenizer.json"),
    "a tokenizer's folder without one": (["data.tokenizer=used"], "used holds no tokenizer that can be loaded"),
    "sequences longer than a preset's positions": (["data.length=1024"], "data.length=1,024 is more than the model's 512 positions"),
    "sequences longer than a config's": (["model.path=bare", "model.init=random", "data.tokenizer=bytes", "data.train=file.txt", "data.length=32"], "the model's 16 positions: set data.length=16"),
    "chats without a template": (["data.tokenizer=bytes", "data.train=chats.jsonl"], "the tokenizer bytes has no chat template: take a chat model"),
    "chats for a folder without a template": (["data.tokenizer=plain", "data.train=chats.jsonl"], "the tokenizer plain has no chat template"),
    "an optimizer of another name": (["optimizer.name=lion"], "optimizer.name takes adamw, muon or adamw8bit; found the text 'lion'"),
    "nobody logged in to wandb": (["log.to=wandb"], "log.to=wandb needs a key of Weights & Biases, and there is none: type `wandb login`"),
    "a tracker nobody knows": (["log.to=wanbd"], "found the text 'wanbd'. Did you mean wandb?"),
}  # fmt: skip
OF_RANKS = ("batch", "degrees", "a pipeline without micro-batches", "what cannot shrink")  # needs their number
MISSING = {
    "peft": (["lora.rank=4"], "lora.rank needs peft: pip install 'zero3d[hf]'."),
    "PIL": (["data.images=."], "data.images needs Pillow: pip install 'zero3d[vlm]'."),
    "pyarrow": (["data.train=rows.parquet"], "rows.parquet: reading parquet needs pyarrow: pip install 'zero3d[data]'."),
    "tensorboard": (["log.to=tensorboard"], "log.to=tensorboard needs tensorboard: pip install 'zero3d[tensorboard]'."),
    "flash_attn": (["model.attn=flash_attention_2"], "model.attn=flash_attention_2 needs the package flash_attn, which is not installed: install flash-attn for this GPU, or set model.attn=sdpa."),
    "wandb": (["log.to=wandb"], "log.to=wandb needs wandb: pip install 'zero3d[wandb]'."),
    "mlflow": (["log.to=mlflow"], "log.to=mlflow needs mlflow: pip install 'zero3d[mlflow]'."),
    "prometheus_client": (["log.to=prometheus"], "log.to=prometheus needs prometheus-client: pip install 'zero3d[prometheus]'."),
    "opentelemetry.sdk.metrics": (["log.to=otel"], "log.to=otel needs opentelemetry-sdk: pip install 'zero3d[otel]'."),
    "opentelemetry.exporter.otlp.proto.http": (["log.to=otel"], "log.to=otel needs opentelemetry-exporter-otlp-proto-http: pip install 'zero3d[otel]'."),
    "alembic": (["log.to=mlflow"], "log.to=mlflow without MLFLOW_TRACKING_URI needs alembic: pip install 'zero3d[mlflow]'."),
    "transformers": (["seed=1"], "zero3d train needs transformers for its model: pip install 'zero3d[hf]'"),
}  # fmt: skip
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
AT_ONCE = """
import json, sys
from contextlib import redirect_stderr
from io import StringIO
from zero3d.tools.cli import train as verb
from zero3d.tools.cli.main import main

verb.run_job = lambda job: print("workers were started") or 99
for case, words, missing in json.load(sys.stdin):
    said = StringIO()
    if missing:
        sys.modules[missing] = None
    with redirect_stderr(said):
        code = main(["train", "data.validation=0", *words])
    if missing:
        del sys.modules[missing]
    print(json.dumps([case, code, said.getvalue(), sorted({"torch", "transformers", "wandb"} & set(sys.modules))]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "run_job", lambda *_: pytest.fail("workers were started"))
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").touch()
    (tmp_path / "link.txt").symlink_to("gone.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "rows.parquet").touch()
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / "plain").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "plain" / name).write_text("{}")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "odd.json").write_text(json.dumps(CONFIG | {"model_type": "llama9"}))
    (tmp_path / "odd-words.json").write_text(json.dumps(CONFIG | {"vocab_size": 257}))
    (tmp_path / "cut.json").write_text(json.dumps(CONFIG)[:-5])
    for name in ("wandb", "mlflow"):
        write_package(tmp_path / "packages" / name)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_")) or name == "NETRC"]:
        monkeypatch.delenv(name)
    return tmp_path


def write_package(folder):
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_be_seen_is_refused_before_workers_start(folder, capsys, case):
    words, message = REFUSED[case]
    before = sorted(folder.rglob("*"))
    assert main(["train", "--ranks", "2", "data.validation=0", *words]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("package", MISSING)
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(folder, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    words, message = MISSING[package]
    assert main(["train", "--ranks", "2", "data.validation=0", *words]) == 2
    assert capsys.readouterr().err == f"ConfigError: {message}\n"


def test_none_of_this_waits_for_torch_or_transformers(folder):
    """Without --ranks, too, where torch counts devices."""
    asked = [(case, ["--ranks=2"] * (case in OF_RANKS) + words, None) for case, (words, _) in REFUSED.items()]
    asked += [(package, words, package) for package, (words, _) in MISSING.items()]
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    messages = {case: message for case, (_, message) in (REFUSED | MISSING).items()}
    assert [case for case, *_ in told] == list(messages)
    for case, code, said, imported in told:
        assert (code, imported) == (2, []), case
        assert messages[case] in said


@pytest.mark.parametrize(
    ("file", "text"), [("chat_template.jinja", "{{ messages }}"), ("tokenizer_config.json", '{"chat_template": "x"}')]
)
def test_chats_begin_where_a_tokenizers_files_have_a_template(folder, file, text):
    with pytest.raises(ConfigError, match="the tokenizer plain has no chat template"):
        check_template("plain", None)
    (folder / "plain" / file).write_text(text)
    check_template("plain", None)


def test_a_start_says_how_many_ranks_there_are_and_where_they_share_cores():
    assert verb.starting(1, 2) == "starting 1 rank: torch is imported, model and data are read"
    assert verb.starting(2, 2) == "starting 2 ranks: torch is imported, model and data are read"
    assert verb.starting(16, 2).endswith("; this machine has 2 CPU cores, which they share")


def test_a_folder_of_wandbs_in_the_current_one_is_no_package(folder, monkeypatch):
    (folder / "wandb_runs").mkdir()
    monkeypatch.syspath_prepend(folder)
    assert find_spec("wandb_runs") is not None
    assert not is_installed("wandb_runs")
    assert is_installed("pytest")
    assert not is_installed("wandb_runs_of_nobody.inner")


@pytest.mark.parametrize(
    ("where", "value"),
    [("WANDB_API_KEY", "x"), ("WANDB_IDENTITY_TOKEN_FILE", "x"), ("WANDB_MODE", "offline"), ("NETRC", "file.txt")],
)
def test_a_run_with_a_key_or_that_needs_none_begins(folder, monkeypatch, where, value):
    with pytest.raises(ConfigError, match="there is none: type `wandb login`"):
        check_key("mine")
    monkeypatch.setenv(where, value)
    check_key("mine")


@pytest.mark.parametrize("place", [".netrc", "_netrc", ".config/wandb/settings", "wandb/settings"])
def test_a_file_that_may_hold_a_key_is_left_to_wandb(folder, place):
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).touch()
    check_key("mine")


def test_a_run_that_goes_on_may_have_nothing_to_log_and_needs_no_key(folder, monkeypatch):
    monkeypatch.setattr(verb, "run_job", lambda job: 0)
    assert main(["train", "--ranks", "2", "output=fresh", "--resume=auto", "log.to=wandb"]) == 0


def test_own_code_may_register_a_type_that_transformers_does_not_know(folder, monkeypatch):
    monkeypatch.setattr(verb, "run_job", lambda job: 0)
    words = ["model.path=odd.json", "data.tokenizer=bytes", "data.length=8", "data.train=file.txt"]
    assert main(["train", "--ranks", "2", *words, "callbacks=json:JSONEncoder"]) == 0


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
