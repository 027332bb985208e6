"""What the outputs of an image processor belong to, found by calling it: one code joins and cuts those of all models.

    call                 pixel_values of     Qwen-VL        InternVL           LLaVA-NeXT         Idefics3
    one image A                              [16, 1176]     [1, 3, 28, 28]     [1, 3, 3, 28, 28]  [1, 1, 3, 28, 28]
    one image B                              [12, 1176]     [4, 3, 28, 28]     [1, 2, 3, 28, 28]  [1, 7, 3, 28, 28]
    a document of both                       [28, 1176]     [5, 3, 28, 28]     [2, 3, 3, 28, 28]  [1, 8, 3, 28, 28]
    two documents, A and B                   [28, 1176]     [5, 3, 28, 28]     [2, 3, 3, 28, 28]  [2, 7, 3, 28, 28]
    a row is of                              PART: a patch  PART: a tile       IMAGE              DOCUMENT

Documents stand one after another in one dimension, nearly always the first. In the others a smaller tensor is filled up
behind. How many parts an image has is what another output says: image_grid_thw, whose numbers are multiplied, or
num_patches. MiniCPM-V has patches in the last dimension, as many as target_sizes of tiles says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

IMAGE, PART, DOCUMENT = "image", "part", "document"
SIZES = (112, 112), (1000, 600)  # of the two images on which a processor is tried: the second is worth several tiles
THIRD = (450, 200)  # of one more, where rows of an image are counted: two numbers may be in proportion by chance
Outputs = Mapping[str, Tensor]


class Rule(NamedTuple):
    """What a row of one output belongs to.

    of      IMAGE, PART of an image (a patch, a tile), or DOCUMENT
    dim     the dimension in which documents stand one after another
    fill    what stands behind a smaller tensor in the other dimensions
    counts  of a PART: the output whose numbers, multiplied in each row, tell how many rows there are; None: images
    per     rows for each of what `counts` counts; 0: nothing tells how many rows an image has
    """

    of: str
    dim: int = 0
    fill: float = 0
    counts: str | None = None
    per: Fraction = Fraction(1)


@dataclass(frozen=True)
class Rules:
    """The rule of each output, by its name. Other names are left out of what is joined and cut."""

    of: Mapping[str, Rule]

    def concatenate(self, outputs: Sequence[Outputs]) -> dict[str, Tensor]:
        """Return the outputs of documents, one after another, as the processor makes them of all documents at once."""
        found = {name: [made[name] for made in outputs if name in made] for name in self.of}
        return {name: _concatenated(some, self.of[name]) for name, some in found.items() if some}

    def split(self, outputs: Outputs, parts: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        """Cut the outputs of documents into parts: micro-batches, or single documents.

        parts  for each part how many images each of its documents has; those without images have no outputs
        What `concatenate` filled up stays. Raises ValueError where the outputs are not those of so many images.
        """
        found: list[dict[str, Tensor]] = [{} for _ in parts]
        for name in sorted(self.of.keys() & outputs.keys()):
            rows, dim = self._rows(name, outputs, parts), self.of[name].dim
            if sum(rows) != outputs[name].shape[dim]:
                raise ValueError(f"{name} has {outputs[name].shape[dim]} rows, and these documents have {sum(rows)}")
            for part, cut in zip(found, outputs[name].split_with_sizes(rows, dim), strict=True):
                part[name] = cut
        return [part if any(images) else {} for part, images in zip(found, parts, strict=True)]

    def _rows(self, name: str, outputs: Outputs, parts: Sequence[Sequence[int]]) -> list[int]:
        """Return how many rows of an output each part has."""
        rule = self.of[name]
        if rule.of == DOCUMENT:
            return [sum(map(bool, part)) for part in parts]
        if not rule.per or (rule.counts and rule.counts not in outputs):
            raise ValueError(f"nothing tells how many rows of {name} an image has")
        if rule.counts is None:
            return [int(sum(part) * rule.per) for part in parts]
        counts, told = _counts(outputs[rule.counts]), self._rows(rule.counts, outputs, parts)
        return [int(sum(counts[first:last]) * rule.per) for first, last in pairwise(accumulate(told, initial=0))]


class _Tried(NamedTuple):
    """What a processor made of one image, of another, of a document of both, and of two documents."""

    first: Mapping[str, Any]
    second: Mapping[str, Any]
    together: Mapping[str, Any]
    apart: Mapping[str, Any]


def find_rules(process: Callable[[list[list[Any]]], Mapping[str, Any]], names: Iterable[str]) -> Rules:
    """Call a processor on two images, apart and together, and return the rules of those of its outputs.

    process  documents, each a list of images -> outputs
    names    of the outputs that are wanted
    Raises ValueError for an output that is not one document after another.
    """
    one, other = (_noise(size) for size in SIZES)
    tried = _Tried(*(process(documents) for documents in ([[one]], [[other]], [[one, other]], [[one], [other]])))
    wanted = tried.apart.keys() & set(names)
    rules: dict[str, Rule] = {}
    for name in sorted(tried.apart.keys()):
        try:
            rules[name] = _rule(name, tried)
        except ValueError:
            if name in wanted:
                raise
    if not all(rule.per for rule in rules.values()):
        alone = tried.first, tried.second, process([[_noise(THIRD)]])
        for _ in rules:  # what counts may be counted itself
            counted = {name: _counted(name, rule, rules, tried, alone) for name, rule in rules.items() if not rule.per}
            rules |= counted
    needed = wanted
    while more := {counts for name in needed if (counts := rules[name].counts)} - needed:
        needed = needed | more
    return Rules({name: rules[name] for name in sorted(needed)})


def _noise(size: tuple[int, int]) -> Any:
    """Return an image of which no two pieces are alike: a piece in the wrong place is seen."""
    from PIL import Image

    width, height = size
    drawn = numpy.random.default_rng(0).integers(0, 255, (height, width, 3), numpy.uint8)
    return Image.fromarray(drawn)


def _rule(name: str, tried: _Tried) -> Rule:
    """Return an output's rule, of a PART without what counts it. Raises ValueError where it has none."""
    tensors: list[Any] = [made[name] for made in tried if name in made]
    if not all(isinstance(each, Tensor) for each in tensors):
        raise ValueError(f"{name} of images of two sizes is not one tensor")
    *_, apart = tensors
    for dim in range(apart.dim()):
        fill = _fill([made[name] for made in tried[:2] if name in made], apart, dim)
        if fill is None:
            continue
        rows = [_length(made, name, dim) for made in tried[:3]]
        if rows[:2] == [1, 1]:
            return Rule(DOCUMENT if rows[2] == 1 else IMAGE, dim, fill)
        return Rule(PART, dim, fill, None, Fraction(0))
    shapes = ", ".join(str(list(each.shape)) for each in tensors)
    raise ValueError(
        f"{name} of one image, of another, of both in one document and in two is {shapes}: the last is not the first "
        "with the second behind it"
    )


