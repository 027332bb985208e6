"""The parts of an engine, in one flat record that grows while the engine is built.

Each class has all fields of the one before, and the next parts are built of it:

    Resolved     what settings mean for one model on one mesh: precision, groups, schedule       options.py
    Foundation   axes, this rank's share of the model, the order of sums, the blueprint          foundation.py
    Runtime      units, and what gathers, reduces and updates them; features are built of these  runtime.py
    Parts        features, the step, and all else that methods of an engine call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zero3d.activations.compilation import CompiledModules
from zero3d.activations.kept_inputs import KeptInputs
from zero3d.checkpoint.frozen_base import FrozenBase
from zero3d.engine.accounting import Accounts
from zero3d.engine.auto_offload import OffloadChoice
from zero3d.engine.closing import Changes, give_back_optimizer
from zero3d.engine.execution import Execution
from zero3d.engine.feature import Feature
from zero3d.engine.freezing import Freezing
from zero3d.engine.frozen_originals import FrozenOriginals
from zero3d.engine.guards import guard_rest, leave_gradients
from zero3d.engine.registry import Registry
from zero3d.engine.runtime import Runtime
from zero3d.engine.step import Stepper
from zero3d.engine.whole_parameters import WholeParameters
from zero3d.models.kept import Kept
from zero3d.models.targets import Targets

if TYPE_CHECKING:
    from zero3d.pipeline.runner import Pipeline


@dataclass(frozen=True)
class Parts(Runtime):
    """All parts of an engine.

    features   additions to plain training, in the order of their calls
    registry   the parameters, buffers and modules that the model has
    freezing   trains and freezes them between steps
    execution  how micro-batches go through the model; `pipeline` where there is one
    targets    how the model's own loss counts them
    kept_inputs  inputs of recomputed blocks, if they are kept in parts or on the host
    offload    states off the device: the settings with every choice made
    frozen_base  the folder with the values of frozen weights; None without one
    kept       tensors of the model's folder that are not trained and that exports carry on; None without any
    originals  values of frozen parameters in the dtype in which they came
    notes      lines for people about the compute, such as modules in fp8
    compiled   the modules that torch.compile has compiled; None without any
    changes    the engine's changes to the model's modules, to be undone
    """

    features: Sequence[Feature]
    registry: Registry
    freezing: Freezing
    stepper: Stepper
    whole_parameters: WholeParameters
    accounts: Accounts
    pipeline: Pipeline | None
    execution: Execution
    targets: Targets
    kept_inputs: KeptInputs | None
    offload: OffloadChoice
    frozen_base: FrozenBase | None
    kept: Kept | None
    originals: FrozenOriginals
    compiled: CompiledModules | None
    changes: Changes

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The lines of `notes`, and one about compiled modules, with their graphs by now."""
        return (*self.notes, *([] if self.compiled is None else [self.compiled.note]))

    @property
    def has_whole_model(self) -> bool:
        """True where the model is cut over dp alone, not over tp, pp or ep."""
        return not self.mesh.degrees.cuts_model

    def close(self, resized: Mapping[str, Tensor]) -> None:
        """Make the model and the optimizer plain again: parameters have their masters' values, moments are lost.

        resized  values that the caller has given parameters in another shape

        Over tp, pp and ep a rank has parts of the parameters alone: there the model refuses to be used.
        """
        model, full_model = self.changes.model, self.partition.full_model
        slots = [
            (unit, slot.name, p)
            for unit in self.units
            for slot, p in zip(unit.layout.slots, unit.weights.params, strict=True)
        ]
        values = self.whole_parameters.masters(full_model, self.changes.dtypes) if self.has_whole_model else {}
        for name, value in resized.items() if values else ():
            values[full_model.owner(name)] = value.to(self.changes.dtypes[full_model.owner(name)])
        leave_gradients(p for _, _, p in slots)
        if self.sequence is not None:
            self.sequence.close()
        if self.mixing is not None:
            self.mixing.close()
        owned = {full_model.owner(name): p for _, name, p in slots if name not in full_model.tiles}
        made = self.changes.undo(values, owned, {full_model.owner(name) for _, name, p in slots if p.requires_grad})
        updated = {full_model.owner(name) for unit, name, _ in slots if unit.grads is not None}
        groups: list[list[nn.Parameter]] = [[] for _ in range(self.groups.groups)]
        there = set(model.parameters())
        for name, p in made.items() if self.has_whole_model else ():
            if name in updated and p in there:
                groups[self.groups.group(name)].append(p)
        give_back_optimizer(self.optimizer.torch, groups)
        if not self.has_whole_model:
            guard_rest(model, set(), CLOSED_IN_PARTS)


CLOSED_IN_PARTS = (
    "was cut over tp, pp or ep, and the engine that had its parts is closed: load what engine.export(directory) wrote "
    "before, or build the model anew."
)
