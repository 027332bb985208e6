"""Where in a step an error was raised, read off its callstack: forward, backward, update, and in which module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch import nn

from zero3d.engine.engine import Engine

PHASES = (  # end of a file's path, function (any if empty), phase; the innermost call that is here decides
    ("train/setup/build.py", "", "building the engine"),
    ("engine/assembly.py", "", "building the engine"),
    ("engine/losses.py", "forward", "forward"),
    ("autograd/graph.py", "_engine_run_backward", "backward"),
    ("engine/step.py", "step", "update"),
    ("engine/engine.py", "evaluate", "evaluation"),
    ("checkpoint/save.py", "", "save"),
    ("checkpoint/restore.py", "", "load"),
    ("checkpoint/export.py", "", "export"),
)


def frames_of(error: BaseException) -> list[FrameType]:
    """Return the calls under way when an error was raised, the innermost last."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def doing(frames: Sequence[FrameType], engine: Engine | None) -> str:
    """Return the phase, the module and the line: backward of model.layers.3.mlp (modeling_llama.py:180)."""
    phase = next(filter(None, map(_phase, reversed(frames))), "")
    names = {} if engine is None else {module: name for name, module in engine.module.named_modules()}
    module, line = "", ""
    for frame in frames:
        here = frame.f_locals.get("self")
        if isinstance(here, nn.Module) and names.get(here):
            module = names[here]
        if "/torch/" not in frame.f_code.co_filename:
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    where = f" of {module}" if module and phase else module
    return " ".join(filter(None, (f"{phase}{where}", f"({line})" if line else "")))


def _phase(frame: FrameType) -> str:
    code = frame.f_code
    found = (phase for file, name, phase in PHASES if code.co_filename.endswith(file) and name in ("", code.co_name))
    return next(found, "")
