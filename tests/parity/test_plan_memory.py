"""The planner's memory against a dry run of the engine: every storage alive, at every instant of a step."""

from functools import cache
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.errors import ConfigError
from zero3d.tools.plan.in_flight import moments
from zero3d.tools.plan.memory import memory
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.live import StorageTracker
from zero3d.tools.sim.model_spec import trace
from zero3d.tools.sim.patches import hear_resizes, without_values

LENGTH = 512


def model_of(tied):
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, tie_word_embeddings=tied, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def spec():
    """tied -> the traced model, each once."""
    return cache(lambda tied: trace(model_of(tied), LENGTH))


class Resized(StorageTracker):
    """A log in which storages are freed and filled in place, too."""

    def __init__(self):
        super().__init__()
        self._sizes = {}

    def resized(self, storage):
        number = self._numbers.get(storage._cdata, -1)
        if number >= 0:
            self.events.append((storage.nbytes() - self._sizes.get(number, self.events[number][0]), number))
            self._sizes[number] = storage.nbytes()

    def _dies(self, key, number, size, reference):
        super()._dies(key, number, self._sizes.get(number, size), reference)


def dry_run(tied, plan):
    """Most bytes alive in the second step of a rank, without data, and those of inputs on the host; stages below 3."""
    if dist.is_initialized():  # another test's, of one process
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=plan.world, store=FakeStore())
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            without_values(packed=False),
            Resized() as live,
            hear_resizes(live.resized),
        ):
            model = model_of(tied)
            recompute(model, plan.activations)
            engine = zero3d.Engine(
                model, stage=plan.zero.stage, mesh=zero3d.Mesh(dp=plan.dp, tp=plan.tp), accumulate=plan.accumulate,
                partition_activations=plan.mesh.partition_activations, offload={"activations": plan.offload.activations},
            )  # fmt: skip
            ids = torch.zeros(plan.micro_batch, LENGTH, dtype=torch.int64)
            for _ in range(2):
                live.mark(f"step {engine.steps}")
                engine.train_batch([{"input_ids": ids, "labels": ids}] * plan.accumulate)
            on_host = sum(entry.measured for entry in engine.memory if entry.category == "activations")
            return max(list(accumulate(size for size, _ in live.events))[live.marks["step 1"] :]), on_host
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("tied", "plan"), [
    (False, ParallelPlan(tp=4, stage=1, micro_batch=4, activations="full", partition_activations=True)),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [
        (True, ParallelPlan(dp=4, stage=1, accumulate=2, activations="full")),
        (False, ParallelPlan(dp=8, stage=2)),
        (True, ParallelPlan(dp=2, stage=0, micro_batch=2)),
        (False, ParallelPlan(dp=4, tp=2, stage=2, activations="selective")),
        (False, ParallelPlan(dp=2, tp=4, stage=1, micro_batch=4, activations="every:2")),
        (False, ParallelPlan(stage=1, micro_batch=4, activations="full", offload_activations="host")),
        (False, ParallelPlan(
            tp=2, micro_batch=4, stage=2, activations="every:2", partition_activations=True, offload_activations="host"
        )),
        (False, ParallelPlan(tp=2, stage=1, micro_batch=4, activations="selective", partition_activations=True)),
        (False, ParallelPlan(stage=1, micro_batch=4, activations="selective", offload_activations="host")),
    ]),
])  # fmt: skip
def test_the_peak_is_that_of_a_dry_run(spec, tied, plan):
    found, (peak, on_host) = memory(spec(tied), plan), dry_run(tied, plan)
    print(f"planned {found.allocated:,.0f}, dry run {peak:,} ({found.allocated / peak - 1:+.1%}), {found.instant}")
    assert 0.97 <= found.allocated / peak <= 1.05
    assert found.on_host.get("inputs", 0) == on_host
    assert (on_host > 0) == (plan.offload.activations == "host")


def test_parts_add_up_and_the_instant_has_a_name(spec):
    found = memory(spec(False), ParallelPlan(dp=2, tp=2, pp=2, stage=1, accumulate=4))
    assert sum(found.parts.values()) == found.allocated
    assert "pipeline stage" in found.instant
    assert found.states < found.allocated < found.reserved < found.device


def test_offloading_moves_the_optimizer_to_the_host(spec):
    here, there = (memory(spec(False), ParallelPlan(dp=4, stage=2, offload=where)) for where in ("none", "host"))
    states = 12 * spec(False).trainable / 4
    assert here.parts["optimizer"] == states
    assert "optimizer" not in there.parts
    assert there.away["host"]["optimizer"] == states
    assert there.host - here.host == 4 * (states + there.away["host"]["padding"])


@pytest.mark.parametrize(("plan", "said"), [
    (ParallelPlan(tp=3), "tp 3 does not divide"),
    (ParallelPlan(pp=8, accumulate=8), "need a block each"),
    (ParallelPlan(pp=2, accumulate=1), "needs a micro-batch for each"),
])  # fmt: skip
def test_what_the_engine_refuses_is_refused(spec, plan, said):
    with pytest.raises(ConfigError, match=said):
        memory(spec(False), plan)


def test_micro_batches_in_flight():
    def most(schedule, stage, pp=4):
        """By chunk of the rank, in order."""
        counts = [moment.in_flight for moment in moments(ParallelPlan(pp=pp, accumulate=8, schedule=schedule), stage)]
        return list(map(max, zip(*counts, strict=True)))

    assert [most("1f1b", stage) for stage in range(4)] == [[4], [3], [2], [1]]
    assert most("gpipe", 2) == [8]
    assert most("zbv", 1) == [7, 2]
    assert most("zbv", 3) == [5, 4]
    assert most("interleaved", 0) == [8, 4]
    assert most("zero-bubble", 3) == [8, 4]
    assert most("1f1b", 0, pp=1) == [1]
