"""A text that the trained model goes on with, at the end of a run."""

from __future__ import annotations

import torch

from zero3d.config import Config
from zero3d.data.tokenizers import Tokenizer
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.models.bases import config_number
from zero3d.train.progress import Progress

SAMPLE_LENGTH, TEMPERATURE, TOP_K = 240, 0.7, 40


def sample(config: Config, engine: Engine, tokenizer: Tokenizer | None, progress: Progress) -> str:
    """Return `generate`'s text, or "" with its failure in one line: the rest of the run is there by then."""
    prompt = config.evaluate.prompt
    if prompt is None or tokenizer is None:
        return ""
    try:
        return generate(engine, prompt, tokenizer)
    except Exception as error:  # noqa: BLE001 (printed; no model's own failure ends a run that is done)
        lines = str(error).splitlines() or [""]
        progress.say(f"no sample for evaluate.prompt: {type(error).__name__}: {lines[0]}")
        return ""


def generate(engine: Engine, prompt: str, tokenizer: Tokenizer) -> str:
    """Return a sampled continuation of the prompt, the same on all ranks, as long as the model has positions.

    Raises ConfigError where it has none left.
    """
    torch.manual_seed(0)
    ids = torch.tensor(tokenizer.encode([prompt]))
    positions = config_number(next(iter(engine.chunks.values())), "max_position_embeddings")
    room = SAMPLE_LENGTH if positions is None else min(SAMPLE_LENGTH, positions - ids.shape[1])
    if room < 1:
        raise ConfigError(f"evaluate.prompt has {ids.shape[1]} tokens and the model {positions} positions: shorten it.")
    tokens = engine.generate(ids, room, do_sample=True, temperature=TEMPERATURE, top_k=TOP_K)
    return tokenizer.decode(tokens[0].tolist())
