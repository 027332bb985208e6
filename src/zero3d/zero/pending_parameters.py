"""Parameters whose new values are on their way: operations on one wait for them first.

After `train_batch(wait=False)` new weights of stages 1 and 2 may still be on their way from their owners. A unit's
modules wait when they are called (hooks.py). A read elsewhere, such as a forward's of another module's matrix, meets a
parameter of this class: torch's operations on it wait, and then see the plain parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo

from zero3d.nested import tensors_in


class PendingParameter(nn.Parameter):
    """Is the class of a parameter until it has `arrived`; `wait` completes its unit."""

    wait: Callable[[], object]

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Return a plain parameter: a copy's values are there."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for those among the arguments, and call the function again."""
        kwargs = kwargs or {}
        _wait_for((args, kwargs))
        return func(*args, **kwargs)


@_disable_dynamo
def _wait_for(arguments: Any) -> None:
    for t in tensors_in(arguments):
        if type(t) is PendingParameter:
            t.wait()
            arrived([t])  # one whose unit knows nothing of it, as torch.utils.swap_tensors makes


def expect(params: Sequence[nn.Parameter], wait: Callable[[], object]) -> bool:
    """Let whatever touches these parameters call `wait` first; false for parameters of a class of their own."""
    if any(type(p) is not nn.Parameter for p in params):
        return False
    for p in params:
        p.__class__ = PendingParameter
        p.wait = wait  # type: ignore[attr-defined]
    return True


def arrived(params: Sequence[nn.Parameter]) -> None:
    """Make these plain parameters again."""
    for p in params:
        if type(p) is PendingParameter:
            p.__class__ = nn.Parameter  # type: ignore[assignment]
            del p.wait
