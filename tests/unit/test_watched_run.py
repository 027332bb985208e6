"""docs/watching.md shows a run that was made: what was to be seen was, its pictures are of it, and it names no machine."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
pytest.importorskip("matplotlib")
import figures_watched  # noqa: E402
import watched_run  # noqa: E402
from demo_curves import digest  # noqa: E402

PAGES = [ROOT / "docs" / name for name in ("watching.md", "watching.zh.md")]
PARTS = re.compile(r"(\w+?)_s(_least|_largest)?$")
KEPT = figures_watched.found()
RECORDS = [json.loads(line) for line in KEPT["records"]]


def test_all_of_the_trouble_was_seen_everywhere():
    assert list(watched_run.unseen(KEPT)) == []
    assert [session["code"] for session in KEPT["sessions"]] == [143, 0]
    assert [record["step"] for record in RECORDS if not record["applied"]] == [watched_run.BAD]
    named = {record["slowest_rank"] for record in RECORDS if "slowest_rank" in record}
    assert named == {watched_run.SLOW_RANK}
    assert sum("resumed_from" in record for record in RECORDS) == 1
    saved = [record["step"] - 1 for record in RECORDS if "save_seconds" in record]
    assert saved == [50, 100, 150]


@pytest.mark.parametrize(
    ("place", "word", "what"),
    [
        ("told", "is slow", "a command for a slow rank"),
        ("told", "stopped", "a command for a stop"),
        ("records", '"step": 7,', "one record of each step"),
    ],
)
def test_what_is_lacking_is_named(place, word, what):
    lacking = copy.deepcopy(KEPT)
    lacking[place] = [line for line in lacking[place] if word not in line]
    assert list(watched_run.unseen(lacking)) == [what]


def test_a_terminal_without_the_slow_rank_is_named():
    lacking = copy.deepcopy(KEPT)
    lines = lacking["sessions"][0]["lines"]
    lacking["sessions"][0]["lines"] = [line for line in lines if "slowest rank" not in line]
    assert list(watched_run.unseen(lacking)) == ["a slow rank in the terminal"]


def test_pictures_and_page_are_of_the_kept_run_and_small():
    said = digest(figures_watched.RECORDED.read_bytes())
    for path, most in ((figures_watched.CURVES, 150), (figures_watched.SEEN, 150), (figures_watched.PAGE, 300)):
        assert said.encode() in path.read_bytes(), "type: python benchmarks/tables.py --write"
        assert path.stat().st_size < 1000 * most


def test_the_page_has_the_marks_of_all_that_happened():
    page = figures_watched.PAGE.read_text()
    for mark in ("checkpoint saved (5)", "step skipped (1)", "slow rank named", "run resumed (1)"):
        assert mark in page
    assert f"Rank {watched_run.SLOW_RANK}" in page or f"slowest rank {watched_run.SLOW_RANK}" in page


def test_nothing_that_is_kept_names_a_machine():
    for path in (figures_watched.RECORDED, figures_watched.PAGE, *PAGES):
        assert re.findall(r"/(?:tmp|home|root|work|var)/", path.read_text()) == []
    assert json.loads(KEPT["of_session"])["hosts"] == [watched_run.HOST] * 2


def test_names_are_left_out_where_they_stand_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(watched_run, "gethostname", lambda: "vm")
    text = f"rank 1 (vm) wrote {tmp_path.resolve()}/runs/a at 40213: vms, 402134"
    assert watched_run.without_names(text, tmp_path, 40213) == "rank 1 (node-a) wrote runs/a at 9400: vms, 402134"


@pytest.mark.parametrize("page", PAGES, ids=["English", "Chinese"])
def test_every_field_of_a_record_has_a_row(page):
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    shown = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    fields = {name for record in RECORDS for name in record}
    parts = {found[1] for name in fields if name.endswith("_least") and (found := PARTS.match(name))}
    of_parts = {f"{part}_s{end}" for part in parts for end in ("", "_least", "_largest")}
    assert len(parts) >= 8
    assert fields - of_parts - shown == set()
    assert {"PART_s", "PART_s_least", "PART_s_largest"} <= shown
