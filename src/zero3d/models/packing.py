"""Decides whether a model keeps packed documents apart, and what it is given beside them.

A run is refused where it does not, because nobody would notice: packing_trial.py runs a copy of the model to see it.
Source code gives the reason then, and decides where a copy does not run. Hugging Face (masking_utils, transformers
5.16-5.24) makes the mask from position_ids alone, wherever they do not rise by one, if all of this holds:

    attention_mask is None and there is no cache     use_cache=True is the default, also in training,
                                                     and makes documents visible: `forward_options`
    attention is eager, sdpa or flex_attention       flash attention takes no mask, and looks at position_ids
                                                     where a micro-batch is one row
    the model passes position_ids to its mask        gpt-oss, OPT, XGLM do not; Falcon since 5.24. M-RoPE models
                                                     pass a fourth row of them: `with_position_rows`
    every layer is attention                         convolutions and recurrences run across

Kernels without masks (varlen) are told where documents end, and know those of one row alone. For them `as_row` makes
a micro-batch one, and the padding of each sequence is a document like others:

    position_ids     0 1 2 3 0 1 | 0 0 1 0 1 2      [micro_batch, length], here 2 x 6
                     0 1 2 3 0 1 0 0 1 0 1 2        [1, micro_batch x length]
    cu_seq_lens_q    0 4 6 7 9 12                   int32 [documents + 1], and the same as cu_seq_lens_k
    max_length_q     6                              no document is longer; else every layer asks the device
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.errors import ConfigError
from zero3d.models.document_masks import DocumentMasks
from zero3d.models.fp64 import StaysInFp64
from zero3d.models.mask_code import code_of, masks_by_position, source_of
from zero3d.models.mixing import DOCUMENTS, Mixing, check_kernels, is_told, mixers
from zero3d.models.packed_documents import M_ROPE_ROWS, Documents
from zero3d.models.packing_trial import Leak, Untried, copied, documents, judge

MASKED = ("eager", "sdpa", "flex_attention")
SEEDS = (1, 2)  # of weights in a trial
FOUR_ROWS = "position_ids.shape[0] == 4"  # in the source of a forward that takes them
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


class Verdict(NamedTuple):
    """Says whether a model keeps packed documents apart.

    rows     of positions that it must be given: 1 is [B, L], 4 is [4, B, L]
    leak     why documents would see each other; None where they do not
    remedy   what to do then
    untried  why there was no trial: the others are what source code says
    """

    rows: int = 1
    leak: str | None = None
    remedy: str = "Set data.packing=false."
    untried: str | None = None


Key = tuple[str, frozenset[tuple[type, Any]]]
_found: dict[tuple[Key | None, bool], Verdict] = {}


def check_packing(model: nn.Module, exact: bool = False) -> str | None:
    """Raise ConfigError where packed documents would see each other; return a line where this could not be tried.

    exact  as of `packing_verdict`
    """
    verdict = packing_verdict(model, exact)
    if verdict.leak:
        raise ConfigError(f"data.packing=true cannot be used: {verdict.leak}. {verdict.remedy}")
    if verdict.untried is None:
        return None
    return (
        f"data.packing: that {type(inner_model(model)).__name__} keeps documents of a sequence apart was not tried "
        f"({verdict.untried}), but read from its forward; if you doubt it, set data.packing=false"
    )


def position_rows(model: nn.Module) -> int:
    """Return how many rows of positions a forward must be given beside packed documents: 1, or 4 of M-RoPE models."""
    return packing_verdict(model).rows if _is_m_rope(inner_model(model)) else 1


def packing_verdict(model: nn.Module, exact: bool = False) -> Verdict:
    """Return whether a model keeps packed documents apart, by a trial; of models that are alike there is one.

    In a dry run, whose tensors have no values, source code decides.
    exact  tried in fp64, to the last digits but three: for what is said of a type, which rounding may not hide
    """
    inner = inner_model(model)
    if why := why_at_once(inner):
        return Verdict(leak=why)
    check_kernels(inner)
    key = key_of(inner)
    if (key, exact) in _found:
        return _found[key, exact]
    if isinstance(torch.empty(0), FakeTensor):
        return _by_reading(inner, "in a simulation")
    verdict = _tried(inner, exact)
    if key is not None:
        _found[key, exact] = verdict
    return verdict


def is_varlen(model: nn.Module) -> bool:
    """Return whether its attention makes no mask, and tells documents apart in a micro-batch of one row alone."""
    config: Any = getattr(inner_model(model), "config", None)
    if not hasattr(config, "_attn_implementation"):
        return False
    return config.get_text_config()._attn_implementation not in MASKED


def row_options(model: nn.Module, length: int) -> dict[str, Any]:
    """Return what training must pass to `model` beside packed documents of at most `length`, which `as_row` reads.

    In the place of where they are, which `placed` knows of a batch, there is None.
    """
    options: dict[str, Any] = {"max_length_q": length, "max_length_k": length} if is_varlen(model) else {}
    return options | ({DOCUMENTS: None} if is_told(inner_model(model)) else {})


def tell(*roots: nn.Module, refused: str | None = None, whole: bool = False) -> Mixing | None:
    """Have a model's own convolutions, recurrences and masks told where documents are, where it has such.

    roots    the model, or the chunks of a pipeline that were cut from it
    refused  why packed rows are refused
    whole    the model has such, though perhaps none of these chunks: attention of theirs needs the same documents
    """
    if not whole and not any(map(is_told, roots)):
        return None
    return Mixing(roots, "position_ids" in _parameters(vars(roots[0]).get("_model", roots[0])), refused)


def placed(options: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `row_options` with where the documents of a batch on the host are, so that no device is asked for it."""
    if DOCUMENTS not in options or "position_ids" not in batch:
        return dict(options)
    return {**options, DOCUMENTS: Documents.of(batch["position_ids"])}


