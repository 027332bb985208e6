"""Commands of log.on: what they are told, where they run, and that what becomes of them changes nothing."""

import os
import select
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from heard import Heard

from zero3d.config import load, to_yaml
from zero3d.config.describe import schema
from zero3d.errors import ConfigError
from zero3d.train import event_commands
from zero3d.train.event_commands import GONE, MOST, EventCommands, facts_of
from zero3d.train.folder import Folder


@pytest.fixture
def heard(tmp_path):
    made = Heard(tmp_path)
    yield made
    made.close()


@pytest.fixture
def output(tmp_path):
    (tmp_path / "llama").mkdir()
    return tmp_path / "llama"


def test_a_command_gets_its_facts_and_has_a_session_a_log_and_no_input(heard, output):
    line = (
        "$ZERO3D_EVENT,$ZERO3D_RUN,$ZERO3D_OUTPUT,$ZERO3D_STEP,$ZERO3D_LOSS,$ZERO3D_WHY,$(ps -o sid= -p $$),$$,$(cat)"
    )
    events = EventCommands({"end": f"echo to the log; echo \"{line}\" > '{heard.path}'"}, output, say=pytest.fail)
    events.fire("end", facts_of(8, {"loss": 2.5}) | {"why": "a\0 `touch hacked` $(touch hacked) ünd \"x\" 'y'"})
    (told,) = heard.lines(1)
    *facts, session, pid, given = told.split(",")
    assert facts == ["end", "llama", str(output), "8", "2.5", "a  `touch hacked` $(touch hacked) ünd \"x\" 'y'"]
    assert (int(session), given) == (int(pid), "")
    assert "hacked" not in os.listdir(), "facts are no part of the command"
    header, printed = (output / "events.log").read_text().splitlines()
    assert " end at step 8: echo to the log; " in header
    assert printed == "to the log"
    Folder(output).clear()
    assert not (output / "events.log").exists()


def test_a_relative_folder_is_told_in_full_and_what_stands_in_the_log_stays(heard, output, monkeypatch):
    monkeypatch.chdir(output.parent)
    (output / "events.log").write_text("of an earlier session\n")
    events = EventCommands(heard.on("end", facts=("OUTPUT", "RUN")), Path("llama"), say=pytest.fail)
    events.fire("end", {"step": 1})
    events.fire("end", {"step": 2})
    assert heard.lines(2) == [f"{output} llama"] * 2
    first, *headers = (output / "events.log").read_text().splitlines()
    assert first == "of an earlier session"
    assert [f" end at step {step}: " in header for step, header in enumerate(headers, 1)] == [True, True]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ZERO3D_LAUNCHED"])
