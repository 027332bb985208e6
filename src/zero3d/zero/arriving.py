"""Parameters whose new values are on their way: whatever touches one waits for them first.

When `train_batch` returns, new weights of stages 1 and 2 may still be on their way from their owners. A unit's modules
wait when they are called (hooks.py). Anyone else, a forward that reads another module's matrix or a caller who averages
weights, meets a parameter of this class: each operation on it waits, and is then run on the plain parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zero3d.nested import tensors_in


class ArrivingParameter(nn.Parameter):
    """A parameter in this class until `arrived`; `wait` completes its unit."""

    wait: Callable[[], object]

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Return a plain parameter: a copy's values are there."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Wait for those among the arguments, and call the function again."""
        kwargs = kwargs or {}
        for t in tensors_in((args, kwargs)):
            if type(t) is ArrivingParameter:
                t.wait()
        return func(*args, **kwargs)


def expect(params: Sequence[nn.Parameter], wait: Callable[[], object]) -> bool:
    """Let whatever touches these parameters call `wait` first; false for parameters of a class of their own."""
    if any(type(p) is not nn.Parameter for p in params):
        return False
    for p in params:
        p.__class__ = ArrivingParameter
        p.wait = wait  # type: ignore[attr-defined]
    return True


def arrived(params: Sequence[nn.Parameter]) -> None:
    """Make these plain parameters again."""
    for p in params:
        if type(p) is ArrivingParameter:
            p.__class__ = nn.Parameter
            del p.wait
