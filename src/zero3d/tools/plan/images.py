"""Images of sequences that are planned: how many patches, where that is known from, and what they take. No torch.

--patches N            N of each sequence
the data of a run      of a sample of its sequences the 99th percentile (tools/sim/file_images.py); seconds by the mean
nothing                one image of 1024 x 1024 pixels, or of the size that a model takes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zero3d.tools.plan.lengths import times_as_much
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, ModelSpec, ParallelPlan, Patches

PLANNED = 0.99  # of sequences have at most as many patches as are planned


class Speed(NamedTuple):
    """Says how long one core of this machine took to decode so many files and to run the processor on them."""

    files: int
    seconds: float


class FileImages(NamedTuple):
    """What a sample of a run's data says of its sequences with images.

    patches        planned, of a sequence
    mean, largest  of the patches of a sequence
    images         of a sequence, on the mean
    records        of the sample; shown: those that have images
    speed          None where no file could be read
    """

    patches: Patches
    mean: float
    largest: int
    images: float
    records: int
    shown: int
    speed: Speed | None

    @property
    def illustrated(self) -> float:
        """Return the share of the sample that has images."""
        return self.shown / self.records

    @property
    def usual(self) -> float:
        """Return the mean patches of all sequences, those without images among them, as a share of the planned ones."""
        return min(1.0, self.mean * self.illustrated / self.patches.number)


def with_mean_patches(evaluate: Evaluate, file: FileImages) -> Evaluate:
    """Return what prices a plan's step by the mean patches of sequences, and its memory by those that are planned."""

    def real(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> Estimate:
        whole, mean = evaluate(model, cluster, plan), evaluate(_with_patches(model, file.usual), cluster, plan)
        return Estimate(whole.memory, mean.seconds, mean.traffic, whole.tokens, mean.flops, whole.notes)

    return real


@lru_cache(maxsize=64)
def _with_patches(model: ModelSpec, share: float) -> ModelSpec:
    """Return a model whose tower works on a share of the patches."""
    parts = (
        replace(part, operations=times_as_much(part.operations, share)) if part.kind == "tower" else part
        for part in model.parts
    )
    return replace(model, parts=tuple(parts), patches=max(1, round(share * model.patches)))


def percentile(values: list[int], share: float = PLANNED) -> int:
    """Return the place of the smallest value that so many of them do not exceed. values: sorted, one at least."""
    return min(len(values) - 1, max(0, -int(-share * len(values) // 1) - 1))


def tower_share(estimate: Estimate) -> float:
    """Return which part of a step a rank works on images."""
    return estimate.seconds.parts.get("tower", 0.0) / estimate.seconds.mid


def cores(estimate: Estimate, plan: ParallelPlan, file: FileImages) -> float | None:
    """Return how many cores prepare the images of a GPU as fast as it takes them; None where that was not measured."""
    if file.speed is None:
        return None
    images = file.illustrated * file.images * plan.rows * plan.accumulate * plan.micro_batch / plan.world
    return images * file.speed.seconds / file.speed.files / estimate.seconds.mid


def lines(
    model: ModelSpec, estimate: Estimate, plan: ParallelPlan, file: FileImages | None, asked: bool, why: str = ""
) -> Iterator[str]:
    """Yield what a reader must know of images in a plan.

    file   of the data, which --patches stands above
    asked  --patches was given
    why    there is no file to read
    """
    if not model.patches:
        if asked:
            yield f"Images: --patches is left out, since {model.name} is planned by its text alone."
        return
    unit = "tiles" if file is not None and file.patches.tiles else "patches"
    if file is not None and not asked:
        yield (
            f"Images: {model.patches:,} patches of a sequence are planned, which {PLANNED:.0%} of those with images "
            f"do not exceed (mean {file.mean:,.1f} {unit}, largest {file.largest:,}; of {file.records:,} records of "
            f"the data, of which {file.illustrated:.0%} have images). A step is priced by the mean of all records."
        )
    elif asked:
        yield f"Images: {model.patches:,} patches of each sequence, by --patches."
    else:
        yield (
            f"Images: {model.patches:,} patches of each sequence, one image: nothing else is known{why}. "
            "--patches N says how many."
        )
    taken = tower_share(estimate)
    share = f"The vision tower takes {taken:.0%} of a step"
    if not taken:
        share = "The vision tower is on another pipeline stage than the one that takes longest"
    needed = None if file is None else cores(estimate, plan, file)
    if file is None or file.speed is None or needed is None:
        yield f"{share}; cores that prepare images are not known: a run's data and its model's processor tell."
        return
    each = file.speed.seconds / file.speed.files
    yield (
        f"{share}; {needed:.1f} cores a GPU prepare its images, {1 / each:,.1f} images/s a core (measured here on "
        f"{file.speed.files} files)."
    )


def as_json(
    model: ModelSpec, estimate: Estimate, plan: ParallelPlan, file: FileImages | None
) -> dict[str, object] | None:
    """Return the same for programs; None where text alone is planned."""
    if not model.patches:
        return None
    told: dict[str, object] = {"patches": model.patches, "tower_share": tower_share(estimate)}
    if file is not None:
        told |= {"mean": file.mean, "largest": file.largest, "records": file.records, "shown": file.shown}
        if file.speed is not None:
            told["images_per_second_and_core"] = file.speed.files / file.speed.seconds
            told["cores_per_gpu"] = cores(estimate, plan, file)
    return told
