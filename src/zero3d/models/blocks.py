"""Which modules form a unit: repeated blocks, embeddings, heads, and the rest in the root.

    model.embed_tokens   an nn.Embedding outside the blocks          own unit
    model.layers.0 ...   children of a list of blocks                one unit each
    lm_head              an nn.Linear outside the blocks             own unit
    model.norm, ...      everything else                             the root unit

Blocks are of one class or, in an nn.ModuleList, of several that are akin: attention and Mamba layers of a hybrid.
Works on any nn.Module; Hugging Face models need no special case but for the names they ask to
keep in fp32. Tied parameters belong to the first unit that names them. A tile (tiles.py) is a unit wherever it is.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from zero3d.blueprint.layout import ROOT
from zero3d.errors import ConfigError
from zero3d.models.placeholders import Placeholder, kind_of
from zero3d.models.tiles import LookupTile, RowTile
from zero3d.precision import NAMES


@dataclass
class UnitSpec:
    """One unit that is to be built.

    params    name -> parameter, in model order; one dtype after the cast, all trainable or all frozen
    users     modules whose forward needs them
    deferred  whether gradients may come one by one: the root unit and units with tied parameters
    experts   whether they are experts [experts, ...], which ep shares out
    """

    name: str
    dtype: torch.dtype
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    users: list[nn.Module] = field(default_factory=list)
    deferred: bool = False
    experts: bool = False

    @property
    def trainable(self) -> bool:
        """Return whether its parameters get gradients."""
        return next(iter(self.params.values())).requires_grad


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the children of every list of two or more modules that are akin, by name.

    Lists inside blocks are left out. Placeholders in a model chunk's list count towards the two, but are no blocks.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(block + ".") for block in blocks):
            continue
        children = list(module.named_children())
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(children) < 2:
            continue
        present = [(key, child) for key, child in children if not isinstance(child, Placeholder)]
        composed = all(next(child.children(), None) is not None and owns(child) for _, child in present)
        if composed and _are_akin(module, [child for _, child in children]):
            blocks |= dict(item for key, child in present for item in _unwrapped(f"{name}.{key}".lstrip("."), child))
    return blocks


def _are_akin(holder: nn.Module, children: Sequence[nn.Module]) -> bool:
    """Return whether a list's modules are blocks: of one class, or the layers of a hybrid.

    Layers of a hybrid: some class comes again, or all have an ancestor beside nn.Module; and each has a matrix, which
    convolutions of images and sounds lack. Modules that are made of blocks, such as encoder and decoder, are none.
    """
    kinds = [kind_of(child) for child in children]
    if len(set(kinds)) == 1:
        return True
    ancestors = set.intersection(*(set(kind.__mro__) for kind in kinds)) - set(nn.Module.__mro__)
    mixed = isinstance(holder, nn.ModuleList) and (len(set(kinds)) < len(kinds) or bool(ancestors))
    return mixed and all(map(_has_matrix, children)) and not _are_made_of_blocks(children)


def _has_matrix(module: nn.Module) -> bool:
    inside = [m for m in module.modules() if not isinstance(m, nn.Embedding)]
    return isinstance(module, Placeholder) or any(p.dim() == 2 for m in inside for p in m.parameters(recurse=False))


def _are_made_of_blocks(modules: Sequence[nn.Module]) -> bool:
    blocks = [block for module in modules for block in find_blocks(module).values()]
    return 2 * _numel(blocks) > _numel(modules)


def _numel(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _unwrapped(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the module, or where it is a mere container its modules: the forward of a container never runs."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [(name, module)] if owns(module) else []
    return [item for key, child in module.named_children() for item in _unwrapped(f"{name}.{key}", child)]


def owns(module: nn.Module) -> bool:
    """Return whether a module has parameters."""
    return next(module.parameters(), None) is not None


def find_owners(model: nn.Module, units: Sequence[type[nn.Module] | str] | None) -> dict[str, nn.Module]:
    """Return the modules that get a unit of their own, by name. `units`: module classes or name patterns."""
    if units is None:
        blocks = find_blocks(model)
        if not blocks:
            return {}
        outside = {
            name: module
            for name, module in model.named_modules()
            if (isinstance(module, nn.Embedding) or type(module) is nn.Linear)
            and not any(name.startswith(b + ".") for b in blocks)
        }
        return blocks | outside
    if not isinstance(units, (list, tuple)):
        raise ConfigError(f"units={units!r}: pass a list of module classes or name patterns, such as [Block, 'head'].")
    owners: dict[str, nn.Module] = {}
    named = dict(model.named_modules())
    for name, module in named.items():
        inside = any(name.startswith(owner + ".") for owner in owners)
        if name and not inside and any(_matches(unit, name, module) for unit in units):
            owners |= dict(_unwrapped(name, module))
    for unit in units:
        if not any(name and _matches(unit, name, module) for name, module in named.items()):
            raise ConfigError(
                f"units={unit if isinstance(unit, str) else unit.__name__!r} matches no module of "
                f"{type(model).__name__}. Name a class or a pattern such as 'model.layers.*'; leave units out and the "
                "repeated blocks are found."
            )
    return owners


def _matches(unit: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    return fnmatch.fnmatchcase(name, unit) if isinstance(unit, str) else issubclass(kind_of(module), unit)


def find_units(
    model: nn.Module,
    units: Sequence[type[nn.Module] | str] | None,
    dtype: torch.dtype,
    experts: Collection[nn.Parameter] = (),
) -> tuple[list[UnitSpec], dict[nn.Module, list[str]]]:
    """Divide all parameters into units, in model order, but for the input embeddings, which are first.

    experts  parameters that are in units apart from others of their module

    Returns the units, and by module that uses parameters the names of the units it needs.
    """
    owners: dict[str, nn.Module] = {
        name: m for name, m in model.named_modules() if isinstance(m, (RowTile, LookupTile))
    }
    owners |= find_owners(model, units)  # behind them: the first owner that a name begins with counts
    cast_of = computed_in(model, dtype)
    specs: dict[_Kind, UnitSpec] = {}
    spec_of: dict[nn.Parameter, UnitSpec] = {}
    uses: dict[nn.Module, list[UnitSpec]] = {}
    for module_name, module in model.named_modules():
        owner = next((o for o in owners if module_name == o or module_name.startswith(o + ".")), ROOT)
        for local, p in module.named_parameters(recurse=False):
            name = f"{module_name}.{local}" if module_name else local
            tied = p in spec_of
            if not tied:
                cast = cast_of(name, p)
                kind = _Kind(owner, p.requires_grad, cast, p in experts)
                spec_of[p] = specs.setdefault(kind, UnitSpec(owner, cast, experts=kind.experts))
                spec_of[p].params[name] = p
            spec = spec_of[p]
            spec.deferred |= tied or owner == ROOT
            for user in [owners.get(owner, module)] + ([model] if spec.name == ROOT else []):
                if spec not in uses.setdefault(user, []):
                    uses[user].append(spec)
    for user, p in _used_elsewhere(model, owners):
        spec_of[p].deferred = True
        if spec_of[p] not in uses.setdefault(user, []):
            uses[user].append(spec_of[p])
    _rename(specs)
    entered = _input_embeddings(model)
    order = sorted(specs.values(), key=lambda spec: entered.isdisjoint(spec.params.values()))
    return order, {user: [s.name for s in sorted(needed, key=order.index)] for user, needed in uses.items()}


def _used_elsewhere(model: nn.Module, owners: Mapping[str, nn.Module]) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield parameters of modules that have several names, each with the module that uses them under another one.

    That is the owner whose forward runs there, such as a second block with the same layer, or the module itself.
    """
    first, whole = {module: name for name, module in model.named_modules()}, set(owners.values())
    for name, module in model.named_modules(remove_duplicate=False):
        if name == first[module]:
            continue
        usual, here = _nearest(model, first[module], whole), _nearest(model, name, whole)
        if usual is not here:
            for p in module.parameters(recurse=False):
                yield here or module, p