def as_row(batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return a packed micro-batch as one row of documents, where `row_options` are among those of its forward."""
    if "max_length_q" not in options or "position_ids" not in batch:
        return batch
    tokens = batch["position_ids"].shape[-2:]

    def one(values: Tensor) -> Tensor:
        by_token = values.shape[-2:] == tokens and values.dim() <= 3  # [4, B, L] of M-RoPE; no pixels
        return values.flatten(-2).unsqueeze(-2) if by_token else values

    row = {name: one(values) for name, values in batch.items()}
    ends = document_ends(batch["position_ids"])
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def document_ends(positions: Tensor) -> Tensor:
    """Return where documents of positions [batch, length] end in one row of all, and 0 before: int32 [documents + 1].

    Of M-RoPE's [4, batch, length] the first are those of the text. One begins with each sequence, and where positions
    do not rise by one. Reads the device.
    """
    positions = positions[0] if positions.dim() == 3 else positions
    begins = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([begins.numel()])]).to(torch.int32)


def with_position_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return a batch with positions [batch, length] as so many rows alike, where a model wants more than one."""
    positions = batch.get("position_ids")
    if rows == 1 or not isinstance(positions, Tensor) or positions.dim() != 2:
        return batch
    return {**batch, "position_ids": positions.expand(rows, *positions.shape)}


def forward_options(model: nn.Module) -> dict[str, Any]:
    """Return what training must pass to `model` beside the batch: no cache, where it or its text model may keep one."""
    config: Any = getattr(inner_model(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    by_config = _takes_more(model) and (hasattr(config, "use_cache") or hasattr(text, "use_cache"))
    caches = "use_cache" in _parameters(model) or by_config
    return {"use_cache": False} if caches else {}


def _tried(model: nn.Module, exact: bool) -> Verdict:
    """Try a model with one block of each kind, and with all where it does not run with so few."""
    for few in (True, False):
        try:
            return _with_blocks(model, few, exact)
        except Exception as error:  # noqa: BLE001 (any error of its own, quoted)
            line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            said = line if isinstance(error, Untried) else f"{type(error).__name__}: {line}"
    return _tried(model, False) if exact else _by_reading(model, said)  # some have fp32 alone


def _with_blocks(model: nn.Module, few: bool, exact: bool) -> Verdict:
    """Try one row of positions, then four where a model may take them; raises what its forward raises.

    A leak shows with any weights: a second draw tells it from a router's tie, which rounding may break either way.
    """
    varlen = is_varlen(model)
    found: Leak | None = None
    for seed in SEEDS:
        dtype = torch.float64 if exact else torch.float32
        with copied(model, varlen, few, seed, dtype) as trial, StaysInFp64() if exact else nullcontext():
            tell(trial)
            for rows in (1, M_ROPE_ROWS) if _is_m_rope(model) else (1,):
                try:
                    leak = judge(trial, given_in_training(trial, varlen, rows), documents(trial), exact)
                except Exception:
                    if rows == 1:
                        raise
                else:
                    if leak is None:
                        return Verdict(rows)
                    found = found or leak
    assert found is not None
    name, read = type(model).__name__, _why_by_reading(model)
    if found.sees_later and not read:
        return Verdict(
            leak=f"in {name}, tokens of text see later ones, in a row of one document too, so that a loss of the next "
            f"token means nothing; and documents of a sequence are not what they are apart ({found.words})",
            remedy="Train it on what its masks are made for, such as images, with data.packing=false.",
        )
    return Verdict(leak=read or f"{name} lets documents see each other ({found.words})")


def given_in_training(model: nn.Module, varlen: bool, rows: int) -> Callable[[Mapping[str, Tensor]], dict[str, Any]]:
    """Return what makes of a row, of one document or packed, what training gives the forward of a model.

    varlen, rows  as `is_varlen` and `position_rows` say
    """
    labels = inspect.signature(model.forward).parameters.get("labels")
    must_have_labels = labels is not None and labels.default is labels.empty
    return partial(_given, forward_options(model), must_have_labels, varlen, rows, DocumentMasks.of(model))


def _given(
    options: Mapping[str, Any],
    must_have_labels: bool,
    varlen: bool,
    rows: int,
    masks: DocumentMasks | None,
    row: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return what training gives a forward of a row."""
    if must_have_labels:
        row = {**row, "labels": row["input_ids"]}
    if varlen and "position_ids" in row:
        longest = row["input_ids"].shape[1]
        row = as_row(row, lengths := {"max_length_q": longest, "max_length_k": longest})
        options = {**options, **lengths}
    given = with_position_rows({**options, **row}, rows)
    return given if masks is None else masks.of_documents(given)


def _by_reading(model: nn.Module, untried: str) -> Verdict:
    """Return what source code says."""
    four = _is_m_rope(model) and any(FOUR_ROWS in source_of(type(module)) for module in model.modules())
    return Verdict(M_ROPE_ROWS if four else 1, _why_by_reading(model), untried=untried)


def _is_m_rope(model: nn.Module) -> bool:
    """Return whether rotary embeddings may be of positions in time, height and width."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    sections = any("mrope_section" in str(getattr(text, name, "")) for name in ("rope_parameters", "rope_scaling"))
    return sections or any(hasattr(type(module), "get_rope_index") for module in model.modules())


def key_of(model: nn.Module) -> Key | None:
    """Return what models that are alike in a trial share; None for one that no configuration describes.

    Beside the configuration these are the classes of modules, and the code of their forwards: some are patched.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return None
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    words = [kind, str(config.get_text_config()._attn_implementation), config.to_json_string(use_diff=False)]
    codes = frozenset((type(module), code_of(module.forward)) for module in model.modules())
    return hashlib.sha256("\n".join(words).encode()).hexdigest(), codes


def why_at_once(model: nn.Module) -> str | None:
    """Return why packing is refused before a trial: no argument tells where documents end, or layers ignore it."""
    name = type(inner_model(model)).__name__
    own = is_told(inner_model(model))  # beside arguments
    if not own and "position_ids" not in _parameters(model):
        return f"{name}.forward takes no position_ids, which tell documents apart"
    if "decoder_input_ids" in _parameters(model):
        return f"{name}.forward makes a second sequence of the labels, where position_ids tell no documents apart"
    if is_varlen(model) and not _takes_more(model):
        return f"{name}.forward takes no cu_seq_lens_q, which tells its attention where documents end"
    config: Any = getattr(inner_model(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    if not own and (others := sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION))):
        return f"{name} has layers that run across documents ({', '.join(others)})"
    return None


def _why_by_reading(model: nn.Module) -> str | None:
    """Return why documents would see each other, read in the model's source code; None where that shows no leak."""
    name = type(inner_model(model)).__name__
    config: Any = getattr(inner_model(model), "config", None)
    if not hasattr(config, "_attn_implementation"):
        return None
    if not mixers(model) and any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return f"{name} has layers that run across documents (convolutions)"
    kinds = {type(module) for module in model.modules()}
    verdicts = [verdict for kind in kinds if (verdict := masks_by_position(kind)) is not None]
    if not is_told(model) and (not verdicts or not all(verdicts)):
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
