"""Chats hand the template all that they have, learn what transformers' own masks say, and say what nobody looked at."""

import json
import random

import pytest
from corpora import CHAT, opened, write_lines
from token_kinds import of_bytes, of_marks, of_words

from zero3d.data.chat import ChatTemplate
from zero3d.data.chat_keys import Malformed
from zero3d.data.conversations import from_llava
from zero3d.data.records import BadRecord, Text, record_of
from zero3d.errors import ConfigError, DataError

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"of": "Rome"}}}]
CALL = '<assistant>is[weather {"of": "Rome"}]<end>'
MARKED = (
    "{% if tools %}<system>{% for t in tools %}{{ t.function.name }} {% endfor %}<end>{% endif %}"
    "{% for d in documents or [] %}<system>{{ d.text }}<end>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<end>"
    "{% endgeneration %}{% else %}{{ m.name or '' }}{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}(){% endif %}{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
WORDS = ("is", "Rome", "one", "a", "2+2=", "é", "4 a", "<end>")


def shown(record, template=PLAIN, make=of_words):
    """The text of a record, and the parts of it that are learnt."""
    record = record_of(record, "here")
    rendered = ChatTemplate(make(), template).render(record.messages, record.options)
    return rendered.text, [rendered.text[start:stop] for start, stop in rendered.answers]


def drawn(draw):
    """A conversation with tools, calls, thoughts, options."""

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randrange(1, 5)))

    messages = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
    for _ in range(draw.randrange(1, 4)):
        messages.append({"role": "user", "content": text()})
        if draw.random() < 0.4:
            answer = {"role": "assistant", "content": draw.choice([None, "", text()]), "tool_calls": CALLS}
            messages += [answer, {"role": "tool", "content": text()}]
        messages.append({"role": "assistant", "content": text()})
        if draw.random() < 0.3:
            messages[-1]["reasoning_content"] = text()
    record = {"messages": messages}
    if draw.random() < 0.5:
        record["tools"] = draw.choice([TOOLS, json.dumps(TOOLS)])
    if draw.random() < 0.3:
        record["chat_template_kwargs"] = {"enable_thinking": draw.random() < 0.5, "documents": [{"text": text()}]}
    return record


@pytest.mark.parametrize("make", [of_bytes, of_words, of_marks, lambda: of_marks("unigram")])
def test_tokens_and_targets_of_any_chat_are_those_of_transformers(make):
    tokenizer, draw = make(), random.Random(3)
    ours = [ChatTemplate(tokenizer, template) for template in (MARKED, PLAIN)]
    for _ in range(60):
        given = drawn(draw)
        record = record_of(given, "here")
        options = dict(given.get("chat_template_kwargs", {}))
        tools = json.loads(given["tools"]) if isinstance(given.get("tools"), str) else given.get("tools")
        encoded = tokenizer.inner.apply_chat_template(
            given["messages"], chat_template=MARKED, tools=tools, return_dict=True, return_assistant_tokens_mask=True,
            **options,
        )  # fmt: skip
        for template in ours:
            ids, targets, across = template.encode(record.messages, record.options)
            assert ids == list(encoded["input_ids"])
            assert targets == list(encoded["assistant_masks"])
            assert not across


