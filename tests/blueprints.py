"""What a unit is under settings that a test names."""

from contextlib import contextmanager

from zero3d.blueprint.policy import Group, Policy, Ranks
from zero3d.blueprint.unit import Kind, decide
from zero3d.distributed.choice import ALL_TO_ALL
from zero3d.spec.dtypes import BY_NAME
from zero3d.spec.offload import Offload
from zero3d.spec.sections import Spec
from zero3d.spec.zero import Zero


def unit_plan(
    stage, ranks=4, *, copies=1, ep=1, experts=None, node=1, dtype=None, trainable=True, precision="bf16",
    algorithm=ALL_TO_ALL, accumulate=1, offload=None, poison=False, **zero,
):  # fmt: skip
    """Of a unit whose weights are cut over so many ranks. ep: that share experts out; dtype: of weights."""
    spec = Spec(Zero(stage, **zero), offload or Offload(), precision=precision, accumulate=accumulate)
    groups = Group(ranks, algorithm), Group(ranks, algorithm), Group(copies, algorithm)
    kind = Kind(BY_NAME[dtype or precision], trainable, ep > 1 if experts is None else experts)
    return decide(kind, Policy.of(spec)._replace(poison=poison), Ranks(*groups, ep, node))


@contextmanager
def poisoned():
    """Engines made inside fill released storages with NaN: an early release shows as a NaN, not by chance."""
    of = Policy.of
    Policy.of = staticmethod(lambda spec: of(spec)._replace(poison=True))
    try:
        yield
    finally:
        Policy.of = of
