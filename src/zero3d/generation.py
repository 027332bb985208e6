"""Tokens one after another, for models without a generate of their own and for pipelines.

    prefix -> logits of the next token (on the rank of the last part) -> token -> all ranks -> longer prefix

The prefix is computed again for every token: there is no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zero3d.errors import ConfigError
from zero3d.nested import tensors_in

OPTIONS = ("do_sample", "temperature", "top_k")


def check_options(options: Mapping[str, Any], vocabulary: int | None = None) -> None:
    """Raise ConfigError for options that a pipeline's `generate` does not have, and for values that cannot work.

    All ranks check before anything is sent: only one of them picks tokens, and it would fail alone.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ConfigError(
            f"generate in a pipeline has no option {unknown[0]!r}: pass {', '.join(OPTIONS)}, or export the model and "
            "generate with pp=1."
        )
    if not options.get("do_sample", False):
        return
    temperature, top_k = options.get("temperature", 1.0), options.get("top_k")
    if not (isinstance(temperature, (int, float)) and temperature > 0):
        raise ConfigError(
            f"temperature={temperature!r} divides logits and must be a number above 0: pass 1.0, or do_sample=False "
            "for the most likely token."
        )
    if top_k is not None and not (isinstance(top_k, int) and 1 <= top_k <= (vocabulary or top_k)):
        raise ConfigError(
            f"top_k={top_k!r} must be a whole number from 1 to the vocabulary's {vocabulary or 'size'}: pass one of "
            "them, or top_k=None for all tokens."
        )


def generate(
    forward: Callable[[Tensor], Any],
    everywhere: Callable[[Tensor], Tensor],
    ids: Tensor,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """Continue `ids` [batch, length] by `max_new_tokens`.

    forward     ids -> the model's output, or None where another rank has it
    everywhere  one rank's [batch] float64 plus zeros of the others -> the sum, on all of them
    Sampling draws from torch's default generator, on the rank that has the output.
    """
    for _ in range(max_new_tokens):
        output = forward(ids)
        token = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
        if output is not None:
            logits = next(tensors_in(getattr(output, "logits", output)))[:, -1].float()
            token += _pick(logits, do_sample, temperature, top_k)
        ids = torch.cat([ids, everywhere(token).to(ids)[:, None]], dim=1)
    return ids


def _pick(logits: Tensor, do_sample: bool, temperature: float, top_k: int | None) -> Tensor:
    """[batch, vocabulary] -> [batch]."""
    if not do_sample:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        logits[logits < logits.topk(top_k).values[:, -1:]] = float("-inf")
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]