def test_an_answer_whose_ends_are_in_no_token_is_learnt_from_end_to_end():
    """Transformers' masks leave such an answer out, or go on to the end of the text."""
    marks = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %} {{ m.content }} "
        "{% endgeneration %}{% else %} {{ m.content }} {% endif %}{% endfor %}"
    )
    tokenizer = of_words()
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "is"},
        {"role": "user", "content": "one"},
    ]
    template = ChatTemplate(tokenizer, marks)
    ids, targets, _ = template.encode(messages)
    assert tokenizer.inner.convert_ids_to_tokens(ids) == ["<user>", "a", "<assistant>", "is", "<user>", "one"]
    assert targets == [0, 0, 0, 1, 0, 0]
    encoded = tokenizer.inner.apply_chat_template(
        messages, chat_template=template.source, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded["assistant_masks"] != targets, "transformers has become right: its own masks could be taken"
    smile = {"role": "assistant", "content": "\N{GRINNING FACE}"}
    ids, targets, _ = ChatTemplate(
        of_bytes(), marks.replace("{{ m.content }} {% endg", "{{ m.content }}{% endg")
    ).encode([messages[0], smile])
    assert sum(targets) == 5  # a blank and four bytes


def test_a_token_that_an_answer_begins_within_is_counted_where_prefixes_tell_answers():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Rome is"}]
    for make in (of_bytes, lambda: of_bytes(trim=True), of_marks):
        tokenizer = make()
        ids, targets, across = ChatTemplate(tokenizer, template).encode(messages)
        learnt = [token for token, on in zip(tokenizer.inner.convert_ids_to_tokens(ids), targets, strict=True) if on]
        assert across
        assert learnt[0] in ("Ġis", "▁is")
        marked = template.replace("{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
                                  "{% endgeneration %}{% else %}{{ m.content }}{% endif %}")  # fmt: skip
        ids, targets, across = ChatTemplate(tokenizer, marked).encode(messages)
        learnt = [token for token, on in zip(tokenizer.inner.convert_ids_to_tokens(ids), targets, strict=True) if on]
        assert not across, "marks learn it, as transformers' masks do"
        assert learnt[0] in ("ĠRome", "▁Rome")
    clean = ChatTemplate(of_marks(), template.replace("assistant: {%", "assistant:{%"))
    ids, targets, across = clean.encode(messages)
    assert not across
    assert sum(targets) == sum(clean.encode([messages[0], messages[1]]).targets) > 2


USER, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "is"}
ASKED = "<user>one<end>"


@pytest.mark.parametrize(("record", "text", "learnt"), [
    ({"tools": TOOLS}, f"<system>weather <end>{ASKED}<assistant>is<end>", 1),
    ({"tools": json.dumps(TOOLS)}, f"<system>weather <end>{ASKED}<assistant>is<end>", 1),
    ({"tools": [json.dumps(TOOLS[0])]}, f"<system>weather <end>{ASKED}<assistant>is<end>", 1),
    ({"functions": [TOOLS[0]["function"]]}, f"<system>weather <end>{ASKED}<assistant>is<end>", 1),
    ({"functions": [TOOLS[0]["function"]], "tools": TOOLS}, f"<system>weather weather <end>{ASKED}<assistant>is<end>", 1),
    ({"chat_template_kwargs": json.dumps({"tools": TOOLS})}, f"<system>weather <end>{ASKED}<assistant>is<end>", 1),
    ({"tools": "", "chat_template_kwargs": "", "system": "", "documents": None}, f"{ASKED}<assistant>is<end>", 1),
    ({"chat_template_kwargs": {"enable_thinking": False}}, f"{ASKED}<assistant>is<end>", 1),
    ({"documents": [{"text": "Rome"}]}, f"<system>Rome<end>{ASKED}<assistant>is<end>", 1),
    ({"documents": ["Rome"]}, f"{ASKED}<assistant>is<end>", 1),
    ({"system": "a"}, f"<system>a<end>{ASKED}<assistant>is<end>", 1),
    ({"messages": [USER, ANSWER | {"tool_calls": json.dumps(CALLS)}]}, f"{ASKED}{CALL}", 1),
    ({"messages": [USER, ANSWER | {"function_call": CALLS[0]["function"]}]}, f"{ASKED}{CALL}", 1),
    ({"messages": [USER, ANSWER | {"function_call": {}, "tool_calls": None}]}, f"{ASKED}<assistant>is<end>", 1),
    ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}]},
     ASKED + CALL.replace('>is', '>'), 1),
    ({"messages": [USER, ANSWER | {"reasoning_content": "a"}]}, f"{ASKED}<assistant>(a)is<end>", 1),
    ({"messages": [USER | {"name": "Rome:"}, ANSWER]}, "<user>Rome:one<end><assistant>is<end>", 1),
    ({"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]}, f"{ASKED}<assistant>is<end>" * 2, 1),
    ({"messages": [USER, ANSWER | {"weight": 1}, USER, ANSWER | {"train": False}]},
     f"{ASKED}<assistant>is<end>" * 2, 1),
    ({"messages": [USER, ANSWER | {"loss": True}, USER, ANSWER | {"loss": False}]},
     f"{ASKED}<assistant>is<end>" * 2, 1),
])  # fmt: skip
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_keys_of_a_chat_reach_the_template_or_say_what_is_learnt(record, text, learnt, template):
    found, answers = shown({"messages": [USER, ANSWER]} | record, template)
    assert found == text
    assert len(answers) == learnt
    assert all(answer.strip().endswith("<end>") and "user" not in answer for answer in answers)


