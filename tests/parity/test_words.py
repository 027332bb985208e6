"""What `zero3d models TYPE` says rests on runs: each "yes" trains as one rank does, each "no" is an engine's own."""

import pytest
import tiny_types
import words
from contracts import hashed

from zero3d.models.build import build
from zero3d.models.layer_kinds import feed_forward_left_out, kinds_left_out
from zero3d.tools.cli.models import usual_config
from zero3d.tools.vision.table import read
from zero3d.tools.vision.trial import TRAINED

MANY = 25  # types of a commit
NOT_TINY = {  # types of text that no rule makes a small model of, or whose usual sizes transformers cannot build
    "blenderbot", "blt", "dbrx", "gemma4_assistant", "gemma4_unified_assistant", "mpt", "musicgen", "musicgen_melody",
    "reformer", "roc_bert", "whisper", "xmod", "zamba",
}  # fmt: skip


def tried():
    """The types that are tried: those of images that plain PyTorch trains, and those of text."""
    with_images = [row.type for row in read().types if row.trained == TRAINED]
    return sorted(({*tiny_types.types()} - NOT_TINY) | {*with_images}, key=hashed)


def test_a_short_one(ranks):
    found = words.words_of("lfm2")
    assert words.differences("lfm2", {word: found[word] for word in ("pp", "lora")}, ranks) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", tried()[:MANY])
def test_each_word_is_what_a_run_does(ranks, kind):
    """Others for each commit; python tests/words.py tries all."""
    assert kinds_left_out(words.model_of(kind)) == ()
    assert words.differences(kind, words.words_of(kind), ranks) == []


@pytest.mark.long
@pytest.mark.parametrize(("kind", "word"), [
    ("granite_docling", "pp"),  # as many rows of images as a sequence of a trial had tokens
    ("glm5_next", "tp"),  # whose plan cuts the last matrix of recurrences alone
    ("inkling_text", "sp"),  # attention has a bias of a rank's rows alone
    ("chameleon", "sp"),  # whose decoder has the images
])  # fmt: skip
def test_what_a_trial_was_wrong_about(ranks, kind, word):
    found = words.words_of(kind)
    assert found[word].supported is (word == "pp")
    assert words.differences(kind, {word: found[word]}, ranks) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cohere2_moe", "qwen3_moe"])
def test_a_type_of_experts_is_asked_about_with_a_dense_layer_too(kind):
    assert feed_forward_left_out(build(usual_config(kind))) == ()
