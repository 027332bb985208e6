"""A search tells how far it is, and one that is stopped gives the best that it has found."""

import json
from collections import Counter
from io import StringIO

import pytest

from zero3d.tools.cli import plan, planned_images, progress
from zero3d.tools.cli.main import main
from zero3d.tools.cli.plan import search_text
from zero3d.tools.cli.progress import STOPPED, ProgressLine
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.search import Progress, Target, search
from zero3d.tools.plan.shapes import gpt

MODEL, PLACE, TARGET = gpt(2, 256, 4, 1024, 256), cluster("a100-80", 2), Target(8, 60e9, margin=0.0)


class Terminal(StringIO):
    def isatty(self):
        return True


def test_a_search_tells_what_it_has_priced_and_the_best_so_far_till_all_is_done():
    told = []
    result = search(MODEL, PLACE, TARGET, evaluate, watch=told.append)
    assert result == search(MODEL, PLACE, TARGET, evaluate)
    assert [each.done for each in told] == list(range(1, told[-1].all + 1))
    assert [each.priced for each in told] == sorted(each.priced for each in told)
    assert told[-1].priced == len(result.rows)
    assert told[-1].best.plan == result.rows[0].plan
    text = search_text(told[0], 2.0)
    assert f"about {2 * (told[0].all - 1):.0f} s left" in text
    assert "best so far" in text


def test_a_stopped_search_ranks_what_it_has_found():
    def stop(told):
        if told.done == 5:
            raise KeyboardInterrupt

    result = search(MODEL, PLACE, TARGET, evaluate, watch=stop)
    every = search(MODEL, PLACE, TARGET, evaluate)
    assert not result.whole
    assert 0 < len(result.rows) < len(every.rows)
    seconds = [row.estimate.seconds.mid for row in result.rows]
    assert seconds == sorted(seconds)
    with pytest.raises(KeyboardInterrupt):  # nothing fits: nothing to show
        search(MODEL, PLACE, Target(8, 1.0, margin=0.0), evaluate, watch=stop)


def test_ctrl_c_prints_the_best_so_far(monkeypatch, capsys):
    def stop(line, told):
        if told.done == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(plan, "_show", stop)
    assert main(["plan", "--params", "1e8", "--gpus", "2", "--seq", "256"]) == STOPPED
    out, error = capsys.readouterr()
    assert "Plans that fit" in out
    assert error.startswith("stopped: the best of")


def test_each_plan_is_priced_once_and_tokens_of_a_training_price_none(monkeypatch, capsys):
    counts = []

    def counted(model, place, each):
        counts[-1][model.length, each] += 1  # longer ones tell what would no longer fit
        return evaluate(model, place, each)

    for module in (plan, planned_images):
        monkeypatch.setattr(module, "evaluate", counted)
    command = ["plan", "--params", "1e8", "--gpus", "2", "--seq", "256", "--tokens-per-batch", "1024", "--json"]
    for words in ([], ["--tokens", "1e12", "--price", "2"]):
        counts.append(Counter())
        assert main([*command, *words]) == 0
        found = json.loads(capsys.readouterr().out)
    assert counts[0] == counts[1]
    assert set(counts[0].values()) == {1}
    assert found["what_if"]
    assert found["ladder"]


@pytest.mark.parametrize(("stream", "shown"), [
    (Terminal, ["b", "d"]), (StringIO, ["d"]),
])  # fmt: skip
def test_a_line_is_shown_after_a_second_and_seldom_in_a_file(stream, shown):
    now, out = [0.0], stream()
    with ProgressLine(out, lambda: now[0]) as line:
        for at, text in ((0.5, "a"), (1.5, "b"), (1.6, "c"), (12.0, "d")):
            now[0] = at
            line.show(text)
    written = [text for text in "abcd" if text in out.getvalue()]
    assert written == shown
    assert out.getvalue().endswith("\n" if stream is StringIO else "\x1b[K")


def test_before_anything_fits_the_line_says_so():
    assert search_text(Progress(10, 2, 4, None), 1.0).endswith("; none fits yet")


def test_what_begins_is_said_to_who_watches_a_terminal(monkeypatch):
    for stream, said in ((Terminal(), "tracing\n"), (StringIO(), "")):
        monkeypatch.setattr("sys.stderr", stream)
        progress.say("tracing")
        assert stream.getvalue() == said
