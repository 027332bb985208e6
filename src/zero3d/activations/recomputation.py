"""What is kept of a model's blocks between forward and backward, and whether they are compiled.

    none        all of it
    full        each block's inputs; its interior is computed again in the backward
    every:K     the input of each segment of K blocks (`segments.py`)
    selective   all but the interior of each block's attention

Called before the Engine is built; the wrappers sit around `forward`, inside the module's hooks:

    block.__call__:  engine's hooks [ recomputation [ torch.compile [ the block's own forward ]]]

So a recomputed block finds its weights gathered and costs no gather of its own (but every:K, whose
earlier blocks of a segment are gathered once more), and compiled code holds no hook. Losses and
gradients equal those of `none` bit for bit, dropout included. Without grad and in eval mode
a wrapper is the plain forward. `activations/policy.py` has the arithmetic.

Selective is Korthikanti et al. 2022, section 5, one step coarser: attention's projections are
recomputed too, which is what can be told from outside a module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero3d.activations.policy import Policy
from zero3d.activations.segments import Recorder
from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks

Blocks = Mapping[str, nn.Module]


def prepare_blocks(
    model: nn.Module, activations: str = "none", compile: str | None = None, blocks: Blocks | None = None
) -> None:
    """`compile_blocks` (compile: a torch.compile backend such as "inductor") and `recompute`, in the right order."""
    if compile is not None:
        compile_blocks(model, blocks, backend=compile)
    recompute(model, activations, blocks)


def recompute(model: nn.Module, policy: str, blocks: Blocks | None = None) -> None:
    """Recompute what `policy` says (none, full, every:K, selective) of the model's blocks.

    blocks   by name; found where left out. Changes their `forward` in place, once per model and
             after `compile_blocks`.
    Errors: an unknown policy, no blocks, no attention in any of them, selective on compiled blocks
    (ConfigError).
    Hugging Face models make a key-value cache unless use_cache=False is passed. Recomputed blocks do not
    get it, since they would write to it twice; one that holds something is refused. Pass use_cache=False
    with every policy: the cache changes strides, and with them the last bits of GPT-2's gradients.
    """
    asked = Policy.of(policy)
    if asked.kind == "none":
        return
    found = _blocks(model, blocks, f"activations={policy}")
    if asked.kind == "selective":
        _refuse_compiled(found)
        found = _attentions(found)
    recorder = Recorder(asked.every or 1)
    for name, module in found.items():
        if isinstance(module.forward, Recomputed):
            raise ConfigError(f"{name} is recomputed already: call recompute() once, with one policy.")
    for name, module in found.items():
        module.forward = Recomputed(name, module, recorder)


def compile_blocks(model: nn.Module, blocks: Blocks | None = None, **options: Any) -> None:
    """torch.compile each block's own forward: blocks of one kind share one graph. Before `recompute`.

    options   of torch.compile, such as backend
    """
    for name, block in _blocks(model, blocks, "compile").items():
        if isinstance(block.forward, Recomputed):
            raise ConfigError(f"{name} is recomputed already: call compile_blocks() first, or prepare_blocks().")
        block.forward = Compiled(block, options)


class Compiled:
    """A module's own forward, compiled."""

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self._module, self._options = module, options
        self._forward = torch.compile(module.forward, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """Of the copied module: a compiled function would go on calling the original."""
        return Compiled(copy.deepcopy(self._module, memo), self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class Recomputed:
    """A module's forward whose interior is dropped, and computed again when the backward needs it."""

    def __init__(self, name: str, module: nn.Module, recorder: Recorder) -> None:
        self._name, self._module, self._recorder = name, module, recorder
        self._forward = module.forward

    @property
    def replaying(self) -> bool:
        """Whether a recomputation is calling the blocks, with the arguments they had behind their hooks."""
        return self._recorder.replaying

    @property
    def every(self) -> int:
        """How many modules of a kind are recomputed together."""
        return self._recorder.length

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.replaying and not (torch.is_grad_enabled() and self._module.training):
            return self._forward(*args, **kwargs)
        args = tuple(self._without_cache(value) for value in args)
        kwargs = {key: self._without_cache(value) for key, value in kwargs.items()}
        return self._recorder(self._name, self._module, self._forward, args, kwargs)

    def _without_cache(self, value: Any) -> Any:
        if not hasattr(value, "get_seq_length"):  # what tells a Hugging Face cache
            return value
        length = int(value.get_seq_length())
        if length > 0:
            raise ConfigError(
                f"{self._name} was given a cache of {length} keys in training, which recomputation would write to "
                "twice: pass use_cache=False, or activations=none."
            )
        return None


def _blocks(model: nn.Module, blocks: Blocks | None, asked: str) -> Blocks:
    found = find_blocks(model) if blocks is None else blocks
    if not found:
        raise ConfigError(
            f"{asked} needs the model's repeated blocks, and {type(model).__name__} has no list of two or more blocks: "
            "pass blocks={'name': module, ...}, or activations=none."
        )
    return found


def _refuse_compiled(blocks: Blocks) -> None:
    """torch.compile would trace attention's recomputation, and its "eager" backend then draws other dropout."""
    for name, block in blocks.items():
        if isinstance(block.forward, Compiled):
            raise ConfigError(
                f"activations=selective recomputes inside {name}, which is compiled as a whole: pass activations=full "
                "or every:K, or do not compile."
            )


def _attentions(blocks: Blocks) -> Blocks:
    """The outermost attention modules of each block, by name. Blocks may lack one, but not all."""
    found = {f"{name}.{inner}": module for name, block in blocks.items() for inner, module in attentions_in(block)}
    if not found:
        name, block = next(iter(blocks.items()))
        parts = ", ".join(dict(block.named_children())) or "no parts"
        raise ConfigError(
            "activations=selective recomputes attention, and no block has a module whose class ends in Attention or "
            f"whose name ends in attn or attention: {name} has {parts}. Pass activations=full or every:K."
        )
    return found


def attentions_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost attention modules inside a block, with their names there."""
    for name, child in module.named_children():
        if type(child).__name__.endswith("Attention") or name.endswith(("attn", "attention")):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", found) for inner, found in attentions_in(child))
