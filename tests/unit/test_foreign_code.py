"""What a folder's JSON names as code is refused by name; nothing of it runs, whatever stands on stdin."""

import ast
import io
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import pytest
from corpora import save_tokenizer
from models import hf
from training import save_model, save_rows
from transformers import AutoTokenizer

from zero3d.config import Model
from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import ConfigError
from zero3d.models.foreign_code import no_foreign_code
from zero3d.models.open import open_model, positions

SRC = Path(__file__).parents[2] / "src" / "zero3d"
EVIL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

(Path(__file__).parent / "ran").touch()
Path("{marker}").touch()

class EvilConfig(LlamaConfig):
    model_type = "{kind}"

class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig

class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""
CALLS = ("from_pretrained", "from_config")
LOCK = "no_foreign_code()"


def change(file, **entries):
    """Put entries into a JSON file."""
    tree = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(tree | entries))


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that evil.py makes; every question would be answered with yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 99))
    return tmp_path / "marker"


def evil(folder, marker, kind="llama"):
    (folder / "evil.py").write_text(EVIL.format(marker=marker, kind=kind))
    return folder


@pytest.fixture
def saved(tmp_path, marker):
    """A Llama, a tokenizer beside it, and evil.py."""
    hf("llama").save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return evil(tmp_path / "model", marker)


CLASSES = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}


@pytest.mark.parametrize("how", ["folder", "config.json", "random", "positions"])
@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"auto_map": CLASSES}, "auto_map: evil.EvilConfig, auto_map: evil.EvilModel"),
        ({"auto_map": CLASSES, "model_type": "evil"}, "auto_map: evil.EvilConfig, auto_map: evil.EvilModel"),
        ({"auto_map": {"AutoConfig": "somebody/repository--evil.EvilConfig"}}, "somebody/repository--evil"),
        ({"text_config": {"auto_map": CLASSES}}, "auto_map: evil.EvilConfig"),
        ({"attn_implementation": "somebody/kernels"}, "attn_implementation: somebody/kernels"),
    ],
    ids=["known", "unknown", "elsewhere", "inner", "kernels"],
)
def test_a_models_code_is_refused_by_name(saved, marker, how, entries, named):
    change(saved / "config.json", **entries)
    path = str(saved / "config.json" if how == "config.json" else saved)
    opening = positions if how == "positions" else open_model
    with pytest.raises(ConfigError, match="refers to code in its folder") as error:
        opening(Model(path=path, init="random" if how == "random" else "pretrained"))
    assert f"{saved / 'config.json'} refers to code in its folder" in str(error.value)
    assert named in str(error.value)
    assert not marker.exists()


def test_what_generation_names_as_code_is_refused(saved, marker):
    change(saved / "generation_config.json", auto_map={"AutoGeneration": "evil.Evil"})
    with pytest.raises(
        ConfigError, match=r"generation_config\.json refers to code in its folder \(auto_map: evil\.Evil\)"
    ):
        open_model(Model(path=str(saved)))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("file", "entries", "named"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]}}, "evil.EvilTokenizer"),
        ("tokenizer_config.json", {"auto_map": ["evil.EvilTokenizer", None]}, "auto_map: evil.EvilTokenizer"),
        ("tokenizer_config.json", {"tokenizer_class": "EvilTokenizer"}, "tokenizer_class: EvilTokenizer"),
        ("config.json", {"auto_map": CLASSES, "model_type": "evil"}, "auto_map: evil.EvilConfig"),
        ("tokenizer_config.json", {"tokenizer_class": "AutoProcessor"}, "tokenizer_class: AutoProcessor"),
        ("tokenizer_config.json", {"tokenizer_class": "AutoProcessorFastFast"}, "tokenizer_class: AutoProcessorFast"),
        ("config.json", {"tokenizer_class": "RagTokenizer"}, "tokenizer_class: RagTokenizer"),
        ("config.4.0.0.json", {"tokenizer_class": "AutoProcessor"}, "tokenizer_class: AutoProcessor"),
        ("preprocessor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}, "auto_map: evil.Evil"),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}, "auto_map: evil.Evil"),
        ("video_preprocessor_config.json", {"auto_map": {"AutoVideoProcessor": "evil.Evil"}}, "auto_map: evil.Evil"),
    ],
    ids=["map", "list", "class", "config", "auto", "fast", "several", "version", "image", "processor", "video"],
)
def test_a_tokenizers_code_is_refused_by_name(saved, marker, file, entries, named):
    change(saved / file, **entries)
    for asked, model in ((str(saved), None), (None, str(saved))):
        with pytest.raises(ConfigError, match="refers to code in its folder") as error:
            load_tokenizer(asked, model)
        assert named in str(error.value)
    assert not marker.exists()


