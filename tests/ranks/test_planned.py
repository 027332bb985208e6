"""Plan against actual at step 3 of a run, and the profile that a run leaves. The clock is made up."""

import re
from dataclasses import replace
from itertools import accumulate, chain, repeat
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from training import save_rows, train, tree

from zero3d.account.states import engine_bytes
from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.spec.text import size
from zero3d.tools.advice.plan_check import CHECKED_STEP, PlanCheck, check_line, rates_from
from zero3d.tools.advice.planner import RunPlanner
from zero3d.tools.plan.corrected import corrected, scaled
from zero3d.tools.plan.emit import plan_of
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.model_spec import open_spec
from zero3d.train.progress import Progress
from zero3d.watchdog.heartbeat import Heartbeat

STEPS = (10.0, 0.5, 1.0)  # seconds of the first steps by the clock of a test; later ones take as long as the last
MEASURED = 0.75  # the median of the second and the third
MODEL = gpt(8, 1024, 16, 50304, 1024)
PLAN = ParallelPlan(dp=8, stage=2, micro_batch=16, accumulate=8)


class Unnamed(nn.Module):
    """A model that trains and that no plan can be made of: it has no list of blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def said(made):
    """What a run says on this rank, its steps taking STEPS."""
    lines, waits = [], (wait for seconds in chain(STEPS, repeat(1.0)) for wait in (0.0, seconds))
    ticks = accumulate(waits)  # a step looks at its begin and at its end
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    with (
        mock.patch("zero3d.train.loop.time", clock),
        mock.patch.object(Progress, "say", lambda _, text: lines.append(text)),
    ):
        train(made)
    return lines


def run_of(folder, steps, **sections):
    save_rows(folder / "rows.npy")
    return tree(folder, model={"path": "demo"}, train={"steps": steps}, **sections)


def about_plans(lines):
    return [line for line in lines if "plan" in line]


@pytest.mark.parametrize(("parts", "told"), [
    ({"fixed": 0.02, "dp": 0.01}, "fixed overhead"), ({"rest": 0.2, "fixed": 0.02}, "other kernels"), ({"tp": 1.0}, "tp"),
])  # fmt: skip
def test_the_largest_part_of_the_planned_step_is_told_in_words(parts, told):
    memory = SimpleNamespace(states=1000, allocated=1000)
    estimate = SimpleNamespace(memory=memory, seconds=SimpleNamespace(parts=parts, mid=sum(parts.values())))
    assert check_line(estimate, 1000, 1.0, None, "the data sheet").endswith(f"; largest planned part: {told}")


def test_a_run_says_at_step_three_what_its_plan_was_worth(ranks, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: {name: cpu, flops: 5.0e11}\ninside: {bandwidth: 2.0e+9}\n")
    made = run_of(tmp_path, 3, plan={"cluster": str(file)})
    place, config = cluster("cpu", 2, 1, file), load(made)
    spec, plan = open_spec("demo", config.data.length), plan_of(config, 2)
    estimate = evaluate(spec, place, plan)
    first, second = ranks(2, said, made)
    states = float(engine_bytes(3, 2, "fp32").total) * spec.params
    largest = max(estimate.seconds.parts, key=estimate.seconds.parts.get)
    wanted = (
        f"model states: planned {size(int(estimate.memory.states), True)}, measured {size(int(states), True)} (+0.0 %); "
        f"a step: planned {estimate.seconds.mid:.3g} s by the rates of cluster.yaml (user), measured {MEASURED} s; "
        f"largest planned part: {largest}"
    )
    assert about_plans(first)[0] == wanted
    assert about_plans(second) == []  # the first rank alone makes a plan


def test_ten_steps_leave_a_profile_by_which_the_same_run_is_planned_as_long_as_it_took(ranks, tmp_path):
    made = run_of(tmp_path, 10)
    (line,) = about_plans(ranks(1, said, made)[0])
    assert line.endswith(f"a step: measured {MEASURED} s (a CPU's is planned with plan.cluster alone)")
    file, config = f"{made['output']}/profile.json", load(made)
    place = cluster("cpu", 1, 1, file)
    spec = open_spec("demo", config.data.length, packed=bool(config.data.packing))
    estimate = evaluate(spec, place, plan_of(config, 1))
    assert estimate.seconds.mid == pytest.approx(1.0, rel=1e-6)  # STEPS' last, the median of steps 4 to 10
    calibrated = replace(
        place, provenance=place.provenance | {"gpu.matrix": "measured", "step.fixed": "fitted on 7 runs"}
    )
    assert rates_from(calibrated, "a/cluster.json") == "the rates of cluster.json (measured, fitted on 7 runs)"
    assert re.match(r"fitted on 1 s a step: .*, micro-batch \d+ x \d+, 1 ranks$", place.provenance["gpu.matrix"])
    again = made | {"output": str(tmp_path / "again"), "plan": {"cluster": file}}
    again["train"] = made["train"] | {"steps": 3}
    (told,) = about_plans(ranks(1, said, again)[0])
    assert "a step: planned 1 s by the rates of profile.json (fitted on 1 s a step: " in told


def test_short_runs_and_models_without_a_plan_are_left_in_peace(ranks, tmp_path):
    assert about_plans(ranks(1, said, run_of(tmp_path, 2))[0]) == []
    made = run_of(tmp_path, 2, output=str(tmp_path / "second"), data={"packing": False})
    made["model"] = {"path": f"{__name__}:Unnamed"}
    assert about_plans(ranks(1, said, made)[0]) == []  # nor is it tried
    made = made | {"train": {"steps": 3}, "output": str(tmp_path / "third")}
    (note,) = about_plans(ranks(1, said, made)[0])
    assert note.startswith("no plan to compare this run with: Unnamed has no list of two or more blocks")


def test_all_ranks_check_a_plan_that_the_first_alone_has_for_they_measure_together():
    config, engine = SimpleNamespace(output="out", plan=SimpleNamespace(cluster=None)), SimpleNamespace()
    assert isinstance(RunPlanner().check(config, engine, None, CHECKED_STEP), PlanCheck)
    assert RunPlanner().check(config, engine, None, CHECKED_STEP - 1) is None


def test_a_profile_of_another_machine_is_said_and_not_planned_with(ranks, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text('{"gpu": {"name": "h100"}}')
    (note,) = about_plans(ranks(1, said, run_of(tmp_path, 3, plan={"cluster": str(file)}))[0])
    assert note.startswith("no plan to compare this run with: cluster file ")
    assert note.endswith("describes h100, and this machine has cpu: pass a file of such cards.")


def reserving(made):
    """The records of a run whose device has an allocator."""
    with mock.patch("zero3d.train.loop.reserved_bytes", lambda engine: 1000 + engine.steps):
        return [record.get("reserved_bytes") for record in train(made)]


def test_records_have_what_an_allocator_has_reserved_and_on_the_cpu_nothing(ranks, tmp_path):
    assert ranks(1, reserving, run_of(tmp_path, 2)) == [[1001, 1002]]
    (records,) = ranks(1, train, run_of(tmp_path, 1, output=str(tmp_path / "second")))
    assert "reserved_bytes" not in records[0]


@pytest.mark.parametrize("place", [cluster("a100-80", 8, 1), scaled(cluster("h100", 8, 1), 0.5)])
@pytest.mark.parametrize("times", [0.7, 1.0, 3.0])
def test_a_corrected_cluster_plans_the_step_that_was_measured(place, times):
    planned = evaluate(MODEL, place, PLAN).seconds.mid
    assert evaluate(MODEL, scaled(place, 1.0), PLAN).seconds.mid == pytest.approx(planned)
    found = corrected(MODEL, place, PLAN, times * planned)
    assert evaluate(MODEL, found, PLAN).seconds.mid == pytest.approx(times * planned, rel=1e-6)
    assert found.gpu.matrix / found.gpu.flash == pytest.approx(
        scaled(place, 1.0).gpu.matrix / scaled(place, 1.0).gpu.flash
    )


def test_a_step_that_no_rate_of_products_explains_changes_nothing():
    with pytest.raises(ConfigError, match=r"a step of 0\.001 s is none that rates of products explain"):
        corrected(MODEL, cluster("a100-80", 8, 1), PLAN, 0.001)


def test_a_cluster_file_that_cannot_be_read_is_refused_before_anything_is_written(ranks, tmp_path):
    made = run_of(tmp_path, 10, plan={"cluster": str(tmp_path / "none.json")})
    ((_, error),) = ranks(1, train, made, check=False)
    assert "ConfigError: cluster file" in error
    assert not (tmp_path / "out").exists()


def test_a_rank_that_waits_for_the_memory_of_its_peers_is_silent_for_health_timeout_at_most(tmp_path):
    """As in training. What is between steps, such as a slow disk, may take health.slow_timeout."""
    heartbeat, slow = Heartbeat(None), []

    def exchange(figures):
        slow.append(heartbeat.long_phase)
        return figures[None]

    mesh = SimpleNamespace(device=torch.device("cpu"), heartbeat=heartbeat)
    arena, world = SimpleNamespace(held=lambda category: 0), SimpleNamespace(exchange=exchange)
    engine = SimpleNamespace(mesh=mesh, arena=arena, world=world)
    with heartbeat.phase("between steps"):
        assert list(PlanCheck(load(run_of(tmp_path, 3)), engine, None).lines([{}] * CHECKED_STEP)) == []
        assert heartbeat.long_phase == "between steps"
    assert slow == [""]
