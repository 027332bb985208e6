"""From a micro-batch to its loss: the entries that the model is given, and the weight of its output.

    micro-batch --forward--> output --sum_and_weight--> (sum of losses, weight)

Sums over all ranks' micro-batches, in the order that the engine sums in, make the global mean (summation.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.errors import ConfigError, short
from zero3d.models.document_masks import DocumentMasks
from zero3d.models.packing import forward_options, with_position_rows
from zero3d.models.targets import Targets
from zero3d.pipeline.chunks import SumAndWeight
from zero3d.precision import at_least_fp32

Loss = Callable[[Any, Any], SumAndWeight]  # (output, batch) -> what the output weighs

ITEMS = "num_items_in_batch"  # by which transformers' losses divide their sum
SCALES = {ITEMS, "reduction"}  # entries of a micro-batch that make of a mean loss another one


class Losses:
    """Calls a model with micro-batches, and makes sums of losses and weights of its outputs.

    loss     (output, batch) -> (sum, weight), the caller's own; None for the loss in the output itself
    part     makes the batch that `loss` is given of a whole one, where ranks share sequences out
    targets  the number of targets over which the loss in an output is a mean, by the model's code
    rows     of positions that the model is given, where a batch has one (packing.py: `position_rows`)
    masks    those of packed documents with images, of a model whose images attend in both directions
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        targets: Targets,
        part: Callable[[Any], Any] | None = None,
        rows: int = 1,
        masks: DocumentMasks | None = None,
    ) -> None:
        self._loss, self._part = loss, part
        self._masks = masks
        self._targets = targets
        self._takes = _keywords(model)
        self._options, self._rows = forward_options(model), rows

    def checked(self, batch: Any) -> Any:
        """Return a micro-batch without entries that would scale the model's own loss: its mean is weighed here.

        Raises ConfigError where the loss would not be a mean.
        """
        if self._loss is not None or not isinstance(batch, Mapping) or SCALES.isdisjoint(batch):
            return batch
        if batch.get("reduction", "mean") != "mean":
            raise ConfigError(
                f"a micro-batch says reduction={batch['reduction']!r}, and train_batch and evaluate weigh the mean "
                "that a model returns: leave it out, or pass Engine(loss=lambda output, batch: (sum, weight))."
            )
        return {name: value for name, value in batch.items() if name != ITEMS}

    def forward(self, module: nn.Module, batch: Any) -> Any:
        """Call the module: a mapping by name, a list or tuple by position, anything else as the one argument."""
        batch = self.checked(batch)
        if isinstance(batch, Mapping):
            return module(**self._options | self.taken(batch))
        return module(*batch) if isinstance(batch, (list, tuple)) else module(batch)

    def taken(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a mapping that the forward takes: the ones that it names, or all.

        The others are left for `loss`. Positions [B, L] are of as many rows as keep packed documents apart, and with
        images in those there are masks, too.
        """
        taken = {name: value for name, value in batch.items() if self._takes is None or name in self._takes}
        given = with_position_rows(taken, self._rows)
        return given if self._masks is None else self._masks.of_documents(given)

    def sum_and_weight(self, output: Any, batch: Any) -> SumAndWeight:
        """Return the sum of a micro-batch's losses and its weight. Raises ConfigError where neither says it."""
        if self._loss is not None:
            total, weight = self._loss(output, batch if self._part is None else self._part(batch))
            return total, checked_weight(weight)
        if isinstance(output, Tensor) and output.dim() == 0:
            return at_least_fp32(output), 1.0
        loss: Any = getattr(output, "loss", None)
        count = None
        if loss is not None and isinstance(batch, Mapping):
            count = self._targets.count(batch, output)
        if count is None:
            raise ConfigError(
                "train_batch and evaluate need a loss: pass Engine(loss=lambda output, batch: (sum, weight)), or "
                "batches with 'labels' for a model whose output has .loss, or a model that returns its mean loss. "
                "Where output.loss is the mean over n targets of another kind, that is loss=lambda output, batch: "
                "(output.loss * n, n)."
            )
        total = at_least_fp32(loss) * count
        if not isinstance(count, Tensor):
            return total, count
        return torch.where(count > 0, total, 0.0), count  # a mean over no target is NaN, its sum is nothing


def check_loss(call: str, loss: Any) -> None:
    """Raise ConfigError for what is no loss: a tensor of one number."""
    if not isinstance(loss, Tensor):
        if isinstance(loss, Mapping) or hasattr(loss, "loss"):
            remedy = "pass its loss, such as output.loss or output['loss']."
        elif loss is None:
            remedy = "a model returns a loss where it is given labels, or compute one of its output."
        else:
            remedy = "pass the tensor itself, before loss.item()."
        raise ConfigError(f"{call} needs a loss, a tensor of one number, and was given {type(loss).__name__}: {remedy}")
    if loss.numel() != 1:
        raise ConfigError(
            f"{call} needs one number, and the loss has shape {tuple(loss.shape)}: pass loss.mean(), or call "
            "out.backward(gradient=...) yourself."
        )


def checked_weight(weight: Any) -> float | Tensor:
    """Return the weight of a micro-batch. Raises ConfigError if it is none; no device is read for that."""
    if not isinstance(weight, Tensor):
        if not isinstance(weight, Real):
            _refuse_weight(short(repr(weight)))
        return _checked_number(float(weight))
    if weight.numel() != 1 or weight.is_complex():
        _refuse_weight(f"a tensor of shape {tuple(weight.shape)} and dtype {weight.dtype}")
    number: Tensor = weight.detach().double().reshape(())
    if number.device.type == "cpu" and not isinstance(number, FakeTensor):
        on_host: Any = number.tolist()
        _checked_number(on_host)
    return number


def _checked_number(weight: float) -> float:
    if not 0 <= weight < math.inf:
        _refuse_weight(f"{weight:g}")
    return weight


def _refuse_weight(shown: str) -> NoReturn:
    raise ConfigError(
        f"weight={shown}: pass the number of targets of this micro-batch, one finite number that is not negative."
    )


def _keywords(model: nn.Module) -> frozenset[str] | None:
    """Return the keywords that forward() takes; None when it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)
