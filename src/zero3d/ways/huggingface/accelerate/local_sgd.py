"""Accelerate's LocalSGD over an engine: its steps are ordinary ones, which ranks take together.

An engine shares optimizer states out, so that every step is of the gradients of all ranks, and weights are alike after
it. There is nothing left to average, and at stage 3 nothing whole to average it in.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.local_sgd import LocalSGD

from zero3d.errors import ConfigError

SAID = (
    "model.no_sync() and LocalSGD: ZeRO shares out optimizer states, so every step has the gradients of all ranks. A "
    "step between two averages of LocalSGD is an ordinary step, and its average changes nothing."
)


def no_sync_of(first: bool) -> Callable[[], Any]:
    """Return a model's `no_sync`, which rank 0 tells about once."""
    told = not first

    @contextmanager
    def no_sync() -> Iterator[None]:
        nonlocal told
        if not told:
            warnings.warn(SAID, stacklevel=3)
        told = True
        yield

    return no_sync


@contextmanager
def join_even(even_batches: bool | None) -> Iterator[None]:
    """Stand for `join_uneven_inputs`: all ranks have equally many batches. Raises ConfigError where they would not."""
    if even_batches is False:
        raise ConfigError(
            "join_uneven_inputs(even_batches=False): ranks share an engine's states, and take every step together. "
            "Leave even_batches out: a prepared loader repeats samples, so that ranks have equally many batches."
        )
    warnings.warn(
        "join_uneven_inputs changes nothing: ranks take every step of an engine together, and a prepared loader "
        "gives them equally many batches.",
        stacklevel=5,
    )
    yield


def leave_alike(of_engine: Callable[[Any], bool]) -> None:
    """Have LocalSGD average no weights of an Accelerator that trains on an engine, as `of_engine` tells."""
    average = LocalSGD._sync_and_avg_model_params
    if hasattr(average, "zero3d"):
        return

    @functools.wraps(average)
    def averaged(self: Any) -> None:
        if of_engine(self.accelerator):
            self.accelerator.wait_for_everyone()
        else:
            average(self)

    averaged.zero3d = True  # type: ignore[attr-defined]
    LocalSGD._sync_and_avg_model_params = averaged
