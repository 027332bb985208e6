"""Which chunks a schedule needs, and what is said where blocks or micro-batches do not fit."""

import subprocess
import sys

import pytest

from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import SCHEDULES, Schedule
from zero3d.spec.mesh import SCHEDULES as NAMES

FILE = r" \(mesh\.pp(, mesh\.schedule)? in a file\)\.$"


@pytest.mark.parametrize(
    ("schedule", "blocks", "ranks", "text"),
    [
        ("zbv", 4, 4, "'zbv' puts 2 model chunks on each of 4 pipeline stages = 8 chunks, and model.layers has 4 blocks: "
                      "pass pp=2, or schedule='1f1b'"),
        ("zbv", 6, 8, "pass pp=3 or less, or pp=6 or less with schedule='1f1b'"),
        ("interleaved", 3, 2, "= 4 chunks, and model.layers has 3 blocks: pass schedule='1f1b'"),
        ("zero-bubble", 3, 4, "3 blocks: pass pp=3 or less with schedule='1f1b'"),
        ("zbv", 1, 2, "model.layers has 1 block: pass pp=1"),
        ("1f1b", 3, 4, "^pp=4 pipeline stages need a block each, and model.layers has 3: pass pp=3 or less"),
        ("gpipe", 1, 2, "model.layers has 1: pass pp=1"),
    ],
)  # fmt: skip
def test_too_few_blocks_are_told_with_the_arithmetic_and_what_fits(schedule, blocks, ranks, text):
    with pytest.raises(ConfigError, match=text + FILE):
        Schedule.of(schedule).check_blocks(blocks, ranks, "model.layers")


def test_a_file_names_the_schedules_that_there_are():
    assert tuple(SCHEDULES) == NAMES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_for_each_chunk_is_enough(schedule):
    order = Schedule.of(schedule)
    order.check_blocks(3 * order.chunks_per_rank, 3, "layers")
    with pytest.raises(ConfigError):
        order.check_blocks(3 * order.chunks_per_rank - 1, 3, "layers")


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 1), ("interleaved", 5), ("zero-bubble", 7)])
def test_micro_batches_that_do_not_fit_are_told_as_python_and_as_a_file_has_them(schedule, count):
    with pytest.raises(
        ConfigError, match=r"micro-batches \(in a file train\.accumulate = train\.batch / \(train\.micro"
    ):
        Schedule.of(schedule).check(count, 2)


def test_without_a_pipeline_there_is_no_schedule_and_with_one_it_is_1f1b_by_default():
    assert Schedule.requested(1, None, None) == Schedule.requested(2, None, "layers") == Schedule.of("1f1b")
    with pytest.raises(ConfigError, match=r"^schedule='zbv' is for a pipeline, and pp is 1.*leave it out\.$"):
        Schedule.requested(1, "zbv", None)
    with pytest.raises(ConfigError, match=r"^blocks='layers' is for a pipeline"):
        Schedule.requested(1, None, "layers")


def test_what_the_planner_imports_of_pipelines_imports_no_torch():
    names = ("schedules", "balance", "actions", "traffic", "acknowledgements")
    script = f"import {', '.join(f'zero3d.pipeline.{name}' for name in names)}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
