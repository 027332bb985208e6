"""README.md is one page, pages in two languages are alike, links lead somewhere, and the Python that is shown runs."""

import re
from pathlib import Path

import pytest
import torch
from models import VOCAB
from training import save_model

from zero3d.zero.optimizer import StepResult

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = READMES = [ROOT / name for name in ("README.md", "README.zh.md")]
TWINS = [CHINESE, *sorted(set((ROOT / "docs").glob("*.zh.md")) - {ROOT / "docs" / "index.zh.md"})]
PAGES = [*READMES, *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TABLE = re.compile(r"<!-- table [\w-]+ -->.*?<!-- end -->", re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
LEVEL = re.compile(r"^(#+) ", re.M)
PROMISES = re.compile(r"\[[^\]]*\]\(((?:tests|docs)/[^)#]+)")


@pytest.mark.parametrize("path", READMES, ids=["English", "Chinese"])
def test_a_readme_is_one_page(path):
    assert len(path.read_text().splitlines()) <= 140


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name)
def test_a_page_in_chinese_has_the_code_tables_and_chapters_of_its_english_twin(path):
    english, chinese = (each.read_text() for each in (path.with_name(path.name.replace(".zh", "")), path))
    assert FENCE.findall(english) == FENCE.findall(chinese)
    assert TABLE.findall(english) == TABLE.findall(chinese)
    levels = [[len(marks) for marks in LEVEL.findall(FENCE.sub("", text))] for text in (english, chinese)]
    assert levels[0] == levels[1] != []
    assert english.count("\n|") == chinese.count("\n|")
    assert english.count("\n- ") == chinese.count("\n- ")


def test_what_is_claimed_beside_other_systems_names_what_keeps_it():
    table = ENGLISH.read_text().split("## Why")[1].split("## Install")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("|")][2:]
    assert len(rows) == 9
    kept = [PROMISES.findall(ours) for _, _, ours, *_ in rows]
    assert kept.count([]) == 1  # the row in which others are ahead
    assert all((ROOT / path).is_file() for paths in kept for path in paths)


def anchors(path):
    """The addresses of a page's headings, as GitHub makes them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(FENCE.sub("", path.read_text())))
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_within_the_repository_leads_somewhere(path):
    targets = LINK.findall(FENCE.sub("", path.read_text()))
    assert targets or path not in READMES
    for target in targets:
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            other = path.parent / name if name else path
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), target


def python_of(path):
    """The first block of Python on a page."""
    return next(block for language, block in FENCE.findall(path.read_text()) if language == "python")


def batches(number):
    """Batches of token ids that are their own labels."""
    ids = torch.randint(3, VOCAB, (number, 2, 16))
    return [{"input_ids": each, "labels": each} for each in ids]


def test_the_python_that_the_readme_shows_trains_saves_and_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "path" / "to" / "model")
    names = {"loader": batches(2)}
    exec(python_of(ENGLISH), names)
    assert isinstance(names["result"], StepResult)
    assert names["result"].reason == "applied"
    assert (tmp_path / "checkpoints" / "step-2" / "manifest.json").is_file()
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_the_python_of_the_api_page_accumulates_and_that_of_checkpoints_goes_on(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "model"))
    names = {"model": model, "loader": batches(4)}
    exec(python_of(ROOT / "docs" / "api.md"), names)
    assert names["result"].reason == "applied"
    assert names["engine"].steps == 1
    exec(python_of(ROOT / "docs" / "checkpoints.md"), names)
    assert names["loop"] == {"epoch": 3}
    assert names["engine"].resumed.startswith("bitwise")