def _length(made: Mapping[str, Any], name: str, dim: int) -> int:
    """Return how long an output is; 0 where a small image has none, as of tiles."""
    return int(made[name].shape[dim]) if name in made else 0


def _counted(
    name: str, rule: Rule, rules: Mapping[str, Rule], tried: _Tried, alone: Sequence[Mapping[str, Any]]
) -> Rule:
    """Return the rule of a PART with the output that counts it, where there is one or all images have as many.

    alone  what the processor made of three images, one by one
    """
    rows = [_length(made, name, rule.dim) for made in alone]
    for other, of_other in rules.items():
        if of_other.of == DOCUMENT or not of_other.per:
            continue
        sums = [sum(_counts(made[other])) if other in made else 0 for made in alone]
        per = Fraction(rows[1], sums[1]) if sums[1] else Fraction(0)
        if per and rows == [per * count for count in sums]:
            return rule._replace(counts=other, per=per)
    alike = len(set(rows)) == 1 and _length(tried.together, name, rule.dim) == 2 * rows[0]
    return rule._replace(per=Fraction(rows[0])) if alike else rule


def _counts(value: Tensor) -> list[int]:
    """Return the product of each row's numbers; nothing where they are no whole numbers."""
    if value.is_floating_point() or value.dim() not in (1, 2):
        return []
    return [int(row.prod()) for row in value]


def _fill(alone: Sequence[Tensor], both: Tensor, dim: int) -> float | None:
    """Return what `both` has behind the smaller of two tensors; None where it is not the one after the other."""
    if len({each.dim() for each in (*alone, both)}) > 1:
        return None
    filled = _concatenated([torch.ones_like(each, dtype=torch.bool) for each in alone], Rule(IMAGE, dim))
    if filled.shape != both.shape:
        return None
    behind = both[~filled]
    fill = behind[0].item() if len(behind) else 0
    return fill if _concatenated(alone, Rule(IMAGE, dim, fill)).equal(both) else None


def _concatenated(tensors: Sequence[Tensor], rule: Rule) -> Tensor:
    """Return tensors one after another in the rule's dimension, the smaller ones filled up behind in the others."""
    sizes = [max(lengths) for lengths in zip(*(each.shape for each in tensors), strict=True)]

    def whole(tensor: Tensor) -> Tensor:
        missing = [size - length for size, length in zip(sizes, tensor.shape, strict=True)]
        missing[rule.dim] = 0
        ends = [end for more in reversed(missing) for end in (0, more)]
        return pad(tensor, ends, value=rule.fill) if any(missing) else tensor

    return torch.cat([whole(each) for each in tensors], rule.dim)
