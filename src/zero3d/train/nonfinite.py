"""Why a run ends whose steps are not finite: how many it may skip, and the beginning of its last message."""

from __future__ import annotations

from zero3d.config import Health
from zero3d.precision import LossScale

BAD = "had gradients that are NaN or infinite"


def skip_limit(health: Health) -> int:
    """Return the steps in a row that are not finite, the last of which ends a run."""
    return 1 if health.nonfinite == "stop" else health.max_skips


def too_many_skips(health: Health, in_a_row: int, step: int) -> str:
    """Say why a run ends at `step`."""
    if health.nonfinite == "stop":
        return f"step {step} {BAD} (health.nonfinite=stop)."
    return f"{in_a_row} steps in a row {BAD} (health.max_skips={health.max_skips}), up to step {step}."


def none_applied(overflows: int, steps: int, last: int, scale: LossScale) -> str:
    """Say why a session fails that ends at step `last` as it began."""
    which = "of the run" if steps == last else f"from step {last - steps + 1} on"
    skipped = (
        f"all {steps} steps {which} {BAD}"
        if overflows == steps
        else (f"none of the {steps} steps {which} was applied, {overflows} of which {BAD}")
    )
    falls = f"; fp16's loss scale fell to {scale.value:g} by then: give more train.steps or a lower loss_scale.initial"
    return f"{skipped}{falls if scale.can_fall else ''}."
