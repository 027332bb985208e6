"""torch.compile of a model's blocks: each one's own forward, inside the module's hooks and inside recomputation.

    block.__call__:  engine's hooks [ recomputation [ torch.compile [ the block's own forward ]]]

So compiled code holds no hook.

A graph is of one shape. A batch of another one is compiled again, the second time for any length (dynamic shapes),
whose kernels are slower: `CompiledModules.note` says so at the start of a run. After its first step a line says how
many graphs there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zero3d.activations.segments import Recomputed
from zero3d.activations.targets import Blocks, blocks_of
from zero3d.errors import ConfigError, short
from zero3d.models.mixing import mixers
from zero3d.models.wrappers import Compiled, Wrapped

BACKEND = "inductor"
REPLAYED = ("reduce-overhead", "max-autotune")  # modes whose kernels are replayed as CUDA graphs, at fixed addresses


def compile_options(asked: bool | str | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return torch.compile's options of what is asked for: True, a backend's name, or options; None for False.

    Raises ConfigError for CUDA graphs (decision 49).
    """
    if not isinstance(asked, (bool, str, Mapping)):
        raise ConfigError(f"compile={short(repr(asked))}: pass True, a backend's name, or options of torch.compile.")
    options: dict[str, Any] = {"backend": asked if isinstance(asked, str) else BACKEND}
    options |= asked if isinstance(asked, Mapping) else {}
    if options.get("mode") in REPLAYED or (options.get("options") or {}).get("triton.cudagraphs"):
        raise ConfigError(
            f"torch.compile with {options.get('mode') or 'triton.cudagraphs'} replays CUDA graphs, which read weights "
            "at fixed addresses, and gathered weights have others: pass mode='max-autotune-no-cudagraphs', or no mode."
        )
    return options if asked else None


class CompiledModules:
    """Counts the graphs that torch.compile makes while an engine's compiled modules run.

    Graphs of flex_attention count, too, as do those of other compiled models that run meanwhile in this process.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._before = modules, _graphs_made()

    @classmethod
    def of(cls, model: nn.Module) -> CompiledModules | None:
        """Return those of a model; None where there is none."""
        compiled = [module for module in model.modules() if is_compiled(module)]
        return cls(compiled) if compiled else None

    @property
    def graphs(self) -> int:
        """Return how many graphs there are by now: 0 before the first step, which compiles."""
        return max(0, _graphs_made() - self._before)

    @property
    def counted(self) -> str:
        """Return modules and graphs in words."""
        kinds = ", ".join(sorted({type(module).__name__ for module in self._modules}))
        made = f" in {self.graphs} graph{'' if self.graphs == 1 else 's'}" if self.graphs else ""
        return f"compiled: {len(self._modules)} x {kinds}{made}"

    @property
    def note(self) -> str:
        """Return these, and what other shapes cost."""
        mix = sorted({type(mixer).__name__ for module in self._modules for mixer in mixers(module).values()})
        outside = f"; in packed rows convolutions and scans of {', '.join(mix)} run between graphs" if mix else ""
        return (
            f"{self.counted}; a batch of another shape compiles again, the second time for any length, whose kernels "
            f"are slower (dynamic shapes): pack or pad to one length{outside}"
        )


def _graphs_made() -> int:
    """Return how many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters  # takes seconds to import, and is there where something is compiled

    made: int = counters["stats"]["unique_graphs"]
    return made


def compile_blocks(model: nn.Module, blocks: Blocks | None = None, **options: Any) -> None:
    """Compile each block's own forward with torch.compile: blocks of one kind share one graph. Before `recompute`.

    options   of torch.compile, such as backend
    One that is compiled already stays as it is.
    """
    for name, block in blocks_of(model, blocks, "compile").items():
        if isinstance(block.forward, Recomputed):
            raise ConfigError(f"{name} is recomputed already: call compile_blocks() first, or prepare_blocks().")
        compile = partial(torch.compile, **options)
        if isinstance(block.forward, Wrapped):
            block.forward.compile(compile)
        elif not isinstance(block.forward, Compiled):
            block.forward = Compiled(block, compile)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's own forward is compiled, inside recomputation perhaps."""
    forward: Any = module.forward
    while isinstance(forward, (Recomputed, Wrapped)):
        forward = forward.inner
    return isinstance(forward, Compiled)
