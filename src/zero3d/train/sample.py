"""A text that the trained model goes on with, at the end of a run.

evaluate.prompt    it begins with
text               that text
true               the first held-out sample, else the first that is trained on: the first words of a text, and of a
                   chat or a prompt all that comes before the answer
false, null        there is none

A prompt of one's own is gone on with for 240 tokens; the other, which nobody has asked for, for a few: where a rank has
a part of the model, the prefix is computed again for every token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero3d.config import Config
from zero3d.data.dataset import DataSet
from zero3d.data.images import PIXELS
from zero3d.data.sequences import IGNORED, Sample
from zero3d.data.tokenizers import Tokenizer
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.models.bases import config_number
from zero3d.train.progress import Progress

SAMPLE_LENGTH, TEMPERATURE, TOP_K = 240, 0.7, 40
UNASKED = 32  # tokens of a sample that no prompt asks for
WORDS, LONGEST = 12, 128  # tokens of the data that it begins with: of a text, and the most before an answer
LOOKED_AT = 8  # samples, until one has so short a prompt


def sample(config: Config, engine: Engine, data: DataSet, progress: Progress) -> str:
    """Return `generate`'s text, or "" with its failure in one line: the rest of the run is there by then."""
    prompt, tokenizer = config.evaluate.prompt, data.tokenizer
    if prompt is None or prompt is False or tokenizer is None:
        return ""
    try:
        if prompt is not True:
            return generate(engine, torch.tensor(tokenizer.encode([str(prompt)])), tokenizer)
        ids = beginning(data)
        with torch.compiler.set_stance("force_eager"):  # to compile for every length takes longer than the sample
            return "" if ids is None else generate(engine, ids, tokenizer, UNASKED)
    except Exception as error:  # noqa: BLE001 (printed; no model's own failure ends a run that is done)
        lines = str(error).splitlines() or [""]
        said = f"no sample for evaluate.prompt: {type(error).__name__}: {lines[0]}"
        progress.say(said if prompt is not True else f"{said} (evaluate.prompt=false asks for none)")
        return ""


def beginning(data: DataSet) -> Tensor | None:
    """Return [1, tokens] of the data that a sample begins with; None where the first are images', or too long."""
    samples = data.validation or data.train
    for index in range(min(LOOKED_AT, len(samples))):
        found = samples[index]
        if PIXELS in found:
            return None
        if (ids := prompt_of(found)).numel():
            return ids[None]
    return None


def prompt_of(found: Sample) -> Tensor:
    """Return the first tokens of a text, or all before the first answer; none where these are more than LONGEST."""
    ids, learnt = found["input_ids"], (found["labels"] != IGNORED).nonzero().flatten()
    first = int(learnt[0]) if learnt.numel() else len(ids)
    if first > 1:
        return ids[:first] if first <= LONGEST else ids[:0]
    others = (found["labels"][1:] == IGNORED).nonzero().flatten()  # the next document, or padding
    end = int(others[0]) + 1 if others.numel() else len(ids)
    return ids[: min(WORDS, end)]


def generate(engine: Engine, ids: Tensor, tokenizer: Tokenizer, length: int = SAMPLE_LENGTH) -> str:
    """Return a sampled continuation of ids [1, tokens], the same on all ranks, as long as the model has positions.

    Raises ConfigError where it has none left.
    """
    torch.manual_seed(0)
    positions = config_number(next(iter(engine.chunks.values())), "max_position_embeddings")
    room = length if positions is None else min(length, positions - ids.shape[1])
    if room < 1:
        raise ConfigError(f"evaluate.prompt has {ids.shape[1]} tokens and the model {positions} positions: shorten it.")
    try:
        tokens = engine.generate(ids, room, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K)
    finally:
        engine.release()  # what verifies an export next needs the room
    return tokenizer.decode(tokens[0].tolist())