@pytest.mark.parametrize(("record", "why"), [
    ({"tools": "weather"}, "tools is a text that is not JSON: weather"),
    ({"tools": {"a": 1}}, "tools is a dict: expected a list of objects, or its JSON text"),
    ({"tools": [3]}, "an item of tools is a int: expected an object"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs is a list: expected an object"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has tokenize, which is an argument"),
    ({"tools": TOOLS, "chat_template_kwargs": {"tools": []}}, "its tools and those in chat_template_kwargs differ"),
    ({"system": 3}, "system is a int, not a text"),
    ({"system": "a", "messages": [{"role": "system", "content": "b"}, USER, ANSWER]}, "system is beside a first"),
    ({"messages": [USER, ANSWER | {"weight": 0.5}]}, r"weight of message 1 is 0\.5: 0 or 1"),
    ({"messages": [USER, ANSWER | {"tool_calls": "f("}]}, "tool_calls of message 1 is a text that is not JSON"),
    ({"messages": [USER, ANSWER | {"tool_calls": CALLS, "function_call": {"name": "f"}}]}, "give one of them"),
    ({"messages": 5, "images": ["a.png"]}, "messages is not a list"),
])  # fmt: skip
def test_keys_without_a_plain_meaning_are_refused_by_name(record, why):
    found = record_of({"messages": [USER, ANSWER]} | record, "here")
    assert isinstance(found, BadRecord)
    with pytest.raises(Malformed, match=why):
        raise Malformed(found.why)


def test_answers_that_are_not_learnt_and_marks_that_are_not_as_many_cannot_be_told_apart():
    template = "{% generation %}{% for m in messages %}{{ m.content }} {% endfor %}{% endgeneration %}"
    both = [ANSWER, ANSWER | {"weight": 0}]
    with pytest.raises(ValueError, match="marks 1 answers of 2 messages"):
        ChatTemplate(of_words(), template).encode([USER, *both])
    assert sum(ChatTemplate(of_words(), template).encode([USER, ANSWER, ANSWER]).targets) == 3


def test_a_tokenizer_with_a_template_for_tools_takes_that_for_chats_with_tools():
    tokenizer = of_words()
    tokenizer.inner.chat_template = {"default": "{{ messages[0].content }}", "tool_use": MARKED}
    template = ChatTemplate(tokenizer)
    assert template.render([USER, ANSWER], {"tools": TOOLS}).text == f"<system>weather <end>{ASKED}<assistant>is<end>"
    assert template.render([USER]).text == "one"


def test_keys_at_which_nobody_looks_are_counted_by_name(tmp_path):
    tokenizer = of_words()
    tokenizer.inner.chat_template = PLAIN.replace("tools", "tolls")
    lines = [
        {
            "messages": [USER | {"weight": 1}, ANSWER | {"weight": 1, "id": 3, "reasoning": "a"}],
            "id": 1,
            "tools": TOOLS,
        },
        {"messages": [USER, ANSWER], "id": 2, "chat_template_kwargs": {"style": "a"}, "prompt": None},
        {"text": "one", "id": 3, "tools": []},
        {"prompt": "one", "completion": " a", "text": "is"},
    ]
    data = opened(tmp_path, write_lines(tmp_path / "a.jsonl", lines), tokenizer=tokenizer, packing=False)
    assert data.notes[-1] == (
        "training: not used: the keys id (3 records), tools (2 records), messages[].id (1 record), messages[].weight "
        "(1 record), chat_template_kwargs.style (1 record), text (1 record)"
    )
    again = opened(tmp_path, tmp_path / "a.jsonl", tokenizer=tokenizer, packing=False)
    assert again.notes == data.notes, "kept with the tokens"
    streamed = opened(tmp_path, tmp_path / "a.jsonl", tokenizer=tokenizer, packing=False, streaming=True)
    assert any("not used: the keys id (1 record)" in note for note in streamed.notes)  # of the first and the last


