"""Sequence parallelism, and dropout that differs between ranks: hooks around cut modules.

    first block        ... in every block: gathered and reduced around attention and MLP ...         last block
    --scatter_to--> norm --[ q k v | attention | o ]--> + --> norm --[ gate up | down ]--> + --gather_from-->

Between `scatter_to` and `gather_from` a rank's hidden state is its slice of the sequence, so norms and all other uncut
parameters there, the biases of rowwise matrices too, get partial gradients.

Dropout: what all ranks hold alike must be dropped alike, what is a rank's own must not be. Without
sequence parallelism own is what lies between the first colwise matrix of a module and its rowwise one;
with it, everything between `scatter_to` and `gather_from`. Inside a colwise module (LoRA) the common
input is dropped, alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from zero3d.activations.segments import Recomputed
from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks
from zero3d.nested import map_tensors
from zero3d.tensor_parallel.regions import RankRandom, Regions
from zero3d.tensor_parallel.styles import StyleContext, change_first

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def cut_blocks(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """Return the repeated blocks that hold one of the modules named, in order."""
    return {
        name: block
        for name, block in find_blocks(model).items()
        if any(inner.startswith(name + ".") for inner in names)
    }


def install_sequence(context: StyleContext) -> None:
    """Scatter sequences at the first block, gather them at the last and around cut matrices.

    Errors: no blocks, blocks in two lists, matrices left whole, experts (ConfigError).
    """
    blocks = cut_blocks(context.model, context.rowwise)
    if not blocks or len({name.rpartition(".")[0] for name in blocks}) > 1:
        raise ConfigError(
            f"sequence_parallel=True needs one list of blocks, but the tensor-parallel plan cuts {len(blocks)} blocks "
            f"of {type(context.model).__name__} that are not in one list: leave sequence_parallel out."
        )
    _check_whole(context, blocks)
    around = dict.fromkeys(name.rpartition(".")[0] for name in context.colwise if _inside(name, blocks))
    for name in around:
        within = any(name.startswith(f"{other}.") for other in around if other not in blocks)  # given the whole there
        if name not in blocks and not within:
            gather = partial(_gather_first, context.regions, name)
            context.model.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
    for block in blocks.values():
        context.partial.update(p for p in block.parameters() if p not in context.cuts)
    random = RankRandom(context.regions.channel.rank)
    (first, start), *_, (last, end) = [*blocks.items(), *blocks.items()]
    start.register_forward_pre_hook(partial(_scatter, context.regions, random, first), with_kwargs=True)
    end.register_forward_hook(partial(_gather_last, context.regions, random, last))


def install_random(context: StyleContext, config: Any) -> None:
    """Let ranks draw numbers of their own between a module's colwise and rowwise matrices, where it drops out."""
    configs = (config, getattr(config, "attn_config", None))  # MPT has a config of its own for attention
    drops = any((getattr(place, name, None) or 0) > 0 for place in configs for name in DROPOUTS)
    randoms: dict[str, RankRandom] = {}
    parents = {name.rpartition(".")[0] for name in context.rowwise}
    for name in context.colwise:
        parent = name.rpartition(".")[0]
        if parent not in parents or parent in randoms:
            continue
        if drops or _drops(context.model.get_submodule(parent)):
            randoms[parent] = RankRandom(context.regions.channel.rank)
            begin = partial(_begin, context.regions, randoms[parent])
            context.model.get_submodule(name).register_forward_pre_hook(begin)
    for name in context.rowwise:
        parent = name.rpartition(".")[0]
        if parent in randoms:
            context.model.get_submodule(name).register_forward_hook(partial(_end, randoms[parent]))
    for name in context.colwise:
        module, owned = context.model.get_submodule(name), name.rpartition(".")[0] in randoms
        if _drops(module):
            random = RankRandom(context.regions.channel.rank)
            module.register_forward_pre_hook(partial(_pause, context.regions, random, name, owned))
            module.register_forward_hook(partial(_resume, random))


def _drops(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())


def _inside(name: str, blocks: dict[str, nn.Module]) -> bool:
    return any(name.startswith(block + ".") for block in blocks)


def _check_whole(context: StyleContext, blocks: dict[str, nn.Module]) -> None:
    """Refuse matrices left whole: on slices only what treats tokens one by one is right. Raises ConfigError."""
    listed = next(iter(blocks)).rpartition(".")[0]
    for name, block in find_blocks(context.model).items():
        for local, p in block.named_parameters():
            if name.rpartition(".")[0] == listed and p.dim() > 1 and p not in context.cuts and p not in context.partial:
                raise ConfigError(
                    f"sequence_parallel=True needs all matrices of the blocks cut, but {name}.{local} "
                    f"{tuple(p.shape)} is whole (a router of experts, or a module that the plan leaves out): leave "
                    "sequence_parallel out, or add it to the plan."
                )


def _replaying(block: nn.Module) -> bool:
    """Return whether a recomputation calls this block: it has recorded what the hook made of its arguments."""
    return isinstance(block.forward, Recomputed) and block.forward.replaying


def _scatter(regions: Regions, random: RankRandom, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
    if not regions.by_sequence or _replaying(block):
        return None

    def scatter(t: Tensor) -> Tensor:
        piece = regions.scatter_to(t, name)
        random.begin(t, block.training)
        return piece

    return change_first(args, kwargs, scatter)


def _gather_last(regions: Regions, random: RankRandom, name: str, block: nn.Module, args: Any, output: Any) -> Any:
    if not regions.by_sequence or _replaying(block):
        return None
    random.end()
    if isinstance(output, tuple):
        return regions.gather_from(output[0], name), *output[1:]
    return map_tensors(output, lambda t: regions.gather_from(t, name))


def _gather_first(regions: Regions, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return change_first(args, kwargs, lambda t: regions.copy_to(t, name)) if regions.by_sequence else None


def _begin(regions: Regions, random: RankRandom, module: nn.Module, args: Any) -> None:
    random.begin(args[0], module.training and not regions.by_sequence)


def _end(random: RankRandom, module: nn.Module, args: Any, output: Any) -> None:
    random.end()


def _pause(regions: Regions, random: RankRandom, name: str, owned: bool, module: nn.Module, args: Any) -> None:
    if module.training and (owned or regions.by_sequence):
        random.pause(args[0].device, name)


def _resume(random: RankRandom, module: nn.Module, args: Any, output: Any) -> None:
    random.resume()
