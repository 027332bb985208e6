"""Every command that README and docs show is one: it parses, and with the file that they show it can start.

verb                      what is done with it here
config, launch            it is run, in a folder with README's run.yaml, examples/, models and data that pages name
plan --theory, explain    it is run
ckpt, report              it is run, in that folder, where `run` and `runs/llama` have two checkpoints
train, compare, simulate  configuration, ranks, batch and positions are checked, nothing is started
other plans, calibrate    its words are read
generate                  its options are checked
README's first block      it is typed in a copy of the project, in an environment of its own: an empty index takes the place of
                          PyTorch's, and what is installed here that of downloads. Not run: the downloads, the line for GPUs

Dotted names of zero3d, in the documents and in what the source says, lead somewhere.
"""

import ast
import importlib
import json
import pkgutil
import re
import shlex
import shutil
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pictures
import pytest
from bases import engine_of
from damage import edit
from environments import see_packages, typed as typed_in_bash
from models import hf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from training import save_model
from transformers import CONFIG_MAPPING

import zero3d
from zero3d.config import load, split_words
from zero3d.config.keys import KEYS
from zero3d.models.presets import PRESETS
from zero3d.tools.cli import compare, generate
from zero3d.tools.cli.main import main, parse
from zero3d.tools.cli.preflight import check_positions, check_world
from zero3d.tools.cli.train import check, read
from zero3d.tools.cli.verbs import VERBS
from zero3d.tools.cli.workers import ranks_here
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.spec_json import to_json
from zero3d.train.lock import FolderLock