def save_processor(folder):
    """A tokenizer by whose class transformers looks for code of the folder, and asks."""
    change(folder / "tokenizer_config.json", tokenizer_class="AutoProcessor")
    change(folder / "preprocessor_config.json", auto_map={"AutoProcessor": "evil.EvilTokenizer"})
    return folder


def test_what_no_look_at_the_files_finds_is_not_run_either(saved, marker, monkeypatch):
    monkeypatch.setattr("zero3d.data.tokenizers.refuse_code_in", lambda folder: None)
    with pytest.raises(ConfigError, match="no tokenizer that can be loaded"):
        load_tokenizer(str(save_processor(saved)))
    assert not marker.exists()
    assert sys.stdin.readline() == "yes\n"  # nobody was asked, and stdin is there again


def test_a_folder_whose_code_is_trusted_by_mistake_runs_none(saved, marker):
    change(saved / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.EvilTokenizer"]})
    with pytest.raises(ConfigError, match=r"^EvilTokenizer of .* is code in a model's folder"), no_foreign_code():
        AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
    assert not marker.exists()


def test_what_loads_and_is_no_tokenizer_is_refused(saved, monkeypatch):
    monkeypatch.setattr("zero3d.data.tokenizers.refuse_code_in", lambda folder: None)
    change(saved / "tokenizer_config.json", tokenizer_class="LlamaConfig")
    (saved / "config.json").unlink()
    with pytest.raises(ConfigError, match="holds a LlamaConfig, which is not a tokenizer"):
        load_tokenizer(str(saved))


def test_code_that_nothing_names_is_no_obstacle(saved, marker):
    assert load_tokenizer(str(saved)).size > 0
    assert open_model(Model(path=str(saved))).weights is not None
    assert not marker.exists()


@pytest.mark.parametrize("text", ["{", "[" * 50_000, '{"auto_map": "\ud800"'], ids=["cut off", "deep", "surrogate"])
def test_json_that_is_none_is_an_error_of_ours(saved, text):
    (saved / "tokenizer_config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is (not JSON|nested too deeply|not UTF-8)"):
        load_tokenizer(str(saved))


def train(words):
    """A rank's `zero3d train WORDS` with yes on stdin: its exit code, and what it said."""
    from zero3d.tools.cli.main import main

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    leaving = mock.patch("zero3d.tools.cli.worker.os._exit", sys.exit)
    with (
        leaving,
        mock.patch("faulthandler.enable"),
        mock.patch("sys.stdin", io.StringIO("yes\n" * 99)),
        redirect_stderr(io.StringIO()) as said,
    ):
        try:
            code = main(["train", *words])
        except SystemExit as end:
            code = end.code
    return code, said.getvalue()


def test_yes_on_stdin_runs_no_code_and_ends_with_2(ranks, tmp_path, marker):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    save_processor(evil(save_tokenizer(tmp_path / "words"), marker, "evil"))
    words = [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.npy'}", "data.length=16",
             f"data.tokenizer={tmp_path / 'words'}", f"output={tmp_path / 'out'}", "--ranks=1", "--steps=1"]  # fmt: skip
    code, said = ranks(1, train, words)[0]
    assert not marker.exists()
    assert code == 2, said
    assert "preprocessor_config.json refers to code in its folder (auto_map: evil.EvilTokenizer)" in said
    assert said.count("\n") == 1


def calls(tree):
    """Those into transformers that read what a folder says, below a node."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in CALLS]


def test_every_call_into_transformers_is_locked_and_says_that_no_code_is_trusted():
    silent, unlocked, found = [], [], 0
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in CALLS):
            continue
        tree = ast.parse(text)
        locks = [node for node in ast.walk(tree) if isinstance(node, ast.With) and LOCK in map(ast.unparse, node.items)]
        locked = {call for lock in locks for call in calls(lock)}
        for call in calls(tree):
            found += 1
            trust = {key.arg: ast.unparse(key.value) for key in call.keywords}.get("trust_remote_code")
            if trust != "False" and not any(
                name in ast.unparse(call.func) for name in ("GenerationConfig", "PeftConfig")
            ):
                silent.append(f"{path.name}:{call.lineno}")
            unlocked += [] if call in locked else [f"{path.name}:{call.lineno}"]
    assert found >= 5
    assert silent == unlocked == []
