"""A model's parameters as the planner knows them: in parts, in the engine's units, with what tp cuts.

    model.embed_tokens      embedding    what runs before the blocks
    model.layers.0, 1 ..    blocks       of a chain; else the longest list of blocks
    model.norm, lm_head     head         what comes after
    model.visual            tower        between embedding and blocks, where a sequence has images (tower.py)

Units are `models.blocks.find_units`'s for a 16-bit run; `tools/plan/rank_model.py` puts them together again for other
runs and for pipelines. A parameter that lies in two parts is a copy in the later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.unit_order import ROOT
from zero3d.errors import ConfigError
from zero3d.expert_parallel.plan import find_experts
from zero3d.models.bases import language_model
from zero3d.models.blocks import find_blocks, find_owners, find_units
from zero3d.models.chain import block_lists
from zero3d.models.images import tower_parameters
from zero3d.models.packing import inner_model
from zero3d.models.quantised import QuantisedLinear
from zero3d.models.quantised_experts import stacks_of
from zero3d.optim.find import find_matrices
from zero3d.optim.matrices import Form
from zero3d.pipeline.split import chain_of
from zero3d.shards.cuts import Cut
from zero3d.tensor_parallel.channel import Channel
from zero3d.tensor_parallel.parallelize import read_styles
from zero3d.tensor_parallel.regions import Regions
from zero3d.tensor_parallel.sequence import cut_blocks
from zero3d.tensor_parallel.styles import StyleContext, apply_style
from zero3d.tensor_parallel.vocabulary import Head
from zero3d.tools.plan.spec import Unit, Weight
from zero3d.train.setup.optimizer import norms_and_biases

RUN = torch.bfloat16


@dataclass(frozen=True)
class PartNames:
    """Names of modules by the part of a model that they are in.

    blocks  names in order
    before  prefixes of what belongs to the embedding part
    chain   whether pipelines can cut the model
    tower   names of a tower's blocks in order, if it counts apart from the embedding
    eyes    names of the tower's parameters; those of them before its blocks
    """

    blocks: tuple[str, ...]
    before: tuple[str, ...]
    chain: bool
    tower: tuple[str, ...] = ()
    eyes: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()

    @property
    def of_tower(self) -> int:
        """Count the tower's parts: what runs before its blocks, these, and what runs behind them."""
        return len(self.tower) + 1 + bool(self.tower) if self.eyes else 0

    def part_of(self, name: str) -> int:
        """Return a parameter's part: 0 the embedding, 1 .. those of a tower, then the blocks, then the head."""
        if name in self.eyes:
            ran = (number for number, block in enumerate(self.tower, 2) if name.startswith(block + "."))
            return next(ran, 1 if name in self.first else self.of_tower)
        for index, block in enumerate(self.blocks, self.of_tower + 1):
            if name.startswith(block + "."):
                return index
        inside = name in self.before or any(name.startswith(module + ".") for module in self.before)
        return 0 if inside else self.of_tower + len(self.blocks) + 1

    def with_tower(self, model: nn.Module, blocks: tuple[str, ...]) -> PartNames:
        """Return the names where the tower with these blocks counts apart."""
        names = list(tower_parameters(model).values())
        before = next((at for at, name in enumerate(names) if any(name.startswith(b + ".") for b in blocks)), 0)
        return replace(self, tower=blocks, eyes=frozenset(names), first=frozenset(names[:before]))


def find_part_names(model: nn.Module, blocks: str | None = None) -> PartNames:
    """Find the parts of a model, with this list of blocks. Raises ConfigError for one without blocks."""
    try:
        if len(block_lists(model, blocks)) > 1:  # no chain without a name; chain_of would run each for its message
            return _longest_list(model)
        chain, _ = chain_of(model, blocks)
    except ConfigError:
        return _longest_list(model)
    names = [f"{chain.blocks}.{key}" for key, _ in model.get_submodule(chain.blocks).named_children()]
    return PartNames(tuple(names), (*chain.before, *chain.loose), True)