@pytest.mark.parametrize("streaming", [True, False])
def test_a_table_gives_every_row_the_keys_of_all_and_nulls_are_not_there(tmp_path, streaming):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tokenizer = of_bytes()
    tokenizer.inner.chat_template = MARKED
    called = [USER, ANSWER | {"tool_calls": CALLS}]
    other = [USER, ANSWER | {"tool_calls": [{"type": "function", "function": {"name": "time", "arguments": {"a": 1}}}]}]
    rows = [
        {"messages": called, "tools": TOOLS, "id": 3},
        {"messages": other, "tools": [], "id": 4},
        {"messages": [USER, ANSWER | {"weight": 1}], "id": 5},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    options = {"tokenizer": tokenizer, "packing": False, "length": 128, "streaming": streaming}
    found = opened(tmp_path, tmp_path / "a.parquet", **options)
    wanted = opened(tmp_path, write_lines(tmp_path / "a.jsonl", rows), **options)
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        with pyarrow.ipc.new_stream(sink, (table := pyarrow.Table.from_pylist(rows)).schema) as writer:
            writer.write_table(table)
    again = opened(tmp_path, tmp_path / "a.arrow", **options)
    for at in range(3):
        for made in (found, again):
            assert made.train[at]["input_ids"].equal(wanted.train[at]["input_ids"])
            assert made.train[at]["labels"].equal(wanted.train[at]["labels"])
    assert "not used: the key id (3 records)" in found.notes[-1]


# --- conversations in LLaVA's form ------------------------------------------------------------------

TURNS = [
    {"from": "human", "value": "one"},
    {"from": "function_call", "value": json.dumps(CALLS[0]["function"])},
    {"from": "observation", "value": "a"},
    {"from": "gpt", "value": "is", "weight": 0},
]


def test_conversations_of_texts_are_chats_for_a_model_without_images(tmp_path):
    tokenizer = of_words()
    tokenizer.inner.chat_template = PLAIN
    record = {"conversations": TURNS, "system": "a", "tools": json.dumps(TOOLS)}
    options = {"tokenizer": tokenizer, "packing": False, "length": 64}
    data = opened(tmp_path, write_lines(tmp_path / "a.jsonl", [record]), **options)
    text = f"<system>weather <end><system>a<end>{ASKED}{CALL.replace('>is', '>')}<tool>a<end><assistant>is<end>"
    assert data.train[0]["input_ids"].tolist() == tokenizer.inner(text, add_special_tokens=False)["input_ids"]
    learnt = [label for label in data.train[0]["labels"].tolist() if label >= 0]
    assert tokenizer.inner.convert_ids_to_tokens(learnt)[-1] == "<end>"
    assert len(learnt) == 4  # those of the call: the last answer has weight 0
    parts = {"messages": [USER | {"content": [{"type": "text", "text": "one"}] * 2}, ANSWER]}
    with pytest.raises(ConfigError, match="is a conversation with images, and the model takes none"):
        opened(tmp_path, write_lines(tmp_path / "b.jsonl", [parts]), **options)


@pytest.mark.parametrize(("turn", "why"), [
    ({"from": "function_call", "value": "weather"}, "turn 1 is from function_call, and its value is no JSON"),
    ({"from": "tool_call", "value": "{}"}, "turn 1 is from 'tool_call': one of human, .*function_call, observation"),
    ({"from": "gpt", "value": "a", "weight": 3}, "weight of message 1 is 3: 0 or 1"),
])  # fmt: skip
def test_turns_of_another_kind_are_refused_by_name(turn, why):
    with pytest.raises(Malformed, match=why):
        from_llava({"conversations": [TURNS[0], turn]})


def test_a_long_text_counts_its_keys_once():
    record = record_of({"text": "a", "id": 1}, "here")
    assert record == Text("a", "here", unused=("id",))
    with pytest.raises(DataError, match="does not only append"):
        ChatTemplate(of_words(), "{{ messages | length }}").render(CHAT)
