"""Tokenizers and chat templates that fail: one error of ours, in one line, with the folder or the record."""

import json

import pytest
from corpora import APPENDS, CHAT, MARKS, opened, save_tokenizer, tiny_tokenizer, write_lines

from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import ConfigError, DataError

DEEP = "{% macro again() %}{{ again() }}{% endmacro %}"


def encoded(tmp_path, template, **options):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", template)
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one and two"}, {"messages": CHAT}])
    return opened(tmp_path, path, tokenizer=tokenizer, **options).train


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


def changed(folder, **entries):
    """A tokenizer's folder whose tokenizer.json has other entries."""
    file = save_tokenizer(folder, APPENDS) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BOMB = "(q+)+!"  # gives up over many q
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


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        ({"model": {"type": "Unknown"}}, "ModelUntagged"),
        ({"pre_tokenizer": split("(a")}, "PreTokenizer|[Rr]egex|pattern"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_named_with_the_cause_in_one_line(tmp_path, entries, cause):
    folder = changed(tmp_path / "t", **entries)
    with pytest.raises(ConfigError, match=rf"^{folder} holds no tokenizer that can be loaded \(.*({cause})") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
