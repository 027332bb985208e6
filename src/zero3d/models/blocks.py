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
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero3d.blueprint.unit import Kind
from zero3d.blueprint.units import Member, group_parameters
from zero3d.distributed.unit_order import ROOT
from zero3d.errors import ConfigError
from zero3d.models.placeholders import Placeholder, kind_of
from zero3d.models.tiles import LookupTile, RowTile
from zero3d.precision import dtype_of, torch_dtype


@dataclass(frozen=True)
class UnitSpec:
    """One unit that is to be built.

    kind      what decides about it: one dtype after the cast, all trainable or all frozen, experts or not
    params    name -> parameter, in model order
    deferred  whether its gradients may come in several parts (`blueprint.units`)
    """

    name: str
    kind: Kind
    params: dict[str, nn.Parameter]
    deferred: bool

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its weights."""
        return torch_dtype(self.kind.dtype)

    @property
    def trainable(self) -> bool:
        """Return whether its parameters get gradients."""
        return self.kind.trainable

    @property
    def experts(self) -> bool:
        """Return whether they are experts [experts, ...], which ep shares out."""
        return self.kind.experts


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
    copied: Collection[nn.Parameter] = (),
) -> tuple[list[UnitSpec], dict[nn.Module, list[str]]]:
    """Divide all parameters into units, in model order, but for the input embeddings, which are first.

    experts  parameters that are in units apart from others of their module
    copied   those that another pipeline stage has, too: each is in a unit by itself

    Returns the units, and by module that uses parameters the names of the units it needs.
    """
    owners: dict[str, nn.Module] = {
        name: m for name, m in model.named_modules() if isinstance(m, (RowTile, LookupTile))
    }
    owners |= find_owners(model, units)  # behind them: the first owner that a name begins with counts
    cast_of, entered = computed_in(model, dtype), _input_embeddings(model)
    members: dict[nn.Parameter, Member[tuple[str, nn.Parameter]]] = {}
    needed: dict[nn.Module, list[nn.Parameter]] = {}
    for module_name, module in model.named_modules():
        owner = next((o for o in owners if module_name == o or module_name.startswith(o + ".")), ROOT)
        for local, p in module.named_parameters(recurse=False):
            name = f"{module_name}.{local}" if module_name else local
            if p in members:
                members[p] = members[p]._replace(tied=True)
            else:
                kind = Kind(dtype_of(cast_of(name, p)), p.requires_grad, p in experts)
                members[p] = Member((name, p), owner, kind, p in entered)
            for user in [owners.get(owner, module)] + ([model] if members[p].owner == ROOT else []):
                needed.setdefault(user, []).append(p)
    for user, p in _used_elsewhere(model, owners):
        members[p] = members[p]._replace(tied=True)
        needed.setdefault(user, []).append(p)
    for p in copied:
        own = members[p]
        if sum((other.owner, other.kind) == (own.owner, own.kind) for other in members.values()) > 1:
            members[p] = own._replace(owner=own.parameter[0], tied=own.tied or own.owner == ROOT)
    found = group_parameters(members.values())
    specs = [UnitSpec(unit.name, unit.kind, dict(unit.parameters), unit.deferred) for unit in found]
    unit_of = {p: number for number, spec in enumerate(specs) for p in spec.params.values()}
    return specs, {
        user: [specs[number].name for number in sorted({unit_of[p] for p in own})] for user, own in needed.items()
    }


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
    """Divide the parameters of all model chunks of this rank into units, as `find_units` does for each.

    Two chunks may both have a root, such as what is left of a tower and of a head: each gets a name of its own.
    """
    specs: list[UnitSpec] = []
    uses: dict[nn.Module, list[str]] = {}
    for number, root in enumerate(roots):
        root_specs, root_uses = find_units(root, units, dtype, experts, _copied(root))
        taken = {spec.name for spec in specs}
        names = {s.name: f"{s.name} of chunk {number}" if s.name in taken else s.name for s in root_specs}
        specs += [replace(spec, name=names[spec.name]) for spec in root_specs]
        uses |= {module: [names[name] for name in used] for module, used in root_uses.items()}
    return specs, uses


def _copied(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a chunk that another one has, too."""
    ends = (
        end for tie in getattr(root, "tied", ()) for end in ((tie.name, tie.chunk), (tie.other_name, tie.other_chunk))
    )
    return [root.get_parameter(name) for name, chunk in ends if chunk == getattr(root, "chunk", None)]


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
