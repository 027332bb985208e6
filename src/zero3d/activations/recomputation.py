"""Recomputation: what is kept of a model's blocks between forward and backward, by policy.

    none        all of it
    full        each block's inputs; its interior is computed again in the backward
    every:K     the input of each segment of K blocks (`segments.py`)
    selective   all but the interior of what mixes tokens in each block: attention, recurrences, short convolutions

Called before the Engine is built; the wrappers sit around `forward`, inside the module's hooks:

    block.__call__:  engine's hooks [ recomputation [ torch.compile [ the block's own forward ]]]

So a recomputed block finds its weights gathered and costs no gather of its own (but every:K, whose
earlier blocks of a segment are gathered once more). Losses and gradients equal those of `none` bit
for bit, dropout included. Without grad and in eval mode a wrapper is the plain forward.
`activations/policy.py` has the arithmetic.

Selective is Korthikanti et al. 2022, section 5, one step coarser: attention's projections are recomputed too, since a
wrapper sees a module from outside.
"""

from __future__ import annotations

from torch import nn

from zero3d.activations.compilation import compile_blocks
from zero3d.activations.policy import Policy
from zero3d.activations.segments import Recomputed, Recorder
from zero3d.activations.targets import Blocks, blocks_of, mixers_in
from zero3d.errors import ConfigError
from zero3d.models.wrappers import Compiled, Wrapped


def prepare_blocks(
    model: nn.Module, activations: str = "none", compile: str | None = None, blocks: Blocks | None = None
) -> None:
    """Run `compile_blocks` (compile: a torch.compile backend such as "inductor") and `recompute`, in this order."""
    if compile is not None:
        compile_blocks(model, blocks, backend=compile)
    recompute(model, activations, blocks)


def recompute(model: nn.Module, policy: str, blocks: Blocks | None = None) -> None:
    """Recompute what `policy` says (none, full, every:K, selective) of the model's blocks.

    blocks   by name; found where left out. Changes their `forward` in place, once per model and
             after `compile_blocks`.
    Errors: an unknown policy, no blocks, nothing that mixes tokens in any of them, selective on compiled blocks
    (ConfigError).
    Hugging Face models make a key-value cache unless use_cache=False is passed. Recomputed blocks do not
    get it, since they would write to it twice; one that holds something is refused. Pass use_cache=False
    with every policy: the cache changes strides, and with them the last bits of GPT-2's gradients.
    """
    parsed = Policy.of(policy)
    if parsed.kind == "none":
        return
    modules = blocks_of(model, blocks, f"activations={policy}")
    if parsed.kind == "selective":
        _refuse_compiled(modules)
        modules = _mixers(modules)
    recorder = Recorder(parsed.every or 1)
    for name, module in modules.items():
        if isinstance(module.forward, Recomputed):
            raise ConfigError(f"{name} is recomputed already: call recompute() once, with one policy.")
        if isinstance(module.forward, Wrapped):
            wrapper = type(module.forward.wrappers[0]).__name__
            raise ConfigError(f"{name} is inside torch's {wrapper}: leave that out, or pass activations=none.")
    for name, module in modules.items():
        module.forward = Recomputed(name, module, recorder)


def _refuse_compiled(blocks: Blocks) -> None:
    """Raise ConfigError for compiled blocks.

    torch.compile would trace attention's recomputation, and its "eager" backend then draws other dropout.
    """
    for name, block in blocks.items():
        if isinstance(block.forward, Compiled):
            raise ConfigError(
                f"activations=selective recomputes inside {name}, which is compiled as a whole: pass activations=full "
                "or every:K, or do not compile."
            )


def _mixers(blocks: Blocks) -> Blocks:
    """Return the outermost modules of each block that mix tokens, by name. Raises ConfigError where there is none."""
    mixers = {f"{name}.{inner}": module for name, block in blocks.items() for inner, module in mixers_in(block)}
    if not mixers:
        name, block = next(iter(blocks.items()))
        parts = ", ".join(dict(block.named_children())) or "no parts"
        raise ConfigError(
            "activations=selective recomputes attention and recurrences, and no block has a module whose class ends in "
            "Attention or whose name ends in attn or attention, nor one with a short convolution or a recurrence's "
            f"rates: {name} has {parts}. Pass activations=full or every:K."
        )
    return mixers
