"""Feature: an addition to plain training, as one class with a method for each moment that may concern it.

    the Engine is built    check           refuse what cannot be, before anything is allocated
                           opened          build it where options ask for it, with its states, buffers and hooks
    train_batch            begin           a step begins
                           around          around forward and backward of each of its micro-batches
                           recording       looks at one of them on its way through a pipeline, which takes one such
                           before_update   gradients of all its micro-batches are there
    step                   after_update    the step was applied or skipped
    a step that died       abandoned       its micro-batches are forgotten
    save                   about           what the bits of the run depend on
    load, load_slots       loaded          the engine has other states than before
    any other call         refuse          refuse it where it cannot be now
    the report             scratch         bytes that it borrows in a step
                           traffic         what it sends in a step

Every method does nothing unless a feature overrides it. `features.py` has the rows, and what their order means. To add
a feature: its file, its keyword (options.py, or the section of a file that has it), its row.

Not features are the necessary parts of a step (gradients, the norm, the loss scale, the schedule, recomputed inputs,
states off the device): each takes part in the order of collectives or buffers at more moments than these. Nor are
objects that only one other part asks (a model's frozen originals: `close`; the folder of its frozen base: checkpoints).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

if TYPE_CHECKING:
    from zero3d.account.traffic import Sent
    from zero3d.distributed.mesh import Mesh
    from zero3d.engine.options import Options
    from zero3d.engine.replay.recordings import Again, InStep
    from zero3d.engine.runtime import Runtime
    from zero3d.zero.optimizer import Outcome

    Compute = Callable[[Again], None]  # forward and backward, scaled as in a step, of a micro-batch that is in none


class Feature:
    """Does nothing at any moment.

    name              its name in refusals
    instead_of_it     the option to pass instead, if parameters are frozen after the engine is built; None: they may be
                      frozen
    trains_unfrozen   whether parameters that were frozen when the engine was built may be trained from some step on
    recording         the observer of a micro-batch of this step on its way through a pipeline
    """

    name: ClassVar[str] = ""
    instead_of_it: ClassVar[str | None] = None
    trains_unfrozen: ClassVar[bool] = True
    recording: InStep | None = None

    @classmethod
    def check(cls, model: nn.Module, mesh: Mesh, options: Options) -> None:
        """Refuse options that cannot be, with a ConfigError; nothing is allocated yet."""

    @classmethod
    def opened(cls, parts: Runtime) -> Self | None:
        """Return the feature where options ask for it; all ranks call it. Raises ConfigError."""
        return None

    # --- a step, of train_batch -----------------------------------------------------------------

    def begin(self, step: int, micro_batches: int) -> None:
        """Begin a step, the first, second, ... one to be applied, of so many micro-batches."""

    def around(self, k: int, batch: Any, compute: Compute) -> AbstractContextManager[None]:
        """Return a context for forward and backward of the k-th micro-batch, where there is no pipeline."""
        return nullcontext()

    def before_update(self, compute: Compute) -> None:
        """Look at a step all of whose micro-batches have been through the model."""

    # --- a step, of either call -----------------------------------------------------------------

    def after_update(self, outcome: Outcome) -> None:
        """Follow a step that was applied or skipped, before the loss scale and the schedule do."""

    def abandoned(self) -> None:
        """Forget the micro-batches of a step that is not going to be applied."""

    # --- other calls ----------------------------------------------------------------------------

    def refuse(self, call: str) -> None:
        """Raise ConfigError where this method of the engine cannot be called now."""

    def about(self) -> Mapping[str, Any]:
        """Return what checkpoints note of it, for what the bits of the run depend on."""
        return {}

    def loaded(self) -> None:
        """Go on from the states of a checkpoint, or of slots."""

    @property
    def note(self) -> str | None:
        """Return a line for people about what it cannot do here, or None."""
        return None

    @property
    def scratch(self) -> int:
        """Return the most bytes of buffers that it borrows at once in a step."""
        return 0

    def traffic(self) -> Sequence[Sent]:
        """Return what it sends in an applied step, beside the core's."""
        return ()