ROOT = Path(__file__).parents[2]
README, CHINESE = (ROOT / name for name in ("README.md", "README.zh.md"))
TWINS = (  # in both languages
    "parallelism",
    "reproducibility",
    "checkpoints",
    "offload",
    "finetuning",
    "llava",
    "deepspeed",
    "plan",
    "migrate",
    "reliability",
    "doctor",
    "howto",
    "data",
    "cluster",
    "watching",
)
GUIDES = (*TWINS, *(f"{name}.zh" for name in TWINS), "compare", "config", "models", "questions.zh", "training")
PAGES = [README, CHINESE, *(ROOT / "docs" / f"{name}.md" for name in GUIDES)]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`((?:zero3d )?(?:" + "|".join(VERBS) + r") [^`]+)`")
LOOP = re.compile(r"for (\w+) in ([^;]+); do (.*); done")
COMMAND = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?zero3d (?!\w+:)(.*)")
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b|\[|^\w+$")
NAME = re.compile(r"\bzero3d(?:\.\w+)+")
FILES = (".md", ".yaml", ".json", ".html", ".py")


def commands(page):
    """The words after zero3d of every command on a page, without comments; `a|b` is two commands."""
    text = page.read_text()
    lines = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    lines += [f"zero3d {words.removeprefix('zero3d ')}" for words in INLINE.findall(FENCE.sub("", text))]
    for line in lines:
        loop = LOOP.match(line)
        each = [loop[3].replace(f"${loop[1]}", value) for value in loop[2].split()] if loop else [line]
        for found in filter(None, map(COMMAND.match, each)):
            words = re.split(r"\s#\s|\s{3,}", found[1])[0].strip()
            choice = re.search(r"[\w]+(?:\|\w+)+", words)
            if words.split()[0] in VERBS and not PLACEHOLDER.search(words.replace(choice[0], "") if choice else words):
                yield from (words.replace(choice[0], one) for one in choice[0].split("|")) if choice else [words]


def block_of(page, name):
    """The page's first block of YAML or JSON, saved under a name with that suffix."""
    block = next(block for kind, block in FENCE.findall(page.read_text()) if f".{kind}" == Path(name).suffix)
    Path(name).write_text(block)
    return name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the commands may be typed."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("models/llama", "models/llama-1b", "zero3d-demo/hf"):
        save_model(folder / name, max_position_embeddings=4096)
    pictures.save_model(folder / "models" / "llava-1.5-7b-hf", positions=2048)
    pictures.save_data(folder, name="llava_v1_5_mix665k.json")
    for name in ("text", "docs"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text("some text\n" * 99)
    for name in ("corpus/a.jsonl", "corpus/b.jsonl", "chats.jsonl", "a.txt", "b.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"text": "a b"}\n')
    save_run(folder / "run", folder / "models" / "llama")
    save_adapters(folder / "runs" / "lora", folder / "models" / "llama")
    (folder / "runs" / "llama").symlink_to(folder / "run")  # where README's run.yaml writes
    (folder / "cluster.json").write_text(json.dumps(to_json(cluster("h100", 8))))  # as `zero3d calibrate` leaves it
    return folder


def save_run(output, model):
    """What a run of the model leaves: its config.yaml and two checkpoints, of which the second is the best."""
    saved = zero3d.Engine(hf("llama", inner=96), stage=3, precision="bf16").save(output / "checkpoints")
    for step in (50, 100):
        named = saved.with_name(f"step-{step}")
        shutil.copytree(saved, named)
        edit(named, lambda manifest, step=step: manifest.update(step=step))
    shutil.rmtree(saved)
    (saved.parent / "best").symlink_to("step-100")
    (output / "config.yaml").write_text(f"model: {{path: {model}}}\n")


def save_adapters(output, model):
    """What a run with adapters beside the model leaves: its config.yaml and one checkpoint."""
    saved = engine_of(model, {"lora": {"rank": 2}}).save(output / "checkpoints")
    edit(saved.rename(saved.with_name("step-100")), lambda manifest: manifest.update(step=100))
    (output / "config.yaml").write_text(f"model: {{path: {model}}}\nlora: {{rank: 2}}\n")


@pytest.fixture
def typed(place, monkeypatch):
    """The folder, entered; train.yaml, which `zero3d plan --emit` would write, is README's run.yaml there."""
    monkeypatch.chdir(place)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("run.yaml", "train.yaml"):
        block_of(README, name)
    block_of(ROOT / "docs" / "training.md", "course.yaml")
    block_of(ROOT / "docs" / "finetuning.md", "lora.yaml")
    block_of(ROOT / "docs" / "watching.md", "watched.yaml")
    for name in ("mine.yaml", "ds.json"):
        block_of(ROOT / "docs" / "deepspeed.md", name)
    return place


def could_start(config, ranks):
    """Raises what would be raised before the first step."""
    check_world(config, ranks if ranks is not None else ranks_here(config.mesh))
    if ":" not in config.model.path:
        check_positions(config)


def tried(words):
    """Do with a command what the docstring's table says."""
    arguments = parse(words)
    if (
        words[0] in ("config", "launch", "completion")
        or words[:2] in (["plan", "--theory"], ["plan", "explain"])
        or words[0] == "report"
    ):
        assert main(words) == 0
    elif words[0] == "models":  # tests/unit/test_support.py runs it
        known = arguments.model is None or arguments.model in {*PRESETS, *CONFIG_MAPPING}
        assert known or main(words) == 0
    elif words[0] == "ckpt":
        for folder in ("hf", "out"):  # pages in two languages export there
            shutil.rmtree(folder, ignore_errors=True)
        assert main(words) == 0
    elif words[0] == "generate":
        generate.check(arguments)
    elif words[0] == "train":
        _, config = read(arguments)
        check(arguments, config, None)
        could_start(config, arguments.ranks)
    elif words[0] == "compare":
        with FolderLock() as lock:
            compare.read(arguments, lock)
    elif words[0] == "simulate":
        could_start(load(*split_words(arguments.words)), arguments.ranks)


SHOWN = [(page, words) for page in PAGES for words in commands(page)]
FIRST = {words: page for page, words in reversed(SHOWN)}  # pages in two languages show the same ones


def run_seldom(page, words):
    """Long where another page, or this one, has shown it before: it is typed in the same folder with the same files."""
    again = FIRST[words] != page
    return pytest.param(page, words, id=f"{page.stem}: {words}", marks=[pytest.mark.long] if again else [])


def test_all_pages_but_none_of_their_prose_are_read():
    assert len(SHOWN) >= 35
    assert {words.split()[0] for _, words in SHOWN} == set(VERBS)
    assert {page for page, _ in SHOWN} == set(PAGES)


@pytest.mark.parametrize(("page", "words"), [run_seldom(*shown) for shown in SHOWN])
def test_a_shown_command_can_be_typed_with_the_shown_file(typed, capsys, page, words):
    tried(shlex.split(words))


@pytest.mark.parametrize("target", ["slurm", "k8s", "torchrun"])
@pytest.mark.parametrize("options", [[], ["--nodes", "2"], ["--nodes", "4"]], ids=" ".join)
def test_launch_takes_the_readmes_own_file(typed, capsys, target, options):
    assert main(["launch", target, "run.yaml", *options]) == 0


def test_the_file_on_the_page_of_configurations_can_start(typed):
    config = load(block_of(ROOT / "docs" / "config.md", "shown.yaml"))
    for ranks in (1, 2, 8):
        could_start(config, ranks)


def test_scripts_and_targets_that_pages_name_are_there():
    makefile = (ROOT / "Makefile").read_text()
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]
    text = "\n".join(page.read_text() for page in pages if page.name != "CHANGELOG.md")
    scripts, targets = re.findall(r"\b(?:benchmarks|examples)/\w+\.py\b", text), re.findall(r"`make ([\w-]+)", text)
    assert {"benchmarks/tables.py", "benchmarks/gpu_check.py"} <= set(scripts)
    assert {"test", "demo", "docs"} <= set(targets)
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


