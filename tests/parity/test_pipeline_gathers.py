"""Stage 3 in a pipeline: the ledger's gathers are those of the recorded action list, held or released per use."""

from collections import Counter

import pytest
from pipelines import SCHEDULES, build, engine_of, micro_batches

import zero3d
from zero3d.distributed.unit_order import AHEAD
from zero3d.errors import Zero3dError
from zero3d.pipeline.actions import Action
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.traffic import ChunkUnits, pipeline_gathers
from zero3d.zero.unit_parts import State

M, FEWER, EMBEDDING = 3, 2, "embed"


def chunk_units(engine, chunk):
    """The units of a chunk in order of use: Net's are laid out so, but for its norm, which is the root's."""
    own = set(chunk.parameters())
    names = [unit.name for unit in engine.units if own & set(unit.weights.params)]
    used = [name for name in names if name != "root"]
    return ChunkUnits(used, "root" if "root" in names else None, frozenset({EMBEDDING}))


def gathers_of_a_step(schedule):
    """For release per use and per step: (ledger, actions) of two steps, the second of fewer micro-batches; the chunks."""
    steps_by_release = {}
    for release in ("every_use", "every_step"):
        mesh = zero3d.Mesh(pp=2, dp=2)
        engine = engine_of(build("net", 4), mesh, stage=3, release=release, schedule=schedule, reduce="every_step")
        given = micro_batches(0, mesh.place.dp, M)
        engine.train_batch(given)  # the first step is recorded, the next ones gather ahead
        if release == "every_use":
            engine.evaluate(given[:1])  # comes between, and changes no plan; what is held, it would gather
        steps = []
        for count in (M, FEWER):
            engine.traffic.reset()
            engine.train_batch(given[:count])
            ledger = Counter({entry.unit: entry.calls for entry in engine.traffic if entry.op == "all_gather"})
            steps.append((ledger, engine.pipeline.recorded))
        steps_by_release[release] = steps
    return steps_by_release, {number: chunk_units(engine, chunk) for number, chunk in engine.chunks.items()}


@pytest.mark.parametrize("schedule", [
    pytest.param(schedule, marks=pytest.mark.long) if schedule != "zero-bubble" else schedule for schedule in SCHEDULES
])  # fmt: skip
def test_a_step_gathers_what_its_action_list_says(ranks, schedule):
    uses = 3 if Schedule.of(schedule).splits_backward else 2
    for steps_by_release, chunks in ranks(4, gathers_of_a_step, schedule):
        names = [name for units in chunks.values() for name in units.names]
        for release, ((ledger, actions), (shorter, fewer)) in steps_by_release.items():
            assert ledger == pipeline_gathers(actions, chunks, release)
            assert sum((shorter - pipeline_gathers(fewer, chunks, release)).values()) <= AHEAD
        held, per_use = steps_by_release["every_step"][0][0], steps_by_release["every_use"][0][0]
        assert held == Counter(names)
        assert all(M <= per_use[name] <= uses * M for name in names)
        assert max(per_use.values()) > M * (uses - 1)
        assert per_use[EMBEDDING] in (0, (uses - 1) * M)


def left_by_a_failure(schedule):
    """The units still gathered after a step in which the last chunk's second loss failed."""
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=2), stage=3, release="every_use", schedule=schedule)
    for _ in range(2):  # from the second step on units are gathered ahead
        engine.train_batch(micro_batches(0, 0))
    given = micro_batches(0, 0)
    del given[1]["targets"]
    with pytest.raises(Zero3dError, match="KeyError: 'targets'"):
        engine.train_batch(given)
    return [unit.name for unit in engine.units if unit.users or unit.weights.state is not State.SHARDED]


def test_a_step_that_fails_gives_back_what_was_gathered_ahead(ranks):
    assert ranks(2, left_by_a_failure, "1f1b", group_timeout=3.0) == [[], []]


def test_uses_of_what_a_forward_used_last_merge_with_the_backward_after_it():
    last = {1: ChunkUnits(["block", "head"], "norm")}
    alternating = [Action(kind, 1, i) for i in range(3) for kind in "FB"]
    assert pipeline_gathers(alternating, last, "every_use") == {"block": 6, "head": 3, "norm": 3}
    grouped = sorted(alternating, key=lambda action: action.kind, reverse=True)  # F0 F1 F2 B0 B1 B2
    assert pipeline_gathers(grouped, last, "every_use") == {"block": 6, "head": 5, "norm": 5}
    split = [Action(kind, 1, i) for i in range(3) for kind in "FIW"]
    assert pipeline_gathers(split, last, "every_use") == {"block": 9, "head": 6, "norm": 6}
    first = {0: ChunkUnits(["embedding", "block"], None, frozenset({"embedding"}))}
    split = [Action(kind, 0, i) for kind in "FIW" for i in range(3)]
    assert pipeline_gathers(split, first, "every_use") == {"embedding": 6, "block": 5}
    assert pipeline_gathers(split, first, "every_step") == {"embedding": 1, "block": 1}