def _longest_list(model: nn.Module) -> PartNames:
    """Find the parts of a model that is no chain: the list with the most parameters, and what is registered before.

    Of a vision-language model it is one of its language model's.
    """
    lists: dict[str, list[str]] = {}
    for name in find_blocks(model):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of two or more blocks, which a plan is made of: put its "
            "blocks in an nn.ModuleList."
        )
    language = language_model(model)
    lists = {name: blocks for name, blocks in lists.items() if name.startswith(language)} or lists
    main = max(lists, key=lambda name: sum(p.numel() for p in model.get_submodule(name).parameters()))
    names = list(dict(model.named_modules()))
    first = names.index(main)
    before = [n for n in names[1:first] if not main.startswith(n + ".") and n not in lists[main]]
    return PartNames(tuple(lists[main]), tuple(before), False)


def find_cuts(model: nn.Module) -> dict[nn.Parameter, Cut]:
    """Return how tp would cut each parameter (of degree 1), none if it cannot. Changes the modules: pass a copy."""
    regions = Regions(Channel(Axis("tp", 0, 1), Ledger()), sequence=False)
    try:
        styles = read_styles(model)
        context = StyleContext(model, regions, frozenset(cut_blocks(model, list(styles))), False)
        for name, style in styles.items():
            apply_style(context, name, style, Head(regions, name))
    except ConfigError:
        return {}
    return context.cuts


def units_by_part(model: nn.Module, part_names: PartNames, cuts: Mapping[str, Cut]) -> list[tuple[Unit, ...]]:
    """Return the units of every part. cuts: by parameter name."""
    specs, _ = find_units(model, None, RUN)
    packed: dict[Any, tuple[int, ...]] = {m.packed: m.full for m in model.modules() if isinstance(m, QuantisedLinear)}
    packed |= {
        m._parameters[key]: (len(m.get_parameter(key)), *stack.full.shape)
        for m in model.modules()
        for key, stack in stacks_of(m).items()
    }
    stacked = {layer.module._parameters[key] for layer in find_experts(model) for key in layer.parameters}
    matrices = _matrices(model)
    undecayed = {model.get_parameter(name) for name in norms_and_biases(model)}
    exempt = {p for p in undecayed if p.requires_grad}  # the first group of the optimizer
    count = part_names.of_tower + len(part_names.blocks) + 2
    parts: list[dict[tuple[str, str | None], list[Weight]]] = [{} for _ in range(count)]
    unit_of: dict[nn.Parameter, tuple[str, int, Weight]] = {}
    for spec in specs:
        kept = None if spec.dtype == RUN else spec.dtype.itemsize
        for name, p in spec.params.items():
            cut = cuts.get(name)
            dim, blocks = (None, 1) if cut is None else (cut.dim, cut.even_blocks)
            group = int(bool(exempt) and spec.trainable and p not in exempt)
            form = matrices.get(name)
            of_run = Weight(name, tuple(p.shape), spec.trainable, group, dim, kept, blocks, p in stacked, form)
            weight = replace(of_run, matrix=packed.get(p))
            part = part_names.part_of(name)
            unit_of[p] = spec.name, part, weight
            parts[part].setdefault((spec.name, None), []).append(weight)
    for name, weight, part, unit in _copies(model, part_names, unit_of):
        parts[part].setdefault((name, unit), []).append(weight)
    return [tuple(Unit(name, tuple(weights), copy) for (name, copy), weights in part.items()) for part in parts]


def _matrices(model: nn.Module) -> dict[str, Form]:
    """Return what Muon would take of a model, none where that is nothing."""
    try:
        return find_matrices(model, None, {})
    except ConfigError:
        return {}


def _copies(model: nn.Module, part_names: PartNames, unit_of: Mapping[nn.Parameter, tuple[str, int, Weight]]) -> Any:
    """Yield (unit, weight, part, the owner's unit) of tied parameters in parts that do not own them."""
    owners = find_owners(model, None)
    seen = set()
    for name, p in model.named_parameters(remove_duplicate=False):
        unit, owned, weight = unit_of[p]
        part = part_names.part_of(name)
        if part != owned and (p, part) not in seen:
            seen.add((p, part))
            owner = next((o for o in owners if name.startswith(o + ".")), ROOT)
            yield owner, replace(weight, name=name), part, unit


def config_of(model: nn.Module) -> Any:
    """Return the language model's configuration of a Hugging Face model, None of another."""
    config: Any = getattr(inner_model(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
