"""Tokenizers and chat templates of others: whatever they do, one error of ours, and no rank that hangs or is gone."""

import json
import os
import pickle
import subprocess
import sys

import pytest
from corpora import APPENDS, CHAT, MARKS, opened, save_tokenizer, tiny_tokenizer, write_lines

from zero3d.data import trial
from zero3d.data.patience import Patience, TookTooLong
from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import ConfigError, DataError

FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
DEEP = "{% macro again() %}{{ again() }}{% endmacro %}"


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Smaller limits than those of real ones, so that they are reached at once.

    Not those of a processor where memory is to run out first: a slow machine takes a second to fill half a GiB.
    """
    monkeypatch.setattr(trial, "SECONDS", 1)
    monkeypatch.setattr(trial, "MEMORY", 1 << 29)
    trial._fate.cache_clear()
    yield
    trial._fate.cache_clear()


def encoded(tmp_path, template, **options):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", template)
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one and two"}, {"messages": CHAT}])
    return opened(tmp_path, path, tokenizer=tokenizer, **options).train


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (FOREVER, r"took more than 1 s of a processor"),
        pytest.param(f"{APPENDS}{FOREVER}", r"took more than 1 s of a processor", marks=pytest.mark.long),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (
            ("{% if messages|length > 3 %}" + FOREVER + "{% endif %}", r"took more than 1 s of a processor"),
            (DOUBLING, r"needs more than 0.5 GiB of memory"),
            ("{% generation %}{{ 'a' * 10 ** 12 }}{% endgeneration %}", r"needs more than 0.5 GiB of memory"),
        )),
        ("{{ '%0*d' % (10 ** 10, 5) }}", r"needs more than 0.5 GiB of memory"),
    ],
)  # fmt: skip
def test_a_template_without_an_end_is_refused_before_a_conversation_is_rendered(tmp_path, monkeypatch, template, what):
    if "memory" in what:
        monkeypatch.setattr(trial, "SECONDS", 60)
    with pytest.raises(ConfigError) as caught:
        encoded(tmp_path, template, skip_bad_lines=True)
    assert caught.match(
        rf"the chat template of {tmp_path}/tokenizer cannot be used: a process of its own that .* {what}\."
    )
    assert caught.match("data.tokenizer to that of another chat model")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "template",
    [
        f"{DEEP}{{{{ again() }}}}", "{{ 1 // 0 }}", "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
        *(pytest.param(template, marks=pytest.mark.long) for template in (
            "{{ range(10 ** 9) }}", "{{ messages[0].content.encode('ascii').x.y }}", "{{ [].pop() }}",
            "{% set x = (10 ** 400) * 1.0 %}", "{{ '{:d}'.format('a') }}",
        )),
    ],
)  # fmt: skip
def test_whatever_a_template_raises_makes_a_bad_line_of_the_conversation(tmp_path, template):
    template = f"{APPENDS}{template}"
    with pytest.raises(DataError, match=r"a\.jsonl:2: ") as caught:
        encoded(tmp_path, template)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert encoded(tmp_path, template, skip_bad_lines=True).documents == 1


@pytest.mark.parametrize("template", [APPENDS, pytest.param(MARKS, marks=pytest.mark.long)])
def test_a_template_that_loops_over_a_conversation_of_the_data_makes_a_bad_line_of_it(tmp_path, template):
    template = "{% if messages[0].content == 'what is one and one' %}" + FOREVER + "{% endif %}" + template
    with pytest.raises(DataError, match=r"a\.jsonl:2: the chat template takes more than 1 s of a processor for it"):
        encoded(tmp_path, template)


def endless():
    while True:
        pass


def test_what_is_over_is_not_ended_and_what_is_ended_may_begin_again():
    patience = pickle.loads(pickle.dumps(Patience(0.01)))
    for _ in range(3):
        with pytest.raises(TookTooLong), patience.limited():
            endless()
        assert patience.began == {}
        for _ in range(3000):
            with patience.limited():
                pass


def ended_after_a_fork():
    """Whether a fork of a process whose thread looks has one, too."""
    patience = Patience(0.01)
    with patience.limited():
        pass
    process = os.fork()
    if process == 0:
        try:
            with patience.limited():
                endless()
        except TookTooLong:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_fork_is_as_patient(alone):
    assert alone(ended_after_a_fork) == 7


@pytest.mark.parametrize("template", [APPENDS, MARKS, "{{ raise_exception('never') }}", "{% if %}", ""])
def test_what_a_template_refuses_of_the_sample_is_its_right(template):
    trial.try_template(template, {"bos_token": "<s>"}, "it")


def test_a_content_is_tried_once(monkeypatch):
    started = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *given, **how: (started.append(given), run(*given, **how))[1])
    for name in ("one", "other"):
        trial.try_template(APPENDS, {"bos_token": "<s>"}, name)
    assert len(started) == 1


def test_where_no_process_can_be_started_nothing_is_tried(monkeypatch):
    def none(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "run", none)
    trial.try_template(FOREVER, {}, "it")


def test_the_process_has_neither_torch_nor_transformers():
    code = (
        'import sys, json, io; from zero3d.data import trial; sys.argv[1:] = [\'{"seconds": 60, "memory": 8589934592}\'];'
        "sys.stdin = io.StringIO(json.dumps({'template': 'x', 'tokens': {}})); trial.main();"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    start = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    assert subprocess.run([sys.executable, "-c", start], check=False).returncode == 0


# --- tokenizers -----------------------------------------------------------------------------------


def changed(folder, **entries):
    """A tokenizer's folder whose tokenizer.json has other entries."""
    file = save_tokenizer(folder, APPENDS) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"pre_tokenizer": split("(a+)+b")}, "fails: PanicException: .*retry-limit"),
        ({"pre_tokenizer": split("(a+)+$")}, "fails: PanicException: .*retry-limit"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(Z+)+b"}, "content": ""}}, "fails: PanicException"),
        ({"padding": {"strategy": {"Fixed": 10**15}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                      "pad_type_id": 0, "pad_token": "<s>"}}, r"(was ended by SIGABRT|needs more than|fails: Panic)"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_panics_or_aborts_is_refused_when_it_is_loaded(tmp_path, capfd, entries, what):
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/t/tokenizer.json cannot be used: a process .* {what}"
    ) as caught:
        load_tokenizer(str(changed(tmp_path / "t", **entries)))
    assert capfd.readouterr().err == ""
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_process_that_is_ended_from_outside_is_told_by_its_signal(monkeypatch):
    killed = subprocess.CompletedProcess((), -9, "", "memory allocation of 99 bytes failed\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(ConfigError, match=r"was ended by SIGKILL \(memory allocation of 99 bytes failed\)"):
        trial.try_template(APPENDS, {}, "it")


BOMB = "(q+)+!"  # of which the sample has nothing


RECORDS = (
    {"text": "q" * 200}, {"prompt": "one", "completion": "q" * 200},
    {"messages": [CHAT[0], {**CHAT[1], "content": "q" * 200}]},
)  # fmt: skip


@pytest.mark.parametrize(("record", "template"), [
    (RECORDS[0], APPENDS), (RECORDS[2], MARKS), (RECORDS[2], APPENDS),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (RECORDS[0], MARKS), (RECORDS[1], APPENDS), (RECORDS[1], MARKS),
    )),
])  # fmt: skip
def test_a_panic_over_a_text_of_the_data_names_its_record(tmp_path, record, template):
    folder = changed(tmp_path / "t", pre_tokenizer=split(BOMB))
    (folder / "chat_template.jinja").write_text(template)
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, record, {"text": "two"}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: the tokenizer .*fails on .*PanicException") as caught:
        opened(tmp_path, path, tokenizer=load_tokenizer(str(folder)))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_text_that_no_tokenizer_takes_names_its_record(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:2: the tokenizer .*fails on this text \(TypeError"):
        encoded(tmp_path, "{{ '\\ud800' }}" + APPENDS)


def test_a_tokenizer_of_which_nothing_can_be_loaded_is_told_by_who_loads_it(tmp_path):
    folder = changed(tmp_path / "t", model={"type": "Unknown"})
    with pytest.raises(ConfigError, match="holds no tokenizer that can be loaded"):
        load_tokenizer(str(folder))
