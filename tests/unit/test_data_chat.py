"""Conversations: the template's tokens, and targets exactly where the assistant wrote."""

import pytest
from corpora import APPENDS, CHAT, FORGETS, MARKS, REWRITES, opened, tiny_tokenizer, write_lines

from zero3d.data.tokenizers import ByteTokenizer
from zero3d.errors import ConfigError, DataError

WHOLE = (
    "<user> what is one and one <end> <assistant> two <end> <user> and two and two <end> <assistant> four I think <end>"
)


@pytest.mark.parametrize("template", [APPENDS, MARKS])
def test_only_what_the_assistant_wrote_is_learnt(tmp_path, template):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", template)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    sample = opened(tmp_path, path, tokenizer=tokenizer, length=32, packing=False).train[0]
    words = tokenizer.inner.convert_ids_to_tokens(sample["input_ids"].tolist())
    assert " ".join(words) == WHOLE
    learnt = [word for word, label in zip(words, sample["labels"].tolist(), strict=True) if label >= 0]
    assert learnt == ["two", "<end>", "four", "I", "think", "<end>"]


@pytest.mark.parametrize("template", [REWRITES, FORGETS])
def test_a_template_that_rewrites_what_it_said_is_refused_by_name(tmp_path, template):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", template)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: the chat template of .*tokenizer does not only append.*generation"
    ):
        opened(tmp_path, path, tokenizer=tokenizer, skip_bad_lines=True)


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (APPENDS, CHAT[1:], "starts with the assistant"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, "refuses it: roles must alternate"),
        ("{{ messages[0].content + 1 }}", CHAT, "the chat template refuses it"),
    ],
)
def test_a_conversation_the_template_cannot_show_is_a_bad_line(tmp_path, template, messages, why):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", template)
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one and two"}, {"messages": messages}])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{why}"):
        opened(tmp_path, path, tokenizer=tokenizer)
    assert opened(tmp_path, path, tokenizer=tokenizer, skip_bad_lines=True).train.documents == 1


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    for tokenizer in (ByteTokenizer(), tiny_tokenizer(tmp_path / "tokenizer")):
        with pytest.raises(ConfigError, match="has no chat template"):
            opened(tmp_path, path, tokenizer=tokenizer)
