"""The glossary: one row for each word of ours, and the names of code in it are names in the source."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
NAME = re.compile(r"`([\w.]+)`")


def rows():
    """(words, meaning) of every row."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table]


def test_every_word_has_one_row_with_a_meaning():
    found = rows()
    assert len(found) > 20
    assert all(len(row) == 2 and all(row) for row in found)
    words = [word.strip() for words, _ in found for word in words.split(",")]
    assert len(set(words)) == len(words)


def test_names_of_code_in_the_glossary_are_in_the_source():
    names = {name for row in rows() for cell in row for name in NAME.findall(cell)}
    assert len(names) > 10
    last = {name: name.rsplit(".")[-1] for name in names}
    assert [name for name in names if not re.search(rf"\b{last[name]}\b", SOURCE)] == []
