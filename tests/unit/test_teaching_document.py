"""docs/zero-and-3d.md and its Chinese twin: every command prints what is written, every quantity was printed.

    ```console
    $ zero3d plan --theory --params 7.5e9 --gpus 64      a verb, run in this process
    Psi = 7.5B parameters, ...                           what it prints, exactly
    ```
    ```console
    $ python - <<'END'                                   a snippet, run in a namespace of its own
    print(6 * 7)
    END
    42
    ```

A quantity with a unit in the text (19.3 GB, 26.2 %) must stand in some command's output. What a source printed
stands in quotation marks. `python tests/unit/test_teaching_document.py` writes all outputs anew.
"""

import re
import shlex
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from zero3d.tools.cli.main import main

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = DOCUMENTS = [ROOT / "docs" / name for name in ("zero-and-3d.md", "zero-and-3d.zh.md")]
COMMAND = re.compile(r"(?<=^```console\n)\$ (python - <<'END'\n.*?\nEND|zero3d [^\n]*)\n(.*?)(?=^```$)", re.M | re.S)
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
HEADING = re.compile(r"^(#+) (.*)$", re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = r"\d[\d,]*(?:\.\d+)?"
QUANTITY = re.compile(rf"({NUMBER})\s?(?:[kMGT]i?B|TFLOP|%)(?![A-Za-z])")
NOT_OURS = re.compile(r'"[^"\n]*"|“[^”\n]*”|`[^`\n]*`|\]\([^)]*\)')  # quoted from a source, code, addresses


def commands(path):
    """(command, written output) of every console block, in order."""
    return COMMAND.findall(path.read_text())


@cache
def output(command):
    """What a command prints."""
    with redirect_stdout(StringIO()) as said:
        if command.startswith("zero3d "):
            assert main(shlex.split(command)[1:]) == 0
        else:
            exec(command.removeprefix("python - <<'END'\n").removesuffix("\nEND"), {"__name__": "__main__"})
    return said.getvalue()


def numbers(text, pattern=NUMBER):
    """The values that a text names."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def prose(path):
    """A document's text without its blocks."""
    return FENCE.sub("", path.read_text())


def anchors(path):
    """The addresses of a document's headings, as GitHub makes them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for _, title in HEADING.findall(prose(path)))
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=["English", "Chinese"])
def test_every_command_prints_what_is_written_below_it(path):
    found = commands(path)
    assert len(found) == path.read_text().count("```console") > 15
    for command, written in found:
        assert output(command) == written, f"{command}\nprints otherwise: python tests/unit/test_teaching_document.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=["English", "Chinese"])
def test_every_quantity_in_the_text_was_printed_by_a_command(path):
    printed = numbers("".join(output(command) for command, _ in commands(path)))
    told = numbers(NOT_OURS.sub(" ", prose(path)), QUANTITY)
    assert len(told) > 40
    assert set(told) - set(printed) == set()


def test_both_languages_have_the_same_commands_drawings_and_chapters():
    assert FENCE.findall(ENGLISH.read_text()) == FENCE.findall(CHINESE.read_text())
    levels = [[len(marks) for marks, _ in HEADING.findall(prose(path))] for path in DOCUMENTS]
    assert levels[0] == levels[1]
    assert all(block.isascii() for block in FENCE.findall(CHINESE.read_text())), "wide characters shift a drawing"


@pytest.mark.parametrize("path", DOCUMENTS, ids=["English", "Chinese"])
def test_every_link_within_the_repository_leads_somewhere(path):
    targets = LINK.findall(prose(path))
    assert len(targets) > 20
    for target in targets:
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            other = path.parent / name if name else path
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), target


if __name__ == "__main__":
    for document in DOCUMENTS:
        text = COMMAND.sub(lambda found: f"$ {found[1]}\n{output(found[1])}", document.read_text())
        document.write_text(text)
