"""Weights are whole between steps, as the error advises that a read of a weight at stage 3 raises: tests read them.

A forward, a backward and a step find them cut as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zero3d.engine.engine import Engine
from zero3d.ways.huggingface.accelerate import accelerator
from zero3d.ways.huggingface.accelerate.optimizer import EngineOptimizer


def before_forward(init: Callable[..., None]) -> Callable[..., None]:
    """Cut weights again where a forward begins."""

    @functools.wraps(init)
    def made(self: Engine, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        self.module.register_forward_pre_hook(lambda *_: None if self.closed else self.reshard(), prepend=True)

    return made


def whole_after(method: Callable[..., Any], engine_of: Callable[[Any], Engine | None]) -> Callable[..., Any]:
    """Gather weights behind a method."""

    @functools.wraps(method)
    def called(self: Any, *given: Any, **options: Any) -> Any:
        result = method(self, *given, **options)
        engine = engine_of(self)
        if engine is not None and not engine.closed and engine.stage == 3:
            engine.unshard()
        return result

    return called


Engine.__init__ = before_forward(Engine.__init__)
EngineOptimizer.step = whole_after(EngineOptimizer.step, lambda self: self.engine)
for name in ("prepare", "load_state"):
    method = getattr(accelerator.Accelerator, name)
    setattr(accelerator.Accelerator, name, whole_after(method, lambda self: self.engine))
