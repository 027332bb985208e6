"""Tokens one after another, for models without a generate of their own and for pipelines.

    prefix -> logits of the next token (on the rank of the last model chunk) -> token -> all ranks -> longer prefix

Hugging Face's models choose tokens by their own `generate` in a pipeline, too, on every rank: each is given the logits,
and masks, positions, penalties, ends and samples are those of one process. Ranks draw alike: all have the random state
of the rank that has the output.

The prefix is computed again for every token: there is no cache.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.packing import inner_model
from zero3d.nested import tensors_in

LAST = "logits_to_keep"
OPTIONS = ("do_sample", "temperature", "top_k")
OF_A_CALL = ("use_cache", "return_dict", "past_key_values", "output_attentions", "output_hidden_states")
NOT_IN_A_PIPELINE = {
    "assistant_model": "which needs a cache",
    "prompt_lookup_num_tokens": "which needs a cache",
    "past_key_values": "which are a cache",
    "penalty_alpha": "contrastive search, which needs a cache",
    "dola_layers": "which needs the logits of all layers",
    "guidance_scale": "which needs a cache",
    "inputs_embeds": "where a prompt must be token ids",
    "output_attentions": "which are on several ranks",
    "output_hidden_states": "which are on several ranks",
    "custom_generate": "which is code of its own",
}


def check_names(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that `generate` does not have where a model has none of its own."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ConfigError(
            f"generate in a pipeline has no option {unknown[0]!r} for a model without a generate of its own: pass "
            f"{', '.join(OPTIONS)}, or export the model and generate with pp=1."
        )


def check_options(options: Mapping[str, Any], vocabulary: int | None = None) -> None:
    """Raise ConfigError for values that cannot work.

    All ranks check before anything is sent: where only one of them picks tokens, it would fail alone.
    """
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


def check_supported(model: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for what transformers' generate needs a cache, another model or a model's inside for."""
    configs = options.get("generation_config"), getattr(model, "generation_config", None)
    for name, why in NOT_IN_A_PIPELINE.items():
        values = [options.get(name), *(getattr(config, name, None) for config in configs)]
        idle = (1.0,) if name == "guidance_scale" else ()
        if any(value is not None and value is not False and value not in idle for value in values):
            raise ConfigError(
                f"generate in a pipeline cannot do {name!r}, {why}: leave it out, or export the model and generate "
                "with pp=1."
            )


def generate_as_whole(
    model: Any, logits_of: Callable[[dict[str, Any]], Tensor], ids: Tensor, max_new_tokens: int, **options: Any
) -> Tensor:
    """Continue `ids` by a Hugging Face model's own generate, of a model that this rank has a part of.

    logits_of  what the model's forward is given -> logits of the next token [batch, vocabulary], on every rank
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    stand_in = copy.copy(model)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        vars(stand_in)[hooks] = OrderedDict()  # those of the model's forward run where its parts are

    def forward(**given: Any) -> Any:
        batch = {name: value for name, value in given.items() if value is not None and name not in OF_A_CALL}
        return CausalLMOutputWithPast(logits=logits_of(batch)[:, None])

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    stand_in.forward = forward
    out: Tensor = stand_in.generate(ids, max_new_tokens=max_new_tokens, **options | {"use_cache": False})
    return out


class Ending(NamedTuple):
    """When a sequence ends: after one of the tokens `eos`; the rest of it is `pad`.

    early   stop when all have ended; False where other ranks must see as many forwards
    """

    eos: tuple[int, ...] = ()
    pad: int = 0
    early: bool = True

    @classmethod
    def of(cls, model: nn.Module, early: bool = True) -> Ending:
        """Return what a Hugging Face model's generation_config says; a module without one never ends."""
        config = getattr(model, "generation_config", None)
        eos = getattr(config, "eos_token_id", None)
        if eos is None:
            return cls(early=early)
        ends = tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
        pad = getattr(config, "pad_token_id", None)
        return cls(ends, ends[0] if pad is None else int(pad), early)


def next_logits(output: Any) -> Tensor:
    """Return [batch, vocabulary] fp32 of the token after the last, from what a model returns for [batch, length]."""
    return next(tensors_in(getattr(output, "logits", output)))[:, -1].float()


def last_only(model: nn.Module) -> dict[str, int]:
    """Return the option that has a forward make logits of the last position alone, where it takes one."""
    return {LAST: 1} if LAST in inspect.signature(inner_model(model).forward).parameters else {}


def generate(
    forward: Callable[[Tensor], Tensor | None],
    everywhere: Callable[[Tensor], Tensor],
    ids: Tensor,
    max_new_tokens: int,
    ending: Ending,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """Continue `ids` [batch, length] by `max_new_tokens`.

    forward     ids -> logits of the next token [batch, vocabulary], or None where another rank has them
    everywhere  one rank's [batch] float64 plus zeros of the others -> the sum, on all of them
    Sampling draws from torch's default generator, on the rank that has the output.
    """
    eos, over = torch.tensor(ending.eos, device=ids.device), torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    length = ids.shape[1] + max_new_tokens
    for _ in range(max_new_tokens):
        logits = forward(ids)
        token = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
        if logits is not None:
            token += _pick(logits, do_sample, temperature, top_k)
        token = everywhere(token).to(ids).masked_fill(over, ending.pad)
        ids, over = torch.cat([ids, token[:, None]], dim=1), over | torch.isin(token, eos)
        if ending.eos and bool(over.all()):
            length = min(length, ids.shape[1])
            if ending.early:
                break
    return ids[:, :length]


def _pick(logits: Tensor, do_sample: bool, temperature: float, top_k: int | None) -> Tensor:
    """Choose tokens [batch] by logits [batch, vocabulary]."""
    if not do_sample:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        logits[logits < logits.topk(top_k).values[:, -1:]] = float("-inf")
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]
