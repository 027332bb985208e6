"""Keys of an earlier version: one line with what to type now, the same in every verb; an old run's own file reads."""

import re
from pathlib import Path

import pytest
import yaml

from zero3d import config
from zero3d.config import load
from zero3d.config.keys import KEYS
from zero3d.config.retired import RETIRED
from zero3d.errors import ConfigError
from zero3d.tools.cli.main import main
from zero3d.tools.cli.planned_file import RunFile

DOCS = Path(__file__).parents[2] / "docs"
OLD = {"tensorboard": False, "wandb": None}  # what every config.yaml of an earlier version has in section log
WRITE_BACK = (
    "plan.write_back is retired: after ten steps a run writes its rates to {0}/profile.json, so leave plan.write_back "
    "out and type plan.cluster={0}/profile.json for the next run."
)


def written(file, **sections):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(sections))
    return file


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["log.tensorboard=true"], "log.tensorboard is retired: type log.to=tensorboard in its place."),
        (["log.tensorboard=false"], "log.tensorboard is retired: leave it out."),
        (["log.wandb=mine"], "log.wandb is retired: type log.to=wandb log.project=mine in its place."),
        (["log.wandb=my runs"], "log.wandb is retired: type log.to=wandb log.project='my runs' in its place."),
        (["log.wandb=null"], "log.wandb is retired: leave it out."),
        (
            ["log.wandb=b", "log.to=swanlab,wandb", "log.project=a"],
            "log.wandb is retired: type log.to=swanlab,wandb log.project=b in its place.",
        ),
        (
            ["log.wandb=b", "log.tensorboard=yes"],
            "log.tensorboard and log.wandb are retired: type log.to=tensorboard,wandb log.project=b in their place.",
        ),
        (["plan.write_back=true"], WRITE_BACK.format("OUTPUT")),
        (["plan.write_back=true", "output=runs/a"], WRITE_BACK.format("runs/a")),
        (
            ["plan.write_back=no", "log.wandb=none", "log.tensorboard=off"],
            "log.tensorboard, log.wandb and plan.write_back are retired: leave them out.",
        ),
    ],
)
def test_a_retired_key_is_answered_with_what_to_type_for_the_value_it_had(words, told):
    with pytest.raises(ConfigError) as caught:
        load(None, words)
    assert re.sub(r"^override '.*?': ", "", str(caught.value)) == told
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", [10**5000, {"a": 1}, [], "a\nb", "{}"], ids=lambda value: type(value).__name__)
def test_values_that_the_key_never_took_are_answered_in_one_line_too(value):
    for name in RETIRED:
        section, _, key = name.partition(".")
        with pytest.raises(ConfigError, match=rf"^{re.escape(name)} is retired: ") as caught:
            load({section: {key: value}})
        assert str(caught.value).isprintable()


def test_every_verb_answers_a_file_and_a_command_line_in_the_same_words(tmp_path, capsys):
    file = written(tmp_path / "run.yaml", model={"path": "gpt2"}, log={"wandb": "mine"})
    clean = written(tmp_path / "clean.yaml", model={"path": "gpt2"})
    line = "log.wandb is retired: type log.to=wandb log.project=mine in its place."
    verbs = (["train"], ["config", "show"], ["launch", "slurm"], ["plan", "explain"], ["simulate"])
    for words, where in (([file], f"{file}: "), ([clean, "log.wandb=mine"], "override 'log.wandb=mine': ")):
        for verb in verbs:
            assert main([*verb, *map(str, words)]) == 2
            assert capsys.readouterr().err.strip().endswith(f"{where}{line}"), verb
    assert main(["plan", str(file)]) == 2
    assert capsys.readouterr().err.strip().endswith(f"{file}: {line}")
    assert main(["config", "explain", "log.wandb"]) == 2
    assert capsys.readouterr().err.strip().endswith(line.replace("mine", "PROJECT"))


def test_an_unknown_key_beside_it_is_counted():
    with pytest.raises(ConfigError, match=r"log\.wandb is retired: .* place\. And 1 more problem: sede\."):
        load({"sede": 1, "log": {"wandb": "mine"}})


@pytest.mark.parametrize(
    ("log", "to", "project"),
    [
        (OLD | {"to": None, "project": "zero3d"}, None, "zero3d"),
        (OLD | {"to": ["mlflow"], "tensorboard": True}, ("mlflow", "tensorboard"), "zero3d"),
        (OLD | {"to": "wandb", "wandb": "b", "project": "a"}, ("wandb",), "b"),
    ],
)
def test_the_file_of_an_old_run_reads_as_the_keys_of_now(tmp_path, log, to, project):
    sections = {"log": log, "plan": {"cluster": None, "write_back": False}, "model": {"path": "gpt2"}}
    own = written(tmp_path / "out" / "config.yaml", output="runs/out", **sections)
    assert (load(own).log.to, load(own).log.project) == (to, project)
    assert not {"tensorboard", "wandb"} & RunFile.of(str(own)).tree["log"].keys()
    moved = written(tmp_path / "moved" / "config.yaml", output="runs/out", **sections)
    with pytest.raises(ConfigError, match="are retired"):
        load(moved)
    written(tmp_path / "moved" / "checkpoints" / "step-3" / "manifest.json")
    assert load(moved) == load(own)


def test_what_an_old_run_asked_of_its_cluster_file_is_left_out(tmp_path):
    own = written(
        tmp_path / "out" / "config.yaml", output="out", plan={"cluster": "c.yaml", "write_back": True}, log=None
    )
    assert load(own).plan == config.Plan(cluster="c.yaml")


@pytest.mark.parametrize("output", [None, 3, "a\0b", "x" * 5000])
def test_a_file_of_that_name_which_no_run_wrote_is_answered(tmp_path, output):
    with pytest.raises(ConfigError, match=r"log\.wandb is retired"):
        load(written(tmp_path / "config.yaml", output=output, log={"wandb": "mine"}))


def test_what_is_typed_now_exists_and_the_page_lists_every_key():
    for name, row in RETIRED.items():
        assert name not in KEYS
        assert row.now.keys() <= KEYS.keys()
        for page in ("retired.md", "retired.zh.md"):
            assert f"| `{name}` |" in (DOCS / page).read_text()
