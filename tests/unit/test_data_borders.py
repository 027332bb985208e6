"""A prompt and its completion are one text: its tokens, and which of them begin in the completion, by every tokenizer."""

import random
import re
from itertools import pairwise

import pytest
from corpora import opened, write_lines
from token_kinds import of_bytes, of_marks, of_words, wrapped
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from zero3d.data.batches import BatchStream, Portions
from zero3d.data.tokenizers import ByteTokenizer, HfTokenizer
from zero3d.errors import DataError

PIECES = ("a", "is", "Rome", "one", "2+2=", " ", " ", "  ", "é", "\N{GRINNING FACE}", "中", "\n", "fi", "4", "xyz", "")


def begins_by_bytes(tokenizer, text):
    """Where each token begins, and ends, in bytes: a byte-level token has a character for each."""
    ends = [0]
    for token in tokenizer.inner.convert_ids_to_tokens(tokenizer.encode([text])[0]):
        ends.append(ends[-1] + len(token))
    return list(pairwise(ends))


def begins_by_words(tokenizer, text):
    return [(0, 0), *(found.span() for found in re.finditer(r"\S+", text))]


def begins_by_marks(tokenizer, text):
    """Where each token begins, of texts without unknown characters: what it shows, a mark for a blank."""
    tokens = tokenizer.inner.convert_ids_to_tokens(tokenizer.encode([text])[0])[1:]
    at, spans = (-1 if tokens and text and not text.startswith(" ") else 0), [(0, 0)]
    for token in tokens:
        spans.append((max(at, 0), max(at + len(token), 0)))
        at += len(token)
    return spans


KINDS = {
    "bytes": (of_bytes, begins_by_bytes, PIECES),
    "trimmed": (lambda: of_bytes(trim=True), begins_by_bytes, PIECES),
    "words": (of_words, begins_by_words, PIECES),
    "metaspace": (of_marks, begins_by_marks, ("a", "is", "Rome", "one", "2+2=", " ", "4", "")),
    "unigram": (lambda: of_marks("unigram"), begins_by_marks, ("a", "is", "Rome", "one", "2+2=", " ", "4", "")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_whole_text_and_targets_begin_behind_its_border(kind):
    make, begins, pieces = KINDS[kind]
    tokenizer, draw = make(), random.Random(7)
    pairs = [tuple("".join(draw.choices(pieces, k=draw.randrange(6))) for _ in range(2)) for _ in range(300)]
    seen = set()
    for (prompt, completion), found in zip(pairs, tokenizer.encode_parted(pairs), strict=True):
        assert found.ids == tokenizer.encode([prompt + completion])[0]
        border = len(prompt.encode() if begins is begins_by_bytes else prompt)
        added = tokenizer.inner.convert_ids_to_tokens(found.ids)[:1] == ["<s>"]
        spans = begins(tokenizer, prompt + completion)[added:]
        behind = [at for at, (start, _) in enumerate(spans, added) if start >= border]
        assert [*range(found.first, len(found.ids))] == behind, (prompt, completion)
        assert found.across == any(start < border < end for start, end in spans)
        seen.add((found.across, bool(behind)))
    assert len(seen) >= 3


@pytest.mark.parametrize("make", [of_marks, lambda: of_marks("unigram"), lambda: of_marks("prepend"),
                                  lambda: of_marks(prepend_scheme="first")])  # fmt: skip
def test_no_word_begins_at_the_border_where_none_is(tmp_path, make):
    """Llama 2, Mistral and Phi-3 mark beginnings of words: tokenized apart, each completion began with a blank."""
    tokenizer = make()
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}])
    row = opened(tmp_path, path, tokenizer=tokenizer, packing=False, length=32).train[0]
    assert row["input_ids"].tolist() == [*tokenizer.inner("2+2=4")["input_ids"], 2]
    assert tokenizer.decode(row["input_ids"].tolist()) == "2+2=4"
    learnt = [label for label in row["labels"].tolist() if label >= 0]
    assert tokenizer.inner.convert_ids_to_tokens(learnt) == ["4", "</s>"]


def test_a_token_across_the_border_is_no_target_and_is_counted(tmp_path):
    tokenizer = of_bytes()
    lines = [{"prompt": "Italy is ", "completion": "Rome"}, {"prompt": "Italy is", "completion": " Rome"}]
    data = opened(tmp_path, write_lines(tmp_path / "a.jsonl", lines), tokenizer=tokenizer, packing=False, length=16)
    rows = [data.train[at] for at in range(2)]
    assert rows[0]["input_ids"].equal(rows[1]["input_ids"])
    learnt = [tokenizer.inner.convert_ids_to_tokens([i for i in row["labels"].tolist() if i >= 0]) for row in rows]
    assert learnt == [["</s>"], ["ĠRome", "</s>"]]
    assert any("1 example with a token that is both the end of its prompt" in note for note in data.notes)


