"""Puts the sections of a run into one record, and each setting into the section that declares it. No torch.

as in a file         keyword of a plan   keyword of an Engine   field of the record
zero.stage           stage               stage                  zero.stage
offload.optimizer    offload             -                      offload.optimizer, whose declaration says the keyword
offload              -                   offload                offload, whole
zero.gather_budget   -                   gather_budget          zero.gather_budget, which no plan prices, as its
                                                                declaration says
optimizer.name       optimizer           optimizer              optimizer: it has no section here
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from zero3d.errors import ConfigError, short
from zero3d.spec.declaring import KEYWORDS
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import OPTIMIZERS, OptimizerRow
from zero3d.spec.zero import Zero

SECTIONS: Mapping[str, type[Zero | Offload | Mesh]] = {"zero": Zero, "offload": Offload, "mesh": Mesh}
Section = TypeVar("Section", Zero, Offload, Mesh)
Place = tuple[str, str]  # of a setting in a record: a field, and a key of the section that the field is, or ""
Keywords = Mapping[str, Place]


@dataclass(frozen=True)
class Spec:
    """Has the settings that rules are about; degrees that are not known yet are None, and count as 1.

    autocast     the forward runs in torch's autocast
    activations  recomputation, None where it is not known
    optimizer    the name of its row; None for a builder of one's own
    accumulate   micro-batches of a rank and step; 1 where it is not known
    linear       fp8 where linear layers multiply in it
    quantize     the format of frozen linear layers
    """

    zero: Zero = field(default_factory=Zero)
    offload: Offload = field(default_factory=Offload)
    mesh: Mesh = field(default_factory=Mesh)
    precision: str = "bf16"
    autocast: bool = False
    activations: str | None = None
    optimizer: str | None = None
    accumulate: int = 1
    ema: float | None = None
    replay: int = 0
    linear: str | None = None
    quantize: str | None = None

    @property
    def dp(self) -> int:
        """Return the data-parallel degree."""
        return 1 if self.mesh.dp is None else self.mesh.dp

    @property
    def tp(self) -> int:
        """Return the tensor-parallel degree."""
        return 1 if self.mesh.tp is None else self.mesh.tp

    @property
    def pp(self) -> int:
        """Return the pipeline-parallel degree."""
        return 1 if self.mesh.pp is None else self.mesh.pp

    @property
    def ep(self) -> int:
        """Return how many neighbours on dp share the experts out."""
        return 1 if self.mesh.ep is None else self.mesh.ep

    @property
    def sp(self) -> int:
        """Return how many neighbours on dp have a part of each sequence."""
        return 1 if self.mesh.sp is None else self.mesh.sp

    @property
    def shard(self) -> int:
        """Return over how many neighbours on dp states are cut: all of dp where that is left out."""
        return self.dp if self.mesh.shard is None else self.mesh.shard

    @property
    def row(self) -> OptimizerRow | None:
        """Return what is known of the optimizer; None of a builder of one's own."""
        return OPTIMIZERS.get(self.optimizer or "")

    @property
    def coded(self) -> bool:
        """Return whether the optimizer's states are codes of 8 bits."""
        return self.row is not None and self.row.coded

    @property
    def orthogonal(self) -> bool:
        """Return whether the optimizer makes matrices orthogonal, which travel in the gradients' place."""
        return self.row is not None and self.row.orthogonal


def keywords(spec: type[Spec]) -> Keywords:
    """Return the keywords of a plan that is such a record: for each the field, and the key of a section (or "")."""
    found: dict[str, Place] = {}
    for each in fields(spec):
        for key in fields(SECTIONS[each.name]) if each.name in SECTIONS else ():
            in_plan = key.metadata["in_plan"]
            if in_plan:
                name = key.name if in_plan is True else in_plan
                assert name not in found, f"two keys are {name!r} in a plan"
                found[name] = each.name, key.name
        if each.name not in SECTIONS:
            found[each.name] = each.name, ""
    return found


def by_section(settings: Iterable[tuple[Place, Any]], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by field: keys change the section that is given beside them, or else that of `now`."""
    found: dict[str, Any] = {}
    changed: dict[str, dict[str, Any]] = {}
    for (name, key), value in settings:
        if key:
            changed.setdefault(name, {})[key] = value
        else:
            found[name] = value
    return found | {name: replace(found.get(name, now[name]), **keys) for name, keys in changed.items()}


def placed(settings: Mapping[str, Any], known: Keywords) -> Iterator[tuple[Place, Any]]:
    """Yield the settings of a plan, each with its place.

    settings  fields, sections whole, and keys of sections as keywords or as in a file
    known     `keywords`

    Raises ConfigError for what a plan does not have.
    """
    for name, value in settings.items():
        if name in SECTIONS and isinstance(value, SECTIONS[name]):
            yield (name, ""), value
            continue
        place = known[name] if name in known else _as_in_a_file(name, known)
        if not isinstance(value, (str, int, float)) and isinstance(value, Mapping):
            raise ConfigError(
                f"{name}={short(value)!r} is a mapping: pass a zero3d.spec record, or each key by itself."
            )
        yield place, value


def _as_in_a_file(name: str, known: Keywords) -> Place:
    section, _, last = name.rpartition(".")
    keyword = KEYWORDS.get(name, last)
    if section in SECTIONS and (section, last) in known.values():
        return section, last
    if section and section not in SECTIONS and known.get(keyword, ("", "-"))[1] == "":
        return known[keyword]
    names = [*known, *(f"{section}.{key}" for section, key in known.values() if key)]
    near = get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"a plan has no setting {short(name)!r}: it has {', '.join(known)}.{hint}")


def planned(section: Section) -> Section:
    """Return a section with what a plan prices alone: its other keys have their defaults."""
    rest: dict[str, Any] = {key.name: key.default for key in fields(section) if not key.metadata["in_plan"]}
    return replace(section, **rest)
