"""Tokenizers and chat templates of folders are tried on a sample first, in a process of its own, under limits.

    tokenizer.json    regular expressions that backtrack for ever, sizes that no memory has
    chat template     a program in Jinja: loops, strings that double

What goes wrong there is one error of ours; here it would stop a rank, or end it without a word: the tokenizers library
panics in Rust, or has the system abort. Whatever a template refuses of a sample is its right, and no error: it may want
other roles. The process is started anew, never forked, and has neither torch nor transformers: once for each content it
takes 0.2 s, and as long as the file takes to be loaded.

A text that only the data have may still go wrong: `told` makes panics and other failures of encoding a DataError, and
patience.py ends a template that loops.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from zero3d.errors import ConfigError, DataError, Zero3dError

SECONDS = 30  # of a processor; a tokenizer of 260,000 tokens loads in 3
MEMORY = 4 << 30  # bytes of addresses; the same one takes a tenth
LONG = 2000  # characters of a sample: a pattern that backtracks is beyond all patience by then
QUOTED = 200  # characters of what a library says
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?\n\n\tdef f(x):\r\n        return x**2  # \u4e2d e\u0301",
    *(character * LONG + end for end in ("", "!") for character in "aZx0 _-=.\n\u00e9\u4e2d"),  # "!": nearly a match
    *(both * (LONG // 2) for both in ("ab", "a ", "1.", " \n")),
)
SYSTEM, ASKED, ANSWERED = ({"role": role, "content": f"{role} says so"} for role in ("system", "user", "assistant"))
CONVERSATIONS = ([ASKED, ANSWERED], [SYSTEM, ASKED, ANSWERED, ASKED, ANSWERED])


# --- here -----------------------------------------------------------------------------------------


def try_tokenizer(folder: Path) -> None:
    """Try the tokenizer.json of a folder, if it has one. Raises ConfigError."""
    file = folder / "tokenizer.json"
    with suppress(OSError):  # whoever loads it says what is wrong with a file that cannot be read
        found = _fate(json.dumps({"tokenizer": str(file.absolute())}), hashlib.sha256(file.read_bytes()).hexdigest())
        if found is not None:
            raise ConfigError(
                f"{file} cannot be used: a process of its own that tried it on some texts {found}. Set data.tokenizer "
                "to another folder."
            )


def try_template(source: str, tokens: Mapping[str, Any], name: str) -> None:
    """Try a chat template, given the names of special tokens. Raises ConfigError, which calls the tokenizer `name`."""
    shown = {key: str(value) for key, value in tokens.items()}
    found = _fate(json.dumps({"template": source, "tokens": shown}), "")
    if found is not None:
        raise ConfigError(
            f"the chat template of {name} cannot be used: a process of its own that rendered a conversation {found}. "
            "Correct it (chat_template.jinja, or chat_template in tokenizer_config.json), or set data.tokenizer to "
            "that of another chat model."
        )


@contextmanager
def told(name: str) -> Iterator[None]:
    """Raise DataError for whatever a tokenizer raises inside, panics of Rust among it, which are no Exception."""
    try:
        yield
    except Zero3dError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise DataError(
                f"the tokenizer {name} fails on this text ({in_short(error)}): leave the text out, or set "
                "data.tokenizer to another folder."
            ) from error
        raise


def is_panic(error: BaseException) -> bool:
    """Return whether this is a panic of Rust, whose class derives from BaseException and is nobody's to import."""
    return type(error).__name__ == "PanicException"


def in_short(error: BaseException) -> str:
    """Return what an error says, in one line with its class."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:QUOTED]}".removesuffix(": ")


@lru_cache(maxsize=64)
def _fate(task: str, _content: str) -> str | None:
    """Return what became of the process that tried something; None where that came to its end, or cannot be started."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from zero3d.data.trial import main; main()"
    asked = json.dumps({"seconds": SECONDS, "memory": MEMORY})
    try:
        done = subprocess.run(
            [sys.executable, "-c", start, asked],
            input=task,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20 * SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {20 * SECONDS} s"
    except OSError:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = f" ({' '.join(lines[0].split())[:QUOTED]})" if lines else ""
    if done.returncode == -signal.SIGXCPU:
        return f"took more than {SECONDS} s of a processor"
    if done.returncode < 0:
        return f"was ended by {signal.Signals(-done.returncode).name}{last}"
    return done.stdout.strip() or None


# --- in a process of its own ----------------------------------------------------------------------


def main() -> None:
    """Try what standard input says, under the limits of the command line; print what went wrong."""
    limits, task = json.loads(sys.argv[1]), json.load(sys.stdin)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for kind, value in ((resource.RLIMIT_CPU, limits["seconds"]), (resource.RLIMIT_AS, limits["memory"])):
        with suppress(ValueError, OSError):  # the system's own limit is lower
            resource.setrlimit(kind, (value, hard if kind == resource.RLIMIT_CPU else value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, value in ONE_THREAD.items():
        os.putenv(name, value)  # read by the library itself
    try:
        if "tokenizer" in task:
            _encode(task["tokenizer"])
        else:
            _render(task["template"], task["tokens"])
    except MemoryError:
        print(f"needs more than {limits['memory'] / (1 << 30):.3g} GiB of memory")
    except BaseException as error:  # noqa: BLE001  it is told, and ends here
        print(f"fails: {in_short(error)}")


def _encode(file: str) -> None:
    """Load a tokenizer and encode the sample. Raises what it panics with; where it cannot be loaded others say so."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(file)
        for text in TEXTS:
            tokenizer.encode(text)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001
        pass


def _render(source: str, tokens: Mapping[str, str]) -> None:
    """Render the sample, as far as the template takes it."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Leaves {% generation %} without effect."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    try:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value)
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "today"}
        template = environment.from_string(source)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  whoever renders it says what is wrong with it
        return
    for messages in CONVERSATIONS:
        parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
        for given in (messages, parts):
            for prompt in (False, True):
                try:
                    template.render(messages=given, add_generation_prompt=prompt, tools=None, documents=None, **tokens)
                except MemoryError:
                    raise
                except Exception:  # noqa: BLE001  another conversation may please it
                    pass