def test_a_command_is_no_rank(heard, output, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_RANK", "7")
    command = f"echo [${name}] $MY_RANK $ZERO3D_EVENT > '{heard.path}'"
    EventCommands({"end": command}, output, say=pytest.fail).fire("end", {})
    assert heard.lines(1) == ["[] 7 end"]


@pytest.mark.parametrize(("commands", "rank"), [(None, 0), ({}, 0), ({"straggler": "true"}, 0), ({"end": "true"}, 1)])
def test_nothing_is_started_for_other_events_nor_on_other_ranks(output, monkeypatch, commands, rank):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a command was started"))
    EventCommands(commands, output, rank).fire("end", {})
    assert list(output.iterdir()) == []


def ended(process):
    """Wait until somebody has taken note of a child's end."""
    for thread in threading.enumerate():
        if thread.name.startswith("log.on."):
            thread.join(60)
    return not psutil.pid_exists(process)


def test_a_command_that_has_ended_stays_no_zombie_whatever_its_exit_code(heard, output):
    events = EventCommands({"end": f"echo $$ > '{heard.path}'; exit 3"}, output, say=pytest.fail)
    events.fire("end", {})
    (pid,) = heard.lines(1)
    assert ended(int(pid))


def test_commands_that_hang_are_no_more_than_a_few_and_one_line_says_so(heard, output):
    said = []
    hangs = f"echo $$ > '{heard.path}'; exec cat '{heard.path}.gone'"
    os.mkfifo(f"{heard.path}.gone")
    events = EventCommands({"nonfinite": hangs, "end": f"echo end > '{heard.path}'"}, output, say=said.append)
    for step in range(MOST + 3):
        events.fire("nonfinite", {"step": step})
    assert said == [
        f"warning: the command of log.on.nonfinite is not started, and the run goes on: {MOST} of them still run"
    ]
    pids = heard.lines(MOST)
    events.fire("end", {})
    assert heard.lines(1) == ["end"], "which has its own"
    for pid in pids:
        os.kill(int(pid), 9)
    assert all(ended(int(pid)) for pid in pids)
    events.fire("nonfinite", {})
    (last,) = heard.lines(1)
    os.kill(int(last), 9)


@pytest.mark.parametrize("fault", ["no process", "no log", "a link in its place"])
def test_a_command_that_cannot_be_started_is_one_line(output, monkeypatch, fault):
    if fault == "no process":

        def refused(*_, **__):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(event_commands.subprocess, "Popen", refused)
    elif fault == "no log":
        (output / "events.log").mkdir()
    else:
        (output / "events.log").symlink_to("elsewhere")
    said = []
    events = EventCommands({"end": "true"}, output, say=said.append)
    events.fire("end", {})
    events.fire("end", {})
    (line,) = said
    assert line.startswith("warning: the command of log.on.end is not started, and the run goes on: [Errno ")
    assert not (output / "elsewhere").exists()


def test_a_session_begins_where_no_file_is_left_to_open(output, monkeypatch):
    def refused():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", refused)
    said = []
    EventCommands({"end": "true"}, output, say=said.append).begin("failed")
    assert said == [
        "warning: the command of log.on.end is not started, and the run goes on: [Errno 24] Too many open files"
    ]


@pytest.mark.parametrize("ends", ["killed", "told"])
def test_a_rank_that_is_killed_has_an_end_too_and_one_that_has_told_of_it_no_other(heard, output, ends):
    (output / "metrics.jsonl").write_text(
        '{"step": 6, "loss": 3.0}\n{"step": 7, "validation_loss": 9.0, "loss": 2.5, "grad_norm": null}\n'
    )
    facts = ("EVENT", "HOW", "STEP", "LOSS", "GRAD_NORM", "RUN", "WHY")
    commands = {"straggler": "true"} | heard.on("end", facts=facts)
    events = EventCommands(commands, output, say=pytest.fail)
    if (child := os.fork()) == 0:
        try:
            events.begin("failed")
            events.fire("straggler", {"step": 3})  # which is no end
            if ends == "told":
                events.fire("end", facts_of(8, {"loss": 2.0}) | {"how": "finished", "why": ""})
        finally:
            psutil.Process().kill()
    os.waitpid(child, 0)
    wanted = f"end failed 7 2.5 null llama {GONE}" if ends == "killed" else "end finished 8 2.0 nan llama "
    assert heard.lines(1) == [wanted]
    _, header = (output / "events.log").read_text().splitlines()
    assert f" end at step {7 if ends == 'killed' else 8}: echo " in header


def test_what_outlives_a_rank_is_gone_when_that_has_told(heard, output, monkeypatch):
    made, pipe = [], os.pipe

    def kept():
        made.append(pipe())
        return made[-1]

    monkeypatch.setattr(os, "pipe", kept)
    events = EventCommands(heard.on("end"), output, say=pytest.fail)
    events.begin("failed")
    mine = os.dup(made[0][1])  # so that the pipe has no end, and a word alone ends who reads it
    events.fire("end", {"how": "finished", "step": 3})
    assert heard.lines(1) == ["end finished 3"]
    reader = select.poll()
    reader.register(mine, select.POLLERR)
    assert reader.poll(60_000), "nobody reads the pipe any more"
    os.close(mine)
    assert heard.silent


# --- the key ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["log:\n  on: {end: a b}\n", "log:\n  'on':\n    end: a b\n", '{"log": {"on": {"end": "a b"}}}']
)
def test_on_is_a_name_before_a_colon_and_what_is_written_reads_back_by_any_parser(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = load(file)
    assert config.log.on == {"end": "a b"}
    import yaml

    assert yaml.safe_load(to_yaml(config))["log"]["on"] == {"end": "a b"}
    assert load(yaml.safe_load(to_yaml(config))) == config


def test_one_event_can_be_an_override_beside_those_of_a_file():
    config = load({"log": {"on": {"end": "a", "nonfinite": "b"}}}, ["log.on.end=curl -d x=1 https://host"])
    assert config.log.on == {"end": "curl -d x=1 https://host", "nonfinite": "b"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("log.on={ends: x}", "log.on takes a mapping of straggler, nonfinite or end to texts, or null; found a mapping with ends. Did you mean end?"),
        ("log.on.stop=x", "log.on takes a mapping of straggler, nonfinite or end to texts"),
        ("log.on={end: 3}", "log.on takes a mapping of"),
        ("log.on=x", "found the text 'x'."),
        ("log.port=9400", "log.port=9400 answers Prometheus, which log.to does not name: type log.to=prometheus, too."),
        ("log.host=0.0.0.0", "log.host=0.0.0.0 is listened on at log.port: type log.port=9400, too."),
    ],
)  # fmt: skip
def test_an_unknown_event_is_refused_with_those_there_are_and_so_is_a_port_for_nobody(word, message):
    with pytest.raises(ConfigError) as told:
        load(None, [word])
    assert message in str(told.value)


def test_editors_know_the_events():
    form = schema()["properties"]["log"]["properties"]["on"]["anyOf"][0]
    assert form["additionalProperties"] is False
    assert list(form["properties"]) == ["straggler", "nonfinite", "end"]
