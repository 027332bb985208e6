"""Each cell about a peer in docs/peers.md is the cell of docs/peers.yaml, where what was read for it stands."""

import datetime
import re
from pathlib import Path

import yaml
from test_readme import RELEASE, comparison

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "peers.md"  # the page with the table
EVIDENCE = ROOT / "docs" / "peers.yaml"
READ = yaml.safe_load(EVIDENCE.read_text())
FILE = re.compile(
    r"([\w-]+) (\d+\.\d+\.\d+) [\w./]+(?::[1-9]\d*: \S|: has no \S)"
)  # a line, or a pattern that is not there
LINK = re.compile(r"https://[^\s]+: \S")
LABEL = re.compile(r"\[([^\]]*)\]\([^)]*\)|\*\*")


def cells_of(page):
    """Each row of a page's table, {peers of a column: what it says}, by the row's name, without links and bold."""
    table = page.read_text().partition("\n| | zero3d |")[2].partition("\n\n")[0]
    header, _, *rows = (LABEL.sub(r"\1", line).strip("| ").split(" | ") for line in table.splitlines())
    return {name: dict(zip(header, peers, strict=True)) for name, _, *peers in rows}


def test_every_cell_about_a_peer_is_the_one_that_was_checked():
    checked = {row["row"]: {peer: what["cell"] for peer, what in row.items() if peer != "row"} for row in READ["rows"]}
    assert checked == cells_of(PAGE)
    assert list(checked) == list(cells_of(PAGE))


def test_every_cell_has_evidence_in_a_release_that_is_named_below_the_table_or_by_a_link():
    named = dict(RELEASE.findall(comparison(PAGE)[2]))
    for row in READ["rows"]:
        for peer, what in row.items():
            if peer != "row":
                assert what["read"], f"{row['row']}, {peer}: nothing was read"
                for line in what["read"]:
                    file = FILE.match(line)
                    assert file or LINK.match(line), f"no file of a release with a line, and no link: {line}"
                    assert not file or named[file[1]] == file[2], f"the page names another release: {line}"


def test_evidence_has_the_month_that_the_page_gives():
    assert isinstance(READ["read"], datetime.date)
    assert f"{READ['read']:%B %Y}" in comparison(PAGE)[2]