# --- README's first block -----------------------------------------------------------------------


CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # as PyTorch's installation page has it
INSTALL = re.compile(r"pip install -c constraints\.txt '\.\[([\w,]+)\]'(?: --extra-index-url (\S+))?")


def pins():
    """The versions that constraints.txt asks for, by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("page", [README, CHINESE], ids=["English", "Chinese"])
def test_readme_installs_the_versions_of_the_tests_without_cuda_or_with_it(page):
    block = next(block for _, block in FENCE.findall(page.read_text()))
    (extras, index), (same, none) = INSTALL.findall(page.read_text())
    assert INSTALL.search(block)
    assert (index, none) == (CPU_INDEX, "")
    assert extras == same
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    asked = [*project["dependencies"], *(each for name in extras.split(",") for each in optional[name])]
    asked = [Requirement(each) for each in asked]
    pinned = pins()
    assert {each.name for each in asked} <= pinned.keys()
    assert [str(each) for each in asked if pinned[each.name] not in each.specifier] == []
    assert f"{pinned['torch']}+cpu" in SpecifierSet(f"=={pinned['torch']}")  # so that pip prefers that index's build


@pytest.mark.long
def test_readmes_first_block_installs_and_trains(tmp_path):
    for name, pinned in pins().items():
        if name in ("torch", "transformers") and metadata.version(name).partition("+")[0] != pinned:
            pytest.skip(f"constraints.txt asks for {name} {pinned}, and here is {metadata.version(name)}")
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (tmp_path / "index").mkdir()
    local = (tmp_path / "index").as_uri()
    environment, install, train = next(block for _, block in FENCE.findall(README.read_text())).splitlines()
    activate = environment.rpartition("&& ")[2]
    typed_in_bash(f"{environment}\npip uninstall --quiet --yes setuptools", tmp_path)  # Python 3.11 brings an old one
    see_packages(tmp_path / ".venv")
    indices = f"--index-url {local} --extra-index-url {local} --no-build-isolation"
    assert CPU_INDEX in install
    typed_in_bash(f"{activate}\n{install.replace(f'--extra-index-url {CPU_INDEX}', indices)}", tmp_path)
    words = train.partition("#")[0].strip()
    where = "python -c 'import zero3d; print(zero3d.__file__)'"
    script = f"{activate}\n{where}\n{words} train.steps=5 precision=fp32"
    first = typed_in_bash(script, tmp_path, OMP_NUM_THREADS="1").splitlines()[0]
    assert Path(first).is_relative_to(tmp_path / ".venv")
    assert (tmp_path / "zero3d-demo" / "metrics.jsonl").is_file()


# --- dotted names -------------------------------------------------------------------------------


PEERS = {"lightning", "axolotl", "vllm", "verl"}


def leads_somewhere(name):
    """Whether a dotted name is a module's, or a thing's in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name in PEERS:  # of an extra that is not installed: its own tests import it
                return True
            continue
        if getattr(found, "__file__", None) is None:  # a folder that is left over
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False


@cache
def texts_of_the_source():
    """Every text in the source that has such a name, error messages and docstrings among them, with its file."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
        found += [(path.name, text) for text in texts if NAME.search(text) or SHORT.search(text)]
    return found


def test_every_dotted_name_of_zero3d_leads_somewhere():
    documents = [*PAGES, *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    texts = [*texts_of_the_source(), *((page.name, page.read_text()) for page in documents)]
    named = {(where, name) for where, text in texts for name in NAME.findall(text) if not name.endswith(FILES)}
    assert len(named) > 20
    assert sorted((where, name) for where, name in named if not leads_somewhere(name)) == []


MODULES = "|".join(each.name for each in pkgutil.iter_modules(zero3d.__path__) if each.name != "engine")  # an Engine
SHORT = re.compile(rf"`((?:{MODULES})\.\w+(?:\.\w+)*)`")


def test_every_short_dotted_name_in_a_docstring_leads_somewhere():
    said = [(where, name) for where, text in texts_of_the_source() for name in SHORT.findall(text)]
    named = {(where, name) for where, name in said if name not in KEYS and not name.endswith(FILES)}
    assert len(named) > 5
    assert sorted((where, name) for where, name in named if not leads_somewhere(f"zero3d.{name}")) == []
