"""What a seed draws trains as with the plain library: transformers, PEFT, Accelerate or PyTorch alone, on two ranks."""

import pytest
from draws import MODELS, OPTIONS, WAYS, draw, judge

LONG = pytest.mark.long
FOUND = {  # seeds that differed when they were first drawn: what was wrong
    "train_batch": {
        0: "labels of each token were weighed as those of the next one",
        10: "a label of each row was weighed by the number of tokens behind the first, which is none: NaN",
        11: "an encoder-decoder's labels were weighed as those of the next token",
    },
    "accelerate": {
        1: "clip_grad_norm_ returned NaN before the step, so that a guard on it left out every step",
        5: "the same, of a head on rows, where one step is left out for another reason",
    },
    "files": {
        0: "packed texts of an M-RoPE model saw each other",
        1: "a completion gained a space where a tokenizer marks the beginnings of words",
        9: "packed completions of a vision-language model saw each other, behind the cache that it kept",
    },
    "generate": {
        7: "a pipeline forgot the repetition penalty",
        8: "a pipeline forgot bad words and the least number of new tokens",
        12: "a pipeline attended to padding",
    },
}  # fmt: skip
OTHERS = {  # seeds that see planted faults which those above do not
    "train_batch": [42],  # sp, whose sequences are padded on the left; windows with a micro-batch without targets
    "files": [12],  # chats
    "loop": [3, 6, 9], "deepspeed": [1, 6, 11], "trainer": [0, 9],
}  # fmt: skip
SOME = {way: [*FOUND.get(way, {}), *OTHERS.get(way, [])] for way in WAYS}
MORE = {"train_batch": 40, "loop": 16, "deepspeed": 12, "accelerate": 16, "trainer": 12, "files": 16, "generate": 20}
EACH = 4  # draws of a case
PEERS = ("deepspeed", "accelerate", "trainer")  # whose own files compare each with its library in `make test`, too


@pytest.mark.parametrize(
    ("way", "seeds"),
    [
        *(pytest.param(way, seeds, marks=LONG if way in PEERS else ()) for way, seeds in SOME.items()),
        *(
            pytest.param(way, [*range(first, first + EACH)], marks=LONG)
            for way, last in MORE.items()
            for first in range(0, last, EACH)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{min(value)}-{max(value)}",
)
def test_what_is_drawn_trains_as_with_the_plain_library(ranks, tmp_path, way, seeds):
    drawn = [draw(way, seed) for seed in seeds]
    for said in ranks(2, judge, drawn, tmp_path):
        differing = [f"{one}: {line}" for one, line in zip(drawn, said, strict=True) if line != "same"]
        unlike = [line for line in differing if ": refused: " not in line and ": not run by the plain" not in line]
        assert unlike == []
        assert len(differing) < len(drawn), "all are refused: nothing was compared"


def test_the_draws_reach_every_model_stage_and_option():
    drawn = {way: [draw(way, seed) for seed in [*SOME[way], *range(MORE[way])]] for way in WAYS}
    whole = [one for way in ("train_batch", "loop", "deepspeed", "accelerate", "trainer") for one in drawn[way]]
    assert {one.model for one in whole} == {*MODELS}
    assert {(one.stage, one.accumulate) for one in whole} == {(stage, n) for stage in range(4) for n in (1, 2, 3)}
    for name in ("packed", "lora", "recompute", "sgd", "uneven", "hollow"):
        assert {getattr(one, name) for one in whole} == {False, True}, name
    assert {one.padding for one in whole} == {"none", "left", "right"}
    assert {one.axis for one in drawn["train_batch"]} == {"", "tp", "pp", "sp"}
    for way in OPTIONS:
        values = {}
        for one in drawn[way]:
            for name, value in one.options:
                values.setdefault(name, set()).add(value)
        assert all(len(several) > 1 or way == "generate" for several in values.values()), (way, values)
