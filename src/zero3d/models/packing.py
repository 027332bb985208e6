"""Whether a model keeps packed documents apart: refused where it does not, because nobody would notice.

Hugging Face (masking_utils, transformers 5.16-5.24) makes the mask from position_ids alone, wherever
they do not rise by one, if all of this holds:

    attention_mask is None and there is no cache     use_cache=True is the default, also in training,
                                                     and makes documents visible: `forward_options`
    attention is eager, sdpa or flex_attention       flash attention takes no mask, and looks at position_ids
                                                     where a micro-batch is one row
    the model passes position_ids to its mask        gpt-oss, OPT, XGLM do not; Falcon since 5.24
    every layer is attention                         convolutions and recurrences run across

Measured on 2026-11-21 with transformers 5.23, all causal families that could be made tiny, sdpa: in each of
the 92 that pass, another token in one document changed no logit of the others; none that leaks passed.
A module that is not from Hugging Face promises the same by taking position_ids.

Kernels without masks (varlen) are told where documents end, and know those of one row alone. For them `as_row` makes
a micro-batch one, and the padding of each sequence is a document like others:

    position_ids     0 1 2 3 0 1 | 0 0 1 0 1 2      [micro_batch, length], here 2 x 6
                     0 1 2 3 0 1 0 0 1 0 1 2        [1, micro_batch x length]
    cu_seq_lens_q    0 4 6 7 9 12                   int32 [documents + 1], and the same as cu_seq_lens_k
    max_length_q     6                              no document is longer; else every layer asks the device
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError

MASKED = ("eager", "sdpa", "flex_attention")
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


def check_packing(model: nn.Module) -> None:
    """Raise ConfigError where packed documents would see each other."""
    if why := _leak(model):
        raise ConfigError(f"data.packing=true cannot be used: {why}. Set data.packing=false.")


def is_varlen(model: nn.Module) -> bool:
    """Return whether its attention makes no mask, and tells documents apart in a micro-batch of one row alone."""
    config: Any = getattr(inner_model(model), "config", None)
    if not hasattr(config, "_attn_implementation"):
        return False
    return config.get_text_config()._attn_implementation not in MASKED


def row_options(model: nn.Module, length: int) -> dict[str, Any]:
    """Return what training must pass to `model` beside packed documents of at most `length`, which `as_row` reads."""
    return {"max_length_q": length, "max_length_k": length} if is_varlen(model) else {}


def as_row(batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return a packed micro-batch as one row of documents, where `row_options` are among those of its forward."""
    if "max_length_q" not in options or "position_ids" not in batch:
        return batch
    row = {name: values.reshape(1, -1) for name, values in batch.items()}
    ends = document_ends(batch["position_ids"])
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def document_ends(positions: Tensor) -> Tensor:
    """Return where documents of positions [batch, length] end in one row of all, and 0 before: int32 [documents + 1].

    One begins with each sequence, and where positions do not rise by one. Reads the device.
    """
    begins = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([begins.numel()])]).to(torch.int32)


def forward_options(model: nn.Module) -> dict[str, Any]:
    """Return what training must pass to `model` beside the batch: no cache, where it has one."""
    inner = inner_model(model)
    by_config = _takes_more(model) and hasattr(getattr(inner, "config", None), "use_cache")
    caches = "use_cache" in _parameters(model) or by_config
    return {"use_cache": False} if caches else {}


def _leak(model: nn.Module) -> str | None:
    """Say why documents would see each other; None where they do not."""
    name = type(inner_model(model)).__name__
    if "position_ids" not in _parameters(model):
        return f"{name}.forward takes no position_ids, which tell documents apart"
    if is_varlen(model) and not _takes_more(model):
        return f"{name}.forward takes no cu_seq_lens_q, which tells its attention where documents end"
    config: Any = getattr(inner_model(model), "config", None)
    if not hasattr(config, "_attn_implementation"):
        return None
    text = config.get_text_config()
    recurrent = sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION))
    if recurrent or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return f"{name} has layers that run across documents ({', '.join(recurrent) or 'convolutions'})"
    kinds = {type(module) for module in model.modules()}
    verdicts = [verdict for kind in kinds if (verdict := _masks_by_position(kind)) is not None]
    if not verdicts or not all(verdicts):
        return f"{name} does not make its attention mask from position_ids"
    return None


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside a PEFT wrapper, whose own forward takes anything; any other module itself."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner


def _takes_more(model: nn.Module) -> bool:
    """Return whether a forward hands on keywords that it does not name."""
    parameters = inspect.signature(inner_model(model).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(inner_model(model).forward).parameters)


def _masks_by_position(kind: type[nn.Module]) -> bool | None:
    """Return whether all masks that this class's forward makes get position_ids; None if it makes none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    makers = set(MASKS)  # and the local names that one of them was given
    makers |= {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (_names(node.value) - _called(node.value)) & makers
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _names(node.func) & makers]
    if not calls:
        return None
    collected = any(isinstance(node, ast.Constant) and node.value == "position_ids" for node in ast.walk(tree))
    return all(_passes_positions(call, collected) for call in calls)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _called(tree: ast.AST) -> set[str]:
    return {name for node in ast.walk(tree) if isinstance(node, ast.Call) for name in _names(node.func)}


def _passes_positions(call: ast.Call, collected: bool) -> bool:
    """Return whether a call passes position_ids: by name, or in `**options` that were put together before."""
    return any(word.arg == "position_ids" or (word.arg is None and collected) for word in call.keywords)
