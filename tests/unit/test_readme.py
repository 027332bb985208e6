"""README.md is one page, pages in two languages are alike, links lead somewhere, and the Python that is shown runs."""

import json
import re
from pathlib import Path

import pytest
import torch
from models import VOCAB, hf
from training import save_model

import zero3d
from zero3d.zero.optimizer import StepResult

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = READMES = [ROOT / name for name in ("README.md", "README.zh.md")]
ALONE = {ROOT / "docs" / f"{name}.zh.md" for name in ("index", "questions")}  # pages in Chinese without an English twin
TWINS = [CHINESE, *sorted(set((ROOT / "docs").glob("*.zh.md")) - ALONE)]
PAGES = [*READMES, *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TABLE = re.compile(r"<!-- table [\w-]+ -->.*?<!-- end -->", re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
LEVEL = re.compile(r"^(#+) ", re.M)
RELEASE = re.compile(r"([\w-]+) (\d+\.\d+\.\d+)")
PROMISES = re.compile(r"\[[^\]]*\]\(([^)#]+)")
PEERS = [ROOT / "docs" / f"peers{language}.md" for language in ("", ".zh")]


@pytest.mark.parametrize("path", READMES, ids=["English", "Chinese"])
def test_a_readme_is_one_page(path):
    assert len(path.read_text().splitlines()) <= 130


@pytest.mark.parametrize("path", TWINS, ids=lambda path: path.name)
def test_a_page_in_chinese_has_the_code_tables_and_chapters_of_its_english_twin(path):
    english, chinese = (each.read_text() for each in (path.with_name(path.name.replace(".zh", "")), path))
    assert FENCE.findall(english) == FENCE.findall(chinese)
    assert TABLE.findall(english) == TABLE.findall(chinese)
    levels = [[len(marks) for marks in LEVEL.findall(FENCE.sub("", text))] for text in (english, chinese)]
    assert levels[0] == levels[1] != []
    assert english.count("\n|") == chinese.count("\n|")
    assert english.count("\n- ") == chinese.count("\n- ")


def comparison(path):
    """The peers that a page's table compares with, our cell of each row, and what is said below the table."""
    table, _, below = path.read_text().partition("\n| | zero3d |")[2].partition("\n\n")
    header, _, *rows = table.splitlines()
    return (
        re.split("[,、|]", header.replace(" ", "").strip("|")),
        [row.split("|")[2] for row in rows],
        below.partition("\n\n")[0],
    )


def test_what_is_claimed_beside_other_systems_names_what_keeps_it_and_what_is_lacking_is_bold():
    _, cells, _ = comparison(PEERS[0])
    assert len(cells) == 13
    kept = [PROMISES.findall(cell) for cell in cells]
    assert all((ROOT / "docs" / path).is_file() for paths in kept for path in paths)
    assert [cell for cell, paths in zip(cells, kept, strict=True) if not paths] == [" **one card, in checks** "]


def test_both_tables_compare_the_same_peers_in_the_same_rows_with_the_same_proofs():
    (peers, cells, _), (theirs, their_cells, _) = map(comparison, PEERS)
    assert peers == theirs
    theirs_in_english = [[proof.replace(".zh", "") for proof in PROMISES.findall(cell)] for cell in their_cells]
    assert [PROMISES.findall(cell) for cell in cells] == theirs_in_english
    assert [("**" in cell) for cell in cells] == [("**" in cell) for cell in their_cells]


@pytest.mark.parametrize("path", PEERS, ids=["English", "Chinese"])
def test_the_release_of_every_peer_is_named_below_the_table_with_the_month_it_was_read(path):
    peers, _, below = comparison(path)
    named = dict(RELEASE.findall(below))
    assert set(peers) - {"FSDP2", "Megatron-LM", "NeMoAutoModel"} <= named.keys()
    assert {"PyTorch", "Megatron-Core", "Bridge", "AutoModel"} <= named.keys()
    assert named == dict(RELEASE.findall(comparison(PEERS[0])[2]))
    assert re.search(r"December 2026|2026 年 12 月", below)


def test_no_peer_was_read_in_an_older_release_than_the_tests_install():
    installed = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    read = {name.lower().replace("py", ""): release for name, release in RELEASE.findall(comparison(PEERS[0])[2])}
    both = installed.keys() & read.keys()
    assert {"torch", "transformers", "accelerate", "deepspeed"} <= both
    assert [name for name in both if numbers(read[name]) < numbers(installed[name])] == []


def numbers(release):
    return [int(part) for part in release.split(".")]


@pytest.mark.parametrize("path", READMES, ids=["English", "Chinese"])
def test_the_flips_of_the_first_sentence_are_those_of_the_results(path):
    (run,) = json.loads((ROOT / "benchmarks" / "results" / "replay.json").read_text())["runs"]
    flips, sound = run["result"]["flips"], run["result"]["sound"]
    assert flips["false_alarms"] == sound["alarms"] == flips["applied"] == 0
    (first,) = (line for line in path.read_text().splitlines() if re.search("no false alarm|零误报", line))
    assert {int(each) for each in re.findall(r"\b(\d+) (?:of|bits|次)", first)} == {flips["planted"], flips["named"]}


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


def python_of(path, number=0):
    """A block of Python on a page, by its number."""
    return [block for language, block in FENCE.findall(path.read_text()) if language == "python"][number]


def batches(number):
    """Batches of token ids that are their own labels."""
    ids = torch.randint(3, VOCAB, (number, 2, 16))
    return [{"input_ids": each, "labels": each} for each in ids]


def test_the_python_that_the_readme_shows_trains_saves_and_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_bytes(ENGLISH.read_bytes()[:2048])
    names = {}
    exec(python_of(ENGLISH), names)
    assert isinstance(names["result"], StepResult)
    plain = names["result"].as_dict()
    assert list(plain) == list(StepResult._fields)
    assert {name: type(value) for name, value in plain.items()} == dict.fromkeys(plain, float) | {
        "applied": bool,
        "reason": str,
    }
    assert plain == {
        name: value if name == "reason" else value.item() for name, value in names["result"]._asdict().items()
    }
    assert (tmp_path / "checkpoints" / "step-2" / "manifest.json").is_file()
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_the_python_of_recipes_trains(tmp_path):
    blocks = [
        block for language, block in FENCE.findall((ROOT / "docs" / "howto.md").read_text()) if language == "python"
    ]
    loss, optimizer, _, fsdp2, ours = blocks  # the third streams to a sampler, as tests/ranks/test_streams.py does
    assert "fully_shard" in fsdp2
    loader = batches(1)
    names = {"torch": torch, "zero3d": zero3d, "loader": loader, "batch": loader[0]}
    names["model"] = hf("llama")
    exec(ours, names)
    exec(loss, names)
    assert names["engine"].step().reason == "applied"
    assert names["engine"].steps == 2
    names["model"] = hf("llama")
    exec(optimizer, names)
    exec(loss, names)
    assert names["engine"].step().reason == "applied"


def test_the_python_of_the_page_on_rl_gives_other_servers_all_weights():
    blocks = [block for language, block in FENCE.findall((ROOT / "docs" / "rl.md").read_text()) if language == "python"]
    given, in_parts, flushed = {}, {}, []

    class Server:
        def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
            given.update(named_tensors)
            flushed.append(flush_cache)

        def load(self, name, tensor, offset):
            assert offset == in_parts.get(name, 0)
            in_parts[name] = offset + tensor.numel()

    engine = zero3d.Engine(hf("llama"), precision="fp32")
    names = {"zero3d": zero3d, "engine": engine, "server": Server()}
    for block in blocks:
        if "server" in block:
            exec(block, names)
    names["refit"](names["server"], engine)
    weights = engine.whole_state_dict()
    assert given.keys() == in_parts.keys() == weights.keys()
    assert all(torch.equal(given[name], tensor.bfloat16()) for name, tensor in weights.items())
    assert in_parts == {name: tensor.numel() for name, tensor in weights.items()}
    assert flushed == [True]


def test_the_python_of_the_api_page_accumulates_and_that_of_checkpoints_goes_on(tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "model"))
    names = {"model": model, "loader": batches(4)}
    exec(python_of(ROOT / "docs" / "api.md"), names)
    assert names["result"].reason == "applied"
    assert names["engine"].steps == 1
    capsys.readouterr()
    exec(python_of(ROOT / "docs" / "api.md", 1), names)
    reduce, *units = capsys.readouterr().out.splitlines()
    assert reduce == "every_micro_batch"
    assert [line.partition(":")[0] for line in units] == [unit.name for unit in names["engine"].units]
    assert {line.partition("; ")[2] for line in units} == {"weights whole; gradients sent in fp32"}
    exec(python_of(ROOT / "docs" / "api.md", 2), names)
    assert capsys.readouterr().out.startswith("memory of rank 0 of 1 after 1 step\n")
    assert {"stage": 2, "accumulate": 4}.items() <= names["not_default"].items()
    assert names["tree"]["versions"]["torch"] == torch.__version__
    exec(python_of(ROOT / "docs" / "checkpoints.md"), names)
    assert names["loop"] == {"epoch": 3}
    assert names["engine"].resumed.startswith("bitwise")