def test_what_the_tokenizer_adds_is_added_once_and_a_text_may_hold_it():
    from transformers import ByT5Tokenizer

    words = of_words()
    assert [words.encode_parted([pair])[0].ids for pair in (("a", " is </s>"), ("", ""), ("a", ""))] == [
        [1, 8, 9, 2],
        [1],
        [1, 8],
    ]
    masked = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3, "<unk>": 4}, "<unk>"))
    masked.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    masked.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    found = wrapped(masked, bos_token=None, eos_token=None).encode_parted([("a", " b"), ("a", "")])
    assert [(each.ids, each.first) for each in found] == [([0, 2, 3, 1], 2), ([0, 2, 1], 2)]
    bytes_ = HfTokenizer(ByT5Tokenizer(), "byt5", "")
    whole = bytes_.encode_parted([("é", "é"), ("a", "</s>")])
    assert [each.first for each in whole] == [2, 1]
    assert whole[0].ids == bytes_.encode(["éé"])[0]
    assert ByteTokenizer().encode_parted([("é", "é")])[0].first == 2


def test_a_tokenizer_that_is_not_fast_is_asked_about_the_prompt_alone():
    from transformers import PythonBackend

    class Pairs(PythonBackend):
        """Joins ab, cd and blanks with what follows, from the left."""

        vocab_size = 40

        def get_vocab(self):
            return {}

        def _tokenize(self, text, **_):
            return re.findall("ab|bc|cd| ?.", text)

        def _convert_token_to_id(self, token):
            return 3 + sum(map(ord, token)) % 1000

        def convert_tokens_to_string(self, tokens):
            return "".join(tokens)

    Pairs._convert_id_to_token = lambda self, index: names[index]
    tokenizer = HfTokenizer(Pairs(), "pairs", "")
    names = {tokenizer.inner._convert_token_to_id(token): token for token in ("ab", "bc", "cd", *"abcde", " e", " a")}

    def learnt(prompt, completion):
        (found,) = tokenizer.encode_parted([(prompt, completion)])
        return [names[index] for index in found.ids[found.first :]], found.across

    assert learnt("ab", "cd") == (["cd"], False)
    assert learnt("a", "bcd") == (["cd"], True)
    assert learnt("c ", "e") == ([], True)
    assert learnt("c", " ea") == ([" e", "a"], False)
    assert learnt("", "ab") == (["ab"], False)
    assert learnt("ab", "") == ([], False)


# --- runs of a version before -----------------------------------------------------------------------


def streams(tmp_path, lines, **options):
    path = write_lines(tmp_path / "a.jsonl", lines)
    data = opened(tmp_path, path, packing=False, length=32, **options)
    return data, BatchStream(data.train, Portions(1, 1, 1, 1))


def test_a_run_whose_rows_are_others_now_is_told_why_and_what_to_type(tmp_path):
    _, stream = streams(tmp_path, [{"prompt": "ab", "completion": "c"}])
    saved = {name: value for name, value in stream.state().items() if name != "rule"}  # as written before
    stream.restore(saved)  # rows are the same: nothing to say
    with pytest.raises(DataError, match=r"digest was 0 .*tokenized prompt and completion apart.*zero3d ckpt export"):
        stream.restore(saved | {"digest": "0"})
    with pytest.raises(DataError, match=r"digest was 0 and is now \w+\. Give the same .*, or start a new run\.$"):
        stream.restore(stream.state() | {"digest": "0"})


@pytest.mark.parametrize(("line", "rule"), [({"prompt": "ab", "completion": "c"}, 2), ({"text": "ab"}, None)])
def test_records_that_are_tokenized_when_they_are_needed_have_their_rule_noted(tmp_path, line, rule):
    from zero3d.checkpoint.resume_contract import resume_guarantee
    from zero3d.config import Batch
    from zero3d.train.resume_settings import OF_BATCHES, batches_of

    data, _ = streams(tmp_path, [line], streaming=True)
    assert data.rule == rule
    noted = {name: value for name, value in batches_of(Batch(1, 1, 1, 1), 9, data.rule).items() if name in OF_BATCHES}
    about = {"leaves": None, "dp": 1, "options": [], "scheduler": None}
    line = resume_guarantee(about | {"batch": 1, "micro_batch": 1}, about | noted)
    assert ("tokenization 1 -> 2" in line) is (rule is not None)
