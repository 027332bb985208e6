"""`zero3d completion SHELL`, `zero3d --version`, `help(zero3d)`."""

import pydoc
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import zero3d
from zero3d.config.keys import KEYS
from zero3d.tools.cli.completion import SHELLS
from zero3d.tools.cli.main import main
from zero3d.tools.cli.verbs import VERBS

ASK = """
source ./script
for line in "$@"; do
  read -ra COMP_WORDS <<< "$line"
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _zero3d_complete zero3d "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  echo "${COMPREPLY[@]}"
done
"""
COMPLETED = {
    "zero3d tra": "train",
    "zero3d train zero.sta": "zero.stage=",
    "zero3d train run.yaml --res": "--resume --resume-settings",
    "zero3d train ru": "run.yaml",
    "zero3d ckpt ver": "verify",
    "zero3d ckpt ls fo": "folder",
    "zero3d config explain zero.sta": "zero.stage",
    "zero3d completion fi": "fish",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_options_keys_and_files(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "run.yaml").touch()
    (tmp_path / "folder").mkdir()
    told = subprocess.run(["bash", "-c", ASK, "bash", *COMPLETED], cwd=tmp_path, capture_output=True, text=True)
    assert dict(zip(COMPLETED, told.stdout.splitlines(), strict=True)) == COMPLETED
    assert told.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_verb_and_key(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [verb for verb in VERBS if verb not in script] == []
    assert [key for key in KEYS if f"{key}=" not in script] == []
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_another_shell_is_refused_with_those_that_are_there(capsys):
    assert main(["completion", "fsh"]) == 2
    said = capsys.readouterr().err
    assert "'bash', 'zsh', 'fish'" in said or "bash, zsh, fish" in said
    assert "Did you mean fish?" in said


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "zero3d.__version__"}
    assert (ended.value.code, capsys.readouterr().out) == (0, f"zero3d {zero3d.__version__}\n")


def test_help_shows_every_public_name_and_an_example():
    shown = pydoc.plain(pydoc.render_doc(zero3d))
    assert [name for name in (*zero3d.__all__, "optim") if name not in zero3d.__doc__] == []
    assert "engine.backward(loss" in shown
