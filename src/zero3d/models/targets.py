"""What a model's own loss is the mean of: how many targets a micro-batch has.

    labels                           a target is                                   of
    [batch, length] of next tokens   one of labels[..., 1:] that is not ignored    causal language models
    [batch, length] of tokens        a label that is not ignored                   masked language models, token
                                                                                   classification, encoder-decoders
    [batch], or numbers              an example                                    classification, rewards, regression
    of several kinds together        an example                                    heads that add losses up
    none, but start_positions        an example whose answer is in the sequence    question answering

Nothing declares which of the first two it is. Of transformers' classes some call their `loss_function`, whose kind
follows from the class's name or from what its constructor says; the others compute a loss themselves, whatever that
function would be (T5's is ForCausalLMLoss); and a module of one's own may do either. So the code is read, from
`forward` on to each function and module that it hands labels to (loss_code.py): targets are next tokens where labels
lose their first one (`labels[..., 1:]`), and tokens where a loss is computed without that. Measured with transformers
5.23: 449 of its classes with a head that could be made tiny, and of each the loss of three rows was theirs apart,
weighed so.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zero3d.models.loss_code import MAYBE, SHIFTED, YES, LossCode, forward_of
from zero3d.models.packing import inner_model

IGNORED = -100  # transformers' label of a position that is no target
AFTER_PROMPTS = ("PREFIX_TUNING", "CARTRIDGE")  # of PEFT's prompts those that are keys and values, not tokens


@dataclass(frozen=True)
class Targets:
    """How a model's loss counts its targets.

    kind      the model's class
    shifts    of labels [batch, length] the first is none; None where the code does not say
    attended  only what `attention_mask` has counts
    takes     which of OPTIONS the functions of its loss take
    labels    entries of a micro-batch with labels of other kinds
    pixels    the label [batch, height, width] of a pixel that is no target
    numbers   labels [batch] are numbers, not classes
    ignored   the label that is no target
    unsure    why the loss may be no mean over the labels that are not ignored; "": it is one
    """

    kind: str
    shifts: bool | None
    attended: bool = False
    takes: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()
    pixels: int = IGNORED
    numbers: bool = False
    ignored: int = IGNORED
    unsure: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> Targets:
        """Read a model's code, before its loss is replaced by that of several ranks or of tiles."""
        inner = inner_model(model)
        code = LossCode()
        found = code.read(forward_of(inner), inner)
        ignored, unsure = IGNORED, list(code.unsure)
        if len(code.ignores) == 1:
            (ignored,) = code.ignores
        elif code.ignores:
            unsure.append(f"its criteria ignore {' and '.join(map(str, sorted(code.ignores)))}")
        config = getattr(inner, "config", None)
        pixels = getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", ignored))
        is_known = found.shifts != MAYBE and (found.shifts == YES or found.computes)
        return cls(
            kind=type(inner).__name__,
            shifts=(found.shifts == YES and not _is_prompted(model)) if is_known else None,
            attended=code.attended,
            takes=frozenset(code.takes),
            labels=frozenset(name for name in _parameters(inner) if "label" in name) - {"labels", SHIFTED},
            pixels=pixels if isinstance(pixels, int) else ignored,
            numbers=getattr(config, "num_labels", None) == 1 or getattr(config, "problem_type", None) == "regression",
            ignored=ignored,
            unsure="; ".join(dict.fromkeys(unsure)),
        )

    @classmethod
    def next_tokens(cls, model: nn.Module) -> Targets:
        """Count next tokens, whatever the model's code does."""
        return cls(type(inner_model(model)).__name__, shifts=True)

    def count(self, batch: Mapping[str, Any], output: Any = None) -> float | Tensor | None:
        """Return the targets of a micro-batch, of which the device is not read; None where nothing says how many."""
        labels = batch.get("labels")
        if labels is None:
            return _answers(batch, output)
        if not isinstance(labels, Tensor):
            return float(len(labels))
        examples = float(len(labels)) if labels.dim() else 1.0
        if any(batch.get(name) is not None for name in self.labels):
            return examples
        if labels.is_floating_point():
            return (labels != IGNORED).sum() if labels.dim() > 2 else examples
        ignored = batch["ignore_index"] if "ignore_index" in batch and "ignore_index" in self.takes else self.ignored
        if self.unsure and not (labels.dim() < 2 and self.numbers):
            self._warn_unsure(ignored)
        if labels.dim() < 2 and not self.shifts:
            return examples if self.numbers else (labels != ignored).sum()
        return self._tokens(labels, batch, self.pixels if labels.dim() == 3 else ignored)

    def _warn_unsure(self, ignored: int) -> None:
        warnings.warn(
            f"{self.kind}'s loss may be no mean over the labels that are not {ignored}, by whose number micro-batches "
            f"are weighed ({self.unsure}). If it is not, pass Engine(loss=lambda output, batch: (output.loss * n, n)) "
            "with the number n that its mean is over, or (output.loss, n) where it is a sum.",
            stacklevel=3,
        )

    def _tokens(self, labels: Tensor, batch: Mapping[str, Any], ignored: int) -> Tensor:
        shifts = self.shifts
        if shifts is None:
            warnings.warn(
                f"{self.kind} computes its loss where zero3d cannot read how, or in several ways: labels are counted "
                "as those of next tokens, labels[..., 1:]. If its mean is over other targets, pass Engine(loss=lambda "
                "output, batch: (output.loss * n, n)) with their number n.",
                stacklevel=2,
            )
            shifts = True
        mask = batch.get("attention_mask") if self.attended else None
        if shifts:
            given = batch.get(SHIFTED) if SHIFTED in self.takes else None
            labels, mask = labels[..., 1:] if given is None else given, None if mask is None else mask[..., 1:]
        counted = labels != ignored
        return (counted if mask is None else counted & (mask != 0)).sum()


def _answers(batch: Mapping[str, Any], output: Any) -> Tensor | None:
    """Return how many examples have their answer in the sequence, whose positions beyond it transformers ignores."""
    starts, scores = batch.get("start_positions"), getattr(output, "start_logits", None)
    if not isinstance(starts, Tensor) or not isinstance(scores, Tensor):
        return None
    return (starts < scores.shape[1]).sum()


def _is_prompted(model: Any) -> bool:
    """Return whether PEFT puts tokens before a sequence, after which its first one is a target, too."""
    config = getattr(model, "active_peft_config", None)
    kind = getattr(getattr(config, "peft_type", None), "value", "")
    return bool(getattr(config, "is_prompt_learning", False)) and kind not in AFTER_PROMPTS


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
