"""PEFT's prompts in a save: what their encoders compute, which at stage 3 would gather weights on one rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero3d.engine.engine import Engine
from zero3d.models.merge import twin

ENCODERS = "prompt_encoder"  # an attribute of PEFT's models


@contextmanager
def whole_prompts(engine: Engine, model: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Have a model's encoders of prompts, if any, hold whole weights inside, so that a rank may compute them alone.

    weights  the model's, by its names; {} on ranks that write nothing. Without those of encoders nothing changes
    """
    encoders, shapes = getattr(model, ENCODERS, None), engine.full_model.shapes
    names = [name for name in shapes if name.startswith(f"{ENCODERS}.")]
    if encoders is None or (weights and not all(name in weights for name in names)):
        yield
        return
    held = {name: weights[name] if weights else torch.zeros(shapes[name]) for name in names}
    whole = twin(encoders, {name.removeprefix(f"{ENCODERS}."): values for name, values in held.items()})
    model._modules[ENCODERS] = whole.to(engine.mesh.device)
    try:
        yield
    finally:
        model._modules[ENCODERS] = encoders
