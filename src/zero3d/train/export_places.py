"""Where a run exports to: `hf` has weights for `from_pretrained`, `adapter` an adapter for `PeftModel.from_pretrained`.

checkpoint.export   a model with adapters   the same on new weights   any other
true                adapter                 hf                        hf
adapter             adapter                 adapter                   refused
merged              hf                      hf                        refused
both                hf and adapter          hf and adapter            refused
false               nothing                 nothing                   nothing

New weights, which are made for a run, are in no folder on which somebody could put an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero3d.checkpoint.folders import foreign_entry, put_in_place
from zero3d.errors import ConfigError

HF, ADAPTER = "hf", "adapter"
KINDS = {
    "adapter": (("adapter", ADAPTER),),
    "merged": (("merged", HF),),
    "both": (("merged", HF), ("adapter", ADAPTER)),
}
NAMES = [form for place in (HF, ADAPTER) for form in (place, f".{place}.new", f".{place}.old")]


@dataclass(frozen=True)
class ExportPlace:
    """A folder of a run's output that an export replaces.

    kind   the form that is written there (`checkpoint/forms.py`)
    fresh  where it is written until it is whole
    """

    root: Path
    kind: str
    name: str

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def fresh(self) -> Path:
        return self.root / f".{self.name}.new"

    def refuse(self) -> None:
        """Refuse to replace what no run has exported. Raises ConfigError."""
        if foreign := self.path if self.path.is_symlink() else foreign_entry(self.path):
            raise ConfigError(
                f"{foreign} was not exported by a run and would be replaced: move it, or type checkpoint.export=false."
            )

    def publish(self) -> None:
        """Put the complete export in the place of the one before, which is there until then.

        Raises ConfigError, and what `put_in_place` does.
        """
        self.refuse()
        put_in_place(self.fresh, self.path)


def export_places(root: Path, export: bool | str, adapted: bool, based: bool = True) -> Sequence[ExportPlace]:
    """Return the exports of a run, each with its destination.

    export   as `checkpoint.export` has it
    adapted  whether the model has adapters
    based    whether the weights beside these were there before the run (`has_base`)
    """
    if export is True:
        export = ("adapter" if based else "merged") if adapted else "whole"
    kinds = KINDS.get(str(export), (("whole", HF),)) if export else ()
    return [ExportPlace(root, kind, name) for kind, name in kinds]


def all_places(root: Path) -> Sequence[ExportPlace]:
    """Return every place that some run may have exported to."""
    return [ExportPlace(root, "", name) for name in (HF, ADAPTER)]
