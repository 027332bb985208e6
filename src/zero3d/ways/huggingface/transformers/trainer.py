"""`Trainer`, a subclass of transformers' with our seams, and `patch`, which puts them into transformers' own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import transformers

from zero3d.ways.huggingface.transformers.arguments import without_json
from zero3d.ways.huggingface.transformers.seams import SEAMS, Choice


def _around(original: Callable[..., Any], seam: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is the seam, given the original bound to the object."""

    @functools.wraps(original)
    def method(self: Any, *given: Any, **options: Any) -> Any:
        return seam(functools.partial(original, self), self, *given, **options)

    return method


def _put(owner: type, seams: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Put seams around a class' methods; return what puts the methods back."""
    originals = {name: getattr(owner, name) for name in seams}
    for name, seam in seams.items():
        setattr(owner, name, _around(originals[name], seam))

    def undo() -> None:
        for name, original in originals.items():
            setattr(owner, name, original)

    return undo


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that trains on `zero3d.Engine`: everything else is as there.

    stage    of ZeRO; 3, or what TrainingArguments(deepspeed="ds.json") says
    options  more of `zero3d.Engine`, such as {"offload": {"optimizer": "host"}, "master": "split"}
    gather_for_generation  whether `generate` at stage 3 gathers the whole weights before the first token, or each layer
             for each token; None: as TRL's ds3_gather_for_generation says, or whole ones where every rank has room
    given    transformers' own
    Launched by torchrun, a process per device. Raises ConfigError.
    """

    zero3d = Choice()

    def __init__(
        self,
        *given: Any,
        stage: int | None = None,
        options: Mapping[str, Any] | None = None,
        gather_for_generation: bool | None = None,
        **named: Any,
    ) -> None:
        self.zero3d = Choice(stage, options, gather_for_generation)
        super().__init__(*given, **named)


_put(transformers.TrainingArguments, {"__post_init__": without_json})
_put(Trainer, SEAMS)


def patch(
    stage: int | None = None, options: Mapping[str, Any] | None = None, gather_for_generation: bool | None = None
) -> Callable[[], None]:
    """Have transformers.Trainer and every subclass of it, such as TRL's, train on our engine; return what undoes it.

    stage, options, gather_for_generation  as of `Trainer`
    A second call replaces the choice of the first; one that is refused changes nothing.
    """
    base, choice = transformers.Trainer, Choice(stage, options, gather_for_generation)
    undo: Callable[[], None] | None = getattr(base, "zero3d_undo", None)
    if undo is None:
        put_back = _put(base, SEAMS)

        def undo() -> None:
            if hasattr(base, "zero3d_undo"):
                put_back()
                del base.zero3d, base.zero3d_undo

        base.zero3d_undo = staticmethod(undo)
    base.zero3d = choice
    return undo