def _nearest(model: nn.Module, name: str, owners: Collection[nn.Module]) -> nn.Module | None:
    """Return the outermost owner on the way to a module, or None."""
    module = model
    for part in name.split("."):
        module = module.get_submodule(part)
        if module in owners:
            return module
    return None


def _input_embeddings(model: nn.Module) -> set[nn.Parameter]:
    """Return what token ids are looked up in, where a Hugging Face model says so.

    It is used first and gets its gradients last, also where a vision tower lies before it: reductions follow the order
    of units until one of gradients is known, and the tower's would wait for it.
    """
    try:
        module = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return set()
    return set(module.parameters()) if isinstance(module, nn.Module) else set()


def find_all_units(
    roots: Iterable[nn.Module],
    units: Sequence[type[nn.Module] | str] | None,
    dtype: torch.dtype,
    experts: Collection[nn.Parameter] = (),
) -> tuple[list[UnitSpec], dict[nn.Module, list[str]]]:
    """Divide the parameters of all model chunks of this rank into units, as `find_units` does for each."""
    specs: list[UnitSpec] = []
    uses: dict[nn.Module, list[str]] = {}
    for root in roots:
        root_specs, root_uses = find_units(root, units, dtype, experts)
        specs += root_specs
        uses |= root_uses
    return specs, uses


class _Kind(NamedTuple):
    """What parameters of one unit have in common."""

    owner: str
    trainable: bool
    dtype: torch.dtype
    experts: bool


def _rename(specs: Mapping[_Kind, UnitSpec]) -> None:
    """Name units of one owner by what they differ in: experts or not, trainable or frozen, and the dtype."""
    for kind, spec in specs.items():
        siblings = [other for other in specs if other[:1] + other[3:] == kind[:1] + kind[3:]]
        if kind.experts:
            spec.name = f"{kind.owner}/experts"
        if len(siblings) > 1:
            trained = "trainable" if kind.trainable else "frozen"
            spec.name = f"{spec.name}/{trained}-{NAMES.get(kind.dtype, str(kind.dtype).removeprefix('torch.'))}"


def computed_in(model: nn.Module, dtype: torch.dtype) -> Callable[[str, nn.Parameter], torch.dtype]:
    """Return what tells, of a parameter and its name, the dtype that it gets in an engine of this compute dtype."""
    keep = _kept_in_fp32(model) if dtype in (torch.bfloat16, torch.float16) else ()

    def cast_of(name: str, p: nn.Parameter) -> torch.dtype:
        if not p.dtype.is_floating_point:
            return p.dtype
        return torch.float32 if any(part in name.split(".") for part in keep) else dtype

    return cast_of


def _kept_in_fp32(model: nn.Module) -> tuple[str, ...]:
    names: list[str] = []
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names += list(getattr(model, attribute, None) or ())
    return tuple(names)
