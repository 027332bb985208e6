"""`zero3d completion SHELL`: prints a script with which a shell completes verbs, options, files and keys of YAML."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from zero3d.config.keys import KEYS
from zero3d.tools.cli.main import build_parser
from zero3d.tools.cli.verbs import VERBS

SHELLS = {  # and what to type once
    "bash": 'eval "$(zero3d completion bash)" in ~/.bashrc',
    "zsh": "zero3d completion zsh > ~/.zfunc/_zero3d with fpath+=(~/.zfunc) before compinit in ~/.zshrc",
    "fish": "zero3d completion fish | source in ~/.config/fish/config.fish",
}
PATHS = {
    "FILE": shtab.FILE,
    "CONFIG": shtab.FILE,
    "JSON": shtab.FILE,
    "FOLDER": shtab.DIRECTORY,
    "OUTPUT": shtab.DIRECTORY,
}  # by metavar
NO_SPACE = """
# A key goes on with its value: no space behind "=".
_zero3d_complete() {
  _shtab_zero3d "$@"
  [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o filenames -F _zero3d_complete zero3d
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the shell."""
    once = "; ".join(SHELLS.values())
    parser.add_argument("shell", choices=list(SHELLS), help=f"type once: {once}")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    parser = build_parser(VERBS)
    for action in actions(parser):
        if action.dest == "key":
            action.choices = list(KEYS)
        place = WORDS if action.dest == "words" and action.metavar != "TEXT" else PATHS.get(str(action.metavar))
        if place is not None:
            action.complete = place  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell), end=NO_SPACE if arguments.shell == "bash" else "\n")
    return 0


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a parser and of the parsers below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions(below)


_KEYS = " ".join(f"{key}=" for key in KEYS)
WORDS = {  # of CONFIG KEY=VALUE
    "bash": "_zero3d_words",
    "zsh": "_zero3d_words",
    "fish": "(_zero3d_words)",
    "preamble": {
        "bash": f"""_zero3d_words() {{
  compgen -f -- "$1"
  compgen -W "{_KEYS}" -- "$1"
}}""",
        "zsh": f"""_zero3d_words() {{
  _files
  compadd -S "" -- {_KEYS}
}}""",
        "fish": f"""function _zero3d_words
  __fish_complete_path (commandline -ct)
  string join \\n {_KEYS}
end""",
    },
}
