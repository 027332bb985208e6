"""What docs/watching.md shows of results/watched-run.json: lines, and two pictures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from demo_curves import digest
from figures_measured import results, table
from recorded import RESULTS, ROOT
from watched_run import RUN

from zero3d.tools.cli.report_page import report_page
from zero3d.tools.cli.run_folder import read_run
from zero3d.train.run_plot import figure
from zero3d.train.series import Series
from zero3d.train.stragglers import CUT, ENOUGH, ENOUGH_SAVES, FAR, KEPT, LEAST, LEAST_SECONDS, OFTEN, SAVES, SLOWER

NAME = "watched-run"
RECORDED = RESULTS / f"{NAME}.json"
CURVES, PAGE, SEEN = (ROOT / "docs" / f"watched-run{end}" for end in (".png", ".html", "-page.png"))
WIDEST = 140  # characters of a line
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FRAME = 1240, 980  # of the page's picture
COLOURS = 256
SCRAPED = (
    "loss", "tokens_per_second", "session_skipped_steps_total", "save_seconds", "slowest_rank", "slowest_over",
    "slowest_compute_seconds", "slowest_data_seconds", "slowest_save_seconds", "slowest_host_seconds", "running",
)  # fmt: skip


def found() -> dict[str, Any]:
    """What was said."""
    [run] = results(NAME)
    kept: dict[str, Any] = run
    return kept


# --- text ---------------------------------------------------------------------------------------


def block(lines: Sequence[str]) -> str:
    """Lines as they are printed; long ones end with an ellipsis."""
    cut = (line if len(line) <= WIDEST else f"{line[: WIDEST - 2]} …" for line in lines)
    return "\n".join(["```", *cut, "```"])


def between(lines: Sequence[str], spans: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield stretches of lines, each from the first that matches to the next that does; an ellipsis for all others."""
    last = 0
    for first, end in spans:
        begin = next(i for i in range(last, len(lines)) if re.match(first, lines[i]))
        if begin > last:
            yield "…"
        last = next(i for i in range(begin, len(lines)) if re.match(end, lines[i])) + 1
        yield from lines[begin:last]
    if last < len(lines):
        yield "…"


def terminal() -> str:
    """What the terminal said in both sessions."""
    first, second = found()["sessions"]
    stopped = [("step +50: ", "saved"), ("step +80/", "step +100/"), ("step +120/", "stopped")]
    resumed = [("going on", "bitwise"), ("results:", "a step of"), ("memory of", "traffic of"), ("curves", "curves")]
    spans = [stopped, resumed]
    lines = []
    for session, shown in zip((first, second), spans, strict=True):
        lines += [f"$ {session['command']}", *between(session["lines"], shown)]
    return block(lines)


def scraped() -> str:
    """Some lines of what the port answered."""
    known = found()["scrapes"][0]
    lines = [line for name in SCRAPED for line in known if line.startswith(f"zero3d_{name}{{")]
    return block(lines)


def told() -> str:
    """What the commands of log.on have written."""
    return block(["$ cat told.txt", *found()["told"]])


def doctor() -> str:
    """What the doctor says of the run."""
    said = found()["doctor"]
    return block([f"$ {said['command']}", *said["lines"]])


def file() -> str:
    """The run's file."""
    return f"```yaml\n# watched.yaml\n{found()['file']}```"


def rules() -> str:
    """By which rules a rank is called slow."""
    steps = f"the last {KEPT}, and the last {ENOUGH} for what has just begun, without the first of a process"
    saves = f"the last {SAVES} saves, from {ENOUGH_SAVES} on"
    excess = f"{100 * LEAST:.0f} % of a step, {1000 * LEAST_SECONDS:.0f} ms and {FAR:.0f} standard errors"
    return table(
        ["a rank is named", "figure"],
        [
            ["by these steps", f"{steps}; {saves}"],
            ["if its mean excess over the median is at least", excess],
            [f"and it was slower, by {100 * SLOWER:.1f} %, in more than", f"{100 * OFTEN:.0f} % of the steps"],
            ["where the mean leaves out at each end", f"{100 * CUT:.0f} % of the steps"],
        ],
    )


WATCHED: Mapping[str, Callable[[], str]] = {
    "watched-run-file": file,
    "slow-ranks": rules,
    "watched-run": terminal,
    "watched-run-port": scraped,
    "watched-run-told": told,
    "watched-run-doctor": doctor,
}


# --- pictures -----------------------------------------------------------------------------------


@contextmanager
def folder() -> Iterator[Path]:
    """The run's folder, as far as the page reads it, in a folder that is the current one."""
    kept, before = found(), Path.cwd()
    with TemporaryDirectory(prefix="zero3d-watched-") as scratch:
        os.chdir(scratch)
        try:
            root = Path(RUN)
            root.mkdir(parents=True)
            (root / "config.yaml").write_text(kept["settings"])
            (root / "report.json").write_text(kept["of_session"])
            (root / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept["records"]))
            yield root
        finally:
            os.chdir(before)


def page() -> str:
    """The run's page, without the place and the time of its making."""
    with folder() as root:
        text = report_page(read_run(str(root))).replace(str(root.resolve()), RUN)
    text = re.sub(r"<p[^>]*>Made of the run.s folder on [^<]*</p>", "", text)
    return f"{text.rstrip()}\n<!-- {digest(RECORDED.read_bytes())} -->\n"


def draw_watched() -> None:
    """Write run.png and the page as docs/ has them, and a picture of the page where there is a Chromium."""
    records = [json.loads(line) for line in found()["records"]]
    said = digest(RECORDED.read_bytes())
    saves = json.loads(found()["of_session"])["saves"]
    drawn = figure(Series.of(records, saves), "demo: stage 3, bf16, 2 ranks")
    buffer = BytesIO()
    drawn.savefig(buffer, format="png", dpi=100)
    _kept(buffer, CURVES, said)
    PAGE.write_text(page())
    if browser := next(filter(None, map(shutil.which, CHROMIUM)), None):
        _kept(seen(browser), SEEN, said)


def seen(browser: str) -> BytesIO:
    """A picture of the page's top."""
    with TemporaryDirectory(prefix="zero3d-page-") as scratch:
        picture = Path(scratch) / "page.png"
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        words += [f"--user-data-dir={scratch}/profile", "--hide-scrollbars", f"--window-size={FRAME[0]},{FRAME[1]}"]
        subprocess.run(
            [browser, *words, f"--screenshot={picture}", PAGE.as_uri()], check=True, capture_output=True, timeout=300
        )
        return BytesIO(picture.read_bytes())


def _kept(picture: BytesIO, path: Path, said: str) -> None:
    """Write a picture in few colours, with the digest of the results that it is of."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    notes = PngInfo()
    notes.add_text("Comment", said)
    few = Image.open(picture).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=notes)
