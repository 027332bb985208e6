"""`zero3d VERB ...`: reads the command line and maps errors to exit codes.

0  done        1  a failing machine: one line; a bug: its callstack        2  bad input: one line on stderr
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import sys
import warnings
from collections.abc import Container, Sequence
from difflib import get_close_matches
from importlib import import_module
from textwrap import fill
from typing import Any, NoReturn

from zero3d import __version__
from zero3d.errors import ConfigError, Zero3dError, short
from zero3d.tools.cli.verbs import VERBS

IN_PYTHON = warnings.formatwarning


class Parser(argparse.ArgumentParser):
    """Parses like argparse; its errors are one line, like all others, and name what was probably meant.

    The arguments it makes say which parser that was: the innermost one, of the verb or of its action.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        match = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        wrong, choices = match.groups() if match else ("", "")
        self.refuse(message, wrong, re.findall(r"[\w-]+", choices))

    def refuse_option(self, word: str) -> NoReturn:
        """Raise ConfigError with the nearest of the options."""
        known = re.findall(r"--[a-z][\w-]*", self.format_help())
        self.refuse(f"unrecognized arguments: {word}", word.partition("=")[0], known)

    def refuse(self, message: str, wrong: str, known: Sequence[str]) -> NoReturn:
        """Raise ConfigError with the known word nearest to the wrong one."""
        near = get_close_matches(short(wrong), known, 1)
        message = re.sub(r"\S{61,}", lambda long: short(long[0]), message)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{message}.{meant} See what it takes: {self.prog} --help")


def build_parser(typed: Container[str]) -> Parser:
    """Make the parser of all verbs; only modules of verbs among the typed words are imported."""
    parser = Parser(
        prog="zero3d",
        description="Train models that do not fit on one device: ZeRO as the data axis of 3D parallelism.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zero3d {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (summary, _) in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=summary,
            description=fill(summary),
            epilog=VERBS[name].epilog(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name in typed:
            import_module(f"zero3d.tools.cli.{name}").add_arguments(verb)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse options and KEY=VALUE words in any order; argparse alone refuses words after an option after words."""
    parser = build_parser([word for word in words if word in VERBS][:1])
    arguments, late = parser.parse_known_args(words)
    wrong = late if not hasattr(arguments, "words") else [word for word in late if word.startswith("-")]
    if wrong:
        arguments.parser.refuse_option(wrong[0])
    if late:
        arguments.words += late
    return arguments


def format_warning(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    """Return a warning to the user as what it says alone, one to programmers with its line of source, too."""
    if category is UserWarning:
        return f"warning: {message}\n"
    return IN_PYTHON(message, category, *place, **line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        atexit.register(gc.freeze)  # what caches of a process keep is not searched for garbage as it ends
    warnings.formatwarning = format_warning
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?" instead of failing
    try:
        arguments = parse(words)
        return int(import_module(f"zero3d.tools.cli.{arguments.verb}").run(arguments))
    except Zero3dError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough; nothing more may be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
